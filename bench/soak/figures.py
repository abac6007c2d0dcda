"""What a soak's run comes to: records as those of the benchmark, each with its must (bench/musts.py)."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field

from changes import KILL, UPGRADE, Change, Size
from load import WEIGHTS, Found
from records import Record, make_record, percentile

WARM = 0.1
"""The part of a run whose sizes do not count: what is reached by then is what a process takes."""
MS, S = 1e6, 1e9


@dataclass
class Run:
    """All that was seen."""

    seconds: float
    changes: list[Change] = field(default_factory=list)
    sizes: dict[str, list[tuple[float, Size]]] = field(default_factory=dict)
    """By process, when (s since the begin) and what."""
    found: list[Found] = field(default_factory=list)
    used: dict[str, list[tuple[int, int]]] = field(default_factory=dict)
    """By program, from when to when it had the device, ns."""
    ungated: int = 0
    """Times that a gate opened because no daemon answered for a second."""
    wrong: list[str] = field(default_factory=list)
    """What else was not as it must be."""


def records_of(run: Run) -> list[Record]:
    made = [make_record("soak_changes", {"of": kind}, [len(some)], "times") for kind, some in by_kind(run).items()]
    for one in run.found:
        made.append(make_record("soak_failed", {"of": one.what, "operations": one.count}, [one.failed], "times"))
    made.append(make_record("soak_lost_writes", {}, [sum(one.lost for one in run.found)], "times"))
    made.append(make_record("soak_wrong", {}, [len(run.wrong)], "times"))
    files = [one for one in run.found if one.what != "allocations"]
    for kind, some in by_kind(run).items():
        if longest := [longest_in(files, change) / MS for change in some]:
            made.append(make_record("soak_wait_ms", {"change": kind, "percentile": 50},
                                    [percentile(longest, 50)], "ms"))
            made.append(make_record("soak_wait_ms", {"change": kind, "percentile": 100}, [max(longest)], "ms"))
    made.append(make_record("soak_longest_wait_ms", {"of": "files"}, [max(one.longest_ns for one in files) / MS], "ms"))
    made.append(make_record("soak_longest_wait_ms", {"of": "allocations"},
                            [max(one.longest_ns for one in run.found if one not in files) / MS], "ms"))
    totals = {name: total(run.used[name]) for name in WEIGHTS}
    made.append(make_record("soak_ratio_error", {"weights": list(WEIGHTS.values())}, [ratio_error(totals)], "%"))
    made += unruled(run, totals)
    made += growths(run)
    return made


def by_kind(run: Run) -> dict[str, list[Change]]:
    return {kind: [one for one in run.changes if one.what == kind] for kind in (KILL, UPGRADE)}


def longest_in(users: Iterable[Found], change: Change) -> int:
    """The longest wait of any operation that was under way at some moment of a change, ns."""
    return max((ns for user in users for begin, ns in user.waits
                if begin < change.back_ns and begin + ns > change.end_ns), default=0)


def total(stretches: Iterable[tuple[int, int]]) -> int:
    return sum(end - begin for begin, end in stretches)


def within(stretches: Iterable[tuple[int, int]], windows: Sequence[tuple[int, int]]) -> int:
    """How much of the stretches is in the windows; both in order, windows apart from each other."""
    found, k = 0, 0
    for begin, end in stretches:
        while k < len(windows) and windows[k][1] <= begin:
            k += 1
        at = k
        while at < len(windows) and windows[at][0] < end:
            found += min(end, windows[at][1]) - max(begin, windows[at][0])
            at += 1
    return found


def ratio_error(totals: dict[str, int]) -> float:
    """How far the ratio of the two programs' device time is from that of their weights, in percent."""
    (a, b), (first, second) = WEIGHTS, WEIGHTS.values()
    return abs(totals[b] / totals[a] * first / second - 1) * 100


def unruled(run: Run, totals: dict[str, int]) -> list[Record]:
    """Device time used while no daemon ruled over the programs: by what the last one had granted, or ungated."""
    windows = [(one.end_ns, one.back_ns) for one in run.changes]
    used = sum(within(run.used[name], windows) for name in WEIGHTS)
    lengths = [(end - begin) / MS for begin, end in windows]
    return [
        make_record("soak_unruled_ms", {"of": "one change", "percentile": 50}, [statistics.median(lengths)], "ms"),
        make_record("soak_unruled_ms", {"of": "one change", "percentile": 100}, [max(lengths)], "ms"),
        make_record("soak_unruled_device_s", {}, [used / S], "s"),
        make_record("soak_unruled_device", {}, [100 * used / sum(totals.values())], "%"),
        make_record("soak_ungated", {}, [run.ungated], "times"),
    ]


def growths(run: Run) -> list[Record]:
    """How much larger each process became over the run, by the line of least squares through its sizes."""
    made = []
    for process, seen in run.sizes.items():
        settled = [(at, asdict(size)) for at, size in seen if at >= WARM * run.seconds]
        if len(settled) < 2:
            continue
        for what, unit in (("memory_kib", "KiB"), ("descriptors", ""), ("threads", "")):
            slope = statistics.linear_regression([at for at, _ in settled], [size[what] for _, size in settled]).slope
            params = {"of": process, "what": what.partition("_")[0], "last": settled[-1][1][what]}
            made.append(make_record("soak_growth", params, [slope * run.seconds], unit))
    return made
