"""Several processes on one simulated GPU: turns, memory, death, and NVML's view."""

from __future__ import annotations

import random
import signal
import subprocess
import time
from typing import Any

import pytest

UUID = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
BUSY = """
context(); f = getattr(Kernels(), KERNEL); print("ready", flush=True)
while True:
    launch(f, times=50)
"""
NVML = """
n = nv()
for line in iter(input, ""):
    print(eval(line), flush=True)
"""


def wait_ready(child: subprocess.Popen[str]) -> None:
    assert child.stdout is not None
    assert child.stdout.readline() == "ready\n", child.stderr and child.stderr.read()


class Observer:
    """A process that asks NVML."""

    def __init__(self, machine: Any) -> None:
        self.child = machine.start(NVML)

    def ask(self, expression: str) -> Any:
        self.child.stdin.write(expression + "\n")
        self.child.stdin.flush()
        line = self.child.stdout.readline()
        assert line, self.child.stderr.read()
        return eval(line)

    def until(self, expression: str, value: Any) -> None:
        deadline = time.monotonic() + 10
        while (now := self.ask(expression)) != value:
            assert time.monotonic() < deadline, now
            time.sleep(0.005)


@pytest.fixture
def observer(machine: Any) -> Observer:
    return Observer(machine)


@pytest.mark.parametrize(("one", "other"), [("spin_us100", "spin_us100"), ("spin_us10", "spin_ms10")])
def test_turns_are_even_and_the_device_is_never_idle(machine: Any, observer: Observer, one: str, other: str) -> None:
    children = [machine.start(f"KERNEL = {name!r}" + BUSY) for name in (one, other)]
    for child in children:
        wait_ready(child)
    time.sleep(0.2)
    observer.ask("n.memory()")
    t0, (total0, before) = time.monotonic_ns(), machine.busy()
    time.sleep(1)
    observer.ask("n.memory()")
    t1, (total1, after) = time.monotonic_ns(), machine.busy()
    first, second = (after[child.pid] - before[child.pid] for child in children)
    assert first + second == pytest.approx(total1 - total0, rel=0.01)  # read while it moves
    assert 0.9 < first / second < 1.1
    assert (first + second) / (t1 - t0) > 0.97


def test_a_wait_is_as_long_as_the_turns_make_it(machine: Any) -> None:
    other = machine.start("KERNEL = 'spin_us100'" + BUSY)
    wait_ready(other)
    machine.run("""
context(); k = Kernels(); start, end = event(), event()
cu.cuEventRecord(start, None); launch(k.spin_us100, times=500); cu.cuEventRecord(end, None)
t = time.monotonic(); cu.cuEventSynchronize(end); waited = (time.monotonic() - t) * 1000
assert 90 < elapsed_ms(start, end) < 110, elapsed_ms(start, end)
assert waited < elapsed_ms(start, end) + 10
""")


def test_memory_is_shared_and_the_dead_give_it_back(machine: Any, observer: Observer) -> None:
    machine.configure(f"{UUID} {1 << 30} One")
    holder = machine.start("context(); mem_alloc(700 * MIB); print('ready', flush=True); input()")
    wait_ready(holder)
    assert observer.ask("n.memory()") == (700 << 20, 1 << 30)
    assert observer.ask("n.processes()") == {holder.pid: 700 << 20}
    want = "context(); print(result(mem_alloc, 400 * MIB))"
    assert machine.run(want).strip() == "2"
    holder.kill()
    holder.wait()
    assert machine.run(want).strip() == "0"         # nobody had to look in between
    assert observer.ask("(n.memory()[0], n.processes())") == (0, {})


def test_nvml_in_the_same_process(machine: Any) -> None:
    machine.run("""
n = nv(); context(); mem_alloc(MIB)
assert n.processes() == {os.getpid(): MIB} and n.memory()[0] == MIB
m = Nvml(); n.nvmlShutdown(); n.nvmlShutdown(); assert result(n.nvmlShutdown) == 1
""")


def test_nvml_identity_and_utilization(machine: Any, observer: Observer) -> None:
    machine.configure(f"{UUID} {1 << 30} Big one", f"GPU-bbbbbbbb-1111-2222-3333-444444444444 {1 << 29} Other")
    busy = machine.start("KERNEL = 'spin_us100'" + BUSY)
    wait_ready(busy)
    machine.run(f"UUID = {UUID!r}" + """
n = nv(); count, text, d = c_uint(), ctypes.create_string_buffer(96), n.device(0)
n.nvmlDeviceGetCount_v2(byref(count)); assert count.value == 2
n.nvmlDeviceGetUUID(d, text, 96); assert text.value.decode() == UUID
assert result(n.nvmlDeviceGetUUID, d, text, 10) == 7
n.nvmlDeviceGetName(d, text, 96); assert text.value == b"Big one"
h = c_void_p()
n.nvmlDeviceGetHandleByUUID(c_char_p(UUID.encode()), byref(h)); assert h.value == d.value
n.nvmlDeviceGetHandleByPciBusId_v2(c_char_p(b"00000000:02:00.0"), byref(h)); assert h.value == n.device(1).value
assert result(n.nvmlDeviceGetHandleByIndex_v2, 2, byref(h)) == 2
assert result(n.nvmlDeviceGetHandleByUUID, c_char_p(b"GPU-no"), byref(h)) == 6
info = (c_ulonglong * 5)(); info[0] = 0x2000028; n.nvmlDeviceGetMemoryInfo_v2(d, info); assert info[1] == GIB
info[0] = 7; assert result(n.nvmlDeviceGetMemoryInfo_v2, d, info) == 25
n.lib.nvmlErrorString.restype = c_char_p; assert n.lib.nvmlErrorString(3) == b"Not Supported"
""")
    time.sleep(1.3)
    gpu, = observer.ask("[(u := (c_uint * 2)(), n.nvmlDeviceGetUtilizationRates(n.device(), u), u[0])[2]]")
    assert gpu >= 90
    pid, share = observer.ask("(s := (c_uint * 8)(), c := c_uint(1), "
                              "n.nvmlDeviceGetProcessUtilization(n.device(), s, byref(c), 0), "
                              "(s[0], s[4]))[3]")
    assert pid == busy.pid and share >= 90


def test_kill_at_any_moment(machine: Any, observer: Observer) -> None:
    """Twenty-five processes that do everything at once, killed one after the other; one goes on all the time."""
    steady = machine.start("""
context(); k = Kernels(); start, end = event(), event(); print("ready", flush=True)
while True:
    cu.cuEventRecord(start, None); launch(k.spin_us100, times=10); cu.cuEventRecord(end, None)
    cu.cuEventSynchronize(end)
    p = mem_alloc(MIB); cu.cuMemFree_v2(p)
""")
    wait_ready(steady)
    chaos = random.Random(7)
    for _ in range(25):
        victim = machine.start("""
context(); k = Kernels(); s = stream(1); p = mem_alloc(8 * MIB); print("ready", flush=True)
while True:
    launch(k.spin_us20, s, 20); cu.cuMemsetD8Async(p, 1, 4096, s); q = mem_alloc(4096)
    result(cu.cuStreamQuery, s); cu.cuMemGetInfo_v2(None, None); result(cu.cuEventQuery, None)
""")
        wait_ready(victim)
        time.sleep(chaos.uniform(0, 0.03))
        victim.send_signal(signal.SIGKILL)
        victim.wait()
    observer.until("set(n.processes())", {steady.pid})
    assert observer.ask("n.memory()[0]") <= 1 << 20
    _, before = machine.busy()
    t0 = time.monotonic_ns()
    time.sleep(0.5)
    observer.ask("n.memory()")
    _, after = machine.busy()
    assert steady.poll() is None
    # at its full speed: nothing of the dead takes turns (the rest is its own waking up, and this host's load)
    assert (after[steady.pid] - before[steady.pid]) / (time.monotonic_ns() - t0) > 0.4


def test_a_dead_process_s_queue_is_gone(machine: Any) -> None:
    doomed = machine.start("context(); launch(Kernels().spin_ms1000, times=100); print('ready', flush=True); input()")
    wait_ready(doomed)
    doomed.kill()
    doomed.wait()
    machine.run("""
context(); t = time.monotonic(); launch(Kernels().spin_ms5, times=10); sync(); took = time.monotonic() - t
assert took < 0.1, took
""")


def test_a_stopped_process_keeps_its_memory_and_its_queue_runs_on(machine: Any, observer: Observer) -> None:
    sleeper = machine.start("context(); mem_alloc(MIB); launch(Kernels().spin_ms10, times=10)\n"
                            "print('ready', flush=True); input()")
    wait_ready(sleeper)
    sleeper.send_signal(signal.SIGSTOP)
    observer.until("n.memory()[0]", 1 << 20)
    deadline = time.monotonic() + 10
    while machine.busy()[1][sleeper.pid] < 100_000_000:
        assert time.monotonic() < deadline
        observer.ask("n.memory()")
        time.sleep(0.01)
    sleeper.send_signal(signal.SIGCONT)


def test_more_processes_than_places(machine: Any) -> None:
    """1024 places on a GPU: forked children take them, the next gets out of memory, and a death makes room."""
    machine.run("""
go, hold = os.pipe(), os.pipe()
children = []
for _ in range(1024):
    pid = os.fork()
    if not pid:
        os.close(hold[1]); context(); os.write(go[1], b"."); os.read(hold[0], 1); os._exit(0)
    children.append(pid)
seen = 0
while seen < 1024:
    seen += len(os.read(go[0], 1024))
cu.cuInit(0)
assert result(cu.cuDevicePrimaryCtxRetain, byref(c_void_p()), 0) == 2
os.kill(children[0], 9); os.waitpid(children[0], 0)
assert result(cu.cuDevicePrimaryCtxRetain, byref(c_void_p()), 0) == 0
os.close(hold[1])
for pid in children[1:]:
    os.waitpid(pid, 0)
""")


def test_other_users_may_come(machine: Any) -> None:
    machine.run("context()")
    for file in machine.folder.glob("gpu-*"):
        assert file.stat().st_mode & 0o777 == 0o666


def test_another_size_in_the_configuration(machine: Any) -> None:
    """Takes effect when nobody uses the GPU; until then it is not the machine that sim.conf describes."""
    show = "size = c_size_t(); context(); cu.cuMemGetInfo_v2(None, byref(size)); print(size.value)"
    machine.configure(f"{UUID} {1 << 30} One")
    holder = machine.start("context(); print('ready', flush=True); input()")
    wait_ready(holder)
    machine.configure(f"{UUID} {2 << 30} One")
    assert machine.run("print(result(cu.cuInit, 0))").strip() == "100"
    holder.kill()
    holder.wait()
    assert machine.run(show).strip() == str(2 << 30)
    machine.state().write_bytes(b"of another version")
    assert machine.run(show).strip() == str(2 << 30)


def test_the_dead_leave_no_places_behind(machine: Any, observer: Observer) -> None:
    """Processes that come and go use the same few slots again, though none of them looks at all the others."""
    machine.run("""
for i in range(200):
    pid = os.fork()
    if not pid:
        context(); mem_alloc(MIB); os._exit(0)
    os.waitpid(pid, 0)
""")
    assert len(machine.busy()[1]) <= 32                             # by slot ever used, of the last to have it
    assert observer.ask("(n.memory()[0], n.processes())") == (0, {})
