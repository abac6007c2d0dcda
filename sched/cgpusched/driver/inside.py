"""Files below a container's root, opened as a process in it would have them.

The root's owner may put a link in a folder's place at any moment, so a path that was resolved before is not safe to
open: what was a folder then may lead to the node's files by now. openat2(2) resolves and opens in one, and no link or
``..`` leads out of the root. Before Linux 5.6 there is none, and nothing is read: nor can cgpu-runtime's hook mount
anything there, which asks for the same.
"""

from __future__ import annotations

import ctypes
import errno
import os
import stat
from pathlib import Path

_SYS_OPENAT2 = 437  # x86-64
_RESOLVE_NO_MAGICLINKS, _RESOLVE_IN_ROOT = 0x02, 0x10
_FLAGS = os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC
_libc = ctypes.CDLL(None, use_errno=True)


class _OpenHow(ctypes.Structure):
    _fields_ = (("flags", ctypes.c_uint64), ("mode", ctypes.c_uint64), ("resolve", ctypes.c_uint64))


def read(root: Path, path: Path, most: int) -> bytes:
    """The first ``most`` bytes of a regular file, ``path`` as processes below ``root`` name it.

    Waits for no FIFO and no device. OSError: it cannot be read, or is no such file (EINVAL).
    """
    with open(_open(root, path), "rb") as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL), str(path))
        return file.read(most)


def _open(root: Path, path: Path) -> int:
    if root == Path("/"):
        return os.open(path, _FLAGS)  # the node's own: there is nothing to stay in
    folder = os.open(root, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        how = _OpenHow(_FLAGS, 0, _RESOLVE_IN_ROOT | _RESOLVE_NO_MAGICLINKS)
        size = ctypes.c_size_t(ctypes.sizeof(how))
        fd: int = _libc.syscall(ctypes.c_long(_SYS_OPENAT2), folder, os.fsencode(path), ctypes.byref(how), size)
        number = ctypes.get_errno()
    finally:
        os.close(folder)
    if fd < 0:
        raise OSError(number, os.strerror(number), str(path))
    return fd
