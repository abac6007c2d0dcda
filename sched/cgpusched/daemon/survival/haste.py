"""A start goes before what programs do on the CPUs: all who ask the tree wait for it, and it takes 0.2 s of a CPU.

Only until the daemon is ready. Later on who reads the tree a lot takes CPU time through it, and that on no better terms
than others. The scheduler thread keeps its place: it sleeps, but for microseconds a turn.
"""

from __future__ import annotations

import os
from pathlib import Path

NICE = -10
KEEPS = "cgpu-gate"
_TASKS = Path("/proc/self/task")
_AUTOGROUP = Path("/proc/self/autogroup")


class Haste:
    """From begin() to end(). Where more than the usual is not allowed, nothing happens."""

    def __init__(self) -> None:
        self._before = os.getpriority(os.PRIO_PROCESS, 0)

    def begin(self) -> None:
        """For this thread, and those that it starts."""
        _set_nice(os.getpid(), min(self._before, NICE))
        _set_autogroup(NICE)

    def end(self) -> None:
        """For all threads but the one that KEEPS it."""
        for task in _TASKS.iterdir():
            try:
                keeps = (task / "comm").read_text().strip() == KEEPS
            except OSError:  # it ended just now
                continue
            if not keeps:
                _set_nice(int(task.name), self._before)
        _set_autogroup(0)


def _set_nice(thread: int, nice: int) -> None:
    try:
        os.setpriority(os.PRIO_PROCESS, thread, nice)
    except OSError:
        pass


def _set_autogroup(nice: int) -> None:
    """Where the kernel groups processes by session, that group's nice value; only where the session is ours alone."""
    if os.getsid(0) != os.getpid():
        return
    try:
        _AUTOGROUP.write_text(str(nice))
    except OSError:
        pass
