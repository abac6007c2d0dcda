"""How a session waits for its next request: a moment on the spot, then through trio.

A program's open, read and close are a handful of requests, each sent as soon as the one before is answered. Through
trio each of them costs two passes of its loop and half a dozen system calls: 50 us and more, for an answer of 10 us.
And on an idle machine each costs waking a CPU that has gone to sleep. So after an answer the session stays awake for as
long as a client takes to send what follows.

Whoever else is ready for this CPU gets it meanwhile: that may be the client. And a turn ends after a number of requests
and a time, whoever still asks: readers without end get a part of the daemon's time, not all of it.
"""

import os
import select
import time

import trio

PATIENCE = 40e-6
"""Seconds after an answer in which the next request is waited for on the spot. Most come within 5 to 20 us."""


class Turn:
    """Of one task, that reads one descriptor at a time."""

    def __init__(self, requests: int, seconds: float) -> None:
        """How many requests at most before other tasks run, and for how long."""
        self._requests = requests
        self._seconds = seconds
        self._left = 0
        self._until = 0.0
        self._fd = -1
        self._ready = select.poll()

    async def readable(self, fd: int) -> None:
        """Returns when there is something to read; that was looked for just before."""
        if fd != self._fd:
            self._ready = select.poll()
            self._ready.register(fd, select.POLLIN)
            self._fd = fd
        if self._left > 0 and self._soon():
            self._left -= 1
            return
        while True:
            await trio.lowlevel.wait_readable(fd)
            if self._ready.poll(0):
                break
        self._left = self._requests - 1
        self._until = time.monotonic() + self._seconds

    def _soon(self) -> bool:
        now = time.monotonic()
        if now >= self._until:
            return False
        until = now + PATIENCE
        while not self._ready.poll(0):
            if time.monotonic() >= until:
                return False
            os.sched_yield()
        return True
