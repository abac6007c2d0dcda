"""A program of the driver API, through ctypes, that obeys one word a line on stdin and answers in JSON.

``init``, ``context``, ``info``, ``alloc BYTES``, ``free``, ``devices``, ``nvml``, ``launch MICROSECONDS COUNT``,
``fork BYTES``, ``exit``.
"""

import ctypes
import json
import os
import sys
import time

cuda = ctypes.CDLL("libcuda.so.1")
pointers: list[int] = []


def check(result: int, what: str) -> None:
    if result:
        raise SystemExit(f"{what}: {result}")


def start() -> None:
    context = ctypes.c_void_p()
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")


def init() -> None:
    check(cuda.cuInit(0), "cuInit")


def context() -> dict[str, int]:
    """One more, current from now on."""
    made = ctypes.c_void_p()
    init()
    return {"result": cuda.cuCtxCreate_v2(ctypes.byref(made), 0, 0)}


def info() -> dict[str, int]:
    free, total, device_total = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
    check(cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(total)), "cuMemGetInfo")
    check(cuda.cuDeviceTotalMem_v2(ctypes.byref(device_total), 0), "cuDeviceTotalMem")
    return {"free": free.value, "total": total.value, "device_total": device_total.value}


def alloc(size: int) -> dict[str, int]:
    pointer = ctypes.c_uint64()
    result = cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size))
    if not result:
        pointers.append(pointer.value)
    return {"result": result}


def free() -> dict[str, int]:
    return {"result": cuda.cuMemFree_v2(ctypes.c_uint64(pointers.pop()))}


def devices() -> dict[str, object]:
    count = ctypes.c_int()
    check(cuda.cuDeviceGetCount(ctypes.byref(count)), "cuDeviceGetCount")
    uuids = []
    for number in range(count.value):
        uuid = (ctypes.c_ubyte * 16)()
        check(cuda.cuDeviceGetUuid(uuid, number), "cuDeviceGetUuid")
        uuids.append(bytes(uuid).hex())
    return {"uuids": uuids, "visible": os.environ.get("CUDA_VISIBLE_DEVICES")}


def nvml() -> dict[str, object]:
    import pynvml

    pynvml.nvmlInit()
    handles = [pynvml.nvmlDeviceGetHandleByIndex(n) for n in range(pynvml.nvmlDeviceGetCount())]
    memory = [pynvml.nvmlDeviceGetMemoryInfo(handle) for handle in handles]
    return {
        "uuids": [pynvml.nvmlDeviceGetUUID(handle).removeprefix("GPU-").replace("-", "") for handle in handles],
        "total": [one.total for one in memory],
        "used": [one.used for one in memory],
        "pids": [one.pid for handle in handles for one in pynvml.nvmlDeviceGetComputeRunningProcesses(handle)],
    }


def launch(us: int, count: int) -> dict[str, float]:
    module, function = ctypes.c_void_p(), ctypes.c_void_p()
    name = f"spin_us{us}".encode()
    ptx = b".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry " + name + b"()\n{\n ret;\n}\n"
    check(cuda.cuModuleLoadData(ctypes.byref(module), ptx), "cuModuleLoadData")
    check(cuda.cuModuleGetFunction(ctypes.byref(function), module, name), "cuModuleGetFunction")
    begin = time.monotonic()
    for _ in range(count):
        check(cuda.cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, None, None, None), "cuLaunchKernel")
    check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    return {"seconds": time.monotonic() - begin}


def fork(size: int) -> dict[str, object]:
    """A child that starts CUDA for itself: only possible before the parent did."""
    read, write = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read)
        start()
        answer = {"alloc": alloc(size)["result"], **info()}
        os.write(write, json.dumps(answer).encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        data = pipe.read()
    os.waitpid(pid, 0)
    return dict(json.loads(data))


if __name__ == "__main__":
    if sys.argv[1:] != ["--later"]:
        start()
    print(json.dumps({"pid": os.getpid()}), flush=True)
    for line in sys.stdin:
        word, *arguments = line.split()
        if word == "exit":
            break
        print(json.dumps(globals()[word](*map(int, arguments)) or {}), flush=True)
