"""What an installed package holds: everything, and nothing of the checkout."""

import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from node import ROOT

LIBRARIES = {
    "cgpusched/_gate.abi3.so", "cgpusched/lib/hook/libcgpu-hook.so.1", "cgpusched/lib/sim/libcuda.so.1",
    "cgpusched/lib/sim/libnvidia-ml.so.1", "cgpusched/lib/bin/cgpu-runtime",
    "cgpusched/lib/hook/libcgpu-preload.so.1", "cgpusched/lib/systemd/cgpud.service",
}
COMMANDS = {"cgpud", "cgpuctl", "cgpu-smi"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("wheel")
    done = subprocess.run([sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation",
                           "--no-index", "--wheel-dir", out, f"{ROOT}/"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    (made,) = out.glob("*.whl")
    return made


def test_the_wheel_holds_every_library_and_command(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        names = set(archive.namelist())
        entry = next(name for name in names if name.endswith("entry_points.txt"))
        commands = {line.split("=")[0].strip() for line in archive.read(entry).decode().splitlines() if "=" in line}
    assert names >= LIBRARIES
    assert commands == COMMANDS
    assert "abi3" in wheel.name and "linux" in wheel.name
    assert {"cgpufs/py.typed", "cgpusched/py.typed", "cgpusched/_gate.pyi"} <= names
    assert not [name for name in names if name.startswith(("tests/", "csrc/", "sched/", "build"))]


def test_an_installed_wheel_finds_its_libraries(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(tmp_path)
    script = ("import sys; sys.path.insert(0, sys.argv[1])\n"
              "import cgpusched._gate, cgpufs.ops\n"
              "from cgpusched.driver.find import packaged\n"
              "for name in ('hook/libcgpu-hook.so.1', 'sim/libcuda.so.1'): print(packaged(name))\n"
              "print(cgpusched._gate.__file__)")
    done = subprocess.run([sys.executable, "-c", script, tmp_path], capture_output=True, text=True, check=True,
                          cwd=tmp_path)
    assert all(line.startswith(f"{tmp_path}/cgpusched/") for line in done.stdout.splitlines()), done.stdout
