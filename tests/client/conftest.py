"""A driver, a daemon stand-in that grants and revokes by script, and a program that does what it is told."""

from __future__ import annotations

import array
import contextlib
import fcntl
import mmap
import os
import select
import shlex
import signal
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from shared import put

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
MAGIC, VERSION = 0x75706763, 1
SLOTS, CTL, REPORT, SLOT = 512, 4096, 4096 + 512 * 256, 256
WAIT = 10.0
FIELDS = {"gen": (0, "<I"), "pid": (4, "<I"), "opened": (64, "<Q"), "acked": (72, "<Q"), "drained": (80, "<Q"),
          "idle": (88, "<Q"), "demand": (96, "<I"), "inflight": (104, "<Q"), "end": (120, "<Q"), "mem": (128, "<Q"),
          "launches": (192, "<Q"), "ungated": (200, "<Q"), "length": (216, "<Q"), "dirty": (224, "<Q"),
          "away": (232, "<Q")}
F_ADD_SEALS, F_SEAL_FUTURE_WRITE, F_SEAL_SHRINK, F_SEAL_GROW = 1033, 16, 2, 4


def compile_c(out: Path, *args: str) -> Path:
    """Compiles with the flags of build_ffi.py that matter here."""
    flags = ["-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-U_FORTIFY_SOURCE", "-Icsrc/abi", "-Icsrc/gate",
             "-Icsrc/client", "-Icsrc/hook"]
    subprocess.run([*shlex.split(os.environ.get("CC", "gcc")), *flags, "-o", str(out), *args], check=True, cwd=ROOT)
    return out


@pytest.fixture(scope="session")
def client_build(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``bare``, ``hooked``: library folders; ``steps``, ``busy``, ``overhead``, ``litmus``: programs."""
    from cgpusched.driver.find import Driver
    from cgpusched.driver.proxy import install_proxies

    base = tmp_path_factory.mktemp("client")
    bare, hooked, tables = base / "bare", base / "hooked", base / "generated"
    for folder in (bare, hooked, tables):
        folder.mkdir()
    shared = ["-fPIC", "-shared", "-fvisibility=hidden"]
    cuda = compile_c(bare / "libcuda.so.1", "tests/client/fakecuda.c", *shared, "-Wl,-Bsymbolic,-soname,libcuda.so.1")
    nvml = compile_c(bare / "libnvidia-ml.so.1", "tests/client/fakenvml.c", *shared, "-Wl,-soname,libnvidia-ml.so.1")
    subprocess.run([sys.executable, str(ROOT / "csrc/tables/emit.py"), str(tables)], check=True)
    hook = sorted(str(path.relative_to(ROOT)) for part in ("hook", "client")
                  for path in (ROOT / "csrc" / part).glob("*.c"))
    built = compile_c(base / "libcgpu-hook.so.1", *hook, f"-I{tables}", *shared,
                      "-Wl,-soname,libcgpu-hook.so.1,-z,now,-z,nodelete", "-ldl", "-lpthread")
    install_proxies(Driver(cuda, nvml), hooked, built)
    made = {"bare": bare, "hooked": hooked}
    for name, source in (("steps", "tests/client/steps.c"), ("busy", "tests/client/busy.c"),
                         ("litmus", "tests/client/litmus.c"), ("overhead", "bench/launch_overhead.c")):
        made[name] = compile_c(base / name, source, str(cuda), "-Wl,--allow-shlib-undefined", "-lpthread")
    return made


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def until(what: Callable[[], object], seconds: float = WAIT) -> None:
    """Polls until ``what()`` is true."""
    end = time.monotonic() + seconds
    while not what():
        assert time.monotonic() < end, f"not within {seconds} s"
        time.sleep(0.001)


class Page:
    """One GPU of the instance: control page and report pages."""

    def __init__(self) -> None:
        self.ctl_fd, self.report_fd = os.memfd_create("ctl", os.MFD_ALLOW_SEALING), os.memfd_create("report")
        os.ftruncate(self.ctl_fd, CTL)
        os.ftruncate(self.report_fd, REPORT)
        self.ctl, self.report = mmap.mmap(self.ctl_fd, CTL), mmap.mmap(self.report_fd, REPORT)
        fcntl.fcntl(self.ctl_fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW)
        self.bell = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        struct.pack_into("<II", self.ctl, 0, MAGIC, VERSION)
        struct.pack_into("<II", self.report, 0, MAGIC, VERSION)
        struct.pack_into("<I", self.report, 64 + 16, 0x90)  # pthread_mutex_t.__kind: robust and shared
        struct.pack_into("<Q", self.ctl, 128, 1 << 34)
        struct.pack_into("<IIII", self.ctl, 192, 625_000, 2, 200_000, 150_000)
        self.epoch = 0
        self.beating = True

    def put(self, offset: int, value: int) -> None:
        put(self.ctl, offset, "<Q", value)

    def overlap(self, ns: int) -> None:
        put(self.ctl, 200, "<I", ns)

    @property
    def grant(self) -> int:
        return int(struct.unpack_from("<Q", self.ctl, 64)[0])

    def slot(self, index: int, field: str) -> int:
        offset, size = FIELDS[field]
        return int(struct.unpack_from(size, self.report, 4096 + index * SLOT + offset)[0])

    def wake(self) -> None:
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        address = ctypes.addressof(ctypes.c_char.from_buffer(self.ctl)) + 64
        libc.syscall(202, ctypes.c_void_p(address), 1, 2**31 - 1, None, None, 0)

    def close(self) -> None:
        self.ctl.close()
        self.report.close()
        for fd in (self.ctl_fd, self.report_fd, self.bell):
            os.close(fd)


class Daemon:
    """Answers the socket in a thread, beats each page's heart, and otherwise does what the test says."""

    def __init__(self, path: Path, gpus: int = 1) -> None:
        self.path = path
        self.pages = [Page() for _ in range(gpus)]
        self.clients: dict[int, tuple[socket.socket, socket.socket]] = {}  # slot: connection, our end towards the agent
        self.joined = 0
        self.lock = threading.Lock()
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        path.unlink(missing_ok=True)
        self.listener.bind(str(path))
        self.listener.listen(64)
        self.stopping = False
        self.thread = threading.Thread(target=self._serve, daemon=True)
        self.thread.start()

    until = staticmethod(until)

    @property
    def page(self) -> Page:
        return self.pages[0]

    def _serve(self) -> None:
        while not self.stopping:
            for page in self.pages:
                if page.beating:
                    page.put(256, now_ns())
            with self.lock:
                readers = {connection.fileno(): slot for slot, (connection, _) in self.clients.items()}
            ready, _, _ = select.select([self.listener.fileno(), *readers], [], [], 0.05)
            for fd in ready:
                if fd == self.listener.fileno():
                    connection, _ = self.listener.accept()
                    with contextlib.suppress(OSError):
                        self._welcome(connection)
                else:
                    self._gone(readers[fd])

    def _welcome(self, connection: socket.socket) -> None:
        connection.settimeout(5)
        magic, version = struct.unpack_from("<II", connection.recv(64))
        assert (magic, version) == (MAGIC, VERSION)
        slot = self.joined
        self.joined += 1
        # as the real daemon does it: what a client writes to its end comes to us and wakes nobody there
        agent, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        agent.setblocking(False)
        fds = [theirs.fileno()]
        welcome = struct.pack("<IIiI", MAGIC, VERSION, 0, len(self.pages)) + b"i".ljust(136, b"\0") + bytes(128)
        for index, page in enumerate(self.pages):
            put(page.ctl, 320 + 4 * slot, "<I", slot + 1)
            fds += [page.ctl_fd, page.report_fd, page.bell]
            welcome += bytes([index + 1]) * 16 + struct.pack("<IIIIQQ", index, slot, slot + 1, 0, 1 << 34, 1 << 35)
        welcome = welcome.ljust(280 + 48 * 16, b"\0")
        theirs.setblocking(False)
        connection.sendmsg([welcome], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", fds))])
        theirs.close()
        with self.lock:
            self.clients[slot] = (connection, agent)

    def _gone(self, slot: int) -> None:
        with self.lock:
            connection, agent = self.clients.pop(slot)
        connection.close()
        agent.close()
        for page in self.pages:
            put(page.ctl, 320 + 4 * slot, "<I", 0)

    def grant(self, deadline_in_ns: int = 0, gpu: int = 0) -> int:
        page = self.pages[gpu]
        page.epoch += 1
        page.put(72, now_ns() + deadline_in_ns if deadline_in_ns else 0)
        word = page.epoch << 1 | 1
        page.put(64, word)
        page.wake()
        return word

    def revoke(self, gpu: int = 0) -> None:
        page = self.pages[gpu]
        page.put(64, page.grant & ~1)
        page.wake()
        self.poke()

    def poke(self) -> None:
        with self.lock:
            for _, agent in self.clients.values():
                with contextlib.suppress(OSError):
                    agent.send((1).to_bytes(8, "little"))

    def flags(self, value: int) -> None:
        put(self.page.ctl, 80, "<I", value)

    def kill(self) -> None:
        """Dies: sockets close, hearts stop."""
        self.stopping = True
        self.thread.join(WAIT)
        self.listener.close()
        self.path.unlink(missing_ok=True)
        with self.lock:
            for connection, agent in self.clients.values():
                connection.close()
                agent.close()
            self.clients.clear()

    def close(self) -> None:
        self.kill()
        for page in self.pages:
            page.close()


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Daemon]:
    made = Daemon(tmp_path / "gate.sock")
    yield made
    made.close()


@pytest.fixture
def new_daemon(daemon: Daemon) -> Iterator[Callable[[], Daemon]]:
    """A successor at the same socket, to call when the first has died."""
    made: list[Daemon] = []

    def begin() -> Daemon:
        made.append(Daemon(daemon.path))
        return made[-1]

    yield begin
    for successor in made:
        successor.close()


class Steps:
    """The program under test, ``steps.c``."""

    def __init__(self, build: dict[str, Path], socket_path: Path, tmp: Path, who: int = 0, **extra: str) -> None:
        self.log = tmp / "hook.log"
        env = dict(os.environ, LD_LIBRARY_PATH=str(build["hooked"]), CGPU_SOCKET=str(socket_path),
                   FAKE_DEVICE=str(tmp / "device"), FAKE_WHO=str(who), CGPU_LOG=str(self.log),
                   CGPU_LOG_LEVEL="info", **extra)
        self.process = subprocess.Popen([str(build["steps"])], stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env,
                                        text=True, bufsize=1)
        self.lines: list[str] = []
        self.reader = threading.Thread(target=self._read, daemon=True)
        self.reader.start()
        self.wait("ready")

    def _read(self) -> None:
        assert self.process.stdout
        for line in self.process.stdout:
            self.lines.append(line.strip())

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")
        self.process.stdin.flush()

    def wait(self, line: str, seconds: float = WAIT) -> None:
        """Until the program has printed ``line``, which is then taken off."""
        until(lambda: line in self.lines or self.process.poll() is not None, seconds)
        assert line in self.lines, (self.lines, self.process.poll())
        self.lines.remove(line)

    def do(self, line: str, seconds: float = WAIT) -> None:
        """Tells, and waits for success."""
        self.tell(line)
        thread, command = line.split()[:2]
        self.wait(f"{thread} {command} 0", seconds)

    def blocked(self, line: str) -> None:
        """Tells, and sees that it does not come back for a while."""
        self.tell(line)
        time.sleep(0.15)
        thread, command = line.split()[:2]
        assert f"{thread} {command} 0" not in self.lines

    def joined_again(self) -> None:
        """Until it runs by its new daemon's word; that one has its client a moment earlier."""
        until(lambda: "joined the daemon again" in self.log.read_text())

    def kill(self) -> None:
        with contextlib.suppress(ProcessLookupError):
            self.process.send_signal(signal.SIGKILL)
        self.process.wait(WAIT)
        self.reader.join(WAIT)
        for stream in (self.process.stdin, self.process.stdout):
            if stream:
                stream.close()


@pytest.fixture
def start(client_build: dict[str, Path], daemon: Daemon, tmp_path: Path) -> Iterator[Callable[..., Steps]]:
    """Starts programs in the daemon's instance."""
    running: list[Steps] = []

    def begin(who: int = 0, **extra: str) -> Steps:
        running.append(Steps(client_build, daemon.path, tmp_path, who, **extra))
        return running[-1]

    yield begin
    for program in running:
        program.kill()
