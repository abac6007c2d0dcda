"""The simulated device's own timeline, read from outside (csrc/sim/shared/state.h has the offsets).

Shares come from here, not from what programs or the daemon say of themselves.
"""

import array
import bisect
import mmap
import signal
import struct
import subprocess
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Self

MAGIC = 0x6D697367
VERSION = 2
LIVE = 1


@dataclass(frozen=True)
class Snapshot:
    """Device time so far, ns: of the whole device, and of each live process."""

    now: int
    busy: int
    by_pid: dict[int, int]


class Device:
    """One simulated GPU's state file, mapped read-only."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        magic, version = struct.unpack_from("<II", self._map, 0)
        if (magic, version) != (MAGIC, VERSION):
            raise ValueError(f"{path} is not the state of a simulated GPU of version {VERSION}")

    def now_ns(self) -> int:
        """Up to when the device has been simulated."""
        return int(struct.unpack_from("<Q", self._map, 8)[0])

    def snapshot(self) -> Snapshot:
        """A consistent reading: it is taken again while the device moves on in the middle of it."""
        for _ in range(1000):
            now = self.now_ns()
            busy = int(struct.unpack_from("<Q", self._map, 16)[0])
            by_pid = {pid: ns for pid, ns, _, _ in self._processes()}
            if self.now_ns() == now:
                return Snapshot(now, busy, by_pid)
        raise TimeoutError("the device never stood still for a reading")

    def busy_ns(self) -> int:
        """Kernel time of all processes so far."""
        return self.snapshot().busy

    def by_pid(self) -> dict[int, int]:
        """Kernel time of each live process so far, ns."""
        return self.snapshot().by_pid

    def holder(self) -> int | None:
        """The pid of the only process with work on the device; None if there are none or several."""
        with_work = [pid for pid, _, queued, completed in self._processes() if queued != completed]
        return with_work[0] if len(with_work) == 1 else None

    def _processes(self) -> list[tuple[int, int, int, int]]:
        """(pid, busy ns, operations queued, completed) of each live process."""
        slots, header, size = struct.unpack_from("<III", self._map, 32)
        found = []
        for slot in range(slots):
            state, pid, busy, _, queued, completed = struct.unpack_from("<IIQQQQ", self._map, header + slot * size)
            if state == LIVE:
                found.append((pid, busy, queued, completed))
        return found


class Timeline:
    """Who had the device when: exact to the nanosecond, from the stamps of each kernel (bench/timeline.c)."""

    def __init__(self, program: Path, device: Device, out: Path, poll_us: int = 1000) -> None:
        self._out = out
        with open(out, "wb") as file:
            self._process = subprocess.Popen([program, device.path, str(poll_us)], stdout=file)
        self.start = time.monotonic_ns()
        self.end = 0
        self.lost = 0
        self.runs: dict[int, list[tuple[int, int]]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Ends the recording and reads it; ``runs`` has (start, end) by pid, in order."""
        if self.end:
            return
        self.end = time.monotonic_ns()
        self._process.send_signal(signal.SIGTERM)
        if self._process.wait(20):
            raise RuntimeError("timeline failed")
        for pid, lost, start, end in struct.iter_unpack("<IIQQ", self._out.read_bytes()):
            self.lost += lost
            self.runs.setdefault(pid, []).append((start, end))
        for runs in self.runs.values():
            runs.sort()


def longest_gap(runs: list[tuple[int, int]], start: int, end: int) -> int:
    """The longest time without the device between two moments, ns."""
    last, longest = start, 0
    for begin, until in runs:
        if until > start and begin < end:
            longest, last = max(longest, begin - last), max(last, until)
    return max(longest, end - last)


def worst_window(runs: list[tuple[int, int]], window: int, start: int, end: int) -> tuple[int, int]:
    """The most device time in any stretch of ``window`` ns between two moments, and where that stretch begins."""
    begins = array.array("q", [begin for begin, _ in runs])
    sums = array.array("q", [0])
    for begin, until in runs:
        sums.append(sums[-1] + until - begin)

    def before(moment: int) -> int:
        k = bisect.bisect_right(begins, moment)
        over = max(0, runs[k - 1][1] - moment) if k else 0
        return sums[k] - over

    # a window that holds the most begins where a stretch begins, or ends where one ends
    edges = [begin for begin, _ in runs] + [until - window for _, until in runs]
    return max(((before(edge + window) - before(edge), edge) for edge in edges if start <= edge <= end - window),
               default=(0, start))


def exclusive(runs: list[tuple[int, int]], others: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """``runs`` without what ``others`` ran in the midst of them: kernels that preempted one of these."""
    made = []
    others = sorted(others)
    k = 0
    for begin, end in runs:
        while k < len(others) and others[k][0] <= begin:
            k += 1
        at = k
        while at < len(others) and others[at][0] < end:
            made.append((begin, others[at][0]))
            begin = min(others[at][1], end)
            at += 1
        if begin < end:
            made.append((begin, end))
    return [(begin, end) for begin, end in made if begin < end]


def hand_overs(runs: dict[int, list[tuple[int, int]]], start: int, end: int) -> list[int]:
    """How long the device was idle each time it went from one process to another, ns."""
    stretches = sorted((begin, until, pid) for pid, mine in runs.items() for begin, until in mine
                       if begin >= start and until <= end)
    return [max(0, b[0] - a[1]) for a, b in zip(stretches, stretches[1:], strict=False) if a[2] != b[2]]
