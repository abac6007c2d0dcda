"""Listening Unix sockets: at paths of any length, and accepting such that no peer spoils it for the others."""

from __future__ import annotations

import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import trio

from cgpusched.daemon.logs import Damper
from cgpusched.daemon.rundir import check_socket, unlink_socket
from cgpusched.daemon.survival.kept import Kept
from cgpusched.errors import UserError
from cgpusched.fields import pairs
from cgpusched.sockets import address

log = logging.getLogger(__name__)

EXHAUSTED = {errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.ENOBUFS}


@contextmanager
def listen(
    path: Path, kind: socket.SocketKind, mode: int, backlog: int, kept: Kept | None = None
) -> Iterator[trio.socket.SocketType]:
    """A listening socket at ``path`` with that mode; closed and removed at the end. UserError: it cannot be made.

    With ``kept`` a successor goes on with it, unless it ends with this daemon: who connects meanwhile waits.
    """

    def make() -> socket.socket:
        return bind(path, kind, mode, backlog)

    try:
        sock = make() if kept is None else kept.listener(path.stem, path, make)
    except OSError as error:
        raise UserError(f"cannot listen at {path}: {error.strerror}") from None
    try:
        yield trio.socket.from_stdlib_socket(sock)
    finally:
        sock.close()
        if kept is None or kept.final:
            path.unlink(missing_ok=True)


def bind(path: Path, kind: socket.SocketKind, mode: int, backlog: int, owner: int = 0) -> socket.socket:
    """A listening, non-blocking socket at ``path``. A socket that a predecessor left there is replaced, in one step:
    who connects meets the old one or the new one, and the new one only once it is all that it should be.

    Its folder's name may be of any length: an instance's ID alone may have 128 bytes. ``owner``: the uid it goes to.
    """
    check_socket(path)
    fresh = path.with_name(f".{path.name}")
    unlink_socket(fresh)
    sock = socket.socket(socket.AF_UNIX, kind | socket.SOCK_NONBLOCK | socket.SOCK_CLOEXEC)
    try:
        with address(fresh) as name:
            sock.bind(name)
        fresh.chmod(mode)
        if owner:
            os.chown(fresh, owner, -1)
        sock.listen(backlog)
        fresh.replace(path)
    except BaseException:
        sock.close()
        fresh.unlink(missing_ok=True)
        raise
    return sock


async def accept_forever(
    listener: trio.socket.SocketType,
    nursery: trio.Nursery,
    room: trio.CapacityLimiter,
    serve: Callable[[trio.socket.SocketType], Awaitable[None]],
    pace: Callable[[], Awaitable[None]] | None = None,
) -> None:
    """Starts ``serve`` for each connection, ``room`` of them at a time; the rest wait in the kernel's queue.

    ``pace`` is awaited before each accept. A connection's failure ends that connection and is logged; running out of
    descriptors or memory pauses the accepting for a moment.
    """
    damper = Damper()
    while True:
        token = object()
        await room.acquire_on_behalf_of(token)
        try:
            if pace is not None:
                await pace()
            sock, _ = await listener.accept()
        except OSError as error:
            room.release_on_behalf_of(token)
            if error.errno in EXHAUSTED:
                if (held := damper.note()) is not None:
                    log.error("accept failed %s%s", pairs(error=error.strerror), held)
                await trio.sleep(0.1)
            elif error.errno != errno.ECONNABORTED:
                raise
            continue
        except BaseException:
            room.release_on_behalf_of(token)
            raise
        nursery.start_soon(_connection, sock, room, token, serve)


async def _connection(
    sock: trio.socket.SocketType,
    room: trio.CapacityLimiter,
    token: object,
    serve: Callable[[trio.socket.SocketType], Awaitable[None]],
) -> None:
    try:
        with sock:
            await serve(sock)
    except OSError as error:  # the peer went away, or there was no descriptor left for it
        log.debug("connection ended %s", pairs(error=error.strerror))
    except Exception:
        # A bug of ours that one connection brought out. It costs that connection; ending the service would let whoever
        # found it take everybody's GPU scheduling down again and again.
        log.exception("connection failed")
    finally:
        room.release_on_behalf_of(token)
