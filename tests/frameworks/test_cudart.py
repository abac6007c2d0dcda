"""Programs built with nvcc, on the simulated driver with a stand-in cudart; and what the stand-in does not do."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest

HERE = Path(__file__).resolve().parent
GIB = 1 << 30

ABSENT = """
import ctypes
cudart = ctypes.CDLL("libcudart.so.13")
assert cudart.cudaDestroyTextureObject(0) == 801, "a stub answers cudaErrorNotSupported"
"""


def build(toolkit: Path, out: Path, *options: object) -> Path:
    subprocess.run([toolkit / "bin/nvcc", "-arch=sm_90", "-cudadevrt", "none", HERE / "nvcc_program.cu", "-o", out,
                    *map(str, options), "-ldl", "-lpthread"], check=True)
    return out


@pytest.mark.parametrize("linked", ["shared", "none", "shared, a thread's own default stream"])
def test_nvcc(programs: Any, cuda_toolkit: Path, cudart: Path, tmp_path: Path, linked: str) -> None:
    options: list[object] = ["-cudart", "none", cudart.parent / "libcudart_standin.a"]
    if linked != "none":
        options = ["-cudart", "shared", "-L", cudart.parent, "-Xlinker", "-rpath", "-Xlinker", cudart.parent]
    if "own" in linked:
        options += ["--default-stream", "per-thread"]
    done = programs.run(build(cuda_toolkit, tmp_path / "program", *options))
    said = dict(line.split("=", 1) for line in done.stdout.splitlines())
    assert int(said.pop("properties")) == int(said.pop("total")) == GIB
    assert {said.pop(name) for name in ("copied", "symbol", "device_pointer", "filled")} == {"1"}
    for name in ("kernels_ms", "default_ms", "graph_ms"):
        assert float(said.pop(name)) >= 20 * 0.5
    assert said.pop("name")
    assert said == {"capability": "9.0", "managed": "7", "threads": "1024", "oom": "cudaErrorMemoryAllocation",
                    "last": "cudaErrorMemoryAllocation", "leaked": "0"}


def test_nvidias_own_runtime_does_not_start(programs: Any, cuda_toolkit: Path, tmp_path: Path) -> None:
    """It asks for private tables, which the simulated driver does not have. That is why there is a stand-in."""
    program = build(cuda_toolkit, tmp_path / "program", "-cudart", "static", "-L", cuda_toolkit / "lib")
    done = programs.run(program, check=False)
    assert done.returncode == 1 and done.stderr.startswith("cudaGetDeviceProperties")


def test_what_the_stand_in_lacks_it_says(programs: Any, cudart: Path) -> None:
    done = programs.run("python3", "-c", ABSENT, LD_LIBRARY_PATH=str(cudart.parent), CGPU_CUDART_LOG="1")
    assert done.stderr == "the stand-in cudart has no cudaDestroyTextureObject\n"
