"""Real C programs through the proxies on the simulated driver, with the scripted daemon of tests/client."""

from __future__ import annotations

import importlib.util
import os
import shlex
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent

spec = importlib.util.spec_from_file_location("client_conftest", ROOT / "tests/client/conftest.py")
assert spec and spec.loader
client = importlib.util.module_from_spec(spec)
spec.loader.exec_module(client)

client_build = client.client_build  # the strict driver of tests/client, where the simulated one forgives too much
GIB = 1 << 30


@pytest.fixture
def strict(client_build: dict[str, Path], tmp_path: Path) -> Iterator[Callable[..., Any]]:
    """Starts steps.c of tests/client on the strict driver, in the scripted daemon's instance."""
    running: list[Any] = []

    def begin(**extra: str) -> Any:
        running.append(client.Steps(client_build, tmp_path / "gate.sock", tmp_path, 0, **extra))
        return running[-1]

    yield begin
    for one in running:
        one.kill()


@pytest.fixture(scope="session")
def submit_build(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """``bare``, ``hooked``: library folders; ``does``, ``families``: programs."""
    from cgpusched.driver.find import Driver, packaged
    from cgpusched.driver.proxy import install_proxies

    base = tmp_path_factory.mktemp("submit")
    cuda, nvml = packaged("sim/libcuda.so.1"), packaged("sim/libnvidia-ml.so.1")
    hooked = base / "hooked"
    install_proxies(Driver(cuda, nvml), hooked)
    made = {"bare": cuda.parent, "hooked": hooked}
    for name in ("does", "families"):
        made[name] = base / name
        subprocess.run([*shlex.split(os.environ.get("CC", "gcc")), "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra",
                        f"-I{ROOT}/csrc/abi", "-o", str(made[name]), str(HERE / f"{name}.c"), str(cuda),
                        "-Wl,--allow-shlib-undefined", "-lpthread", "-ldl"], check=True)
    return made


@pytest.fixture
def sim(tmp_path: Path) -> Path:
    """The simulated node's folder: two GPUs, with the UUIDs that the scripted daemon names."""
    folder = tmp_path / "sim"
    folder.mkdir()
    (folder / "sim.conf").write_text("".join(
        f"GPU-{byte * 4}-{byte * 2}-{byte * 2}-{byte * 2}-{byte * 6} {8 * GIB} Simulated\n" for byte in ("01", "02")))
    return folder


@pytest.fixture
def daemon(tmp_path: Path) -> Iterator[Any]:
    made = client.Daemon(tmp_path / "gate.sock", gpus=1)
    yield made
    made.close()


@pytest.fixture
def daemon2(tmp_path: Path) -> Iterator[Any]:
    """Of an instance with two GPUs."""
    made = client.Daemon(tmp_path / "gate.sock", gpus=2)
    yield made
    made.close()


@pytest.fixture
def program(submit_build: dict[str, Path], tmp_path: Path, sim: Path) -> Iterator[Callable[..., Any]]:
    """Starts does.c in the scripted daemon's instance."""
    running: list[Any] = []

    def begin(**extra: str) -> Any:
        build = {"hooked": submit_build["hooked"], "steps": submit_build["does"]}
        running.append(client.Steps(build, tmp_path / "gate.sock", tmp_path, 0, CGPU_SIM_DIR=str(sim), **extra))
        return running[-1]

    yield begin
    for one in running:
        one.kill()
