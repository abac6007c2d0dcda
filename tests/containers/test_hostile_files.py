"""Containers whose files never answer, and hooks that name a process of somebody else's: they harm themselves only."""

import errno
import os
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import trio

from cgpufs.mount import Mount
from cgpusched.daemon.containers import readers
from cgpusched.daemon.containers.readers import Readers
from cgpusched.errors import CommandError

IDS = ["0123456789abcdef" * 4, "fedcba9876543210" * 4, "00112233" * 8]
PATIENCE = 0.3


@pytest.fixture
def hang() -> Iterator[Callable[[Path], Mount]]:
    """Puts a file system on a folder that nobody serves: whoever looks into it waits."""
    mounts: list[Mount] = []
    if not os.path.exists("/dev/fuse"):
        pytest.skip("mounting needs /dev/fuse")

    def mount(path: Path) -> Mount:
        mounts.append(Mount.create(path))
        return mounts[-1]

    yield mount
    for one in mounts:
        one.unmount()


async def begun(world: Any, id: str, bundle: Path) -> Any:
    """Created, and the hook asked for."""
    assert (await world.create(id, bundle)).status == 1
    return await world.hook(id, (await world.first()).pid, bundle)


async def test_a_root_that_hangs_keeps_nobody_else_from_starting(world: Any, hang: Any, until: Any) -> None:
    world.containers._readers = Readers(2, PATIENCE)
    bundles = [world.bundle(f"bundle-{number}", ALIYUN_COM_GPU_MEM_CONTAINER=1) for number in range(3)]
    for bundle in bundles:
        (bundle / "rootfs").mkdir()
    mount = await trio.to_thread.run_sync(hang, bundles[0] / "rootfs")
    told = await begun(world, IDS[0], bundles[0])
    assert told.status == -errno.ETIMEDOUT and "its files do not answer" in told.text
    await until(lambda: IDS[0] not in world.ids)
    again = await world.create(IDS[0], bundles[0])
    assert again.status == -errno.EBUSY and "an earlier look at its files has not come back" in again.text
    assert (await begun(world, IDS[1], bundles[1])).status == 1, "there is room for others"
    await trio.to_thread.run_sync(mount.unmount)
    await until(lambda: not world.containers._readers._stuck)
    assert (await begun(world, IDS[0], bundles[0])).status == 1


async def test_all_readers_hang_and_come_back(until: Any) -> None:
    some = Readers(2, PATIENCE)
    ends = [os.pipe() for _ in range(2)]

    def wait(number: int) -> bytes:
        return os.read(ends[number][0], 1)

    try:
        for number in range(2):
            with pytest.raises(CommandError) as error:
                await some.run(f"c{number}", lambda number=number: wait(number))  # type: ignore[misc]
            assert error.value.errno == errno.ETIMEDOUT and "its files do not answer" in str(error.value)
        with pytest.raises(CommandError) as error:
            await some.run("c2", lambda: 1)
        assert error.value.errno == errno.ETIMEDOUT and "too many containers' files" in str(error.value)
        os.write(ends[0][1], b"x")
        await until(lambda: some._limiter.available_tokens == 1)
        assert await some.run("c2", lambda: 1) == await some.run("c0", lambda: 1) == 1
        with pytest.raises(FileNotFoundError):
            await some.run("c0", lambda: os.stat("/nowhere/at/all"))
    finally:
        os.write(ends[1][1], b"x")
        await until(lambda: some._limiter.available_tokens == 2)
        for end in ends:
            os.close(end[0])
            os.close(end[1])
    assert readers.READ_SECONDS < 10, "cgpu-runtime waits 10 s"


@pytest.fixture
def orphan() -> Iterator[int]:
    """A process that is neither a child of this one nor of what the tests start."""
    done = subprocess.run(["sh", "-c", "sleep 100 >/dev/null 2>&1 & echo $!"], capture_output=True, check=True)
    pid = int(done.stdout)
    yield pid
    os.kill(pid, 9)


@pytest.mark.parametrize("created", [True, False])
async def test_a_hook_that_names_a_process_of_somebody_elses(
    world: Any, orphan: int, created: bool, until: Any
) -> None:
    if created:
        assert (await world.create(IDS[0])).status == 1
    else:
        world.bundle()
    told = await world.hook(IDS[0], orphan)
    assert told.status == -errno.EPERM and f"process {orphan} is none of its own" in told.text
    if created:  # the true one may come yet
        assert world.ids == [IDS[0]] and (await world.hook(IDS[0], (await world.first()).pid)).status == 1
    else:
        assert world.ids == world.marks == []
    assert Path(f"/proc/{orphan}").exists()
