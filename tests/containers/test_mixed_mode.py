"""Mixed mode from the variables to the program: cgpud, cgpu-runtime, and programs with the container's socket."""

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from node import ROOT, Node, build_c, wait_until
from oci import standing_node

ID = "mixed"  # as long as the path of its socket may be
T4 = 15109
NATIVE, SHARED = (0, 1), 2
QUOTA = 6043
ASKS = ["ALIYUN_COM_GPU_MEM_CONTAINER=6", "ALIYUN_COM_GPU_MEM_DEV=15", f"ALIYUN_COM_GPU_VISIBLE_DEVICES={SHARED}",
        "NVIDIA_VISIBLE_DEVICES=0,1,2"]  # fmt: skip
OUT_OF_MEMORY = 2
TOTALS = [T4, T4, QUOTA]


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with standing_node(tmp_path, f"3x{T4}MiB") as one:
        yield one


@pytest.fixture
def container(node: Node) -> Iterator[dict[str, str]]:
    """One that is being made, in mixed mode; the environment of a program in it."""
    bundle = node.base / "bundle"
    bundle.mkdir()
    (bundle / "config.json").write_text(json.dumps({"process": {"env": ASKS}, "root": {"path": "rootfs"}}))
    command = [node.base / "bin/cgpu-runtime", "create", "--bundle", bundle, ID]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.DEVNULL) as runtime:
        wait_until(lambda: node.path(SHARED, ID).exists(), "the container to be registered")
        env = {key: value for key, value in os.environ.items() if not key.startswith(("CUDA_", "CGPU_"))}
        yield env | {"LD_LIBRARY_PATH": str(node.base / "lib"), "CGPU_SIM_DIR": str(node.runtime / "sim"),
                     "CGPU_SOCKET": str(node.runtime / "inst" / ID / "gate.sock")}  # fmt: skip
        assert runtime.stdin is not None
        runtime.stdin.close()
        runtime.wait(20)


class Program:
    """mixed.py."""

    def __init__(self, node: Node, env: dict[str, str]) -> None:
        command = [sys.executable, "-S", str(ROOT / "tests/containers/mixed.py")]
        self.process = subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        node.programs.append(self.process)
        self.sees = self.hear()

    def hear(self) -> Any:
        assert self.process.stdout is not None
        return json.loads(self.process.stdout.readline())

    def tell(self, *words: object) -> None:
        assert self.process.stdin is not None
        print(*words, file=self.process.stdin, flush=True)

    def ask(self, *words: object) -> Any:
        self.tell(*words)
        return self.hear()


def test_what_it_sees(node: Node, container: dict[str, str]) -> None:
    program = Program(node, container)
    assert program.sees == [[total, total] for total in TOTALS]
    smi = build_c(ROOT / "tests/engines/smi.c", node.base / "smi")
    shown = subprocess.run([smi], env=container, capture_output=True, text=True, check=True).stdout
    lines = [line.split() for line in shown.splitlines()]
    assert [(line[0], line[2]) for line in lines if len(line) == 3] == [
        (str(index), str(total)) for index, total in enumerate(TOTALS)]  # fmt: skip
    for own, expected in (("2", [QUOTA]), ("2,0", [QUOTA, T4]), ("1", [T4])):
        assert Program(node, container | {"CUDA_VISIBLE_DEVICES": own}).sees == [[total] * 2 for total in expected]
    (listed,) = json.loads(node.ctl("list", "--json").stdout)
    assert listed["native"] == list(NATIVE) and [one["gpu"] for one in listed["gpus"]] == [SHARED]
    assert not any(node.path(gpu, ID).exists() for gpu in NATIVE)


def test_memory_is_limited_on_the_shared_one_alone(node: Node, container: dict[str, str]) -> None:
    program = Program(node, container)
    for gpu in NATIVE:
        assert program.ask("alloc", gpu, QUOTA + 1000) == ["alloc", gpu, 0]
    assert program.ask("alloc", SHARED, QUOTA + 1) == ["alloc", SHARED, OUT_OF_MEMORY]
    assert program.ask("alloc", SHARED, QUOTA - 43) == ["alloc", SHARED, 0]
    assert program.ask("alloc", NATIVE[0], T4) == ["alloc", NATIVE[0], OUT_OF_MEMORY], "the card's own limit"
    free = int(node.read(SHARED, ID, "meminfo").split()[1])
    assert free == 43 << 20


def test_who_nvidia_smi_lists(node: Node, container: dict[str, str]) -> None:
    """On a native GPU whom the driver lists, another instance's process too; on the shared one nobody."""
    node.run("other", build_c(ROOT / "demo/busy.c", node.base / "busy"), 500, 100, 64, gpu="0")
    program = Program(node, container)
    for gpu in (*NATIVE, SHARED):
        assert program.ask("alloc", gpu, 1) == ["alloc", gpu, 0]
    wait_until(lambda: program.ask("table", 0) == ["table", 0, 2], "both to be listed")
    assert program.ask("table", 1) == ["table", 1, 1]
    assert program.ask("table", SHARED) == ["table", SHARED, 0]


def test_a_paused_instance_computes_on_its_native_ones_alone(node: Node, container: dict[str, str]) -> None:
    node.write(0, SHARED, ID, "weight")
    program = Program(node, container)
    program.tell("launch", SHARED)
    for _ in range(3):
        for gpu in NATIVE:
            assert program.ask("launch", gpu) == ["launch", gpu, 0]
    assert node.busy_ns(SHARED)[ID] == 0
    node.write(1, SHARED, ID, "weight")
    assert program.hear() == ["launch", SHARED, 0]
    wait_until(lambda: node.busy_ns(SHARED)[ID] > 0, "the shared one's time to be charged")


def test_a_program_started_without_a_daemon(node: Node, container: dict[str, str]) -> None:
    node.kill_daemon()
    program = Program(node, container)
    assert program.sees == [[total, total] for total in TOTALS]
    assert program.ask("alloc", SHARED, QUOTA + 1) == ["alloc", SHARED, OUT_OF_MEMORY]
    assert program.ask("alloc", NATIVE[0], QUOTA + 1000) == ["alloc", NATIVE[0], 0]


def test_the_next_daemon_knows_them(node: Node, container: dict[str, str]) -> None:
    before = Program(node, container)
    assert before.ask("launch", SHARED) == ["launch", SHARED, 0]  # from then on it looks for the daemon by itself
    node.kill_daemon()
    node.start()
    assert Program(node, container).sees == [[total, total] for total in TOTALS]
    wait_until(lambda: json.loads(node.ctl("list", "--json").stdout)[0]["processes"] == 2, "the first to be back")
    assert before.ask("launch", SHARED) == ["launch", SHARED, 0]
    assert before.ask("launch", NATIVE[1]) == ["launch", NATIVE[1], 0]
