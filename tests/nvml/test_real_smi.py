"""The real nvidia-smi in an instance, on the simulated NVML.

Skipped unless ``CGPU_TEST_REAL_SMI`` is ``download``: that fetches Debian's packages of 535 and 550 (non-free, not ours
to ship) with a package configuration of its own into a temporary folder.
"""

from __future__ import annotations

import os
import re
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import debian
import pytest
from node import Node, wait_until
from nvml_tools import OURS, ask_for_table

MIB = 1 << 20
WANTED = os.environ.get("CGPU_TEST_REAL_SMI", "")
pytestmark = pytest.mark.skipif(WANTED != "download", reason="CGPU_TEST_REAL_SMI is not set to download")


@dataclass
class Downloaded:
    smi: Path
    library: Path

    def run(self, env: dict[str, str], *arguments: str) -> str:
        done = subprocess.run([self.smi, *arguments], env=env, capture_output=True, text=True, timeout=60, check=False)
        assert done.returncode == 0, done.stdout + done.stderr
        return done.stdout


@pytest.fixture(scope="module", params=list(debian.SERIES))
def real(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Downloaded:
    folder = tmp_path_factory.mktemp("nonfree")
    debian.download(request.param, folder, "nvidia-smi", "libnvidia-ml1")
    return Downloaded(folder / "usr/lib/nvidia/current/nvidia-smi",
                      folder / "usr/lib/x86_64-linux-gnu/nvidia/current/libnvidia-ml.so.1")


def query(real: Downloaded, env: dict[str, str], what: str) -> list[list[str]]:
    text = real.run(env, f"--query-{what}", "--format=csv,noheader,nounits")
    return [line.split(", ") for line in text.splitlines()]


def memory_in(shown: str) -> list[tuple[str, str]]:
    """Used and total of each GPU, in MiB."""
    return re.findall(r"(\d+)MiB / +(\d+)MiB", shown)


def test_it_shows_the_quota_and_no_process(node: Node, program: Any, real: Downloaded) -> None:
    shown = node.ctl("run", "--mem", "3GiB", "--", str(real.smi)).stdout
    assert memory_in(shown) == [("0", "3072")] and "No running processes found" in shown

    one, other = program("asked", "--mem", "3GiB", "--gpu", "1"), program("other", "--mem", "2GiB", "--gpu", "1")
    for each, size in ((one, 300), (other, 700)):
        each.ask("cuda")
        each.ask("alloc", size * MIB)
    uuid = one.ask("handles")["all"][0]["uuid"]
    assert real.run(one.env, "-L") == f"GPU 0: cgpufs simulated GPU (UUID: {uuid})\n"
    assert query(real, one.env, "gpu=index,uuid,memory.total,memory.used,memory.free,utilization.gpu") == [
        ["0", uuid, "3072", "300", "2772", "0"]]
    shown = real.run(one.env)
    assert memory_in(shown) == [("300", "3072")] and "No running processes found" in shown
    assert query(real, one.env, "compute-apps=pid,used_memory") == []

    # outside, so that the above means something: all three GPUs and both processes
    host = {**node.env, "CGPU_SIM_DIR": one.env["CGPU_SIM_DIR"],
            "LD_LIBRARY_PATH": str(next(node.base.glob("lib/**/sim/libnvidia-ml.so.1")).parent)}
    assert real.run(host, "-L").count("GPU-") == 3
    assert sorted(query(real, host, "compute-apps=pid,used_memory")) == sorted(
        [[str(one.pid), "300"], [str(other.pid), "700"]])
    assert f"{other.pid}" in real.run(host)


def test_its_utilization_is_the_instances_own(node: Node, program: Any, real: Downloaded) -> None:
    programs = [program(id_, "--mem", "1GiB") for id_ in ("one", "two")]
    for one in programs:
        one.ask("cuda")
        one.ask("spin", 1000)
    wait_until(lambda: all(35 < one.ask("busy")["rates"] < 65 for one in programs), "both to have about half")
    for one in programs:
        shown = int(query(real, one.env, "gpu=utilization.gpu")[0][0])
        assert shown == pytest.approx(one.ask("busy")["rates"], abs=15)


def test_the_real_librarys_table_is_one_that_we_know(node: Node, real: Downloaded, tmp_path: Path) -> None:
    """Its places are replaced and called; nothing can be asked of it without a GPU."""
    told = ask_for_table(node, real.library, {"CGPU_DRIVER_DIR": str(real.library.parent)}, tmp_path / "log")
    assert told == {"result": 0, "words": told["words"], "same_length": True, "changed": OURS, "again": True,
                    "counts": [[0, 0]] * 3, "other": 2, "other_real": 2}
