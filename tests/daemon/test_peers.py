"""Who is at the other end: also where the kernel has no SO_PEERPIDFD, which came with Linux 6.5."""

import errno
import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from cgpusched.daemon.server import peers

CONNECT = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); s.recv(1)"


class Older(socket.socket):
    """A socket of a kernel before 6.5."""

    code = errno.ENOPROTOOPT

    def getsockopt(self, level, option, *length):  # type: ignore[no-untyped-def]
        if option == peers.SO_PEERPIDFD:
            raise OSError(self.code, os.strerror(self.code))
        return super().getsockopt(level, option, *length)


@pytest.fixture
def connected(tmp_path: Path) -> Iterator[tuple[socket.socket, "subprocess.Popen[bytes]"]]:
    """A connection, and the process at its other end."""
    with socket.socket(socket.AF_UNIX) as listener:
        listener.settimeout(30)
        listener.bind(str(tmp_path / "s"))
        listener.listen()
        with subprocess.Popen([sys.executable, "-S", "-c", CONNECT, str(tmp_path / "s")]) as process:
            connection, _ = listener.accept()
            with connection:
                yield connection, process


def named(pidfd: int) -> int:
    lines = Path(f"/proc/self/fdinfo/{pidfd}").read_text().splitlines()
    return int(next(line.split()[1] for line in lines if line.startswith("Pid:")))


@pytest.mark.parametrize("code", [errno.ENOPROTOOPT, errno.EINVAL])
def test_the_pidfd_is_by_pid_where_the_socket_gives_none(
    connected: tuple[socket.socket, "subprocess.Popen[bytes]"], code: int
) -> None:
    connection, process = connected
    with Older(fileno=os.dup(connection.fileno())) as older:
        older.code = code
        peer = peers.identify(older)
    try:
        assert (peer.pid, peer.uid, named(peer.pidfd)) == (process.pid, os.getuid(), process.pid)
        assert peer.groups == {os.getgid(), *os.getgroups()}
    finally:
        peer.close()


def test_other_errors_are_the_callers(connected: tuple[socket.socket, "subprocess.Popen[bytes]"]) -> None:
    connection, _ = connected
    with Older(fileno=os.dup(connection.fileno())) as older:
        older.code = errno.EMFILE
        with pytest.raises(OSError) as caught:
            peers.identify(older)
    assert caught.value.errno == errno.EMFILE


def test_one_that_has_ended_is_nobody(connected: tuple[socket.socket, "subprocess.Popen[bytes]"]) -> None:
    connection, process = connected
    process.kill()
    process.wait()
    with Older(fileno=os.dup(connection.fileno())) as older, pytest.raises(ProcessLookupError):
        peers.identify(older)
