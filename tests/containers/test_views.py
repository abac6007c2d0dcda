"""What containers see: the second file system, mounted, and looked at as they do."""

import errno
import os
import signal
import stat
import struct
import subprocess
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cgpufs import session
from cgpufs.mount import Mount, Unmounted
from cgpufs.session import Session
from cgpufs.tree import ROOT_INODE, TreeError
from cgpufs.views import Views
from cgpusched.commands import Create, Destroy

ID, OTHER = "0123456789abcdef" * 4, "fedcba9876543210" * 4
MIB = 1 << 20
NAMES = {
    "": ["0", "1", "default_memsize", "inst_ctl", "upgrade", "version"],
    "0": [ID[:12], "free_weight", "major", "max_inst", "policy", "prio_ratio"],
    f"0/{ID[:12]}": ["highprio", "id", "meminfo", "memsize", "weight"],
}

async def sh(script: str, **options: Any) -> "subprocess.CompletedProcess[bytes]":
    """No ``cwd``: the child enters it before exec, and the interpreter that serves it waits for that."""
    with trio.fail_after(30):
        return await trio.run_process(
            ["sh", "-c", script], capture_stdout=True, capture_stderr=True, check=False,
            env={**os.environ, "LC_ALL": "C"}, **options,
        )  # fmt: skip


@pytest.fixture
async def mounted(world: Any, views: Views) -> AsyncIterator[Mount]:
    """Two containers, and their views at places.view."""
    if not os.path.exists("/dev/fuse"):
        pytest.skip("mounting needs /dev/fuse")
    for id, sizes, gpus in ((ID, "1,2", "0,1"), (OTHER, "2", "0")):
        bundle = world.bundle(ALIYUN_COM_GPU_MEM_CONTAINER=sizes, ALIYUN_COM_GPU_VISIBLE_DEVICES=gpus)
        assert (await world.create(id, bundle)).status == 1
    world.system.apply(Create("bare", (0,), (MIB,)))
    mount = await trio.to_thread.run_sync(lambda: Mount.create(world.places.view, read_only=True))
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(Session(views).serve, mount)
            yield mount
            nursery.cancel_scope.cancel()
    finally:
        mount.unmount()


# Without a mount


async def test_inodes_follow_from_names(world: Any, views: Views) -> None:
    await world.create(ID)
    top = views.lookup(ROOT_INODE, ID.encode())
    gpu = views.lookup(top.inode, b"0")
    file = views.lookup(views.lookup(gpu.inode, ID[:12].encode()).inode, b"memsize")
    successor = Views(world.system, world.containers.viewers)
    handle = views.open(file.inode, os.O_RDONLY)
    assert successor.read(file.inode, handle, 0, 100) == b"%d\n" % (6043 * MIB)
    assert successor.getattr(gpu.inode).inode == gpu.inode
    assert successor.lookup(ROOT_INODE, ID.encode()).inode == top.inode


async def test_a_view_follows_its_instance_to_another_gpu(world: Any) -> None:
    """Also where nobody looked between its end and its return."""
    seen: dict[str, Any] = {ID: lambda pid: None}
    views = Views(world.system, lambda: seen)
    world.system.apply(Create(ID, (0,), (MIB,)))
    top = views.lookup(ROOT_INODE, ID.encode())
    assert views.lookup(views.lookup(top.inode, b"0").inode, ID[:12].encode()).mode & stat.S_IFDIR
    world.system.apply(Destroy(ID))
    world.system.apply(Create(ID, (1,), (MIB,)))
    gpu = views.lookup(top.inode, b"1")
    file = views.lookup(views.lookup(gpu.inode, ID[:12].encode()).inode, b"memsize")
    assert views.read(file.inode, views.open(file.inode, os.O_RDONLY), 0, 100) == b"%d\n" % MIB
    with pytest.raises(TreeError):
        views.lookup(top.inode, b"0")
    del seen[ID]
    for inode in (top.inode, gpu.inode, file.inode):
        with pytest.raises(TreeError) as caught:
            views.getattr(inode)
        assert caught.value.errno == errno.ENOENT


async def test_two_views_share_no_inode(world: Any, views: Views) -> None:
    small = world.bundle(ALIYUN_COM_GPU_MEM_CONTAINER=1)
    for id in (ID, OTHER):
        await world.create(id, small)

    def below(inode: int) -> set[int]:
        found = set()
        for name, attributes, _ in views.listing(inode, 0):
            if name not in (b".", b".."):
                found.add(attributes.inode)
                if stat.S_ISDIR(attributes.mode):
                    found |= below(attributes.inode)
        return found

    one, other = (below(views.lookup(ROOT_INODE, id.encode()).inode) for id in (ID, OTHER))
    assert len(one) == len(other) == 4 + 2 * (1 + 5 + 1 + 5) and not one & other


@pytest.mark.parametrize(("parent", "name"), [
    (ROOT_INODE, b"none"), (ROOT_INODE, b"\xff"), (ROOT_INODE, b"bare"), (12345, b"x"), (ROOT_INODE, b".."),
])  # fmt: skip
async def test_what_is_not_there(world: Any, views: Views, parent: int, name: bytes) -> None:
    world.system.apply(Create("bare", (0,), (MIB,)))
    with pytest.raises(TreeError) as caught:
        views.lookup(parent, name)
    assert caught.value.errno == errno.ENOENT


async def test_a_listing_goes_on_where_it_stopped(world: Any, views: Views) -> None:
    small = world.bundle(ALIYUN_COM_GPU_MEM_CONTAINER=1, ALIYUN_COM_GPU_MEM_DEV=60)
    for number in range(5):
        await world.create(f"c{number}", small)
    names, after = [], 0
    while entry := next(views.listing(ROOT_INODE, after), None):
        names.append(entry[0].decode())
        after = entry[2]
    assert names[:2] == [".", ".."] and sorted(names[2:]) == [f"c{number}" for number in range(5)]


# Mounted


async def test_own_directory_and_no_other(world: Any, mounted: Mount) -> None:
    view = mounted.path / ID
    for path, names in NAMES.items():
        listed = await sh(f"ls -a1 {view / path}")
        assert sorted(listed.stdout.decode().split()) == sorted([".", "..", *names])
    script = "cat 0/*/id 0/*/memsize 1/*/memsize default_memsize; cat inst_ctl; cat 0/*/meminfo"
    shown = (await sh(f"cd {view} && {{ {script}; }}")).stdout.decode().splitlines()
    one, two = 15109 // 15, 15109 * 2 // 15
    assert shown == [ID, str(one * MIB), str(two * MIB), "0",
                     f"{ID} gpu=0,1 memsize={one * MIB},{two * MIB} weight=1 highprio=0", f"Free: {one * MIB}"]
    assert (await sh(f"ls {mounted.path / OTHER}")).stdout.decode().split() == [
        "0", "default_memsize", "inst_ctl", "upgrade", "version"]  # fmt: skip
    sizes = await sh(f"find {view} -type f -exec sh -c 'test $(stat -c %s $0) = $(cat $0 | wc -c)' {{}} ';' -print")
    assert len(sizes.stdout.decode().split()) == 4 + 2 * 10


async def test_nobody_but_root_lists_the_root(mounted: Mount) -> None:
    assert sorted((await sh(f"ls {mounted.path}")).stdout.decode().split()) == sorted([ID, OTHER])
    os.chmod(mounted.path.parents[1], 0o755)
    folder = os.open(mounted.path.parent, os.O_PATH)
    try:
        for script, words in ((f"cd /proc/self/fd/{folder}/view && ls", b"Permission denied"),
                              (f"cat /proc/self/fd/{folder}/view/{ID}/inst_ctl", b"Permission denied")):
            refused = await sh(script, user=65534, pass_fds=(folder,))
            assert words in refused.stderr and not refused.stdout
        shown = await sh(f"cat /proc/self/fd/{folder}/view/{ID}/version", user=65534, pass_fds=(folder,))
        assert shown.stdout, "a runtime in a user namespace must find a container's directory"
    finally:
        os.close(folder)


CHANGES = ["echo 1 >0/policy", "echo 1 >>0/policy", "echo x >new", "mkdir new", "rm version", "rmdir 0",
           "mv version new", "ln -s x new", "ln version new", "truncate -s 0 0/policy", "touch version", "chmod 777 0",
           "chown 1 version", "mknod new p", "dd if=/dev/null of=0/policy conv=notrunc oflag=append"]


async def test_no_write_whatever_the_flags(world: Any, mounted: Mount, tmp_path: Path) -> None:
    where = tmp_path / "bound"
    where.mkdir()
    ways = {"as mounted": "", "bound": f"mount --bind {mounted.path / ID} {where}",
            "bound, remounted": f"mount --bind {mounted.path / ID} {where}; mount -o remount,bind,rw {where}",
            "all remounted": f"mount --bind {mounted.path / ID} {where}; mount -o remount,rw {mounted.path}; "
                             f"mount -o remount,bind,rw {where}"}
    for way, prepare in ways.items():
        folder = where if prepare else mounted.path / ID
        lines = "".join(f"({change}) 2>&1 && echo 'TAKEN {change}'\n" for change in CHANGES)
        done = await sh(f"unshare -m sh -c '{prepare}\ncd {folder}\n{lines.replace(chr(39), chr(34))}'")
        refusals = done.stdout.decode().splitlines()
        assert len(refusals) >= len(CHANGES), (way, done)
        for line in refusals:
            assert "Read-only file system" in line or "not permitted" in line, (way, line)
    assert world.system.state.settings[0].policy == 1
    assert (await sh(f"setfattr -n user.x -v 1 {mounted.path / ID}/version 2>&1 || echo refused")).stdout


async def test_pids_as_the_container_counts_them(world: Any, mounted: Mount, monkeypatch: pytest.MonkeyPatch) -> None:
    first = await world.first("unshare", "--pid", "--fork")
    used = [(first.pid, 100), (os.getpid(), 200)]
    monkeypatch.setattr(world.system, "memory", lambda id, gpu: used if (id, gpu) == (ID, 0) else [])
    meminfo = mounted.path / ID / "0" / ID[:12] / "meminfo"
    free = 15109 // 15 * MIB - 300
    assert (await sh(f"cat {meminfo}")).stdout.decode() == f"Free: {free}\n", "its namespace is not known yet"
    assert (await world.hook(ID, first.pid)).status == 1
    assert (await sh(f"cat {meminfo}")).stdout.decode() == f"Free: {free}\nPID: 1 Mem: 100\n"


async def test_a_bind_follows_the_container(world: Any, mounted: Mount, tmp_path: Path) -> None:
    """As a container has it: a bind of one directory in a namespace of its own."""
    where = tmp_path / "bound"
    where.mkdir()
    holder = await world.first("unshare", "-m", "sh", "-c", f"mount --bind {mounted.path / ID} {where}; exec cat")
    inside = f"/proc/{holder.pid}/root{where}"
    held = await trio.to_thread.run_sync(lambda: os.open(f"{inside}/0/{ID[:12]}/weight", os.O_RDONLY))
    try:
        world.system.apply(Destroy(ID))
        gone = await sh(f"cat {inside}/0/{ID[:12]}/weight; cat {inside}/version; ls {mounted.path}")
        assert gone.stdout.decode().split() == [OTHER] and gone.stderr.count(b"No such file") == 2
        with pytest.raises(OSError, match="No such file"):
            await trio.to_thread.run_sync(lambda: os.pread(held, 10, 0))
        assert (await world.create(ID, world.bundle(ALIYUN_COM_GPU_MEM_CONTAINER=1))).status == 1
        assert (await sh(f"cat {inside}/0/{ID[:12]}/weight")).stdout == b"1\n"
        assert await trio.to_thread.run_sync(lambda: os.pread(held, 10, 0)) == b"1\n"
    finally:
        await trio.to_thread.run_sync(os.close, held)


async def test_readers_that_are_killed_cost_nothing(mounted: Mount) -> None:
    version = mounted.path / ID / "version"
    for _ in range(30):
        reader = await trio.lowlevel.open_process(["sh", "-c", f"while :; do read x <{version}; done"])
        await trio.sleep(0.003)
        reader.send_signal(signal.SIGKILL)
        with trio.fail_after(10):
            await reader.wait()
    assert (await sh(f"cat {version}")).stdout


async def test_a_successor_goes_on(world: Any, mounted: Mount) -> None:
    """A second server on the same connection answers for what the first gave out."""
    weight = mounted.path / ID / "0" / ID[:12] / "weight"
    held = await trio.to_thread.run_sync(lambda: os.open(weight, os.O_RDONLY))
    try:
        copy = await trio.to_thread.run_sync(
            lambda: Mount.adopt(os.dup(mounted.fileno()), mounted.init_message, mounted.path))
        async with trio.open_nursery() as nursery:
            successor = Session(Views(world.system, world.containers.viewers))
            await nursery.start(lambda task_status: successor.serve(copy, resend=True, task_status=task_status))
            for _ in range(20):
                assert await trio.to_thread.run_sync(lambda: os.pread(held, 10, 0)) == b"1\n"
            nursery.cancel_scope.cancel()
        copy.close()
    finally:
        await trio.to_thread.run_sync(os.close, held)


async def test_somebody_unmounts_it(world: Any, views: Views) -> None:
    mount = await trio.to_thread.run_sync(lambda: Mount.create(world.places.view, read_only=True))
    with pytest.raises(BaseExceptionGroup) as caught:
        async with trio.open_nursery() as nursery:
            await nursery.start(Session(views).serve, mount)
            await sh(f"umount {mount.path}")
            await trio.sleep(10)
    mount.unmount()
    assert caught.group_contains(Unmounted)


def test_what_a_session_cannot_do() -> None:
    class Broken:
        def getattr(self, inode: int) -> None:
            raise ZeroDivisionError

    served = Session(Broken())  # type: ignore[arg-type]
    for opcode, error in ((99, errno.ENOSYS), (session.GETATTR, errno.EIO), (session.WRITE, errno.EROFS)):
        raw = struct.pack("<IIQQIIII", 40, opcode, 77, 1, 0, 0, 0, 0)
        assert struct.unpack("<IiQ", served.answer(raw)) == (16, -error, 77)
    assert served.answer(struct.pack("<IIQQIIIIQ", 48, session.FORGET, 77, 1, 0, 0, 0, 0, 1)) == b""
