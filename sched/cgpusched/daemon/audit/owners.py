"""Whose a process is that uses a GPU without being connected, from what /proc says of it.

``owner_of(pid)`` answers with an instance's full ID or None. Programs of ``cgpuctl run`` are told by what they descend
from and by the socket they were started with; other kinds of instances add their own way (Auditor takes any function).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from cgpusched.daemon.procs import PROC, environment_of, real_uid, stat_of

OwnerOf = Callable[[int], str | None]
"""Host pid to an instance's full ID. Called in a thread: it may block, and must not touch the daemon's state."""

GENERATIONS = 64
"""So far up a process's ancestors are looked at."""
PF_EXITING = 4


def first_of(*ways: OwnerOf) -> OwnerOf:
    """The first answer of several ways to tell; None for a dead process, which NVML may list for a while."""

    def owner_of(pid: int) -> str | None:
        if not is_alive(pid):
            return None
        return next((ident for way in ways if (ident := way(pid)) is not None), None)

    return owner_of


def is_alive(pid: int, proc: Path = PROC) -> bool:
    """Whether the process has not begun to end. Its main thread alone may have: then it is a zombie with siblings."""
    found = _look(pid, proc)
    return found is not None and not (found.ending and found.threads <= 1)


@dataclass(frozen=True)
class Known:
    """What tells the processes of instances, as of one moment."""

    pids: Mapping[int, str] = field(default_factory=dict)
    """Host pids that are an instance's for certain: connected, or what a ``cgpuctl run`` became."""
    sockets: Mapping[str, tuple[str, int]] = field(default_factory=dict)
    """By the value of CGPU_SOCKET: an instance and its owner's uid."""

    def owner_of(self, pid: int, proc: Path = PROC) -> str | None:
        """The instance that the process, the nearest of its ancestors or their session's leader belongs to.

        What is certain goes before what an environment says. That is the one a process was started with, and counts
        only of the owner's and root's: anybody can write somebody else's socket there, and so have him blamed.
        """
        line = list(_line(pid, proc))
        for one in line:
            if one.pid in self.pids:
                return self.pids[one.pid]
        for one in line:
            ident, owner = self.sockets.get(_started_with(one.pid, proc), ("", 0))
            if ident and real_uid(one.pid, proc) in (0, owner):
                return ident
        return None


@dataclass(frozen=True)
class _Process:
    pid: int
    parent: int
    session: int
    ending: bool
    """Its main thread."""
    threads: int


def _line(pid: int, proc: Path) -> Iterator[_Process]:
    """The process, its ancestors, and the leader of its session where that is none of them."""
    first = at = _look(pid, proc)
    if first is None:
        return
    seen: set[int] = set()
    while at is not None and at.pid not in seen and len(seen) < GENERATIONS:
        yield at
        seen.add(at.pid)
        at = _look(at.parent, proc) if at.parent > 1 else None
    if first.session > 1 and first.session not in seen:
        leader = _look(first.session, proc)
        if leader is not None:
            yield leader


def _look(pid: int, proc: Path) -> _Process | None:
    try:
        rest = stat_of(pid, proc)
        ending = rest[0] in "ZXx" or int(rest[6]) & PF_EXITING != 0
        return _Process(pid, int(rest[1]), int(rest[3]), ending, int(rest[17]))
    except (OSError, ValueError, IndexError):
        return None


def _started_with(pid: int, proc: Path) -> str:
    """The CGPU_SOCKET of its initial environment; empty: none, or not to be read."""
    found = next((entry for entry in environment_of(pid, proc) if entry.startswith(b"CGPU_SOCKET=")), b"=")
    return found.partition(b"=")[2].decode("utf-8", "surrogateescape")
