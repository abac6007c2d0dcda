"""Unmodified programs of others on the simulated driver. Needs a Python with them (``make test-frameworks`` makes one):

    python3 -m venv DIR
    DIR/bin/pip install 'numba-cuda==0.30.4' cuda-bindings 'nvidia-nvvm==13.*' 'nvidia-cuda-nvrtc==13.*'
    CGPU_FRAMEWORKS_PYTHON=DIR/bin/python pytest tests/frameworks

(About 220 MB, no single download over 75 MB; no cudart is needed: numba-cuda finds the driver through cuda-bindings.)
"""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LIBRARIES = Path(os.environ.get("CGPU_SIM_LIB", HERE.parents[1] / "sched/cgpusched/lib/sim"))
PYTHON = os.environ.get("CGPU_FRAMEWORKS_PYTHON", "")
GIB = 1 << 30

pytestmark = pytest.mark.skipif(not PYTHON,
                                reason="CGPU_FRAMEWORKS_PYTHON names no Python with numba-cuda and cuda-bindings")


def run(program: str, folder: Path) -> dict[str, str]:
    (folder / "sim.conf").write_text(f"GPU-11111111-2222-3333-4444-555555555555 {GIB} Simulated GPU for frameworks\n")
    env = os.environ | {"CGPU_SIM_DIR": str(folder), "LD_LIBRARY_PATH": str(LIBRARIES), "CGPU_SIM_KERNEL_NS": "100000"}
    done = subprocess.run([PYTHON, str(HERE / program)], env=env, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(line.split("=", 1) for line in done.stdout.splitlines())


def test_numba(tmp_path: Path) -> None:
    said = run("numba_program.py", tmp_path)
    assert 10.0 <= float(said["kernel_ms"]) < 20.0  # 100 kernels of 100 us; numba takes time to launch
    assert int(said["total"]) == GIB and GIB - int(said["free"]) >= 3 * (4 << 20)
    assert "Simulated GPU for frameworks" in said["name"]
    assert "CUDA_ERROR_OUT_OF_MEMORY" in said["oom"]


def test_cuda_bindings(tmp_path: Path) -> None:
    said = run("bindings_program.py", tmp_path)
    assert float(said["kernels_ms"]) == pytest.approx(10.0, abs=2.0)
    assert float(said["graph_ms"]) == pytest.approx(2.0, abs=0.5)
    assert float(said["green_ms"]) == pytest.approx(2.0, abs=0.5) and said["green_sms"] == "32"
    assert said["copied"] == "True"
    assert said["free"] == said["total"] == str(GIB)
    assert said["oom"] == "CUDA_ERROR_OUT_OF_MEMORY"
