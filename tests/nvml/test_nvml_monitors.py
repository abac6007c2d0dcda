"""Unmodified gpustat and nvitop in an instance; needs a Python with them (``make test-frameworks`` makes one)."""

from __future__ import annotations

import json
import os
import re
import subprocess
from pathlib import Path
from typing import Any

import pytest
from node import Node, wait_until

MIB = 1 << 20
PYTHON = os.environ.get("CGPU_FRAMEWORKS_PYTHON", "")
HAVE = bool(PYTHON) and not subprocess.run([PYTHON, "-c", "import gpustat, nvitop"], capture_output=True).returncode
pytestmark = pytest.mark.skipif(not HAVE, reason="CGPU_FRAMEWORKS_PYTHON names no Python with gpustat and nvitop")

NVITOP = """
import json, nvitop
for device in nvitop.Device.all():
    print(json.dumps({"uuid": device.uuid(), "total": device.memory_total(), "used": device.memory_used(),
                      "free": device.memory_free(), "util": device.gpu_utilization(),
                      "processes": {pid: one.gpu_memory() for pid, one in device.processes().items()}}))
"""


@pytest.fixture
def tenants(node: Node, program: Any) -> Any:
    """Two programs of an instance of 3 GiB that compute, and one of another instance, on the second GPU."""
    one = program("shown", "--mem", "3GiB", "--gpu", "1")
    tenants = [one, program(beside=one), program("hidden", "--mem", "2GiB", "--gpu", "1")]
    for each, size in zip(tenants, (300, 500, 700), strict=True):
        each.ask("cuda")
        each.ask("alloc", size * MIB)
        each.ask("spin", 1000)
    wait_until(lambda: 35 < one.ask("busy")["rates"] < 65, "the instance to have half the device")
    return tenants


def run(tenant: Any, *command: str) -> str:
    done = subprocess.run([PYTHON, *command], env=tenant.env | {"TERM": "dumb", "LANG": "C.UTF-8"}, capture_output=True,
                          text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_gpustat(tenants: Any) -> None:
    gpus = json.loads(run(tenants[0], "-m", "gpustat", "--json"))["gpus"]
    assert len(gpus) == 1 and gpus[0]["index"] == 0
    assert (gpus[0]["memory.total"], gpus[0]["memory.used"]) == (3072, 800)
    assert 20 < gpus[0]["utilization.gpu"] < 80
    own = {one.pid: size for one, size in zip(tenants[:2], (300, 500), strict=True)}
    assert {one["pid"]: one["gpu_memory_usage"] for one in gpus[0]["processes"]} == own


def test_nvitop(tenants: Any, tmp_path: Path) -> None:
    (tmp_path / "asks.py").write_text(NVITOP)
    said = [json.loads(line) for line in run(tenants[0], str(tmp_path / "asks.py")).splitlines()]
    assert len(said) == 1 and (said[0]["total"], said[0]["used"], said[0]["free"]) == (
        3072 * MIB, 800 * MIB, (3072 - 800) * MIB)
    assert 20 < said[0]["util"] < 80
    assert said[0]["processes"] == {str(tenants[0].pid): 300 * MIB, str(tenants[1].pid): 500 * MIB}
    shown = run(tenants[0], "-m", "nvitop", "--once")
    assert "800.0MiB / 3072MiB" in shown, shown
    listed = {int(number) for number in re.findall(r"\b\d+\b", shown)}
    assert {tenants[0].pid, tenants[1].pid} <= listed and tenants[2].pid not in listed
