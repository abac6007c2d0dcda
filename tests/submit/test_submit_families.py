"""Every submission there is, in each variant, by its own name, on the simulated driver."""

from __future__ import annotations

import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]


def results(text: str) -> dict[str, int]:
    return {name: int(result) for name, result in re.findall(r"^(\w+) (-?\d+)$", text, re.M)}


def start(build: dict[str, Path], libraries: str, sim: Path, out: Path, **extra: str) -> subprocess.Popen[bytes]:
    env = os.environ | {"LD_LIBRARY_PATH": str(build[libraries]), "CGPU_SIM_DIR": str(sim)} | extra
    with out.open("wb") as file:
        return subprocess.Popen([build["families"]], env=env, stdout=file, stderr=subprocess.STDOUT)


@pytest.fixture
def bare(submit_build: dict[str, Path], sim: Path, tmp_path: Path) -> dict[str, int]:
    """What the driver itself answers to each."""
    out = tmp_path / "bare"
    assert start(submit_build, "bare", sim, out).wait(30) == 0, out.read_text()
    return results(out.read_text())


def test_all_wait_at_a_closed_gate_and_then_answer_as_the_driver_does(
        submit_build: dict[str, Path], sim: Path, bare: dict[str, int], daemon: Any, tmp_path: Path) -> None:
    names = len(bare) - 1  # and "done"
    assert names > 120
    out = tmp_path / "gated"
    program = start(submit_build, "hooked", sim, out, CGPU_SOCKET=str(daemon.path), CGPU_LOG=str(tmp_path / "log"))
    try:
        daemon.until(lambda: daemon.clients and daemon.page.slot(0, "demand") == names)
        assert results(out.read_text()) == {}
        word = daemon.grant()
        assert program.wait(30) == 0
        assert results(out.read_text()) == bare
        assert daemon.page.slot(0, "opened") == word
    finally:
        program.kill()
        program.wait()


def test_without_an_instance_all_pass(submit_build: dict[str, Path], sim: Path, bare: dict[str, int],
                                      tmp_path: Path) -> None:
    out = tmp_path / "free"
    assert start(submit_build, "hooked", sim, out, CGPU_SOCKET=str(tmp_path / "nowhere/gate.sock")).wait(30) == 0
    assert results(out.read_text()) == bare
