"""The gate's Python face: regions, plans and figures. The scheduling itself runs in a C thread (csrc/gate).

All methods return in microseconds and may be called from any thread. Times are nanoseconds, sizes bytes. What the C
side refuses is an ``OSError`` with its errno: ENODEV (no such GPU), ENOENT (no such region or slot), ENOSPC (64 regions
on that GPU already), EAGAIN (512 processes in that region already).
"""

import errno
import itertools
import os
import socket
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from cgpusched._gate import ffi, lib
from cgpusched.plan import GpuPlan


@dataclass(frozen=True)
class Tuning:
    """The gate's constants; docs/architecture.md says where each comes from."""

    presume_ns: int = 400_000
    """A turn that was cut leaves a presumed demand for so long after its drain."""
    overlap_ns: int = 200_000
    """A client may acknowledge so much before its work ends; hides the hand-over."""
    overdue_ns: int = 50_000_000
    """Patience with a closed client, beside its reported work in flight, ..."""
    overdue_cap_ns: int = 2_000_000_000
    """... of which at most so much is believed."""
    noshow_ns: int = 10_000_000
    """A waiter that does not open its grant by then is passed over, ..."""
    backoff_cap_ns: int = 640_000_000
    """... for at most so long at a time."""
    backstop_ns: int = 1_000_000
    """Who does not let go at its deadline by itself is closed so much later."""
    window_ns: int = 100_000_000
    """High priority: the sliding window that the percentage is of."""
    resume_ns: int = 5_000_000
    """High priority: begins when the window has so much room (or one of its kernels')."""
    margin_ns: int = 500_000
    """High priority: kept free of the percentage, for the way a close takes."""
    excess_ns: int = 1_000_000
    """High priority: by so much the percentage of a window may be passed: a kernel may just not fit."""
    linger_ns: int = 5_000_000
    """High priority: another that runs out of work may only be late with a launch: it counts as wanting the device for
    so long, or as long as it had work, unless its last pause was longer."""
    starve_ns: int = 5_000_000_000
    """The watchdog's patience with the wait of somebody who is due, beside a round and one kernel of each other; ..."""
    retry_ns: int = 5_000_000_000
    """... then everybody shares plainly for so long, twice as long each time it happens again, up to 64 times."""
    span_ns: int = 625_000
    """Clients record an event about every span of device time."""
    high_span_ns: int = 300_000
    """Likewise, where the plan has a high-priority instance."""
    window: int = 2
    """At most so many unfinished spans in flight."""
    high_window: int = 1
    """Likewise, where the plan has a high-priority instance and their kernels are longer than a span."""
    grace_ns: int = 150_000
    """Idle so long after the last synchronise: let go."""
    bells_per_s: int = 4000
    """A region that rings more often is looked at only every ``mute_ns``."""
    mute_ns: int = 2_000_000


_CORE = ("presume_ns", "overlap_ns", "overdue_ns", "overdue_cap_ns", "noshow_ns", "backoff_cap_ns", "backstop_ns",
         "window_ns", "resume_ns", "margin_ns", "excess_ns", "linger_ns", "starve_ns", "retry_ns")
_SERVER = ("span_ns", "high_span_ns", "window", "high_window", "grace_ns", "bells_per_s", "mute_ns")


@dataclass(frozen=True)
class Region:
    """One instance on one GPU. The descriptors go to its processes; they are the gate's, and close with the region."""

    gpu: int
    id: str
    ctl_fd: int
    """Control page, 4096 bytes: read-only and sealed against writing, whoever reopens it."""
    report_fd: int
    """Report pages; sealed in size."""
    bell_fd: int
    """eventfd: a process rings it to be looked at."""
    handle: int


@dataclass(frozen=True)
class SlotUse:
    """What one process says of itself; checked for plausibility, no more."""

    slot: int
    mem_used: int
    mem_peak: int
    mem_refused: int
    """Allocations refused for the quota."""
    launches: int
    ungated: int
    """Times it ran without the daemon."""
    unknown: int
    """Driver names it uses that we have never heard of."""
    dirty: int
    """Releases that gave up waiting for the device."""
    kernel_ns: int
    """Mean length of a submission."""


@dataclass(frozen=True)
class RegionUse:
    busy_ns: int
    """Device time charged so far."""
    turns: int
    waiting: bool
    """A launcher waits for the grant."""
    holding: bool
    overdue: int
    """Times it did not let go in time."""


@dataclass(frozen=True)
class GpuUse:
    busy_ns: int
    """Time that somebody held the device and was not known to be idle."""
    turns: int
    native: bool
    """Plain sharing: the driver schedules."""
    fallbacks: int
    """Times that clients ran without the daemon."""
    overdue: int
    longest_wait_ns: int
    """How long the most patient runnable instance has been waiting."""
    starved: int = 0
    """Times that somebody who was due waited for too long, and everybody got plain sharing for a while."""
    fallback: bool = False
    """That is so now."""


def _check(result: int) -> int:
    if result < 0:
        raise OSError(-result, os.strerror(-result))
    return result


def agent_channel() -> tuple[int, int]:
    """A pair of descriptors ``(ours, the client's)`` by which the gate rings a client's agent.

    A socket pair and not an eventfd: an eventfd's O_NONBLOCK is shared with the client, who could clear it, fill the
    counter, and so make the scheduler's write block. The client reads 8 bytes a ring, as of an eventfd. The caller
    closes both (``Gate.attach`` duplicates ours).
    """
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET | socket.SOCK_CLOEXEC | socket.SOCK_NONBLOCK)
    return ours.detach(), theirs.detach()


class Gate:
    """The scheduler of all GPUs; a context manager.

    ``close()`` opens every gate that is not paused, and ends the thread.
    """

    def __init__(self, tuning: Tuning = Tuning()) -> None:
        c_tuning = ffi.new("struct gate_tuning *")
        for name in _CORE:
            setattr(c_tuning.core, name, getattr(tuning, name))
        for name in _SERVER:
            setattr(c_tuning, name, getattr(tuning, name))
        out = ffi.new("struct gate_server **")
        _check(lib.gate_new(c_tuning, out))
        self._server = out[0]
        self._regions: dict[int, dict[str, Region]] = {}
        self._instances: dict[str, int] = {}
        self._numbers = itertools.count(1)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None,
                 trace: TracebackType | None) -> None:
        self.close()

    def start(self) -> None:
        """Starts the scheduler thread."""
        _check(lib.gate_start(self._server))

    def close(self) -> None:
        """Ends the thread and frees all regions; idempotent. Clients that live on share without us."""
        server, self._server = self._server, ffi.NULL
        lib.gate_free(server)
        self._regions.clear()

    def _alive(self) -> Any:
        if not self._server:
            raise ValueError("the gate is closed")
        return self._server

    @property
    def loops(self) -> int:
        """Rounds of the scheduler thread: grows at least ten times a second while it lives."""
        return int(lib.gate_loops(self._alive()))

    def add_gpu(self, index: int, uuid: bytes, memory: int) -> None:
        """``uuid``: its 16 bytes; ``memory``: the card's total. EEXIST when it is known already."""
        if len(uuid) != 16:
            raise ValueError("a UUID is 16 bytes")
        _check(lib.gate_add_gpu(self._alive(), index, uuid, memory))
        self._regions[index] = {}

    def add_region(self, gpu: int, id: str, mem_limit: int) -> Region:
        """A new region; it gets no turn before a plan names it.

        Regions of one ``id`` on several GPUs have their turns together (csrc/gate/gang.h).
        """
        if id in self._regions.get(gpu, {}):
            raise OSError(errno.EEXIST, f"{id} has a region on GPU {gpu} already")
        handle, fds = ffi.new("uint64_t *"), ffi.new("int[3]")
        instance = self._instances.setdefault(id, next(self._numbers))
        _check(lib.gate_add_region(self._alive(), gpu, instance, mem_limit, handle, fds))
        region = Region(gpu, id, fds[0], fds[1], fds[2], handle[0])
        self._regions[gpu][id] = region
        return region

    def remove_region(self, region: Region) -> None:
        """Its descriptors close here; processes that still have it share without us from then on."""
        _check(lib.gate_remove_region(self._alive(), region.handle))
        del self._regions[region.gpu][region.id]
        if not any(region.id in made for made in self._regions.values()):
            self._instances.pop(region.id, None)

    def set_plan(self, gpu: int, plan: GpuPlan) -> None:
        """Takes effect at once, the running turn included; debts of another regime are forgotten.

        ENOENT when the plan names an instance that has no region there; then nothing changes.
        """
        server, regions = self._alive(), self._regions.get(gpu, {})
        for turn in plan.turns:
            if turn.id not in regions:
                raise OSError(errno.ENOENT, f"{turn.id} has no region on GPU {gpu}")
        c_plan = ffi.new("struct core_plan *")
        c_plan.count = len(plan.turns)
        c_plan.skip_idle, c_plan.drain, c_plan.native = plan.skip_idle, plan.drain, plan.native
        c_plan.high_percent, c_plan.unowned_ns = plan.high_percent, plan.unowned_ns
        turns = ffi.new("struct gate_turn[]", max(len(plan.turns), 1))
        for c_turn, turn in zip(turns, plan.turns, strict=False):
            c_turn.region, c_turn.quantum_ns, c_turn.high = regions[turn.id].handle, turn.quantum_ns, turn.high
            c_turn.shut = turn.shut
        _check(lib.gate_set_plan(server, gpu, c_plan, turns))

    def set_memory(self, region: Region, limit: int, other: int) -> None:
        """``limit``: its memsize; ``other``: in use but invisible to its hooks (contexts, modules), from NVML."""
        _check(lib.gate_set_memory(self._alive(), region.handle, limit, other))

    def set_context(self, region: Region, size: int) -> None:
        """What its processes charge for a context before they make it. Until it is known they ask (cgpu_note)."""
        _check(lib.gate_set_context(self._alive(), region.handle, size))

    def attach(self, region: Region, agent_fd: int) -> tuple[int, int]:
        """A slot for a new process: ``(slot, generation)``. ``agent_fd`` is duplicated; see ``agent_channel``."""
        slot, generation = ffi.new("uint32_t *"), ffi.new("uint32_t *")
        _check(lib.gate_attach(self._alive(), region.handle, agent_fd, slot, generation))
        return slot[0], generation[0]

    def detach(self, region: Region, slot: int) -> None:
        """The process in ``slot`` has ended: what it held is free, and its memory is not its instance's any more."""
        _check(lib.gate_detach(self._alive(), region.handle, slot))

    def processes(self, region: Region) -> list[SlotUse]:
        """The live slots."""
        uses = ffi.new("struct gate_slot_use[]", lib.CGPU_SLOTS)
        count = _check(lib.gate_slots(self._alive(), region.handle, uses))
        return [SlotUse(use.slot, use.mem_used, use.mem_peak, use.mem_refused, use.launches, use.ungated, use.unknown,
                        use.dirty, use.kernel_ns) for use in uses[0:count]]

    def usage(self, region: Region) -> RegionUse:
        """Up to now."""
        use = ffi.new("struct gate_region_use *")
        _check(lib.gate_region_used(self._alive(), region.handle, use))
        return RegionUse(use.busy_ns, use.turns, bool(use.waiting), bool(use.holding), use.overdue)

    def gpu_usage(self, gpu: int) -> GpuUse:
        """Up to now."""
        use = ffi.new("struct gate_gpu_use *")
        _check(lib.gate_gpu_used(self._alive(), gpu, use))
        return GpuUse(use.busy_ns, use.turns, bool(use.native), use.fallbacks, use.overdue, use.longest_wait_ns,
                      use.starved, bool(use.fallback))
