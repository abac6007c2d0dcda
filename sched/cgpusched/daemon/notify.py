"""What systemd is told: READY=1, STATUS=, STOPPING=1, WATCHDOG=1, FDSTORE=1. Without NOTIFY_SOCKET all is a no-op."""

from __future__ import annotations

import logging
import os
import socket
from collections.abc import Callable, Mapping

import trio

from cgpusched.fields import pairs
from cgpusched.sockets import rights

log = logging.getLogger(__name__)


class Notifier:
    """The service manager's notification socket.

    Sends never block and never fail the daemon: a service manager that does not listen is no reason to stop.
    """

    def __init__(self, environ: Mapping[str, str] | None = None) -> None:
        environ = os.environ if environ is None else environ
        address = environ.get("NOTIFY_SOCKET", "")
        self._address = "\0" + address[1:] if address.startswith("@") else address
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) if address else None
        if self._socket:
            self._socket.setblocking(False)
        self.watchdog_seconds = self._watchdog(environ)

    @staticmethod
    def _watchdog(environ: Mapping[str, str]) -> float | None:
        """The period systemd watches, in seconds; None = it does not watch this process."""
        usec, pid = environ.get("WATCHDOG_USEC", ""), environ.get("WATCHDOG_PID", "")
        if not usec.isascii() or not usec.isdigit() or int(usec) == 0:
            return None
        if pid and pid != str(os.getpid()):
            return None
        return int(usec) / 1e6

    @property
    def connected(self) -> bool:
        """Whether there is a service manager that listens."""
        return self._socket is not None

    def send(self, *lines: str, fd: int = -1) -> None:
        """``fd``: goes along (FDSTORE=1)."""
        if self._socket is None:
            return
        try:
            self._socket.sendmsg(["\n".join(lines).encode()], rights([fd] if fd >= 0 else []), 0, self._address)
        except OSError as error:
            log.warning("notify failed %s", pairs(reason=error.strerror))

    def close(self) -> None:
        if self._socket:
            self._socket.close()


async def feed_watchdog(notifier: Notifier, beat: Callable[[], int]) -> None:
    """Tells systemd that we live, as long as ``beat`` (a count of the gate's scheduling loop) moves.

    Runs in the trio loop, so that it also proves that one; a third of the period leaves room for a late wake-up.
    """
    if notifier.watchdog_seconds is None:
        return
    last: int | None = None
    while True:
        now = beat()
        if now != last:
            notifier.send("WATCHDOG=1")
        else:
            log.error("watchdog not fed %s", pairs(reason="the gate's loop stands still", beat=now))
        last = now
        await trio.sleep(notifier.watchdog_seconds / 3)
