"""A write that was carried out and not answered, because the daemon died in between, comes again at its successor.

The kernel re-sends what was read and not answered, and first of all. Only the last command that was stored can be one
of those, for every other was answered before it was read. Most may be obeyed twice; but of a create that is there
already its writer must not be told EEXIST.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import trio

from cgpusched import store
from cgpusched.commands import Command
from cgpusched.daemon.system import System
from cgpusched.model import Instance
from cgpusched.state import State

SECONDS = 1.0
"""How long after requests are answered again the command is taken for the one that was obeyed."""


class Resent:
    """The System as the tree's backend, which takes the first command for done if it is the predecessor's last."""

    def __init__(self, system: System, last: str, clock: Callable[[], float] = trio.current_time) -> None:
        """``last``: store.sign() of that command; empty: none is expected."""
        self._system = system
        self._last = last
        self._clock = clock
        self._until: float | None = None

    @property
    def state(self) -> State:
        return self._system.state

    @property
    def version(self) -> str:
        return self._system.version

    def apply(self, command: Command) -> Instance | None:
        last, self._last = self._last, ""
        if last and store.sign(command) == last and self._clock() < (self._until or 0.0):
            return None
        return self._system.apply(command)

    def begin(self) -> None:
        """Requests are answered from now on."""
        self._until = self._clock() + SECONDS

    def memory(self, instance: str, gpu: int) -> Sequence[tuple[int, int]]:
        return self._system.memory(instance, gpu)

    def upgrade_state(self) -> str:
        return self._system.upgrade_state()
