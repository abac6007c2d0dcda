"""The daemon that comes and goes, and what is seen of it from outside."""

from __future__ import annotations

import contextlib
import os
import random
import signal
import subprocess
import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node import Node

from cgpusched.cli import link

KILL, UPGRADE = "kill", "upgrade"
RESTART_SECONDS = 0.1
"""What systemd waits before it starts the daemon again (RestartSec of systemd/cgpud.service)."""
QUIET_SECONDS = 1.2
"""No change begins so shortly before the next one's part of the run."""
LIMIT_SECONDS = 60.0
POLL_SECONDS = 0.01
READY, EXECUTES = " service ready ", " upgrade executes "


@dataclass(frozen=True)
class Change:
    """One daemon's end and the next one's begin, CLOCK_MONOTONIC ns."""

    what: str
    end_ns: int
    """No daemon from here on."""
    ready_ns: int
    back_ns: int
    """The programs are under the gate again."""


@dataclass(frozen=True)
class Size:
    """What a process takes up."""

    memory_kib: int
    """Anonymous, resident."""
    descriptors: int
    threads: int


def size_of(pid: int) -> Size:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Size(int(fields["RssAnon"].split()[0]), len(os.listdir(f"/proc/{pid}/fd")), int(fields["Threads"]))


def keeper_of(node: Node) -> int:
    """The keeper's pid; LookupError where there is none."""
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if str(node.runtime).encode() in words and path.with_name("comm").read_text() == "cgpud-keeper\n":
                return int(path.parent.name)
    raise LookupError("no keeper")


def plan(kinds: list[str], seconds: float, rng: random.Random) -> Iterator[tuple[float, str]]:
    """When which change is due, from the begin of the run: in each equal part of it one, at a random moment."""
    order = kinds[:]
    rng.shuffle(order)
    part = seconds / len(order)
    for number, kind in enumerate(order):
        yield (number + rng.random() * max(0.1, 1 - QUIET_SECONDS / part)) * part, kind


class Mortal:
    """A node's daemon."""

    def __init__(self, node: Node, programs: Iterable[str]) -> None:
        """``programs``: the instances that must have a process under the gate."""
        self.node = node
        self._programs = set(programs)
        self._log = open(node.log)  # noqa: SIM115  # as long as we look
        self._log.seek(0, os.SEEK_END)
        self._unread = ""

    def close(self) -> None:
        self._log.close()

    def change(self, what: str) -> Change:
        """Kills the daemon and starts it again, or upgrades it; waits until all is as before. TimeoutError."""
        self._said_nothing()
        if what == UPGRADE:
            self.node.write(1, "upgrade")
            end = self._wait_for(EXECUTES)
        else:
            assert self.node.daemon
            self.node.kill_daemon(signal.SIGKILL)
            end = time.monotonic_ns()
            time.sleep(RESTART_SECONDS)
            with open(self.node.log, "ab") as log:
                # a session of its own, as whatever starts services gives them
                self.node.daemon = subprocess.Popen(self.node.daemon.args, stdout=log, stderr=log,
                                                    start_new_session=True)
        ready = self._wait_for(READY)
        self.wait_for_programs()
        return Change(what, end, ready, time.monotonic_ns())

    def wait_for_programs(self) -> None:
        """Until all are under the gate. TimeoutError."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while not self._is_back():
            if time.monotonic() > deadline:
                raise TimeoutError("programs are not back")
            time.sleep(POLL_SECONDS)

    def gpu(self) -> dict[str, Any]:
        """What the daemon says of the only GPU."""
        gpu: dict[str, Any] = link.ask(str(self.node.runtime / "control.sock"), "status")["gpus"][0]
        return gpu

    def _is_back(self) -> bool:
        return self._programs <= {one["id"] for one in self.gpu()["instances"] if one["processes"]}

    def _said_nothing(self) -> None:
        self._unread = ""
        self._log.seek(0, os.SEEK_END)

    def _wait_for(self, words: str) -> int:
        """When the log said so."""
        deadline = time.monotonic() + LIMIT_SECONDS
        while words not in self._unread:
            if self.node.daemon is None or self.node.daemon.poll() is not None:
                raise RuntimeError(f"cgpud ended: {self.node.log.read_text()[-2000:]}")
            if time.monotonic() > deadline:
                raise TimeoutError(f"cgpud did not say{words}: {self.node.log.read_text()[-2000:]}")
            time.sleep(POLL_SECONDS)
            self._unread += self._log.read()
        self._unread = self._unread.partition(words)[2]
        return time.monotonic_ns()
