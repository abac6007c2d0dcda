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


def test_soft_lent_share_is_back_within_100_ms_plus_a_kernel():
    kernel, period = 1 * MS, 700 * MS
    habits = [bursts(kernel, 5 * MS, period)] + [never_sync(kernel) for _ in range(19)]
    sim = Sim(habits, make_plan({i: SLICE for i in range(20)}, drain=False))
    sim.run(10 * S)
    starts = {begin // period: begin % period for client, begin, _ in reversed(sim.runs) if client == 0}
    assert len(starts) >= 13
    assert max(starts.values()) <= 100 * MS + kernel


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
    """At the moment it lets go it has no waiter: its next launch comes after the drain (gate.md's first trap)."""
    def ratio(**tuning):
        sim = Sim([sync_each(10 * MS), sync_each(10 * MS)], make_plan(quanta(1, 2)), **tuning)
        first, second = shares(sim, 12 * S)
        return second / first

    assert ratio() == pytest.approx(2, rel=0.02)
    assert ratio(presume_ns=0, overlap_ns=0) < 1.9


# ---- high priority ----

@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("percent", [20, 50, 90])
def test_high_priority_is_capped_in_any_window(kernel, percent):
    plan = make_plan([(0, SLICE, True), (1, SLICE, False), (2, SLICE, False)], high_percent=percent)
    sim = Sim([never_sync(kernel), never_sync(1 * MS), sync_each(1 * MS)], plan)
    high, low, lowest = shares(sim, 5 * S)
    most = max(sim.used(t, t + 100 * MS)[0] for t in range(1 * S, 5 * S, 7 * MS))
    assert most <= (percent + 1) * MS
    assert high >= 0.85 * percent / 100 if kernel < 10 * MS else high >= 0.7 * percent / 100
    assert low == pytest.approx(lowest, rel=0.05)


def test_high_priority_preempts_at_once_and_gives_way_when_idle():
    plan = make_plan([(0, SLICE, True), (1, SLICE, False), (2, SLICE, False)])
    sim = Sim([bursts(100 * US, 100 * US, 20 * MS), never_sync(100 * US), never_sync(100 * US)], plan)
    high, low, lowest = shares(sim, 8 * S)
    assert high == pytest.approx(0.005, abs=0.0005)
    assert low == pytest.approx(lowest, rel=0.02)  # a turn cut short is finished: the pair stays 1:1
    assert high + low + lowest > 0.95
    starts = [begin for client, begin, _ in sim.runs if client == 0 and begin > 1 * S]
    late = sorted(begin % (20 * MS) for begin in starts)
    assert late[len(late) // 2] < 2 * MS


def test_high_priority_alone_is_not_capped():
    sim = Sim([never_sync(1 * MS), iter([])], make_plan([(0, SLICE, True), (1, SLICE, False)], high_percent=20))
    assert shares(sim, 2 * S)[0] > 0.99


def test_two_of_high_priority_share_by_weight():
    plan = make_plan([(0, SLICE, True), (1, 2 * SLICE, True), (2, SLICE, False)], high_percent=80)
    first, second, low = shares(Sim([never_sync(1 * MS) for _ in range(3)], plan), 10 * S)
    assert second / first == pytest.approx(2, rel=0.05)
    assert first + second <= 0.81 and low > 0.15


@pytest.mark.parametrize("options", [{"skip_idle": False, "unowned_ns": 10 * SLICE}, {"drain": False}])
def test_high_priority_under_other_policies(options):
    plan = make_plan([(0, SLICE, True), (1, 5 * SLICE, False)], high_percent=60, **options)
    high, low = shares(Sim([never_sync(1 * MS), never_sync(1 * MS)], plan), 5 * S)
    assert 0.5 < high <= 0.61
    assert low > 0.1


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
