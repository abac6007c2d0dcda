"""The wrappers on the simulated driver: what is charged covers what its NVML shows, whatever a program does."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
UUID = "GPU-a0000001-0203-0405-0607-08090a0b0c0d"  # the stub's card 0


@pytest.mark.parametrize("seed", range(8))
def test_charged_is_at_least_what_the_card_has(memory_library: Path, tmp_path: Path, seed: int) -> None:
    library = tmp_path / "libmemory.so"
    shutil.copy(memory_library, library)
    (tmp_path / "sim.conf").write_text(f"{UUID} {1 << 30} Simulated\n")
    tmp_path.chmod(0o1777)
    env = {name: value for name, value in os.environ.items() if not name.startswith(("CGPU_", "CUDA_"))}
    done = subprocess.run([sys.executable, HERE / "simulated.py", library, tmp_path, str(seed), "1500"], text=True,
                          env=env | {"CGPU_SIM_DIR": str(tmp_path), "CGPU_SIM_CONTEXT_BYTES": str(64 << 20)},
                          capture_output=True, timeout=100)
    assert done.returncode == 0, done.stderr
