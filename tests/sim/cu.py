"""What the test programs say to the driver: ``cu.cuMemAlloc_v2(...)`` through ctypes, raising on errors.

Not a test, and no part of the product: the children that conftest.Machine starts import it.
"""

# ruff: noqa: N802, N816
from __future__ import annotations

import ctypes
import os
import time
from ctypes import byref, c_char, c_char_p, c_float, c_int, c_size_t, c_uint, c_ulonglong, c_void_p
from pathlib import Path
from typing import Any

LIB = Path(os.environ["CGPU_SIM_LIB"])
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
HOST_FN = ctypes.CFUNCTYPE(None, c_void_p)
__all__ = ["KIB", "MIB", "GIB", "HOST_FN", "CudaError", "Driver", "Kernels", "Nvml", "byref", "c_char", "c_char_p",
           "c_float", "c_int", "c_size_t", "c_uint", "c_ulonglong", "c_void_p", "context", "ctypes", "cu", "elapsed_ms",
           "event", "launch", "mem_alloc", "nv", "os", "result", "stream", "sync", "time"]


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

        infos = (Info * 256)()
        count = c_uint(256)
        self.nvmlDeviceGetComputeRunningProcesses_v3(self.device(index), byref(count), infos)
        return {infos[i].pid: infos[i].used for i in range(count.value)}


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
