"""What cgpufs costs: launches, allocations, the idle daemon, the scheduler."""

import os
import statistics
import time
from functools import partial
from pathlib import Path

from device import Device
from node import running_node, wait_until
from programs import FOREVER_S, Bench

CLOCK_TICKS = os.sysconf("SC_CLK_TCK")
SCHEDULER_RUNS, SCHEDULER_RUNS_WHOLE = 5, 3
"""With one GPU, and with eight."""


def launches(bench: Bench) -> None:
    """ns of thread CPU time that cuLaunchKernel costs more; the driver's launch is one that returns at once."""
    def cpu(text: str) -> float:
        return statistics.median(float(line.split()[3]) for line in text.splitlines())

    for threads in (1,) if bench.quick else (1, 2, 4):
        for limit in (True,) if bench.quick else (True, False):
            with bench.cell():
                id_ = bench.create()
                start = partial(bench.run_in, id_) if limit else bench.unlimited
                command = (bench.launch, threads, 1_000_000, 9)
                added, bare = bench.interleaved(3 if bench.quick else 7, cpu, command, start)
                bench.record("launch_added_ns", {"threads": threads, "limit": limit}, added, "ns", bare)


def allocations(bench: Bench) -> None:
    """ns of thread CPU time that an allocation and a free cost more, by how many blocks live.

    The program measures both itself, in turns on the same blocks: between processes the driver's own differs more."""
    for live in (10, 4_000) if bench.quick else (10, 4_000, 100_000):
        with bench.cell():
            id_ = bench.create(memory="8GiB")
            runs = [bench.output(bench.run_in(id_, bench.alloc, live, 61)).split()
                    for _ in range(3 if bench.quick else 9)]
        for name, bare, added in (("alloc_added_ns", 1, 3), ("free_added_ns", 5, 7)):
            bench.record(name, {"live": live}, [float(run[added]) for run in runs], "ns",
                         statistics.median(float(run[bare]) for run in runs))


def many_processes(bench: Bench) -> None:
    """How much longer than bare it takes until 300 processes, started at once, all have their first allocation."""
    processes = 300

    def seconds(text: str) -> float:
        granted, ns = map(int, text.split())
        if granted != processes:
            raise RuntimeError(f"{granted} of {processes} processes were granted their first allocation")
        return ns / 1e9

    with bench.cell():
        id_ = bench.create(memory="1GiB")
        command = (bench.many, processes, 1 << 20)
        ratios, bare = [], []
        for _ in range(3 if bench.quick else 5):
            bare.append(seconds(bench.output(bench.bare(*command))))
            ratios.append(seconds(bench.output(bench.run_in(id_, *command))) / bare[-1])
        bench.record("start_300_ratio", {"processes": processes}, ratios, "x", statistics.median(bare))


def idle(bench: Bench) -> None:
    """What the daemon costs with nothing to do."""
    assert bench.node.daemon
    process = Path(f"/proc/{bench.node.daemon.pid}")

    def cpu() -> float:
        fields = (process / "stat").read_text().rsplit(")", 1)[1].split()
        return (int(fields[11]) + int(fields[12])) / CLOCK_TICKS

    seconds = 10 if bench.quick else 30
    with bench.cell():
        start, begin = cpu(), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (cpu() - start) / (time.monotonic() - begin)
        memory = int(next(line.split()[1] for line in (process / "status").read_text().splitlines()
                          if line.startswith("VmRSS:"))) / 1024
    bench.record("idle_cpu", {"seconds": seconds}, [percent], "%")
    bench.record("idle_memory", {}, [memory], "MiB")


def scheduler(bench: Bench) -> None:
    """The scheduling thread's CPU time with ever more busy containers, in turn, each time on a node of its own."""
    figures: dict[tuple[int, int], list[tuple[float, float]]] = {}
    for turn in range(1 if bench.quick else SCHEDULER_RUNS):
        cases = [(1, 2), (1, 25)]
        if turn < SCHEDULER_RUNS_WHOLE and not bench.quick:
            cases.append((8, 25))
        for gpus, containers in cases:
            base = bench.scratch / f"node{gpus}x{containers}-{turn}"
            base.mkdir()
            with running_node(base, f"{gpus}x24GiB") as node:
                other = Bench(node, base, bench.quick)
                with other.cell():
                    figures.setdefault((gpus, containers), []).append(scheduler_cost(other, gpus, containers))
    for (gpus, containers), runs in figures.items():
        params: dict[str, object] = {"gpus": gpus, "containers": containers, "kernel_us": 1000}
        bench.record("scheduler_core", params, [core for core, _ in runs], "%")
        bench.record("scheduler_turn_us", params, [each for _, each in runs], "us")
    growth = [many / few for (_, few), (_, many) in zip(figures[1, 2], figures[1, 25], strict=True)]
    bench.record("scheduler_growth", {"from": [1, 2], "to": [1, 25]}, growth, "x")


def scheduler_cost(bench: Bench, gpus: int, containers: int) -> tuple[float, float]:
    """(percent of a core, us a turn) of the thread cgpu-gate over five seconds."""
    assert bench.node.daemon
    for gpu in range(gpus):
        bench.node.write(25, gpu, "max_inst")
        bench.node.write(1, gpu, "policy")
        for _ in range(containers):
            bench.run_in(bench.create(str(gpu), memory="64MiB"), bench.load, "-k", 1000, "-t", FOREVER_S)
    for gpu in range(gpus):
        wait_until(partial(all_busy, bench.device(gpu), containers), "all on the device", 90)
    time.sleep(2)
    tasks = Path(f"/proc/{bench.node.daemon.pid}/task")
    thread = next(task for task in tasks.iterdir() if (task / "comm").read_text().strip() == "cgpu-gate")

    def read() -> tuple[int, int, int]:
        ran = int((thread / "schedstat").read_text().split()[0])
        return ran, turns_of(bench), time.monotonic_ns()

    before = read()
    time.sleep(5)
    after = read()
    ran, turns, passed = (b - a for a, b in zip(before, after, strict=True))
    return 100 * ran / passed, ran / turns / 1000


def all_busy(device: Device, containers: int) -> bool:
    return sum(ns > 0 for ns in device.by_pid().values()) >= containers


def turns_of(bench: Bench) -> int:
    """Grants on all GPUs so far."""
    return sum(one["turns"] for gpu in bench.node.status()["gpus"] for one in gpu["instances"])
