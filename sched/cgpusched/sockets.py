"""Unix socket addresses for paths of any length."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

SUN_PATH = 107
"""Bytes of a path that a socket address holds."""


@contextmanager
def address(path: str | Path) -> Iterator[str]:
    """What bind() and connect() take for ``path``. Where that is too long, its folder is named by a descriptor."""
    text = os.fspath(path)
    if len(os.fsencode(text)) <= SUN_PATH:
        yield text
        return
    folder, name = os.path.split(text)
    fd = os.open(folder or ".", os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{fd}/{name}"
    finally:
        os.close(fd)
