"""PyTorch as it is, under the hook or bare; prints one JSON object.

``basic``: a matrix product that is right, mem_get_info, streams and events. ``oom``: asks for more than the quota.
``graph``: capture and replay. ``step SECONDS``: ms of a training step. ``matmul N BEGIN END``: products of N x N in
bfloat16 between two moments of CLOCK_MONOTONIC, ns.
"""

import json
import os
import sys
import time


def basic(torch):
    a = torch.arange(4096, device="cuda", dtype=torch.float32).reshape(64, 64)
    right = torch.allclose((a @ a.T).cpu(), a.cpu() @ a.cpu().T, rtol=1e-4)
    side = torch.cuda.Stream()
    begin, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    with torch.cuda.stream(side):
        begin.record()
        b = a * 2
        end.record()
    side.synchronize()
    free, total = torch.cuda.mem_get_info()
    return {"right": bool(right) and bool((b == a * 2).all()), "elapsed_ms": begin.elapsed_time(end), "free": free,
            "total": total, "properties_total": torch.cuda.get_device_properties(0).total_memory,
            "device": torch.cuda.get_device_name(0), "torch": torch.__version__}


def oom(torch):
    _, total = torch.cuda.mem_get_info()
    held = []
    try:
        while True:
            held.append(torch.empty(max(total // 8, 1), dtype=torch.uint8, device="cuda"))
    except torch.cuda.OutOfMemoryError as error:
        message = str(error)
    got = sum(one.numel() for one in held)
    held.clear()
    torch.cuda.empty_cache()
    after = torch.ones(1 << 20, device="cuda").sum().item()
    return {"message": message, "granted": got, "total": total, "works_after": after == 1 << 20,
            "backend": torch.cuda.get_allocator_backend()}


def graph(torch):
    x = torch.ones(1 << 16, device="cuda")
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            y = x * 2 + 1
    torch.cuda.current_stream().wait_stream(side)
    captured = torch.cuda.CUDAGraph()
    with torch.cuda.graph(captured):
        y = x * 2 + 1
        time.sleep(0.05)  # longer than a turn
        z = y.sum()
    x.fill_(3)
    for _ in range(20):
        captured.replay()
    torch.cuda.synchronize()
    return {"right": z.item() == 7 * (1 << 16)}


def step(torch, seconds):
    torch.manual_seed(1)
    layer = torch.nn.TransformerEncoderLayer(512, 8, 2048, batch_first=True)
    model = torch.nn.TransformerEncoder(layer, 4, enable_nested_tensor=False).cuda()
    optimizer = torch.optim.AdamW(model.parameters())
    data = torch.randn(32, 128, 512, device="cuda")

    def one():
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast("cuda", dtype=torch.bfloat16):
            loss = model(data).square().mean()
        loss.backward()
        optimizer.step()

    for _ in range(10):
        one()
    torch.cuda.synchronize()
    times, stop = [], time.perf_counter() + float(seconds)
    while time.perf_counter() < stop:
        begin = time.perf_counter()
        for _ in range(5):
            one()
        torch.cuda.synchronize()
        times.append((time.perf_counter() - begin) / 5)
    times.sort()
    return {"ms": 1000 * times[len(times) // 2], "steps": 5 * len(times)}


def matmul(torch, size, begin, end):
    n, begin, end = int(size), int(begin), int(end)
    a = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    b = torch.randn(n, n, device="cuda", dtype=torch.bfloat16)
    for _ in range(5):
        a @ b
    torch.cuda.synchronize()
    if end and time.monotonic_ns() > begin:
        raise SystemExit("not ready in time")
    units, each = 0.0, 1e-3
    while time.monotonic_ns() < end:
        batch = max(1, min(1000, int(0.01 / each)))
        start = time.monotonic_ns()
        for _ in range(batch):
            a @ b
        torch.cuda.synchronize()
        stop = time.monotonic_ns()
        each = min(each, (stop - start) / 1e9 / batch) if each != 1e-3 else (stop - start) / 1e9 / batch
        inside = min(stop, end) - max(start, begin)
        if inside > 0:
            units += batch * inside / (stop - start)
    return {"units": units}


if __name__ == "__main__":
    import torch as loaded

    words = {"basic": basic, "oom": oom, "graph": graph, "step": step, "matmul": matmul}
    result = words[sys.argv[1]](loaded, *sys.argv[2:])
    print(json.dumps(result), flush=True)
    os._exit(0)  # at once: what torch does at its end is not what is looked at
