"""Shares in virtual time: the scheduling step against simulated clients on a simulated FIFO device."""

import pytest
from gate_virtual import MS, SLICE, US, S, Sim, bursts, make_plan, never_sync, sync_each

KERNELS = [100 * US, 1 * MS, 10 * MS]
HABITS = [never_sync, sync_each]


def shares(sim: Sim, duration: int, warm_up: int = 1 * S) -> list[float]:
    """Each client's part of the device time that passed, and that no time was invented or lost."""
    sim.run(warm_up + duration)
    core = sim.core.c
    assert core.total_ns == core.idle_ns + sum(core.entity[i].busy_ns for i in range(len(sim.clients)))
    return [used / duration for used in sim.used(warm_up, warm_up + duration)]


def quanta(*weights: int) -> dict[int, int]:
    return {i: weight * SLICE for i, weight in enumerate(weights)}


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("kernel", [*KERNELS, 50 * MS])
@pytest.mark.parametrize("skip_idle", [True, False])
def test_one_to_two(kernel, habit, skip_idle):
    sim = Sim([habit(kernel), habit(kernel)], make_plan(quanta(1, 2), skip_idle=skip_idle))
    first, second = shares(sim, 8 * S if kernel < 50 * MS else 45 * S)
    assert second / first == pytest.approx(2, rel=0.015)
    assert first + second > (0.99 if habit is never_sync else 0.985)


@pytest.mark.parametrize("habits", [lambda: [never_sync(100 * US), sync_each(10 * MS)],
                                    lambda: [sync_each(50 * MS), never_sync(1 * MS)]])
def test_mixed_lengths(habits):
    first, second = shares(Sim(habits(), make_plan(quanta(1, 1))), 20 * S)
    assert second / first == pytest.approx(1, rel=0.015)


@pytest.mark.parametrize("habit", HABITS)
@pytest.mark.parametrize("kernel", KERNELS)
def test_five_ways(kernel, habit):
    sim = Sim([habit(kernel) for _ in range(5)], make_plan(quanta(1, 2, 3, 4, 5)))
    got = shares(sim, 30 * S)
    for i, share in enumerate(got):
        assert share / sum(got) == pytest.approx((i + 1) / 15, rel=0.02)


@pytest.mark.parametrize("kernel", KERNELS)
def test_no_gap_longer_than_two_rounds(kernel):
    sim = Sim([never_sync(kernel) for _ in range(5)], make_plan(quanta(1, 2, 3, 4, 5)))
    shares(sim, 8 * S)
    for i in range(5):
        assert sim.longest_gap(i, 1 * S, 9 * S) <= 2 * 15 * SLICE


# ---- the policies' table, row by row ----

@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("habit", HABITS)
def test_fixed_5_and_10_of_20(kernel, habit):
    plan = make_plan(quanta(5, 10), skip_idle=False, unowned_ns=5 * SLICE)
    first, second = shares(Sim([habit(kernel), habit(kernel)], plan), 10 * S)
    assert first == pytest.approx(0.25, abs=0.005)
    assert second == pytest.approx(0.50, abs=0.005)


def test_fixed_one_alone_gets_no_more():
    plan = make_plan(quanta(5, 10), skip_idle=False, unowned_ns=5 * SLICE)
    first, second = shares(Sim([never_sync(1 * MS), iter([])], plan), 10 * S)
    assert (first, second) == (pytest.approx(0.25, abs=0.005), 0)


@pytest.mark.parametrize("kernel", KERNELS)
def test_fair_share_is_one_of_max_inst(kernel):
    plan = make_plan(quanta(1, 1), skip_idle=False, unowned_ns=18 * SLICE)
    for share in shares(Sim([never_sync(kernel), sync_each(kernel)], plan), 20 * S):
        assert share == pytest.approx(0.05, abs=0.002)


def test_preemptive_skips_the_idle():
    assert shares(Sim([never_sync(1 * MS), iter([])], make_plan(quanta(1, 1))), 4 * S)[0] > 0.999


def test_weighted_idle_owner_consumes_its_slices():
    plan = make_plan(quanta(1, 2), skip_idle=False)
    assert shares(Sim([never_sync(1 * MS), iter([])], plan), 8 * S)[0] == pytest.approx(1 / 3, abs=0.005)


def test_weighted_alone_has_all():
    assert shares(Sim([never_sync(1 * MS)], make_plan(quanta(3), skip_idle=False)), 4 * S)[0] > 0.999


@pytest.mark.parametrize("kernels", [(10 * MS, 100 * US), (50 * MS, 1 * MS)])
@pytest.mark.parametrize("habit", HABITS)
def test_soft_charges_its_tails(kernels, habit):
    """Not drained at a turn's end, yet nobody gains by long kernels."""
    sim = Sim([habit(kernel) for kernel in kernels], make_plan(quanta(1, 1), drain=False))
    first, second = shares(sim, 20 * S)
    assert first == pytest.approx(second, rel=0.02)


@pytest.mark.parametrize("owners", [2, 10, 20, 25])
@pytest.mark.parametrize("kernel", KERNELS)
def test_soft_lent_share_is_back_within_100_ms_plus_a_kernel(owners, kernel):
    """It comes back to a device that everybody else has lent, and begins in time, every time."""
    period = 700 * MS
    habits = [bursts(kernel, max(5 * MS, kernel), period), *(never_sync(kernel) for _ in range(owners - 1))]
    sim = Sim(habits, make_plan({i: SLICE for i in range(owners)}, drain=False))
    sim.run(5 * S)
    starts = {begin // period: begin % period for client, begin, _ in reversed(sim.runs)
              if client == 0 and begin > period}
    assert len(starts) >= 5  # the first time it does not come back, it comes with all others
    assert max(starts.values()) <= 100 * MS + kernel


@pytest.mark.parametrize("drain", [True, False])
def test_who_comes_back_goes_next_and_gains_nothing(drain):
    """Where the idle are skipped: after the turn that runs; and nobody gets more than its part by coming back often."""
    habits = [bursts(1 * MS, 20 * MS, 50 * MS), *(never_sync(1 * MS) for _ in range(9))]
    sim = Sim(habits, make_plan({i: SLICE for i in range(10)}, drain=drain))
    got = shares(sim, 6 * S)
    assert max(got) < 0.105 and min(got) > 0.095
    period = 400 * MS
    rests = [bursts(1 * MS, 2 * MS, period), *(never_sync(1 * MS) for _ in range(9))]
    sim = Sim(rests, make_plan({i: SLICE for i in range(10)}, drain=drain))
    sim.run(4 * S)
    starts = {begin // period: begin % period for client, begin, _ in reversed(sim.runs)
              if client == 0 and begin > period}
    assert max(starts.values()) <= SLICE + 3 * MS


def test_several_that_come_back_at_once_are_served_one_after_the_other():
    period = 400 * MS
    habits = [*(bursts(1 * MS, 5 * MS, period) for _ in range(5)), *(never_sync(1 * MS) for _ in range(10))]
    sim = Sim(habits, make_plan({i: SLICE for i in range(15)}))
    sim.run(4 * S)
    for one in range(5):
        starts = {begin // period: begin % period for client, begin, _ in reversed(sim.runs)
                  if client == one and begin > period}
        assert max(starts.values()) <= 7 * SLICE


def test_native_opens_all_but_the_paused():
    sim = Sim([never_sync(1 * MS) for _ in range(3)], make_plan(quanta(1, 5, 0), native=True))
    first, second, third = shares(sim, 2 * S)
    assert third == 0
    assert first == pytest.approx(0.5, abs=0.05) and second == pytest.approx(0.5, abs=0.05)


@pytest.mark.parametrize("options", [{}, {"skip_idle": False}, {"drain": False}, {"native": True}])
def test_weight_0_is_paused(options):
    sim = Sim([never_sync(1 * MS), never_sync(1 * MS)], make_plan(quanta(1, 0), **options))
    first, second = shares(sim, 2 * S)
    assert second == 0 and first > 0.99
    sim.plan(make_plan([(0, SLICE, False), (1, 0, True)], **options))  # high priority is no way around it
    start = sim.now
    sim.run(1 * S)
    assert sim.used(start, sim.now)[1] == 0


# ---- bursts ----

def test_bursty_gets_all_it_asks_beside_a_busy_one():
    sim = Sim([bursts(100 * US, 3 * MS, 10 * MS), never_sync(100 * US)], make_plan(quanta(1, 1)))
    bursty, busy = shares(sim, 8 * S)
    assert bursty == pytest.approx(0.30, abs=0.003)
    assert bursty + busy > 0.97


def test_a_synchronising_one_is_not_taken_for_idle():
    """At the moment it lets go it has no waiter: its next launch comes after the drain."""
    def ratio(**tuning):
        sim = Sim([sync_each(10 * MS), sync_each(10 * MS)], make_plan(quanta(1, 2)), **tuning)
        first, second = shares(sim, 12 * S)
        return second / first

    assert ratio() == pytest.approx(2, rel=0.02)
    assert ratio(presume_ns=0, overlap_ns=0, backstop_ns=0) < 1.9


# ---- live changes ----

def test_weights_change_live_without_old_debt():
    sim = Sim([never_sync(50 * MS), never_sync(1 * MS)], make_plan(quanta(1, 5)))
    sim.run(3 * S + 20 * MS)
    assert sim.core.c.entity[0].credit < 0
    sim.plan(make_plan(quanta(1, 1)))
    changed = sim.now
    assert sim.core.c.entity[0].credit >= 0
    sim.run(20 * S)
    first, second = sim.used(changed, sim.now)
    assert first == pytest.approx(second, rel=0.03)


@pytest.mark.parametrize("before", range(6))
@pytest.mark.parametrize("after", range(6))
def test_policies_switch_live(before, after):
    plans = [make_plan(quanta(1, 1), skip_idle=False, unowned_ns=2 * SLICE), make_plan(quanta(1, 1)),
             make_plan(quanta(1, 2), skip_idle=False), make_plan(quanta(1, 2), skip_idle=False, unowned_ns=SLICE),
             make_plan(quanta(1, 1), drain=False), make_plan(quanta(1, 1), native=True)]
    expect = [(0.25, 0.25), (0.5, 0.5), (1 / 3, 2 / 3), (0.25, 0.5), (0.5, 0.5), (0.5, 0.5)]
    sim = Sim([never_sync(1 * MS), sync_each(1 * MS)], plans[before])
    sim.run(1 * S + 3 * MS)
    sim.plan(plans[after])
    changed = sim.now
    sim.run(100 * MS)  # within one turn and its hand-over everything is new
    for client in range(2):
        assert sim.longest_gap(client, changed, sim.now) <= 45 * MS
    start = sim.now
    sim.run(3 * S)
    for used, share in zip(sim.used(start, sim.now), expect[after], strict=True):
        assert used / (3 * S) == pytest.approx(share, abs=0.03 if after == 5 else 0.01)


def test_join_and_leave_do_not_forgive_debts():
    sim = Sim([never_sync(50 * MS), never_sync(1 * MS), iter([])], make_plan(quanta(1, 1)))
    sim.run(1 * S + 30 * MS)
    debt = sim.core.c.entity[0].credit
    assert debt < 0
    sim.plan(make_plan(quanta(1, 1, 1)))
    assert sim.core.c.entity[0].credit == debt
