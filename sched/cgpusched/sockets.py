"""Unix sockets: addresses for paths of any length, and messages that carry descriptors."""

from __future__ import annotations

import array
import os
import socket
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

SUN_PATH = 107
"""Bytes of a path that a socket address holds."""


@contextmanager
def address(path: str | Path) -> Iterator[str]:
    """What bind() and connect() take for ``path``. Where that is too long, its folder is named by a descriptor."""
    text = os.fspath(path)
    if len(os.fsencode(text)) <= SUN_PATH:
        yield text
        return
    folder, name = os.path.split(text)
    fd = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)


def rights(fds: Iterable[int]) -> list[tuple[int, int, array.array[int]]]:
    """The ancillary data that sends these descriptors along. (socket.send_fds() passes its flags over.)"""
    numbers = array.array("i", fds)
    return [(socket.SOL_SOCKET, socket.SCM_RIGHTS, numbers)] if numbers else []


def send_now(fileno: int, data: bytes, fds: Iterable[int] = ()) -> None:
    """Sends a whole message without waiting, so that no descriptor in it can be closed and become another's meanwhile.

    ``fileno``: of a SOCK_SEQPACKET connection. A fresh one always has room for it; OSError (EAGAIN) otherwise.
    """
    with socket.fromfd(fileno, socket.AF_UNIX, socket.SOCK_SEQPACKET) as plain:
        plain.sendmsg([data], rights(fds), socket.MSG_DONTWAIT | socket.MSG_NOSIGNAL)
