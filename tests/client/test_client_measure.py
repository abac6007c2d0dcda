"""The order that the protocol relies on, and what a launch costs."""

from __future__ import annotations

import os
import statistics
import subprocess
from pathlib import Path
from typing import Any

import pytest

ADDED_NS = 6.0
"""What a launch may cost more than bare, in thread CPU time."""


def litmus(build: dict[str, Path], rounds: int, how: str) -> int:
    run = subprocess.run([str(build["litmus"]), str(rounds), how], capture_output=True, text=True, timeout=100)
    if run.returncode == 77:
        pytest.skip("needs two CPUs and membarrier()")
    return int(run.stdout)


def test_membarrier_orders_the_mark_before_the_look(client_build: dict[str, Path]) -> None:
    assert litmus(client_build, 100_000, "membarrier") == 0


def test_without_it_marks_are_missed(client_build: dict[str, Path]) -> None:
    """Shows that the test above can fail."""
    assert any(litmus(client_build, 2_000_000, "compiler") for _ in range(10))


def cpu_ns(build: dict[str, Path], folder: str, threads: int, daemon: Any) -> float:
    env = dict(os.environ, LD_LIBRARY_PATH=str(build[folder]), CGPU_SOCKET=str(daemon.path))
    out = subprocess.run([str(build["overhead"]), str(threads), "300000", "7"], env=env, check=True, text=True,
                         capture_output=True, timeout=60).stdout
    return max(float(line.split()[3]) for line in out.splitlines())


@pytest.mark.parametrize("threads", [1, 2])
def test_open_gate_costs_little(client_build: dict[str, Path], daemon: Any, threads: int) -> None:
    daemon.grant()
    added = [cpu_ns(client_build, "hooked", threads, daemon) - cpu_ns(client_build, "bare", threads, daemon)
             for _ in range(5)]
    assert statistics.median(added) <= ADDED_NS, added
    assert daemon.page.slot(0, "opened") == daemon.page.grant


def test_no_instance_passes_everything(client_build: dict[str, Path], daemon: Any, tmp_path: Path) -> None:
    env = dict(os.environ, LD_LIBRARY_PATH=str(client_build["hooked"]), CGPU_SOCKET=str(tmp_path / "none" / "sock"))
    out = subprocess.run([str(client_build["overhead"]), "1", "100000", "3"], env=env, check=True, timeout=60,
                         text=True, capture_output=True).stdout
    assert float(out.split()[3]) < 50  # no slow path a launch
    assert daemon.joined == 0
