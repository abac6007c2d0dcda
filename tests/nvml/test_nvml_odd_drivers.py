"""Drivers unlike the simulated one: their private tables, and PIDs that they do not translate for a container."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from node import ROOT, Node, build_c
from nvml_tools import OURS, ask_for_table

MIB = 1 << 20
HERE = Path(__file__).parent


@pytest.fixture
def odd(node: Node, tmp_path: Path) -> Path:
    """A folder with odd_nvml.c as the node's NVML, and the simulated driver beside it."""
    folder = tmp_path / "odd"
    build_c(HERE / "odd_nvml.c", folder / "libnvidia-ml.so.1", "-shared", "-fPIC", f"-I{ROOT}/csrc/abi",
            "-Wl,-soname,libnvidia-ml.so.1")
    (folder / "libcuda.so.1").symlink_to(next(node.base.glob("lib/**/sim/libcuda.so.1")))
    return folder


def test_the_private_table_lists_nobody(node: Node, tmp_path: Path) -> None:
    library = next(node.base.glob("lib/**/sim/libnvidia-ml.so.1"))
    assert ask_for_table(node, library, {}, tmp_path / "log") == {
        "result": 0, "words": 251, "same_length": True, "changed": OURS, "again": True, "counts": [[0, 0]] * 3,
        "other": 2, "other_real": 2}
    assert not (tmp_path / "log").exists()


@pytest.mark.parametrize(("words", "hole", "changed"), [
    (216, 0, OURS),     # as long as must be
    (900, 0, OURS),     # a younger one
    (215, 0, []),       # too short for what we know
    (251, 214, []),     # another layout: what we would replace is not there
])
def test_a_table_that_is_not_as_known_goes_through(node: Node, odd: Path, tmp_path: Path, words: int, hole: int,
                                                   changed: list[int]) -> None:
    env = {"CGPU_DRIVER_DIR": str(odd), "ODD_WORDS": str(words), "ODD_HOLE": str(hole), "ODD_UUID": "-"}
    log = tmp_path / "log"
    told = ask_for_table(node, odd / "libnvidia-ml.so.1", env, log)
    assert (told["words"], told["changed"], told["again"]) == (words, changed, True)
    lines = [line for line in log.read_text().splitlines() if "nvml-private-table" in line]
    # of the table of another id, where this one was replaced
    assert len(lines) == 1 and f"known={int(not changed)}" in lines[0]


def test_a_hosts_pid_is_not_taken_for_a_containers(node: Node, odd: Path, program: Any) -> None:
    """The host's process 1 uses 999 MiB; the container's process 1 is another, and listed with what it was charged."""
    unshare = [str(shutil.which("unshare")), "--pid", "--fork", "--kill-child", "--mount-proc"]
    if unshare[0] == "None" or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot make a PID namespace here")
    uuid = node.status()["gpus"][0]["uuid"]
    options = ("--mem", "2GiB", "--cover", "never")
    driver = ("env", f"CGPU_DRIVER_DIR={odd}", f"ODD_UUID={uuid}")
    inside = program("inside", *options, within=(*driver, f"ODD_PIDS=1:{999 * MIB},42:{500 * MIB}", *unshare))
    second = program("inside-too", *options, within=(*driver, f"ODD_PIDS=42:{500 * MIB}", *unshare))
    for one, size in ((inside, 300), (second, 200)):
        one.ask("cuda")
        one.ask("alloc", size * MIB)
        assert one.pid == 1 and one.ask("list", "nvmlDeviceGetComputeRunningProcesses_v3") == {"1": size * MIB}
    with_context = program("inside-as-well", *options,
                           within=("env", f"CGPU_SIM_CONTEXT_BYTES={100 * MIB}", *driver, f"ODD_PIDS=42:{MIB}",
                                   *unshare))
    with_context.ask("cuda")
    with_context.ask("alloc", 200 * MIB)
    told = with_context.ask("list", "nvmlDeviceGetComputeRunningProcesses_v3")
    assert told == {"1": 300 * MIB}, "what the audit found is the only process's"
    outside = program("outside", *options, within=(*driver, f"ODD_PIDS=1:{999 * MIB}"))
    assert outside.ask("list", "nvmlDeviceGetComputeRunningProcesses_v3") == {}
