"""How long the instances of ``cgpuctl run`` live: until nothing uses them any more.

Three things keep one: an *anchor* (the process that asked for it, which then became CMD), a client attached to its
gate, and a process that was started with its socket in the environment (a grandchild that has not used the GPU yet).
Each is a process, and each is waited for by pidfd; nothing is polled while any of them lives.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field

import trio

from cgpusched.daemon.procs import environment_of, open_process, pid_of, process_of, real_uid
from cgpusched.fields import pairs
from cgpusched.store import Process

log = logging.getLogger(__name__)

SCAN_PAUSE_SECONDS = 0.2
"""Between the two empty scans that end an instance: what a process forked during the first shows in the second."""


RESUME_SECONDS = 2.0
"""After a change of daemon: the time that clients have to come back before a scan says that an instance is unused."""

SETTLE_SECONDS = RESUME_SECONDS + 1
"""The longest that settled() waits; two scans and the pause take a fifth of a second."""

SCAN_ENOUGH = 8
"""Processes that one scan takes: a few are enough to wait for, and bound the descriptors held."""


def started_with(variable: str, value: str, owner: int = 0) -> list[int]:
    """Pidfds of the first few processes whose initial environment has ``variable=value``; the caller closes them.

    ``owner``: only that user's and root's count (0: everybody's), as only theirs may attach. The real uid decides: a
    setuid program shows what somebody else put into its environment.
    Blocks for as long as reading /proc takes (about 10 us a process): call it in a thread. Processes that may not be
    read (the daemon is not root) are passed over. The environment is read through the pid and checked again after the
    pidfd is open, so a pid that changed hands in between is not taken for the old process.
    """
    entry = f"{variable}={value}".encode()
    found: list[int] = []
    for name in os.listdir("/proc"):
        if len(found) == SCAN_ENOUGH:
            break
        if not name.isdigit():
            continue
        pid = int(name)
        if entry not in environment_of(pid) or owner and real_uid(pid) not in (0, owner):
            continue
        try:
            pidfd = os.pidfd_open(pid)
        except OSError:
            continue
        if entry in environment_of(pid):
            found.append(pidfd)
        else:
            os.close(pidfd)
    return found


@dataclass
class _Life:
    id: str
    socket: str
    owner: int
    fresh: list[int] = field(default_factory=list)
    """Pidfds that nobody waits for yet."""
    anchors: dict[int, Process | None] = field(default_factory=dict)
    """Processes that live, ``fresh`` included, by pidfd."""
    changed: trio.Event = field(default_factory=trio.Event)
    unused: bool = False
    """Nothing known uses it; it ends unless a scan finds a process."""
    scope: trio.CancelScope = field(default_factory=trio.CancelScope)

    def anchor(self, pidfd: int) -> None:
        self.fresh.append(pidfd)
        self.anchors[pidfd] = process_of(pid_of(pidfd))
        self.note()

    def note(self) -> None:
        """Wakes the task: what keeps the instance may have changed."""
        self.changed.set()
        self.changed = trio.Event()


class Lifetimes:
    """One task an ephemeral instance, in the daemon's nursery.

    ``clients`` counts the attached processes of an instance; ``end`` destroys it (and then calls ``forget``);
    ``save`` is called when a process was anchored. All state is touched from the trio thread only.
    """

    def __init__(
        self,
        nursery: trio.Nursery,
        clients: Callable[[str], int],
        end: Callable[[str], None],
        scan: Callable[[str, str, int], Iterable[int]] = started_with,
        save: Callable[[], None] = lambda: None,
    ) -> None:
        self._save = save
        self._nursery = nursery
        self._clients = clients
        self._end = end
        self._scan = scan
        self._lives: dict[str, _Life] = {}
        self._settled = trio.Event()
        self._limiter = trio.CapacityLimiter(1)

    def begin(self, ident: str, socket: str, pidfd: int, owner: int) -> None:
        """Starts the life of a new instance of uid ``owner``, anchored at a process. Takes over ``pidfd``."""
        life = self._lives[ident] = _Life(ident, socket, owner)
        life.anchor(pidfd)
        self._nursery.start_soon(self._live, life, name=f"lifetime {ident}")
        self._save()

    def resume(self, ident: str, socket: str, owner: int, anchors: Iterable[Process] = ()) -> None:
        """Goes on with the life of an instance from a predecessor's time, and with those of its anchors that live."""
        life = self._lives[ident] = _Life(ident, socket, owner)
        for process in anchors:
            if (pidfd := open_process(process)) is not None:
                life.anchor(pidfd)
        life.unused = not life.anchors
        self._nursery.start_soon(self._live, life, RESUME_SECONDS, name=f"lifetime {ident}")

    def stored(self) -> dict[str, list[Process]]:
        """What resume() needs of each instance."""
        return {life.id: [one for one in life.anchors.values() if one is not None] for life in self._lives.values()}

    def join(self, ident: str, pidfd: int) -> None:
        """Anchors a further process. Takes over ``pidfd``. An instance that is not ephemeral needs none."""
        life = self._lives.get(ident)
        if life is None:
            os.close(pidfd)
        else:
            life.anchor(pidfd)
            self._save()

    def anchors(self, ident: str) -> int:
        """How many processes are waited for."""
        life = self._lives.get(ident)
        return len(life.anchors) if life else 0

    def pids(self) -> dict[int, str]:
        """Host pids of the processes that are waited for, and their instances."""
        lives = self._lives.values()
        return {one.pid: life.id for life in lives for one in life.anchors.values() if one is not None}

    def detached(self, ident: str) -> None:
        """A client of this instance has gone."""
        if life := self._lives.get(ident):
            life.note()

    def forget(self, ident: str) -> None:
        """The instance was destroyed, by whomever."""
        if life := self._lives.pop(ident, None):
            life.scope.cancel()
            self._settle()

    async def settled(self) -> None:
        """Waits until what is about to end has ended or was found in use: its memory, weight and name are free then.

        What begins to end meanwhile is not waited for: with many short programs something always does.
        """
        ending = [life for life in self._lives.values() if life.unused and not self._clients(life.id)]
        with trio.move_on_after(SETTLE_SECONDS):
            while any(life.unused and self._lives.get(life.id) is life for life in ending):
                await self._settled.wait()

    def _settle(self) -> None:
        self._settled.set()
        self._settled = trio.Event()

    async def _live(self, life: _Life, settle_seconds: float = 0) -> None:
        with life.scope:
            try:
                await trio.sleep(settle_seconds)
                async with trio.open_nursery() as watchers:
                    while life.id in self._lives:  # end() is refused when a process comes at the last moment
                        await self._until_unused(life, watchers)
                        log.info("instance ends %s", pairs(id=life.id, reason="its last process has ended"))
                        self._end(life.id)
            finally:
                for pidfd in life.fresh:
                    os.close(pidfd)

    async def _until_unused(self, life: _Life, watchers: trio.Nursery) -> None:
        empty = 0
        while True:
            changed = life.changed
            while life.fresh:
                watchers.start_soon(self._watch, life, life.fresh.pop())
            if life.anchors or self._clients(life.id):
                empty = 0
                if life.unused:
                    life.unused = False
                    self._settle()
                await changed.wait()
                continue
            life.unused = True
            for pidfd in await trio.to_thread.run_sync(self._take, life, limiter=self._limiter):
                life.anchor(pidfd)
            if life.anchors or self._clients(life.id):
                continue
            empty += 1
            if empty == 2:
                return
            await trio.sleep(SCAN_PAUSE_SECONDS)

    async def _watch(self, life: _Life, pidfd: int) -> None:
        try:
            await trio.lowlevel.wait_readable(pidfd)
        finally:
            os.close(pidfd)
            del life.anchors[pidfd]
            life.note()

    def _take(self, life: _Life) -> list[int]:
        return list(self._scan("CGPU_SOCKET", life.socket, life.owner))
