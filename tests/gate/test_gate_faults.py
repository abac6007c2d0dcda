"""Clients that die, stop, hang or lie, in virtual time."""

import pytest
from gate_virtual import MS, SLICE, US, S, Sim, make_plan, never_sync, sync_each

from cgpusched._gate import lib

PAIR = {0: SLICE, 1: SLICE}


def holder_after(sim: Sim, client: int) -> None:
    """Runs until ``client`` has the grant, or has not let go of it yet, and has work on the device."""
    for _ in range(10_000):
        sim.run(200 * US)
        phase = sim.core.c.entity[client].phase
        if phase in (lib.CORE_OPEN, lib.CORE_CLOSING) and sim.clients[client].last_end > sim.now + 100 * US:
            return
    raise AssertionError("never held")


@pytest.mark.parametrize("kernel", [100 * US, 10 * MS])
def test_a_killed_holder_frees_the_device(kernel):
    sim = Sim([never_sync(kernel), never_sync(kernel)], make_plan(PAIR))
    sim.run(1 * S)
    holder_after(sim, 0)
    killed = sim.now
    sim.kill(0)
    sim.run(2 * kernel + 10 * MS)
    grants = [t for t, what, who in sim.log if what == "grant" and who == 1 and t >= killed]
    assert grants and grants[0] - killed <= 1 * MS
    start = sim.now
    sim.run(1 * S)
    assert sim.used(start, sim.now)[1] >= 0.99 * S


@pytest.mark.parametrize("skip_idle", [True, False])
def test_a_stopped_holder_costs_one_patience(skip_idle):
    sim = Sim([never_sync(100 * US), never_sync(100 * US)], make_plan(PAIR, skip_idle=skip_idle))
    sim.run(1 * S)
    holder_after(sim, 0)
    stopped = sim.now
    sim.stop(0)
    sim.run(100 * MS)
    grants = [t for t, what, who in sim.log if what == "grant" and who == 1 and t >= stopped]
    assert grants[0] - stopped <= 60 * MS
    assert sim.core.c.entity[0].overdue_count == 1
    start = sim.now
    sim.run(1 * S)
    assert sim.used(start, sim.now)[1] >= (0.99 if skip_idle else 0.49) * S
    sim.cont(0)
    start = sim.now
    sim.run(4 * S)
    first, second = sim.used(start + 2 * S, sim.now)
    assert first == pytest.approx(second, rel=0.02)


def test_a_stopped_waiter_is_asked_ever_more_rarely():
    sim = Sim([never_sync(100 * US), never_sync(100 * US)], make_plan(PAIR))
    sim.run(1 * S)
    holder_after(sim, 1)
    assert sim.clients[0].demand
    sim.stop(0)
    sim.run(1 * S)
    start = sim.now
    sim.run(4 * S)
    assert sim.used(start, sim.now)[1] >= 0.97 * 4 * S
    sim.cont(0)
    sim.run(1 * S)
    start = sim.now
    sim.run(4 * S)
    first, second = sim.used(start, sim.now)
    assert first == pytest.approx(second, rel=0.03)


def test_a_long_kernel_is_not_overdue_when_it_was_announced():
    sim = Sim([sync_each(500 * MS), never_sync(1 * MS)], make_plan(PAIR))
    sim.run(20 * S)
    assert sim.core.c.entity[0].overdue_count == 0
    first, second = sim.used(2 * S, sim.now)
    assert first == pytest.approx(second, rel=0.1)


def test_claims_of_work_in_flight_are_believed_once():
    """It claims hours of work and never lets go: its neighbours wait the cap once, then 50 ms at a time at most."""
    sim = Sim([never_sync(1 * MS), never_sync(1 * MS), never_sync(1 * MS)], make_plan({0: SLICE, 1: SLICE, 2: SLICE}))
    liar = sim.clients[0]
    sim.run(100 * MS)
    honest = liar.report

    def lie(epoch):
        return honest(epoch) | {"opened": 1, "holds": 1, "undrained": 1, "inflight_ns": 2**63, "demand": 1}
    liar.report = lie
    sim.run(5 * S)
    start = sim.now
    liar.report = honest  # it lets go once, and lies on
    sim.dirty.add(0)
    sim.daemon([])
    liar.report = lie
    sim.run(4 * S)
    assert sim.longest_gap(1, start, sim.now) <= 80 * MS
    first, second = sim.used(start, sim.now)[1:]
    assert first == pytest.approx(second, rel=0.05)
    assert first + second > 0.9 * 4 * S


def test_demand_without_launches_harms_nobody():
    sim = Sim([iter([]), never_sync(1 * MS), never_sync(1 * MS)], make_plan({0: SLICE, 1: SLICE, 2: SLICE}))
    sim.clients[0].report = lambda epoch: {"epoch": epoch, "demand": 1}
    sim.dirty.add(0)
    sim.daemon([])
    sim.run(10 * S)
    first, second = sim.used(2 * S, sim.now)[1:]
    assert first == pytest.approx(second, rel=0.03)
    assert first + second > 0.96 * 8 * S


def test_one_who_gave_back_early_is_let_in_again_when_alone():
    """Its deadline came and it let go; meanwhile the other has gone: it must not wait at a word it cannot accept."""
    sim = Sim([never_sync(1 * MS), never_sync(1 * MS)], make_plan(PAIR))
    sim.run(1 * S)
    sim.kill(1)
    start = sim.now
    sim.run(1 * S)
    assert sim.used(start, sim.now)[0] >= 0.98 * S


def test_nobody_wants_nothing_ticks():
    for options in ({}, {"skip_idle": False}, {"skip_idle": False, "unowned_ns": 5 * SLICE}, {"native": True}):
        sim = Sim([iter([]), iter([])], make_plan(PAIR, **options))
        sim.run(1 * S)
        assert sim.timer == 2**64 - 1
        assert sim.core.c.turns == (2 if options.get("native") else 0)


def test_longest_wait_is_seen():
    sim = Sim([never_sync(1 * MS), never_sync(1 * MS)], make_plan(PAIR))
    sim.run(1 * S)
    assert lib.core_longest_wait(sim.core.c, sim.now) <= 15 * MS
