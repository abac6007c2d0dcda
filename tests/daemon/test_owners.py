"""Whose a process is: tables over a /proc of the test's own, and the machine's."""

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cgpusched.daemon.audit.owners import Known, first_of, is_alive

SOCKET = "/run/cgpud/inst/a/gate.sock"
KNOWN = Known({10: "a"}, {SOCKET: ("a", 0), "/b": ("b", 1000)})


class Proc:
    """A /proc: ``process(pid, parent, …)``."""

    def __init__(self, base: Path) -> None:
        self.base = base

    def process(self, pid: int, parent: int, socket: str | None = None, uid: int = 0, session: int = 0,
                state: str = "S", name: str = "python3", flags: int = 4194560, threads: int = 1) -> None:
        folder = self.base / str(pid)
        folder.mkdir()
        (folder / "stat").write_text(f"{pid} ({name}) {state} {parent} {pid} {session or pid} 0 -1 {flags} "
                                     f"1 2 3 4 5 6 7 8 20 0 {threads} 0 12345\n")
        (folder / "status").write_text(f"Name:\t{name}\nUid:\t{uid}\t0\t0\t0\n")
        entries = ["HOME=/root", *([f"CGPU_SOCKET={socket}"] if socket is not None else []), "PATH=/bin"]
        (folder / "environ").write_bytes(b"\0".join(map(str.encode, entries)) + b"\0")


@pytest.fixture
def proc(tmp_path: Path) -> Proc:
    made = Proc(tmp_path)
    made.process(1, 0, name="systemd")
    made.process(2, 1, name="bash")
    return made


def owner(proc: Proc, pid: int, known: Known = KNOWN) -> str | None:
    return known.owner_of(pid, proc.base)


def test_a_stranger_is_nobodys(proc: Proc) -> None:
    proc.process(20, 2, socket="/elsewhere")
    assert owner(proc, 20) is None
    assert owner(proc, 2) is None
    assert owner(proc, 99) is None, "it has ended"


def test_who_is_known(proc: Proc) -> None:
    proc.process(10, 2)
    assert owner(proc, 10) == "a"


def test_descendants_of_who_is_known(proc: Proc) -> None:
    proc.process(10, 2, name="a) R 1 (b")
    for pid, parent in ((11, 10), (12, 11), (13, 12)):
        proc.process(pid, parent)
    assert owner(proc, 13) == "a"


def test_the_socket_it_was_started_with(proc: Proc) -> None:
    proc.process(20, 1, socket=SOCKET)
    proc.process(21, 20, socket="")
    assert owner(proc, 20) == "a" and owner(proc, 21) == "a"


def test_the_leader_of_its_session(proc: Proc) -> None:
    proc.process(30, 1, socket=SOCKET)
    proc.process(31, 1, session=30)  # its parent has ended
    assert owner(proc, 31) == "a"


def test_the_nearest_counts(proc: Proc) -> None:
    proc.process(20, 2, socket=SOCKET)
    proc.process(21, 20, socket="/b")
    proc.process(22, 21)
    assert owner(proc, 22) == "b"


@pytest.mark.parametrize(("socket", "uid", "expected"), [
    (SOCKET, 0, "a"), (SOCKET, 1000, None), ("/b", 1000, "b"), ("/b", 0, "b"), ("/b", 1001, None),
])  # fmt: skip
def test_only_the_owners_and_roots_environment_counts(proc: Proc, socket: str, uid: int, expected: str | None) -> None:
    proc.process(20, 2, socket=socket, uid=uid)
    assert owner(proc, 20) == expected


@pytest.mark.parametrize(("state", "flags", "threads", "alive"), [
    ("S", 0, 1, True), ("R", 0x400000, 9, True), ("Z", 4, 1, False), ("X", 0, 0, False), ("D", 4, 1, False),
    ("Z", 4, 2, True),  # its main thread has ended
])  # fmt: skip
def test_who_is_alive(proc: Proc, state: str, flags: int, threads: int, alive: bool) -> None:
    proc.process(11, 10, state=state, flags=flags, threads=threads)
    assert is_alive(11, proc.base) == alive
    assert not is_alive(12, proc.base)


def test_the_first_way_that_tells(process: "subprocess.Popen[bytes]") -> None:
    ask = first_of({1: "a"}.get, {1: "b", process.pid: "c"}.get)
    assert (ask(1), ask(process.pid), ask(os.getpid())) == ("a", "c", None)
    process.kill()
    while ask(process.pid) is not None:
        pass
    assert Path(f"/proc/{process.pid}").exists(), "a zombie, which nobody has waited for yet"


def test_a_ring_of_parents_ends(proc: Proc) -> None:
    """Readings of /proc at different times may make one."""
    proc.process(40, 41)
    proc.process(41, 40)
    assert owner(proc, 40) is None


def test_rubbish_is_nobodys(proc: Proc) -> None:
    (proc.base / "50").mkdir()
    (proc.base / "50/stat").write_bytes(b"\xff\xfe")
    assert owner(proc, 50) is None


@pytest.fixture
def process() -> Iterator["subprocess.Popen[bytes]"]:
    with subprocess.Popen(["sleep", "1000"]) as one:
        yield one
        one.kill()


@pytest.fixture
def child() -> Iterator["subprocess.Popen[bytes]"]:
    code = "import os, subprocess, sys; subprocess.run(['env', '-i', sys.executable, '-c', 'print(input())'])"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.DEVNULL,
                          env={**os.environ, "CGPU_SOCKET": SOCKET}) as one:
        yield one
        one.communicate(b"\n", timeout=20)


def test_on_the_machine(child: "subprocess.Popen[bytes]") -> None:
    found = Known(sockets={SOCKET: ("a", os.getuid())})
    assert found.owner_of(child.pid) == "a"
    assert found.owner_of(os.getpid()) is None
    assert Known({child.pid: "b"}, found.sockets).owner_of(child.pid) == "b"
    children = Path(f"/proc/{child.pid}/task/{child.pid}/children")
    while not (grandchild := children.read_text().split()):
        assert child.poll() is None
    assert found.owner_of(int(grandchild[0])) == "a"
