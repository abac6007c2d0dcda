"""The tree without FUSE: inodes, attributes, listings, reads and writes over a Backend. No I/O, nothing waits.

Identity needs no memory, so that a successor daemon answers for inodes and handles that its predecessor gave out:

* An inode is a hash of the node's path, with the *full* instance ID in it: an instance that was removed and made again
  under its ID is the same to an open descriptor, one that only shares the first 12 characters never is.
* A handle is the inode's hash and a generation: whoever gets one that it does not know still knows the node.

What is kept for a handle is a convenience only: the snapshot that makes short reads consistent (taken whenever offset 0
is read, as procfs does, so a descriptor held open reads the present value again after a seek), and the mark of a handle
through which too long a text came, whose last piece must not pass for a command.
"""

import errno
import hashlib
import logging
import os
import stat
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import NamedTuple

from cgpufs.nodes import BY_LEVEL, HOST, At, Backend, Level, Node, View
from cgpufs.parse import MAX_COMMAND
from cgpusched.errors import CommandError, UserError
from cgpusched.fields import pairs

log = logging.getLogger(__name__)

ROOT_INODE = 1
TIMEOUT = 1.0
"""Seconds that the kernel may keep names and directories. 1 s is as fast as 1000 s: it saves 5 of 9 requests a read."""

_HASH_BITS = 44  # 2,000 nodes collide with a chance of 1e-7, and _build() settles even that
_HASH_MASK = (1 << _HASH_BITS) - 1
_INODE_MARK = 1 << 60  # keeps clear of ROOT_INODE
_GENERATIONS = 1 << (64 - _HASH_BITS)
_SNAPSHOT_BYTES = 8 << 20  # of all snapshots together; the oldest go first, and their next read takes a fresh one
_SNAPSHOT_OVERHEAD = 256  # of each: its object and its place in the table. Anybody may hold many files of 2 bytes open


class TreeError(Exception):
    """A request that fails with ``errno``."""

    def __init__(self, code: int) -> None:
        super().__init__(os.strerror(code))
        self.errno = code


class Attributes(NamedTuple):
    """What stat shows, and how long in seconds the kernel may keep the name and the rest."""

    inode: int
    mode: int
    links: int
    size: int
    entry_timeout: float
    attr_timeout: float


@dataclass(frozen=True)
class _Entry:
    """One file or directory. ``node`` is None for a directory; ``level`` is its own, for a file its directory's."""

    inode: int
    name: str
    parent: int
    level: Level
    gpu: int = -1
    id: str | None = None
    node: Node | None = None


def _digest(text: str) -> int:
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "little")


def _inode(path: str) -> int:
    return _INODE_MARK | _digest(path) & _HASH_MASK


def cookie(name: str) -> int:
    """A directory offset that stays a name's own while others come and go; 1 and 2 are ``.`` and ``..``."""
    return (_digest(name) >> 2) + 3


class Tree:
    """One view of a backend. Every method raises TreeError for what a caller should see as an errno."""

    def __init__(self, backend: Backend, view: View = HOST, *, born_ns: int | None = None, below: str = "") -> None:
        """``born_ns``: the time that every node shows as its own, in ns since 1970; default now.

        ``below``: the name of the directory that this tree is, where it is one of several in a file system (views.py).
        """
        self.backend = backend
        self.view = view
        self.root = _inode(below) if below else ROOT_INODE
        self._prefix = f"{below}/" if below else ""
        self.born_ns = time.time_ns() if born_ns is None else born_ns
        self._signature: object = None
        self._entries: dict[int, _Entry] = {}
        self._children: dict[int, dict[str, int]] = {}
        self._snapshots: dict[int, bytes] = {}  # by handle, oldest first
        self._snapshot_bytes = 0
        self._overlong: set[int] = set()
        # Not from 0: a predecessor's handles may still be open, and should not meet ours.
        self._generation = int.from_bytes(os.urandom(4), "little") % _GENERATIONS
        self._sync()

    def inodes(self) -> Iterable[int]:
        """Those of all its nodes."""
        self._sync()
        return self._entries.keys()

    # Attributes and names

    def lookup(self, parent: int, name: bytes) -> Attributes:
        self._directory(parent)
        try:
            text = name.decode("ascii")
        except UnicodeDecodeError:
            raise TreeError(errno.ENOENT) from None
        for fresh in (False, True):
            if fresh:
                self._sync()
            entry = self._entries.get(self._children.get(parent, {}).get(text, 0))
            if entry is not None and self._alive(entry):
                return self._attributes(entry)
        raise TreeError(errno.ENOENT)

    def getattr(self, inode: int) -> Attributes:
        return self._attributes(self._find(inode))

    def setattr(self, inode: int, *, size: bool, times: bool, owner_or_mode: bool) -> Attributes:
        """``truncate`` and ``touch`` do nothing, successfully, where writing is allowed; modes and owners are fixed."""
        entry = self._find(inode)
        self._writable_view()
        writable = entry.node is not None and entry.node.write is not None
        if owner_or_mode or (times and not writable):
            raise TreeError(errno.EPERM)
        if size and not writable:
            raise TreeError(errno.EACCES)
        return self._attributes(entry)

    def refuse_change(self) -> TreeError:
        """What creating, removing, renaming and linking end in: directories are the daemon's."""
        return TreeError(errno.EROFS if self.view.read_only else errno.EPERM)

    # Directories

    def opendir(self, inode: int) -> int:
        self._directory(inode)
        return inode

    def listing(self, inode: int, after: int) -> Iterator[tuple[bytes, Attributes, int]]:
        """Name, attributes and cookie of each entry whose cookie is above ``after`` (0: all), in order of cookies."""
        self._sync()
        entry = self._directory(inode)
        found = [(1, ".", entry.inode), (2, "..", entry.parent)]
        found += ((cookie(name), name, child) for name, child in self._children[inode].items())
        for place, name, child in sorted(item for item in found if item[0] > after):
            yield name.encode("ascii"), self._attributes(self._entries[child]), place

    # Files

    def open(self, inode: int, flags: int) -> int:
        """A handle. Write access to a read-only node is EACCES for root too, which default_permissions lets pass."""
        entry = self._find(inode)
        if entry.node is None:
            raise TreeError(errno.EISDIR)
        if flags & os.O_ACCMODE != os.O_RDONLY or flags & os.O_TRUNC:
            self._writable_view()
            if entry.node.write is None:
                raise TreeError(errno.EACCES)
        self._generation = (self._generation + 1) % _GENERATIONS
        return self._generation << _HASH_BITS | inode & _HASH_MASK

    def read(self, handle: int, offset: int, size: int) -> bytes:
        entry = self._file(handle)  # also for a known handle: a removed instance reads as ENOENT
        snapshot = self._snapshots.get(handle) if offset else None
        if snapshot is None:
            snapshot = self._render(entry)
            self._keep(handle, snapshot)
        return snapshot[offset : offset + size]

    def write(self, handle: int, data: bytes) -> int:
        """One whole command; where in the file it was written to does not matter."""
        entry = self._file(handle)
        self._writable_view()
        assert entry.node is not None
        if entry.node.write is None:
            raise TreeError(errno.EACCES)
        if len(data) > MAX_COMMAND:
            self._overlong.add(handle)
        try:
            if handle in self._overlong:
                raise UserError(f"the text is too long: one command of at most {MAX_COMMAND} bytes")
            command = entry.node.write(self._at(entry), data)
        except UserError as error:
            value = data[:60].decode("latin-1")
            log.warning("refused %s", pairs(node=self._path(entry), value=value, errno="EINVAL", reason=error))
            raise TreeError(errno.EINVAL) from None
        try:
            self.backend.apply(command)
        except CommandError as error:
            raise TreeError(error.errno) from None  # logged by the backend
        return len(data)

    def release(self, handle: int) -> None:
        self._overlong.discard(handle)
        self._drop(handle)

    # Inside

    def _writable_view(self) -> None:
        if self.view.read_only:
            raise TreeError(errno.EROFS)

    def _at(self, entry: _Entry) -> At:
        instance = None if entry.id is None else self.backend.state.instances[entry.id]
        return At(self.backend, self.view, entry.gpu, instance)

    def _render(self, entry: _Entry) -> bytes:
        assert entry.node is not None
        return entry.node.render(self._at(entry))

    def _keep(self, handle: int, snapshot: bytes) -> None:
        self._drop(handle)
        self._snapshots[handle] = snapshot
        self._snapshot_bytes += len(snapshot) + _SNAPSHOT_OVERHEAD
        while self._snapshot_bytes > _SNAPSHOT_BYTES:
            self._drop(next(iter(self._snapshots)))

    def _drop(self, handle: int) -> None:
        snapshot = self._snapshots.pop(handle, None)
        if snapshot is not None:
            self._snapshot_bytes -= len(snapshot) + _SNAPSHOT_OVERHEAD

    def _attributes(self, entry: _Entry) -> Attributes:
        if entry.node is not None:
            # The real size: 0 makes sendfile copy nothing, 4096 breaks tar. It changes with the value: not to be kept.
            return Attributes(entry.inode, stat.S_IFREG | entry.node.mode, 1, len(self._render(entry)), TIMEOUT, 0)
        below = sum(self._entries[child].node is None for child in self._children[entry.inode].values())
        # An instance's name is not kept, so that a removed one is gone at once and no invalidation can deadlock.
        entry_timeout = 0 if entry.level is Level.INSTANCE else TIMEOUT
        return Attributes(entry.inode, stat.S_IFDIR | 0o555, 2 + below, 0, entry_timeout, TIMEOUT)

    def _alive(self, entry: _Entry) -> bool:
        if entry.id is None:
            return True
        instance = self.backend.state.instances.get(entry.id)
        return instance is not None and entry.gpu in instance.shares

    def _find(self, inode: int) -> _Entry:
        entry = self._entries.get(inode)
        if entry is None:
            self._sync()
            entry = self._entries.get(inode)
        if entry is None or not self._alive(entry):
            raise TreeError(errno.ENOENT)
        return entry

    def _directory(self, inode: int) -> _Entry:
        entry = self._find(inode)
        if entry.node is not None:
            raise TreeError(errno.ENOTDIR)
        return entry

    def _file(self, handle: int) -> _Entry:
        entry = self._find(_INODE_MARK | handle & _HASH_MASK)
        if entry.node is None:
            raise TreeError(errno.EISDIR)
        return entry

    def _path(self, entry: _Entry) -> str:
        above = "" if entry.parent == self.root else self._path(self._entries[entry.parent]) + "/"
        return above + entry.name

    def _sync(self) -> None:
        """Bring the index up to date if GPUs or instances came or went since it was built."""
        state = self.backend.state
        signature = (
            tuple(state.gpus),
            tuple((i.id, tuple(i.shares)) for i in state.instances.values() if self.view.sees(i)),
        )
        if signature != self._signature:
            self._build()
            self._signature = signature

    def _build(self) -> None:
        root, prefix = self.root, self._prefix
        self._entries = {root: _Entry(root, "", root, Level.ROOT)}
        self._children = {root: {}}
        self._add_files(root, prefix, Level.ROOT)
        state, only = self.backend.state, self.view.only
        for gpu in state.gpus:
            members = [instance for instance in state.on_gpu(gpu) if self.view.sees(instance)]
            if only is not None and not members:
                continue
            directory = self._add(root, str(gpu), f"{prefix}{gpu}", Level.GPU, gpu)
            self._add_files(directory, f"{prefix}{gpu}/", Level.GPU, gpu)
            for member in members:
                path = f"{prefix}{gpu}/{member.id}"
                below = self._add(directory, member.short, path, Level.INSTANCE, gpu, member.id)
                self._add_files(below, path + "/", Level.INSTANCE, gpu, member.id)

    def _add_files(self, parent: int, prefix: str, level: Level, gpu: int = -1, instance: str | None = None) -> None:
        for node in BY_LEVEL[level]:
            self._add(parent, node.name, prefix + node.name, level, gpu, instance, node)

    def _add(
        self, parent: int, name: str, path: str, level: Level, gpu: int = -1, instance: str | None = None,
        node: Node | None = None,
    ) -> int:  # fmt: skip
        inode = _inode(path)
        while inode in self._entries:
            path += "\0"
            inode = _inode(path)
        self._entries[inode] = _Entry(inode, name, parent, level, gpu, instance, node)
        self._children[parent][name] = inode
        if node is None:
            self._children[inode] = {}
        return inode
