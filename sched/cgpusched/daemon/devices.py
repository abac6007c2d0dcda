"""Which GPUs there are: NVML's, or the simulated device's where the node has no NVIDIA driver (or when asked to)."""

from __future__ import annotations

import ctypes
import logging
import os
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import trio

from cgpusched import files
from cgpusched.driver.find import Driver, find_driver, packaged
from cgpusched.errors import UserError
from cgpusched.fields import pairs
from cgpusched.model import Gpu
from cgpusched.units import format_size

log = logging.getLogger(__name__)

SIM_NAME = "cgpufs simulated GPU"
SIM_DEFAULT = (24 << 30,)
NVML_SECONDS = 60.0
"""A driver that wakes a card may take many seconds (no persistence daemon); one that takes longer hangs."""

_find_limiter = trio.CapacityLimiter(1)
_nvml_limiter = trio.CapacityLimiter(1)
"""NVML serialises inside; calls that hang must not pile up in threads."""


@dataclass(frozen=True)
class Devices:
    gpus: tuple[Gpu, ...]
    driver: Driver
    """The libraries that the proxies stand before: the node's own or the simulated ones."""
    sim_dir: Path | None
    """The simulated device's shared state; None = real GPUs."""


async def discover(
    runtime: Path,
    simulate: Sequence[int] | None = None,
    driver_dir: Path | None = None,
    find: Callable[[Path | None], Driver | None] = find_driver,
) -> Devices:
    """Finds the GPUs. ``simulate``: bytes of each GPU to simulate; empty = never; None = only where there is no driver.

    Raises UserError when a driver is there and does not work: a broken driver is not taken for a missing one.
    """
    driver = None if simulate else await trio.to_thread.run_sync(find, driver_dir, limiter=_find_limiter)
    if driver is not None:
        gpus = await blocking(nvml_gpus, driver.nvml)
        if not gpus:
            raise UserError(f"the NVIDIA driver ({driver.nvml}) lists no GPU (--simulate 1x24GiB simulates one)")
        return Devices(gpus, driver, None)
    if simulate is not None and not simulate:
        raise UserError("no NVIDIA driver found, and simulate is off")
    gpus = simulated_gpus(simulate or SIM_DEFAULT)
    sim_dir = write_simulation(runtime, gpus)
    log.warning("SIMULATED DEVICE: no kernel runs here, and no figure is a real GPU's %s", pairs(
        reason="asked to simulate" if simulate else "no NVIDIA driver found",
        gpus=len(gpus), memory=",".join(format_size(gpu.memory) for gpu in gpus), state=sim_dir,
    ))  # fmt: skip
    return Devices(gpus, Driver(cuda=packaged("sim/libcuda.so.1"), nvml=packaged("sim/libnvidia-ml.so.1")), sim_dir)


async def blocking(
    call: Callable[..., Any],
    *arguments: object,
    seconds: float = NVML_SECONDS,
    limiter: trio.CapacityLimiter = _nvml_limiter,
) -> Any:
    """An NVML call in a thread. UserError when it does not come back: the thread is then left behind, hanging."""
    with trio.move_on_after(seconds):
        return await trio.to_thread.run_sync(call, *arguments, abandon_on_cancel=True, limiter=limiter)
    raise UserError(f"NVML did not answer within {seconds:.0f} s: the NVIDIA driver hangs (see dmesg)")


def load_nvml(library: Path) -> Any:
    """The module pynvml over this library. Blocks. UserError: it cannot be loaded."""
    # pynvml loads by name. The loader answers a name with the library already loaded under that SONAME, so this one is
    # taken whatever LD_LIBRARY_PATH says (it may lead to our own proxies).
    try:
        ctypes.CDLL(str(library), mode=os.RTLD_NOW | os.RTLD_GLOBAL)
        import pynvml
    except OSError as error:
        raise UserError(f"cannot load {library}: {error}") from None
    return pynvml


def nvml_gpus(library: Path) -> tuple[Gpu, ...]:
    """The cards as NVML numbers them. Blocks."""
    pynvml = load_nvml(library)
    major = device_major()
    try:
        pynvml.nvmlInit()
        gpus = []
        for index in range(pynvml.nvmlDeviceGetCount()):
            handle = pynvml.nvmlDeviceGetHandleByIndex(index)
            gpus.append(Gpu(
                index, _text(pynvml.nvmlDeviceGetUUID(handle)), _text(pynvml.nvmlDeviceGetName(handle)),
                int(pynvml.nvmlDeviceGetMemoryInfo(handle).total), major,
            ))  # fmt: skip
        return tuple(gpus)
    except pynvml.NVMLError as error:
        raise UserError(f"NVML ({library}) failed: {error} (--simulate 1x24GiB runs on a simulated GPU)") from None


def _text(value: str | bytes) -> str:
    return value.decode() if isinstance(value, bytes) else value


def device_major(devices: str = "/proc/devices") -> int:
    """The major number of NVIDIA's character devices; 0 when the kernel lists none."""
    try:
        lines = Path(devices).read_text().partition("Block devices:")[0].splitlines()
    except OSError:
        return 0
    for line in lines:
        number, _, name = line.strip().partition(" ")
        if name in ("nvidia", "nvidia-frontend") and number.isdigit():
            return int(number)
    return 0


def simulated_gpus(sizes: Sequence[int]) -> tuple[Gpu, ...]:
    """Cards of those sizes in bytes. Their UUIDs are the same at every start: programs may have noted them."""
    return tuple(
        Gpu(index, f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{index}.simulated.cgpufs')}", SIM_NAME, size, simulated=True)
        for index, size in enumerate(sizes)
    )


def write_simulation(runtime: Path, gpus: Sequence[Gpu]) -> Path:
    """Writes ``sim/sim.conf``, which tells the simulated driver what to be, and gives the folder.

    Programs of any user make their shared state in that folder, so it has the mode of /tmp.
    """
    folder, text = runtime / "sim", "".join(f"{gpu.uuid} {gpu.memory} {gpu.name}\n" for gpu in gpus)
    try:
        # Opened to all only when our file is there: from then on nobody else can take its name.
        files.own_folder(folder, 0o1777 if (folder / "sim.conf").is_file() else 0o755)
        files.replace(folder / "sim.conf", b"# UUID BYTES NAME\n" + text.encode(), 0o644)
        files.own_folder(folder, 0o1777)
    except OSError as error:
        raise UserError(f"cannot write the simulated device's {folder}: {error.strerror}") from None
    return folder
