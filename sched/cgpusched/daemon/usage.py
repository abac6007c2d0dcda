"""Figures about use, as cgpu-smi and the metrics show them. Plain data; the system fills it in."""

from __future__ import annotations

from dataclasses import dataclass

from cgpusched.daemon.audit.verdict import Standing
from cgpusched.gate import SlotUse


@dataclass(frozen=True)
class Counters:
    """What an instance's processes counted on one GPU, those that ended included."""

    launches: int = 0
    """Submissions that passed the gate."""
    ungated: int = 0
    """Times a gate opened because no daemon answered."""
    unknown: int = 0
    """Driver entry points handed out that the hook has never heard of."""
    dirty: int = 0
    """Turns given back without having seen the device drain."""
    mem_refused: int = 0
    """Allocations refused for the quota."""

    def plus(self, more: SlotUse) -> Counters:
        return Counters(
            self.launches + more.launches,
            self.ungated + more.ungated,
            self.unknown + more.unknown,
            self.dirty + more.dirty,
            self.mem_refused + more.mem_refused,
        )


@dataclass(frozen=True)
class Rate:
    """A share of device time between two samples."""

    at_ns: int
    busy_ns: int
    percent: float = 0.0
    busy: bool = False
    """It used the device or waited for it."""

    @staticmethod
    def after(last: Rate | None, now_ns: int, busy_ns: int, waiting: bool = False) -> Rate:
        """``busy_ns`` is cumulative. A first sample says 0 %, and so does one that came at the same instant."""
        if last is None:
            return Rate(now_ns, busy_ns, 0.0, waiting)
        spent, passed = max(0, busy_ns - last.busy_ns), now_ns - last.at_ns
        percent = min(100.0, 100.0 * spent / passed) if passed > 0 else last.percent
        return Rate(now_ns, busy_ns, percent, waiting or spent > 0)


@dataclass(frozen=True)
class InstanceUsage:
    """One instance on one GPU. Memory in bytes, shares in percent of the device's time."""

    gpu: int
    id: str
    short: str
    weight: int
    highprio: bool
    percent: float
    """What it had between the last two samples."""
    entitled: float
    """What the policy entitles it to now."""
    mem_used: int
    """All of it, ``mem_other`` included."""
    mem_limit: int
    mem_other: int
    """In use and unknown to its hooks, from NVML: contexts, modules, and what passed the hook."""
    processes: tuple[int, ...]
    """Host pids of those that use this GPU."""
    waiting: bool
    holding: bool
    busy_ns: int
    turns: int
    overdue: int
    counters: Counters
    audit: Standing
    shut: bool
    """The audit shut its gate."""


@dataclass(frozen=True)
class GpuUsage:
    """One GPU and the instances on it."""

    index: int
    uuid: str
    name: str
    memory: int
    simulated: bool
    policy: int
    max_inst: int
    prio_ratio: int
    percent: float
    native: bool
    """The gate lets everyone through: policy 5, or the watchdog gave up on scheduling."""
    fallbacks: int
    instances: tuple[InstanceUsage, ...]
    starved: int = 0
    """Times that somebody who was due waited for too long, and everybody got plain sharing for a while."""
    audit: str = "off"
    """``ok``; ``off``; or why NVML's figures cannot be had."""
