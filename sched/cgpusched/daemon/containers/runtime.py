"""The socket at which cgpu-runtime asks: one question and one answer a connection, root only."""

from __future__ import annotations

import array
import errno
import logging
import os
import socket
from collections.abc import Awaitable, Callable
from pathlib import Path

import trio

from cgpusched.containers import wire
from cgpusched.daemon.logs import Damper
from cgpusched.daemon.server.listen import accept_forever, listen
from cgpusched.daemon.server.peers import Peer, identify
from cgpusched.daemon.survival.kept import Kept
from cgpusched.errors import CommandError, UserError
from cgpusched.fields import pairs
from cgpusched.sockets import send_now

log = logging.getLogger(__name__)

CONNECTIONS = 128
BACKLOG = 1024
QUESTION_SECONDS = 5.0
FDS_MAX = 2
"""A question brings a bundle, and perhaps a pidfd."""

Answerer = Callable[[Peer, wire.Question, list[int]], Awaitable[wire.Answer]]


class RuntimeServer:
    """Takes questions to ``answer``, whose UserErrors are refusals.

    The descriptors that came with a question are closed here afterwards, and so is the one of an answer. Cancel
    ``accepting`` to have it serve those who are connected and nobody else.
    """

    def __init__(self, path: Path, answer: Answerer, identify: Callable[[socket.socket], Peer] = identify,
                 kept: Kept | None = None) -> None:
        self.path = path
        self.accepting = trio.CancelScope()
        self._kept = kept
        self._answer = answer
        self._identify = identify
        self._damper = Damper()

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; the socket is there when the task reports started, and gone when it ends."""
        with listen(self.path, socket.SOCK_SEQPACKET, 0o600, BACKLOG, self._kept) as listener:
            task_status.started()
            async with trio.open_nursery() as nursery:
                with self.accepting:
                    await accept_forever(listener, nursery, trio.CapacityLimiter(CONNECTIONS), self._connection)

    async def _connection(self, sock: trio.socket.SocketType) -> None:
        peer = self._identify(sock)  # type: ignore[arg-type]  # a trio socket answers getsockopt like any
        fds: list[int] = []
        try:
            if peer.uid != 0:  # the socket's mode keeps others out; this, those who were handed a connection
                self._drop(peer, f"uid {peer.uid} may not")
                return
            with trio.move_on_after(QUESTION_SECONDS) as waited:
                data = await _receive(sock, fds)
            if waited.cancelled_caught:
                self._drop(peer, f"no question within {QUESTION_SECONDS:.0f} s")
            elif data:
                _send(sock, await self._reply(peer, wire.parse(data), fds))
        except wire.ProtocolError as error:
            self._drop(peer, str(error))
        finally:
            peer.close()
            for fd in fds:
                os.close(fd)

    async def _reply(self, peer: Peer, question: wire.Question, fds: list[int]) -> wire.Answer:
        try:
            return await self._answer(peer, question, fds)
        except UserError as error:
            code = error.errno if isinstance(error, CommandError) else errno.EINVAL
            log.warning("refused %s", pairs(
                what=question.kind.name.lower(), id=question.id or None, pid=peer.pid, reason=error))
            return wire.refusal(code, str(error))

    def _drop(self, peer: Peer, reason: str) -> None:
        if (held := self._damper.note()) is not None:
            log.warning("runtime dropped %s%s", pairs(uid=peer.uid, pid=peer.pid, reason=reason), held)


async def _receive(sock: trio.socket.SocketType, fds: list[int]) -> bytes:
    """One message; what descriptors came with it are in ``fds``, the caller's to close, whatever is raised."""
    room = socket.CMSG_SPACE(FDS_MAX * array.array("i").itemsize)
    data, ancillary, flags, _ = await sock.recvmsg(wire.HEAD.size + wire.TEXT_MAX + 1, room, socket.MSG_CMSG_CLOEXEC)
    for level, kind, content in ancillary:
        if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
            numbers = array.array("i")
            numbers.frombytes(content[: len(content) - len(content) % numbers.itemsize])
            fds.extend(numbers)
    if flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC):
        raise wire.ProtocolError("its question is too long, or brings too many descriptors")
    return data


def _send(sock: trio.socket.SocketType, answer: wire.Answer) -> None:
    """OSError: who asked has gone."""
    try:
        send_now(sock.fileno(), answer.packed(), [answer.fd] if answer.fd >= 0 else [])
    finally:
        if answer.fd >= 0:
            os.close(answer.fd)
