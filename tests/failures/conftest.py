"""Nodes that come to harm, and programs on a driver that stops where a test wants it."""

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node import ROOT, Node, build_c, running_node, wait_until

sys.path.insert(0, str(Path(__file__).parent))  # for observer.py

GIB = 1 << 30


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_c(ROOT / "demo/busy.c", tmp_path_factory.mktemp("bin") / "busy")


@pytest.fixture(scope="session")
def alloc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_c(ROOT / "tests/e2e/alloc.c", tmp_path_factory.mktemp("bin") / "alloc")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with running_node(tmp_path) as one:
        yield one


@pytest.fixture
def inside(node: Node) -> Callable[..., dict[str, str]]:
    """The environment of a program in that instance."""

    def env(ident: str, **more: str) -> dict[str, str]:
        return {**os.environ, "LD_LIBRARY_PATH": str(node.base / "lib"), "CGPU_SIM_DIR": str(node.runtime / "sim"),
                "CGPU_SOCKET": str(node.runtime / "inst" / ident / "gate.sock"), **more}  # fmt: skip

    return env


@pytest.fixture(scope="session")
def stepped(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """The fake driver of tests/client, which can be made to hang in a launch, and a program that is told what to do."""
    base = tmp_path_factory.mktemp("stepped")
    (base / "driver").mkdir()
    for library in ("cuda", "nvml"):
        name = {"cuda": "libcuda.so.1", "nvml": "libnvidia-ml.so.1"}[library]
        subprocess.run(["gcc", "-O2", "-fPIC", "-shared", "-fvisibility=hidden", f"-I{ROOT}/csrc/abi", "-o",
                        base / "driver" / name, ROOT / f"tests/client/fake{library}.c",
                        f"-Wl,-Bsymbolic,-soname,{name}", "-lpthread"], check=True)  # fmt: skip
    program = build_c(ROOT / "tests/client/steps.c", base / "steps", f"-I{ROOT}/csrc/abi",
                      str(base / "driver/libcuda.so.1"), "-Wl,--allow-shlib-undefined")
    return {"driver": base / "driver", "program": program}


class Steps:
    """One such program in an instance of the node."""

    def __init__(self, node: Node, env: dict[str, str], stepped: dict[str, Path], number: int) -> None:
        uuid = node.status()["gpus"][0]["uuid"].removeprefix("GPU-").replace("-", "")
        self.hang = node.base / f"hang-{number}"
        self.out = node.base / f"steps-{number}.out"
        with open(self.out, "w") as out:
            self.process = subprocess.Popen(
                [stepped["program"]], stdin=subprocess.PIPE, stdout=out, text=True, bufsize=1,
                env={**env, "CGPU_DRIVER_DIR": str(stepped["driver"]), "FAKE_DEVICE": str(node.base / "device"),
                     "FAKE_WHO": str(number), "FAKE_UUID": uuid, "FAKE_HANG": str(self.hang)},
            )  # fmt: skip
        self.number = number
        self.device = node.base / "device"
        wait_until(lambda: self.out.read_text() == "ready\n", "the program to start")

    def tell(self, line: str) -> None:
        assert self.process.stdin
        self.process.stdin.write(line + "\n")

    def launches(self) -> int:
        """Kernels it has submitted so far."""
        place = 64 + 64 + 8 * self.number
        return int.from_bytes(self.device.read_bytes()[place : place + 8], "little")

    def end(self) -> None:
        if self.process.poll() is None:
            self.process.kill()
        self.process.communicate()


@pytest.fixture
def steps(node: Node, inside: Any, stepped: dict[str, Path]) -> Iterator[Callable[[str], Steps]]:
    made: list[Steps] = []

    def begin(ident: str) -> Steps:
        made.append(Steps(node, inside(ident), stepped, len(made)))
        return made[-1]

    yield begin
    for one in made:
        one.end()


@pytest.fixture(scope="session")
def jump(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_c(Path(__file__).with_name("jump.c"), tmp_path_factory.mktemp("jump") / "jump.so", "-fPIC", "-shared")


@pytest.fixture
def clock(jump: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Sets by how many seconds the wall clock of all that is started from now on is ahead."""
    file = tmp_path / "ahead"
    file.write_bytes(bytes(8))
    monkeypatch.setenv("LD_PRELOAD", str(jump))
    monkeypatch.setenv("JUMP_FILE", str(file))

    def set_to(seconds: int) -> None:
        with open(file, "r+b", buffering=0) as open_file:
            open_file.write(seconds.to_bytes(8, "little", signed=True))

    return set_to
