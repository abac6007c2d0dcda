"""The programs of the benchmark, and the node they run on: in instances, or bare beside it on the same device."""

import contextlib
import fcntl
import functools
import itertools
import os
import statistics
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from device import Device, Timeline
from node import Node, build_c, wait_until
from records import Record, make_record, row

from cgpusched.driver.find import packaged

ROOT = Path(__file__).resolve().parent.parent
SETTLE_S = 1.5
"""Programs run so long before a window begins: kernel lengths are learnt, the rotation is regular."""
SYNC_US = 10_000
FOREVER_S = 3600
STALL_US = 500
"""A CPU that stands still for less is not noted."""


class Turn:
    """Where CGPU_BENCH_LOCK names a file that others on this machine lock too, measurements are made under that lock.

    It is given up between two of them once it was held for half a minute."""

    HOLD_S = 30.0

    def __init__(self) -> None:
        path = os.environ.get("CGPU_BENCH_LOCK")
        self._file = open(path, "w") if path else None
        self._since = 0.0

    def __enter__(self) -> None:
        if self._file and not self._since:
            fcntl.flock(self._file, fcntl.LOCK_EX)
            self._since = time.monotonic()

    def __exit__(self, *_: object) -> None:
        if self._file and time.monotonic() - self._since > self.HOLD_S:
            fcntl.flock(self._file, fcntl.LOCK_UN)
            self._since = 0.0


TURN = Turn()


class Bench:
    """Starts and ends programs, and collects the records."""

    def __init__(self, node: Node, scratch: Path, quick: bool) -> None:
        self.node = node
        self.quick = quick
        self.scratch = scratch
        self.plots = scratch
        """Folder of the plots."""
        self.records: list[Record] = []
        self.running: list[subprocess.Popen[str]] = []
        self._instances: list[str] = []
        self._number = itertools.count()
        self._bare_uses: dict[tuple[object, ...], float] = {}
        sim = packaged("sim/libcuda.so.1").parent
        link = [f"-L{sim}", "-l:libcuda.so.1"]
        include = [f"-I{ROOT}/csrc/sim", f"-I{ROOT}/csrc/abi"]
        self.launch = build_c(ROOT / "bench/launch_overhead.c", scratch / "launch_overhead", *link)
        self.alloc = build_c(ROOT / "bench/alloc_overhead.c", scratch / "alloc_overhead", *link)
        self.many = build_c(ROOT / "bench/start_many.c", scratch / "start_many", *link)
        self.load = build_c(ROOT / "bench/load.c", scratch / "load", *link)
        self.timeline_program = build_c(ROOT / "bench/timeline.c", scratch / "timeline", *include)
        self.stalls_program = build_c(ROOT / "bench/stalls.c", scratch / "stalls")
        self.pingpong = build_c(ROOT / "bench/pingpong.c", scratch / "pingpong")
        # An instance's programs see what a bare one sees, and the proxies in front of it.
        self._bare_env = {key: value for key, value in os.environ.items() if not key.startswith("CGPU_")}
        self._bare_env |= {"LD_LIBRARY_PATH": str(sim), "CGPU_SIM_DIR": str(node.runtime / "sim")}

    def record(self, name: str, params: dict[str, object], values: Sequence[float], unit: str,
               baseline: float | None = None) -> Record:
        """Keeps a figure and prints its line."""
        one = make_record(name, params, values, unit, baseline)
        self.records.append(one)
        print(row(one), flush=True)
        return one

    # -- programs --

    def bare(self, *command: object) -> subprocess.Popen[str]:
        return self._start(command, self._bare_env)

    def unlimited(self, *command: object) -> subprocess.Popen[str]:
        """Behind the proxies, but in no instance."""
        return self._start(command, self._bare_env | {"LD_LIBRARY_PATH": str(self.node.base / "lib")})

    def create(self, gpu: str = "0", weight: int = 1, highprio: bool = False, memory: str = "512MiB") -> str:
        """Makes an instance; gives its ID."""
        id_ = f"b{next(self._number)}"
        self.node.write(f"create {id_} gpu={gpu} memsize={memory} weight={weight} highprio={int(highprio)}", "inst_ctl")
        self._instances.append(id_)
        return id_

    def run_in(self, id_: str, *command: object) -> subprocess.Popen[str]:
        """Starts a program in an instance."""
        return self._start(command, self.env_in(id_))

    def env_in(self, id_: str) -> dict[str, str]:
        """The environment of a program in an instance."""
        socket = self.node.runtime / "inst" / id_ / "gate.sock"
        return self._bare_env | {"LD_LIBRARY_PATH": str(self.node.base / "lib"), "CGPU_SOCKET": str(socket)}

    def _start(self, command: Sequence[object], env: dict[str, str]) -> subprocess.Popen[str]:
        program = subprocess.Popen([*map(str, command)], env=env, stdout=subprocess.PIPE, text=True)
        self.running.append(program)
        return program

    def output(self, program: subprocess.Popen[str], timeout: float = 300) -> str:
        """What it printed, when it ended well."""
        text, _ = program.communicate(timeout=timeout)
        if program.returncode:
            raise RuntimeError(f"{program.args!r} failed: {program.returncode}")
        self.running.remove(program)
        return text

    def clear(self) -> None:
        """Ends all programs and destroys all instances."""
        for program in self.running:
            program.kill()
        for program in self.running:
            program.wait()
            if program.stdout:
                program.stdout.close()
        self.running.clear()
        for id_ in self._instances:
            wait_until(functools.partial(self._destroy, id_), f"{id_} to be destroyed", every=0.02)
        self._instances.clear()

    def _destroy(self, id_: str) -> bool:
        try:
            self.node.write(f"destroy {id_}", "inst_ctl")
        except OSError:  # EBUSY: the daemon has not seen yet that its programs ended
            return False
        return True

    def policy(self, number: int, gpus: int = 1) -> None:
        for gpu in range(gpus):
            self.node.write(number, gpu, "policy")

    @contextlib.contextmanager
    def cell(self) -> Iterator[None]:
        """One measurement, alone on the machine as far as others keep to the same lock; and clearing up after it."""
        with TURN:
            try:
                yield
            finally:
                self.clear()

    # -- figures --

    def device(self, gpu: int = 0) -> Device:
        """The state file is made by the first program that uses the GPU."""
        uuid = self.node.status()["gpus"][gpu]["uuid"]
        path = self.node.runtime / "sim" / f"gpu-{str(uuid).removeprefix('GPU-')}.state"
        wait_until(path.exists, f"{path} to be made")
        return Device(path)

    def settle(self, programs: Sequence[subprocess.Popen[str]]) -> Device:
        """Waits until all are on the device and have run for a while."""
        device = self.device()
        wait_until(lambda: all(device.by_pid().get(one.pid, 0) > 0 for one in programs), "all on the device", 60)
        time.sleep(SETTLE_S)
        return device

    def window(self, programs: Sequence[subprocess.Popen[str]], seconds: float) -> tuple[list[float], float]:
        """Each program's and the whole device's busy fraction over a window of the device's own time."""
        device = self.settle(programs)
        before = device.snapshot()
        time.sleep(seconds)
        after = device.snapshot()
        passed = after.now - before.now
        return ([(after.by_pid[one.pid] - before.by_pid[one.pid]) / passed for one in programs],
                (after.busy - before.busy) / passed)

    def timeline(self, programs: Sequence[subprocess.Popen[str]], seconds: float, poll_us: int = 1000) -> Timeline:
        """The exact timeline of a window."""
        device = self.settle(programs)
        with Timeline(self.timeline_program, device, self.scratch / "timeline.bin", poll_us) as timeline:
            time.sleep(seconds)
        if timeline.lost:
            raise RuntimeError(f"the timeline missed {timeline.lost} kernels")
        return timeline

    @contextlib.contextmanager
    def stalls(self) -> Iterator[list[tuple[int, int]]]:
        """When CPUs of this machine stood still: from and to, ns of CLOCK_MONOTONIC. The list is filled at the end."""
        program = self._start([self.stalls_program, STALL_US], self._bare_env)
        found: list[tuple[int, int]] = []
        try:
            yield found
        finally:
            program.terminate()
            for line in self.output(program).splitlines():
                begin, end = map(int, line.split())
                found.append((begin, end))

    def bare_use(self, commands: Sequence[Sequence[object]], seconds: float = 3) -> float:
        """The device's busy fraction with these programs side by side and no gate; measured once a run."""
        key = tuple(tuple(command) for command in commands)
        if key not in self._bare_uses:
            self._bare_uses[key] = self.window([self.bare(*command) for command in commands], seconds)[1]
            self.clear()
        return self._bare_uses[key]

    def interleaved(self, runs: int, read: Callable[[str], float], command: Sequence[object],
                    start: Callable[..., subprocess.Popen[str]]) -> tuple[list[float], float]:
        """What ``start`` adds, run by run, and the bare median: bare and not take turns."""
        added, bare = [], []
        for _ in range(runs):
            bare.append(read(self.output(self.bare(*command))))
            added.append(read(self.output(start(*command))) - bare[-1])
        return added, statistics.median(bare)
