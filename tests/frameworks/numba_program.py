"""An unmodified numba-cuda program: adds two vectors, asks after memory, and allocates one byte too many.

On the simulated driver kernels take time and compute nothing, so the sum is not looked at: that the copies arrive is.
Prints key=value lines that test_frameworks.py reads.
"""

import sys

import numpy as np
from numba import cuda


@cuda.jit("void(float32[:], float32[:], float32[:])")
def add(a, b, out):  # type: ignore[no-untyped-def]
    i = cuda.grid(1)
    if i < out.size:
        out[i] = a[i] + b[i]


def main() -> None:
    n = 1 << 20
    a = np.arange(n, dtype=np.float32)
    left, right, out = cuda.to_device(a), cuda.to_device(2 * a), cuda.device_array(n, np.float32)
    start, end = cuda.event(), cuda.event()
    start.record()
    for _ in range(100):
        add[(n + 255) // 256, 256](left, right, out)
    end.record()
    end.synchronize()
    assert (left.copy_to_host() == a).all() and (right.copy_to_host() == 2 * a).all()
    stream = cuda.stream()
    pinned = cuda.pinned_array(n, np.float32)
    left.copy_to_host(pinned, stream=stream)
    stream.synchronize()
    assert (pinned == a).all()
    free, total = cuda.current_context().get_memory_info()
    print(f"kernel_ms={cuda.event_elapsed_time(start, end):.3f}", f"free={free}", f"total={total}", sep="\n")
    print(f"name={cuda.get_current_device().name!r}")
    try:
        cuda.device_array(free + 1, np.uint8)
    except cuda.cudadrv.driver.CudaAPIError as error:
        print(f"oom={error}")
    else:
        sys.exit("allocated more than there is")


main()
