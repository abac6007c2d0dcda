"""A tenant that writes anything into its report pages: those who do not are served as if it were one who waits.

CGPU_FUZZ_CASES lengthens it, CGPU_FUZZ_SEED has it write something else.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from mutate import CASES, SEED
from node import ROOT, Node, build_c, running_node, wait_until

SECONDS = max(3.0, CASES / 500)

pytestmark = pytest.mark.skipif(os.geteuid() != 0, reason="cgpud needs root")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path, "1x24GiB") as one:
        yield one


def listened_to(node: Node) -> bool:
    bad = next(one for one in node.status()["gpus"][0]["instances"] if one["id"] == "bad")
    return bad["turns"] > 3 and bad["overdue"] > 0


@pytest.mark.timeout(120 + SECONDS * 2)
def test_a_scribbler_and_two_honest_ones_at_one_to_two(node: Node, tmp_path: Path) -> None:
    busy = build_c(ROOT / "demo/busy.c", tmp_path / "busy")
    node.ctl("create", "bad", "--mem", "1GiB")
    for name, weight in (("one", 1), ("two", 2)):
        node.run(name, busy, 500, int(SECONDS) + 100, 64, weight=weight)
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 2, "both to run")
    scribble = [sys.executable, Path(__file__).parent / "scribble.py", node.runtime / "inst/bad/gate.sock", str(SEED)]
    with subprocess.Popen(scribble, stdout=subprocess.PIPE) as bad:
        try:
            assert bad.stdout and bad.stdout.readline() == b"in\n"
            shares = node.shares(SECONDS)
            wait_until(lambda: listened_to(node), "it to be given turns and keep one", 60)
            assert bad.poll() is None
            # cgpu-smi, the tree and a change of plan while it goes on
            assert node.read(0, "bad", "meminfo").startswith("Free: ")
            node.write(1, 0, "two", "weight")
            node.write(2, 0, "two", "weight")
        finally:
            bad.kill()
    assert shares["two"] / shares["one"] == pytest.approx(2, rel=0.15), shares
    assert node.daemon and node.daemon.poll() is None
    log = node.log.read_text()
    assert not [line for line in log.splitlines() if "Traceback" in line or " error " in line], log
    node.ctl("destroy", "bad")
    before, start = node.busy_ns(), time.monotonic_ns()
    time.sleep(1)
    after, passed = node.busy_ns(), time.monotonic_ns() - start
    assert sum(after[name] - before[name] for name in ("one", "two")) > 0.8 * passed, "all is theirs again"
