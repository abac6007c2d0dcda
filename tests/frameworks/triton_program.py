"""A kernel of Triton's own, and torch.compile, which writes and launches more of them.

The kernel's name tells the simulated driver how long it takes. Prints key=value lines that test_torch.py reads.
"""

import torch
import triton
import triton.language as tl
from torch._inductor import metrics

LAUNCHES = 20


@triton.jit
def spin_us500(x, out, n, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    tl.store(out + at, tl.load(x + at, mask=at < n) + 1, mask=at < n)


@torch.compile
def compiled(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    return (x.sin() + y.cos()).relu().sum(dim=1) * 2


def timed(call: object, times: int) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    for _ in range(times):
        call()  # type: ignore[operator]
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


def main() -> None:
    x, out = torch.zeros(1 << 16, device="cuda"), torch.zeros(1 << 16, device="cuda")
    spin_us500[(64,)](x, out, len(x), BLOCK=1024)
    torch.cuda.synchronize()
    print(f"triton_ms={timed(lambda: spin_us500[(64,)](x, out, len(x), BLOCK=1024), LAUNCHES)}")
    left, right = torch.zeros(256, 256, device="cuda"), torch.zeros(256, 256, device="cuda")
    print(f"shape={list(compiled(left, right).shape)}")
    print(f"compiled_ms={timed(lambda: compiled(left, right), LAUNCHES)}")
    print(f"kernels={metrics.generated_kernel_count}")


main()
