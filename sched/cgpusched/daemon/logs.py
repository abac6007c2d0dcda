"""Logging: one key=value line an event on stderr, with journald's priority prefixes where journald reads it."""

from __future__ import annotations

import logging
import os
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TextIO

LEVELS = ("debug", "info", "warning", "error")

_PRIORITY = {logging.DEBUG: 7, logging.INFO: 6, logging.WARNING: 4, logging.ERROR: 3, logging.CRITICAL: 2}


def to_journal(stream: TextIO, environ: Mapping[str, str]) -> bool:
    """Whether ``stream`` is the very stream that journald reads (systemd tells its device and inode)."""
    try:
        device, inode = environ.get("JOURNAL_STREAM", "").split(":")
        stat = os.fstat(stream.fileno())
        return (stat.st_dev, stat.st_ino) == (int(device), int(inode))
    except (ValueError, OSError):
        return False


class Formatter(logging.Formatter):
    """``TIME LEVEL LOGGER MESSAGE``; for journald, which adds time and level itself, ``<PRIORITY>LOGGER MESSAGE``.

    A traceback follows on lines of its own, each with the prefix, so that journald gives them the same priority.
    """

    def __init__(self, journal: bool) -> None:
        super().__init__()
        self.journal = journal

    def format(self, record: logging.LogRecord) -> str:
        lines = record.getMessage().splitlines() or [""]
        if record.exc_info:
            lines += self.formatException(record.exc_info).splitlines()
        name = record.name.rpartition(".")[2]
        if self.journal:
            prefix = f"<{_PRIORITY.get(record.levelno, 6)}>{name} "
        else:
            clock = time.strftime("%Y-%m-%dT%H:%M:%S", time.localtime(record.created))
            prefix = f"{clock}.{int(record.msecs):03d} {record.levelname.lower()} {name} "
        return "\n".join(prefix + line for line in lines)


def setup(level: str, stream: TextIO | None = None, environ: Mapping[str, str] | None = None) -> None:
    """Points the root logger at ``stream`` (default stderr); ``level`` is one of ``LEVELS``."""
    stream = sys.stderr if stream is None else stream
    handler = logging.StreamHandler(stream)
    handler.setFormatter(Formatter(to_journal(stream, os.environ if environ is None else environ)))
    logging.captureWarnings(True)
    logging.raiseExceptions = False  # a full disk or a closed stderr behind the log must not end the service
    root = logging.getLogger()
    root.handlers[:] = [handler]
    set_level(level)


def set_level(level: str) -> None:
    logging.getLogger().setLevel(level.upper())


@dataclass
class Damper:
    """Lets ``burst`` lines of one kind through in ``seconds``, then none, and says how many it held back.

    What a tenant can provoke (a bad hello) goes through one of these, one a tenant, or he fills the journal.
    """

    burst: int = 10
    seconds: float = 60.0
    clock: Callable[[], float] = time.monotonic
    _since: float = field(default=0.0, init=False)
    _seen: int = field(default=0, init=False)

    def note(self) -> str | None:
        """None: say nothing. Else what to append to the line (empty, or how many were held back before it)."""
        now = self.clock()
        held = 0
        if now - self._since >= self.seconds:
            held = max(0, self._seen - self.burst)
            self._since, self._seen = now, 0
        self._seen += 1
        if self._seen > self.burst:
            return None
        return f" held_back={held}" if held else ""
