"""``make bench``: what cgpufs costs and how well shares hold, each figure against the bare device of the same run.

Writes a table to stdout and bench/results/latest.json: a list of records ``{"name", "params", "value", "unit",
"baseline", "runs", "min", "max", "device"}``. The exit status is 1 when a figure misses its bound. docs/benchmarks.md
says how each is measured. Everything runs on the simulated device.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "tests" / "support"))
from device import Device  # noqa: E402
from node import Node, build_c, running_node, wait_until  # noqa: E402

from cgpusched.driver.find import packaged  # noqa: E402

DEVICE = "simulated"


@dataclass
class Record:
    """One figure. ``value`` is the median of ``runs`` runs; ``baseline`` what the bare device gave in the same run."""

    name: str
    params: dict[str, object]
    value: float
    unit: str
    baseline: float | None
    runs: int
    min: float
    max: float
    device: str = DEVICE
    bound: float | None = field(default=None)
    at_least: bool = False

    @property
    def missed(self) -> bool:
        if self.bound is None:
            return False
        return self.value < self.bound if self.at_least else self.value > self.bound


def record(name: str, params: dict[str, object], values: list[float], unit: str, baseline: float | None = None,
           bound: float | None = None, at_least: bool = False) -> Record:
    one = Record(name, params, round(statistics.median(values), 4), unit,
                 None if baseline is None else round(baseline, 4), len(values), round(min(values), 4),
                 round(max(values), 4), DEVICE, bound, at_least)
    sign = ">=" if at_least else "<="
    must = f"{sign} {bound:g}" if bound is not None else ""
    shown = " ".join(f"{key}={value}" for key, value in params.items())
    base = f"{one.baseline:g}" if one.baseline is not None else "-"
    print(f"{name:<18} {shown:<44} {one.value:>10g} {unit:<6} {must:<10} {'MISSED' if one.missed else '':<7}"
          f" bare {base}, {one.min:g} to {one.max:g}", flush=True)
    return one


class Bench:
    """The programs, and a node to run them on, hooked or bare."""

    def __init__(self, node: Node, programs: Path, quick: bool) -> None:
        self.node = node
        self.quick = quick
        sim = packaged("sim/libcuda.so.1").parent
        link = [f"-L{sim}", "-l:libcuda.so.1"]
        self.launch = build_c(ROOT / "bench/launch_overhead.c", programs / "launch_overhead", *link)
        self.alloc = build_c(ROOT / "bench/alloc_overhead.c", programs / "alloc_overhead", *link)
        self.load = build_c(ROOT / "bench/load.c", programs / "load", *link)
        self.bare_env = {**os.environ, "LD_LIBRARY_PATH": str(sim), "CGPU_SIM_DIR": str(node.runtime / "sim")}

    def bare(self, *command: object) -> str:
        return subprocess.run([*map(str, command)], env=self.bare_env, capture_output=True, text=True, check=True,
                              timeout=300).stdout

    def hooked(self, *command: object) -> str:
        return self.node.ctl("run", "--mem", "8GiB", "--", *map(str, command)).stdout

    def interleaved(self, runs: int, read: Callable[[str], float], *command: object) -> tuple[list[float], float]:
        """What the hook adds, run by run, and the bare median: bare and hooked take turns."""
        added, bare = [], []
        for _ in range(runs):
            bare.append(read(self.bare(*command)))
            added.append(read(self.hooked(*command)) - bare[-1])
        return added, statistics.median(bare)

    # What each call costs

    def launches(self) -> list[Record]:
        def cpu(text: str) -> float:
            return statistics.median(float(line.split()[3]) for line in text.splitlines())

        made = []
        for threads in (1, 2):
            added, bare = self.interleaved(3 if self.quick else 7, cpu, self.launch, threads, 1_000_000, 9)
            made.append(record("launch_added_ns", {"threads": threads, "limit": True}, added, "ns", bare, bound=6))
        return made

    def allocations(self) -> list[Record]:
        made = []
        for live in (10, 4_000, 100_000):
            for name, column in (("alloc_added_ns", 1), ("free_added_ns", 3)):
                added, bare = self.interleaved(3 if self.quick else 5, lambda text, c=column: float(text.split()[c]),
                                               self.alloc, live, 21)
                made.append(record(name, {"live": live}, added, "ns", bare, bound=300))
        return made

    # How shares hold

    def device(self) -> Device:
        path = wait_until(lambda: next(iter((self.node.runtime / "sim").glob("gpu-*.state")), None), "the device")
        return Device(path)

    def _window(self, programs: list[subprocess.Popen[bytes]], seconds: float) -> tuple[list[float], float]:
        """Each program's and the whole device's busy fraction over a window of the device's own time."""
        device = self.device()
        pids = [program.pid for program in programs]
        wait_until(lambda: all(device.by_pid().get(pid, 0) > 0 for pid in pids), "all programs on the device")
        time.sleep(1.5)
        before, busy, start = device.by_pid(), device.busy_ns(), device.now_ns()
        time.sleep(seconds)
        after, busy_after, end = device.by_pid(), device.busy_ns(), device.now_ns()
        for program in programs:
            program.kill()
            program.wait()
        passed = end - start
        return [(after[pid] - before[pid]) / passed for pid in pids], (busy_after - busy) / passed

    def _bare_use(self, kernel_us: int, sync: bool, seconds: float) -> float:
        command = [str(self.load), str(kernel_us), str(int(sync)), str(seconds + 30)]
        programs = [subprocess.Popen(command, env=self.bare_env) for _ in range(2)]
        return self._window(programs, seconds)[1]

    def shares(self) -> list[Record]:
        made = []
        runs, seconds = (1, 4.0) if self.quick else (2, 8.0)
        cells = [(us, sync) for us in (100, 10_000) for sync in (True, False)]
        for us, sync in cells:
            errors, uses, bares = [], [], []
            for number in range(runs):
                bares.append(self._bare_use(us, sync, min(seconds, 4)))
                names = [f"a{us}{int(sync)}{number}", f"b{us}{int(sync)}{number}"]
                programs = [self.node.run(name, self.load, us, int(sync), seconds + 30, weight=weight)
                            for name, weight in zip(names, (1, 2), strict=True)]
                parts, use = self._window(programs, seconds)
                errors.append(100 * max(abs(part / sum(parts) / want - 1)
                                        for part, want in zip(parts, (1 / 3, 2 / 3), strict=True)))
                uses.append(100 * use / bares[-1])
                wait_until(lambda: "ephemeral" not in self.node.ctl("list", "--json").stdout, "the instances to go")
            params: dict[str, object] = {"weights": [1, 2], "kernel_us": us, "grid": "constant", "sync": sync}
            made.append(record("ratio_error", params, errors, "%", bound=5))
            made.append(record("device_use", params, uses, "%", 100 * statistics.median(bares), 97, at_least=True))
        return made

    # What the daemon costs

    def idle(self) -> list[Record]:
        assert self.node.daemon
        pid, tick = self.node.daemon.pid, os.sysconf("SC_CLK_TCK")

        def cpu() -> float:
            fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
            return (int(fields[11]) + int(fields[12])) / tick

        seconds = 10 if self.quick else 30
        start, begin = cpu(), time.monotonic()
        time.sleep(seconds)
        percent = 100 * (cpu() - start) / (time.monotonic() - begin)
        memory = int(next(line.split()[1] for line in Path(f"/proc/{pid}/status").read_text().splitlines()
                          if line.startswith("VmRSS:"))) / 1024
        return [record("idle_cpu", {"seconds": seconds}, [percent], "%", bound=0.5),
                record("idle_memory", {}, [memory], "MiB", bound=80)]


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--quick", action="store_true", help="fewer and shorter runs")
    parser.add_argument("--only", action="append", choices=("launches", "allocations", "shares", "idle"))
    parser.add_argument("--out", type=Path, default=ROOT / "bench/results/latest.json")
    arguments = parser.parse_args()
    if os.geteuid():
        sys.exit("bench: must run as root: it mounts a file system")
    records: list[Record] = []
    with tempfile.TemporaryDirectory(prefix="cgpu-bench-") as scratch, running_node(Path(scratch)) as node:
        bench = Bench(node, Path(scratch) / "bin", arguments.quick)
        for part in arguments.only or ("idle", "launches", "allocations", "shares"):
            records += getattr(bench, part)()
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    plain = [{key: value for key, value in asdict(one).items() if key not in ("bound", "at_least")} for one in records]
    arguments.out.write_text(json.dumps(plain, indent=1) + "\n")
    missed = [one for one in records if one.missed]
    print(f"{len(records)} figures on the {DEVICE} device, {len(missed)} missed; written to {arguments.out}")
    return 1 if missed else 0


if __name__ == "__main__":
    sys.exit(main())
