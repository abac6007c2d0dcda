"""A program on NVIDIA's cuda-bindings, the driver API from Python: a module from PTX, streams, events, copies, a graph,
a green context.

The kernel's name tells the simulated driver how long it takes. Prints key=value lines that test_frameworks.py reads.
"""

import ctypes
import sys
from typing import Any

from cuda.bindings import driver

PTX = b"""
.version 8.0
.target sm_90
.address_size 64
.visible .entry spin_us500()
{
    ret;
}
\0"""


def check(outcome: tuple[Any, ...]) -> Any:
    error, *values = outcome
    if error != driver.CUresult.CUDA_SUCCESS:
        sys.exit(f"{error!r}")
    return values[0] if len(values) == 1 else values or None


def main() -> None:
    check(driver.cuInit(0))
    device = check(driver.cuDeviceGet(0))
    context = check(driver.cuDevicePrimaryCtxRetain(device))
    check(driver.cuCtxSetCurrent(context))
    module = check(driver.cuModuleLoadData(PTX))
    function = check(driver.cuModuleGetFunction(module, b"spin_us500"))
    stream = check(driver.cuStreamCreate(driver.CUstream_flags.CU_STREAM_NON_BLOCKING))
    start, end = (check(driver.cuEventCreate(0)) for _ in range(2))

    check(driver.cuEventRecord(start, stream))
    for _ in range(20):
        check(driver.cuLaunchKernel(function, 4, 1, 1, 128, 1, 1, 0, stream, 0, 0))
    check(driver.cuEventRecord(end, stream))
    check(driver.cuEventSynchronize(end))
    print(f"kernels_ms={check(driver.cuEventElapsedTime(start, end)):.3f}")

    check(driver.cuStreamBeginCapture(stream, driver.CUstreamCaptureMode.CU_STREAM_CAPTURE_MODE_GLOBAL))
    for _ in range(4):
        check(driver.cuLaunchKernel(function, 4, 1, 1, 128, 1, 1, 0, stream, 0, 0))
    graph = check(driver.cuStreamEndCapture(stream))
    executable = check(driver.cuGraphInstantiate(graph, 0))
    check(driver.cuEventRecord(start, stream))
    check(driver.cuGraphLaunch(executable, stream))
    check(driver.cuEventRecord(end, stream))
    check(driver.cuEventSynchronize(end))
    print(f"graph_ms={check(driver.cuEventElapsedTime(start, end)):.3f}")

    resource = check(driver.cuDeviceGetDevResource(device, driver.CUdevResourceType.CU_DEV_RESOURCE_TYPE_SM))
    groups, _, _ = check(driver.cuDevSmResourceSplitByCount(2, resource, 0, 32))
    parts = check(driver.cuDevResourceGenerateDesc(groups[:1], 1))
    green = check(driver.cuGreenCtxCreate(parts, device, driver.CUgreenCtxCreate_flags.CU_GREEN_CTX_DEFAULT_STREAM))
    own = check(driver.cuGreenCtxStreamCreate(green, driver.CUstream_flags.CU_STREAM_NON_BLOCKING, 0))
    check(driver.cuEventRecord(start, own))
    for _ in range(4):
        check(driver.cuLaunchKernel(function, 4, 1, 1, 128, 1, 1, 0, own, 0, 0))
    check(driver.cuEventRecord(end, own))
    check(driver.cuEventSynchronize(end))
    print(f"green_ms={check(driver.cuEventElapsedTime(start, end)):.3f}", f"green_sms={groups[0].sm.smCount}", sep="\n")
    check(driver.cuStreamDestroy(own))
    check(driver.cuGreenCtxDestroy(green))

    text = b"moved there and back"
    pointer = check(driver.cuMemAlloc(len(text)))
    back = ctypes.create_string_buffer(len(text))
    check(driver.cuMemcpyHtoD(pointer, text, len(text)))
    check(driver.cuMemcpyDtoH(ctypes.addressof(back), pointer, len(text)))
    check(driver.cuMemFree(pointer))
    free, total = check(driver.cuMemGetInfo())
    print(f"copied={back.raw == text}", f"free={free}", f"total={total}", sep="\n")
    print(f"oom={driver.cuMemAlloc(total + 1)[0].name}")
    check(driver.cuDevicePrimaryCtxRelease(device))


main()
