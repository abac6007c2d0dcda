"""Programs of different kinds beside each other, on a real cgpud: shares by the device's own timeline."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node import BIN, ROOT, Node, build_c, running_node, wait_until

# Bounds that a busy machine of two cores may not break; accuracy is the benchmark's business.
LOOSE = 0.15

spec = importlib.util.spec_from_file_location("bench_device", ROOT / "bench/device.py")
assert spec and spec.loader
bench_device = importlib.util.module_from_spec(spec)
sys.modules["bench_device"] = bench_device  # its dataclasses look themselves up there
spec.loader.exec_module(bench_device)


@pytest.fixture(scope="module")
def load(tmp_path_factory: pytest.TempPathFactory) -> Path:
    from cgpusched.driver.find import packaged

    sim = packaged("sim/libcuda.so.1")
    out = tmp_path_factory.mktemp("bin") / "load"
    return build_c(ROOT / "bench/load.c", out, str(sim), "-Wl,--allow-shlib-undefined")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path, "2x24GiB") as one:
        yield one


def device(node: Node, gpu: int = 0) -> Any:
    """The timeline of one GPU, once a program has started it."""
    uuid = str(next(one["uuid"] for one in node.status()["gpus"] if one["index"] == gpu)).removeprefix("GPU-")
    path = node.runtime / "sim" / f"gpu-{uuid}.state"
    wait_until(path.exists, "the simulated GPU's state")
    return bench_device.Device(path)


def snapshot(timeline: Any) -> Any:
    """Where a program polls, the device never stands still for a reading: then one that is right to microseconds."""
    try:
        return timeline.snapshot()
    except TimeoutError:
        used = {pid: ns for pid, ns, *_ in timeline._processes()}
        return bench_device.Snapshot(timeline.now_ns(), 0, used)


def part(timeline: Any, groups: list[set[int]], seconds: float = 2) -> list[float]:
    """The part of the device that each group of processes uses over the next seconds."""
    before = snapshot(timeline)
    time.sleep(seconds)
    after = snapshot(timeline)
    return [sum(after.by_pid[pid] - before.by_pid[pid] for pid in group) / (after.now - before.now) for group in groups]


def assert_ratio(timeline: Any, one: set[int], two: set[int], ratio: float, used: float = 0.8,
                 loose: float = LOOSE) -> None:
    """two : one by the device's timeline. Looks up to four times: others may have had the machine's cores."""
    wait_until(lambda: all(snapshot(timeline).by_pid.get(pid, 0) > 5 * 10**7 for pid in one | two), "all to run")
    seen = []
    for _ in range(4):
        a, b = part(timeline, [one, two])
        seen.append((round(a, 3), round(b, 3)))
        if a > 0 and b / a == pytest.approx(ratio, rel=loose) and a + b > used:
            return
    raise AssertionError(f"wanted one to {ratio}, {used} used: {seen}")


def child(program: subprocess.Popen[Any]) -> int:
    """The pid of does.c, which is a child of the shell ``program``."""
    def find() -> int | None:
        for line in Path(f"/proc/{program.pid}/task/{program.pid}/children").read_text().split():
            if Path(f"/proc/{line}/comm").read_text().strip() == "does":
                return int(line)
        return None

    return int(wait_until(find, "does to start"))


def told(node: Node, does: Path, id_: str, gpu: str, *lines: str) -> int:
    """Starts does.c in an instance and tells it these lines; gives its pid. It ends when its standard input does."""
    script = node.base / f"{id_}.lines"
    script.write_text("".join(f"{line}\n" for line in lines))
    return child(node.run(id_, "/bin/sh", "-c", f"(cat {script}; exec sleep 60) | {does}; exit", gpu=gpu))


@pytest.fixture(autouse=True)
def no_does_left(submit_build: dict[str, Path]) -> Iterator[None]:
    """The shell's other children are not the node's to end."""
    yield
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if str(submit_build["does"]).encode() in (entry / "cmdline").read_bytes():
                os.kill(int(entry.name), signal.SIGKILL)


def test_graphs_are_charged_by_their_time(node: Node, load: Path) -> None:
    """Graphs of 30 kernels of 100 us beside single ones, one to two: by launches they would be thirty to one."""
    single = node.run("single", load, "-k", 100, "-t", 60, weight=1)
    graphs = node.run("graphs", load, "-k", 100, "-G", 30, "-t", 60, weight=2)
    assert_ratio(device(node), {single.pid}, {graphs.pid}, 2)


def test_processes_of_one_container_share_its_part(node: Node, load: Path) -> None:
    """Two processes in one instance, one in the other, one to one."""
    node.ctl("create", "many", "--mem", "1GiB", "--gpu", "0")
    many = []
    for options in (["-k", "200"], ["-k", "500", "-s", "10000"]):
        command = [BIN / "cgpuctl", "run", "--id", "many", "--", load, "-t", "60", *options]
        many.append(subprocess.Popen(command, env=node.env))
        node.programs.append(many[-1])
    lone = node.run("lone", load, "-k", 200, "-t", 60)
    assert_ratio(device(node), {lone.pid}, {program.pid for program in many}, 1)


def test_one_process_on_two_gpus(node: Node, submit_build: dict[str, Path], load: Path) -> None:
    """A rival on the second: half of that one. On the first it is alone, and has no less there: all of it, or turns at
    the same time as on the second."""
    both = told(node, submit_build["does"], "both", "0,1", "1 busy 2 200 60000", "2 context 1", "2 busy 8 200 60000")
    rival = node.run("rival", load, "-k", 200, "-t", 60, gpu="1")
    assert_ratio(device(node, 1), {rival.pid}, {both}, 1)
    wait_until(lambda: part(device(node, 0), [{both}], 1)[0] > 0.4, "no less than that on the first GPU", 20)


@pytest.mark.parametrize("line", ["synchronising 2 1000 100000", "polling 2 1000 100000", "busy 2 1000 60000",
                                  "busy 1 1000 60000"])
def test_every_habit_gets_its_half(node: Node, submit_build: dict[str, Path], load: Path, line: str) -> None:
    """Synchronises after each launch, polls events, never waits, per-thread stream: beside one that never waits."""
    habit = told(node, submit_build["does"], "habit", "0", f"1 {line}")
    other = node.run("other", load, "-k", 1000, "-t", 60)
    # a poller has one of the machine's two cores to itself while it holds the device: its rival's hand-overs are slower
    assert_ratio(device(node), {other.pid}, {habit}, 1, loose=0.45 if "polling" in line else LOOSE)


@pytest.mark.parametrize("line", ["fills 2 60000", "copies 100000 1000000"])
def test_memsets_and_copies_are_charged_by_the_time_held(node: Node, submit_build: dict[str, Path], load: Path,
                                                         line: str) -> None:
    """A flood of fills of 64 MiB, of copies of pageable memory: the program beside it keeps its half. (The simulated
    device fills and copies by the CPU, so its own timeline shows little of them.)"""
    habit = told(node, submit_build["does"], "flood", "0", f"1 {line}")
    other = node.run("other", load, "-k", 1000, "-t", 60)
    timeline = device(node)
    wait_until(lambda: snapshot(timeline).by_pid.get(other.pid, 0) > 5 * 10**7, "the rival to run")
    seen = [part(timeline, [{other.pid}])[0] for _ in range(3)]
    assert max(seen) > 0.42, seen
    assert Path(f"/proc/{habit}").exists()
