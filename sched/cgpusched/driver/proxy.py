"""Writes the proxies that programs load in place of the node's driver libraries. No compiler is needed.

A proxy exports exactly the function names (and versions) of the real library it was made from: a name too many would
make programs that probe for it take a wrong turn, a missing one would stop them from starting.
"""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from cgpusched import files
from cgpusched.driver import elf, image
from cgpusched.driver.find import packaged
from cgpusched.driver.names import CUDA, NVML, REAL, Driver
from cgpusched.errors import UserError

MODE = 0o755


def write_proxy(real: Path, soname: str, hook_folder: Path | None = None) -> bytes:
    """The proxy for the library ``real``. ``soname`` says which one it is (libcuda.so.1 or libnvidia-ml.so.1).

    ``hook_folder``: where the loader looks for the hook when it is not beside the proxy. UserError: not a usable x86-64
    library, exports nothing, or is itself a proxy of ours.
    """
    kind = {CUDA: image.Kind.CUDA, NVML: image.Kind.NVML}[soname]
    library = elf.read(real)
    if image.HOOK in library.needed:
        raise UserError(f"{real}: is a proxy of ours, not the real driver library")
    if not library.functions:
        raise UserError(f"{real}: exports no functions")
    if any(export.name == image.BIND for export in library.functions):
        raise UserError(f"{real}: is our hook library, not a driver library")
    runpath = f"{image.RUNPATH}:{hook_folder}" if hook_folder else image.RUNPATH
    return image.render(library, kind, library.soname or soname, runpath)


def install_proxies(driver: Driver, out: Path, hook: Path | None = None) -> None:
    """Writes libcuda.so.1 and libnvidia-ml.so.1 into the folder ``out``, with libcgpu-hook.so.1 and ``real/`` beside.

    Each file is replaced as a whole, by rename, and left alone (same inode) when it would not change: programs that
    have it open go on with what they have. ``hook``: the library to copy instead of the packaged one. UserError: a
    library cannot be read, or the folder cannot be written or executed from, or is somebody else's.
    """
    hook = hook or packaged("hook/" + image.HOOK)
    folder = out.absolute()
    made = {CUDA: write_proxy(driver.cuda, CUDA, folder), NVML: write_proxy(driver.nvml, NVML, folder)}
    try:
        files.own_folder(out, 0o755)
        files.own_folder(out / REAL, 0o755)
        if os.statvfs(out).f_flag & os.ST_NOEXEC:
            raise UserError(f"{out}: on a file system that is mounted noexec: programs could not load the libraries")
        if (out / REAL).is_mount():
            raise UserError(f"{out / REAL}: is a mount: we are inside a `cgpuctl run`; start cgpud outside of it")
        _link(out / REAL / CUDA, driver.cuda)
        _link(out / REAL / NVML, driver.nvml)
        _replace(out / image.HOOK, hook.read_bytes())  # before the proxies: without it programs would not start
        for name, content in made.items():
            _replace(out / name, content)
    except OSError as error:
        raise UserError(f"{error.filename or out}: cannot be written: {error.strerror}") from None


def install_simulated(driver: Driver, out: Path) -> Driver:
    """Copies the simulated driver into ``out``, and gives it there.

    Where the package lies, root's home for one, other users' programs may not be able to read it. UserError as above.
    """
    copies = Driver(cuda=out / CUDA, nvml=out / NVML)
    try:
        files.own_folder(out, 0o755)
        _replace(copies.cuda, driver.cuda.read_bytes())
        _replace(copies.nvml, driver.nvml.read_bytes())
    except OSError as error:
        raise UserError(f"{error.filename or out}: cannot be written: {error.strerror}") from None
    return copies


def _replace(path: Path, content: bytes) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.stat().st_mode & 0o7777 == MODE and path.read_bytes() == content:
            return
    files.replace(path, content, MODE, sync=True)


def _link(path: Path, target: Path) -> None:
    """Makes ``path`` a symbolic link to ``target``, as a whole like files.replace()."""
    if path.is_symlink() and path.readlink() == target:
        return
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    fresh.symlink_to(target)
    fresh.replace(path)
