"""Who is at the other end of a Unix socket: pid, uid, groups, and a handle on the process that outlives pid reuse.

Pids are the host's: the daemon runs in the host's PID namespace. From a namespace beside it the kernel reports pid 0;
such a peer is refused, since nothing would tell its death.
"""

from __future__ import annotations

import errno
import os
import pwd
import socket
import struct
from dataclasses import dataclass

SO_PEERPIDFD = 77  # Linux 6.5; not in Python 3.11's socket module
SO_PEERGROUPS = 59  # Linux 4.13
_UCRED = struct.Struct("=iII")


@dataclass
class Peer:
    """A connected process. Owns ``pidfd``: close() it."""

    pid: int
    uid: int
    groups: frozenset[int]
    """The primary group and the supplementary ones, as they were at connect."""
    pidfd: int

    def close(self) -> None:
        if self.pidfd >= 0:
            os.close(self.pidfd)
            self.pidfd = -1


def identify(sock: socket.socket) -> Peer:
    """Asks the kernel about the peer. ``OSError`` (ESRCH): it has ended already, or is in a foreign PID namespace."""
    pid, uid, gid = _UCRED.unpack(sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _UCRED.size))
    if pid <= 0:
        raise ProcessLookupError(errno.ESRCH, "the peer's process is not visible from here (another PID namespace)")
    return Peer(pid, uid, _groups(sock, uid, gid), _pidfd(sock, pid))


def _pidfd(sock: socket.socket, pid: int) -> int:
    try:
        return sock.getsockopt(socket.SOL_SOCKET, SO_PEERPIDFD)
    except OSError as error:
        if error.errno not in (errno.ENOPROTOOPT, errno.EINVAL):
            raise
    # Before 6.5: between its connect and this line the peer may have ended and its pid gone to another process. The
    # kernel hands pids out in turn, so that needs a whole round of them in a few milliseconds; the connection's end
    # tells too.
    return os.pidfd_open(pid)


def _groups(sock: socket.socket, uid: int, gid: int) -> frozenset[int]:
    try:
        raw = sock.getsockopt(socket.SOL_SOCKET, SO_PEERGROUPS, 1024)
        return frozenset((gid, *struct.unpack(f"={len(raw) // 4}I", raw)))
    except OSError as error:
        if error.errno == errno.ERANGE:  # more than 256 groups: Python reads no longer answer; ask the user database
            try:
                return frozenset((gid, *os.getgrouplist(pwd.getpwuid(uid).pw_name, gid)))
            except (KeyError, OSError):
                pass
        return frozenset((gid,))
