"""A mount outlives its daemon: descriptor and INIT go to a successor, also from one that was killed."""

import os
import signal
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import trio
from mounted import Served, eventually
from tree_server import MemoryBackend

from cgpufs import mount as mount_module
from cgpufs.mount import Mount
from cgpufs.ops import Operations
from cgpufs.tree import Tree
from cgpusched.errors import UserError

KERNEL = tuple(map(int, os.uname().release.split("-")[0].split(".")[:2]))
READER = """
import os, sys
fd = os.open(sys.argv[1] + "/0/policy", os.O_RDONLY)
count = 0
while True:
    for value in (os.pread(fd, 9, 0), open(sys.argv[1] + "/version", "rb").read()):
        if value not in (b"2\\n", b"1.2.3\\n"):
            sys.exit(3)
    os.listdir(sys.argv[1] + "/0/bare-1")
    count += 1
    os.pwrite(1, b"%12d" % count, 0)
"""


@pytest.fixture
def mount(mountpoint: Path) -> Iterator[Mount]:
    """The keeper's part: a mount that nobody serves yet."""
    mount = Mount.create(mountpoint)
    yield mount
    mount.unmount()


@pytest.fixture
def start(mount: Mount, serve: Callable[..., Served], tmp_path: Path) -> Callable[[], Served]:
    """Starts a daemon that takes the mount over."""
    kept = tmp_path / "init"
    kept.write_bytes(mount.init_message)

    def adopt(*args: str) -> Served:
        fd = str(mount.fileno())
        return serve("--adopt", fd, "--init", str(kept), "--leave", *args, pass_fds=(mount.fileno(),))

    return adopt


def test_init_message(mount: Mount) -> None:
    length, opcode = struct.unpack_from("<II", mount.init_message)
    assert (length, opcode) == (len(mount.init_message), 26)
    assert not os.get_inheritable(mount.fileno())
    assert not os.get_blocking(mount.fileno())


def test_successors_of_killed_daemons(mount: Mount, start: Callable[[], Served], tmp_path: Path) -> None:
    served = start().wait_ready()
    output = tmp_path / "count"
    with open(output, "wb") as file:
        reader = subprocess.Popen([sys.executable, "-c", READER, str(mount.path)], stdout=file)
    try:
        held = os.open(mount.path / "0/policy", os.O_RDWR)
        directory = os.open(mount.path / "0/bare-1", os.O_RDONLY)
        try:
            for _ in range(5):
                count = int(output.read_text() or 0)
                assert eventually(lambda count=count: int(output.read_text() or 0) > count + 20)
                served.kill()
                served = start().wait_ready()
                assert reader.poll() is None
                assert os.pread(held, 9, 0) == b"2\n"
                assert sorted(os.listdir(directory)) == ["highprio", "id", "meminfo", "memsize", "weight"]
            assert os.write(held, b"4\n") == 2
            assert (mount.path / "0/policy").read_text() == "4\n"
        finally:
            os.close(held)
            os.close(directory)
    finally:
        reader.kill()
        reader.wait()
    assert served.stop() == 0


def test_a_killed_daemon_before_its_first_answer(mount: Mount, start: Callable[[], Served]) -> None:
    start().kill()
    served = start().wait_ready()
    assert (mount.path / "version").read_text() == "1.2.3\n"
    assert served.stop() == 0


def test_requests_wait_for_the_successor(mount: Mount, start: Callable[[], Served]) -> None:
    served = start().wait_ready()
    os.kill(served.process.pid, signal.SIGSTOP)
    reader = subprocess.Popen(["cat", str(mount.path / "0/c0ffee00c0ff/id")], stdout=subprocess.PIPE)
    try:
        served.kill()
        assert reader.poll() is None
        served = start().wait_ready()
        output, _ = reader.communicate(timeout=10)
        assert output == b"c0ffee00" * 8 + b"\n"
    finally:
        reader.kill()
        reader.wait()
    assert served.stop() == 0


def test_a_planned_handover(mount: Mount, start: Callable[[], Served]) -> None:
    """Stopped in good order, without unmounting, several times."""
    for _ in range(3):
        served = start().wait_ready()
        assert (mount.path / "version").read_text() == "1.2.3\n"
        assert served.stop() == 0


@pytest.mark.skipif(KERNEL < (6, 9), reason="this kernel cannot re-send requests (FUSE_NOTIFY_RESEND, 6.9)")
def test_a_request_taken_and_not_answered_comes_again(mount: Mount, start: Callable[[], Served]) -> None:
    """What a daemon read and died over, the successor has re-sent (kernels from 6.9)."""
    served = start().wait_ready()
    os.kill(served.process.pid, signal.SIGSTOP)
    reader = subprocess.Popen(["cat", str(mount.path / "version")], stdout=subprocess.PIPE)
    try:
        taken: list[bytes] = []

        def take() -> bool:
            try:
                taken.append(os.read(mount.fileno(), 2 << 20))
            except BlockingIOError:
                return False
            return True

        assert eventually(take)
        served.kill()
        served = start().wait_ready()
        output, _ = reader.communicate(timeout=10)
        assert output == b"1.2.3\n"
    finally:
        reader.kill()
        reader.wait()
    assert served.stop() == 0


def test_before_6_9_a_request_taken_and_not_answered_fails(
    mount: Mount, start: Callable[..., Served], monkeypatch: pytest.MonkeyPatch
) -> None:
    """There the kernel cannot repeat it: it ends with its reader's device, and nobody hangs. The others wait."""
    monkeypatch.setattr(mount_module, "can_resend", lambda: False)
    served = start("--old-kernel").wait_ready()
    assert (mount.path / "version").read_text() == "1.2.3\n"
    os.kill(served.process.pid, signal.SIGSTOP)
    device = mount.serving_fd()
    first, second = (subprocess.Popen(["cat", str(mount.path / name)], stdout=subprocess.PIPE, stderr=subprocess.PIPE)
                     for name in ("version", "0/policy"))  # fmt: skip
    try:
        assert eventually(lambda: try_read(device))
        os.close(device)
        assert eventually(lambda: first.poll() is not None or second.poll() is not None)
        served.kill()
        served = start("--old-kernel").wait_ready()
        answers = [one.communicate(timeout=10) for one in (first, second)]
        assert sorted(one.returncode for one in (first, second)) == [0, 1]
        assert any(b"connection abort" in said for _, said in answers)
        assert any(said in (b"1.2.3\n", b"2\n") for said, _ in answers)
    finally:
        for one in (first, second):
            one.kill()
            one.communicate()
    assert served.stop() == 0


def try_read(device: int) -> bool:
    """Whether a request was there that somebody waits for: LOOKUP, GETATTR or OPEN, no RELEASE."""
    try:
        return struct.unpack_from("<II", os.read(device, 2 << 20))[1] in (1, 3, 14)
    except BlockingIOError:
        return False


def test_what_cannot_be_adopted(mountpoint: Path) -> None:
    mount = Mount.create(mountpoint)
    with pytest.raises(UserError, match="no FUSE_INIT"):
        Mount.adopt(os.dup(mount.fileno()), mount.init_message[:50], mountpoint)
    with pytest.raises(UserError, match="no FUSE_INIT"):
        Mount.adopt(os.dup(mount.fileno()), b"", mountpoint)
    with pytest.raises(UserError, match="unmounted"):
        Mount.adopt(os.dup(mount.fileno()), mount.init_message, mountpoint.parent)
    copy = os.dup(mount.fileno())
    mount.unmount()
    with pytest.raises(UserError, match="unmounted"):
        Mount.adopt(copy, mount.init_message, mountpoint)


async def test_served_again_by_the_same_process(mountpoint: Path) -> None:
    mount = Mount.create(mountpoint)
    try:
        for round_ in range(3):
            async with trio.open_nursery() as nursery:
                operations = Operations(Tree(MemoryBackend()))
                await nursery.start(mount.serve, operations)
                with trio.fail_after(10):
                    text = await trio.to_thread.run_sync((mountpoint / "version").read_text)
                assert text == "1.2.3\n"
                if round_ == 0:
                    with pytest.raises(RuntimeError, match="one session"):
                        await mount.serve(operations)
                nursery.cancel_scope.cancel()
    finally:
        mount.unmount()
