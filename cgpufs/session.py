"""A FUSE session of our own, straight on /dev/fuse: the read-only Views, beside the tree that pyfuse3 serves.

pyfuse3 has one session a process. What a read-only file system of small files needs is a dozen requests of a stable
kernel interface (linux/fuse.h), with these properties:

* Each request is answered before the next await, and what is refused is refused for every way to ask for it, so the
  file system stays read-only when somebody remounts it (or a bind of it) writable.
* The descriptor is non-blocking: a request withdrawn between poll and read costs nothing.
* At most BATCH requests, or for BATCH_SECONDS, are answered in a row (turn.py): readers in containers can take the
  daemon's time, not all of it, however much one answer costs.
"""

import errno
import logging
import os
import stat
import struct
from collections.abc import Callable

import trio

from cgpufs.mount import Mount, Unmounted
from cgpufs.tree import Attributes, TreeError
from cgpufs.turn import Turn
from cgpufs.views import Views
from cgpusched.fields import pairs

log = logging.getLogger(__name__)

_READ_BYTES = 135168  # below 8 KiB the kernel refuses to be read; this is what libfuse has for writes of 128 KiB
BATCH, BATCH_SECONDS = 16, 0.001
"""An administrator's open, read and close, which the tree answers in a row, wait so long for readers without end. One
answer costs 5 to 10 us, or a millisecond where an instance has hundreds of processes."""
_MINOR = 31  # of protocol 7, Linux 5.4: all we use is older, and the structures below are those since 7.23
_ATOMIC_O_TRUNC, _PARALLEL_DIROPS = 1 << 3, 1 << 18
_DIRECT_IO, _NOFLUSH = 1 << 0, 1 << 5

_IN = struct.Struct("<IIQQIIII")  # length, opcode, unique, nodeid, uid, gid, pid, 0
_OUT = struct.Struct("<IiQ")  # length, -errno, unique
_INIT_IN = struct.Struct("<IIII")  # major, minor, readahead, flags
_INIT_OUT = struct.Struct("<IIIIHHIIHHI28x")
_ATTR = struct.Struct("<QQQQQQIIIIIIIIII")
_ENTRY = struct.Struct("<QQQQII")  # nodeid, generation, timeouts in s, in ns
_ATTR_OUT = struct.Struct("<QII")
_OPEN_IN, _OPEN_OUT = struct.Struct("<II"), struct.Struct("<QII")
_READ_IN = struct.Struct("<QQI")  # handle, offset, size
_RELEASE_IN = struct.Struct("<Q")
_STATFS = struct.Struct("<QQQQQIIII24x")
_DIRENT = struct.Struct("<QQII")

LOOKUP, FORGET, GETATTR, SETATTR = 1, 2, 3, 4
SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME = 6, 8, 9, 10, 11, 12
LINK, OPEN, READ, WRITE, STATFS, RELEASE = 13, 14, 15, 16, 17, 18
SETXATTR, REMOVEXATTR, INIT, OPENDIR, READDIR, RELEASEDIR = 21, 24, 26, 27, 28, 29
CREATE, INTERRUPT, BATCH_FORGET, FALLOCATE, RENAME2, COPY_FILE_RANGE, TMPFILE = 35, 36, 42, 43, 45, 47, 51

SILENT = frozenset({FORGET, INTERRUPT, BATCH_FORGET})
CHANGES = frozenset({SETATTR, SYMLINK, MKNOD, MKDIR, UNLINK, RMDIR, RENAME, LINK, WRITE, SETXATTR, REMOVEXATTR, CREATE,
                     FALLOCATE, RENAME2, COPY_FILE_RANGE, TMPFILE})  # fmt: skip


class Session:
    """Answers requests for one Views."""

    def __init__(self, views: Views) -> None:
        self.views = views
        self._answers: dict[int, Callable[[int, bytes], bytes]] = {
            LOOKUP: self._lookup,
            GETATTR: self._getattr,
            OPEN: self._open,
            READ: self._read,
            RELEASE: self._release,
            OPENDIR: self._opendir,
            READDIR: self._readdir,
            RELEASEDIR: lambda node, data: b"",
            STATFS: lambda node, data: _STATFS.pack(0, 0, 0, 0, 0, 4096, 255, 4096, 0),
            INIT: self._init,
        }

    async def serve(
        self, mount: Mount, *, resend: bool = False, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
    ) -> None:
        """As Mount.serve(): until cancelled; the mount stays. Started when INIT is answered. Raises Unmounted."""
        # A successor's is refused by the kernel, which has its answer: ENOENT, not for anybody to know.
        _send(mount.fileno(), self.answer(mount.init_message))
        fd = mount.serving_fd()
        try:
            if resend:
                mount.resend()
            task_status.started()
            await self._answer_all(fd, mount)
        finally:
            os.close(fd)

    async def _answer_all(self, fd: int, mount: Mount) -> None:
        turn = Turn(BATCH, BATCH_SECONDS)
        room = bytearray(_READ_BYTES)  # once: os.read() would make and unmake it each time, which takes 30 us
        view = memoryview(room)
        while True:
            await turn.readable(fd)
            try:
                length = os.readv(fd, (room,))
            except BlockingIOError:
                continue
            except OSError as error:
                if error.errno == errno.ENOENT:  # withdrawn just now
                    continue
                if error.errno == errno.ENODEV:
                    raise Unmounted(f"{mount.path} was unmounted by somebody else") from None
                raise
            _send(fd, self.answer(bytes(view[:length])))

    def answer(self, request: bytes) -> bytes:
        """What to write for one request; empty where none is due."""
        length, opcode, unique, node, *_ = _IN.unpack_from(request)
        if opcode in SILENT:
            return b""
        try:
            if opcode in CHANGES:
                raise TreeError(errno.EROFS)
            if opcode not in self._answers:
                raise TreeError(errno.ENOSYS)
            body = self._answers[opcode](node, request[_IN.size : length])
        except TreeError as error:
            return _OUT.pack(_OUT.size, -error.errno, unique)
        except Exception:  # without an answer the client sleeps on, and nobody can kill it
            log.exception("bug %s", pairs(opcode=opcode, errno="EIO"))
            return _OUT.pack(_OUT.size, -errno.EIO, unique)
        return _OUT.pack(_OUT.size + len(body), 0, unique) + body

    def _init(self, node: int, data: bytes) -> bytes:
        _, minor, readahead, offered = _INIT_IN.unpack_from(data)
        flags = offered & (_ATOMIC_O_TRUNC | _PARALLEL_DIROPS)
        return _INIT_OUT.pack(7, min(minor, _MINOR), readahead, flags, 12, 9, 4096, 1, 0, 0, 0)

    def _lookup(self, node: int, data: bytes) -> bytes:
        found = self.views.lookup(node, data.rstrip(b"\0"))
        return _ENTRY.pack(found.inode, 0, *_time(found.entry_timeout, found.attr_timeout)) + self._attributes(found)

    def _getattr(self, node: int, data: bytes) -> bytes:
        found = self.views.getattr(node)
        seconds, nanoseconds = divmod(int(found.attr_timeout * 1e9), 10**9)
        return _ATTR_OUT.pack(seconds, nanoseconds, 0) + self._attributes(found)

    def _attributes(self, found: Attributes) -> bytes:
        seconds, nanoseconds = divmod(self.views.born_ns, 10**9)
        return _ATTR.pack(found.inode, found.size, (found.size + 511) // 512, *[seconds] * 3, *[nanoseconds] * 3,
                          found.mode, found.links, 0, 0, 0, 4096, 0)  # fmt: skip

    def _open(self, node: int, data: bytes) -> bytes:
        flags, _ = _OPEN_IN.unpack_from(data)
        return _OPEN_OUT.pack(self.views.open(node, flags), _DIRECT_IO | _NOFLUSH, 0)

    def _read(self, node: int, data: bytes) -> bytes:
        handle, offset, size = _READ_IN.unpack_from(data)
        return self.views.read(node, handle, offset, size)

    def _release(self, node: int, data: bytes) -> bytes:
        self.views.release(node, *_RELEASE_IN.unpack_from(data))
        return b""

    def _opendir(self, node: int, data: bytes) -> bytes:
        if not stat.S_ISDIR(self.views.getattr(node).mode):
            raise TreeError(errno.ENOTDIR)
        return _OPEN_OUT.pack(0, 0, 0)

    def _readdir(self, node: int, data: bytes) -> bytes:
        _, after, size = _READ_IN.unpack_from(data)
        page = b""
        for name, found, cookie in self.views.listing(node, after):
            entry = _DIRENT.pack(found.inode, cookie, len(name), found.mode >> 12) + name
            entry += bytes(-len(entry) % 8)
            if len(page) + len(entry) > size:
                break
            page += entry
        return page


def _time(*seconds: float) -> tuple[int, ...]:
    """Timeouts as a fuse_entry_out has them: all seconds, then all nanoseconds."""
    return (*(int(value) for value in seconds), *(int(value % 1 * 1e9) for value in seconds))


def _send(fd: int, answer: bytes) -> None:
    if not answer:
        return
    try:
        os.write(fd, answer)
    except OSError as error:
        # Its client was killed meanwhile (ENOENT), or the file system went (the next read says so).
        if error.errno not in (errno.ENOENT, errno.ENODEV, errno.EPERM, errno.ENOTCONN):
            raise
