"""What the daemon's outliving is made of, part by part: the keeper, what is handed on, starts that are counted."""

import errno
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import trio
from node import wait_until

from cgpufs.mount import Mount
from cgpusched import store
from cgpusched.commands import Create, Destroy, SetPolicy
from cgpusched.daemon import procs, rundir
from cgpusched.daemon.survival import keeper, kept, upgrade
from cgpusched.daemon.survival.kept import KeeperStore, Kept
from cgpusched.daemon.survival.resent import SECONDS, Resent
from cgpusched.errors import CommandError, UserError

# The keeper


class KeeperProcess:
    def __init__(self, folder: Path, patience: float) -> None:
        self.folder = folder
        self.daemon, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            subprocess.run([sys.executable, "-I", "-S", keeper.__file__, folder, str(patience)], stdin=theirs,
                           check=True, timeout=20)  # fmt: skip

    def alive(self) -> bool:
        return (self.folder / keeper.NAME).exists()


@pytest.fixture
def mount(tmp_path: Path) -> Iterator[Mount]:
    made = Mount.create(tmp_path / "tree")
    yield made
    made.unmount()


def put(sock: socket.socket, name: str, fd: int) -> None:
    socket.send_fds(sock, [f"keep {name}".encode()], [fd])


def test_it_gives_what_it_holds_and_ends_when_told(tmp_path: Path) -> None:
    process = KeeperProcess(tmp_path, 60)
    for name, content in (("a", "one"), ("b", "two"), ("a", "three")):
        (tmp_path / content).write_text(content)
        with open(tmp_path / content) as file:
            put(process.daemon, name, file.fileno())
    assert (tmp_path / keeper.NAME).stat().st_mode & 0o777 == 0o600
    again = KeeperStore(tmp_path)
    found = again.connect()
    try:
        texts = {name: os.pread(fd, 10, 0) for name, fd in found.items()}
        assert texts == {"a": b"three", "b": b"two"}
        assert not any(os.get_inheritable(fd) for fd in found.values())
        again.drop("b")
        third = KeeperStore(tmp_path)
        assert [name for name, fd in third.connect().items() if os.close(fd) is None] == ["a"]
        third.close()
        again.end()
        wait_until(lambda: not process.alive(), "its end")
    finally:
        for fd in found.values():
            os.close(fd)
        again.close()
        process.daemon.close()


def test_without_a_daemon_it_lets_a_mount_go_after_a_while(tmp_path: Path, mount: Mount) -> None:
    process = KeeperProcess(tmp_path, 0.5)
    put(process.daemon, "tree.1", mount.fileno())
    reading = subprocess.Popen(["cat", mount.path / "version"], stderr=subprocess.PIPE)
    mount.close()
    try:
        process.daemon.close()
        assert b"not connected" in reading.communicate(timeout=20)[1]
        with pytest.raises(OSError) as error:
            os.stat(mount.path / "version")
        assert error.value.errno == errno.ENOTCONN
        wait_until(lambda: not process.alive(), "its end")
    finally:
        reading.kill()
        reading.communicate()


def test_it_ends_with_the_mount_that_somebody_took_off(tmp_path: Path, mount: Mount) -> None:
    process = KeeperProcess(tmp_path, 60)
    put(process.daemon, "tree.1", mount.fileno())
    mount.unmount()
    process.daemon.close()
    wait_until(lambda: not process.alive(), "its end")


def test_it_ends_where_there_is_nothing_to_keep(tmp_path: Path) -> None:
    process = KeeperProcess(tmp_path, 60)
    process.daemon.close()
    wait_until(lambda: not process.alive(), "its end")


@pytest.mark.parametrize("message", [b"keep", b"keep x", b"drop x", b"nonsense", b"\xff" * 300, b"give me"])
def test_it_survives_nonsense(tmp_path: Path, message: bytes) -> None:
    process = KeeperProcess(tmp_path, 60)
    try:
        process.daemon.send(message)
        process.daemon.send(b"give")
        assert process.daemon.recv(100) == b"done"
    finally:
        process.daemon.send(b"end")
        process.daemon.close()
    wait_until(lambda: not process.alive(), "its end")


# What is handed on


class Memory:
    def __init__(self) -> None:
        self.told: list[str] = []

    def put(self, name: str, fd: int) -> None:
        self.told.append(f"put {name}")

    def drop(self, name: str) -> None:
        self.told.append(f"drop {name}")

    def end(self) -> None:
        self.told.append("end")


def test_only_what_fits_is_taken() -> None:
    memory = Memory()
    some = Kept({"tree.0-7": os.dup(0), "tree.0-8": os.dup(0), "view.0-9": os.dup(0)}, memory)
    assert not some.final
    fd = some.take("tree", "0-8")
    assert fd is not None and some.names == ["view.0-9"] and memory.told == ["drop tree.0-7"]
    assert some.take("tree", "0-8") is None and some.take("control", "3") is None
    some.keep("tree", "0-8", fd)
    some.keep("tree", "0-9", fd)
    os.close(fd)
    assert memory.told[1:] == ["put tree.0-8", "drop tree.0-8", "put tree.0-9"]
    some.close()
    assert memory.told[4:] == [], "a start that fails leaves it all to the next one"
    last = Kept({}, memory)
    assert last.final
    last.keep_bytes("init", "1", b"content")
    last.close()
    assert memory.told[4:] == ["put init.1", "drop init.1", "end"]


def test_inherited_descriptors_are_this_process_s_alone() -> None:
    env = {"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "x", "OTHER": "y"}
    assert kept.inherited(env) == {} and env == {"OTHER": "y"}
    assert kept.inherited({"LISTEN_PID": str(os.getpid()), "LISTEN_FDS": "-1"}) == {}
    assert kept.last_config({"LISTEN_PID": "1", "LISTEN_FDS": "1", "LISTEN_FDNAMES": "config.toml"}) is None


def test_a_program_that_cannot_be_executed(tmp_path: Path) -> None:
    nothing = str(tmp_path / "nothing")
    code = f"from cgpusched.daemon.survival.upgrade import execute; execute([{nothing!r}], {{'x': 0}})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and "cannot be executed" in done.stderr


def test_what_starts_it_again(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    script = tmp_path / "cgpud"
    script.write_text("#!/bin/sh\n")
    monkeypatch.setattr(sys, "orig_argv", ["python3", str(script), "--mount", "/x"])
    assert upgrade.started_with() == [sys.executable, str(script), "--mount", "/x"]
    script.chmod(0o755)
    assert upgrade.started_with() == [str(script), "--mount", "/x"]
    monkeypatch.setattr(sys, "orig_argv", ["python3", "-m", "cgpusched.daemon.main"])
    assert upgrade.started_with() == [sys.executable, "-m", "cgpusched.daemon.main"]


async def test_one_upgrade_at_a_time(nursery: trio.Nursery) -> None:
    some = upgrade.Upgrade(["/bin/false"])
    some.ask()
    with pytest.raises(CommandError) as error:
        some.ask()
    assert error.value.errno == errno.EBUSY and str(some) == "running"
    nursery.start_soon(some.run_forever, None, None)
    with trio.fail_after(20):
        while some.running:
            await trio.sleep(0.01)
    assert str(some) == "failed: it ended with 1"
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize(("jobs", "final"), [
    ("", False), ("12 cgpud.service restart running", False), ("12 cgpud.service stop running", True),
    ("12 other.service stop running\n13 cgpud.service restart running", False),
])  # fmt: skip
async def test_whether_systemd_will_start_it_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, jobs: str, final: bool
) -> None:
    cgroup = tmp_path / "cgroup"
    cgroup.write_text("0::/system.slice/cgpud.service\n")
    systemctl = tmp_path / "systemctl"
    systemctl.write_text(f"#!/bin/sh\necho '{jobs}'\n")
    systemctl.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setenv("NOTIFY_SOCKET", "/somewhere")
    assert await upgrade.is_stopped_for_good(tmp_path, cgroup) is final
    assert await upgrade.is_stopped_for_good(tmp_path / "none", cgroup), "no systemd"
    cgroup.write_text("0::/user.slice/session-1.scope\n")
    assert await upgrade.is_stopped_for_good(tmp_path, cgroup), "no unit"
    cgroup.write_text("0::/system.slice/cgpud.service\n")
    monkeypatch.setenv("PATH", "/nowhere")
    assert not await upgrade.is_stopped_for_good(tmp_path, cgroup), "what is kept is not given up for that"


# Starts, processes, and a write that came twice


def test_starts_are_counted_until_one_is_ready(tmp_path: Path) -> None:
    now = [100.0]

    def begin() -> bool:
        return rundir.begin(tmp_path, lambda: now[0])

    assert [begin() for _ in range(7)] == [True] * 5 + [False] * 2
    rundir.ready(tmp_path)
    assert [begin() for _ in range(6)] == [True] * 5 + [False]
    now[0] += 61
    assert begin()
    (tmp_path / "starts").write_text("no number")
    assert begin()
    (tmp_path / "starts").unlink()
    (tmp_path / "starts").mkdir()
    with pytest.raises(UserError, match="starts|cannot use"):
        begin()


def test_a_process_and_another_of_its_number() -> None:
    with subprocess.Popen(["sleep", "60"]) as process:
        found = procs.process_of(process.pid)
        assert found is not None
        pidfd = procs.open_process(found)
        assert pidfd is not None
        signal.pidfd_send_signal(pidfd, signal.SIGKILL)
        os.close(pidfd)
    assert procs.open_process(store.Process(os.getpid(), 0)) is None
    assert procs.open_process(found) is None and procs.process_of(found.pid) is None


class Applied:
    def __init__(self) -> None:
        self.commands: list[Any] = []

    def apply(self, command: Any) -> None:
        self.commands.append(command)


def test_a_write_that_was_obeyed_and_not_answered() -> None:
    """It comes again, first of all, and is told that all went well; a later one of the same kind is a new one."""
    now, system, last = [5.0], Applied(), Create("new", (0,), (1,))
    for command, later, obeyed in [(last, 0, 0), (last, SECONDS, 1), (SetPolicy(0, 2), 0, 1), (Destroy("new"), 0, 1)]:
        system.commands.clear()
        backend = Resent(system, store.sign(last), lambda: now[0])  # type: ignore[arg-type]
        backend.begin()
        now[0] += later
        backend.apply(command)
        assert len(system.commands) == obeyed, command
        backend.apply(last)
        assert system.commands[-1] is last, "the second time it counts"
