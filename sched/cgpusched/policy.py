"""The six policies: pure functions from a GPU's settings and shares to its plan. docs/policies.md has the table.

All share one shape, a rotation of turns with perhaps a stretch that nobody owns, so what an instance is *entitled* to
follows from the plan itself and from who is busy, by one rule for all six (``entitled``).

A high-priority instance stands outside the rotation: busy, it preempts; idle, it is left out. Its turn's length only
says how several of them share, and a slice that policy 0 or 3 reserves passes unowned in its place.
"""

from collections.abc import Collection, Sequence
from dataclasses import replace

from cgpusched.model import GpuSettings, Policy, Share
from cgpusched.plan import UNIT_SLICE_NS, GpuPlan, Turn

Shares = Sequence[tuple[str, Share]]
"""(ID, share) of each instance on one GPU, in the order of their turns."""


def fair(settings: GpuSettings, shares: Shares) -> GpuPlan:
    """0: each has one slice of max_inst, always. Slices of the idle and slices that no instance owns pass unused."""
    turns = _equal(shares)
    return GpuPlan(turns, _unowned(settings, turns), skip_idle=False, high_percent=settings.prio_ratio)


def preemptive(settings: GpuSettings, shares: Shares) -> GpuPlan:
    """1: the instances that use the GPU share it equally; weights do not matter."""
    return GpuPlan(_equal(shares), skip_idle=True, high_percent=settings.prio_ratio)


def weighted(settings: GpuSettings, shares: Shares) -> GpuPlan:
    """2: weight / sum of the weights of the instances that exist; an idle one still consumes its slices."""
    return GpuPlan(_by_weight(shares), skip_idle=False, high_percent=settings.prio_ratio)


def fixed(settings: GpuSettings, shares: Shares) -> GpuPlan:
    """3: weight / max_inst, always."""
    turns = _by_weight(shares)
    return GpuPlan(turns, _unowned(settings, turns), skip_idle=False, high_percent=settings.prio_ratio)


def soft(settings: GpuSettings, shares: Shares) -> GpuPlan:
    """4: as 1, but the next turn starts without waiting for work in flight: tails may overlap."""
    return replace(preemptive(settings, shares), drain=False)


def native(settings: GpuSettings, shares: Shares) -> GpuPlan:
    """5: the driver schedules, memory limits only. Weight 0 pauses even here."""
    return GpuPlan(_equal(shares), native=True, high_percent=settings.prio_ratio)


POLICIES = {
    Policy.FAIR: fair,
    Policy.PREEMPTIVE: preemptive,
    Policy.WEIGHTED: weighted,
    Policy.FIXED: fixed,
    Policy.SOFT: soft,
    Policy.NATIVE: native,
}


def plan(settings: GpuSettings, shares: Shares, busy: Collection[str] = ()) -> GpuPlan:
    """The plan of ``settings.policy``, with ``entitled`` worked out for the instances in ``busy`` having work."""
    made = POLICIES[settings.policy](settings, shares)
    return replace(made, entitled=entitled(made, busy))


def entitled(plan: GpuPlan, busy: Collection[str]) -> dict[str, float]:
    """The percentage of the device that each instance is entitled to now, while those in ``busy`` have work.

    An idle instance of policies 1 and 4 gets the figure it would have if it began now. Idle high priority gets 0.
    """
    if plan.native:
        return {turn.id: 100.0 if turn.quantum_ns else 0.0 for turn in plan.turns}
    high = sum(turn.quantum_ns for turn in plan.turns if turn.high and turn.id in busy)
    normal = [turn for turn in plan.turns if not turn.high]
    round_ns = plan.unowned_ns + sum(t.quantum_ns for t in normal if not plan.skip_idle or t.id in busy)
    # The cap is on what is taken from others: with nobody else at work, nothing is.
    cap = float(plan.high_percent) if any(turn.quantum_ns and turn.id in busy for turn in normal) else 100.0
    shares: dict[str, float] = {}
    for turn in plan.turns:
        if turn.quantum_ns == 0:
            shares[turn.id] = 0.0
        elif turn.high:
            shares[turn.id] = cap * turn.quantum_ns / high if turn.id in busy else 0.0
        else:
            joins = plan.skip_idle and turn.id not in busy
            whole = round_ns + (turn.quantum_ns if joins else 0)
            left = 100.0 - plan.high_percent if high else 100.0
            shares[turn.id] = left * turn.quantum_ns / whole
    return shares


def _equal(shares: Shares) -> tuple[Turn, ...]:
    return tuple(_turn(ident, share, min(share.weight, 1)) for ident, share in shares)


def _by_weight(shares: Shares) -> tuple[Turn, ...]:
    return tuple(_turn(ident, share, share.weight) for ident, share in shares)


def _turn(ident: str, share: Share, slices: int) -> Turn:
    return Turn(ident, 0 if share.shut else UNIT_SLICE_NS * slices, share.highprio, share.shut)


def _unowned(settings: GpuSettings, turns: Sequence[Turn]) -> int:
    """What is left of max_inst slices beside the turns in the rotation, in nanoseconds."""
    return settings.max_inst * UNIT_SLICE_NS - sum(turn.quantum_ns for turn in turns if not turn.high)
