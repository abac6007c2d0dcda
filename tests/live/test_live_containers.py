"""Containers over a change of daemon: registered, seen and followed as before, and gone if they ended meanwhile."""

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node import ROOT, wait_until

ASKING = ROOT / "tests/containers/asking.py"
MADE, BEGUN, ENDED = ("0123456789abcdef" * 4, "fedcba9876543210" * 4, "00112233" * 8)
DONE = 1
Ask = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def ask(node: Any) -> Iterator[Ask]:
    """Asks as cgpu-runtime does, by a process that lives on."""
    processes: list[subprocess.Popen[str]] = []

    def start(*words: object) -> "subprocess.Popen[str]":
        process = subprocess.Popen([sys.executable, "-S", ASKING, node.runtime / "runtime.sock", *map(str, words)],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        answer = json.loads(process.stdout.readline())
        assert answer["status"] == DONE, answer
        return process

    yield start
    for process in processes:
        process.kill()
        process.communicate()


def hook(id: str, pid: int, bundle: Path) -> str:
    return json.dumps({"ociVersion": "1.0.2", "id": id, "status": "creating", "pid": pid, "bundle": str(bundle)})


@pytest.fixture
def bundle(node: Any) -> Path:
    path: Path = node.base / "bundle"
    (path / "rootfs").mkdir(parents=True)
    env = ["ALIYUN_COM_GPU_MEM_CONTAINER=1", "ALIYUN_COM_GPU_MEM_DEV=24", "ALIYUN_COM_GPU_SCHD_WEIGHT=3"]
    (path / "config.json").write_text(json.dumps({"process": {"env": env}, "root": {"path": "rootfs"}}))
    return path


@pytest.fixture
def firsts() -> Iterator[dict[str, "subprocess.Popen[bytes]"]]:
    found = {id: subprocess.Popen(["sleep", "100"]) for id in (BEGUN, ENDED)}
    yield found
    for process in found.values():
        process.kill()
        process.wait()


@pytest.mark.parametrize("how", ["killed", "upgraded"])
def test_followed_on(node: Any, ask: Ask, bundle: Path, firsts: dict[str, Any], how: str) -> None:
    """Whether its first process was known or only who makes it; and one whose process ends in between goes."""
    makers = {id: ask("create", id, bundle) for id in (MADE, BEGUN, ENDED)}
    for id, first in firsts.items():
        ask("hook", hook(id, first.pid, bundle))
    for id in firsts:  # a runtime ends once the container is there
        makers[id].kill()
        makers[id].wait()
    held = os.open(node.runtime / "view" / BEGUN / "0" / BEGUN[:12] / "memsize", os.O_RDONLY)
    before = node.read("inst_ctl")
    try:
        if how == "killed":
            node.kill_daemon()
            firsts[ENDED].kill()
            firsts[ENDED].wait()
            node.start()
        else:
            firsts[ENDED].kill()
            firsts[ENDED].wait()
            node.upgrade()
        wait_until(lambda: ENDED not in node.read("inst_ctl"), "the end of the one that ended")
        assert set(node.read("inst_ctl").splitlines()) == {
            line for line in before.splitlines() if not line.startswith(ENDED)}
        assert sorted(os.listdir(node.runtime / "ct")) == sorted([MADE, BEGUN])
        assert os.pread(held, 30, 0) == b"%d\n" % (1 << 30), "its view was open all the time"
        assert sorted(os.listdir(node.runtime / "view")) == sorted([MADE, BEGUN])
        ask("hook", hook(MADE, firsts[BEGUN].pid, bundle))  # made across the change
        node.restart()
        assert MADE in node.read("inst_ctl")
        firsts[BEGUN].kill()
        wait_until(lambda: node.read("inst_ctl") == "", "the end of both")
        assert os.listdir(node.runtime / "ct") == []
    finally:
        os.close(held)


def test_another_process_of_the_same_number(node: Any, ask: Ask, bundle: Path, firsts: dict[str, Any]) -> None:
    """Start times are compared: what got a pid anew is not the container's."""
    ask("create", BEGUN, bundle)
    ask("hook", hook(BEGUN, firsts[BEGUN].pid, bundle))
    node.kill_daemon()
    file = node.runtime / "state.json"
    data = json.loads(file.read_text())
    data["containers"][0]["first"][1] -= 1
    file.write_text(json.dumps(data))
    node.start()
    wait_until(lambda: node.read("inst_ctl") == "", "the container to go")


def test_state_of_another_boot_is_not_taken(node: Any, ask: Ask, bundle: Path) -> None:
    ask("create", BEGUN, bundle)
    node.kill_daemon()
    file = node.runtime / "state.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"boot": "another"}))
    node.start()
    assert node.read("inst_ctl") == "" and os.listdir(node.runtime / "inst") == []
