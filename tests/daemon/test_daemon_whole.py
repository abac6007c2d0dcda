"""cgpud as a process of its own: start, ready, serve, signals, a second one, a crash, and nothing left behind."""

import json
import os
import signal
import socket
import stat
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

SECONDS = 20.0
HELLO_SIZE = 64


def wait(condition: Callable[[], object], what: str, seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, f"{what} took more than {seconds} s"
        time.sleep(0.01)


class Cgpud:
    def __init__(self, base: Path) -> None:
        self.base = base
        self.tree, self.runtime, self.lib = base / "cgpu", base / "run", base / "lib"
        self.log = base / "log"
        self.process: subprocess.Popen[bytes] | None = None
        self.manager = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.manager.bind(str(base / "notify"))
        self.manager.settimeout(0.2)

    def command(self, *more: str) -> list[str]:
        return [sys.executable, "-m", "cgpusched.daemon.main", "--simulate", "2x24GiB", "--mount", str(self.tree),
                "--runtime-dir", str(self.runtime), "--lib-dir", str(self.lib), *more]  # fmt: skip

    def start(self, *more: str, **environ: str) -> None:
        env = {**os.environ, "NOTIFY_SOCKET": str(self.base / "notify"), **environ}
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(self.command(*more), stderr=log, env=env)
        self.expect("READY=1")

    def expect(self, line: str) -> list[str]:
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            try:
                told = self.manager.recv(4096).decode().splitlines()
            except TimeoutError:
                if self.process is not None and self.process.poll() is not None:
                    break
            else:
                if line in told:
                    return told
        pytest.fail(f"no {line}; the log:\n{self.log.read_text()}")

    def stop(self, sign: int = signal.SIGTERM) -> int:
        assert self.process is not None
        self.process.send_signal(sign)
        return self.process.wait(SECONDS)

    def ctl(self, *arguments: str, command: str = "ctl") -> "subprocess.CompletedProcess[str]":
        path = str(self.runtime / "control.sock")
        return subprocess.run([sys.executable, "-m", f"cgpusched.cli.{command}", "--socket", path, *arguments],
                              capture_output=True, text=True, timeout=SECONDS, check=False)  # fmt: skip

    @property
    def mounted(self) -> bool:
        return str(self.tree) in self.mounts

    @property
    def mounts(self) -> list[str]:
        found = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
        return [path for path in found if path in (str(self.tree), str(self.runtime / "view"))]

    @property
    def sockets(self) -> list[Path]:
        found = [path for path in self.runtime.iterdir() if path.name != "view"]  # a dead mount answers no lstat
        found += self.runtime.glob("inst/**/*")
        return [path for path in found if stat.S_ISSOCK(path.lstat().st_mode)]


@pytest.fixture
def cgpud(tmp_path: Path) -> Iterator[Cgpud]:
    daemon = Cgpud(tmp_path)
    yield daemon
    daemon.manager.close()
    if daemon.process is not None and daemon.process.poll() is None:
        daemon.process.kill()
        daemon.process.wait()
    for path in daemon.mounts:
        subprocess.run(["umount", "--lazy", path], check=True)


def test_ready_means_that_everything_answers(cgpud: Cgpud) -> None:
    cgpud.start()
    assert sorted(os.listdir(cgpud.tree)) == ["0", "1", "default_memsize", "inst_ctl", "upgrade", "version"]
    assert {"libcuda.so.1", "libnvidia-ml.so.1", "libcgpu-hook.so.1"} <= set(os.listdir(cgpud.lib))
    assert json.loads(cgpud.ctl("--json", command="smi").stdout)["simulated"] is True
    assert "SIMULATED DEVICE" in cgpud.log.read_text()
    assert cgpud.stop() == 0
    assert not cgpud.mounts and not cgpud.sockets and not cgpud.tree.exists()
    assert "Traceback" not in cgpud.log.read_text()


def test_tree_and_cgpuctl_see_the_same(cgpud: Cgpud) -> None:
    cgpud.start()
    (cgpud.tree / "inst_ctl").write_text("create by-tree gpu=1 memsize=2GiB\n")
    assert cgpud.ctl("create", "by-ctl", "--mem", "1GiB", "--weight", "3").returncode == 0
    assert [one["id"] for one in json.loads(cgpud.ctl("list", "--json").stdout)] == ["by-tree", "by-ctl"]
    assert (cgpud.tree / "0/by-ctl/weight").read_text() == "3\n"
    assert (cgpud.runtime / "inst/by-tree/gate.sock").is_socket()
    (cgpud.tree / "0/by-ctl/memsize").write_text("5GiB\n")
    assert (cgpud.runtime / "inst/by-ctl/limits").read_text().endswith(f" {5 << 30}\n")
    assert cgpud.ctl("destroy", "by-tree").returncode == 0
    assert "by-tree" not in os.listdir(cgpud.tree / "1")
    assert not (cgpud.runtime / "inst/by-tree").exists()
    assert cgpud.stop() == 0
    assert os.listdir(cgpud.runtime / "inst/by-ctl") == ["limits"], "programs started meanwhile keep to it"


def test_run_and_its_end(cgpud: Cgpud) -> None:
    cgpud.start()
    code = f"cat {cgpud.tree}/0/mine/memsize; exit 5"
    done = cgpud.ctl("run", "--mem", "1GiB", "--id", "mine", "--", "sh", "-c", code)
    assert (done.returncode, done.stdout) == (5, f"{1 << 30}\n")
    wait(lambda: "mine" not in os.listdir(cgpud.tree / "0"), "the end of the instance")
    assert cgpud.stop() == 0


def test_without_standard_streams(cgpud: Cgpud) -> None:
    """What is opened first must not become what everybody takes for stderr."""
    env = {**os.environ, "NOTIFY_SOCKET": str(cgpud.base / "notify")}
    command = ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *cgpud.command()]
    cgpud.process = subprocess.Popen(command, env=env)
    cgpud.log.touch()
    cgpud.expect("READY=1")
    streams = {os.readlink(f"/proc/{cgpud.process.pid}/fd/{number}") for number in range(3)}
    assert streams == {"/dev/null"}
    assert (cgpud.tree / "version").read_text()
    assert cgpud.stop() == 0


def test_a_second_daemon_is_refused(cgpud: Cgpud) -> None:
    cgpud.start()
    assert cgpud.process is not None
    second = subprocess.run(cgpud.command(), capture_output=True, text=True, timeout=SECONDS, check=False)
    assert second.returncode == 3
    assert second.stderr == f"cgpud: another cgpud (pid {cgpud.process.pid}) already serves {cgpud.runtime}\n"
    assert (cgpud.tree / "version").read_text(), "the first goes on"
    assert cgpud.stop() == 0


def test_stopping_with_clients_attached(cgpud: Cgpud) -> None:
    cgpud.start()
    cgpud.ctl("create", "one", "--mem", "1GiB", "--gpu", "0,1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
        sock.settimeout(SECONDS)
        sock.connect(str(cgpud.runtime / "inst/one/gate.sock"))
        sock.send(b"cgpu\x01\0\0\0" + bytes(HELLO_SIZE - 8))
        assert len(sock.recv(65536)) == 1048
        assert cgpud.stop(signal.SIGINT) == 0
        assert sock.recv(1) == b""
    assert "Traceback" not in cgpud.log.read_text()


def test_signals(cgpud: Cgpud) -> None:
    cgpud.start()
    assert cgpud.process is not None
    cgpud.process.send_signal(signal.SIGUSR1)
    wait(lambda: "task cgpusched.daemon.service" in cgpud.log.read_text(), "the dump of tasks")
    assert "most recent call first" in cgpud.log.read_text(), "threads are dumped too"
    cgpud.process.send_signal(signal.SIGHUP)
    assert any(line.startswith("MONOTONIC_USEC=") for line in cgpud.expect("RELOADING=1"))
    cgpud.expect("READY=1")
    assert cgpud.stop() == 0
    cgpud.expect("STOPPING=1")


def test_reload_takes_the_log_level_and_survives_a_bad_file(cgpud: Cgpud) -> None:
    config = cgpud.base / "config.toml"
    config.write_text('log_level = "warning"\n')
    cgpud.start("--config", str(config))
    assert cgpud.process is not None
    assert " ready " not in cgpud.log.read_text()
    config.write_text("nonsense = 1\n")
    cgpud.process.send_signal(signal.SIGHUP)
    wait(lambda: "not reloaded" in cgpud.log.read_text(), "the complaint")
    config.write_text('log_level = "info"\n')
    cgpud.process.send_signal(signal.SIGHUP)
    wait(lambda: "reloaded log_level=info" in cgpud.log.read_text(), "the reload")
    assert cgpud.stop() == 0


def test_the_watchdog_is_fed(cgpud: Cgpud) -> None:
    cgpud.start(WATCHDOG_USEC="600000")
    for _ in range(3):
        cgpud.expect("WATCHDOG=1")
    assert cgpud.stop() == 0


def test_after_a_crash_the_next_one_goes_on(cgpud: Cgpud) -> None:
    cgpud.start()
    cgpud.ctl("create", "old", "--mem", "1GiB")
    assert cgpud.stop(signal.SIGKILL) == -signal.SIGKILL
    assert len(cgpud.mounts) == 2 and cgpud.sockets
    cgpud.start()
    assert "old" in os.listdir(cgpud.tree / "0") and os.listdir(cgpud.runtime / "inst") == ["old"]
    assert cgpud.ctl("destroy", "old").returncode == 0
    assert os.listdir(cgpud.runtime / "inst") == []
    assert cgpud.stop() == 0
    assert not cgpud.mounts and not cgpud.sockets


def test_somebody_unmounts_the_tree(cgpud: Cgpud) -> None:
    cgpud.start()
    assert cgpud.process is not None
    subprocess.run(["umount", "--lazy", str(cgpud.tree)], check=True)
    assert cgpud.process.wait(SECONDS) == 1
    assert cgpud.log.read_text().splitlines()[-1].startswith("cgpud: the tree is gone: ")


@pytest.mark.parametrize(("arguments", "status", "line"), [
    (("--simulate", "0x24GiB"), 2, "cgpud: --simulate '0x24GiB': "),
    (("--config", "/no/such.toml"), 2, "cgpud: /no/such.toml"),
    (("--runtime-dir", "/proc/nowhere"), 1, "cgpud: cannot use the runtime folder /proc/nowhere: "),
    (("--lib-dir", "/proc/nowhere"), 1, "cgpud: /proc/nowhere"),
])  # fmt: skip
def test_what_cannot_work_is_said_in_one_line(cgpud: Cgpud, arguments: Any, status: int, line: str) -> None:
    done = subprocess.run(cgpud.command("--log-level", "error", *arguments), capture_output=True, text=True,
                          timeout=SECONDS, check=False)  # fmt: skip
    assert done.returncode == status
    assert done.stderr.startswith(line) and done.stderr.count("\n") == 1
    assert not cgpud.mounted


def test_idle_cost(cgpud: Cgpud) -> None:
    """Under 0.5 % of a core and 80 MB (measured: 0.1 %, 34 MB)."""
    cgpud.start()
    assert cgpud.process is not None
    proc = Path(f"/proc/{cgpud.process.pid}")

    def ticks() -> int:
        fields = (proc / "stat").read_text().rpartition(")")[2].split()
        return int(fields[11]) + int(fields[12])

    before, began = ticks(), time.monotonic()
    wait(lambda: time.monotonic() - began > 4, "four seconds")
    spent = (ticks() - before) / os.sysconf("SC_CLK_TCK") / (time.monotonic() - began)
    rss = next(int(line.split()[1]) for line in (proc / "status").read_text().splitlines() if line.startswith("VmRSS"))
    assert cgpud.stop() == 0
    assert spent <= 0.01 and rss < 80_000, f"{100 * spent:.2f} % of a core, {rss} kB"


def test_a_group_that_does_not_exist_is_reported(cgpud: Cgpud, tmp_path: Path) -> None:
    config = tmp_path / "group.toml"
    config.write_text('[control]\ngroup = "no-such-group-here"\n')
    cgpud.start("--config", str(config))
    wait(lambda: 'no such group key=control.group group=no-such-group-here' in cgpud.log.read_text(), "the warning")
    assert cgpud.stop() == 0
