"""What NVML sees of a program and the hook does not: it is shown, it counts, and who passes the hook is found out."""

import json
import select
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node import BIN, Node, build_c, running_node, wait_until

HERE = Path(__file__).parent
DRIVER, BYPASS = HERE / "driver.py", HERE / "bypass.py"
MIB, GIB = 1 << 20, 1 << 30
OUT_OF_MEMORY = 2
QUICK = ("--audit-interval", "0.2")


class Spoken:
    """A program in an instance, spoken to line by line."""

    def __init__(self, node: Node, id_: str, *command: object, mem: str | None = None, context: int = 0) -> None:
        options = ["--id", id_, *(["--mem", mem] if mem else [])]
        env = {**node.env, "CGPU_SIM_CONTEXT_BYTES": str(context)}
        self.process = subprocess.Popen([BIN / "cgpuctl", "run", *options, "--", *map(str, command)], env=env,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        node.programs.append(self.process)
        self.pid = self.hear()["pid"]

    def say(self, *words: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def hear(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, *words: object) -> dict[str, Any]:
        self.say(*words)
        return self.hear()

    def close(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.stdin.close()
        assert self.process.wait(20) == 0
        self.process.stdout.close()

    def kill(self) -> None:
        assert self.process.stdin and self.process.stdout
        self.process.kill()
        self.process.wait(20)
        self.process.stdin.close()
        self.process.stdout.close()


@pytest.fixture(scope="module")
def storm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_c(HERE / "storm.c", tmp_path_factory.mktemp("bin") / "storm")


@pytest.fixture
def quick(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path, "1x24GiB", *QUICK) as one:
        yield one


@pytest.fixture
def strict(tmp_path: Path) -> Iterator[Node]:
    """A node that shuts gates."""
    with running_node(tmp_path, "1x24GiB", *QUICK, "--enforce", "gate") as one:
        yield one


def hooked(node: Node, id_: str, mem: str | None = None, context: int = 0) -> Spoken:
    return Spoken(node, id_, sys.executable, DRIVER, mem=mem, context=context)


def own_driver(node: Node) -> Path:
    return Path(shutil.copy(node.base / "lib/sim/libcuda.so.1", node.base / "driver.so"))


def past_the_hook(node: Node, id_: str, how: str = "{}") -> Spoken:
    """A program of the instance that brings its own copy of the driver; ``how``: a shell's command around it."""
    command = f"{sys.executable} {BYPASS} {own_driver(node)}"
    return Spoken(node, id_, "sh", "-c", how.format(command, sim=node.runtime / "sim"))


def row(node: Node, id_: str) -> dict[str, Any]:
    (found,) = (one for one in node.status()["gpus"][0]["instances"] if one["id"] == id_)
    return dict(found)


def meminfo(node: Node, id_: str) -> str:
    return node.read(0, id_, "meminfo")


def shown(free: int, *processes: tuple[int, int]) -> str:
    return f"Free: {free}\n" + "".join(f"PID: {pid} Mem: {used}\n" for pid, used in sorted(processes))


# Contexts


def test_a_context_shows_in_meminfo_and_counts_against_the_quota(quick: Node) -> None:
    context = 100 * MIB
    program = hooked(quick, "one", "1GiB", context)
    wait_until(lambda: meminfo(quick, "one") == shown(GIB - context, (program.pid, context)), "the context to count")
    assert program.ask("info") == {"free": GIB - context, "total": GIB, "device_total": GIB}
    assert program.ask("alloc", GIB - context + 2 * MIB)["result"] == OUT_OF_MEMORY
    assert program.ask("alloc", GIB - context)["result"] == 0
    assert meminfo(quick, "one") == shown(0, (program.pid, GIB))
    found = row(quick, "one")
    assert (found["mem_used"], found["mem_other"]) == (GIB, context)
    assert (found["audit"]["bypasses"], found["audit"]["overs"]) == (0, 0)
    program.kill()
    wait_until(lambda: not quick.path(0, "one").exists() or meminfo(quick, "one") == shown(GIB), "its memory back")


def test_memsize_changes_live_with_the_context_counted(quick: Node) -> None:
    context = 100 * MIB
    program = hooked(quick, "one", "1GiB", context)
    assert program.ask("alloc", 500 * MIB)["result"] == 0
    wait_until(lambda: meminfo(quick, "one").startswith(f"Free: {GIB - 600 * MIB}\n"), "the context to count")
    quick.write("550MiB", 0, "one", "memsize")
    assert meminfo(quick, "one") == shown(0, (program.pid, 600 * MIB))
    assert program.ask("info")["free"] == 0
    assert program.ask("alloc", 2 * MIB)["result"] == OUT_OF_MEMORY
    quick.write("610MiB", 0, "one", "memsize")
    assert program.ask("info")["free"] == 10 * MIB
    assert program.ask("alloc", 10 * MIB)["result"] == 0
    assert meminfo(quick, "one") == shown(0, (program.pid, 610 * MIB))
    program.close()


def test_memory_that_comes_and_goes_is_never_taken_for_hidden(quick: Node, storm: Path) -> None:
    """It fits, but for what a look might make of it: an allocation that is refused ends the program."""
    program = quick.run("storm", storm, 512 * MIB, mem="600MiB")
    seen = []
    until = time.monotonic() + 4
    while time.monotonic() < until:
        assert program.poll() is None, (quick.base / "storm.log").read_text()
        seen += [one["mem_other"] for one in quick.status()["gpus"][0]["instances"]]
        time.sleep(0.05)
    assert seen and set(seen) == {0}


@pytest.fixture
def slow(tmp_path: Path) -> Iterator[Node]:
    """A node that looks by itself once an hour."""
    with running_node(tmp_path, "1x24GiB", "--audit-interval", "3600") as one:
        yield one


def later(node: Node, id_: str, context: int, mem: str | None = None) -> Spoken:
    """A program that has not begun with CUDA."""
    return Spoken(node, id_, sys.executable, DRIVER, "--later", mem=mem, context=context)


def test_a_context_counts_when_the_call_that_makes_it_returns(slow: Node) -> None:
    size = 100 * MIB
    program = later(slow, "one", size, "1GiB")
    for contexts in (1, 2):
        assert program.ask("context") == {"result": 0}
        assert program.ask("info")["free"] == GIB - contexts * size
        assert meminfo(slow, "one") == shown(GIB - contexts * size, (program.pid, contexts * size))
    program.close()
    primary = hooked(slow, "two", "1GiB", size)
    assert primary.ask("info")["free"] == GIB - size
    primary.close()


def test_of_programs_that_race_for_the_last_room_as_many_get_a_context_as_fit(slow: Node) -> None:
    size = 100 * MIB
    first = later(slow, "one", size, "1GiB")
    assert first.ask("context") == {"result": 0}
    assert first.ask("alloc", GIB - size - 250 * MIB) == {"result": 0}
    racers = [later(slow, "one", size) for _ in range(4)]
    for one in racers:
        one.say("context")
    assert sorted(one.hear()["result"] for one in racers) == [0, 0, OUT_OF_MEMORY, OUT_OF_MEMORY]
    assert first.ask("info")["free"] == 50 * MIB
    assert first.ask("free") == {"result": 0}
    for one in racers:
        one.close()
    wait_until(lambda: first.ask("info")["free"] == GIB - size, "their memory back")
    first.close()


@pytest.mark.parametrize("sign", [signal.SIGSTOP, signal.SIGKILL])
def test_a_context_waits_for_no_daemon_that_is_not_there(slow: Node, sign: signal.Signals) -> None:
    program = later(slow, "one", 100 * MIB, "1GiB")
    program.ask("init")
    slow.kill_daemon(sign)
    assert program.ask("context") == {"result": 0}
    if sign == signal.SIGSTOP:
        slow.kill_daemon(signal.SIGCONT)
    program.close()


# Past the hook


@pytest.mark.parametrize("how", [
    "exec {}",
    "exec env -i CGPU_SIM_DIR={sim} {}",
    "env -i CGPU_SIM_DIR={sim} {}; true",
    "setsid env -i CGPU_SIM_DIR={sim} {}; true",
], ids=["with its environment", "the program itself", "a child", "a child in a session of its own"])
def test_who_passes_the_hook_is_logged_counted_and_shown(quick: Node, how: str) -> None:
    honest = hooked(quick, "one", "1GiB")
    thief = past_the_hook(quick, "one", how)
    thief.ask("alloc", 512 * MIB)
    wait_until(lambda: row(quick, "one")["audit"]["unhooked"] == [thief.pid], "it to be found")
    assert meminfo(quick, "one") == shown(512 * MIB, (thief.pid, 512 * MIB))
    assert honest.ask("alloc", 514 * MIB)["result"] == OUT_OF_MEMORY, "its memory is the instance's"
    table = subprocess.run([BIN / "cgpu-smi"], env=quick.env, capture_output=True, text=True, check=True).stdout
    assert table.splitlines()[-1] == f"GPU 0 one: past the hook: pid {thief.pid}"
    thief.ask("free")
    wait_until(lambda: row(quick, "one")["audit"]["unhooked"] == [], "it to be forgotten")
    assert meminfo(quick, "one") == shown(GIB)
    found = row(quick, "one")
    assert (found["audit"]["bypasses"], found["audit"]["overs"], found["shut"]) == (1, 0, False)
    lines = [line for line in quick.log.read_text().splitlines() if "the hook" in line]
    assert len(lines) == 2, "one line when it began and one when it ended"
    assert f"past the hook gpu=0 instance=one pid={thief.pid} used=512MiB" in lines[0]
    assert "nothing passes the hook any more gpu=0 instance=one" in lines[1]
    thief.close()
    honest.close()


def test_what_belongs_to_no_instance_is_not_held_against_one(quick: Node) -> None:
    honest = hooked(quick, "one", "1GiB")
    outside = subprocess.Popen([sys.executable, BYPASS, own_driver(quick)], stdin=subprocess.PIPE,
                               stdout=subprocess.PIPE, text=True,
                               env={**quick.env, "CGPU_SIM_DIR": str(quick.runtime / "sim")})
    quick.programs.append(outside)
    assert outside.stdin and outside.stdout and outside.stdout.readline()
    outside.stdin.write(f"alloc {GIB}\n")
    outside.stdin.flush()
    assert outside.stdout.readline() == "{}\n"
    assert honest.ask("alloc", GIB)["result"] == 0
    time.sleep(1)  # some looks
    assert row(quick, "one")["mem_other"] == 0 and meminfo(quick, "one") == shown(0, (honest.pid, GIB))
    outside.stdin.close()
    outside.stdout.close()
    assert outside.wait(20) == 0
    honest.close()


# The gate


def test_a_gate_that_was_shut_opens_again(strict: Node, busy: Path) -> None:
    strict.run("good", busy, 500, 120)
    strict.run("bad", busy, 500, 120)
    wait_until(lambda: all(strict.busy_ns().get(one, 0) > 10**7 for one in ("good", "bad")), "both to run")
    thief = past_the_hook(strict, "bad")
    thief.ask("alloc", GIB + 128 * MIB)  # beyond the quota, and within what is tolerated
    wait_until(lambda: row(strict, "bad")["audit"]["unhooked"] == [thief.pid], "it to be found")
    assert not row(strict, "bad")["shut"]
    thief.ask("alloc", 512 * MIB)
    wait_until(lambda: row(strict, "bad")["shut"], "the gate to be shut")
    before, since = strict.busy_ns(), time.monotonic()
    wait_until(lambda: strict.busy_ns()["good"] - before["good"] > 10**9, "the other to go on")
    shut = strict.busy_ns()["bad"] - before["bad"]
    assert shut < 0.2e9 * (time.monotonic() - since), "what is shut does not run"
    assert strict.read(0, "bad", "weight") == "1\n"
    thief.ask("free")
    wait_until(lambda: not row(strict, "bad")["shut"], "the gate to open")
    now = strict.busy_ns()["bad"]
    wait_until(lambda: strict.busy_ns()["bad"] - now > 10**8, "it to run again")
    assert row(strict, "bad")["audit"]["overs"] == 1
    log = strict.log.read_text()
    assert log.count(" over its memory gpu=0 instance=bad") == 2 and log.count("no longer over its memory") == 1
    thief.close()


def test_more_memory_opens_a_gate_too(strict: Node) -> None:
    honest = hooked(strict, "bad", "1GiB")
    thief = past_the_hook(strict, "bad")
    thief.ask("alloc", 2 * GIB)
    wait_until(lambda: row(strict, "bad")["shut"], "the gate to be shut")
    honest.say("launch", 1000, 10)  # it waits
    strict.write("3GiB", 0, "bad", "memsize")
    assert honest.hear()["seconds"] > 0
    assert not row(strict, "bad")["shut"]
    thief.close()
    honest.close()


def test_a_shut_program_stays_shut_without_the_daemon(strict: Node) -> None:
    honest = hooked(strict, "bad", "1GiB")
    thief = past_the_hook(strict, "bad")
    assert honest.ask("launch", 100, 1)["seconds"] > 0
    thief.ask("alloc", 2 * GIB)
    wait_until(lambda: row(strict, "bad")["shut"], "the gate to be shut")
    honest.say("launch", 1000, 1)
    strict.kill_daemon()
    assert not select.select([honest.process.stdout], [], [], 3)[0], "an open gate goes on after one second"
    honest.kill()
    thief.close()
