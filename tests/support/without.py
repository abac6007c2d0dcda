"""Runs a program for which the kernel lacks a system call, as an older one would: ``without.py NUMBER PROGRAM…``."""

import ctypes
import errno
import os
import struct
import sys

LOAD, EQUAL, RETURN = 0x20, 0x15, 0x06  # of a filter, linux/bpf_common.h
ALLOW, ERRNO = 0x7FFF0000, 0x00050000  # linux/seccomp.h
SET_NO_NEW_PRIVS, SET_SECCOMP, FILTER = 38, 22, 2


def lack(number: int) -> None:
    """From here on that system call is ENOSYS, for this process and what it becomes or starts."""
    steps = [(LOAD, 0, 0, 0), (EQUAL, 0, 1, number), (RETURN, 0, 0, ERRNO | errno.ENOSYS), (RETURN, 0, 0, ALLOW)]
    code = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *step) for step in steps))
    program = ctypes.create_string_buffer(struct.pack("<Hxxxxxxq", len(steps), ctypes.addressof(code)))
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(SET_NO_NEW_PRIVS, 1, 0, 0, 0) or libc.prctl(SET_SECCOMP, FILTER, program, 0, 0):
        raise OSError(ctypes.get_errno(), "no filter for system calls")
    libc.syscall(number)
    assert ctypes.get_errno() == errno.ENOSYS


if __name__ == "__main__":
    lack(int(sys.argv[1]))
    os.execvp(sys.argv[2], sys.argv[2:])
