"""Programs and daemons of different versions: what says more is understood, what speaks otherwise runs on by itself."""

import array
import contextlib
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node import Node, wait_until

GIB = 1 << 30
MAGIC = 0x75706763
OUT_OF_MEMORY = "2\n"
WELCOME = 280 + 16 * 48


def instance(node: Node) -> dict[str, Any]:
    (found,) = [one for one in node.status()["gpus"][0]["instances"] if one["id"] == "one"]
    return found  # type: ignore[no-any-return]


def result(program: Any) -> str:
    assert program.stdout
    return str(program.stdout.readline())


def held_to_its_memory(start: Any, lib: Path, alloc: Path, **options: Any) -> None:
    for size, said in ((GIB // 2, "0\n"), (GIB + (64 << 20), OUT_OF_MEMORY)):
        program = start(lib, alloc, size, **options)
        assert result(program) == said, size
        program.communicate("", timeout=30)


def test_a_program_of_the_next_version(node: Node, start: Any, minor: Path, programs: dict[str, Path]) -> None:
    """What it says beyond today's is passed over; it is scheduled, counted and held to its memory like any."""
    held_to_its_memory(start, minor, programs["alloc"])
    new, old = (start(lib, programs["busy"], 300, 60, 64) for lib in (minor, node.base / "lib"))
    wait_until(lambda: node.read(0, "one", "meminfo").count("PID: ") == 2, "both to be connected")
    before = instance(node)
    wait_until(lambda: instance(node)["busy_ns"] > before["busy_ns"] + 10**8, "the gate to count what they use")
    assert new.poll() is None and old.poll() is None
    assert instance(node)["counters"]["unknown"] == instance(node)["counters"]["dirty"] == 0


def test_a_program_of_another_protocol_runs_on(
    node: Node, start: Any, major: Path, programs: dict[str, Path]
) -> None:
    """One line on each side; its memory is limited by the instance's file, and others notice nothing."""
    held_to_its_memory(start, major, programs["alloc"])
    program = start(major, programs["busy"], 300, 60, 64)
    assert "kernels" in result(program) + result(program)
    assert 'reason="ABI version 2 where 1 is due"' in node.log.read_text()
    assert "the daemon speaks version 1 and this library 2" in (node.base / "hook.log").read_text()
    held_to_its_memory(start, node.base / "lib", programs["alloc"])
    assert node.read(0, "one", "meminfo").startswith("Free: ") and program.poll() is None


class Between:
    """Listens where a program looks for the daemon, and answers with what ``answer`` makes of it."""

    def __init__(self, path: Path, answer: Callable[[socket.socket, bytes], None]) -> None:
        self.answer = answer
        self.connections: list[socket.socket] = []
        self.asked = 0
        path.unlink(missing_ok=True)
        self.listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.listener.bind(str(path))
        self.listener.listen(64)
        self.thread = threading.Thread(target=self._serve)
        self.thread.start()

    def _serve(self) -> None:
        while True:
            try:
                connection, _ = self.listener.accept()
            except OSError:  # shut down
                return
            connection.settimeout(20)
            self.connections.append(connection)
            self.asked += 1
            with contextlib.suppress(OSError):  # it went away
                if said := connection.recv(64):
                    self.answer(connection, said)

    def close(self) -> None:
        self.listener.shutdown(socket.SHUT_RDWR)  # its path may be another's by now
        self.thread.join(20)
        assert not self.thread.is_alive()
        for one in (self.listener, *self.connections):
            one.close()


@pytest.fixture
def between() -> Iterator[Callable[..., Between]]:
    made: list[Between] = []

    def begin(path: Path, answer: Callable[[socket.socket, bytes], None]) -> Between:
        made.append(Between(path, answer))
        return made[-1]

    yield begin
    for one in made:
        one.close()


def refuse(connection: socket.socket, said: bytes) -> None:
    """As a daemon of version 2 does, whose answer is longer."""
    connection.send(struct.pack("<IIi", MAGIC, 2, 71).ljust(2 * WELCOME, b"\xff"))


def test_a_daemon_of_the_next_version(
    node: Node, start: Any, between: Any, programs: dict[str, Path]
) -> None:
    """Flags that nobody knows yet are passed over."""
    real = node.runtime / "inst/one/gate.sock"
    daemons: list[socket.socket] = []

    def relay(connection: socket.socket, said: bytes) -> None:
        daemon = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        daemons.append(daemon)
        daemon.settimeout(20)
        daemon.connect(str(real))
        daemon.send(said)
        welcome, ancillary, _, _ = daemon.recvmsg(1 << 16, socket.CMSG_SPACE(64 * 4))
        changed = bytearray(welcome)
        (flags,) = struct.unpack_from("<I", changed, 280 + 28)
        struct.pack_into("<I", changed, 280 + 28, flags & ~2 | 1 << 31)  # notes would go to nobody here
        changed[152:160] = b"newer\0\0\0"
        connection.sendmsg([changed], [(level, kind, array.array("i", data)) for level, kind, data in ancillary])
        for _, _, data in ancillary:
            for fd in array.array("i", data):
                socket.close(fd)

    path = node.base / "newer.sock"
    between(path, relay)
    try:
        held_to_its_memory(start, node.base / "lib", programs["alloc"], socket=path)
        program = start(node.base / "lib", programs["busy"], 300, 60, 64, socket=path)
        wait_until(lambda: instance(node)["counters"]["launches"] > 0, "it to run through the gate")
        assert program.poll() is None
    finally:
        for daemon in daemons:
            daemon.close()


def test_a_daemon_of_another_protocol(
    node: Node, start: Any, between: Any, programs: dict[str, Path]
) -> None:
    """A program that starts under it is limited by the file alone. One that runs while it comes keeps its limit, runs
    on ungated, and comes back to one that it understands."""
    running = start(node.base / "lib", programs["busy"], 300, 60, 64)
    wait_until(lambda: instance(node)["counters"]["launches"] > 0, "it to run")
    node.kill_daemon()
    stranger = between(node.runtime / "inst/one/gate.sock", refuse)
    wait_until(lambda: stranger.asked > 3, "it to have asked")
    held_to_its_memory(start, node.base / "lib", programs["alloc"])
    assert "the daemon speaks version 2 and this library 1" in (node.base / "hook.log").read_text()
    assert result(running) and result(running) and running.poll() is None
    node.start()
    before = instance(node)["counters"]["launches"]
    wait_until(lambda: instance(node)["counters"]["launches"] > before, "it to be back")
    assert node.read(0, "one", "meminfo").count(f"PID: {running.pid} ") == 1
