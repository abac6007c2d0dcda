"""The benchmark's own C programs, on the bare simulated device."""

import os
import signal
import subprocess
import time
from pathlib import Path

import pytest
from device import Device, Timeline
from node import build_c, wait_until

from cgpusched.driver.find import packaged

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def programs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("bench")
    sim = packaged("sim/libcuda.so.1").parent
    build_c(ROOT / "bench/load.c", folder / "load", f"-L{sim}", "-l:libcuda.so.1", "-Wall", "-Wextra", "-Werror")
    include = f"-I{ROOT}/csrc/sim", f"-I{ROOT}/csrc/abi"
    build_c(ROOT / "bench/timeline.c", folder / "timeline", *include, "-Wall", "-Wextra", "-Werror")
    for name in ("pingpong", "file_reads", "stalls"):
        build_c(ROOT / f"bench/{name}.c", folder / name, "-Wall", "-Wextra", "-Werror")
    return folder


@pytest.fixture
def start(programs, tmp_path):
    """Starts a load on a device of this test's own."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(packaged("sim/libcuda.so.1").parent), "CGPU_SIM_DIR": str(tmp_path)}
    started = []

    def run(*arguments):
        started.append(subprocess.Popen([programs / "load", *map(str, arguments)], env=env, text=True,
                                        stdout=subprocess.PIPE))
        return started[-1]

    yield run
    for program in started:
        program.kill()
        program.communicate()


def device_of(folder: Path) -> Device:
    return Device(wait_until(lambda: next(iter(folder.glob("gpu-*.state")), None), "the device"))


@pytest.mark.parametrize("arguments,share", [
    (("-k", 100), 1.0), (("-k", 1000, "-g", "-s", 10000), 1.0), (("-k", 50, "-G", 20), 1.0),
    (("-k", 100, "-b", "2000:10000"), 0.2)])
def test_each_kind_of_load_asks_for_what_it_says(start, tmp_path, arguments, share):
    program = start(*arguments, "-t", 30)
    device = device_of(tmp_path)
    wait_until(lambda: device.by_pid().get(program.pid, 0) > 5_000_000, "it to run")
    before = device.snapshot()
    wait_until(lambda: device.now_ns() > before.now + 400_000_000, "0.4 s of device time")
    after = device.snapshot()
    assert program.poll() is None
    assert (after.busy - before.busy) / (after.now - before.now) == pytest.approx(share, abs=0.15)


def test_a_probe_prints_its_latencies(start):
    text, _ = start("-k", 100, "-p", 2000, "-t", 0.5).communicate(timeout=30)
    took = [int(line) for line in text.splitlines()]
    assert len(took) >= 20 and min(took) >= 100_000


def test_a_timeline_holds_all_the_device_did(start, programs, tmp_path):
    program = start("-k", 100, "-s", 3000, "-t", 30)
    device = device_of(tmp_path)
    wait_until(lambda: device.by_pid().get(program.pid, 0) > 5_000_000, "it to run")
    with Timeline(programs / "timeline", device, tmp_path / "out") as timeline:
        first = device.snapshot()
        wait_until(lambda: device.now_ns() > first.now + 300_000_000, "0.3 s of device time")
        last = device.snapshot()
        wait_until(lambda: device.now_ns() > last.now + 50_000_000, "what was queued to be done")
        time.sleep(0.02)  # two looks of the recorder
    runs = timeline.runs[program.pid]
    seen = sum(max(0, min(end, last.now) - max(begin, first.now)) for begin, end in runs)
    assert timeline.lost == 0
    assert all(a[1] <= b[0] for a, b in zip(runs, runs[1:], strict=False))
    # its first look may come a little after ours
    assert seen == pytest.approx(last.busy - first.busy, rel=0.1)


def test_pingpong_prints_each_wake_up(programs):
    done = subprocess.run([programs / "pingpong", "50"], capture_output=True, text=True, timeout=30, check=True)
    took = [int(line) for line in done.stdout.splitlines()]
    assert len(took) == 99 and all(0 < ns < 10**9 for ns in took)


def test_a_time_that_threads_stood_still_is_found(programs):
    with subprocess.Popen([programs / "stalls", "500"], stdout=subprocess.PIPE, text=True) as program:
        cpus, tasks = len(os.sched_getaffinity(0)), Path(f"/proc/{program.pid}/task")
        wait_until(lambda: len(list(tasks.iterdir())) == cpus + 1, "a thread on each CPU")
        time.sleep(0.01)  # each in a nap
        program.send_signal(signal.SIGSTOP)
        stopped = time.monotonic_ns()
        time.sleep(0.05)
        continued = time.monotonic_ns()
        program.send_signal(signal.SIGCONT)
        over = 0
        for line in program.stdout:
            begin, end = map(int, line.split())
            assert end - begin > 500_000
            over += begin < stopped + 10_000_000 and end > continued
            if over == cpus:
                break
        program.terminate()
    assert program.returncode == 0


@pytest.mark.parametrize("clients", [1, 3])
def test_reads_are_counted_and_timed(programs, clients):
    done = subprocess.run([programs / "file_reads", "/proc/meminfo", str(clients), "0.05"], capture_output=True,
                          text=True, check=True, timeout=60)
    count, half, most, longest = map(int, done.stdout.split())
    assert count >= clients and 0 < half <= most <= longest


def test_reads_of_what_cannot_be_read_are_no_figure(programs, tmp_path):
    (tmp_path / "empty").touch()
    for path in (tmp_path / "none", tmp_path / "empty"):
        command = [programs / "file_reads", path, "2", "0.05"]
        done = subprocess.run(command, capture_output=True, check=False, timeout=60)
        assert done.returncode and not done.stdout
