"""Two instances whose kernels on two GPUs wait for each other: real programs, a real daemon, simulated GPUs."""

import os
import subprocess
from pathlib import Path

import pytest
from node import Node, build_c, running_node

from cgpusched.driver.find import packaged

SIM = packaged("sim/libcuda.so.1").parent
PAIRS = Path(__file__).with_name("pairs.c")


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_c(PAIRS, tmp_path_factory.mktemp("bin") / "pairs", f"-L{SIM}", "-l:libcuda.so.1")


def bare(node: Node, pairs: Path, kernel_us: int, threads: int, seconds: float) -> float:
    """Pairs a second of one program that has both GPUs and no gate."""
    env = {**os.environ, "LD_LIBRARY_PATH": str(SIM), "CGPU_SIM_DIR": str(node.runtime / "sim")}
    done = subprocess.run([pairs, str(kernel_us), str(threads), str(seconds)], env=env, capture_output=True, text=True,
                          check=True, timeout=30)
    return int(done.stdout) / seconds


@pytest.mark.parametrize(("kernel_us", "threads"), [(1000, 1), (1000, 2), (10_000, 1)])
def test_two_that_span_two_gpus_keep_most_of_bare_use(tmp_path: Path, pairs: Path, kernel_us: int,
                                                      threads: int) -> None:
    """At least 80 %; neither ever hangs, and none is thrown out for keeping a GPU."""
    with running_node(tmp_path, "2x8GiB") as node:
        alone = bare(node, pairs, kernel_us, threads, 1.5)
        outs = [tmp_path / f"{name}.out" for name in ("first", "second")]
        programs = [node.run(out.stem, pairs, kernel_us, threads, 4, gpu="0,1", out=out) for out in outs]
        assert [program.wait(30) for program in programs] == [0, 0]
        each = [int(out.read_text().split()[-1]) / 4 for out in outs]
        assert sum(each) >= 0.8 * alone, (each, alone)
        assert each[0] == pytest.approx(each[1], rel=0.2)
        assert "overdue" not in node.log.read_text()
