"""Hand-over of the device: between programs that run, and from one that is killed or stopped while it has it."""

import signal
import time

from device import Device, Timeline, hand_overs
from node import wait_until
from programs import FOREVER_S, Bench
from records import percentile

KERNEL_US = 1_000


def hand_over(bench: Bench) -> None:
    """How long the device is idle when it goes from one busy program to the other, against a futex ping-pong."""
    with bench.cell():
        took = [int(line) for line in bench.output(bench.bare(bench.pingpong, 3000)).splitlines()]
        ids = [bench.create() for _ in range(2)]
        bench.policy(1)
        programs = [bench.run_in(id_, bench.load, "-k", 100, "-t", FOREVER_S) for id_ in ids]
        timeline = bench.timeline(programs, 4 if bench.quick else 8)
    idle = hand_overs(timeline.runs, timeline.start, timeline.end)
    for percent in (50, 99):
        bench.record("handover_us", {"percentile": percent}, [percentile(idle, percent) / 1000], "us",
                     percentile(took, percent) / 1000)


def kills(bench: Bench) -> None:
    """SIGKILL of whoever has the device, until the other's first kernel runs."""
    after_signal(bench, signal.SIGKILL, "kill_to_next_ms")


def stops(bench: Bench) -> None:
    """SIGSTOP of whoever has the device, until the other's first kernel runs."""
    after_signal(bench, signal.SIGSTOP, "stop_to_next_ms")


def after_signal(bench: Bench, number: signal.Signals, name: str) -> None:
    waits = []
    for _ in range(3 if bench.quick else 10):
        with bench.cell():
            ids = [bench.create() for _ in range(2)]
            bench.policy(1)
            programs = {one.pid: one for one in
                        [bench.run_in(id_, bench.load, "-k", KERNEL_US, "-t", FOREVER_S) for id_ in ids]}
            device = bench.settle(list(programs.values()))
            with Timeline(bench.timeline_program, device, bench.scratch / "timeline.bin", 500) as timeline:
                time.sleep(0.2)
                holder = wait_until(device.holder, "somebody to have the device", every=0)
                begin = time.monotonic_ns()
                programs[holder].send_signal(number)
                wait_for_use(device, next(pid for pid in programs if pid != holder), begin)
                programs[holder].send_signal(signal.SIGCONT)
        waits += [min(start for start, _ in split(runs, KERNEL_US * 1000) if start >= begin) - begin
                  for pid, runs in timeline.runs.items() if pid != holder]
    bench.record(name, {"kernel_us": KERNEL_US, "times": len(waits)}, [max(waits) / 1e6], "ms")


def split(runs: list[tuple[int, int]], kernel: int) -> list[tuple[int, int]]:
    """Single kernels of stretches without a gap."""
    return [(at, at + kernel) for start, end in runs for at in range(start, end - kernel + 1, kernel)]


def wait_for_use(device: Device, pid: int, begin: int) -> None:
    """Until a kernel that began after ``begin`` has been done by ``pid``."""
    before = device.by_pid()[pid]
    wait_until(lambda: device.by_pid()[pid] > before + 3 * KERNEL_US * 1000, "the other to run", every=0.005)
    assert device.now_ns() > begin
