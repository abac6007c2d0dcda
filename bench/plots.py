"""The plots of docs/benchmarks.md: shares over time across live changes, and the ratio's error by kernel length."""

import math
import time
from collections.abc import Iterable
from pathlib import Path

from musts import PAIR
from programs import FOREVER_S, SYNC_US, Bench
from records import Record
from svg import Chart, Series

EACH_S = 0.1
SMOOTH = 5
"""Points are means over so many samples."""
CHANGES: tuple[tuple[float, str, tuple[tuple[int | str, ...], ...]], ...] = (
    (4, "policy 2", ((2, 0, "policy"),)),
    (8, "weight of c: 3 to 5", ((5, 0, "c", "weight"),)),
    (12, "policy 3", ((3, 0, "policy"),)),
    (16, "policy 1", ((1, 0, "policy"),)),
)
END_S = 20.0
WEIGHTS = {"a": 1, "b": 2, "c": 3}
MAX_INST = 10


def live_change(bench: Bench) -> None:
    """Three busy containers while policies and a weight are written; draws it, and records nothing."""
    samples = []
    with bench.cell():
        bench.node.write(MAX_INST, 0, "max_inst")
        ids = {name: bench.create(weight=weight) for name, weight in WEIGHTS.items()}
        bench.policy(1)
        programs = {name: bench.run_in(id_, bench.load, "-k", 1_000, *(["-s", SYNC_US] if name == "b" else []),
                                       "-t", FOREVER_S) for name, id_ in ids.items()}
        device = bench.settle(list(programs.values()))
        begin, pending = time.monotonic(), list(CHANGES)
        while (now := time.monotonic() - begin) < END_S:
            if pending and now >= pending[0][0]:
                for value, *path in pending.pop(0)[2]:
                    bench.node.write(value, *(ids.get(str(part), part) for part in path))
            samples.append(device.snapshot())
            time.sleep(max(0.0, begin + len(samples) * EACH_S - time.monotonic()))
        bench.clear()
        bench.node.write(25, 0, "max_inst")
    zero = samples[0].now
    series = []
    for name, program in programs.items():
        points = [((b.now - zero) * 1e-9 - SMOOTH * EACH_S / 2,
                   100 * (b.by_pid[program.pid] - a.by_pid[program.pid]) / (b.now - a.now))
                  for a, b in zip(samples, samples[SMOOTH:], strict=False)]
        habit = ", synchronises" if name == "b" else ""
        series.append(Series(f"{name}: weight {WEIGHTS[name]}{habit}", points))
    chart = Chart("Shares of the device across live writes (1 ms kernels, simulated device)",
                  "seconds", "% of the device", series, (0, END_S), (0, 80),
                  [(x, f"{x}") for x in range(0, int(END_S) + 1, 2)], range(0, 81, 10),
                  [(0, "policy 1"), *((at, name) for at, name, _ in CHANGES)])
    save(chart, bench.plots / "shares.svg")


def ratio_errors(records: Iterable[Record], path: Path) -> None:
    """1:2, by kernel length, from the records of a run."""
    cells: dict[tuple[object, object], list[tuple[float, float]]] = {}
    for one in records:
        kernel = one.params.get("kernel_us")
        if one.name == "ratio_error" and one.params["weights"] == PAIR and isinstance(kernel, int):
            cells.setdefault((one.params["grid"], one.params["sync"]), []).append((math.log10(kernel), one.value))
    series = [Series(f"{grid}, {'sync each 10 ms' if sync else 'never syncs'}", sorted(points), dots=True)
              for (grid, sync), points in sorted(cells.items(), key=str)]
    top = max([1.2, *(error for points in cells.values() for _, error in points)])
    ticks = [(math.log10(us), name) for us, name in ((10, "10 us"), (100, "100 us"), (1_000, "1 ms"), (10_000, "10 ms"),
                                                     (50_000, "50 ms"))]
    must = Series("must", [(ticks[0][0], 1.0), (ticks[-1][0], 1.0)], dashed=True)
    step = 0.2 if top < 2 else 1.0
    chart = Chart("Error of the ratio 1:2 by kernel length (simulated device)", "kernel length", "% of the share",
                  [*series, must], (ticks[0][0] - 0.1, ticks[-1][0] + 0.1), (0, top), ticks,
                  [round(step * k, 1) for k in range(int(top / step) + 1)])
    save(chart, path)


def save(chart: Chart, path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(chart.svg())
    print(f"plot: {path.name}", flush=True)
