"""Threads that read what containers bring: files on file systems that may never answer (a dead NFS, a tenant's FUSE).

Whoever asked is told so after a while; the thread that hangs is left behind and counted. A container has one such
thread at most, and all together have a limit, so that one container's root does not keep others from starting.
"""

from __future__ import annotations

import errno
import threading
from collections.abc import Callable
from typing import TypeVar

import trio

from cgpusched.errors import CommandError
from cgpusched.units import show

T = TypeVar("T")

READ_SECONDS = 5.0
"""Half of what cgpu-runtime waits for its answer."""
READERS = 32


class Readers:
    def __init__(self, count: int = READERS, seconds: float = READ_SECONDS) -> None:
        self._limiter = trio.CapacityLimiter(count)
        self._seconds = seconds
        self._lock = threading.Lock()
        self._stuck: set[str] = set()

    async def run(self, ident: str, read: Callable[[], T]) -> T:
        """What ``read`` gives or raises. CommandError: it does not come back (ETIMEDOUT), or an earlier one for this
        container has not yet (EBUSY).

        ``read`` may go on afterwards, or begin: it must own what it uses.
        """
        if ident in self._stuck:
            raise CommandError(errno.EBUSY, f"container {show(ident)}: an earlier look at its files has not come back")
        begun = ended = False

        def work() -> T:
            nonlocal begun, ended
            begun = True
            try:
                return read()
            finally:
                with self._lock:
                    ended = True
                    self._stuck.discard(ident)

        with trio.move_on_after(self._seconds):
            return await trio.to_thread.run_sync(work, limiter=self._limiter, abandon_on_cancel=True)
        with self._lock:
            if begun and not ended:
                self._stuck.add(ident)
        what = "its files do not answer" if begun else "too many containers' files do not answer"
        raise CommandError(errno.ETIMEDOUT, f"container {show(ident)}: {what} (waited {self._seconds:g} s)")
