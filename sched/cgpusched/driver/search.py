"""Looks through a container's root for copies of the driver that lie where no loader looks: /opt/app/lib and the like.

A program that opens one by its path gets past the proxies, so they are covered, too. An image may have 100,000 files,
and its start waits for us: folders near the root come first, and the search ends after FOLDERS_MAX of them or SECONDS.
It does not enter what the engine has mounted, which may be a big or dead network file system: there only the usual
places are looked at, by name. It follows no link; what one leads to in the image is found where it is.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from cgpusched.driver.cover import LIBRARY, resolve
from cgpusched.driver.names import CUDA, NVML

FOLDERS_MAX = 1000
"""About 10 ms where the kernel has them in its cache. Debian's minimal image has fewer, one of PyTorch 20,000."""
SECONDS = 0.05
ENTRIES_MAX = 20_000
"""Of one folder; more are not looked at."""
APART_MAX = 32
"""Mounts of the engine's that are looked at."""
PASSED_OVER = frozenset(("/proc", "/sys", "/dev", "/usr/share", "/usr/include", "/usr/src", "/usr/local/share",
                         "/usr/lib/modules", "/var/cache", "/var/lib/dpkg"))
USUAL = ("", "lib", "lib64", "compat", "lib/x86_64-linux-gnu")
"""Folders below a mount."""


@dataclass(frozen=True)
class Found:
    folders: tuple[Path, ...]
    """Where there are such files, as programs below the root name them."""
    whole: bool
    """It has come to an end."""


def search(root: Path, apart: Collection[Path], ours: Collection[Path] = (), most: int = FOLDERS_MAX,
           seconds: float = SECONDS) -> Found:
    """``apart``: where something is mounted below the root, ``ours`` and others'. Blocks while file systems do."""
    avoided = PASSED_OVER | {str(place) for one in ours if (place := resolve(root, one))}
    mounted = {str(place) for one in apart if (place := resolve(root, one))} - avoided
    found = [place for one in sorted(mounted)[:APART_MAX] for place in _usual(root, Path(one))]
    avoided |= mounted
    until, left = time.monotonic() + seconds, most
    waiting = deque([""])
    while waiting and left and time.monotonic() < until:
        folder = waiting.popleft()
        left -= 1
        below, has_library = _look(f"{root}{folder}")
        if has_library:
            found.append(Path(folder or "/"))
        below = [one for name in below if (one := f"{folder}/{name}") not in avoided]
        waiting += below[: max(left - len(waiting), 0) + 1]  # one too many says that it was not all
    return Found(tuple(found), not waiting)


def _look(folder: str) -> tuple[list[str], bool]:
    """The names of the folders in it, in order, and whether it has a driver library; nothing if it cannot be read."""
    folders, library = [], False
    try:
        with os.scandir(folder) as entries:
            for entry in islice(entries, ENTRIES_MAX):
                if entry.is_dir(follow_symlinks=False):
                    folders.append(entry.name)
                elif entry.name.startswith("lib") and LIBRARY.fullmatch(entry.name):
                    library = True
    except OSError:
        pass
    return sorted(folders), library


def _usual(root: Path, place: Path) -> Iterator[Path]:
    for name in USUAL:
        folder = resolve(root, place / name)
        if folder and any(os.path.lexists(root / folder.relative_to("/") / one) for one in (CUDA, NVML)):
            yield folder
