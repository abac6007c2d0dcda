"""Which GPUs the daemon takes, and what it says when it cannot."""

import logging
import stat
import time
from pathlib import Path
from typing import Any

import pytest

from cgpusched.daemon import devices
from cgpusched.driver.find import Driver
from cgpusched.errors import UserError
from cgpusched.model import Gpu
from cgpusched.units import uuid_bytes

GIB = 1 << 30


@pytest.fixture(autouse=True)
def unbuilt(monkeypatch: Any, tmp_path: Path) -> None:
    """The simulated driver's files need not be built for these."""
    monkeypatch.setattr(devices, "packaged", lambda name: tmp_path / name)


def nowhere(folder: Path | None) -> Driver | None:
    return None


async def test_no_driver_means_one_simulated_gpu_said_loudly(tmp_path: Path, caplog: Any) -> None:
    found = await devices.discover(tmp_path, find=nowhere)
    assert [(gpu.index, gpu.memory, gpu.simulated, gpu.major) for gpu in found.gpus] == [(0, 24 * GIB, True, 0)]
    assert found.sim_dir == tmp_path / "sim" and found.driver.cuda.name == "libcuda.so.1"
    (line,) = [record for record in caplog.records if "SIMULATED" in record.message]
    assert line.levelno == logging.WARNING and 'reason="no NVIDIA driver found"' in line.message


async def test_asked_to_simulate_no_driver_is_looked_for(tmp_path: Path, caplog: Any) -> None:
    def bomb(folder: Path | None) -> Driver | None:
        raise AssertionError("looked")

    found = await devices.discover(tmp_path, (24 * GIB, 8 * GIB), find=bomb)
    assert [gpu.memory for gpu in found.gpus] == [24 * GIB, 8 * GIB]
    assert len({uuid_bytes(gpu.uuid) for gpu in found.gpus}) == 2
    assert [gpu.uuid for gpu in found.gpus] == [gpu.uuid for gpu in devices.simulated_gpus((1, 2))]
    assert 'reason="asked to simulate"' in caplog.text


async def test_the_simulations_file(tmp_path: Path) -> None:
    found = await devices.discover(tmp_path, (GIB, 2 * GIB), find=nowhere)
    folder = tmp_path / "sim"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o1777
    conf = folder / "sim.conf"
    assert stat.S_IMODE(conf.stat().st_mode) == 0o644
    lines = [line for line in conf.read_text().splitlines() if not line.startswith("#")]
    assert lines == [f"{gpu.uuid} {gpu.memory} {gpu.name}" for gpu in found.gpus]
    assert [path.name for path in folder.iterdir()] == ["sim.conf"]


async def test_simulate_off_without_a_driver_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="no NVIDIA driver found, and simulate is off"):
        await devices.discover(tmp_path, (), find=nowhere)
    assert not (tmp_path / "sim").exists()


async def test_real_gpus(tmp_path: Path, monkeypatch: Any) -> None:
    driver = Driver(Path("/real/libcuda.so.1"), Path("/real/libnvidia-ml.so.1"))
    gpu = Gpu(0, "GPU-00000000-1111-2222-3333-444444444444", "A10", 23 * GIB, 195)
    asked: list[Path] = []
    monkeypatch.setattr(devices, "nvml_gpus", lambda path: asked.append(path) or (gpu,))
    found = await devices.discover(tmp_path, find=lambda folder: driver)
    assert found == devices.Devices((gpu,), driver, None) and asked == [driver.nvml]


async def test_a_driver_without_gpus_is_no_missing_driver(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(devices, "nvml_gpus", lambda path: ())
    with pytest.raises(UserError, match="lists no GPU"):
        await devices.discover(tmp_path, find=lambda folder: Driver(Path("/a"), Path("/b")))


async def test_a_hanging_nvml_is_given_up_on() -> None:
    with pytest.raises(UserError, match="did not answer within 0 s: the NVIDIA driver hangs"):
        await devices.blocking(time.sleep, 0.5, seconds=0.05)


def test_a_library_that_cannot_be_loaded(tmp_path: Path) -> None:
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_bytes(b"not ELF")
    with pytest.raises(UserError, match="cannot load .*libnvidia-ml.so.1"):
        devices.nvml_gpus(broken)


@pytest.mark.parametrize(("text", "major"), [
    ("Character devices:\n  1 mem\n195 nvidia\n510 nvidia-uvm\n\nBlock devices:\n  8 sd\n", 195),
    ("Character devices:\n195 nvidia-frontend\n", 195),
    ("Character devices:\n510 nvidia-uvm\n\nBlock devices:\n195 nvidia\n", 0), ("", 0),
])  # fmt: skip
def test_major(tmp_path: Path, text: str, major: int) -> None:
    file = tmp_path / "devices"
    file.write_text(text)
    assert devices.device_major(str(file)) == major
    assert devices.device_major(str(tmp_path / "none")) == 0
