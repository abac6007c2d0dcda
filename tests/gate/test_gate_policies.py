"""The policies' table, row by row: what a policy says (cgpusched.policy), given to the real scheduling step."""

import pytest
from gate_virtual import MS, S, Sim, make_plan, never_sync, sync_each

from cgpusched.model import GpuSettings, Policy, Share
from cgpusched.plan import GpuPlan
from cgpusched.policy import plan

BUSY, IDLE = "busy", "idle"


def of(policy: int, weights, max_inst=20, high=()) -> GpuPlan:
    shares = [(str(n), Share(1 << 30, weight, n in high)) for n, weight in enumerate(weights)]
    return plan(GpuSettings(Policy(policy), max_inst), shares)


def to_core(made: GpuPlan):
    """As Gate.set_plan()."""
    return make_plan([(int(turn.id), turn.quantum_ns, turn.high) for turn in made.turns], skip_idle=made.skip_idle,
                     drain=made.drain, native=made.native, unowned_ns=made.unowned_ns, high_percent=made.high_percent)


def got(made: GpuPlan, *states, seconds=8):
    habits = [(never_sync(1 * MS), sync_each(1 * MS))[n % 2] if state == BUSY else iter([])
              for n, state in enumerate(states)]
    sim = Sim(habits, to_core(made))
    sim.run(1 * S)
    start = sim.now
    sim.run(seconds * S)
    return [used / (seconds * S) for used in sim.used(start, sim.now)]


ROWS = [
    # policy, weights, max_inst, who is busy, the shares
    (0, (1, 1), 4, (BUSY, BUSY), (1 / 4, 1 / 4)),      # 1 / max_inst, always
    (0, (3, 1), 4, (BUSY, BUSY), (1 / 4, 1 / 4)),      # weights do not matter
    (0, (1, 1), 4, (BUSY, IDLE), (1 / 4, 0)),          # an idle one's slice passes unused
    (0, (1,), 4, (BUSY,), (1 / 4,)),                   # and so do those that nobody owns
    (0, (1, 0), 4, (BUSY, BUSY), (1 / 4, 0)),          # and a paused one's
    (1, (1, 1), 4, (BUSY, BUSY), (1 / 2, 1 / 2)),      # among those that use the GPU
    (1, (3, 1), 4, (BUSY, BUSY), (1 / 2, 1 / 2)),
    (1, (1, 1, 1), 4, (BUSY, IDLE, BUSY), (1 / 2, 0, 1 / 2)),
    (1, (1, 1), 4, (BUSY, IDLE), (1, 0)),              # one alone gets all
    (1, (1, 0), 4, (BUSY, BUSY), (1, 0)),
    (2, (1, 3), 4, (BUSY, BUSY), (1 / 4, 3 / 4)),      # weight / sum of weights
    (2, (1, 3), 20, (BUSY, BUSY), (1 / 4, 3 / 4)),     # whatever max_inst
    (2, (1, 3), 4, (BUSY, IDLE), (1 / 4, 0)),          # an idle one still consumes its slices
    (2, (1, 3), 4, (IDLE, BUSY), (0, 3 / 4)),
    (2, (2, 0), 4, (BUSY, BUSY), (1, 0)),              # a paused one has none
    (2, (2,), 4, (BUSY,), (1,)),
    (3, (5, 10), 20, (BUSY, BUSY), (1 / 4, 1 / 2)),    # weight / max_inst, always
    (3, (5, 10), 20, (BUSY, IDLE), (1 / 4, 0)),
    (3, (5,), 20, (BUSY,), (1 / 4,)),
    (3, (20,), 20, (BUSY,), (1,)),
    (3, (5, 0), 20, (BUSY, BUSY), (1 / 4, 0)),
    (4, (1, 1), 4, (BUSY, BUSY), (1 / 2, 1 / 2)),      # as 1
    (4, (3, 1), 4, (BUSY, IDLE), (1, 0)),
    (4, (1, 0), 4, (BUSY, BUSY), (1, 0)),
    (5, (1, 0), 4, (BUSY, BUSY), (1, 0)),              # the driver's own scheduling; paused is paused
]


@pytest.mark.parametrize(("policy", "weights", "max_inst", "states", "want"), ROWS)
def test_row(policy, weights, max_inst, states, want):
    for share, expected in zip(got(of(policy, weights, max_inst), *states), want, strict=True):
        assert share == pytest.approx(expected, abs=0.01)


def test_turns_of_2_to_1_are_four_times_as_short_as_of_8_to_4():
    turns = {}
    for weights in ((2, 1), (8, 4)):
        sim = Sim([never_sync(1 * MS), never_sync(1 * MS)], to_core(of(2, weights)))
        sim.run(6 * S)
        turns[weights] = sim.core.c.turns
    assert turns[2, 1] / turns[8, 4] == pytest.approx(4, rel=0.05)


@pytest.mark.parametrize(("policy", "change"), [
    *((policy, "policy") for policy in range(5)), *((policy, "highprio") for policy in range(5)),
    (2, "weight"), (3, "weight"), (0, "max_inst"), (3, "max_inst")])
def test_live_changes_hold_no_debt_and_starve_nobody(policy, change):
    """One had overrun its turn by far; whatever is changed then, both have their new shares from the next turn on."""
    before, weights = of(policy, (1, 1), 4), (1, 1)
    after = {"policy": lambda: of((policy + 1) % 5, (1, 1), 4), "weight": lambda: of(policy, (1, 2), 4),
             "max_inst": lambda: of(policy, (1, 1), 3), "highprio": lambda: of(policy, (1, 1), 4, high={1})}[change]()
    assert after != before
    sim = Sim([never_sync(30 * MS), never_sync(1 * MS)], to_core(before))
    sim.run(2 * S + 33 * MS)
    sim.plan(to_core(after))
    assert all(sim.core.c.entity[n].credit >= 0 for n in range(len(weights)))
    changed = sim.now
    sim.run(400 * MS)
    assert all(sim.longest_gap(n, changed, sim.now) <= 250 * MS for n in range(2))
