"""Folders that nobody else may put things into, and files in them that change as a whole."""

from __future__ import annotations

import os
from pathlib import Path

from cgpusched.errors import UserError


def own_folder(path: Path, mode: int) -> None:
    """Makes the folder if it is missing, and gives it that mode whatever the umask.

    UserError: somebody else owns it, and so could put another file or socket in the place of any of ours. OSError: it
    cannot be made, or is no folder.
    """
    path.mkdir(mode=mode & 0o755, parents=True, exist_ok=True)
    found = path.stat()
    if found.st_uid not in (0, os.geteuid()):
        raise UserError(f"{path}: belongs to uid {found.st_uid}, who could replace what cgpud writes there")
    if found.st_mode & 0o7777 != mode:
        path.chmod(mode)


def replace(path: Path, content: bytes, mode: int, *, sync: bool = False) -> None:
    """Readers see the old file or the new one, never a part; one who has the old one open keeps it.

    No link that somebody may have planted is followed. ``sync``: on the disk before the old one goes. OSError leaves
    the old file.
    """
    fresh = path.with_name(f".{path.name}.{os.getpid()}")
    fresh.unlink(missing_ok=True)
    try:
        fd = os.open(fresh, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        with open(fd, "wb") as file:
            file.write(content)
            file.flush()
            os.fchmod(fd, mode)
            if sync:
                os.fsync(fd)
        fresh.replace(path)
    except BaseException:
        fresh.unlink(missing_ok=True)
        raise
