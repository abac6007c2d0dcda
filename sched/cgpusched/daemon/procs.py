"""Processes by pid and start time: the name of one that a later daemon can find again, or know to be gone."""

from __future__ import annotations

import os
from pathlib import Path

from cgpusched.store import Process

_START = 22 - 3
"""starttime's place among the fields after the command's name."""
_BOOT_ID = Path("/proc/sys/kernel/random/boot_id")


def boot_id() -> str:
    """Which boot of the system this is: pids and start times of another one mean nothing."""
    return _BOOT_ID.read_text().strip()


def process_of(pid: int | None) -> Process | None:
    """None: there is none of that pid."""
    if pid is None:
        return None
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            # The command's name may have spaces and brackets of its own.
            return Process(pid, int(file.read().rpartition(b")")[2].split()[_START]))
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
