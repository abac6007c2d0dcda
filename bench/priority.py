"""High priority: how soon it has the device beside a busy pair, and how much of it at most."""

import time

from device import exclusive, worst_window
from programs import FOREVER_S, Bench
from records import percentile

PROBE_US, PROBE_EACH_US = 100, 20_000
RATIO = 90
WINDOW_NS = 100_000_000


def latency(bench: Bench) -> None:
    """Launch to synchronised of one kernel of 100 us about every 20 ms, beside two busy containers 1:1."""
    seconds = 5 if bench.quick else 10
    probe = (bench.load, "-k", PROBE_US, "-p", PROBE_EACH_US, "-t", seconds)
    for kernel in (1_000,) if bench.quick else (100, 1_000, 10_000):
        busy = (bench.load, "-k", kernel, "-t", FOREVER_S)
        with bench.cell():
            bench.settle([bench.bare(*busy) for _ in range(2)])
            bare = samples(bench.output(bench.bare(*probe)))
            bench.clear()
            high, *pair = bench.create(highprio=True), bench.create(), bench.create()
            bench.policy(1)
            bench.node.write(RATIO, 0, "prio_ratio")
            bench.settle([bench.run_in(id_, *busy) for id_ in pair])
            got = samples(bench.output(bench.run_in(high, *probe)))
        for percent in (50, 99):
            bench.record("highprio_latency_us", {"kernel_us": kernel, "percentile": percent},
                         [percentile(got, percent) / 1000], "us", percentile(bare, percent) / 1000)


def samples(text: str) -> list[int]:
    return [int(line) for line in text.splitlines()]


def cap(bench: Bench) -> None:
    """A high-priority container that is always busy, beside a busy one: its most in any 100 ms, and its mean.

    And the longest that a CPU stood still in or just before that window, which tells the scheduler's faults from the
    machine's: while the other's CPU does, that one has no launch, and the device may be the first one's for longer."""
    for kernel in (1_000,) if bench.quick else (10, 100, 1_000, 10_000):
        with bench.cell():
            high, low = bench.create(highprio=True), bench.create()
            bench.policy(1)
            bench.node.write(RATIO, 0, "prio_ratio")
            programs = [bench.run_in(id_, bench.load, "-k", length, "-t", FOREVER_S)
                        for id_, length in ((high, kernel), (low, 1_000))]
            time.sleep(0.2)
            with bench.stalls() as stalls:
                timeline = bench.timeline(programs, 4 if bench.quick else 8)
        mine, others = (timeline.runs.get(one.pid, []) for one in programs)
        runs = exclusive(mine, others)
        most, at = worst_window(runs, WINDOW_NS, timeline.start, timeline.end)
        stood_still = [end - begin for begin, end in stalls if end > at - WINDOW_NS and begin < at + WINDOW_NS]
        first, last = runs[0][0], runs[-1][1]
        delivered = sum(end - begin for begin, end in runs) / (last - first)
        params: dict[str, object] = {"prio_ratio": RATIO, "kernel_us": kernel}
        bench.record("highprio_share", params, [most / WINDOW_NS], "fraction")
        bench.record("highprio_delivered", params, [delivered], "fraction")
        bench.record("highprio_stall_ms", params, [max(stood_still, default=0) / 1e6], "ms")
