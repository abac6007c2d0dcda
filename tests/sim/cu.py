"""What the test programs say to the driver: ``cu.cuMemAlloc_v2(...)`` through ctypes, raising on errors.

Not a test, and no part of the product: the children that conftest.Machine starts import it.
"""

# ruff: noqa: N802, N816
from __future__ import annotations

import ast
import ctypes
import functools
import os
import signal
import socket
import time
import traceback
from collections.abc import Callable
from ctypes import byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

LIB = Path(os.environ["CGPU_SIM_LIB"])
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOST_FN = ctypes.CFUNCTYPE(None, c_void_p)
__all__ = ["KIB", "MIB", "GIB", "HOST_FN", "Access", "CudaError", "Driver", "Kernels", "Nvml", "Peer", "Prop", "byref",
           "c_char", "c_char_p", "c_float", "c_int", "c_size_t", "c_uint", "c_ulonglong", "c_void_p", "context",
           "create", "ctypes", "cu", "elapsed_ms", "event", "export", "get", "launch", "map_it", "mem_alloc", "mine",
           "nv", "os", "put", "result", "stream", "sync", "take", "time", "used"]


class CudaError(Exception):
    def __init__(self, name: str, code: int) -> None:
        super().__init__(f"{name}: {code}")
        self.code = code


class Driver:
    """Every function of the library; arguments as ctypes takes them, integers as 64 bits."""

    def __init__(self, path: Path) -> None:
        self.lib = ctypes.CDLL(str(path))

    def __getattr__(self, name: str) -> Any:
        function = getattr(self.lib, name)

        def call(*args: Any) -> int:
            wide = [c_ulonglong(a & (2**64 - 1)) if isinstance(a, int) else a for a in args]
            code = function(*wide)
            if code:
                raise CudaError(name, code)
            return 0

        return call


cu = Driver(LIB / "libcuda.so.1")


class Nvml(Driver):
    def __init__(self) -> None:
        super().__init__(LIB / "libnvidia-ml.so.1")
        self.nvmlInit_v2()

    def device(self, index: int = 0) -> c_void_p:
        handle = c_void_p()
        self.nvmlDeviceGetHandleByIndex_v2(index, byref(handle))
        return handle

    def memory(self, index: int = 0) -> tuple[int, int]:
        """used, total"""
        info = (c_ulonglong * 3)()
        self.nvmlDeviceGetMemoryInfo(self.device(index), info)
        return info[2], info[0]

    def processes(self, index: int = 0) -> dict[int, int]:
        class Info(ctypes.Structure):
            _fields_ = [("pid", c_uint), ("used", c_ulonglong), ("gi", c_uint), ("ci", c_uint)]

        infos = (Info * 1024)()
        count = c_uint(1024)
        self.nvmlDeviceGetComputeRunningProcesses_v3(self.device(index), byref(count), infos)
        return {infos[i].pid: infos[i].used for i in range(count.value)}


@functools.cache
def nv() -> Nvml:
    return Nvml()


def result(call: Any, *args: Any) -> int:
    """The code a call gives, 0 or what it failed with."""
    try:
        call(*args)
    except CudaError as error:
        return error.code
    return 0


def context(device: int = 0) -> c_void_p:
    """Initialises, and makes the primary context current."""
    ctx = c_void_p()
    cu.cuInit(0)
    cu.cuDevicePrimaryCtxRetain(byref(ctx), device)
    cu.cuCtxSetCurrent(ctx)
    return ctx


class Kernels:
    """Functions of a module of which any name is one."""

    def __init__(self) -> None:
        self.module = c_void_p()
        cu.cuModuleLoadData(byref(self.module), c_char_p(b"\x7fany image at all"))

    def __getattr__(self, name: str) -> c_void_p:
        function = c_void_p()
        cu.cuModuleGetFunction(byref(function), self.module, c_char_p(name.encode()))
        return function


def launch(function: c_void_p, on: c_void_p | None = None, times: int = 1) -> None:
    for _ in range(times):
        cu.cuLaunchKernel(function, 1, 1, 1, 32, 1, 1, 0, on, None, None)


def stream(flags: int = 0, priority: int = 0) -> c_void_p:
    out = c_void_p()
    cu.cuStreamCreateWithPriority(byref(out), flags, c_int(priority))
    return out


def event(flags: int = 0) -> c_void_p:
    out = c_void_p()
    cu.cuEventCreate(byref(out), flags)
    return out


def elapsed_ms(start: c_void_p, end: c_void_p) -> float:
    out = c_float()
    cu.cuEventElapsedTime(byref(out), start, end)
    return out.value


def mem_alloc(size: int) -> int:
    out = c_ulonglong()
    cu.cuMemAlloc_v2(byref(out), size)
    return out.value


def sync() -> None:
    cu.cuCtxSynchronize()


# ---- two processes of one test ----


class Peer:
    """A forked child, made before this process initialises: what it runs, and a socket to it."""

    def __init__(self, body: Callable[[Peer], None]) -> None:
        self.socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.pid = os.fork()
        if not self.pid:
            ctypes.CDLL(None).prctl(1, signal.SIGKILL)  # PR_SET_PDEATHSIG: some run for ever, and a test may fail
            self.socket.close()
            self.socket = theirs
            code = 1
            try:
                body(self)
                code = 0
            except BaseException:
                traceback.print_exc()
            os._exit(code)
        theirs.close()

    def send(self, data: Any = None, *fds: int) -> None:
        socket.send_fds(self.socket, [repr(data).encode()], list(fds))

    def recv(self, fds: int = 0) -> Any:
        """What the other side sent, and so many descriptors with it; fails when that side is gone."""
        data, got, _, _ = socket.recv_fds(self.socket, 65536, fds)
        if not data:
            raise EOFError("the other process is gone")
        value = ast.literal_eval(data.decode())
        return (value, *got) if fds else value

    def kill(self) -> None:
        os.kill(self.pid, signal.SIGKILL)
        os.waitpid(self.pid, 0)

    def join(self) -> None:
        assert os.waitpid(self.pid, 0)[1] == 0


def used() -> int:
    """What cuMemGetInfo says is not free; the same that NVML says is used, and the sum over its processes."""
    free, total = c_size_t(), c_size_t()
    cu.cuMemGetInfo_v2(byref(free), byref(total))
    in_use, size = nv().memory()
    assert (in_use, size) == (total.value - free.value, total.value)
    assert in_use == sum(nv().processes().values())
    return in_use


def mine() -> int:
    """What NVML says of this process."""
    return nv().processes().get(os.getpid(), 0)


class Prop(ctypes.Structure):
    """CUmemAllocationProp"""

    _fields_ = [("type", c_uint), ("handles", c_uint), ("where", c_uint), ("id", c_int), ("win", c_void_p),
                ("flags", c_char * 8)]


class Access(ctypes.Structure):
    """CUmemAccessDesc"""

    _fields_ = [("where", c_uint), ("id", c_int), ("flags", c_uint)]


def create(size: int, handles: int = 1, where: int = 1) -> int:
    out = c_ulonglong()
    cu.cuMemCreate(byref(out), size, byref(Prop(1, handles, where, 0)), 0)
    return out.value


def export(handle: int) -> int:
    out = c_int(-1)
    cu.cuMemExportToShareableHandle(byref(out), handle, 1, 0)
    return out.value


def take(fd: int) -> int:
    """Imports an allocation and closes the descriptor."""
    out = c_ulonglong()
    try:
        cu.cuMemImportFromShareableHandle(byref(out), fd, 1)
    finally:
        os.close(fd)
    return out.value


def map_it(handle: int, size: int) -> int:
    at = c_ulonglong()
    cu.cuMemAddressReserve(byref(at), size, 0, 0, 0)
    cu.cuMemMap(at.value, size, 0, handle, 0)
    cu.cuMemSetAccess(at.value, size, byref(Access(1, 0, 3)), 1)
    return at.value


def put(at: int, data: bytes) -> None:
    cu.cuMemcpyHtoD_v2(at, c_char_p(data), len(data))


def get(at: int, size: int) -> bytes:
    out = ctypes.create_string_buffer(size)
    cu.cuMemcpyDtoH_v2(out, at, size)
    return out.raw
