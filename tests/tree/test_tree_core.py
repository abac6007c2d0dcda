"""The tree without a mount: Tree and the pyfuse3 handlers called directly, held to docs/tree.md."""

import errno
import logging
import os
import re
import stat

import oracle
import pyfuse3
import pytest
from tree_server import BARE, CONTAINER, GIB, PIDS, MemoryBackend

import cgpufs.tree
from cgpufs.nodes import View
from cgpufs.ops import Operations
from cgpufs.tree import ROOT_INODE, Attributes, Tree, TreeError
from cgpusched.commands import Create, Destroy, SetMemsize, SetPolicy, SetWeight, Upgrade


@pytest.fixture
def backend() -> MemoryBackend:
    return MemoryBackend()


@pytest.fixture
def tree(backend: MemoryBackend) -> Tree:
    return Tree(backend)


def walk(tree: Tree, path: str) -> Attributes:
    attributes = tree.getattr(ROOT_INODE)
    for name in path.strip("/").split("/"):
        if name:
            attributes = tree.lookup(attributes.inode, name.encode())
    return attributes


def read(tree: Tree, path: str) -> str:
    handle = tree.open(walk(tree, path).inode, os.O_RDONLY)
    try:
        return tree.read(handle, 0, 1 << 20).decode()
    finally:
        tree.release(handle)


def write(tree: Tree, path: str, data: bytes) -> int:
    """0 or the errno."""
    try:
        handle = tree.open(walk(tree, path).inode, os.O_WRONLY | os.O_TRUNC)
        try:
            assert tree.write(handle, data) == len(data)
        finally:
            tree.release(handle)
    except TreeError as error:
        return error.errno
    return 0


def names(tree: Tree, path: str) -> list[str]:
    found = [name.decode() for name, _, _ in tree.listing(walk(tree, path).inode, 0)]
    assert sorted(found)[:2] == [".", ".."]
    return sorted(set(found) - {".", ".."})


@pytest.mark.parametrize(("path", "entries"), oracle.listings().items())
def test_listing(tree: Tree, path: str, entries: list[str]) -> None:
    assert names(tree, path) == sorted(entries)
    assert stat.S_IMODE(walk(tree, path).mode) == 0o555


@pytest.mark.parametrize("row", oracle.nodes(), ids=lambda row: row["node"])
def test_node(tree: Tree, row: dict[str, str]) -> None:
    for path in oracle.paths(row["node"]):
        attributes, text = walk(tree, path), read(tree, path)
        assert stat.S_IMODE(attributes.mode) == int(row["mode"], 8)
        assert re.fullmatch(row["format"], text), text
        assert attributes.size == len(text)


def test_every_node_is_documented() -> None:
    assert {row["node"].rpartition("/")[2] for row in oracle.nodes()} == {node.name for node in cgpufs.nodes.NODES}


def test_values(tree: Tree, backend: MemoryBackend) -> None:
    assert read(tree, "version") == "1.2.3\n"
    assert read(tree, "upgrade") == "idle\n"
    assert read(tree, "default_memsize") == "0\n"
    assert read(tree, "0/free_weight") == "17\n"
    assert read(tree, "0/policy") == "2\n"  # an instance with weight 2 switches it on
    assert read(tree, "1/policy") == "1\n"
    assert read(tree, "0/max_inst") == "20\n"
    assert read(tree, "0/prio_ratio") == "90\n"
    assert read(tree, "0/c0ffee00c0ff/id") == CONTAINER + "\n"
    assert read(tree, "0/c0ffee00c0ff/weight") == "2\n"
    assert read(tree, "1/bare-1/memsize") == f"{2 * GIB}\n"
    assert read(tree, "inst_ctl") == (
        f"{CONTAINER} gpu=0 memsize={3 * GIB} weight=2 highprio=0\n"
        f"bare-1 gpu=0,1 memsize={GIB},{2 * GIB} weight=1 highprio=0\n"
    )
    backend.state.apply(SetWeight(1, BARE, 5))
    assert read(tree, "inst_ctl").splitlines()[1] == f"bare-1 gpu=0,1 memsize={GIB},{2 * GIB} weight=1,5 highprio=0"


def test_meminfo(tree: Tree, backend: MemoryBackend) -> None:
    backend.state.apply(SetMemsize(0, CONTAINER, 6610 << 20))
    backend.processes[CONTAINER, 0] = [PIDS[0]]
    assert read(tree, "0/c0ffee00c0ff/meminfo") == "Free: 6730809344\nPID: 19772 Mem: 200278016\n"
    assert read(tree, "1/bare-1/meminfo") == f"Free: {2 * GIB}\n"
    backend.state.apply(SetMemsize(0, CONTAINER, 1))
    assert read(tree, "0/c0ffee00c0ff/meminfo") == "Free: 0\nPID: 19772 Mem: 200278016\n"


@pytest.mark.parametrize(("path", "text", "then"), oracle.taken())
def test_taken(tree: Tree, path: str, text: str, then: str) -> None:
    assert write(tree, path, text.encode() + b"\n") == 0
    assert read(tree, path) == then + "\n"


@pytest.mark.parametrize("path", oracle.writable())
@pytest.mark.parametrize(("what", "data"), oracle.malformed())
def test_malformed(
    tree: Tree, backend: MemoryBackend, caplog: pytest.LogCaptureFixture, path: str, what: str, data: bytes
) -> None:
    before = read(tree, path)
    assert write(tree, path, data) == errno.EINVAL
    assert read(tree, path) == before
    assert not backend.commands
    (record,) = caplog.records
    line = record.getMessage()
    assert record.levelno == logging.WARNING
    assert line.startswith(f"refused node={path} value=") and "errno=EINVAL" in line and "reason=" in line
    assert line.isprintable() and len(line) < 700


@pytest.mark.parametrize(("path", "text", "error"), oracle.refused())
def test_refused(tree: Tree, caplog: pytest.LogCaptureFixture, path: str, text: str, error: str) -> None:
    before = read(tree, path)
    assert errno.errorcode[write(tree, path, text.encode() + b"\n")] == error
    assert read(tree, path) == before
    assert len(caplog.records) == 1


@pytest.mark.parametrize(("line", "error"), oracle.refused_commands())
def test_refused_command(tree: Tree, caplog: pytest.LogCaptureFixture, line: str, error: str) -> None:
    before = read(tree, "inst_ctl")
    assert errno.errorcode[write(tree, "inst_ctl", line.encode() + b"\n")] == error
    assert read(tree, "inst_ctl") == before
    assert len(caplog.records) == 1


def test_commands(tree: Tree, backend: MemoryBackend) -> None:
    assert write(tree, "upgrade", b"1\n") == 0
    assert write(tree, "1/policy", b" 3 ") == 0
    assert write(tree, "inst_ctl", b"create new gpu=1 memsize=1GiB\n") == 0
    assert write(tree, "inst_ctl", b"destroy new\n") == 0
    assert backend.commands == [Upgrade(), SetPolicy(1, 3), Create("new", (1,), (GIB,)), Destroy("new")]


@pytest.mark.parametrize("row", [row for row in oracle.nodes() if row["write"] == "–"], ids=lambda row: row["node"])
@pytest.mark.parametrize("flags", [os.O_WRONLY, os.O_RDWR, os.O_WRONLY | os.O_APPEND, os.O_RDONLY | os.O_TRUNC])
def test_read_only_node(tree: Tree, row: dict[str, str], flags: int) -> None:
    inode = walk(tree, oracle.paths(row["node"])[0]).inode
    with pytest.raises(TreeError) as caught:
        tree.open(inode, flags)
    assert caught.value.errno == errno.EACCES


def test_pieces_of_too_long_a_text(tree: Tree) -> None:
    handle = tree.open(walk(tree, "0/policy").inode, os.O_WRONLY)
    for piece in (b" " * 4096, b"3\n"):
        with pytest.raises(TreeError):
            tree.write(handle, piece)
    tree.release(handle)
    assert read(tree, "0/policy") == "2\n"
    assert write(tree, "0/policy", b"3" + b" " * 4094) == 0


def test_a_bad_value_does_not_spoil_the_descriptor(tree: Tree) -> None:
    handle = tree.open(walk(tree, "0/policy").inode, os.O_RDWR)
    with pytest.raises(TreeError):
        tree.write(handle, b"nine")
    assert tree.write(handle, b"4\n") == 2
    assert tree.read(handle, 0, 9) == b"4\n"


def test_snapshot(tree: Tree, backend: MemoryBackend) -> None:
    inode = walk(tree, "0/max_inst").inode
    one, two = tree.open(inode, os.O_RDONLY), tree.open(inode, os.O_RDONLY)
    assert one != two
    assert tree.read(one, 0, 1) == b"2"
    backend.state.settings[0].max_inst = 9
    assert tree.read(two, 0, 1) == b"9"
    assert tree.read(one, 1, 1) == b"0"
    assert tree.read(one, 2, 1) == b"\n"
    assert tree.read(one, 3, 1) == b""
    assert tree.read(one, 0, 9) == b"9\n"


def test_snapshots_are_bounded(tree: Tree, backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgpufs.tree, "_SNAPSHOT_BYTES", 400)
    inode = walk(tree, "0/c0ffee00c0ff/id").inode
    handles = [tree.open(inode, os.O_RDONLY) for _ in range(50)]
    for handle in handles:
        assert tree.read(handle, 0, 1) == b"c"
    assert len(tree._snapshots) == 1
    for handle in handles:
        assert tree.read(handle, 60, 99) == CONTAINER[60:].encode() + b"\n"
        tree.release(handle)
    assert not tree._snapshots and tree._snapshot_bytes == 0


def test_many_open_files_of_two_bytes_are_bounded_too(tree: Tree, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cgpufs.tree, "_SNAPSHOT_BYTES", 10_000)
    inode = walk(tree, "0/policy").inode
    for _ in range(1000):
        assert len(tree.read(tree.open(inode, os.O_RDONLY), 0, 9)) == 2
    assert len(tree._snapshots) < 50 and tree._snapshot_bytes <= 10_000


def test_a_successor_knows_inodes_and_handles(tree: Tree, backend: MemoryBackend) -> None:
    inode = walk(tree, "0/c0ffee00c0ff/weight").inode
    reader, writer = tree.open(inode, os.O_RDONLY), tree.open(inode, os.O_WRONLY)
    successor = Tree(backend)
    assert walk(successor, "0/c0ffee00c0ff/weight").inode == inode
    assert successor.read(reader, 0, 9) == b"2\n"
    assert successor.read(reader, 1, 9) == b"\n"
    assert successor.write(writer, b"4\n") == 2
    assert successor.read(reader, 0, 9) == b"4\n"
    successor.release(reader)
    successor.release(writer)


def test_instances_come_and_go(tree: Tree, backend: MemoryBackend) -> None:
    inode = walk(tree, "0/c0ffee00c0ff/weight").inode
    handle = tree.open(inode, os.O_RDWR)
    backend.state.apply(Destroy(CONTAINER))
    assert names(tree, "0") == ["bare-1", "free_weight", "major", "max_inst", "policy", "prio_ratio"]
    for failing in (lambda: walk(tree, "0/c0ffee00c0ff"), lambda: tree.getattr(inode), lambda: tree.read(handle, 0, 9),
                    lambda: tree.read(handle, 1, 9), lambda: tree.write(handle, b"1")):  # fmt: skip
        with pytest.raises(TreeError) as caught:
            failing()
        assert caught.value.errno == errno.ENOENT
    other = "c0ffee00c0ff-other"
    backend.state.apply(Create(other, (0,), (GIB,), 7))
    assert read(tree, "0/c0ffee00c0ff/id") == other + "\n"
    with pytest.raises(TreeError):  # the same 12 characters, but not the same instance
        tree.read(handle, 0, 9)
    backend.state.apply(Destroy(other))
    backend.state.apply(Create(CONTAINER, (0,), (GIB,), 5))
    assert tree.read(handle, 0, 9) == b"5\n"


def test_colliding_hashes_are_told_apart(backend: MemoryBackend, monkeypatch: pytest.MonkeyPatch) -> None:
    digest = cgpufs.tree._digest
    monkeypatch.setattr(cgpufs.tree, "_digest", lambda text: digest(text) % 64)
    tree = Tree(backend)
    inodes = {walk(tree, path).inode for row in oracle.nodes() for path in oracle.paths(row["node"])}
    assert len(inodes) == sum(len(oracle.paths(row["node"])) for row in oracle.nodes())
    assert read(tree, "0/c0ffee00c0ff/id") == CONTAINER + "\n"


def test_a_listing_in_pieces_skips_and_repeats_nothing(tree: Tree, backend: MemoryBackend) -> None:
    inode = walk(tree, "0").inode
    before = set(names(tree, "0"))
    seen: list[str] = []
    cookie, step = 0, 0
    while True:
        piece = list(tree.listing(inode, cookie))[:3]
        if not piece:
            break
        seen += [name.decode() for name, _, _ in piece]
        cookie, step = piece[-1][2], step + 1
        backend.state.apply(Create(f"new-{step}", (0,), (1,)))
        if step == 2:
            backend.state.apply(Destroy("new-1"))
    assert len(seen) == len(set(seen))
    assert before <= set(seen)


def test_setattr(tree: Tree) -> None:
    policy, version = walk(tree, "0/policy").inode, walk(tree, "version").inode

    def result(inode: int, **fields: bool) -> int:
        try:
            tree.setattr(inode, **{"size": False, "times": False, "owner_or_mode": False, **fields})
        except TreeError as error:
            return error.errno
        return 0

    assert result(policy, size=True) == result(policy, times=True) == 0
    assert result(version, size=True) == errno.EACCES
    assert result(version, times=True) == errno.EPERM
    assert result(policy, owner_or_mode=True) == result(ROOT_INODE, owner_or_mode=True) == errno.EPERM


def test_read_only_view(backend: MemoryBackend) -> None:
    tree = Tree(backend, View(read_only=True))
    assert read(tree, "0/policy") == "2\n"
    for row in oracle.nodes():
        for path in oracle.paths(row["node"]):
            assert write(tree, path, b"1\n") == errno.EROFS
            with pytest.raises(TreeError) as caught:
                tree.setattr(walk(tree, path).inode, size=True, times=False, owner_or_mode=False)
            assert caught.value.errno == errno.EROFS
    # A descriptor from a writable past does not help.
    with pytest.raises(TreeError) as caught:
        tree.write(Tree(backend).open(walk(tree, "0/policy").inode, os.O_WRONLY), b"3")
    assert caught.value.errno == errno.EROFS
    assert tree.refuse_change().errno == errno.EROFS
    assert not backend.commands


def test_view_of_one_instance(backend: MemoryBackend) -> None:
    pids = {19772: 1}
    tree = Tree(backend, View(read_only=True, only=CONTAINER, pid=pids.get))
    assert names(tree, "/") == ["0", "default_memsize", "inst_ctl", "upgrade", "version"]
    assert names(tree, "0") == ["c0ffee00c0ff", "free_weight", "major", "max_inst", "policy", "prio_ratio"]
    assert read(tree, "inst_ctl") == f"{CONTAINER} gpu=0 memsize={3 * GIB} weight=2 highprio=0\n"
    assert read(tree, "0/c0ffee00c0ff/meminfo") == f"Free: {3 * GIB - 200278017}\nPID: 1 Mem: 200278016\n"
    with pytest.raises(TreeError):
        walk(tree, "0/bare-1")
    with pytest.raises(TreeError):
        tree.getattr(walk(Tree(backend), "0/bare-1/id").inode)


async def test_handlers_answer_whatever_happens(tree: Tree, caplog: pytest.LogCaptureFixture) -> None:
    operations = Operations(tree)

    def broken(inode: int) -> Attributes:
        raise ZeroDivisionError

    context = None
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await operations.lookup(ROOT_INODE, b"nothing", context)
    assert caught.value.errno == errno.ENOENT
    tree.getattr = broken  # type: ignore[method-assign]
    with pytest.raises(pyfuse3.FUSEError) as caught:
        await operations.getattr(ROOT_INODE, context)
    assert caught.value.errno == errno.EIO
    assert caplog.records[-1].exc_info is not None


async def test_handlers(tree: Tree) -> None:
    operations = Operations(tree)
    entry = await operations.lookup(ROOT_INODE, b"version", None)
    assert stat.S_ISREG(entry.st_mode) and entry.st_size == 6 and entry.attr_timeout == 0
    info = await operations.open(entry.st_ino, os.O_RDONLY, None)
    assert info.direct_io and not info.keep_cache
    assert await operations.read(info.fh, 0, 100) == b"1.2.3\n"
    for refused in (
        operations.create(ROOT_INODE, b"x", 0o644, 0, None), operations.mkdir(ROOT_INODE, b"x", 0o755, None),
        operations.mknod(ROOT_INODE, b"x", 0o644, 0, None), operations.unlink(ROOT_INODE, b"version", None),
        operations.rmdir(ROOT_INODE, b"0", None), operations.symlink(ROOT_INODE, b"x", b"y", None),
        operations.rename(ROOT_INODE, b"version", ROOT_INODE, b"x", 0, None),
        operations.link(entry.st_ino, ROOT_INODE, b"x", None), operations.setxattr(entry.st_ino, b"user.x", b"", None),
        operations.removexattr(entry.st_ino, b"user.x", None),
    ):  # fmt: skip
        with pytest.raises(pyfuse3.FUSEError) as caught:
            await refused
        assert caught.value.errno == errno.EPERM
