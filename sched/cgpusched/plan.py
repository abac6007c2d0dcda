"""A plan: what a policy means for the gate, in the gate's own terms (time, order, who may be skipped)."""

from dataclasses import dataclass, field

UNIT_SLICE_NS = 5_000_000
"""One slice. docs/architecture.md says why 5 ms."""


@dataclass(frozen=True)
class Turn:
    """One instance's place in the rotation."""

    id: str
    quantum_ns: int
    """Length of its turn; 0 = paused, never granted."""
    high: bool = False
    """Preempts the others while it has work, up to ``GpuPlan.high_percent``."""
    shut: bool = False
    """The audit shut its gate: its programs wait, as when it is paused, and know why."""


@dataclass(frozen=True)
class GpuPlan:
    """How one GPU's time is dealt.

    The rotation is ``turns`` in order, then ``unowned_ns`` during which nobody runs.
    """

    turns: tuple[Turn, ...] = ()
    unowned_ns: int = 0
    skip_idle: bool = True
    """An owner with nothing to run loses its turn at once (policies 1, 4); else its turn passes, unused (0, 2, 3)."""
    drain: bool = True
    """Wait for work in flight before the next turn starts (all but 4)."""
    native: bool = False
    """The driver schedules; every gate stands open but for paused ones (policy 5)."""
    high_percent: int = 90
    entitled: dict[str, float] = field(default_factory=dict, compare=False)
    """For display: the percentage of the device that each instance is entitled to now."""
