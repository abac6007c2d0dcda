"""``make bench``: what cgpufs costs and how well shares hold, each figure against the bare device of the same run.

Writes a table to stdout and, after a whole run, bench/results/latest.json: a list of records ``{"name", "params",
"value", "unit", "baseline", "runs", "min", "max", "device"}``. The exit status is 1 when a figure misses its must.
docs/benchmarks.md says how each is measured. Everything runs on the simulated device.
"""

import argparse
import os
import signal
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT / "bench"), str(ROOT / "tests" / "support")]
import containers  # noqa: E402
import costs  # noqa: E402
import faults  # noqa: E402
import plots  # noqa: E402
import priority  # noqa: E402
import reads  # noqa: E402
import records  # noqa: E402
import shares  # noqa: E402
from node import running_node  # noqa: E402
from programs import Bench  # noqa: E402

PARTS: dict[str, Callable[[Bench], None]] = {
    "idle": costs.idle,
    "launches": costs.launches,
    "allocations": costs.allocations,
    "many_processes": costs.many_processes,
    "handover": faults.hand_over,
    "grid": shares.grid,
    "mixed": shares.mixed,
    "many": shares.many,
    "fixed": shares.fixed,
    "bursty": shares.bursty,
    "loaded": shares.loaded,
    "gaps": shares.gaps,
    "latency": priority.latency,
    "cap": priority.cap,
    "kills": faults.kills,
    "stops": faults.stops,
    "scheduler": costs.scheduler,
    "reads": reads.reads,
    "docker": containers.docker,
    "shares_plot": plots.live_change,
}
QUICK = ("launches", "allocations", "handover", "grid", "fixed", "latency", "cap", "kills", "stops")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="a part of the figures, from fewer and shorter runs")
    parser.add_argument("--only", action="append", choices=PARTS, metavar="PART",
                        help=f"only this part (again for more): {', '.join(PARTS)}")
    parser.add_argument("--out", type=Path,
                        help="the JSON (default: bench/results/latest.json; partial.json there with --quick or --only)")
    parser.add_argument("--plots", type=Path, help="folder of the plots (default: beside the JSON)")
    arguments = parser.parse_args()
    if os.geteuid():
        sys.exit("bench: must run as root: it mounts a file system")
    whole = not arguments.quick and not arguments.only
    out = arguments.out or ROOT / "bench/results" / ("latest.json" if whole else "partial.json")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that the node is ended, too
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cgpu-bench-") as scratch, running_node(Path(scratch)) as node:
        bench = Bench(node, Path(scratch) / "bin", arguments.quick)
        bench.plots = arguments.plots or out.parent
        print(records.heading(), flush=True)
        try:
            for part in arguments.only or (QUICK if arguments.quick else PARTS):
                PARTS[part](bench)
        except BaseException:
            records.write(bench.records, out.with_name("partial.json"))  # not where a whole run is looked for
            raise
    records.write(bench.records, out)
    if any(one.name == "ratio_error" for one in bench.records) and whole:
        plots.ratio_errors(bench.records, bench.plots / "ratio_error.svg")
    print(f"{records.summary(bench.records)}; {time.monotonic() - begin:.0f} s; written to {out}")
    return 1 if any(one.missed for one in bench.records) else 0


if __name__ == "__main__":
    sys.exit(main())
