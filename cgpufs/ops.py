"""The tree's pyfuse3 handlers: a thin shell over tree.Tree.

No handler waits for anything. So each request that was read is answered before the next await, whatever cancels the
serving task; one task serves all; and nothing that a client does (or stops doing) holds up another.
"""

import errno
import functools
import logging
from collections.abc import Callable, Coroutine, Sequence
from typing import Any, ParamSpec, TypeVar

import pyfuse3
from pyfuse3 import (
    EntryAttributes,
    FileInfo,
    FUSEError,
    ReaddirToken,
    RequestContext,
    SetattrFields,
    StatvfsData,
)

from cgpufs.tree import Attributes, Tree, TreeError
from cgpusched.fields import pairs

log = logging.getLogger(__name__)

P = ParamSpec("P")
R = TypeVar("R")


def _answered(handler: Callable[P, Coroutine[Any, Any, R]]) -> Callable[P, Coroutine[Any, Any, R]]:
    """Whatever goes wrong, the client gets an errno: a request without an answer holds it in an unkillable sleep."""

    @functools.wraps(handler)
    async def wrapper(*args: P.args, **kwargs: P.kwargs) -> R:
        try:
            return await handler(*args, **kwargs)
        except TreeError as error:
            raise FUSEError(error.errno) from None
        except FUSEError:
            raise
        except Exception:
            log.exception("bug %s", pairs(handler=handler.__name__, errno="EIO"))
            raise FUSEError(errno.EIO) from None

    return wrapper


class Operations(pyfuse3.Operations):
    """Serves one Tree. ``on_init`` is called when INIT has been read, before it is answered (mount.py needs that)."""

    supports_dot_lookup = False
    enable_writeback_cache = False
    enable_acl = False

    def __init__(self, tree: Tree) -> None:
        super().__init__()
        self.tree = tree
        self.on_init: Callable[[], None] | None = None

    def init(self) -> None:
        if self.on_init is not None:
            self.on_init()

    def _entry(self, attributes: Attributes) -> EntryAttributes:
        entry = EntryAttributes()
        entry.st_ino = attributes.inode
        entry.st_mode = attributes.mode
        entry.st_nlink = attributes.links
        entry.st_size = attributes.size
        entry.st_blocks = (attributes.size + 511) // 512
        entry.st_atime_ns = entry.st_mtime_ns = entry.st_ctime_ns = self.tree.born_ns
        entry.entry_timeout = attributes.entry_timeout
        entry.attr_timeout = attributes.attr_timeout
        return entry

    # Names and attributes

    @_answered
    async def lookup(self, parent_inode: int, name: bytes, ctx: RequestContext) -> EntryAttributes:
        return self._entry(self.tree.lookup(parent_inode, name))

    @_answered
    async def getattr(self, inode: int, ctx: RequestContext) -> EntryAttributes:
        return self._entry(self.tree.getattr(inode))

    @_answered
    async def setattr(
        self, inode: int, attr: EntryAttributes, fields: SetattrFields, fh: int | None, ctx: RequestContext
    ) -> EntryAttributes:
        attributes = self.tree.setattr(
            inode,
            size=fields.update_size,
            times=fields.update_atime or fields.update_mtime,
            owner_or_mode=fields.update_mode or fields.update_uid or fields.update_gid,
        )
        return self._entry(attributes)

    @_answered
    async def statfs(self, ctx: RequestContext) -> StatvfsData:
        data = StatvfsData()
        data.f_bsize = data.f_frsize = 4096
        data.f_namemax = 255
        return data

    # Directories

    @_answered
    async def opendir(self, inode: int, ctx: RequestContext) -> int:
        return self.tree.opendir(inode)

    @_answered
    async def readdir(self, fh: int, start_id: int, token: ReaddirToken) -> None:
        for name, attributes, cookie in self.tree.listing(fh, start_id):
            if not pyfuse3.readdir_reply(token, name, self._entry(attributes), cookie):
                break

    @_answered
    async def releasedir(self, fh: int) -> None:
        pass

    @_answered
    async def fsyncdir(self, fh: int, datasync: bool) -> None:
        pass

    # Files

    @_answered
    async def open(self, inode: int, flags: int, ctx: RequestContext) -> FileInfo:
        # keep_cache defaults to True, and then sendfile and splice, which pass direct_io by, copy old values.
        return FileInfo(fh=self.tree.open(inode, flags), direct_io=True, keep_cache=False)

    @_answered
    async def read(self, fh: int, off: int, size: int) -> bytes:
        return self.tree.read(fh, off, size)

    @_answered
    async def write(self, fh: int, off: int, buf: bytes) -> int:
        return self.tree.write(fh, buf)

    @_answered
    async def release(self, fh: int) -> None:
        self.tree.release(fh)

    @_answered
    async def flush(self, fh: int) -> None:
        # Nothing is held back until close; the kernel takes this for success and never asks again (a request saved).
        raise FUSEError(errno.ENOSYS)

    @_answered
    async def fsync(self, fh: int, datasync: bool) -> None:
        pass

    # Refused: directories are the daemon's. (Left out, these would say "Function not implemented".)

    @_answered
    async def create(
        self, parent_inode: int, name: bytes, mode: int, flags: int, ctx: RequestContext
    ) -> tuple[FileInfo, EntryAttributes]:
        raise self.tree.refuse_change()

    @_answered
    async def mknod(self, parent_inode: int, name: bytes, mode: int, rdev: int, ctx: RequestContext) -> EntryAttributes:
        raise self.tree.refuse_change()

    @_answered
    async def mkdir(self, parent_inode: int, name: bytes, mode: int, ctx: RequestContext) -> EntryAttributes:
        raise self.tree.refuse_change()

    @_answered
    async def unlink(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        raise self.tree.refuse_change()

    @_answered
    async def rmdir(self, parent_inode: int, name: bytes, ctx: RequestContext) -> None:
        raise self.tree.refuse_change()

    @_answered
    async def symlink(self, parent_inode: int, name: bytes, target: bytes, ctx: RequestContext) -> EntryAttributes:
        raise self.tree.refuse_change()

    @_answered
    async def rename(
        self,
        parent_inode_old: int,
        name_old: bytes,
        parent_inode_new: int,
        name_new: bytes,
        flags: int,
        ctx: RequestContext,
    ) -> None:
        raise self.tree.refuse_change()

    @_answered
    async def link(self, inode: int, new_parent_inode: int, new_name: bytes, ctx: RequestContext) -> EntryAttributes:
        raise self.tree.refuse_change()

    @_answered
    async def setxattr(self, inode: int, name: bytes, value: bytes, ctx: RequestContext) -> None:
        raise self.tree.refuse_change()

    @_answered
    async def removexattr(self, inode: int, name: bytes, ctx: RequestContext) -> None:
        raise self.tree.refuse_change()

    @_answered
    async def getxattr(self, inode: int, name: bytes, ctx: RequestContext) -> bytes:
        raise FUSEError(errno.ENOSYS)  # the kernel says EOPNOTSUPP, here and from now on by itself

    @_answered
    async def listxattr(self, inode: int, ctx: RequestContext) -> Sequence[bytes]:
        raise FUSEError(errno.ENOSYS)
