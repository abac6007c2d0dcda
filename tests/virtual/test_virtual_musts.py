"""The deterministic cells of the benchmark's table, in virtual time: a busy machine can't blur them.

Each holds the real scheduling step to the *must* of the same cell of ``make bench``.
"""

import pytest
from gate_virtual import Sim, bursts, make_plan, never_sync, sync_each
from virtual_day import MS, US, Container, Habit, S, Scenario

from cgpusched.model import Policy
from cgpusched.plan import UNIT_SLICE_NS

KERNELS = [10 * US, 100 * US, 1 * MS, 10 * MS, 50 * MS]
CHUNKS = [0, 10 * MS]


def one_epoch(day, policy, weights, habits, seconds, max_inst=20):
    """What containers of these weights get, after 1.5 s."""
    scenario = Scenario(policy, max_inst)
    scenario.push()
    for weight, habit in zip(weights, habits, strict=True):
        scenario.join(Container(habit, weight))
    scenario.wait(1500 * MS)
    scenario.mark()
    scenario.wait(seconds * S)
    scenario.epoch()
    epoch, = scenario.run(day)
    assert scenario.overlaps == 0
    return epoch


def ratio_error(epoch, weights):
    """The largest relative error of a container's share of the device time used."""
    used = [epoch.got[i].used for i in range(len(weights))]
    return max(abs(u / sum(used) / (w / sum(weights)) - 1) for u, w in zip(used, weights, strict=True))


def window(weights, kernels):
    """At least 8 s, and 300 kernels of the lightest container."""
    lightest = min(range(len(weights)), key=weights.__getitem__)
    return max(8, -(-300 * kernels[lightest] * sum(weights) // weights[lightest] // S))


@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("chunk", CHUNKS)
def test_one_to_two_within_1_percent(day, kernel, chunk):
    epoch = one_epoch(day, Policy.WEIGHTED, (1, 2), [Habit(kernel, chunk)] * 2, window((1, 2), (kernel, kernel)))
    assert ratio_error(epoch, (1, 2)) <= 0.01
    assert sum(epoch.share(i) for i in range(2)) >= (0.985 if chunk else 0.99)


@pytest.mark.parametrize("kernels", [(10 * US, 10 * MS), (10 * MS, 10 * US), (100 * US, 50 * MS), (50 * MS, 1 * MS)])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_mixed_lengths_within_1_percent(day, kernels, chunk):
    epoch = one_epoch(day, Policy.WEIGHTED, (1, 2), [Habit(kernel, chunk) for kernel in kernels],
                      max(30, window((1, 2), (max(kernels),) * 2)))
    assert ratio_error(epoch, (1, 2)) <= 0.01


@pytest.mark.parametrize("kernel", KERNELS[:4])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_five_ways_within_2_percent(day, kernel, chunk):
    weights = (1, 2, 3, 4, 5)
    epoch = one_epoch(day, Policy.WEIGHTED, weights, [Habit(kernel, chunk)] * 5, window(weights, (kernel,) * 5))
    assert ratio_error(epoch, weights) <= 0.02


@pytest.mark.parametrize("policy", [Policy.PREEMPTIVE, Policy.WEIGHTED])
@pytest.mark.parametrize("kernel", KERNELS[:3])
def test_25_containers_within_2_percent(day, policy, kernel):
    epoch = one_epoch(day, policy, (1,) * 25, [Habit(kernel, chunk) for chunk in CHUNKS * 12] + [Habit(kernel)], 60, 25)
    assert ratio_error(epoch, (1,) * 25) <= 0.02


@pytest.mark.parametrize("kernel", [10 * US, 100 * US, 1 * MS, 5 * MS])
@pytest.mark.parametrize("weights", [(1, 2), (1, 2, 3, 4, 5), (1,) * 20])
def test_longest_gap_is_at_most_two_rounds(day, kernel, weights):
    epoch = one_epoch(day, Policy.WEIGHTED, weights, [Habit(kernel)] * len(weights), 60)
    for i in range(len(weights)):
        assert epoch.got[i].gap <= 2 * sum(weights) * UNIT_SLICE_NS


@pytest.mark.parametrize("kernel", KERNELS[:4])
@pytest.mark.parametrize("chunk", CHUNKS)
def test_fixed_5_and_10_of_20_within_a_point(day, kernel, chunk):
    epoch = one_epoch(day, Policy.FIXED, (5, 10), [Habit(kernel, chunk)] * 2, 60)
    assert epoch.share(0) == pytest.approx(0.25, abs=0.01)
    assert epoch.share(1) == pytest.approx(0.50, abs=0.01)


def test_a_bursty_one_gets_all_it_asks(day):
    """3 ms in 10 beside a busy one, policy 1."""
    epoch = one_epoch(day, Policy.PREEMPTIVE, (1, 1), [Habit(100 * US, 3 * MS, 10 * MS), Habit(100 * US)], 60)
    assert epoch.share(0) >= 0.30 * 0.99
    assert epoch.share(0) + epoch.share(1) >= 0.97


@pytest.mark.parametrize("kernel", KERNELS[:4])
def test_priority_is_capped_in_any_window(kernel):
    plan = make_plan([(0, UNIT_SLICE_NS, True), (1, UNIT_SLICE_NS, False), (2, UNIT_SLICE_NS, False)], high_percent=90)
    sim = Sim([never_sync(kernel), never_sync(1 * MS), sync_each(1 * MS)], plan)
    sim.run(9 * S)
    # a window that holds the most begins where a stretch begins or ends where one ends
    edges = [begin for who, begin, _ in sim.runs if who == 0] + [end - 100 * MS for who, _, end in sim.runs if who == 0]
    spans = [(begin, end) for who, begin, end in sim.runs if who == 0]
    most = 0
    for edge in (edge for edge in edges if 1 * S <= edge <= 8900 * MS):
        most = max(most, sum(max(min(end, edge + 100 * MS) - max(begin, edge), 0) for begin, end in spans
                             if begin < edge + 100 * MS and end > edge))
    assert most <= 91 * MS
    assert sim.used(1 * S, 9 * S)[0] >= 0.85 * 8 * S


@pytest.mark.parametrize("kernel", [100 * US, 1 * MS])
def test_priority_comes_within_1_ms_and_a_kernel(kernel):
    plan = make_plan([(0, UNIT_SLICE_NS, True), (1, UNIT_SLICE_NS, False), (2, UNIT_SLICE_NS, False)], high_percent=90)
    sim = Sim([bursts(100 * US, 100 * US, 20 * MS), never_sync(kernel), never_sync(kernel)], plan)
    sim.run(9 * S)
    late = sorted(end % (20 * MS) for who, begin, end in sim.runs if who == 0 and begin > 1 * S)
    assert len(late) >= 390
    assert late[len(late) // 2] <= 1 * MS + kernel


@pytest.mark.parametrize("kernel", [100 * US, 1 * MS])
@pytest.mark.parametrize("what,limit", [("kill", 10 * MS), ("stop", 60 * MS)])
def test_the_holder_is_killed_or_stopped(what, limit, kernel):
    """SIGKILL and SIGSTOP of whoever holds the device: the next grant is soon there."""
    for n in range(20):
        sim = Sim([never_sync(kernel), never_sync(kernel)], make_plan({0: UNIT_SLICE_NS, 1: UNIT_SLICE_NS}), seed=n)
        sim.run(300 * MS + n * 370 * US)
        for _ in range(200):
            holder = sim.core.c.holder
            if holder >= 0 and sim.clients[holder].open:
                break
            sim.run(50 * US)
        assert holder >= 0
        getattr(sim, what)(holder)
        begin = sim.now
        sim.run(100 * MS)
        grants = [when for when, note, who in sim.log if note == "grant" and who != holder and when >= begin]
        assert grants and grants[0] - begin <= limit
