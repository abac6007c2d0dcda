"""The sockets that programs attach by: one an instance. Which socket a process came by is its identity.

Each instance has a folder ``<runtime>/inst/<id>`` (later bound into its container) with ``gate.sock`` and ``limits``. A
connection is a process's presence: its hello gives it a slot on every GPU of the instance and the descriptors of the
pages; its end, or the process's (told by pidfd, since a forked child may hold a copy of the socket), takes the slot
back at once. In between it may say that it has taken memory which no hook counts, and is answered when that counts.

What one instance can use up is its own: connections beyond its limit wait in the kernel's queue, and accepting is
paced.
"""

from __future__ import annotations

import errno
import logging
import os
import shutil
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from pathlib import Path

import trio

from cgpusched import files
from cgpusched.commands import Command, Create, Destroy, SetMemsize
from cgpusched.daemon.logs import Damper
from cgpusched.daemon.processes import Attachment
from cgpusched.daemon.server import wire
from cgpusched.daemon.server.listen import accept_forever, bind
from cgpusched.daemon.server.peers import Peer, identify
from cgpusched.daemon.system import System
from cgpusched.errors import CommandError
from cgpusched.fields import pairs
from cgpusched.gate import agent_channel
from cgpusched.model import Instance
from cgpusched.sockets import SUN_PATH, send_now
from cgpusched.units import uuid_bytes

log = logging.getLogger(__name__)

CONNECTIONS = wire.SLOTS + 32
"""Of one instance at a time. The slots are the limit; a few more can be told so instead of waiting."""
BACKLOG = 1024
HELLO_SECONDS = 5.0
BURST, RATE = 1024, 500.0
"""Connections of one instance: so many at once, then so many a second. 300 programs started together are not paced."""


@dataclass
class _Door:
    """An instance's socket and who came through it."""

    instance: Instance
    folder: Path
    listener: socket.socket
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)
    attached: set[Attachment] = field(default_factory=set)
    damper: Damper = field(default_factory=Damper)
    tokens: float = BURST
    paced: float = 0.0

    async def pace(self) -> None:
        now = trio.current_time()
        self.tokens = min(BURST, self.tokens + (now - self.paced) * RATE)
        self.paced = now
        if self.tokens < 1:
            await trio.sleep((1 - self.tokens) / RATE)
        self.tokens -= 1


class Clients:
    """Opens and closes the doors as instances come and go; register ``changed`` in System.on_change.

    All methods run on the trio thread and await nothing; the connections are tasks of ``nursery``.
    """

    def __init__(
        self,
        system: System,
        runtime: Path,
        nursery: trio.Nursery,
        on_detach: Callable[[str], None] = lambda ident: None,
        who: Callable[[socket.socket], Peer] = identify,
        foreign: Callable[[int, str], bool] = lambda pid, ident: False,
        container: Callable[[str], bool] = lambda ident: False,
        take_in: Callable[[int, int], Awaitable[None]] | None = None,
        alike: Callable[[int], bool] = lambda pid: False,
    ) -> None:
        """``on_detach(id)`` is called after a process of that instance went away.

        ``foreign(pid, id)``: whether a process is known to belong elsewhere, though it came by this instance's socket.
        ``container(id)``: whether it is a container, whose programs have any uid. ``take_in(gpu, pid)``: sees that all
        memory of the process counts; None: nobody can. ``alike(pid)``: whether NVML counts processes as this one does.
        """
        self._system = system
        self._base = runtime / "inst"
        self._nursery = nursery
        self._on_detach = on_detach
        self._who = who
        self._foreign = foreign
        self._container = container
        self._take_in = take_in
        self._alike = alike
        self._doors: dict[str, _Door] = {}

    def folder(self, ident: str) -> Path:
        return self._base / ident

    def socket(self, ident: str) -> Path:
        """What CGPU_SOCKET names for a program of this instance; as long as a socket address holds, if it can be."""
        return (self._alias(ident) or self.folder(ident)) / "gate.sock"

    def _alias(self, ident: str) -> Path | None:
        """A symbolic link to the folder, where an ID makes the path too long for clients. No ID begins with a dot."""
        path = os.fsencode(self.folder(ident) / "gate.sock")
        return None if len(path) <= SUN_PATH else self._base / f".{ident[:12]}"

    def count(self, ident: str) -> int:
        """Attached processes of this instance."""
        door = self._doors.get(ident)
        return len(door.attached) if door else 0

    def changed(self, command: Command, instance: Instance | None) -> None:
        """Follows a command that succeeded. OSError from a Create means that the instance has no socket."""
        match command:
            case Create() if instance is not None:
                self._open(instance)
            case Destroy() if instance is not None:
                self._close(instance.id)
            case SetMemsize() if instance is not None:
                self._write_limits(instance)

    def close(self) -> None:
        """Closes every socket, for the daemon's end. The limits stay: programs started meanwhile keep to them."""
        for door in self._doors.values():
            door.scope.cancel()  # its task closes the listener
            (door.folder / "gate.sock").unlink(missing_ok=True)
        self._doors.clear()

    def resume(self) -> None:
        """Opens the doors of the instances that there are from the start, in the folders that they have.

        OSError: one cannot be opened.
        """
        for instance in self._system.state.instances.values():
            self._open(instance, resumed=True)

    def _open(self, instance: Instance, resumed: bool = False) -> None:
        folder = self.folder(instance.id)
        if not resumed:
            shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(mode=0o711, exist_ok=resumed)
        try:
            folder.chmod(0o711)  # whatever the umask took: programs of any user must reach the socket
            self._write_limits(instance)
            if alias := self._alias(instance.id):
                if not (resumed and alias.is_symlink() and os.readlink(alias) == folder.name):
                    alias.unlink(missing_ok=True)
                    alias.symlink_to(folder.name)
            # Its owner's and root's alone: whoever reaches it could take all its slots, memory and turns. A container's
            # programs have any uid and come by a bind of the folder; who comes from elsewhere is known by his cgroup.
            mode = 0o666 if self._container(instance.id) else 0o600
            listener = bind(folder / "gate.sock", socket.SOCK_SEQPACKET, mode, BACKLOG, instance.owner)
        except OSError:
            if not resumed:
                shutil.rmtree(folder, ignore_errors=True)
            raise
        door = self._doors[instance.id] = _Door(instance, folder, listener, paced=trio.current_time())
        self._nursery.start_soon(self._listen, door, name=f"clients {instance.id}")

    def _close(self, ident: str) -> None:
        door = self._doors.pop(ident, None)
        if door is not None:
            door.scope.cancel()
            if alias := self._alias(ident):
                alias.unlink(missing_ok=True)
            shutil.rmtree(door.folder, ignore_errors=True)

    def _write_limits(self, instance: Instance) -> None:
        """What a client holds to when nobody answers at its first join: lines ``UUID BYTES`` and ``UUID native``."""
        gpus, shares = self._system.state.gpus, instance.shares
        has = {gpu: shares[gpu].memsize if gpu in shares else "native" for gpu in instance.seen}
        text = "".join(f"{gpus[gpu].uuid} {what}\n" for gpu, what in has.items())
        files.replace(self.folder(instance.id) / "limits", text.encode(), 0o644)

    async def _listen(self, door: _Door) -> None:
        with door.scope, trio.socket.from_stdlib_socket(door.listener) as listener:
            room = trio.CapacityLimiter(CONNECTIONS)
            async with trio.open_nursery() as nursery:
                await accept_forever(
                    listener, nursery, room, lambda sock: self._connection(door, sock), door.pace
                )

    async def _connection(self, door: _Door, sock: trio.socket.SocketType) -> None:
        peer = self._who(sock)  # type: ignore[arg-type]  # a trio socket answers getsockopt like any
        try:
            await self._greet(door, sock, peer)
        except wire.ProtocolError as error:
            if isinstance(error, wire.VersionError):  # it goes on by itself, and can say why
                send_now(sock.fileno(), wire.refusal(door.instance.id, errno.EPROTO, str(error)))
            if (held := door.damper.note()) is not None:
                log.warning("client dropped %s%s", pairs(instance=door.instance.id, pid=peer.pid, reason=error), held)
        finally:
            peer.close()

    async def _greet(self, door: _Door, sock: trio.socket.SocketType, peer: Peer) -> None:
        with trio.move_on_after(HELLO_SECONDS) as waited:
            # One byte more than a hello shows a longer one. recv() has no room for descriptors: the kernel drops any
            # sent.
            data = await sock.recv(wire.HELLO.size + 1)
        if waited.cancelled_caught:
            raise wire.ProtocolError(f"no hello within {HELLO_SECONDS:.0f} s")
        if not data:
            return
        hello = wire.parse_hello(data)
        instance = door.instance
        # Its socket's mode keeps others out; this, those who were handed a descriptor of the folder or a connection.
        if peer.uid not in (0, instance.owner) and not self._container(instance.id):
            owner = f"uid {instance.owner}" if instance.owner else "root"
            self._turn_away(door, sock, peer, f"instance {instance.id[:64]} belongs to {owner}")
            return
        if self._foreign(peer.pid, instance.id):
            self._turn_away(door, sock, peer, f"process {peer.pid} is not in container {instance.id[:64]}")
            return
        if self._doors.get(instance.id) is not door:  # destroyed since
            return
        if hello.info_only:
            idle = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)  # in the agent's place; nobody rings it
            try:
                self._send_pages(door, sock, peer, idle)
            finally:
                os.close(idle)
            await self._until_gone(sock, peer)
            return
        await self._present(door, sock, peer)

    async def _present(self, door: _Door, sock: trio.socket.SocketType, peer: Peer) -> None:
        """From the hello to the end of the process or its connection."""
        instance = door.instance
        try:
            attachment = self._attach(door, sock, peer)
        except CommandError as error:
            self._refused(door, peer, str(error))
            send_now(sock.fileno(), wire.refusal(instance.id, error.errno, str(error)))
            return
        door.attached.add(attachment)
        log.debug("attached %s", pairs(instance=instance.id, pid=peer.pid))
        try:
            await self._until_gone(sock, peer, attachment)
        finally:
            door.attached.discard(attachment)
            self._system.detach_process(attachment)
            log.debug("detached %s", pairs(instance=instance.id, pid=peer.pid))
            self._on_detach(instance.id)

    def _attach(self, door: _Door, sock: trio.socket.SocketType, peer: Peer) -> Attachment:
        """A slot on each GPU, and the welcome sent."""
        ours, theirs = agent_channel()
        try:
            attachment = self._system.attach_process(door.instance.id, peer.pid, ours)
            try:
                self._send_pages(door, sock, peer, theirs, attachment)
            except BaseException:
                self._system.detach_process(attachment)
                raise
            return attachment
        finally:  # the gate has its own copy of one end, and the client of the other
            os.close(ours)
            os.close(theirs)

    def _send_pages(
        self, door: _Door, sock: trio.socket.SocketType, peer: Peer, agent: int, attachment: Attachment | None = None
    ) -> None:
        """Sends the welcome and the descriptors; without an attachment the slots are nobody's (``slot_gen`` 0)."""
        state, instance = self._system.state, door.instance
        regions = self._system.regions(instance.id)
        slots = {ticket.gpu: (ticket.slot, ticket.generation) for ticket in attachment.tickets} if attachment else {}
        flags = wire.GPU_NOTES if self._take_in and attachment else 0
        flags |= wire.GPU_PIDS if self._alike(peer.pid) else 0
        gpus, fds = [], [agent]
        for index, share in instance.shares.items():
            gpu, region = state.gpus[index], regions[index]
            slot, generation = slots.get(index, (0, 0))
            gpus.append(
                wire.WelcomeGpu(uuid_bytes(gpu.uuid), index, slot, generation, share.memsize, gpu.memory, flags)
            )
            fds.extend((region.ctl_fd, region.report_fd, region.bell_fd))
        whole = [state.gpus[index] for index in instance.native]
        native = [wire.NativeGpu(uuid_bytes(gpu.uuid), gpu.index, gpu.memory) for gpu in whole]
        send_now(sock.fileno(), wire.welcome(instance.id, gpus, native), fds)

    async def _until_gone(
        self, sock: trio.socket.SocketType, peer: Peer, attachment: Attachment | None = None
    ) -> None:
        """Returns when the connection or its process ends. Notes are answered meanwhile, one at a time."""
        wrong: wire.ProtocolError | None = None
        async with trio.open_nursery() as nursery:

            async def process() -> None:
                await trio.lowlevel.wait_readable(peer.pidfd)
                nursery.cancel_scope.cancel()

            async def notes() -> None:
                while said := await sock.recv(wire.NOTE.size + 1):
                    await self._take_note(sock, peer, attachment, wire.parse_note(said))

            nursery.start_soon(process)
            try:
                await notes()
            except wire.ProtocolError as error:
                wrong = error
            except OSError:  # reset: it went away with something unread
                pass
            nursery.cancel_scope.cancel()
        if wrong:
            raise wrong

    async def _take_note(
        self, sock: trio.socket.SocketType, peer: Peer, attachment: Attachment | None, note: wire.Note
    ) -> None:
        if self._take_in is None or attachment is None or note.gpu not in {ticket.gpu for ticket in attachment.tickets}:
            raise wire.ProtocolError("a note that nobody asked for")
        await self._take_in(note.gpu, peer.pid)
        try:
            send_now(sock.fileno(), wire.note(note))
        except BlockingIOError:
            raise wire.ProtocolError("it does not read the answers to its notes") from None

    def _turn_away(self, door: _Door, sock: trio.socket.SocketType, peer: Peer, reason: str) -> None:
        self._refused(door, peer, reason)
        send_now(sock.fileno(), wire.refusal(door.instance.id, errno.EACCES, reason))

    def _refused(self, door: _Door, peer: Peer, reason: str) -> None:
        if (held := door.damper.note()) is not None:
            log.warning("client refused %s%s", pairs(instance=door.instance.id, pid=peer.pid, reason=reason), held)
