"""What the wrappers add to an allocation and a free: bounded, and the same however many blocks are live."""

from __future__ import annotations

import subprocess
from collections.abc import Callable
from pathlib import Path

import pytest

MOST_NS = 300.0
ROUNDS = 11


@pytest.fixture(scope="module")
def added(tmp_path_factory: pytest.TempPathFactory,
          compile_memory: Callable[..., Path]) -> dict[int, tuple[float, float]]:
    """Nanoseconds of CPU added to (alloc, free), by live blocks."""
    folder = tmp_path_factory.mktemp("cost")
    program = compile_memory(folder / "alloc_cost", ["alloc_cost.c", "stub_gate.c", "stub_driver.c"])
    out = subprocess.run([program, folder / "ctl", folder / "report", str(ROUNDS)], check=True, timeout=60, text=True,
                         stdout=subprocess.PIPE).stdout
    return {int(live): (float(alloc), float(free)) for live, alloc, free in (line.split() for line in out.splitlines())}


@pytest.mark.parametrize("live", [10, 4000, 100000])
def test_added_time(added: dict[int, tuple[float, float]], live: int) -> None:
    assert max(added[live]) < MOST_NS, added
