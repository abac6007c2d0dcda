"""State of every kind over a daemon that was killed: what stays, what goes, and what a damaged file costs."""

import errno
import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest
from node import wait_until


def instances(node: Any) -> str:
    return node.read("inst_ctl")


def test_all_that_was_set_is_there_again(node: Any) -> None:
    for value, *path in [(3, "0", "policy"), (24, "0", "max_inst"), (45, "0", "prio_ratio"),
                         ("5GiB", "default_memsize"), ("create bare memsize=2GiB weight=4", "inst_ctl"),
                         ("create other highprio=1", "inst_ctl"),
                         ("3GiB", "0", "bare", "memsize"), (0, "0", "other", "weight"),
                         ("create brief memsize=1GiB", "inst_ctl"), ("destroy brief", "inst_ctl")]:  # fmt: skip
        node.write(value, *path)
    names = ("0/policy", "0/max_inst", "0/prio_ratio", "default_memsize", "inst_ctl")
    before = {name: node.read(name) for name in names}
    limits = {id: node.runtime / "inst" / id / "limits" for id in ("bare", "other")}
    folders = {id: path.parent.stat().st_ino for id, path in limits.items()}
    node.restart()
    assert {name: node.read(name) for name in before} == before
    assert {id: path.parent.stat().st_ino for id, path in limits.items()} == folders, "containers have them bound"
    assert limits["bare"].read_text().endswith(f" {3 << 30}\n")
    assert sorted(os.listdir(node.runtime / "inst")) == ["bare", "other"]
    assert (node.runtime / "state.json").stat().st_mode & 0o7777 == 0o600
    node.write("destroy bare", "inst_ctl")
    node.restart()
    assert "bare" not in instances(node) and not (node.runtime / "inst/bare").exists()


def test_a_stop_in_good_order_keeps_the_state(node: Any) -> None:
    node.write("create bare memsize=2GiB weight=4", "inst_ctl")
    before = instances(node)
    assert node.daemon is not None
    node.daemon.send_signal(signal.SIGTERM)
    assert node.daemon.wait(15) == 0
    node.start()
    assert instances(node) == before


def test_what_cannot_be_stored_is_refused(node: Any) -> None:
    """A full disk below the runtime folder: the command fails with its error, and changes nothing."""
    node.write("create bare memsize=2GiB weight=4", "inst_ctl")
    before = instances(node)
    blocked = node.runtime / "state.json"
    kept = blocked.read_bytes()
    blocked.unlink()
    blocked.mkdir()  # nothing can be renamed over a folder
    try:
        for value, *path in [("create new memsize=1GiB", "inst_ctl"), ("destroy bare", "inst_ctl"), (3, "0", "policy"),
                             ("1GiB", "0", "bare", "memsize"), (1, "0", "bare", "weight")]:  # fmt: skip
            with pytest.raises(OSError) as refused:
                node.write(value, *path)
            assert refused.value.errno == errno.EISDIR
        assert instances(node) == before and node.read("0/policy") == "2\n"
        assert os.listdir(node.runtime / "inst") == ["bare"]
    finally:
        blocked.rmdir()
        blocked.write_bytes(kept)
    node.write(3, "0", "policy")
    assert json.loads(blocked.read_text())["gpus"].popitem()[1]["policy"] == 3


def test_an_instance_lives_on_with_its_program(node: Any) -> None:
    """Also one that hides its environment; and the instance of a program that ends meanwhile goes."""
    hidden = node.run("hidden", "env", "-i", "/bin/sleep", 60)
    shown = node.run("shown", "sh", "-c", "sleep 60 & wait")
    ends = node.run("ends", "sleep", 60)
    wait_until(lambda: instances(node).count("\n") == 3, "three instances")
    wait_until(lambda: Path(f"/proc/{hidden.pid}/environ").read_bytes() == b"", "the program without environment")
    children = Path(f"/proc/{shown.pid}/task/{shown.pid}/children")
    child = int(wait_until(children.read_text, "the child").split()[0])
    node.kill_daemon()
    for program in (ends, shown):  # shown has a child that lives on
        program.kill()
        program.wait()
    node.start()
    wait_until(lambda: "ends" not in instances(node), "the end of the one without processes")
    assert "hidden" in instances(node) and "shown" in instances(node)
    hidden.kill()
    hidden.wait()
    wait_until(lambda: "hidden" not in instances(node), "the end of the hidden one")
    assert "shown" in instances(node)
    os.kill(child, signal.SIGKILL)
    wait_until(lambda: "shown" not in instances(node), "the end of the last")


def test_a_paused_program_stays_paused_and_shares_are_as_before(node: Any, busy: Path) -> None:
    for id, weight in (("one", 1), ("two", 2), ("paused", 1)):
        node.run(id, busy, 500, 60, 64, weight=weight)
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 3, "all to run")
    node.write(0, "0", "paused", "weight")
    assert node.read("0/policy") == "2\n"
    node.restart()
    paused = node.busy_ns()["paused"]

    def is_shared() -> bool:
        shares = node.shares(2)
        return 1.8 * shares["one"] < shares["two"] < 2.2 * shares["one"]

    wait_until(is_shared, "shares of 1:2, once what was used meanwhile is paid back", 40)
    assert node.busy_ns()["paused"] == paused
    assert all(len(one["processes"]) == 1 for one in node.status()["gpus"][0]["instances"]), "memory is known again"
    assert all(program.poll() is None for program in node.programs)


@pytest.mark.parametrize("damage", ["truncated", "garbage", "newer", "empty"])
def test_a_damaged_file_is_set_aside(node: Any, busy: Path, damage: str) -> None:
    """What live programs hold comes back, with a weight of 1; the rest is lost, and a line says so."""
    program = node.run("held", busy, 500, 60, 64, mem="2GiB", weight=3)
    node.write("create unused memsize=1GiB", "inst_ctl")
    wait_until(lambda: node.busy_ns().get("held", 0) > 0, "the program to run")
    node.kill_daemon()
    file = node.runtime / "state.json"
    whole = file.read_text()
    file.write_text({"truncated": whole[: len(whole) // 2], "garbage": "\0" * 100, "empty": "",
                     "newer": whole.replace('"version": 1', '"version": 2')}[damage])
    node.start()
    assert "state set aside" in node.log.read_text()
    assert len(list(node.runtime.glob("state.json.bad-*"))) == 1
    wait_until(lambda: "unused" not in instances(node), "the end of what nobody holds")
    assert instances(node) == f"held gpu=0 memsize={2 << 30} weight=1 highprio=0\n"
    wait_until(lambda: node.read("0/held/meminfo").count("PID:") == 1, "its memory to count")
    assert program.poll() is None
