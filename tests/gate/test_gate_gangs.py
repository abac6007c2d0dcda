"""Instances over several GPUs have their turns there together (csrc/gate/gang.c), in virtual time."""

import pytest
from gate_gangs import Node
from gate_virtual import MS, SLICE, US, S, make_plan
from hypothesis import given, settings
from hypothesis import strategies as st

from cgpusched._gate import lib


def equal(*entities, **options):
    return make_plan({i: SLICE for i in entities}, **options)


def shares(node, duration=2 * S, warm_up=S // 4):
    """Each program's part of each GPU's time, its kernels' lengths only: waiting for another GPU is no use."""
    node.run(warm_up)
    before = [dict(device.busy) for device in node.devices]
    start = node.now
    node.run(duration)
    assert all(core.c.starved == 0 for core in node.cores)
    assert all(core.c.entity[i].overdue_count == 0 for core in node.cores for i in range(8))
    return [{n: (ns - was.get(n, 0)) / (node.now - start) for n, ns in device.busy.items()}
            for device, was in zip(node.devices, before, strict=True)]


def longest_wait(node, after=S // 4):
    """The longest that a kernel kept a GPU while it waited for its partner."""
    return max(late for device in node.devices for when, late in device.held if when > after)


def pair_of_programs(kernel, order=((0, 1), (1, 0)), aligned=True, plan=None, seed=1):
    plan = plan or equal(0, 1)
    node = Node(2, [(0, 1), (0, 1)], {0: plan, 1: plan}, seed=seed, aligned=aligned)
    for number, gpus in enumerate(order):
        node.add(number, gpus, kernel)
    return node


@pytest.mark.parametrize("kernel", [100 * US, 1 * MS, 10 * MS])
@pytest.mark.parametrize("order", [((0, 1), (1, 0)), ((0, 1), (0, 1))])
def test_two_that_span_two_gpus_never_wait_for_each_others_turn(kernel, order):
    node = pair_of_programs(kernel, order)
    for gpu in shares(node):
        assert gpu[0] == pytest.approx(gpu[1], rel=0.05)
        assert gpu[0] + gpu[1] > 0.9
    assert longest_wait(node) < 1 * MS


def test_without_alignment_they_do():
    """What the alignment is for: the test above can fail."""
    node = pair_of_programs(1 * MS, aligned=False)
    assert sum(shares(node)[0].values()) < 0.5
    assert longest_wait(node) > 3 * MS


@pytest.mark.parametrize("options", [{"skip_idle": False}, {"drain": False},
                                     {"skip_idle": False, "unowned_ns": 2 * SLICE}])
def test_under_the_other_policies(options):
    node = pair_of_programs(1 * MS, plan=equal(0, 1, **options))
    want = 0.25 if options.get("unowned_ns") else 0.5
    for gpu in shares(node):
        assert gpu[0] == pytest.approx(want, rel=0.1) and gpu[1] == pytest.approx(want, rel=0.1)
    assert longest_wait(node) < 1 * MS


def test_weights_hold_on_both():
    node = pair_of_programs(1 * MS, plan=make_plan({0: SLICE, 1: 2 * SLICE}, skip_idle=False))
    for gpu in shares(node, 4 * S):
        assert gpu[1] / gpu[0] == pytest.approx(2, rel=0.05)


def test_one_alone_has_both_all_the_time():
    node = Node(2, [(0, 1), (0, 1)], {0: equal(0, 1), 1: equal(0, 1)})
    node.add(0, (0, 1), 1 * MS)
    assert all(gpu[0] > 0.99 for gpu in shares(node))
    assert node.gangs[0].turns <= 2


def test_who_uses_one_of_its_gpus_has_it_like_anybody_else():
    node = Node(2, [(0, 1), (0, 1)], {0: equal(0, 1), 1: equal(0, 1)})
    node.add(0, (0,), 1 * MS, pairs=False)
    node.add(1, (1,), 1 * MS, pairs=False)
    first, second = shares(node)
    assert first[0] > 0.99 and second[1] > 0.99
    assert node.gangs[0].turns == 0


def test_those_on_one_gpu_fill_in():
    """GPU 0: two that span and one; GPU 1: the same two and two more. Each has its part of the busier GPU at least."""
    node = Node(2, [(0, 1), (0, 1), (0,), (1,), (1,)], {0: equal(0, 1, 2), 1: equal(0, 1, 3, 4)})
    for number, gpus in enumerate([(0, 1), (0, 1), (0,), (1,), (1,)]):
        node.add(number, gpus, 1 * MS, pairs=len(gpus) > 1, depth=2)
    first, second = shares(node, 4 * S)
    for program in (0, 1, 3, 4):
        assert second[program] == pytest.approx(0.25, abs=0.05)
    assert first[2] > 0.4 and sum(first.values()) > 0.9
    assert longest_wait(node) < 1 * MS


def test_chains_of_gpus_do_not_lock_each_other_up():
    node = Node(3, [(0, 1), (1, 2), (2, 0)], {0: equal(0, 2), 1: equal(0, 1), 2: equal(1, 2)})
    for number, gpus in enumerate([(0, 1), (1, 2), (2, 0)]):
        node.add(number, gpus, 1 * MS)
    for gpu in shares(node, 3 * S):
        assert len(gpu) == 2 and all(share > 0.25 for share in gpu.values())
    assert longest_wait(node) < 1 * MS


def test_high_priority_on_one_gpu_preempts_who_spans_both():
    plan = make_plan([(0, SLICE, False), (1, SLICE, True)], high_percent=50)
    node = Node(2, [(0, 1), (0,)], {0: plan, 1: equal(0)})
    node.add(0, (0, 1), 1 * MS)
    node.add(1, (0,), 1 * MS, pairs=False, depth=2)
    first, second = shares(node)
    assert first[1] == pytest.approx(0.5, abs=0.05)
    assert first[0] > 0.35 and second[0] == pytest.approx(first[0], abs=0.02)


@pytest.mark.parametrize("others", [0, 1])
def test_one_of_high_priority_that_spans_both(others):
    plan = make_plan([(0, SLICE, False), (1, SLICE, True), (2, SLICE, False)], high_percent=60)
    pair = make_plan([(0, SLICE, False), (1, SLICE, True)], high_percent=60)
    node = Node(2, [(0, 1), (0, 1), (0,)], {0: plan, 1: pair})
    node.add(0, (0, 1), 1 * MS)
    node.add(1, (0, 1), 1 * MS)
    if others:
        node.add(2, (0,), 1 * MS, pairs=False, depth=2)
    first, second = shares(node)
    assert 0.5 < first[1] <= 0.62 and 0.5 < second[1] <= 0.62
    assert first[0] == pytest.approx(second[0], abs=0.01) and first[0] > (0.1 if others else 0.25)
    assert longest_wait(node) < 1 * MS
    assert node.steps < 20_000  # it is looked at when something happens, not all the time


def test_paused_on_one_of_its_gpus_it_does_not_hold_the_other_up():
    node = Node(2, [(0, 1), (0, 1)], {0: equal(0, 1), 1: equal(0, 1)})
    node.add(0, (0, 1), 1 * MS)
    node.add(1, (0, 1), 1 * MS, pairs=False)
    node.run(S)
    node.step(1, [(lib.CORE_PLAN, 0, make_plan({0: SLICE, 1: 0}))])
    first, second = shares(node)
    assert first[0] > 0.9 and second[0] > 0.9 and second.get(1, 0) == 0


@settings(max_examples=20, deadline=None)
@given(spans=st.lists(st.sampled_from([(0, 1), (1, 2), (0, 2), (0, 1, 2), (0,), (1,), (2,)]),
                      min_size=2, max_size=5),
       kernels=st.lists(st.sampled_from([200 * US, 1 * MS, 4 * MS]), min_size=5, max_size=5),
       skip=st.booleans(), stop=st.integers(0, 4), seed=st.integers(0, 1000))
def test_nobody_starves_whatever_spans_what(spans, kernels, skip, stop, seed):
    """Grants never overlap (Node.check), every program advances all the time; one that ends frees what it had."""
    plans = {gpu: equal(*(n for n, span in enumerate(spans) if gpu in span), skip_idle=skip) for gpu in range(3)}
    node = Node(3, spans, plans, seed=seed)
    for number, span in enumerate(spans):
        node.add(number, span, kernels[number], pairs=len(span) > 1, start=number * 7 * MS)
    node.run(S // 2)
    alive = set(range(len(spans)))
    if stop in alive:
        node.programs[stop].stopped = True
        alive.discard(stop)
    node.run(S // 4)
    for _ in range(3):
        before = [dict(device.busy) for device in node.devices]
        node.run(400 * MS)
        for number in alive:
            for gpu in spans[number]:
                assert node.devices[gpu].busy.get(number, 0) > before[gpu].get(number, 0), (number, gpu)
    assert all(core.c.starved == 0 for core in node.cores)
    assert longest_wait(node, S) < 12 * MS
