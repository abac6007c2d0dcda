"""What a tenant can do with the descriptors it is handed: not write the control page, not change a size."""

import ctypes
import errno
import fcntl
import mmap
import os

import pytest

from cgpusched.gate import Gate

F_ADD_SEALS, F_GET_SEALS, F_SEAL_SEAL, F_SEAL_SHRINK, F_SEAL_GROW, F_SEAL_FUTURE_WRITE = 1033, 1034, 1, 2, 4, 16
PUNCH_HOLE, KEEP_SIZE = 2, 1
libc = ctypes.CDLL(None, use_errno=True)


@pytest.fixture
def region():
    with Gate() as gate:
        gate.add_gpu(0, bytes(16), 1 << 30)
        yield gate.add_region(0, "a", 1 << 20)


@pytest.fixture(params=["as handed out", "reopened for writing"])
def ctl_fd(request, region):
    """The tenant's descriptor of the control page; root may reopen it for writing through /proc."""
    if request.param == "as handed out":
        fd = os.dup(region.ctl_fd)
    else:
        fd = os.open(f"/proc/self/fd/{region.ctl_fd}", os.O_RDWR)
    yield fd
    os.close(fd)


def test_it_maps_readable(ctl_fd):
    with mmap.mmap(ctl_fd, 4096, prot=mmap.PROT_READ) as page:
        assert page[:4] == b"cgpu"


def test_no_second_writable_map(ctl_fd):
    with pytest.raises(PermissionError):
        mmap.mmap(ctl_fd, 4096)


def test_no_mprotect_to_writable(ctl_fd):
    libc.mmap.restype = ctypes.c_void_p
    libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
    libc.mprotect.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
    libc.munmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t]
    page = libc.mmap(None, 4096, mmap.PROT_READ, mmap.MAP_SHARED, ctl_fd, 0)
    try:
        assert libc.mprotect(page, 4096, mmap.PROT_READ | mmap.PROT_WRITE) == -1
        assert ctypes.get_errno() == errno.EACCES
    finally:
        libc.munmap(page, 4096)


@pytest.mark.parametrize("attack", [
    lambda fd: os.pwrite(fd, b"x", 64),
    lambda fd: os.ftruncate(fd, 0),
    lambda fd: os.ftruncate(fd, 8192),
    lambda fd: os.truncate(f"/proc/self/fd/{fd}", 0),
    lambda fd: fcntl.fcntl(fd, F_ADD_SEALS, 0),
])
def test_refused(ctl_fd, attack):
    with pytest.raises(OSError) as error:
        attack(ctl_fd)
    assert error.value.errno in (errno.EPERM, errno.EBADF, errno.EINVAL)
    assert os.fstat(ctl_fd).st_size == 4096


def test_no_hole(ctl_fd):
    libc.fallocate.argtypes = [ctypes.c_int, ctypes.c_int, ctypes.c_long, ctypes.c_long]
    assert libc.fallocate(ctl_fd, PUNCH_HOLE | KEEP_SIZE, 0, 4096) == -1
    assert os.pread(ctl_fd, 4, 0) == b"cgpu"


def test_seals(region):
    size = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL
    assert fcntl.fcntl(region.ctl_fd, F_GET_SEALS) & ~32 == size | F_SEAL_FUTURE_WRITE
    assert fcntl.fcntl(region.report_fd, F_GET_SEALS) & ~32 == size
    assert fcntl.fcntl(region.ctl_fd, fcntl.F_GETFL) & os.O_ACCMODE == os.O_RDONLY


def test_report_pages_keep_their_size(region):
    for size in (0, 4096, 1 << 20):
        with pytest.raises(PermissionError):
            os.ftruncate(region.report_fd, size)
    with mmap.mmap(region.report_fd, 4096 + 512 * 256) as pages:
        assert pages[:4] == b"cgpu"
        pages[4096:4100] = b"mine"
