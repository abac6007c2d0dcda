"""What containers see: one file system with a directory an instance, each of them that instance's own read-only tree.

A container gets a bind of its directory alone. Its name is the instance's full ID; the root can be passed through and
not listed, since a runtime in a user namespace looks the directory up as somebody who is not root here.

Inodes follow from names as in tree.py, so that a successor daemon answers for those its predecessor gave out. No I/O,
nothing waits; errors are TreeError.
"""

import errno
import stat
import time
from collections.abc import Callable, Iterator, Mapping

from cgpufs.nodes import Backend, View
from cgpufs.tree import ROOT_INODE, TIMEOUT, Attributes, Tree, TreeError, cookie

Viewers = Mapping[str, Callable[[int], int | None]]
"""The instances that have a view, by full ID, and how each counts a host pid (None: it does not see that process)."""


class Views:
    """A tree an instance. ``viewers`` is asked at each request."""

    def __init__(self, backend: Backend, viewers: Callable[[], Viewers], *, born_ns: int | None = None) -> None:
        self.backend = backend
        self.born_ns = time.time_ns() if born_ns is None else born_ns
        self._viewers = viewers
        self._signature: object = None
        self._trees: dict[str, Tree] = {}
        self._home: dict[int, Tree] = {}

    def lookup(self, parent: int, name: bytes) -> Attributes:
        if parent != ROOT_INODE:
            tree = self._tree(parent)
            return self._own(tree, tree.lookup(parent, name))
        self._sync()
        named = self._trees.get(name.decode("ascii", "replace"))
        if named is None:
            raise TreeError(errno.ENOENT)
        return self._top(named)

    def getattr(self, inode: int) -> Attributes:
        if inode == ROOT_INODE:
            self._sync()
            return Attributes(ROOT_INODE, stat.S_IFDIR | 0o711, 2 + len(self._trees), 0, TIMEOUT, 0)
        tree = self._tree(inode)
        return self._top(tree) if inode == tree.root else tree.getattr(inode)

    def listing(self, inode: int, after: int) -> Iterator[tuple[bytes, Attributes, int]]:
        """As Tree.listing()."""
        if inode != ROOT_INODE:
            yield from self._tree(inode).listing(inode, after)
            return
        own = self.getattr(ROOT_INODE)
        found = [(1, ".", own), (2, "..", own)]
        found += ((cookie(name), name, self._top(tree)) for name, tree in self._trees.items())
        for place, name, attributes in sorted((item for item in found if item[0] > after), key=lambda item: item[0]):
            yield name.encode("ascii"), attributes, place

    def open(self, inode: int, flags: int) -> int:
        """A handle for read() with this inode. Write access is EROFS."""
        if inode == ROOT_INODE:
            raise TreeError(errno.EISDIR)
        return self._tree(inode).open(inode, flags)

    def read(self, inode: int, handle: int, offset: int, size: int) -> bytes:
        return self._tree(inode).read(handle, offset, size)

    def release(self, inode: int, handle: int) -> None:
        if (tree := self._home.get(inode)) is not None:
            tree.release(handle)

    def _top(self, tree: Tree) -> Attributes:
        """Of an instance's directory: its name is not to be kept, so that a removed one is gone at once."""
        return tree.getattr(tree.root)._replace(entry_timeout=0)

    def _own(self, tree: Tree, attributes: Attributes) -> Attributes:
        if self._home.get(attributes.inode) is not tree:
            self._sync()
        # Should two trees' hashes meet, the later one lacks that node; it never shows the other's.
        if self._home.get(attributes.inode) is not tree:
            raise TreeError(errno.ENOENT)
        return attributes

    def _tree(self, inode: int) -> Tree:
        tree = self._home.get(inode)
        if tree is None or tree.view.only not in self._viewers():
            self._sync()
            tree = self._home.get(inode)
        if tree is None:
            raise TreeError(errno.ENOENT)
        return tree

    def _sync(self) -> None:
        """Bring the index up to date if an instance got or lost its view, or its GPUs, since it was built."""
        viewers, instances = self._viewers(), self.backend.state.instances
        signature = tuple((id, tuple(instances[id].shares) if id in instances else None) for id in viewers)
        if signature == self._signature:
            return
        old = self._trees
        self._trees = {id: old.get(id) or self._make(id) for id in viewers}
        self._home = {}
        for tree in self._trees.values():
            for inode in tree.inodes():
                self._home.setdefault(inode, tree)
        self._signature = signature

    def _make(self, id: str) -> Tree:
        def pid(host: int) -> int | None:
            translate = self._viewers().get(id)
            return translate(host) if translate else None

        return Tree(self.backend, View(read_only=True, only=id, pid=pid), born_ns=self.born_ns, below=id)
