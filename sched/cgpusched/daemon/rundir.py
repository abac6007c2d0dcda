"""The runtime folder (/run/cgpud): its lock, and what is left of a predecessor that did not stop cleanly."""

from __future__ import annotations

import errno
import fcntl
import os
import resource
import shutil
import stat
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from pathlib import Path

from cgpusched import files
from cgpusched.errors import UserError

LOOP_STARTS, LOOP_SECONDS = 5, 60.0
"""So many starts without success in so long a time are a loop: what is kept for the next one is given up."""


class AlreadyRunning(UserError):
    exit_code = 3


@contextmanager
def own(runtime: Path, inherited: int | None = None) -> Iterator[int]:
    """Makes the folder and holds its lock, the value; ``AlreadyRunning`` when another cgpud has it.

    ``inherited``: the lock of the program that this process was before; owned from here on.

    The lock is a flock on ``cgpud.lock``: the kernel drops it with the process, so a crash leaves nothing to clean up.
    The file itself stays, since removing it would let two daemons lock two files of one name.
    """
    try:
        files.own_folder(runtime, 0o755)
        fd = os.open(runtime / "cgpud.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
        if inherited is not None:
            if os.path.sameopenfile(fd, inherited):
                fd, inherited = inherited, fd
            os.close(inherited)
        try:
            _lock(fd, runtime)
        except BaseException:
            os.close(fd)
            raise
    except OSError as error:
        raise UserError(f"cannot use the runtime folder {runtime}: {error.strerror}") from None
    try:
        yield fd
    finally:
        os.close(fd)


def _lock(fd: int, runtime: Path) -> None:
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        pid = os.read(fd, 32).decode(errors="replace").strip() or "unknown"
        raise AlreadyRunning(f"another cgpud (pid {pid}) already serves {runtime}") from None
    os.ftruncate(fd, 0)
    os.pwrite(fd, f"{os.getpid()}\n".encode(), 0)


def begin(runtime: Path, clock: Callable[[], float] = time.monotonic) -> bool:
    """Counts this start, until ready(); False when so many before it failed in so short a time that it is a loop."""
    file, now = runtime / "starts", clock()
    try:
        times = [float(word) for word in file.read_text().split()]
    except (OSError, ValueError):
        times = []
    recent = [at for at in times if 0 <= now - at < LOOP_SECONDS]
    try:
        files.replace(file, "".join(f"{at}\n" for at in [*recent, now]).encode(), 0o600)
    except OSError as error:
        raise UserError(f"cannot use the runtime folder {runtime}: {error.strerror}") from None
    return len(recent) < LOOP_STARTS


def ready(runtime: Path) -> None:
    """This start has come to its end."""
    (runtime / "starts").unlink(missing_ok=True)


def clear_instances(runtime: Path, known: Collection[str] = ()) -> int:
    """Removes the instance folders of a predecessor but for the ``known`` ones; gives how many there were.

    Only with the lock held. A folder of a known instance stays the same one: containers have it bound.
    """
    folder = runtime / "inst"
    if folder.is_symlink() or (folder.exists() and not folder.is_dir()):
        raise UserError(f"{folder} is in the way: not a folder")
    try:
        files.own_folder(folder, 0o711)
        aliases = {f".{ident[:12]}" for ident in known}
        stale = [entry for entry in folder.iterdir()
                 if entry.name not in (aliases if entry.is_symlink() else known if entry.is_dir() else ())]
        for entry in stale:
            if entry.is_dir() and not entry.is_symlink():
                shutil.rmtree(entry, ignore_errors=True)
            else:
                entry.unlink(missing_ok=True)
    except OSError as error:
        raise UserError(f"cannot use {folder}: {error.strerror}") from None
    return len(stale)


def check_socket(path: Path) -> bool:
    """Whether there is a socket at ``path``; anything else of that name is an error (EEXIST)."""
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return False
    if not stat.S_ISSOCK(mode):
        raise FileExistsError(errno.EEXIST, "not a socket", str(path))
    return True


def unlink_socket(path: Path) -> None:
    """Removes a socket that nobody serves any more; anything else of that name is an error (EEXIST)."""
    if check_socket(path):
        path.unlink()


def raise_descriptor_limit() -> int:
    """Lifts the soft limit on open files to the hard one; gives the limit that holds.

    An instance may hold 512 connections of two descriptors and one more for each of its GPUs; 1024, the usual soft
    limit, is less than 300 clients need.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
    return hard
