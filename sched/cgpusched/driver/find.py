"""Finds the node's real driver libraries, and the files that came with this package."""

from __future__ import annotations

import logging
import os
import subprocess
from collections.abc import Iterator
from importlib import resources
from pathlib import Path

from cgpusched.driver import elf, image
from cgpusched.driver.names import CUDA, FOLDERS, NVML
from cgpusched.driver.names import Driver as Driver  # what find_driver() gives is imported from here too
from cgpusched.errors import UserError
from cgpusched.fields import pairs

log = logging.getLogger(__name__)


def packaged(name: str) -> Path:
    """A file built into the package, e.g. ``hook/libcgpu-hook.so.1`` or ``sim/libcuda.so.1``.

    UserError: it is not there (an unbuilt checkout).
    """
    path = Path(str(resources.files("cgpusched"))) / "lib" / name
    if not path.is_file():
        raise UserError(f"{path}: missing; build it first (make, or python build_ffi.py)")
    return path


def find_driver(override: Path | None = None) -> Driver | None:
    """The driver to stand before, or None where the node has none.

    ``override`` (else ``CGPU_DRIVER_DIR``) names the one folder to look in; it may hold the simulated driver.
    Otherwise the loader's cache is asked, then the usual folders are looked at; libraries of ours, the toolkit's stubs
    and libraries for other machines are passed over. UserError: the named folder lacks a library, or holds an unusable
    one.
    """
    named = override or (Path(folder) if (folder := os.environ.get("CGPU_DRIVER_DIR")) else None)
    if named is not None:
        return Driver(_named(named / CUDA), _named(named / NVML))
    cached = _loader_cache()
    cuda = next(_usable(CUDA, cached), None)
    if cuda is None:
        return None
    # the one beside it first: two drivers on one node do not mix
    nvml = next(_usable(NVML, [cuda.parent / NVML, *cached]), None)
    return None if nvml is None else Driver(cuda, nvml)


def is_proxy(path: Path) -> bool:
    """Whether the library is one that this package wrote. UserError: not a readable x86-64 library."""
    return image.HOOK in elf.read(path).needed


def _named(path: Path) -> Path:
    if not path.exists():
        raise UserError(f"{path}: not found (the driver's folder was named explicitly)")
    real = path.resolve()
    if is_proxy(real):
        raise UserError(f"{path}: is a proxy of ours, not the real driver library")
    return real


def _usable(name: str, cached: list[Path]) -> Iterator[Path]:
    """The real files called ``name``, best first."""
    own = Path(str(resources.files("cgpusched"))).resolve()
    seen: set[Path] = set()
    for candidate in [*(path for path in cached if path.name == name), *(folder / name for folder in FOLDERS)]:
        if not candidate.exists():
            continue
        real = candidate.resolve()
        if real in seen or real.is_relative_to(own) or real.parent.name == "stubs":
            continue
        seen.add(real)
        try:
            if is_proxy(real):
                continue
        except UserError as error:
            log.info("driver library passed over %s", pairs(path=candidate, reason=error))
            continue
        yield real


def _loader_cache() -> list[Path]:
    """The driver's libraries in the loader's cache, in its order. Empty where there is no ldconfig or it fails."""
    for command in ("/sbin/ldconfig", "/usr/sbin/ldconfig", "ldconfig"):
        try:
            done = subprocess.run([command, "-p"], capture_output=True, text=True, timeout=10, check=True)
        except (OSError, subprocess.SubprocessError):
            continue
        lines = [line.split(" => ", 1) for line in done.stdout.splitlines() if " => " in line]
        # "\tlibcuda.so.1 (libc6,x86-64) => /usr/lib/x86_64-linux-gnu/libcuda.so.1"
        return [Path(target) for entry, target in lines if entry.split()[0] in (CUDA, NVML) and "x86-64" in entry]
    return []
