"""What ``status`` answers: all that cgpu-smi shows, as JSON."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any

import trio

from cgpusched.daemon.devices import Devices
from cgpusched.daemon.system import System
from cgpusched.daemon.tally import Tally

SAMPLE_SECONDS = 1.0


class Status:
    """The answer and the task behind its figures."""

    def __init__(
        self, system: System, devices: Devices, mount: str, clock: Callable[[], int] = time.monotonic_ns,
        keep: Callable[[Tally], None] = lambda tally: None,
    ) -> None:  # fmt: skip
        """``keep`` stores what is counted, for a successor."""
        self._system = system
        self._devices = devices
        self._mount = mount
        self._clock = clock
        self._keep = keep
        self._started = clock()

    async def sample_forever(self) -> None:
        """Takes everyone's share of device time once a second, so that an answer tells of the second before it."""
        while True:
            self._system.sample(self._clock())
            self.keep()
            await trio.sleep(SAMPLE_SECONDS)

    def keep(self) -> None:
        """Stores what was counted up to now."""
        self._keep(self._system.tally())

    def answer(self) -> dict[str, Any]:
        gpus = [dataclasses.asdict(gpu) for gpu in self._system.usage()]
        self.keep()  # after: what is stored is as much or more, and a successor's answer may not be less than this one
        for gpu in gpus:
            gpu["free_weight"] = self._system.state.free_weight(gpu["index"])
            gpu["free_memory"] = self._system.state.free_memory(gpu["index"])
        return {
            "version": self._system.version,
            "simulated": self._devices.sim_dir is not None,
            "mount": self._mount,
            "uptime_s": round((self._clock() - self._started) / 1e9, 3),
            "upgrade": self._system.upgrade_state(),
            "gpus": gpus,
        }
