"""What programs are told: every way of asking gives the same, to all of an instance, and nothing of others."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from node import Node, wait_until

MIB, GIB = 1 << 20, 1 << 30


def assert_told(program: Any, total: int, used: int, processes: dict[int, int]) -> None:
    """All of the program's views are of this memory and these processes (bytes by pid)."""
    for name, said in program.ask("memory").items():
        for what, value in {"total": total, "used": used, "free": total - used}.items():
            assert said.get(what, value) == value, f"{name} says {what}={said[what]}, not {value}"
    for name, said in program.ask("processes").items():
        assert {int(pid): size for pid, size in said.items()} == processes, f"{name} says {said}"


def test_every_view_of_memory_and_processes_agrees(node: Node, program: Any) -> None:
    first = program("family", "--mem", "2GiB")
    second, watcher = program(beside=first), program(beside=first)
    other = program("other", "--mem", "3GiB")
    for one, size in ((first, 300), (second, 500), (other, 700)):
        one.ask("cuda")
        one.ask("alloc", size * MIB)
    own = {first.pid: 300 * MIB, second.pid: 500 * MIB}
    for one in (first, second, watcher):
        assert_told(one, 2 * GIB, 800 * MIB, own)
    assert_told(other, 3 * GIB, 700 * MIB, {other.pid: 700 * MIB})
    lines = node.read(0, "family", "meminfo").splitlines()
    assert lines[0] == f"Free: {2 * GIB - 800 * MIB}"
    assert sorted(lines[1:]) == sorted(f"PID: {pid} Mem: {size}" for pid, size in own.items())

    node.write("1GiB", 0, "family", "memsize")
    for one in (first, second, watcher):
        assert_told(one, GIB, 800 * MIB, own)
    second.end()
    # the driver and the daemon see its end each for itself
    wait_until(lambda: str(second.pid) not in watcher.ask("processes")["nvmlDeviceGetComputeRunningProcesses"]
               and watcher.ask("memory")["nvmlDeviceGetMemoryInfo"]["used"] == 300 * MIB, "the ended one to be gone")
    assert_told(watcher, GIB, 300 * MIB, {first.pid: 300 * MIB})


def attached(node: Node) -> int:
    """Processes that have a place in the only instance."""
    return int(json.loads(node.ctl("list", "--json").stdout)[0]["processes"])


def test_a_process_that_only_asks_takes_no_place_in_the_instance(node: Node, program: Any) -> None:
    first = program("asked", "--mem", "2GiB")
    for one in (first, program(beside=first)):
        assert_told(one, 2 * GIB, 0, {})
    assert attached(node) == 0
    first.ask("cuda")
    assert attached(node) == 1


def test_a_process_that_asks_of_gpus_first_and_computes_later(program: Any, tmp_path: Path) -> None:
    """Its second connection brings the same pages again: the ledger's mutex is taken once, not waited for in vain."""
    one = program("later", "--mem", "2GiB", within=("env", f"CGPU_LOG={tmp_path}/log"))
    assert_told(one, 2 * GIB, 0, {})
    one.ask("cuda")
    one.ask("alloc", 100 * MIB)
    assert_told(one, 2 * GIB, 100 * MIB, {one.pid: 100 * MIB})
    assert not (tmp_path / "log").exists(), (tmp_path / "log").read_text()


def test_pids_are_those_that_the_container_counts(program: Any) -> None:
    """In a PID namespace of its own a process is listed under the number it has there, and others are not at all."""
    unshare = shutil.which("unshare")
    alone = [str(unshare), "--pid", "--fork", "--kill-child", "--mount-proc"]
    if not unshare or subprocess.run([*alone, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot make a PID namespace here")
    other = program("outside", "--mem", "2GiB")
    inside = program("inside", "--mem", "2GiB", within=tuple(alone))
    for one, size in ((other, 700), (inside, 300)):
        one.ask("cuda")
        one.ask("alloc", size * MIB)
    assert inside.pid == 1
    assert_told(inside, 2 * GIB, 300 * MIB, {1: 300 * MIB})
    assert_told(other, 2 * GIB, 700 * MIB, {other.pid: 700 * MIB})


def test_gpus_are_found_by_every_key_within_the_instance(node: Node, program: Any) -> None:
    host = program("host", "--mem", "1GiB", "--gpu", "0,1,2").ask("handles")["all"]
    assert [one["index"] for one in host] == [0, 1, 2] == host_indices(node)
    keys = [f"{kind}={one[kind]}" for one in host for kind in ("uuid", "serial", "bus")]
    told = program("two", "--mem", "1GiB", "--gpu", "2,1").ask("handles", *keys, "index=0", "index=1", "index=2")
    assert [(one["index"], one["uuid"]) for one in told["all"]] == [(0, host[2]["uuid"]), (1, host[1]["uuid"])]
    number = {host[2]["uuid"]: 0, host[1]["uuid"]: 1}
    for one in host:
        for kind in ("uuid", "serial", "bus"):
            assert told["found"][f"{kind}={one[kind]}"] == number.get(one["uuid"], "NVMLError_NotFound")
    assert [told["found"][f"index={i}"] for i in range(3)] == [0, 1, "NVMLError_InvalidArgument"]
    assert told["near"] == [1] and sorted(told["of_cpu"]) == [0, 1]


def host_indices(node: Node) -> list[int]:
    return [gpu["index"] for gpu in node.status()["gpus"]]


def test_utilization_is_the_instances_own_share(node: Node, program: Any) -> None:
    """Two at equal weight have about half each, by every way of asking, where the card is all but full."""
    first, second = program("one", "--mem", "1GiB"), program("two", "--mem", "1GiB")
    watcher, idle = program(beside=second), program("idle", "--mem", "1GiB")
    assert idle.ask("busy")["rates"] == 0
    for one in (first, second):
        one.ask("cuda")
        one.ask("spin", 1000)

    def settled() -> list[dict[str, Any]] | None:
        told = [one.ask("busy") for one in (first, second, watcher)]
        return told if all(35 < one["rates"] < 65 for one in told) and len(told[2]["samples"]) == 10 else None

    for one in wait_until(settled, "both to have about half"):
        assert one["pstates"] == pytest.approx(one["rates"], abs=10)
        assert sum(one["samples"]) / len(one["samples"]) == pytest.approx(one["rates"], abs=10)
        assert one["stamps"] == sorted(set(one["stamps"])) and 0 < one["memory"] <= one["rates"]
    assert set(first.ask("busy")["sm"]) == {str(first.pid)}
    assert set(watcher.ask("busy")["sm"]) == {str(second.pid)}
    assert idle.ask("busy")["rates"] == 0 and idle.ask("busy")["sm"] == {}

    node.kill_daemon()
    said = wait_until(lambda: (told := watcher.ask("busy"))["rates"] == "NVMLError_NotSupported" and told,
                      "no figure where nobody counts")
    assert said["samples"] == "NVMLError_NotSupported" and said["pstates"] == 0
