"""Unmodified numba-cuda and cuda-bindings in an instance; needs what `make test-frameworks` installs."""

import os
from pathlib import Path

import pytest
from node import ROOT, Node, wait_until

GIB = 1 << 30
PYTHON = os.environ.get("CGPU_FRAMEWORKS_PYTHON", "")
PROGRAMS = ROOT / "tests/frameworks"
FRAMEWORKS = pytest.mark.skipif(not PYTHON, reason="CGPU_FRAMEWORKS_PYTHON names no Python with numba-cuda")

TOO_MUCH = """
from numba import cuda
import numpy as np
free, total = cuda.current_context().get_memory_info()
print(total)
try:
    cuda.device_array(int(1.1 * (1 << 30)), np.uint8)
except cuda.cudadrv.driver.CudaAPIError as error:
    print(error)
"""


def run(node: Node, *command: str) -> str:
    done = node.ctl("run", "--mem", "1GiB", "--", PYTHON, *command)
    return str(done.stdout)


@FRAMEWORKS
def test_numba_is_told_its_quota_and_cudas_out_of_memory_beyond_it(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "numba_quota.py"
    script.write_text(TOO_MUCH)
    total, error = run(node, str(script)).splitlines()
    assert int(total) == GIB
    assert "CUDA_ERROR_OUT_OF_MEMORY" in error


@FRAMEWORKS
@pytest.mark.parametrize("program", ["numba_program.py", "bindings_program.py"])
def test_whole_programs_run_in_an_instance(node: Node, program: str) -> None:
    answers = dict(line.split("=", 1) for line in run(node, str(PROGRAMS / program)).splitlines())
    assert int(answers["total"]) == GIB and "OUT_OF_MEMORY" in answers["oom"]


@FRAMEWORKS
def test_two_numba_programs_share_by_weight(node: Node, tmp_path: Path) -> None:
    script = tmp_path / "busy.py"
    script.write_text("from numba import cuda\nimport time\n"
                      "@cuda.jit('void()')\ndef spin_us500(): pass\n"
                      "end = time.monotonic() + 60\n"
                      "while time.monotonic() < end:\n"
                      "    for _ in range(20): spin_us500[1, 1]()\n"
                      "    cuda.synchronize()\n")
    for id_, weight in (("light", 1), ("heavy", 3)):
        node.run(id_, PYTHON, script, weight=weight)
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 2, "both to run", 60)
    shares = node.shares(3)
    assert shares["heavy"] / shares["light"] == pytest.approx(3, rel=0.2)
