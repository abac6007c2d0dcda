"""Two CUDA programs share one simulated GPU, steered live through the tree: what the product is for."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from node import Node, running_node, wait_until

GIB = 1 << 30
OUT_OF_MEMORY = 2
DRIVER = Path(__file__).with_name("driver.py")
# Shares are of the device's own time. These bounds are what a busy two-core machine may not break; accuracy is the
# benchmark's business.
LOOSE = 0.15


class Program:
    """driver.py in an instance, spoken to line by line."""

    def __init__(self, node: Node, id_: str | None, *options: str, later: bool = False,
                 env: dict[str, str] | None = None) -> None:
        command = [str(Path(sys.executable).parent / "cgpuctl"), "run", *(["--id", id_] if id_ else []), *options, "--",
                   sys.executable, str(DRIVER), *(["--later"] if later else [])]
        self.process = subprocess.Popen(command, env={**node.env, **(env or {})}, stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        node.programs.append(self.process)
        self.pid = self._answer()["pid"]

    def _answer(self) -> dict[str, Any]:
        assert self.process.stdout
        line = self.process.stdout.readline()
        assert line, f"the program ended with {self.process.wait(10)}"
        answer: dict[str, Any] = json.loads(line)
        return answer

    def ask(self, *words: object) -> dict[str, Any]:
        assert self.process.stdin
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()
        return self._answer()

    def close(self) -> int:
        assert self.process.stdin and self.process.stdout
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        code = self.process.wait(20)
        self.process.stdout.close()
        return code

    def kill(self, sign: signal.Signals = signal.SIGKILL) -> None:
        self.process.send_signal(sign)
        if sign == signal.SIGKILL:
            self.close()


def test_a_program_sees_its_quota_and_gets_cudas_own_error_beyond_it(node: Node) -> None:
    program = Program(node, "quota", "--mem", "1GiB")
    assert program.ask("info") == {"free": GIB, "total": GIB, "device_total": GIB}
    assert program.ask("alloc", 11 * GIB // 10)["result"] == OUT_OF_MEMORY
    assert program.ask("alloc", GIB // 2)["result"] == 0
    assert program.ask("info")["free"] == GIB // 2
    assert node.read(0, "quota", "meminfo") == f"Free: {GIB // 2}\nPID: {program.pid} Mem: {GIB // 2}\n"
    assert program.ask("alloc", GIB // 2 + (2 << 20))["result"] == OUT_OF_MEMORY
    seen = program.ask("nvml")
    assert seen["total"] == [GIB] and seen["used"] == [GIB // 2] and seen["pids"] == [program.pid]
    assert program.ask("free")["result"] == 0
    assert node.read(0, "quota", "meminfo").splitlines()[0] == f"Free: {GIB}"
    assert program.close() == 0
    wait_until(lambda: not node.path(0, "quota").exists(), "the instance to go with its last process")


def test_memsize_changes_live_in_both_directions(node: Node) -> None:
    program = Program(node, "live", "--mem", "1GiB")
    assert program.ask("alloc", GIB * 3 // 4)["result"] == 0
    node.write("512MiB", 0, "live", "memsize")
    assert node.read(0, "live", "memsize") == f"{512 << 20}\n"
    assert node.read(0, "live", "meminfo").splitlines()[0] == "Free: 0"
    assert program.ask("info") == {"free": 0, "total": GIB // 2, "device_total": GIB // 2}
    assert program.ask("alloc", 1 << 20)["result"] == OUT_OF_MEMORY
    node.write("2GiB", 0, "live", "memsize")
    assert program.ask("alloc", GIB)["result"] == 0
    assert program.close() == 0


def test_echo_turns_one_to_two_into_one_to_one_within_a_second(node: Node, busy: Path) -> None:
    node.run("one", busy, 500, 60, weight=1)
    node.run("two", busy, 500, 60, weight=2)
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 2, "both to run")
    assert node.read(0, "policy") == "2\n"  # a weight above 1 switched it
    shares = node.shares(2.5)
    assert shares["two"] / shares["one"] == pytest.approx(2, rel=LOOSE)
    subprocess.run(["bash", "-c", f"echo 1 > {node.path(0, 'policy')}"], check=True)
    time.sleep(1)
    shares = node.shares(2.5)
    assert shares["two"] / shares["one"] == pytest.approx(1, rel=LOOSE)
    node.write(2, 0, "policy")
    node.write(3, 0, "one", "weight")
    node.write(1, 0, "two", "weight")
    time.sleep(0.5)
    shares = node.shares(2.5)
    assert shares["one"] / shares["two"] == pytest.approx(3, rel=LOOSE)


def test_weight_zero_pauses_and_the_other_gets_all(node: Node, busy: Path) -> None:
    node.run("paused", busy, 500, 60)
    node.run("other", busy, 500, 60)
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 2, "both to run")
    node.write(0, 0, "paused", "weight")
    time.sleep(0.3)
    shares = node.shares(1.5)
    assert shares["paused"] == 0 and shares["other"] > 0.75
    node.write(1, 0, "paused", "weight")
    wait_until(lambda: node.shares(1)["paused"] > 0.35, "the continued one to get its half", 10)


def test_fixed_shares_leave_the_rest_idle(node: Node, busy: Path) -> None:
    node.run("five", busy, 500, 60, weight=5)
    node.run("ten", busy, 500, 60, weight=10)
    node.write(3, 0, "policy")
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 2, "both to run")
    shares = node.shares(3)
    assert shares["five"] == pytest.approx(0.25, abs=0.05) and shares["ten"] == pytest.approx(0.5, abs=0.07)


@pytest.mark.parametrize("rounds", [6])
def test_kill_at_any_moment_leaves_the_other_at_full_speed(node: Node, busy: Path, rounds: int) -> None:
    node.run("stays", busy, 2000, 100, 64)
    for number in range(rounds):
        victim = node.run(f"victim{number}", busy, 2000, 100, 256)
        name = f"victim{number}"
        wait_until(lambda: node.busy_ns().get(name, 0) > 0, "the victim to run")  # noqa: B023
        assert str(256 << 20) in node.read(0, name, "meminfo")
        time.sleep(0.013 * number)
        victim.kill()
        victim.wait()
        wait_until(lambda: not node.path(0, name).exists() or "PID" not in node.read(0, name, "meminfo"),  # noqa: B023
                   "meminfo without the dead one")
        # what is charged is brought up to date every 100 ms where one is alone: not every short window shows it all
        wait_until(lambda: node.shares(0.5)["stays"] > 0.75, "the other to have the device for itself", 5)
    wait_until(lambda: node.ctl("list").stdout.count("victim") == 0, "the victims' instances to go")


def test_stopped_holder_does_not_hold_up_the_other(node: Node, busy: Path) -> None:
    stopped = node.run("stopped", busy, 1000, 60)
    node.run("runs", busy, 1000, 60)
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 2, "both to run")
    stopped.send_signal(signal.SIGSTOP)
    wait_until(lambda: node.shares(1)["runs"] > 0.8, "the other to have the device for itself", 10)
    stopped.send_signal(signal.SIGCONT)
    # what it kept the device from the other while it was stopped is its debt; then it is one of two again
    wait_until(lambda: node.shares(0.5).get("stopped", 0) > 0.3, "the continued one to get its share again")


def test_programs_run_on_when_the_daemon_dies(node: Node, busy: Path) -> None:
    first, second = node.base / "first.out", node.base / "second.out"
    programs = [node.run("first", busy, 1000, 6, out=first), node.run("second", busy, 1000, 6, out=second)]
    holder = Program(node, "holder", "--mem", "1GiB")
    assert holder.ask("alloc", GIB // 2)["result"] == 0
    wait_until(lambda: second.read_text(), "both to run")
    node.kill_daemon()
    lines = len(second.read_text().splitlines())
    wait_until(lambda: len(second.read_text().splitlines()) >= lines + 2, "the second to run on")
    assert holder.ask("alloc", GIB)["result"] == OUT_OF_MEMORY, "the memory limit holds without a daemon"
    assert holder.ask("launch", 1000, 20)["seconds"] < 10
    assert [program.wait(30) for program in programs] == [0, 0]


def test_gpus_are_numbered_from_zero(tmp_path: Path) -> None:
    with running_node(tmp_path, "3x8GiB") as node:
        uuids = {gpu["index"]: gpu["uuid"].removeprefix("GPU-").replace("-", "") for gpu in node.status()["gpus"]}
        program = Program(node, "two-gpus", "--gpu", "2,0", "--mem", "1GiB,2GiB")
        seen = program.ask("devices")
        assert seen == {"uuids": [uuids[2], uuids[0]], "visible": None}
        inside = program.ask("nvml")
        assert inside["uuids"] == seen["uuids"] and inside["total"] == [GIB, 2 * GIB]
        assert program.ask("info")["total"] == GIB
        assert sorted(path.name for path in node.tree.glob("*/two-gpus")) == ["two-gpus"] * 2
        picks = Program(node, "picks", "--gpu", "1,2", "--mem", "1GiB", env={"CUDA_VISIBLE_DEVICES": "1"})
        assert picks.ask("devices") == {"uuids": [uuids[2]], "visible": "1"}


def test_forked_children_share_the_quota_and_give_it_back(node: Node) -> None:
    parent = Program(node, "family", "--mem", "1GiB", later=True)
    child = parent.ask("fork", GIB // 2)
    assert child == {"alloc": 0, "free": GIB // 2, "total": GIB, "device_total": GIB}
    wait_until(lambda: node.read(0, "family", "meminfo") == f"Free: {GIB}\n", "the child's memory to come back")


def test_exit_status_and_signals_are_the_programs_own(node: Node) -> None:
    assert node.ctl("run", "--mem", "1GiB", "--", "sh", "-c", "exit 42", check=False).returncode == 42
    assert node.ctl("run", "--mem", "1GiB", "--", "sh", "-c", "kill -TERM $$", check=False).returncode == -15
    assert node.ctl("run", "--mem", "1GiB", "--", "/nowhere/at/all", check=False).returncode == 127
    wait_until(lambda: node.ctl("list", "--json").stdout.strip() == "[]", "the instances to go")


def test_a_script_can_use_the_whole_card_again_and_again(node: Node) -> None:
    """What one program gave up by ending, its name included, the next can have at once."""
    for _ in range(4):
        node.ctl("run", "--id", "again", "--mem", "24GiB", "--weight", "20", "--", "true")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--gpu", "7", "--mem", "1GiB"], ["7", "GPU"]),
        (["--mem", "25GiB"], ["memsize"]),
        (["--mem", "1GiB", "--weight", "21"], ["weight"]),
        (["--mem", "1GiB", "--id", "a/b"], ["a/b"]),
        (["--mem", "1GiB", "--id", ".."], [".."]),
        (["--mem", "1GiB", "--id", "x" * 300], ["128"]),
        (["--mem", "1GiB", "--id", "policy"], ["policy"]),
        ([], ["default_memsize"]),
        (["--mem", "1_0"], ["1_0"]),
    ],
)
def test_bad_instances_get_one_clear_line_and_leave_nothing(node: Node, arguments: list[str], words: list[str]) -> None:
    done = node.ctl("run", *arguments, "--", "true", check=False)
    assert done.returncode == 125
    lines = [line for line in done.stderr.splitlines() if not line.startswith("usage:")]
    assert len(lines) == 1 and all(word in lines[0] for word in words), done.stderr
    assert node.ctl("list", "--json").stdout.strip() == "[]"


NOBODY = """
import json, os, socket, sys
os.chdir(sys.argv[1])  # before root is given up: the scratch folder is root's alone
os.setgroups([])
os.setresgid(65534, 65534, 65534)
os.setresuid(65534, 65534, 65534)
with socket.socket(socket.AF_UNIX) as sock:
    sock.connect("control.sock")
    sock.sendall(json.dumps({"do": "run", "memsize": [1 << 30]}).encode() + b"\\n")
    print(sock.makefile().readline())
"""


def test_other_users_are_told_which_group(node: Node) -> None:
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    answer = subprocess.run([sys.executable, "-c", NOBODY, str(node.runtime)], capture_output=True, text=True,
                            timeout=30, check=True).stdout
    assert not json.loads(answer)["ok"] and "group" in json.loads(answer)["error"]
    assert node.ctl("list", "--json").stdout.strip() == "[]"
