"""A program that answers, in JSON, everything that CUDA and NVML tell it of its first GPU; one word a line on stdin.

``cuda`` (starts CUDA), ``alloc BYTES``, ``spin MICROSECONDS`` (kernels of that length from now on), ``memory``,
``processes``, ``list FUNCTION``, ``busy``, ``handles KEY...``. NVML is the unmodified pynvml.
"""

from __future__ import annotations

import ctypes
import json
import os
import sys
import threading
from collections.abc import Callable
from typing import Any

import pynvml

cuda = ctypes.CDLL("libcuda.so.1")
context = ctypes.c_void_p()


def check(result: int, what: str) -> None:
    if result:
        raise SystemExit(f"{what}: {result}")


def start_cuda() -> None:
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def alloc(size: str) -> None:
    check(cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(int(size))), "cuMemAlloc")


def spin(us: str) -> None:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    name = f"spin_us{us}".encode()
    ptx = b".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry " + name + b"()\n{\n ret;\n}\n"
    check(cuda.cuModuleLoadData(ctypes.byref(module), ptx), "cuModuleLoadData")
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name), "cuModuleGetFunction")

    def go() -> None:
        check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
        while True:
            for _ in range(8):
                check(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None), "cuLaunchKernel")
            check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")

    threading.Thread(target=go, daemon=True).start()


def first() -> Any:
    return pynvml.nvmlDeviceGetHandleByIndex(0)


def memory() -> dict[str, dict[str, int]]:
    """What each way of asking says is the total, used and free; CUDA's only once it is started."""
    plain = pynvml.nvmlDeviceGetMemoryInfo(first())
    newer = pynvml.nvmlDeviceGetMemoryInfo(first(), version=pynvml.nvmlMemory_v2)
    said = {name: {"total": one.total, "used": one.used, "free": one.free}
            for name, one in (("nvmlDeviceGetMemoryInfo", plain), ("nvmlDeviceGetMemoryInfo_v2", newer))}
    if context:
        free, total, device = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
        check(cuda.cuDeviceTotalMem_v2(ctypes.byref(device), 0), "cuDeviceTotalMem")
        said["cuMemGetInfo"] = {"total": total.value, "free": free.value}
        said["cuDeviceTotalMem"] = {"total": device.value}
    return said


def listed(entries: Any) -> dict[int, int]:
    return {one.pid: one.usedGpuMemory for one in entries}


def old_list(name: str) -> dict[int, int]:
    """The first variant, which pynvml no longer calls: entries of a pid and a size."""

    class Entry(ctypes.Structure):
        _fields_ = [("pid", ctypes.c_uint), ("usedGpuMemory", ctypes.c_ulonglong)]

    count, entries = ctypes.c_uint(64), (Entry * 64)()
    check(getattr(ctypes.CDLL("libnvidia-ml.so.1"), name)(first(), ctypes.byref(count), entries), name)
    return listed(entries[:count.value])


def details() -> dict[int, int]:
    asked = pynvml.c_nvmlProcessDetailList_t()
    asked.version, asked.mode = pynvml.nvmlProcessDetailList_v1, pynvml.NVML_PROCESS_MODE_COMPUTE
    asked.numProcArrayEntries = 64
    entries = (pynvml.c_nvmlProcessDetail_v1_t * 64)()
    asked.procArray = ctypes.cast(entries, ctypes.POINTER(pynvml.c_nvmlProcessDetail_v1_t))
    ask = ctypes.CDLL("libnvidia-ml.so.1").nvmlDeviceGetRunningProcessDetailList
    check(ask(first(), ctypes.byref(asked)), "nvmlDeviceGetRunningProcessDetailList")
    return listed(entries[:asked.numProcArrayEntries])


def processes() -> dict[str, dict[int, int]]:
    """What each list has: memory by pid."""
    return {
        "nvmlDeviceGetComputeRunningProcesses": old_list("nvmlDeviceGetComputeRunningProcesses"),
        "nvmlDeviceGetComputeRunningProcesses_v2": listed(pynvml.nvmlDeviceGetComputeRunningProcesses_v2(first())),
        "nvmlDeviceGetComputeRunningProcesses_v3": listed(pynvml.nvmlDeviceGetComputeRunningProcesses_v3(first())),
        "nvmlDeviceGetRunningProcessDetailList": details(),
    }


def one_list(name: str) -> dict[int, int]:
    return listed(getattr(pynvml, name)(first()))


def no_answer(ask: Callable[[], Any]) -> Any:
    """``ask()``, or the name of NVML's error."""
    try:
        return ask()
    except pynvml.NVMLError as error:
        return type(error).__name__


def busy() -> dict[str, Any]:
    """Per cent, by each way of asking; by process in ``sm``."""
    util = no_answer(lambda: pynvml.nvmlDeviceGetUtilizationRates(first()))
    samples = no_answer(lambda: pynvml.nvmlDeviceGetSamples(first(), pynvml.NVML_GPU_UTILIZATION_SAMPLES, 0))
    shares = no_answer(lambda: pynvml.nvmlDeviceGetProcessUtilization(first(), 0))
    state = no_answer(lambda: pynvml.nvmlDeviceGetDynamicPstatesInfo(first()))
    return {
        "rates": util if isinstance(util, str) else util.gpu,
        "memory": util if isinstance(util, str) else util.memory,
        "samples": samples if isinstance(samples, str) else [one.sampleValue.uiVal for one in samples[1]],
        "stamps": samples if isinstance(samples, str) else [one.timeStamp for one in samples[1]],
        "pstates": state if isinstance(state, str) else state.utilization[0].percentage,
        "sm": {} if isinstance(shares, str) else {one.pid: one.smUtil for one in shares},
    }


def identity(handle: Any) -> dict[str, Any]:
    return {"index": pynvml.nvmlDeviceGetIndex(handle), "uuid": pynvml.nvmlDeviceGetUUID(handle),
            "serial": pynvml.nvmlDeviceGetSerial(handle), "bus": pynvml.nvmlDeviceGetPciInfo(handle).busId}


def handles(*keys: str) -> dict[str, Any]:
    """All GPUs, and what each of ``kind=value`` finds: the index or the name of the error."""
    ways: dict[str, Callable[[str], Any]] = {
        "index": lambda value: pynvml.nvmlDeviceGetHandleByIndex(int(value)), "uuid": pynvml.nvmlDeviceGetHandleByUUID,
        "serial": pynvml.nvmlDeviceGetHandleBySerial, "bus": pynvml.nvmlDeviceGetHandleByPciBusId,
    }
    found = {}
    for key in keys:
        kind, value = key.split("=")
        found[key] = no_answer(lambda: pynvml.nvmlDeviceGetIndex(ways[kind](value)))  # noqa: B023  # called at once
    all_ = [pynvml.nvmlDeviceGetHandleByIndex(i) for i in range(pynvml.nvmlDeviceGetCount())]
    near = [pynvml.nvmlDeviceGetIndex(one) for one in pynvml.nvmlDeviceGetTopologyNearestGpus(all_[0], 50)]
    of_cpu = [pynvml.nvmlDeviceGetIndex(one) for one in pynvml.nvmlSystemGetTopologyGpuSet(0)]
    return {"all": [identity(one) for one in all_], "found": found, "near": near, "of_cpu": of_cpu}


COMMANDS: dict[str, Callable[..., Any]] = {"cuda": start_cuda, "alloc": alloc, "spin": spin, "memory": memory,
                                           "processes": processes, "list": one_list, "busy": busy, "handles": handles}

if __name__ == "__main__":
    pynvml.nvmlInit()
    print(json.dumps({"pid": os.getpid(), "env": dict(os.environ)}), flush=True)
    for line in sys.stdin:
        word, *arguments = line.split()
        print(json.dumps(COMMANDS[word](*arguments) or {}), flush=True)
