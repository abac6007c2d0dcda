"""Keeps the GPU busy through NVIDIA's own cuda-bindings, and asks for more memory than it may have.

    python busy.py MICROSECONDS SECONDS     kernels that last so long, for so long
    python busy.py memory MIB               what the program is told of its memory, and an allocation of so much

An ordinary program: it knows nothing of cgpufs.
"""

import sys
import time

from cuda.bindings import driver

PTX = """
.version 7.0
.target sm_52
.address_size 64
.visible .entry spin_us{us}()
{{
    .reg .pred %p; .reg .u64 %start, %end, %now;
    mov.u64 %start, %globaltimer;
    add.u64 %end, %start, {us}000;
again:
    mov.u64 %now, %globaltimer;
    setp.lt.u64 %p, %now, %end;
    @%p bra again;
    ret;
}}
"""


def call(function, *args):
    """Calls the driver; an error ends the program with CUDA's own name for it."""
    result, *values = function(*args)
    if result != driver.CUresult.CUDA_SUCCESS:
        sys.exit(f"busy.py: {function.__name__}: {result.name}")
    return values[0] if len(values) == 1 else values


def start():
    call(driver.cuInit, 0)
    device = call(driver.cuDeviceGet, 0)
    call(driver.cuCtxSetCurrent, call(driver.cuDevicePrimaryCtxRetain, device))
    return device


def memory(mib):
    device = start()
    free, total = call(driver.cuMemGetInfo)
    print(f"the device has {total >> 20} MiB, {free >> 20} MiB of them free "
          f"(cuDeviceTotalMem: {call(driver.cuDeviceTotalMem, device) >> 20} MiB)")
    print(f"allocating {mib} MiB ...", flush=True)
    call(driver.cuMemAlloc, mib << 20)
    print("allocated")


def busy(us, seconds):
    start()
    module = call(driver.cuModuleLoadData, PTX.format(us=us).encode() + b"\0")
    kernel = call(driver.cuModuleGetFunction, module, f"spin_us{us}".encode())
    batch = max(1, 10_000 // us)
    begin = mark = time.monotonic()
    done = 0
    while time.monotonic() - begin < seconds:
        for _ in range(batch):
            call(driver.cuLaunchKernel, kernel, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0)
        call(driver.cuCtxSynchronize)
        done += batch
        now = time.monotonic()
        if now - mark >= 1:
            print(f"{done} kernels, {done * us / 1000 / (now - mark):.0f} ms of the GPU a second", flush=True)
            done, mark = 0, now


if __name__ == "__main__":
    if sys.argv[1] == "memory":
        memory(int(sys.argv[2]))
    else:
        busy(int(sys.argv[1]), float(sys.argv[2]))
