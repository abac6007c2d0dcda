"""What /proc says of a process, and its name for a later daemon: pid and start time tell it, or that it has gone."""

from __future__ import annotations

import os
from pathlib import Path

from cgpusched.store import Process

PROC = Path("/proc")
_START = 22 - 3
"""starttime's place among the fields after the command's name."""
_PARENT = 1
GENERATIONS = 64
FIRST_NAMESPACE = "pid:[4026531836]"
"""The same at every boot."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Which boot of the system this is: pids and start times of another one mean nothing."""
    return _BOOT_ID.read_text().strip()


def has_own_mounts(proc: Path = PROC) -> bool:
    """Whether this process is in another mount namespace than PID 1; where that cannot be known it is not."""
    try:
        return not os.path.samefile(proc / "self/ns/mnt", proc / "1/ns/mnt")
    except OSError:
        return False


def stat_of(pid: int, proc: Path = PROC) -> list[str]:
    """The fields of /proc/PID/stat after the command's name, which may hold anything: state is the first. OSError."""
    return (proc / str(pid) / "stat").read_bytes().rpartition(b")")[2].decode("ascii").split()


def environment_of(pid: int, proc: Path = PROC) -> list[bytes]:
    """What it was started with, ``NAME=VALUE``; nothing where it has ended or may not be read."""
    try:
        return (proc / str(pid) / "environ").read_bytes().split(b"\0")
    except OSError:
        return []


def ancestors(pid: int, proc: Path = PROC) -> list[int]:
    """Its parent, that one's parent, and so on, as they are now; nothing where it has ended."""
    found: list[int] = []
    while pid > 1 and len(found) < GENERATIONS:
        try:
            pid = int(stat_of(pid, proc)[_PARENT])
        except (OSError, ValueError, IndexError):
            break
        if pid in found:
            break
        found.append(pid)
    return found


def real_uid(pid: int, proc: Path = PROC) -> int | None:
    """None: it has ended."""
    try:
        lines = (proc / str(pid) / "status").read_bytes().splitlines()
    except OSError:
        return None
    return next((int(line.split()[1]) for line in lines if line.startswith(b"Uid:")), None)


def is_beside_us(pid: int, proc: Path = PROC) -> bool:
    """Whether a process is in the daemon's own PID namespace, and so counts processes as it does."""
    try:
        return os.path.samestat(os.stat(proc / str(pid) / "ns/pid"), os.stat(proc / "self/ns/pid"))
    except OSError:
        return False


def in_first_namespace(proc: Path = PROC) -> bool:
    """Whether the daemon counts processes as the kernel does, in its first PID namespace."""
    return os.readlink(proc / "self/ns/pid") == FIRST_NAMESPACE


def pid_of(pidfd: int) -> int | None:
    """The process behind a pidfd; None: it has ended."""
    try:
        lines = Path(f"/proc/self/fdinfo/{pidfd}").read_bytes().splitlines()
    except OSError:
        return None
    pid = next((int(line.split()[1]) for line in lines if line.startswith(b"Pid:")), -1)
    return pid if pid > 0 else None


def process_of(pid: int | None) -> Process | None:
    """None: there is none of that pid."""
    if pid is None:
        return None
    try:
        return Process(pid, int(stat_of(pid)[_START]))
    except OSError:
        return None


def open_process(process: Process | None) -> int | None:
    """A pidfd of that very process, the caller's to close; None: it has ended."""
    if process is None:
        return None
    try:
        pidfd = os.pidfd_open(process.pid)
    except OSError:
        return None
    if process_of(process.pid) == process:  # looked at once the pidfd holds it
        return pidfd
    os.close(pidfd)
    return None
