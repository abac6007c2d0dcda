"""The control socket: cgpuctl's and cgpu-smi's way in. One JSON object a line each way; docs/commands.md has the
protocol.

Everybody may connect (mode 0666), so that whoever may not do a thing is told so in a line; the kernel says who asks.
What a request does happens between two awaits, so no other task sees half of it. A slow or silent client holds one
connection of its own user's few, for a bounded time, and nothing else.
"""

from __future__ import annotations

import errno
import json
import logging
import os
import secrets
import socket
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import trio

from cgpusched.commands import Command, Create, Destroy
from cgpusched.daemon.lifetime import Lifetimes
from cgpusched.daemon.logs import Damper
from cgpusched.daemon.server import requests
from cgpusched.daemon.server.access import Access
from cgpusched.daemon.server.listen import accept_forever, listen
from cgpusched.daemon.server.peers import Peer, identify
from cgpusched.daemon.survival.kept import Kept
from cgpusched.errors import CommandError, UserError
from cgpusched.fields import pairs
from cgpusched.model import Instance
from cgpusched.state import State

log = logging.getLogger(__name__)

LINE_LIMIT = 64 << 10
IDLE_SECONDS = 30.0
WRITE_SECONDS = 10.0
CONNECTIONS = 384
CONNECTIONS_OF_OTHERS = 192
"""Of all users but root together, so that there is always room for root."""
CONNECTIONS_OF_A_USER = 64
BACKLOG = 1024
ANCHORS_LIMIT = 1024

Answer = dict[str, Any]


class Control:
    """What each request does. Raises UserError for what the client is told."""

    def __init__(
        self,
        state: State,
        apply: Callable[[Command], Instance | None],
        access: Access,
        lives: Lifetimes,
        environment: Callable[[str], dict[str, str]],
        lib_dir: Path,
        status: Callable[[], Answer],
        processes: Callable[[str], int],
    ) -> None:
        """``environment(id)``: the variables of a program in that instance, CGPU_SOCKET among them.

        ``apply`` need not log what it refuses: each refused request is logged here, with who asked.
        """
        self.state = state
        self.apply = apply
        self.access = access
        self.lives = lives
        self.environment = environment
        self.lib_dir = lib_dir
        self.status = status
        self.processes = processes
        self._users = trio.CapacityLimiter(2)

    async def answer(self, peer: Peer, line: bytes) -> Answer:
        request = requests.parse(line)
        if request.do == "list":
            return {"instances": [self._describe(instance) for instance in self.state.instances.values()]}
        if request.do == "status":
            return self.status()
        if peer.uid != 0:
            # The user database may be a network away: ask it in a thread, before anything is decided. Root does not
            # queue behind users whose answer does not come.
            await trio.to_thread.run_sync(self.access.check_member, peer, request.do, limiter=self._users)
        if request.do != "destroy":
            await self.lives.settled()  # a script's next program gets what its last one just gave up
        if request.do == "run":
            return self._run(peer, request)
        if request.do == "create":
            assert request.id is not None
            return {"id": self._create(peer, request.id, request, ephemeral=False).id}
        return self._destroy(peer, request)

    def _describe(self, instance: Instance) -> Answer:
        return {
            "id": instance.id,
            "short": instance.short,
            "ephemeral": instance.ephemeral,
            "owner": instance.owner,
            "processes": self.processes(instance.id),
            "gpus": [
                {"gpu": gpu, "memsize": share.memsize, "weight": share.weight, "highprio": share.highprio}
                for gpu, share in instance.shares.items()
            ],
            "native": list(instance.native),
        }

    def _create(self, peer: Peer, ident: str, request: requests.Request, ephemeral: bool) -> Instance:
        shares, owner = request.shares, peer.uid if request.user is None else request.user
        command = Create(
            ident, shares.gpus or (0,), shares.memsize, shares.weight, bool(shares.highprio), ephemeral, owner
        )
        self.access.check_create(peer, command, self.state)
        instance = self.apply(command)
        assert instance is not None
        return instance

    def _destroy(self, peer: Peer, request: requests.Request) -> Answer:
        assert request.id is not None
        instance = self.state.find(request.id)
        if instance is not None:
            self.access.check_owner(peer, instance, f"destroy {request.id}")
        self.apply(Destroy(instance.id if instance else request.id))
        return {}

    def _run(self, peer: Peer, request: requests.Request) -> Answer:
        instance = self.state.find(request.id) if request.id is not None else None
        pidfd = os.dup(peer.pidfd)  # first: without it an instance would be made that nothing ends
        try:
            if instance is None:
                made = instance = self._create(peer, request.id or self._new_id(), request, ephemeral=True)
            else:
                made = None
                self._check_join(peer, instance, request)
        except BaseException:
            os.close(pidfd)
            raise
        env = self.environment(instance.id)
        if made:
            self.lives.begin(instance.id, env["CGPU_SOCKET"], pidfd, instance.owner)
        else:
            self.lives.join(instance.id, pidfd)
        return {"id": instance.id, "socket": env["CGPU_SOCKET"], "lib_dir": str(self.lib_dir), "env": env}

    def _check_join(self, peer: Peer, instance: Instance, request: requests.Request) -> None:
        what = f"run --id {request.id}"
        self.access.check_owner(peer, instance, what)
        if request.shares.said or request.user is not None:
            raise CommandError(errno.EINVAL, f"{what}: that instance exists; gpu, mem, weight, highprio, user are for "
                                             "a new one (the tree's files change this one)")
        if self.lives.anchors(instance.id) >= ANCHORS_LIMIT:
            raise CommandError(errno.EAGAIN, f"{what}: {ANCHORS_LIMIT} processes were started in it already")

    def _new_id(self) -> str:
        while True:
            ident = f"run-{secrets.token_hex(4)}"  # 12 characters: what the tree shows is all of it
            if self.state.find(ident) is None:
                return ident


class ControlServer:
    """The socket itself: connections, lines, limits.

    Cancel ``accepting`` to have it serve those who are connected and nobody else.
    """

    def __init__(self, path: Path, answer: Callable[[Peer, bytes], Awaitable[Answer]],
                 identify: Callable[[socket.socket], Peer] = identify, kept: Kept | None = None) -> None:
        self.path = path
        self.accepting = trio.CancelScope()
        self._kept = kept
        self._answer = answer
        self._identify = identify
        self._users: Counter[int] = Counter()
        self._damper = Damper()

    async def serve(self, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED) -> None:
        """Serves until cancelled; the socket is there when the task reports started, and gone when it ends."""
        with listen(self.path, socket.SOCK_STREAM, 0o666, BACKLOG, self._kept) as listener:
            task_status.started()
            room = trio.CapacityLimiter(CONNECTIONS)
            async with trio.open_nursery() as nursery:
                with self.accepting:
                    await accept_forever(listener, nursery, room, self._connection)

    async def _connection(self, sock: trio.socket.SocketType) -> None:
        peer = self._identify(_stdlib(sock))
        try:
            if peer.uid and (error := self._too_many(peer.uid)):
                await self._send(sock, peer, self._refusal(peer, error))  # a fresh connection has room for it
                return
            self._users[peer.uid] += 1
            try:
                await self._lines(sock, peer)
            finally:
                self._users[peer.uid] -= 1
                if not self._users[peer.uid]:
                    del self._users[peer.uid]
        finally:
            peer.close()

    def _too_many(self, uid: int) -> CommandError | None:
        others = self._users.total() - self._users[0]
        if self._users[uid] < CONNECTIONS_OF_A_USER and others < CONNECTIONS_OF_OTHERS:
            return None
        return CommandError(errno.EAGAIN, f"too many connections: uid {uid} has {self._users[uid]} of at most "
                                          f"{CONNECTIONS_OF_A_USER}, all users {others} of {CONNECTIONS_OF_OTHERS}")

    async def _lines(self, sock: trio.socket.SocketType, peer: Peer) -> None:
        data = bytearray()
        while True:
            with trio.move_on_after(IDLE_SECONDS) as waited:
                while b"\n" not in data:
                    piece = await sock.recv(16384)
                    if not piece:
                        return
                    data += piece
                    if len(data) > LINE_LIMIT:
                        break
            if waited.cancelled_caught:
                return
            line, newline, rest = bytes(data).partition(b"\n")
            if not newline or len(line) > LINE_LIMIT:
                error = CommandError(errno.EMSGSIZE, f"a request has at most {LINE_LIMIT} bytes")
                await self._send(sock, peer, self._refusal(peer, error))
                return
            data = bytearray(rest)
            if not await self._send(sock, peer, await self._reply(peer, line)):
                return

    async def _reply(self, peer: Peer, line: bytes) -> Answer:
        try:
            return {"ok": True, **await self._answer(peer, line)}
        except UserError as error:
            return self._refusal(peer, error)

    def _refusal(self, peer: Peer, error: UserError) -> Answer:
        # Root's own are all shown; what others can provoke must not fill the journal.
        held = "" if peer.uid == 0 else self._damper.note()
        if held is not None:
            log.warning("refused %s%s", pairs(uid=peer.uid, pid=peer.pid, reason=error), held)
        name = error.name if isinstance(error, CommandError) else "EINVAL"
        return {"ok": False, "error": str(error), "errno": name}

    async def _send(self, sock: trio.socket.SocketType, peer: Peer, answer: Answer) -> bool:
        data = json.dumps(answer).encode() + b"\n"
        with trio.move_on_after(WRITE_SECONDS):
            while data:
                data = data[await sock.send(data):]
            return True
        self._complain(peer, "does not read its answer")
        return False

    def _complain(self, peer: Peer, why: str) -> None:
        if (held := self._damper.note()) is not None:
            log.warning("control connection closed %s%s", pairs(uid=peer.uid, pid=peer.pid, reason=why), held)


def _stdlib(sock: trio.socket.SocketType) -> socket.socket:
    """A trio socket answers getsockopt like the socket below it, and that is all identify() asks."""
    return sock  # type: ignore[return-value]
