"""High priority in virtual time: what it gets, what it leaves to others, and how soon."""

import pytest
from gate_virtual import MS, SLICE, SPAN, US, S, Sim, bursts, make_plan, never_sync, sync_each

KERNELS = [100 * US, 1 * MS, 3 * MS, 7 * MS, 10 * MS]


def shares(sim, duration, warm_up=1 * S):
    """Each client's part of the device time that passed."""
    sim.run(warm_up + duration)
    return [used / duration for used in sim.used(warm_up, warm_up + duration)]


def most_in_a_window(sim, start, end, client=0):
    """Its most device time in any 100 ms: windows that end where one of its runs does are enough."""
    runs = [(begin, until) for who, begin, until in sim.runs if who == client and until > start]
    most = 0
    for n, (_, until) in enumerate(runs):
        if until > end:
            break
        had, k = 0, n
        while k >= 0 and runs[k][1] > until - 100 * MS:
            had += runs[k][1] - max(runs[k][0], until - 100 * MS)
            k -= 1
        most = max(most, had)
    return most


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("low", [1 * MS, 10 * MS])
def test_90_percent_in_any_window_and_most_of_it_delivered(kernel, low):
    plan = make_plan([(0, SLICE, True), (1, SLICE, False), (2, SLICE, False)], high_percent=90)
    sim = Sim([never_sync(kernel), never_sync(low), sync_each(low)], plan)
    high, first, second = shares(sim, 4 * S)
    assert most_in_a_window(sim, 1 * S, 5 * S) <= 91 * MS
    assert high >= 0.85
    assert first == pytest.approx(second, rel=0.2) and first + second > 0.05


def test_90_percent_of_10_us_kernels():
    plan = make_plan([(0, SLICE, True), (1, SLICE, False)], high_percent=90)
    sim = Sim([never_sync(10 * US), never_sync(1 * MS)], plan)
    high, _ = shares(sim, 1 * S, S // 2)
    assert most_in_a_window(sim, S // 2, 3 * S // 2) <= 91 * MS
    assert high >= 0.85


def hiccups(kernel, pause, each=37):
    """Busy, but for a pause after so many kernels: its CPU was somebody else's."""
    while True:
        for n in range(each):
            yield "launch", kernel
            if n % 10 == 9:
                yield ("sync",)
        yield ("sync",)
        yield "sleep", pause


@pytest.mark.parametrize("kernel", [10 * US, 1 * MS, 10 * MS])
@pytest.mark.parametrize(("pause", "each"), [(300 * US, 37), (1 * MS, 37), (4 * MS, 37), (300 * US, 3), (1 * MS, 4)])
def test_others_that_are_late_with_a_launch_still_count(kernel, pause, each):
    """Now and then, or several times while the high class may not run."""
    plan = make_plan([(0, SLICE, True), (1, SLICE, False)], high_percent=90)
    sim = Sim([never_sync(kernel), hiccups(1 * MS, pause, each)], plan)
    duration = 1 * S if kernel < MS else 20 * S
    high, low = shares(sim, duration)
    most = most_in_a_window(sim, 1 * S, 1 * S + duration)
    assert most <= 91 * MS + (100 * US if kernel < SPAN else 0)  # twice the spans of the real gate are in flight here
    assert high >= 0.85 and high + low >= 0.96


def used_with_and_without(plan, habits):
    """Shares with the allowance for those who are late, and without."""
    return [shares(Sim(habits(), plan, linger_ns=linger_ns), 10 * S) for linger_ns in (5 * MS, 0)]


BURSTS = [(90, 1, 20, 1), (90, 5, 100, 1), (90, 3, 40, 1), (90, 8, 100, 1), (90, 12, 150, 1), (20, 7, 30, 2),
          (50, 7, 30, 2), (50, 8, 30, 1), (50, 12, 30, 1), (30, 12, 40, 1), (70, 12, 60, 1)]


@pytest.mark.parametrize(("percent", "work", "period", "lows"), BURSTS)
def test_others_that_come_in_bursts(percent, work, period, lows):
    """They get what they ask. Where their pauses look like late launches, the high class loses some of what it has
    beyond its percentage, and nothing else."""
    plan = make_plan([(0, SLICE, True), *((n, SLICE, False) for n in range(1, lows + 1))], high_percent=percent)
    used, before = used_with_and_without(
        plan, lambda: [never_sync(1 * MS), *(bursts(500 * US, work * MS, period * MS) for _ in range(lows))])
    assert used[1:] == pytest.approx([work / period] * lows, rel=0.02)
    assert used[0] >= min(percent / 100, before[0] - 0.005) and sum(used) >= 0.95
    if period > 3 * work * lows:  # most of the time nobody else has work
        assert sum(used) >= 0.97


@pytest.mark.parametrize(("work", "period"), [(10, 2000), (100, 2000), (100, 1000), (500, 4000)])
def test_others_that_have_a_little_all_the_time(work, period):
    plan = make_plan([(0, SLICE, True), (1, SLICE, False)], high_percent=90)
    used, before = used_with_and_without(
        plan, lambda: [never_sync(1 * MS), bursts(work * US, work * US, period * US)])
    assert used[1] == pytest.approx(before[1], rel=0.05)
    assert used[0] >= 0.9 and sum(used) > sum(before) - 0.025


@pytest.mark.parametrize("percent", [20, 50, 99])
@pytest.mark.parametrize("kernel", [100 * US, 1 * MS, 5 * MS])
def test_other_percentages(kernel, percent):
    plan = make_plan([(0, SLICE, True), (1, SLICE, False)], high_percent=percent)
    sim = Sim([never_sync(kernel), never_sync(1 * MS)], plan)
    high, low = shares(sim, 3 * S)
    assert most_in_a_window(sim, 1 * S, 4 * S) <= (percent + 1) * MS
    assert high >= (0.85 if kernel < 5 * MS or percent > 20 else 0.7) * percent / 100
    assert low > 0


@pytest.mark.parametrize(("kernel", "percent"), [(30 * MS, 20), (50 * MS, 20), (50 * MS, 40), (200 * MS, 50)])
def test_the_excess_of_long_kernels_is_repaid(kernel, percent):
    """Longer than its percentage of a window: such a kernel is let through, and the others get theirs afterwards."""
    plan = make_plan([(0, SLICE, True), (1, SLICE, False)], high_percent=percent)
    high, low = shares(Sim([never_sync(kernel), never_sync(1 * MS)], plan), 20 * S)
    assert 0.7 * percent / 100 <= high <= (percent + 1) / 100
    assert high + low > 0.95


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


def test_one_of_two_is_idle_and_the_other_has_all_of_the_percentage():
    plan = make_plan([(0, SLICE, True), (1, SLICE, True), (2, SLICE, False)], high_percent=80)
    first, second, low = shares(Sim([never_sync(1 * MS), iter([]), never_sync(1 * MS)], plan), 4 * S)
    assert 0.75 < first <= 0.81 and second == 0 and low > 0.18


def test_it_means_nothing_under_native():
    plan = make_plan([(0, SLICE, True), (1, SLICE, False)], high_percent=20, native=True)
    first, second = shares(Sim([never_sync(1 * MS), never_sync(1 * MS)], plan), 2 * S)
    assert first == pytest.approx(second, rel=0.1)


def test_prio_ratio_and_highprio_change_live():
    def plan(high, percent):
        return make_plan([(0, SLICE, high), (1, SLICE, False)], high_percent=percent)
    sim = Sim([never_sync(1 * MS), never_sync(1 * MS)], plan(True, 80))
    for high, percent, want in [(True, 80, 0.8), (True, 30, 0.3), (False, 30, 0.5), (True, 60, 0.6)]:
        sim.plan(plan(high, percent))
        changed = sim.now
        sim.run(200 * MS)  # the first window fills up; from then on it holds
        for client in (0, 1):
            assert sim.longest_gap(client, changed, sim.now) <= 100 * MS
        start = sim.now
        sim.run(2 * S)
        assert sim.used(start, sim.now)[0] / (2 * S) == pytest.approx(want, abs=0.03)


@pytest.mark.parametrize("options", [{"skip_idle": False, "unowned_ns": 10 * SLICE}, {"drain": False}])
def test_high_priority_under_other_policies(options):
    plan = make_plan([(0, SLICE, True), (1, 5 * SLICE, False)], high_percent=60, **options)
    high, low = shares(Sim([never_sync(1 * MS), never_sync(1 * MS)], plan), 5 * S)
    assert 0.5 < high <= 0.61
    assert low > 0.1
