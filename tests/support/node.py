"""A whole node in a scratch folder: the real cgpud and its tree on a simulated device, for tests and benchmarks."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

BIN = Path(sys.executable).parent
ROOT = Path(__file__).resolve().parents[2]


def wait_until(condition: Callable[[], Any], what: str, seconds: float = 20.0, every: float = 0.05) -> Any:
    """Polls until ``condition()`` is true and gives its value; AssertionError naming ``what`` after ``seconds``."""
    deadline = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < deadline, f"waited {seconds:.0f} s in vain: {what}"
        time.sleep(every)


def descriptors(pid: int) -> Counter[str]:
    """What kinds of descriptors a process has, and how many of each."""
    found: Counter[str] = Counter()
    for fd in os.listdir(f"/proc/{pid}/fd"):
        with contextlib.suppress(OSError):
            found[os.readlink(f"/proc/{pid}/fd/{fd}").split(":")[0]] += 1
    return found


def settled_descriptors(pid: int) -> Counter[str]:
    """The same, once nothing comes or goes.

    What was asked just now may be on its way out; a file replaced in the midst of a look is missed in both forms."""
    found, since = descriptors(pid), time.monotonic()
    while time.monotonic() - since < 0.5:
        time.sleep(0.05)
        if (now := descriptors(pid)) != found:
            found, since = now, time.monotonic()
    return found


def build_c(source: Path, out: Path, *flags: str) -> Path:
    """Compiles one C program of the tests."""
    out.parent.mkdir(parents=True, exist_ok=True)
    subprocess.run(["gcc", "-O2", "-o", out, source, "-ldl", "-lpthread", *flags], check=True)
    return out


class Node:
    """One running cgpud. All its folders are below ``base``; ``stop()`` leaves nothing behind."""

    def __init__(self, base: Path, simulate: str = "1x24GiB", *arguments: str) -> None:
        self.base = base
        self.tree = base / "tree"
        self.runtime = base / "run"
        self.log = base / "cgpud.log"
        self.simulate = simulate
        self.arguments = arguments
        self.programs: list[subprocess.Popen[Any]] = []
        self.daemon: subprocess.Popen[bytes] | None = None

    @property
    def binary(self) -> Path:
        """cgpu-runtime, as an engine's configuration names it."""
        return self.base / "bin/cgpu-runtime"

    @property
    def env(self) -> dict[str, str]:
        return {**os.environ, "CGPU_CONTROL": str(self.runtime / "control.sock")}

    def start(self) -> None:
        command = [BIN / "cgpud", "--simulate", self.simulate, "--mount", self.tree, "--runtime-dir", self.runtime,
                   "--lib-dir", self.base / "lib", "--config", self.base / "config.toml", *self.arguments]
        config = self.base / "config.toml"
        if not config.exists():
            config.write_text("")
        with open(self.log, "ab") as log:
            self.daemon = subprocess.Popen(command, stdout=log, stderr=log)
        wait_until(self._ready, "cgpud to come up", 30)

    def _ready(self) -> bool:
        assert self.daemon and self.daemon.poll() is None, f"cgpud ended: {self.log.read_text()}"
        # the control socket comes before the mount: ask there first, a stat of a half-made mount would wait
        if subprocess.run([BIN / "cgpuctl", "list"], env=self.env, capture_output=True, check=False).returncode:
            return False
        return os.path.ismount(self.tree) and (self.tree / "version").exists()

    def stop(self) -> None:
        """Ends the programs and the daemon; the daemon must clean up by itself."""
        for program in self.programs:
            if program.poll() is None:
                program.kill()
            program.wait()
        if self.daemon:
            if self.daemon.poll() is None:
                self.daemon.send_signal(signal.SIGTERM)
                try:
                    self.daemon.wait(15)
                except subprocess.TimeoutExpired:
                    self.daemon.kill()
                    self.daemon.wait()
            self.daemon = None
        mounts = Path("/proc/self/mounts").read_text()
        for path in (self.tree, self.runtime / "view"):
            if f" {path} " in mounts:
                subprocess.run(["umount", "-l", path], check=False)

    def kill_daemon(self, sign: signal.Signals = signal.SIGKILL) -> None:
        assert self.daemon
        self.daemon.send_signal(sign)
        if sign == signal.SIGKILL:
            self.daemon.wait()

    def ctl(self, *arguments: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs cgpuctl to its end."""
        done = subprocess.run([BIN / "cgpuctl", *map(str, arguments)], env=self.env, capture_output=True, text=True,
                              timeout=60, check=False, **options)
        assert not check or done.returncode == 0, f"cgpuctl {arguments}: {done.returncode}: {done.stdout}{done.stderr}"
        return done

    def run(self, id_: str, *command: object, mem: str = "1GiB", weight: int | None = None, gpu: str | None = None,
            highprio: bool = False, out: Path | None = None) -> subprocess.Popen[Any]:
        """Starts a program in an instance; it is killed at ``stop()``."""
        options = ["--id", id_, "--mem", mem]
        options += ["--weight", str(weight)] if weight is not None else []
        options += ["--gpu", gpu] if gpu is not None else []
        options += ["--highprio"] if highprio else []
        with open(out or self.base / f"{id_}.log", "ab") as log:
            program = subprocess.Popen([BIN / "cgpuctl", "run", *options, "--", *map(str, command)], env=self.env,
                                       stdout=log, stderr=log)
        self.programs.append(program)
        return program

    def status(self) -> dict[str, Any]:
        """What cgpu-smi --json shows."""
        done = subprocess.run([BIN / "cgpu-smi", "--json"], env=self.env, capture_output=True, text=True, timeout=30,
                              check=True)
        status: dict[str, Any] = json.loads(done.stdout)
        return status

    def path(self, *parts: object) -> Path:
        return self.tree.joinpath(*map(str, parts))

    def read(self, *parts: object) -> str:
        return self.path(*parts).read_text()

    def write(self, value: object, *parts: object) -> None:
        """One write(2) to a node; raises what it fails with."""
        fd = os.open(self.path(*parts), os.O_WRONLY | os.O_TRUNC)
        try:
            os.write(fd, f"{value}\n".encode())
        finally:
            os.close(fd)

    def busy_ns(self, gpu: int = 0) -> dict[str, int]:
        """Device time charged to each instance so far, by ID."""
        for one in self.status()["gpus"]:
            if one["index"] == gpu:
                return {instance["id"]: instance["busy_ns"] for instance in one["instances"]}
        raise AssertionError(f"no GPU {gpu}")

    def shares(self, seconds: float, gpu: int = 0) -> dict[str, float]:
        """Each instance's share of the device over the next ``seconds``, 0 to 1, by what it was charged."""
        before, start = self.busy_ns(gpu), time.monotonic_ns()
        time.sleep(seconds)
        after, passed = self.busy_ns(gpu), time.monotonic_ns() - start
        return {id_: (after[id_] - before.get(id_, 0)) / passed for id_ in after}


@contextlib.contextmanager
def running_node(base: Path, simulate: str = "1x24GiB", *arguments: str) -> Iterator[Node]:
    node = Node(base, simulate, *arguments)
    try:
        node.start()
        yield node
    finally:
        node.stop()
