"""Covers the driver's own files with the proxies, so that a path leads no program past them.

``LD_LIBRARY_PATH`` is only asked by who looks a library up by its name. A program that opens the driver by its path,
that has a RUNPATH or that clears the variable gets past it; one whose mount namespace has the proxies mounted over the
driver's files does not. ``plan()`` says which mounts that takes, for the node itself or for a container's root;
``enter()`` makes them, for the calling process and its children alone.

Which files: those called libcuda.so* and libnvidia-ml.so* in every folder the loader, or a program that knows its
driver, could look in. A copy of the driver in any other folder stays a way past. So does one for another machine
(32-bit), and the toolkit's stubs stay what they are: they lead nowhere.
"""

from __future__ import annotations

import ctypes
import fnmatch
import os
import re
import stat
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from cgpusched.driver import inside
from cgpusched.driver.names import CUDA, FOLDERS, NVML, REAL, Driver

LIBRARY = re.compile(r"(libcuda|libnvidia-ml)\.so(\.[0-9.]+)?")
PATTERNS = ("usr/local/cuda*/compat", "usr/local/cuda*/compat/lib*", "opt/cuda*/compat",
            "usr/lib/x86_64-linux-gnu/nvidia/*", "usr/lib/nvidia*")
"""More folders: forward compatibility packages, NVIDIA's images; the driver branches of Debian and Ubuntu."""
CACHE = Path("/etc/ld.so.cache")
CACHE_MAX = 16 << 20
"""Bytes of it that are looked through; a big distribution's has 200 KiB."""
SOCK = "sock"
LINKS = 40  # the kernel's own limit

_CLONE_NEWNS = 0x20000
_MS_NOSUID, _MS_NODEV, _MS_NOEXEC, _MS_BIND, _MS_REC, _MS_SLAVE = 2, 4, 8, 4096, 16384, 1 << 19
_libc = ctypes.CDLL(None, use_errno=True)


@dataclass(frozen=True)
class Bind:
    """A file to mount at a place. ``source`` is the node's path, ``target`` as programs below the root see it."""

    source: Path
    target: Path


def installed(lib: Path) -> Driver | None:
    """The real files behind the proxies in ``lib``; None where those are covered already.

    FileNotFoundError: proxies of a version that made no such links, or none.
    """
    links = [lib / REAL / name for name in (CUDA, NVML)]
    if all(stat.S_ISREG(os.lstat(link).st_mode) for link in links):
        return None
    return Driver(*(Path(os.readlink(link)) for link in links))


def plan(lib: Path, driver: Driver, place: Path | None = None, root: Path = Path("/"),
         more: tuple[Path, ...] = ()) -> list[Bind]:
    """What to mount, in that order: the real files at ``place/real``, then the proxies in ``lib`` over all there are.

    ``place``: the hook's folder as programs see it, ``lib`` itself on the node. ``root``: the tree to look through; no
    link in it leads out of it. ``more``: further folders, below the root. Folders that cannot be read are passed over.
    """
    place = place or lib
    binds = [Bind(driver.cuda, place / REAL / CUDA), Bind(driver.nvml, place / REAL / NVML)]
    ours = {_identity(lib / CUDA), _identity(lib / NVML)}
    seen: set[Path] = set()
    for folder in (driver.cuda.parent, driver.nvml.parent, *more, *_cached(root), *FOLDERS, *_matching(root)):
        for name in filter(LIBRARY.fullmatch, _names(root, folder)):
            target = resolve(root, folder / name)
            if target is None or target in seen or target.parent.name == "stubs" or target.is_relative_to(place / REAL):
                continue
            seen.add(target)
            if _identity(_inside(root, target)) not in ours and _is_library(root, target):
                binds.append(Bind(lib / (NVML if name.startswith("libnvidia") else CUDA), target))
    return binds


def resolve(root: Path, path: Path) -> Path | None:
    """What ``path`` names for a process whose root is ``root``, without links; None where a link leads in circles.

    It need not exist. For a hostile root too: no link or ``..`` leads out of it.
    """
    rest = list(reversed(path.parts[1:]))
    done: list[str] = []
    links = 0
    while rest:
        part = rest.pop()
        if part == "..":
            done[-1:] = []
            continue
        try:
            to = os.readlink(root.joinpath(*done, part))
        except OSError:
            done.append(part)
            continue
        links += 1
        if links > LINKS:
            return None
        if to.startswith("/"):
            done = []
        rest += [piece for piece in reversed(to.split("/")) if piece not in ("", ".")]
    return Path("/", *done)


def _cached(root: Path) -> Iterator[Path]:
    """The folders that the loader's cache names for the two libraries."""
    file = resolve(root, CACHE)
    content = _head(root, file, CACHE_MAX) if file else b""
    # Its paths are NUL-terminated strings in every format there has been.
    for path in re.findall(rb"/[^\0]*/lib(?:cuda|nvidia-ml)\.so[^\0/]*(?=\0)", content):
        yield Path(os.fsdecode(path)).parent


def _matching(root: Path) -> Iterator[Path]:
    """PATTERNS, expanded. Not Path.glob(): it would follow links out of the root."""
    for pattern in PATTERNS:
        folders = [Path("/")]
        for part in pattern.split("/"):
            folders = [folder / name for folder in folders
                       for name in (fnmatch.filter(_names(root, folder), part) if "*" in part else [part])]
        yield from folders


def _names(root: Path, folder: Path) -> list[str]:
    """What is in the folder; nothing where it cannot be read."""
    found = resolve(root, folder)
    try:
        return sorted(os.listdir(_inside(root, found))) if found else []
    except OSError:
        return []


def _inside(root: Path, path: Path) -> Path:
    return root / path.relative_to("/")


def _identity(path: Path) -> tuple[int, int] | None:
    try:
        found = os.lstat(path)
    except OSError:
        return None
    return found.st_dev, found.st_ino


def _is_library(root: Path, path: Path) -> bool:
    """Whether it is a file that the loader would take: ELF, 64 bits, little-endian, shared, x86-64."""
    head = _head(root, path, 20)
    return head[:6] == b"\x7fELF\x02\x01" and head[16:20] == b"\x03\x00\x3e\x00"


def _head(root: Path, path: Path, size: int) -> bytes:
    """The beginning of a file; nothing of what is none, or cannot be read."""
    try:
        return inside.read(root, path, size)
    except OSError:
        return b""


def enter(binds: list[Bind], place: Path, inst: Path) -> None:
    """Gives this process a mount namespace of its own, with ``binds`` made in it; only children get it too.

    ``inst``: its instance's folder, which the hook finds at ``place/real/sock`` where the environment does not name it.

    What the node mounts later still arrives where its root is shared, as systemd has it; nothing goes back. Only for a
    process with one thread. PermissionError: it may not (needs CAP_SYS_ADMIN), and nothing has changed. OSError: a
    mount failed; the namespace may have some of them.
    """
    if _libc.unshare(_CLONE_NEWNS):
        raise _error("unshare")
    _mount(None, Path("/"), None, _MS_SLAVE | _MS_REC)
    real = place / REAL
    _mount("tmpfs", real, "tmpfs", _MS_NOSUID | _MS_NODEV | _MS_NOEXEC, "size=64k,mode=755")
    for bind in binds:
        if bind.target.parent == real:
            bind.target.touch(0o644)
        _mount(str(bind.source), bind.target, None, _MS_BIND)
    (real / SOCK).mkdir(0o755)
    _mount(str(inst), real / SOCK, None, _MS_BIND)


def _mount(source: str | None, target: Path, kind: str | None, flags: int, data: str | None = None) -> None:
    words = [None if word is None else os.fsencode(word) for word in (source, str(target), kind, data)]
    if _libc.mount(words[0], words[1], words[2], ctypes.c_ulong(flags), words[3]):
        raise _error(str(target))


def _error(what: str) -> OSError:
    number = ctypes.get_errno()
    return OSError(number, os.strerror(number), what)
