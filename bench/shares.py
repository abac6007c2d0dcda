"""How shares hold: the achieved ratio and the device's use, from the device's own timeline."""

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from device import longest_gap
from musts import FIVE, PAIR
from programs import FOREVER_S, SYNC_US, Bench

from cgpusched.plan import UNIT_SLICE_NS

WEIGHTED, PREEMPTIVE, FIXED = 2, 1, 3
LENGTHS = (10, 100, 1_000, 10_000, 50_000)
MIXED = ([10, 10_000], [10_000, 10], [100, 1_000], [1_000, 50_000])


@dataclass(frozen=True)
class Cell:
    """Busy containers side by side. ``kernels``: one length for all, or one each, in us."""

    weights: list[int]
    kernels: list[int]
    grid: str = "constant"
    sync: bool = False
    policy: int = WEIGHTED

    def params(self) -> dict[str, object]:
        same = len(set(self.kernels)) == 1
        return {"weights": self.weights, "kernel_us": self.kernels[0] if same else self.kernels, "grid": self.grid,
                "sync": self.sync}

    def commands(self, load: Path) -> list[list[object]]:
        return [[load, "-k", kernel, *(["-s", SYNC_US] if self.sync else []),
                 *(["-g"] if self.grid == "proportional" else []), "-t", FOREVER_S] for kernel in self.kernels]

    def seconds(self) -> float:
        """At least 8 s, and 300 kernels of each container: of the lightest, where all have the same."""
        return max(8.0, *(300 * kernel * 1e-6 * sum(self.weights) / weight
                          for kernel, weight in zip(self.kernels, self.weights, strict=True)))


def pair(kernel: int | list[int], grid: str = "constant", sync: bool = False) -> Cell:
    return Cell(PAIR, kernel if isinstance(kernel, list) else [kernel, kernel], grid, sync)


def error(parts: Sequence[float], weights: Sequence[int]) -> float:
    """The largest relative error of a container's share of the device time used, percent."""
    return 100 * max(abs(part / sum(parts) / (weight / sum(weights)) - 1)
                     for part, weight in zip(parts, weights, strict=True))


def start(bench: Bench, cell: Cell) -> list[subprocess.Popen[str]]:
    """Its programs, each in an instance of its own."""
    bench.node.write(25, 0, "max_inst")
    ids = [bench.create(weight=weight) for weight in cell.weights]
    bench.policy(cell.policy)
    return [bench.run_in(id_, *command) for id_, command in zip(ids, cell.commands(bench.load), strict=True)]


def measure(bench: Bench, cell: Cell, suffix: str = "", params: dict[str, object] | None = None,
            seconds: float | None = None) -> None:
    """Records the ratio's error and the device's use of one cell."""
    with bench.cell():
        bare = bench.bare_use(cell.commands(bench.load))
        parts, use = bench.window(start(bench, cell), seconds or cell.seconds())
    params = cell.params() if params is None else params
    bench.record(f"ratio_error{suffix}", params, [error(parts, cell.weights)], "%")
    bench.record(f"device_use{suffix}", params, [100 * use / bare], "%", 100 * bare)


def grid(bench: Bench) -> None:
    """1:2 under policy 2, every kernel length, grid and habit."""
    if bench.quick:
        for sync in (True, False):
            measure(bench, pair(100, sync=sync), seconds=4)
        return
    for kernel in LENGTHS:
        for shape in ("constant", "proportional"):
            for sync in (True, False):
                measure(bench, pair(kernel, shape, sync))


def mixed(bench: Bench) -> None:
    """1:2, each with kernels of a length of its own."""
    for kernels in MIXED[:1] if bench.quick else MIXED:
        for sync in (False,) if bench.quick else (True, False):
            measure(bench, pair(kernels, sync=sync), seconds=4 if bench.quick else None)


def many(bench: Bench) -> None:
    """Five containers 1:2:3:4:5, and 25 equal ones."""
    for kernel in LENGTHS[1:2] if bench.quick else LENGTHS[:4]:
        for sync in (False,) if bench.quick else (True, False):
            measure(bench, Cell(FIVE, [kernel] * 5, sync=sync), seconds=5 if bench.quick else None)
    if not bench.quick:
        for policy in (PREEMPTIVE, WEIGHTED):
            cell = Cell([1] * 25, [1_000] * 25, policy=policy)
            measure(bench, cell, "_25", {"containers": 25, "policy": policy, "kernel_us": 1_000, "sync": False})


def fixed(bench: Bench) -> None:
    """Policy 3 with weights 5 and 10 of 20: 25 % and 50 % of the device, the rest idle."""
    cell = Cell([5, 10], [1_000, 1_000], policy=FIXED)
    with bench.cell():
        programs = start(bench, cell)
        bench.node.write(20, 0, "max_inst")
        parts, use = bench.window(programs, 4 if bench.quick else 8)
    off = max(abs(100 * part - want) for part, want in zip(parts, (25, 50), strict=True))
    params: dict[str, object] = {"weights": [5, 10], "max_inst": 20, "kernel_us": 1_000}
    bench.record("share_error_fixed", params, [off], "points")
    bench.record("device_use_fixed", params, [100 * use], "%")


def bursty(bench: Bench) -> None:
    """Policy 1: one wants 3 ms in every 10, the other all it can get."""
    commands = [[bench.load, "-k", 100, "-b", "3000:10000", "-t", FOREVER_S], [bench.load, "-k", 100, "-t", FOREVER_S]]
    with bench.cell():
        bare = bench.bare_use(commands)
        ids = [bench.create() for _ in commands]
        bench.policy(PREEMPTIVE)
        programs = [bench.run_in(id_, *command) for id_, command in zip(ids, commands, strict=True)]
        parts, use = bench.window(programs, 4 if bench.quick else 8)
    params: dict[str, object] = {"work_us": 3_000, "period_us": 10_000, "kernel_us": 100}
    bench.record("asked_got_bursty", params, [100 * parts[0] / 0.3], "%")
    bench.record("device_use_bursty", params, [100 * use / bare], "%", 100 * bare)


def loaded(bench: Bench) -> None:
    """1:2 while every core of the machine is busy with other work."""
    cell = pair(100)
    with bench.cell():
        spinners = [bench.bare("sh", "-c", "while :; do :; done") for _ in range(2)]
        bare = bench.window([bench.bare(*command) for command in cell.commands(bench.load)], 3)[1]
        for program in [one for one in bench.running if one not in spinners]:
            program.kill()
            program.wait()
            bench.running.remove(program)
        parts, use = bench.window(start(bench, cell), 5 if bench.quick else 10)
    params = {**cell.params(), "spinners": 2}
    bench.record("ratio_error_loaded", params, [error(parts, cell.weights)], "%")
    bench.record("device_use_loaded", params, [100 * use / bare], "%", 100 * bare)


def gaps(bench: Bench) -> None:
    """The longest time that a busy container was without the device, in rounds of its rotation."""
    cases = [(PAIR, 1_000)] if bench.quick else [(PAIR, 100), (PAIR, 1_000), (PAIR, 5_000), (FIVE, 100), (FIVE, 1_000)]
    for weights, kernel in cases:
        cell = Cell(weights, [kernel] * len(weights))
        with bench.cell():
            programs = start(bench, cell)
            timeline = bench.timeline(programs, 4 if bench.quick else 8)
        longest = max(longest_gap(timeline.runs.get(one.pid, []), timeline.start, timeline.end) for one in programs)
        bench.record("longest_gap_cycles", {"weights": weights, "kernel_us": kernel},
                     [longest / (sum(weights) * UNIT_SLICE_NS)], "cycles")
