"""The task that reconciles: about once a second it has NVML's figures for each GPU taken into the system.

NVML and /proc may block, NVML for ever: they are asked in threads that are given up when they do not answer. Then the
figures stay as they are, until it has failed so often that they say nothing any more; the daemon goes on either way.

A process that has made a context is looked at right away (count()), by a second task: until then it could take memory
that it has not.
"""

from __future__ import annotations

import logging
import random
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import trio

from cgpusched.daemon.audit.owners import OwnerOf
from cgpusched.daemon.audit.verdict import Sample
from cgpusched.daemon.devices import blocking
from cgpusched.daemon.system import System
from cgpusched.errors import UserError
from cgpusched.fields import pairs
from cgpusched.model import Gpu

log = logging.getLogger(__name__)

NVML_SECONDS = 10.0
OWNER_SECONDS = 1.0
OWNER_THREADS = 4
COUNT_SECONDS = 2.0
"""So long at most somebody waits for count()."""
COUNT_PAUSE = 0.02
"""Seconds between two looks on request: whoever asks in between shares the next one."""
PATIENCE = 3
"""Looks that may fail in a row before the figures are given up, and the log is told."""
SAMPLES = 4
"""More of them, where a look would raise what counts: a program that takes and gives memory all the time must be found
in the same phase by all of them to look as if it hid some. Steady memory costs one."""
SAMPLE_PAUSE = (0.003, 0.017)
"""Seconds between those, at random, so that they do not keep time with the program."""


@dataclass
class _Asked:
    """A look on request that has not begun."""

    pids: set[int] = field(default_factory=set)
    done: trio.Event = field(default_factory=trio.Event)


@dataclass
class _Trouble:
    """A GPU whose figures cannot be had."""

    times: int = 0
    reason: str = ""
    """As the log was told."""


class Auditor:
    """Looks at all GPUs of ``system`` in turn.

    ``used`` asks NVML for bytes by host pid (blocks; UserError: it cannot be had). ``owners`` gives, on the trio
    thread, a function that says whose a process is, for use in a thread.
    """

    def __init__(
        self,
        system: System,
        used: Callable[[Gpu], Mapping[int, int]],
        owners: Callable[[], OwnerOf],
        interval: float,
        pause: Callable[[], float] = lambda: random.uniform(*SAMPLE_PAUSE),
    ) -> None:
        """``interval``: seconds between two looks."""
        self._system = system
        self._used = used
        self._owners = owners
        self._interval = interval
        self._pause = pause
        self._trouble: dict[int, _Trouble] = {}
        self._nvml = trio.CapacityLimiter(1)
        self._proc = trio.CapacityLimiter(OWNER_THREADS)
        self._mute: dict[int, set[int]] = {}  # by GPU: pids about which /proc did not answer
        self._asked: dict[int, _Asked] = {}  # by GPU
        self._bell = trio.Event()
        self._counted: dict[int, set[int]] = {}  # by GPU: whom count() was about since the look under way began

    async def run_forever(self) -> None:
        async with trio.open_nursery() as nursery:
            nursery.start_soon(self._count_forever)
            while True:
                for gpu in self._system.state.gpus.values():
                    await self.look(gpu)
                await trio.sleep(self._interval)

    async def count(self, gpu: int, pid: int) -> None:
        """Returns when what a connected process has on the GPU by now counts, or NVML has not answered in time."""
        asked = self._asked.setdefault(gpu, _Asked())
        asked.pids.add(pid)
        self._bell.set()
        with trio.move_on_after(COUNT_SECONDS):
            await asked.done.wait()

    async def _count_forever(self) -> None:
        while True:
            await self._bell.wait()
            self._bell = trio.Event()
            asked, self._asked = self._asked, {}
            for gpu, one in asked.items():
                trouble = self._trouble.get(gpu)
                if not (trouble and trouble.reason):  # else it would keep the other GPUs' processes waiting
                    await self._count(self._system.state.gpus[gpu], one.pids)
                one.done.set()
            await trio.sleep(COUNT_PAUSE)

    async def _count(self, gpu: Gpu, pids: set[int]) -> None:
        try:
            samples = [await self._sample(gpu)]
            if self._system.uncounted(gpu.index, samples[0], pids):
                await self._more(gpu, samples)
        except UserError:
            return  # the next of the regular looks says so, if that fails too
        self._system.count(gpu.index, samples, pids)
        self._counted.setdefault(gpu.index, set()).update(pids)

    async def look(self, gpu: Gpu) -> None:
        """One look at one GPU."""
        counted = self._counted[gpu.index] = set()
        try:
            samples = [await self._sample(gpu)]
            strays = await self._strays(gpu, samples[0].used)
            if self._system.rises(gpu.index, samples[0], strays):
                await self._more(gpu, samples)
        except UserError as error:
            self._failed(gpu, str(error))
            return
        trouble = self._trouble.pop(gpu.index, None)
        if trouble and trouble.reason:
            log.info("audit again %s", pairs(gpu=gpu.index))
        self._system.observe(gpu.index, samples, strays, counted=counted)

    async def _more(self, gpu: Gpu, samples: list[Sample]) -> None:
        for _ in range(SAMPLES):
            await trio.sleep(self._pause())
            samples.append(await self._sample(gpu))

    async def _sample(self, gpu: Gpu) -> Sample:
        before = self._system.ledger(gpu.index)
        used: Mapping[int, int] = await blocking(self._used, gpu, seconds=NVML_SECONDS, limiter=self._nvml)
        return Sample(before, used, self._system.ledger(gpu.index))

    async def _strays(self, gpu: Gpu, pids: Iterable[int]) -> dict[int, str]:
        """Which of these are not connected and belong to an instance."""
        connected = self._system.connected(gpu.index)
        unknown = [pid for pid in pids if pid not in connected]
        mute = self._mute[gpu.index] = self._mute.get(gpu.index, set()).intersection(unknown)
        owner_of, found = self._owners(), {}
        for pid in unknown:
            if pid in mute:
                continue
            with trio.move_on_after(OWNER_SECONDS) as waited:
                ident = await trio.to_thread.run_sync(owner_of, pid, abandon_on_cancel=True, limiter=self._proc)
                if ident is not None and gpu.index in self._system.regions(ident):
                    found[pid] = ident
            if waited.cancelled_caught:
                # A process can make whoever reads its environment wait: it is not asked about again, threads are few.
                mute.add(pid)
                log.warning("/proc does not answer %s", pairs(gpu=gpu.index, pid=pid))
        return found

    def _failed(self, gpu: Gpu, reason: str) -> None:
        trouble = self._trouble.setdefault(gpu.index, _Trouble())
        trouble.times += 1
        if trouble.times < PATIENCE:
            return
        if trouble.reason != reason:
            trouble.reason = reason
            log.warning("no audit %s", pairs(gpu=gpu.index, reason=reason))
        self._system.observe(gpu.index, [], {}, audit=reason)
