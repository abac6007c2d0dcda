"""Programs of others in an instance of a daemon of the tests' own, and the stand-in CUDA runtime that some need.

``make test-frameworks-full`` installs them all and sets CGPU_FRAMEWORKS_FULL_PYTHON; ``make test-frameworks`` a part
that is small enough for every change, with nvcc in it (CGPU_FRAMEWORKS_PYTHON).
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from node import BIN, ROOT, Node, running_node

HERE = Path(__file__).resolve().parent
FULL = os.environ.get("CGPU_FRAMEWORKS_FULL_PYTHON", "")
PYTHONS = [python for python in (FULL, os.environ.get("CGPU_FRAMEWORKS_PYTHON", "")) if python]
MEM = 1 << 30
KERNEL_NS = 100_000
DEADLINE = 570  # s; a first run compiles, and a busy machine takes its time


class Programs:
    """Runs programs to their end in instances of 1 GiB."""

    def __init__(self, node: Node, cudart: Path) -> None:
        self.node = node
        self.cudart = cudart

    def run(self, *command: object, before: tuple[object, ...] = (), check: bool = True,
            **env: str) -> subprocess.CompletedProcess[str]:
        """The command in an instance, its kernels taking 100 us; ``before`` goes in front of cgpuctl."""
        options = [BIN / "cgpuctl", "run", "--mem", MEM, "--"]
        done = subprocess.run([*map(str, [*before, *options, *command])], capture_output=True, text=True, check=False,
                              timeout=DEADLINE, env={**self.node.env, "CGPU_SIM_KERNEL_NS": str(KERNEL_NS), **env})
        assert not check or done.returncode == 0, done.stdout + done.stderr
        return done

    def python(self, program: str, before: tuple[object, ...] = (), **env: object) -> dict[str, str]:
        """The key=value lines of a program below this folder. The stand-in is preloaded: PyTorch finds its own
        libcudart.so.13 by DT_RPATH, and a library of that name already loaded is the only thing that comes before."""
        more = {name: str(value) for name, value in env.items()}
        return values(self.run(FULL, HERE / program, before=before, LD_PRELOAD=str(self.cudart), **more).stdout)


def values(text: str) -> dict[str, str]:
    """key=value lines; what else a program printed is left out."""
    return dict(line.split("=", 1) for line in text.splitlines() if "=" in line)


def toolkit() -> Path | None:
    """Where pip put nvcc and the headers, of the first environment that has them."""
    for python in PYTHONS:
        found = subprocess.run([python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))"],
                               capture_output=True, text=True, check=True).stdout.strip()
        if (Path(found) / "nvidia/cu13/bin/nvcc").exists():
            return Path(found) / "nvidia/cu13"
    return None


@pytest.fixture(scope="session")
def cuda_toolkit() -> Path:
    """The folder with bin/nvcc and include/ (from NVIDIA's wheels)."""
    found = toolkit()
    if not found:
        pytest.skip("no nvcc: neither CGPU_FRAMEWORKS_FULL_PYTHON nor CGPU_FRAMEWORKS_PYTHON names a Python with "
                    "nvidia-cuda-nvcc")
    if not shutil.which("g++"):
        pytest.skip("no g++, which nvcc needs")
    return found


@pytest.fixture(scope="session")
def cudart(cuda_toolkit: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The stand-in libcudart.so.13, built against the toolkit's headers (tests/cudart/driver.h says what it is)."""
    out = tmp_path_factory.mktemp("cudart")
    subprocess.run([sys.executable, ROOT / "tests/cudart/build.py", cuda_toolkit / "include", out], check=True)
    return out / "libcudart.so.13"


@pytest.fixture(scope="module")
def programs(cudart: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Programs]:
    with running_node(tmp_path_factory.mktemp("node")) as node:
        yield Programs(node, cudart)


@pytest.fixture(scope="module")
def full(programs: Programs) -> Programs:
    """The same, where PyTorch and JAX are installed."""
    if not FULL:
        pytest.skip("CGPU_FRAMEWORKS_FULL_PYTHON names no Python with PyTorch and JAX (make test-frameworks-full)")
    return programs
