"""Properties of the scheduling step over any order of joins, leaves, demands, kills and plans."""

from gate_virtual import MS, SLICE, US, Core, Sim, make_plan, never_sync, sync_each
from hypothesis import given, settings
from hypothesis import strategies as st

from cgpusched._gate import lib

ENTITIES = 5
WEIGHTS = st.lists(st.integers(0, 6), min_size=ENTITIES, max_size=ENTITIES)
PLANS = st.builds(
    lambda weights, high, skip, drain, native, unowned, percent: make_plan(
        [(i, w * SLICE, h) for i, (w, h) in enumerate(zip(weights, high, strict=True))],
        skip_idle=skip, drain=drain, native=native, unowned_ns=0 if skip else unowned * SLICE, high_percent=percent),
    WEIGHTS, st.lists(st.booleans(), min_size=ENTITIES, max_size=ENTITIES), st.booleans(), st.booleans(),
    st.sampled_from([False, False, False, True]), st.integers(0, 8), st.integers(20, 99))
REPORTS = st.fixed_dictionaries({name: st.integers(0, 1) for name in
                                 ("demand", "opened", "holds", "undrained", "idle", "stale")}
                                | {"inflight_ns": st.sampled_from([0, 10 * MS, 2**64 - 1]),
                                   "kernel_ns": st.sampled_from([0, 10 * MS, 2**64 - 1]),
                                   "mine": st.booleans()})
STEPS = st.lists(st.tuples(
    st.sampled_from([0, 1, 10 * US, 400 * US, 3 * MS, 60 * MS, 3000 * MS]),
    st.one_of(st.tuples(st.just("report"), st.integers(0, ENTITIES), REPORTS),
              st.tuples(st.just("plan"), st.just(0), PLANS),
              st.tuples(st.just("leave"), st.integers(0, ENTITIES), st.none()),
              st.tuples(st.just("join"), st.integers(0, ENTITIES), st.none()))), max_size=60)


@settings(max_examples=300, deadline=None)
@given(STEPS)
def test_any_events_keep_the_invariants(steps):
    """Whatever clients claim: one open at a time, none paused open, no epoch twice, time conserved, time goes on."""
    core = Core()
    now, epochs = 0, set()
    core.step(0, [(lib.CORE_JOIN, i, None) for i in range(ENTITIES)])
    plan = make_plan({})
    for wait, (what, entity, payload) in steps:
        now += wait
        if what == "report":
            epoch = core.c.entity[entity].epoch if payload["mine"] else 1
            event = (lib.CORE_REPORT, entity, {k: v for k, v in payload.items() if k != "mine"} | {"epoch": epoch})
        elif what == "plan":
            plan = payload
            event = (lib.CORE_PLAN, 0, plan)
        else:
            event = (lib.CORE_LEAVE if what == "leave" else lib.CORE_JOIN, entity, None)
        following = core.step(now, [event])
        assert following > now
        opened = []
        for kind, _, epoch, deadline in core.acted():
            if kind == lib.CORE_GRANT:
                assert epoch not in epochs
                epochs.add(epoch)
                assert deadline == 0 or deadline >= now
                assert plan.native or core.c.fallback or all(
                        core.c.entity[i].phase != lib.CORE_CLOSING for i in range(ENTITIES + 1))
        quanta = {t.entity: t.quantum_ns for t in plan.turn[0:plan.count]}
        for i in range(lib.CORE_ENTITIES):
            if core.c.entity[i].phase == lib.CORE_OPEN:
                assert core.c.entity[i].alive and quanta.get(i), "paused, unnamed or gone, and open"
                opened.append(i)
        assert plan.native or core.c.fallback or len(opened) <= 1  # fallback: nobody had looked for seconds
        assert core.c.total_ns == now
        if "leave" not in {s[1][0] for s in steps}:
            assert core.c.total_ns == core.c.idle_ns + sum(core.c.entity[i].busy_ns for i in range(ENTITIES + 1))


@settings(max_examples=25, deadline=None)
@given(weights=st.lists(st.integers(1, 6), min_size=2, max_size=5), kernels=st.lists(
    st.sampled_from([200 * US, 1 * MS, 7 * MS]), min_size=5, max_size=5), sync=st.lists(st.booleans(), min_size=5,
    max_size=5), skip=st.booleans(), victims=st.lists(st.integers(0, 4), max_size=2), seed=st.integers(0, 1000))
def test_shares_converge_and_nobody_starves(weights, kernels, sync, skip, victims, seed):
    habits = [sync_each(k) if s else never_sync(k) for k, s in zip(kernels, sync, strict=True)][:len(weights)]
    plan = make_plan({i: w * SLICE for i, w in enumerate(weights)}, skip_idle=skip)
    sim = Sim(habits, plan, seed=seed)
    sim.run(150 * MS)
    alive = set(range(len(weights))) - set(victims)
    for victim in set(victims) & set(range(len(weights))):
        sim.kill(victim)
        sim.run(30 * MS)
    start, duration = sim.now, 6000 * MS
    sim.run(duration)
    used = sim.used(start, sim.now)
    total = sum(weights[i] for i in (alive if skip else range(len(weights))))
    round_ns = sum(weights) * SLICE + sum(kernels)
    for i in alive:
        want = duration * weights[i] / total
        assert abs(used[i] - want) <= 0.03 * want + weights[i] * SLICE + 2 * kernels[i]
        assert sim.longest_gap(i, start, sim.now) <= 2 * round_ns + 2 * max(kernels)
    assert all(used[i] == 0 for i in set(range(len(weights))) - alive)


@settings(max_examples=25, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.sampled_from(["stop", "cont", "plan"]), PLANS,
                          st.integers(1, 120)), max_size=12), st.integers(0, 1000))
def test_after_any_trouble_everybody_gets_the_share(trouble, seed):
    sim = Sim([never_sync(1 * MS), sync_each(1 * MS), never_sync(3 * MS), sync_each(100 * US)],
              make_plan({i: SLICE for i in range(4)}), seed=seed)
    for client, what, plan, ms in trouble:
        if what == "stop":
            sim.stop(client)
        elif what == "cont":
            sim.cont(client)
        else:
            sim.plan(plan)
        sim.run(ms * MS)
    for client in range(4):
        sim.cont(client)
    sim.plan(make_plan({i: (i + 1) * SLICE for i in range(4)}))
    sim.run(1500 * MS)
    start = sim.now
    sim.run(4000 * MS)
    for i, used in enumerate(sim.used(start, sim.now)):
        assert abs(used / (4000 * MS) - (i + 1) / 10) < 0.015
