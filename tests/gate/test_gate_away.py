"""What a program had of the device while no daemon was there is paid back, in virtual time."""

from itertools import chain

import pytest
from gate_virtual import MS, SLICE, S, Sim, make_plan, never_sync

WEIGHTS = (1, 2)


def used_after(sim: Sim, who: int, away: int, seconds: int = 4) -> list[int]:
    """Device time of both from the moment on that one of them says what it had."""
    sim.run(1 * S)
    sim.clients[who].away = away
    sim.clients[who].bell()
    sim.run((1 + seconds) * S)
    return list(sim.used(1 * S, (1 + seconds) * S))


def two(**options: bool) -> Sim:
    plan = make_plan({i: weight * SLICE for i, weight in enumerate(WEIGHTS)}, **options)
    return Sim([never_sync(1 * MS), never_sync(1 * MS)], plan)


@pytest.mark.parametrize("skip_idle", [True, False])
@pytest.mark.parametrize("who", [0, 1])
def test_it_is_paid_back(who: int, skip_idle: bool) -> None:
    used = used_after(two(skip_idle=skip_idle), who, 300 * MS)
    used[who] += 300 * MS
    assert used[1] / used[0] == pytest.approx(2, rel=0.015)


def test_a_second_time_only_what_is_more_counts() -> None:
    """A process of the same instance had the device at the same time."""
    sim = two()
    used_after(sim, 1, 300 * MS, 3)
    sim.clients[1].away = 310 * MS
    sim.clients[1].bell()
    sim.run(8 * S)
    used = sim.used(1 * S, 8 * S)
    assert (used[1] + 310 * MS) / used[0] == pytest.approx(2, rel=0.015)


@pytest.mark.parametrize(("who", "others_ms"), [(0, 1000), (1, 1000)])
def test_nobody_is_kept_waiting_for_long(who: int, others_ms: int) -> None:
    """Whatever it says: the other one has the device for a second, and then both as before."""
    used = used_after(two(), who, 2**63)
    other = 1 - who
    left = 4 * S - others_ms * MS
    assert used[who] == pytest.approx(left * WEIGHTS[who] / 3, rel=0.03)
    assert used[other] == pytest.approx(others_ms * MS + left * WEIGHTS[other] / 3, rel=0.03)


@pytest.mark.parametrize("skip_idle", [True, False])
def test_it_is_paid_when_the_other_is_back(skip_idle: bool) -> None:
    """Not with the time that passes until then."""
    late = chain([("sleep", 400 * MS)], never_sync(1 * MS))
    plan = make_plan({0: SLICE, 1: 2 * SLICE}, skip_idle=skip_idle)
    sim = Sim([never_sync(1 * MS), late], plan)
    sim.clients[0].away = 300 * MS
    sim.run(4 * S)
    used = sim.used(400 * MS, 4 * S)
    assert used[1] / (used[0] + 300 * MS) == pytest.approx(2, rel=0.03)


def test_alone_it_pays_nothing() -> None:
    sim = Sim([never_sync(1 * MS)], make_plan({0: SLICE}, skip_idle=False))
    assert used_after(sim, 0, 300 * MS)[0] > 3.98 * S
