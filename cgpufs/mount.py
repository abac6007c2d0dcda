"""The life of a mount: made by mount(2) here, served through pyfuse3, and left behind for a successor if need be.

A FUSE mount lives as long as any copy of its /dev/fuse descriptor is open, and the kernel sends INIT once. So we mount
by ourselves, read INIT by ourselves and keep both. Each daemon, the first as well as a successor, replays INIT to
libfuse through a socket that libfuse takes for an already mounted device (``/dev/fd/N``); in ``Operations.init()``,
which runs before libfuse answers, the real device is dup2()ed over that socket. The kernel takes the first answer and
refuses later ones (ENOENT), which libfuse ignores.

Two things of pyfuse3 3.5 are worked around here:

* It reads /dev/fuse blockingly after epoll. A client killed in between withdraws its request, and the whole loop would
  stand still until the next one: the descriptor is non-blocking, and the EAGAIN that pyfuse3 then raises is met by
  calling main() again. Nothing is lost by that: handlers never wait (ops.py), so no request is half served. But
  each such turn leaks pyfuse3's buffer (1 MiB of addresses, 4 KiB of memory), and a client that starts and kills
  readers in a loop makes them at will (44 of 200 kills under a busy daemon). So _Seam asks the device once more just
  before the read, which leaves a window of a few µs (0 of 900 kills).
* terminate() may throw away a request just read; serve() is stopped by cancelling it instead.

What a killed daemon had read and not answered comes again (FUSE_NOTIFY_RESEND, Linux 6.9). Before that those requests
would wait for ever, unkillably, as long as somebody holds the device. So there requests are read from a clone of it
(FUSE_DEV_IOC_CLONE), which dies with the daemon, and they end with ECONNABORTED. INIT is answered on the device itself,
since the kernel takes an answer only from where the request was read.
"""

import contextlib
import ctypes
import errno
import fcntl
import logging
import os
import re
import select
import socket
import struct
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path

import pyfuse3
import trio

from cgpufs.ops import Operations
from cgpufs.turn import Turn
from cgpusched.errors import UserError
from cgpusched.fields import pairs

log = logging.getLogger(__name__)

FSTYPE = "fuse.cgpufs"
SOURCE = "cgpu"

_MS_RDONLY, _MS_NOSUID, _MS_NODEV, _MS_NOEXEC = 1, 2, 4, 8
_MNT_DETACH, _UMOUNT_NOFOLLOW = 2, 8
_HEADER = struct.Struct("<IIQQIIII")  # fuse_in_header: length, opcode, unique, ...
_OPCODE_INIT = 26
_READ_BYTES = 135168  # below 8 KiB the kernel refuses to be read
_CLONE = 0x8004E500  # FUSE_DEV_IOC_CLONE
_NOTIFY_RESEND = struct.pack("<IiQ", 16, 7, 0)  # fuse_out_header with unique 0: a notification, its code as the error
_INIT_WAIT_MS = 5000
PROBE_SECONDS = 1.0
TURN_REQUESTS, TURN_SECONDS = 32, 0.002
"""How much pyfuse3 answers in a row: six or seven programs' open, read and close."""

_libc = ctypes.CDLL(None, use_errno=True)


class Unmounted(Exception):
    """Somebody else unmounted the tree, or the kernel aborted its connection."""


def can_resend() -> bool:
    """Whether the kernel repeats what a dead daemon had read."""
    found = re.match(r"(\d+)\.(\d+)", os.uname().release)
    return found is not None and (int(found[1]), int(found[2])) >= (6, 9)


@dataclass(frozen=True)
class MountPoint:
    """One line of /proc/self/mountinfo. ``device``: ``major:minor`` of the superblock."""

    path: str
    device: str
    fstype: str


def mount_points() -> Iterator[MountPoint]:
    """What is mounted, oldest first. Asks no file system, so that a dead one cannot make us wait."""
    with open("/proc/self/mountinfo", encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            before, _, after = line.partition(" - ")
            fields = before.split(" ")
            path = re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), fields[4])
            yield MountPoint(path, fields[2], after.split(" ")[0])


def _top(path: Path) -> MountPoint | None:
    """The mount that ``path`` leads into, if it is a mount point."""
    return next((point for point in reversed(list(mount_points())) if point.path == str(path)), None)


def device_at(path: Path | str) -> str | None:
    """``major:minor`` of the tree that is mounted at ``path``, if one is on top there."""
    point = _top(_resolved(Path(path)))
    return point.device if point is not None and point.fstype == FSTYPE else None


def detach_stale(path: Path) -> int:
    """Takes off the trees that predecessors left at ``path`` (each stat of them fails or hangs). Returns how many."""
    count = 0
    while (point := _top(path)) is not None and point.fstype == FSTYPE:
        _umount(path)
        count += 1
        log.warning("stale mount detached %s", pairs(path=path, device=point.device))
    return count


def _check_free(path: Path) -> None:
    """UserError where a mount of somebody else's, or a tree that a living cgpud serves, is on top."""
    point = _top(path)
    if point is None:
        return
    if point.fstype != FSTYPE:
        raise UserError(f"cannot mount the tree on {path}: something else is mounted there (type {point.fstype})")
    if _answers(path):
        raise UserError(f"cannot mount the tree on {path}: another cgpud serves its tree there")


def _answers(path: Path) -> bool:
    """Whether somebody serves the tree at ``path``. A dead one fails at once; a kept one that nobody reads hangs."""
    found: list[os.stat_result] = []

    def look() -> None:
        with contextlib.suppress(OSError):
            found.append(os.stat(path / "version"))

    # A thread of its own, and one that does not hold up our end: where nobody answers it waits until the mount goes.
    thread = threading.Thread(target=look, name="probe", daemon=True)
    thread.start()
    thread.join(PROBE_SECONDS)
    return bool(found)


def _umount(path: Path) -> None:
    if _libc.umount2(os.fsencode(path), _MNT_DETACH | _UMOUNT_NOFOLLOW) != 0:
        code = ctypes.get_errno()
        raise OSError(code, os.strerror(code), str(path))


def _resolved(path: Path) -> Path:
    """``path`` as mountinfo shows it, without touching what may be mounted there."""
    path = Path(os.path.abspath(path))
    return Path(os.path.realpath(path.parent)) / path.name


def _read_init(fd: int) -> bytes:
    poller = select.poll()
    poller.register(fd, select.POLLIN)
    if not poller.poll(_INIT_WAIT_MS):
        raise OSError(errno.ETIMEDOUT, "the kernel sent no FUSE_INIT")
    return os.read(fd, _READ_BYTES)


class Mount:
    """A mounted tree: its path, the /dev/fuse descriptor and the INIT request. Use create() or adopt()."""

    _serving = False  # of this process: pyfuse3's session is a static variable

    def __init__(self, fd: int, init_message: bytes, path: Path, device: str) -> None:
        self._fd = fd
        self.init_message = init_message
        """The kernel's FUSE_INIT request, for a successor."""
        self.path = path
        self.device = device

    @classmethod
    def create(cls, path: Path | str, *, read_only: bool = False) -> "Mount":
        """Mounts a tree at ``path`` (made if it is missing); a dead predecessor's there is detached first.

        Needs CAP_SYS_ADMIN. Raises UserError with one line if it cannot be done, or would hide what somebody else has
        mounted there. May take PROBE_SECONDS. Requests wait until serve().
        """
        where = _resolved(Path(path))
        try:
            _check_free(where)
            detach_stale(where)
            where.mkdir(parents=True, exist_ok=True)
            if where.is_symlink():
                raise UserError(f"cannot mount the tree on {where}: it is a symbolic link")
            fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
        except OSError as error:
            raise UserError(f"cannot mount the tree on {where}: {error.filename}: {error.strerror}") from None
        try:
            options = f"fd={fd},rootmode=40000,user_id=0,group_id=0,default_permissions,allow_other"
            flags = _MS_NOSUID | _MS_NODEV | _MS_NOEXEC | (_MS_RDONLY if read_only else 0)
            if _libc.mount(SOURCE.encode(), os.fsencode(where), FSTYPE.encode(), flags, options.encode()) != 0:
                code = ctypes.get_errno()
                raise UserError(f"cannot mount the tree on {where}: {os.strerror(code)} (cgpud runs as root)")
            point = _top(where)
            assert point is not None
            try:
                return cls(fd, _read_init(fd), where, point.device)
            except OSError as error:
                _umount(where)
                raise UserError(f"cannot mount the tree on {where}: {error.strerror}") from None
        except BaseException:
            os.close(fd)
            raise

    @classmethod
    def adopt(cls, fd: int, init_message: bytes, path: Path | str) -> "Mount":
        """Takes over a mount whose descriptor and INIT request a predecessor left. Owns ``fd`` from here on.

        Raises UserError (``fd`` is closed then) if they are not what they should be, or the tree is gone.
        """
        where = _resolved(Path(path))
        try:
            length, opcode = _HEADER.unpack_from(init_message)[:2] if len(init_message) >= _HEADER.size else (0, 0)
            if length != len(init_message) or opcode != _OPCODE_INIT:
                raise UserError(f"cannot take over {where}: what was kept is no FUSE_INIT request")
            poller = select.poll()
            poller.register(fd, select.POLLIN)
            point = _top(where)
            if point is None or point.fstype != FSTYPE or any(event & select.POLLERR for _, event in poller.poll(0)):
                raise UserError(f"cannot take over {where}: it was unmounted")
            os.set_blocking(fd, False)
            os.set_inheritable(fd, False)
        except BaseException:
            os.close(fd)
            raise
        return cls(fd, init_message, where, point.device)

    def fileno(self) -> int:
        """The /dev/fuse descriptor: the mount lives as long as any copy of it is open."""
        return self._fd

    def serving_fd(self) -> int:
        """A descriptor to read requests from, the caller's: once INIT is answered on the device itself."""
        if not can_resend():
            fd = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
            try:
                fcntl.ioctl(fd, _CLONE, struct.pack("=I", self._fd))
                return fd
            except OSError as error:
                os.close(fd)
                log.warning("device not cloned %s", pairs(path=self.path, reason=error.strerror))
        return os.dup(self._fd)

    async def serve(
        self,
        operations: Operations,
        *,
        resend: bool = False,
        task_status: "trio.TaskStatus[None]" = trio.TASK_STATUS_IGNORED,
    ) -> None:
        """Answers requests until cancelled; the mount stays, and may be served again (one at a time in a process).

        ``resend``: have the kernel repeat what a dead predecessor read and did not answer; never while it still serves.
        Started (``nursery.start``) when INIT is answered: from then on the tree answers. Raises Unmounted.
        """
        if Mount._serving:
            raise RuntimeError("pyfuse3 has one session: this process serves a mount already")
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with ours:
            ours.send(self.init_message)
        number = theirs.detach()
        serving = self.serving_fd()
        answered = trio.Event()
        taken_over = False

        def take_over() -> None:
            nonlocal taken_over
            os.dup2(self._fd, number, inheritable=False)
            taken_over = True

        def before_read() -> None:  # libfuse has answered by then: it does so in the step in which it calls take_over()
            if taken_over and not answered.is_set():
                os.dup2(serving, number, inheritable=False)
                answered.set()

        operations.on_init = take_over
        pyfuse3.trio = _Seam(before_read)  # type: ignore[attr-defined]
        try:
            pyfuse3.init(operations, f"/dev/fd/{number}", set())
        except BaseException:
            os.close(number)
            os.close(serving)
            raise
        gone = False
        Mount._serving = True
        try:
            async with trio.open_nursery() as nursery:
                nursery.start_soon(_pump)
                await answered.wait()
                # Not before: INIT itself would be sent again, answered EIO, and the mount be refused for ever.
                if resend:
                    self.resend()
                task_status.started()
        except* Unmounted:
            gone = True
        finally:
            operations.on_init = None
            Mount._serving = False
            pyfuse3.close(unmount=False)  # libfuse would unmount "/dev/fd/N"; closes its copy of the device
            os.close(serving)
        if gone:
            raise Unmounted(f"{self.path} was unmounted by somebody else")

    def resend(self) -> bool:
        """FUSE_NOTIFY_RESEND: requests that were read and not answered come again. False: the kernel cannot (< 6.9)."""
        if not can_resend():
            return False
        try:
            os.write(self._fd, _NOTIFY_RESEND)
        except OSError as error:
            if error.errno != errno.EINVAL:
                raise
            return False
        return True

    def close(self) -> None:
        """Gives up this process's descriptor; the mount goes on if somebody else has a copy."""
        if self._fd >= 0:
            os.close(self._fd)
            self._fd = -1

    def unmount(self) -> None:
        """Takes the tree off its path, if it is still there and on top, and ends it. What clients hold open fails.

        The empty mount point goes too: what scripts write to the tree while nobody serves it must fail, not make files.
        """
        point = _top(self.path)
        if point is not None and point.device == self.device:
            _umount(self.path)
            with contextlib.suppress(OSError):
                self.path.rmdir()
        elif point is not None:
            log.warning("not unmounted %s", pairs(path=self.path, reason="something else is mounted over it"))
        self.close()


class _Lowlevel:
    """trio.lowlevel with a Turn's wait_readable(), which looks once more just before what pyfuse3 reads blocks."""

    def __init__(self, before: Callable[[], None]) -> None:
        self._before = before
        self._turn = Turn(TURN_REQUESTS, TURN_SECONDS)

    def __getattr__(self, name: str) -> object:
        return getattr(trio.lowlevel, name)

    async def wait_readable(self, fd: int) -> None:
        self._before()
        await self._turn.readable(fd)


class _NoLock:
    """In the place of trio.Lock, which would give the others a turn at each request: there is one task (_pump())."""

    async def __aenter__(self) -> None: ...

    async def __aexit__(self, *_: object) -> None: ...


class _Seam:
    """What pyfuse3 finds under the name trio: a seam of its own making (``pyfuse3.asyncio`` uses it too)."""

    Lock = _NoLock

    def __init__(self, before_read: Callable[[], None]) -> None:
        self.lowlevel = _Lowlevel(before_read)

    def __getattr__(self, name: str) -> object:
        return getattr(trio, name)


async def _pump() -> None:
    """pyfuse3.main() that outlives withdrawn requests. One task is enough, since no handler waits."""
    while True:
        withdrawn = False
        try:
            await pyfuse3.main(min_tasks=1, max_tasks=1)
        except* OSError as group:
            if any(not isinstance(e, OSError) or e.errno != errno.EAGAIN for e in group.exceptions):
                raise
            withdrawn = True
        if not withdrawn:
            raise Unmounted
