"""PyTorch's streams, events, graphs, autograd. On the simulated driver kernels take CGPU_SIM_KERNEL_NS and compute
nothing, copies copy: so device times show that kernels ran, and bytes that copies did, in order.

Prints key=value lines that test_torch.py reads.
"""

import torch

KERNELS = 50


def events() -> tuple[torch.cuda.Event, torch.cuda.Event]:
    return torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)


def streams() -> None:
    x = torch.zeros(1024, device="cuda")
    start, end = events()
    start.record()
    for _ in range(KERNELS):
        x.add_(1)
    end.record()
    end.synchronize()
    print(f"kernels_ms={start.elapsed_time(end)}")

    # a copy on another stream waits for what is still under way on the first
    source = torch.arange(1 << 20, dtype=torch.int64).pin_memory()
    first, second, done = torch.cuda.Stream(), torch.cuda.Stream(), torch.cuda.Event()
    with torch.cuda.stream(first):
        for _ in range(KERNELS):
            x.add_(1)
        there = source.to("cuda", non_blocking=True)
        done.record()
    second.wait_event(done)
    with torch.cuda.stream(second):
        back = there.to("cpu", non_blocking=True)
    second.synchronize()
    print(f"ordered={done.query() and bool((back == source).all())}")


def graph() -> None:
    left, right = torch.zeros(4096, device="cuda"), torch.zeros(4096, device="cuda")
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        for _ in range(KERNELS):
            kept = left + 1
        right.copy_(left)
    for value in (3.0, 4.0):
        left.copy_(torch.full((4096,), value))
        start, end = events()
        start.record()
        captured.replay()
        end.record()
        end.synchronize()
        print(f"replay_{value:.0f}_ms={start.elapsed_time(end)}")
        print(f"replay_{value:.0f}={right.cpu().unique().tolist()}")
    assert kept.shape == left.shape


def training() -> None:
    """Autograd without a matrix product: cuBLAS brings NVIDIA's cudart, which does not start here."""
    weight = torch.nn.Parameter(torch.randn(4096, device="cuda"))
    optimizer = torch.optim.AdamW([weight])
    before, after = events()
    before.record()
    for _ in range(3):
        loss = (weight * torch.randn(4096, device="cuda")).relu().sum()
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    after.record()
    after.synchronize()
    print(f"training_ms={before.elapsed_time(after)}", f"gradient={list(weight.grad.shape)}", sep="\n")


streams()
graph()
training()
