"""The watchdog: who is due does not wait for ever, whatever is wrong; in virtual time, and once for real."""

import time

import pytest
from gate_fake import FakeClient, eventually
from gate_virtual import MS, SLICE, S, Sim, make_plan, never_sync

from cgpusched.gate import Gate, Tuning
from cgpusched.plan import GpuPlan, Turn

FOR_EVER = 10**15
PAIR = {0: SLICE, 1: SLICE}


def stuck(**tuning):
    """A holder that never lets go, and a daemon that (here) would wait for it for ever."""
    sim = Sim([never_sync(1 * MS), never_sync(1 * MS), never_sync(1 * MS)], make_plan({0: SLICE, 1: SLICE, 2: SLICE}),
              overdue_ns=FOR_EVER, **tuning)
    sim.run(1 * S)
    while not sim.clients[0].open:
        sim.run(MS)
    sim.stop(0)
    return sim


def test_a_device_that_is_never_let_go_of_is_shared_plainly():
    sim = stuck()
    start = sim.now
    sim.run(4 * S)
    assert not sim.core.c.fallback and sim.core.c.starved == 0
    sim.run(2 * S)
    assert sim.core.c.fallback and sim.core.c.starved == 1
    assert max(sim.longest_gap(n, start, sim.now) for n in (1, 2)) <= 6 * S
    start = sim.now
    sim.run(2 * S)
    assert min(sim.used(start, sim.now)[1:]) >= 0.9 * S


def test_back_when_the_cause_is_gone_and_not_before():
    sim = stuck()
    sim.run(30 * S)
    assert sim.core.c.fallback and sim.core.c.starved == 1  # it keeps the device still: no use trying
    sim.cont(0)
    sim.run(6 * S)
    assert not sim.core.c.fallback and sim.core.c.starved == 1
    start = sim.now
    sim.run(3 * S)
    assert all(used == pytest.approx(S, rel=0.02) for used in sim.used(start, sim.now))


def test_each_time_it_lasts_longer():
    sim = stuck()
    lengths = []
    for _ in range(3):
        while not sim.core.c.fallback:
            sim.run(50 * MS)
        begun = sim.now
        sim.cont(0)
        while sim.core.c.fallback:
            sim.run(50 * MS)
        lengths.append(sim.now - begun)
        while not sim.clients[0].open:
            sim.run(MS)
        sim.stop(0)
    assert lengths[0] == pytest.approx(5 * S, rel=0.05)
    assert lengths[1] > 1.8 * lengths[0]


def test_a_new_plan_ends_it_at_once():
    sim = stuck()
    sim.run(6 * S)
    assert sim.core.c.fallback
    sim.cont(0)
    sim.plan(make_plan({0: SLICE, 1: SLICE, 2: 2 * SLICE}, skip_idle=False))
    assert not sim.core.c.fallback
    sim.run(S)
    start = sim.now
    sim.run(4 * S)
    assert sim.used(start, sim.now)[2] == pytest.approx(2 * S, rel=0.03)


@pytest.mark.parametrize("habits", [
    lambda: [never_sync(1 * MS) for _ in range(25)],
    lambda: [never_sync(50 * MS) for _ in range(25)],
    lambda: [never_sync(1500 * MS), *(never_sync(200 * MS) for _ in range(5))],
])
def test_it_keeps_quiet_while_all_is_well(habits):
    clients = habits()
    sim = Sim(clients, make_plan({i: SLICE for i in range(len(clients))}))
    sim.run(40 * S)
    assert sim.core.c.starved == 0


def test_waiting_for_high_priority_is_no_starving():
    plan = make_plan([(0, SLICE, True), *((i, SLICE, False) for i in range(1, 20))], high_percent=99)
    sim = Sim([never_sync(1 * MS), *(never_sync(1 * MS) for _ in range(19))], plan)
    sim.run(60 * S)
    assert sim.core.c.starved == 0


def test_the_paused_do_not_count():
    sim = Sim([never_sync(1 * MS), never_sync(1 * MS)], make_plan({0: SLICE, 1: 0}))
    sim.run(30 * S)
    assert sim.core.c.starved == 0 and sim.used(0, sim.now)[1] == 0


def test_the_pages_say_so():
    """The real thread: both gates stand open, flagged as native, and a new plan closes one again."""
    with Gate(Tuning(overdue_ns=FOR_EVER, starve_ns=200 * MS, retry_ns=FOR_EVER)) as gate:
        gate.add_gpu(0, bytes(16), 1 << 30)
        gate.start()
        regions = [gate.add_region(0, name, 1 << 20) for name in "ab"]
        plan = GpuPlan((Turn("a", SLICE), Turn("b", SLICE)))
        gate.set_plan(0, plan)
        with FakeClient(gate, regions[0]) as a, FakeClient(gate, regions[1]) as b:
            a.ask()
            word = a.accept()
            begin = time.monotonic()
            b.ask()
            b.accept()
            assert time.monotonic() - begin > 0.15
            use = gate.gpu_usage(0)
            assert use.native and use.fallback and use.starved == 1
            assert b.ctl("flags") & 4 and b.ctl("deadline_ns") == 0
            gate.set_plan(0, plan)
            eventually(lambda: not gate.gpu_usage(0).fallback)
            assert not b.ctl("flags") & 4 and not b.granted
            a.let_go(word)
