"""Time: what calls and training steps cost, shares of real work, hand-overs, and a kernel that does not end."""

from __future__ import annotations

import statistics
import struct
import time
from collections.abc import Sequence
from pathlib import Path

from check_memory import demand, quota_of
from daemon import Failed, Site, last_line
from machine import HERE, Skip
from results import Recorder

SIZES = {"gemm": (512, 1024, 4096, 8192), "fma": (50, 500, 5_000, 20_000)}
"""N of N x N, and us."""


def launches(site: Site, record: Recorder) -> None:
    """ns that a launch, an allocation and a free cost more; bare and gated take turns."""
    rounds, repeats = (2, 21) if site.machine.simulated else (7, 301)
    ident = site.create(quota_of(site))
    bare: dict[str, list[float]] = {}
    added: dict[str, list[float]] = {}
    for _ in range(rounds):
        first, then = (costs(site, one, repeats) for one in (None, ident))
        for name, value in first.items():
            bare.setdefault(name, []).append(value)
            added.setdefault(name, []).append(then[name] - value)
    for name, values in added.items():
        call, _, clock = name.rpartition(" ")
        record.figure(f"{call}_added", values, "ns", {"clock": clock}, statistics.median(bare[name]))


def costs(site: Site, ident: str | None, repeats: int) -> dict[str, float]:
    """ns by "CALL wall" and "CALL cpu"."""
    found = {}
    for line in site.run(ident, site.machine.programs["costs"], repeats).splitlines():
        name, wall, cpu = line.split()
        found |= {f"{name} wall": float(wall), f"{name} cpu": float(cpu)}
    return found


def window(site: Site, start_s: float, length_s: float) -> tuple[int, int]:
    """Moments between which work counts: long enough from now on for every program to have started."""
    begin = time.monotonic_ns() + int((0.4 if site.machine.simulated else start_s) * 1e9)
    return begin, begin + int((0.8 if site.machine.simulated else length_s) * 1e9)


def startup(site: Site, *command: object) -> float:
    """Seconds that a program takes to be ready: the second time, when its libraries are in memory."""
    site.run(None, *command, 0, 0, seconds=90, libraries=True)
    begin = time.monotonic()
    site.run(None, *command, 0, 0, libraries=True)
    return time.monotonic() - begin


def ratio(site: Site, record: Recorder) -> None:
    """Two processes of weights 1 and 2 that never rest: who gets how much, and what both get of a bare one's work."""
    kind, load = "gemm", site.machine.programs["load"]
    try:
        if "cublas" not in site.machine.libraries:
            raise Failed("there is no cuBLAS")
        start_s = startup(site, load, kind, SIZES[kind][0])
    except Failed as error:
        record.note(f"{error}: multiply-adds of several lengths instead of matrix products")
        kind = "fma"
        start_s = startup(site, load, kind, SIZES[kind][0])
    for size in SIZES[kind][:2] if site.machine.simulated else SIZES[kind]:
        command = [load, kind, size]
        begin, end = window(site, 1 + start_s, 2)
        units, _, count = site.run(None, *command, begin, end, libraries=True).split()
        alone = float(units) / (end - begin)
        begin, end = window(site, 2 + 2 * start_s, 5)
        pair = [site.start(site.create(quota_of(site), weight), *command, begin, end, libraries=True,
                           CGPU_CHECK_COUNT=count) for weight in (1, 2)]
        parts = [float(site.output(one).split()[0]) / (end - begin) for one in pair]
        compare(record, {"kind": kind, "size": size}, parts, alone)
        site.close()


def compare(record: Recorder, params: dict[str, object], parts: Sequence[float], alone: float) -> None:
    light, heavy = parts
    demand(light > 0, "the one of weight 1 got nothing")
    record.figure("ratio", heavy / light, "x", params, least=1.9, most=2.1)
    record.figure("combined", 100 * (light + heavy) / alone, "%", params, 100, least=95)


def ratio_torch(site: Site, record: Recorder) -> None:
    """The same with PyTorch's own products."""
    python = framework(site, "torch")
    start_s = startup(site, python, HERE / "programs/torch_program.py", "matmul", 1024)
    for size in (1024, 8192):
        command = [python, HERE / "programs/torch_program.py", "matmul", size]
        begin, end = window(site, 2 + start_s, 2)
        alone = float(site.json(None, *command, begin, end)["units"]) / (end - begin)
        begin, end = window(site, 3 + 2 * start_s, 4)
        pair = [site.start(site.create(quota_of(site), weight), *command, begin, end) for weight in (1, 2)]
        parts = [float(last_line(site.output(one))["units"]) / (end - begin) for one in pair]
        compare(record, {"kind": "torch", "size": size}, parts, alone)
        site.close()


def framework(site: Site, name: str) -> str:
    """The Python that has it, or Skip."""
    if site.machine.simulated:
        raise Skip("simulated: kernels of real libraries do not run there")
    if name not in site.machine.pythons:
        raise Skip(f"no Python here has {name}")
    return site.machine.pythons[name]


def training(site: Site, record: Recorder) -> None:
    """ms of a PyTorch training step, alone in an instance against bare, in turn."""
    command = [framework(site, "torch"), HERE / "programs/torch_program.py", "step", 3]
    ident = site.create(quota_of(site))
    bare, gated = [], []
    for _ in range(3):
        bare.append(float(site.json(None, *command)["ms"]))
        gated.append(float(site.json(ident, *command)["ms"]))
    base = statistics.median(bare)
    record.figure("step", gated, "ms", {"model": "transformer 4x512, batch 32x128, bf16"}, base)
    record.figure("step_added", [100 * (b / a - 1) for a, b in zip(bare, gated, strict=True)], "%", {}, 0.0, most=3)


def hand_over(site: Site, record: Recorder) -> None:
    """How long the card is idle each time it goes from one program to the other, by the kernels' own clock."""
    if site.machine.simulated:
        raise Skip("simulated: kernels compute nothing, so they leave no stamps")
    scratch = Path(site.machine.runtime).parent
    files = [scratch / f"stamps{n}" for n in (0, 1)]
    begin, end = window(site, 4, 3)
    command = [site.machine.programs["load"], "spin", 200, begin, end]
    for program in [site.start(site.create(quota_of(site)), *command, file) for file in files]:
        site.output(program)
    kernels = [stamps(file) for file in files]
    demand(all(kernels), "a program left no stamps")
    gaps = gaps_between(kernels)
    demand(len(gaps) > 20, f"only {len(gaps)} hand-overs in 3 s")
    for percent in (50, 95):
        gap = sorted(gaps)[percent * (len(gaps) - 1) // 100]
        record.figure("handover", gap / 1000, "us", {"percentile": percent, "kernel_us": 200})
    record.figure("overlapping", 100 * sum(gap < 0 for gap in gaps) / len(gaps), "%", {"of": "hand-overs"})


def stamps(file: Path) -> list[tuple[int, int]]:
    """(start, end) of each kernel, GPU ns; those that never ran are zeros."""
    return [pair for pair in struct.iter_unpack("<QQ", file.read_bytes()) if pair[1]]


def gaps_between(programs: Sequence[Sequence[tuple[int, int]]]) -> list[int]:
    """ns from the last kernel of one program to the first of the next; negative where they overlapped."""
    runs = sorted((start, end, number) for number, kernels in enumerate(programs) for start, end in kernels)
    # what runs before the other's first kernel or after its last has no neighbour
    both = [(max(min(kernels)[0] for kernels in programs)), (min(max(kernels)[1] for kernels in programs))]
    inside = [one for one in runs if both[0] <= one[0] and one[1] <= both[1]]
    return [b[0] - a[1] for a, b in zip(inside, inside[1:], strict=False) if a[2] != b[2]]


def drain(site: Site, record: Recorder) -> None:
    """How long a program waits whose neighbour is killed with work in flight, or has a kernel that does not end."""
    load = site.machine.programs["load"]
    ids = [site.create(quota_of(site)) for _ in range(2)]
    begin, end = window(site, 3, 2)
    alone = float(site.run(None, load, "spin", 500, begin, end).split()[1])
    begin, end = window(site, 4, 4)
    other = site.start(ids[0], load, "spin", 500, begin, end)
    with site.neighbour(ids[1], load, "spin", 500, begin, end + 10**10) as doomed:
        time.sleep(max(0.0, ((begin + end) // 2 - time.monotonic_ns()) / 1e9))
        doomed.kill()
        longest = float(site.output(other).split()[1])
    record.figure("kill_longest_wait", longest / 1e6, "ms", {"kernel_us": 500}, alone / 1e6, most=200)
    begin, end = window(site, 4, 4)
    stuck = begin + (end - begin) // 4
    other = site.start(ids[0], load, "spin", 500, begin, end)
    endless = site.start(ids[1], load, "flag", 200, stuck, stuck + (end - begin) // 2)
    units, longest, _ = map(float, site.output(other).split())
    site.output(endless)
    params: dict[str, object] = {"kernel_us": 500, "endless_s": (end - begin) / 2e9}
    record.figure("endless_longest_wait", longest / 1e6, "ms", params, alone / 1e6, most=2500)
    demand(units > 0, "nobody ran beside a kernel that did not end")
