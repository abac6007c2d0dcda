"""Any sequence of commands: the sums hold, a refusal changes nothing, and every policy makes a sound plan of it."""

import copy
from collections.abc import Callable

from hypothesis import event, given, settings
from hypothesis import strategies as st

from cgpusched import policy
from cgpusched.commands import (
    Command,
    Create,
    Destroy,
    SetDefaultMemsize,
    SetHighprio,
    SetMaxInst,
    SetMemsize,
    SetPolicy,
    SetPrioRatio,
    SetWeight,
)
from cgpusched.errors import CommandError
from cgpusched.model import Gpu, GpuSettings, Policy
from cgpusched.plan import UNIT_SLICE_NS
from cgpusched.state import State

CARD = 1000
IDS = ["a", "b", "c", "policy", "0123456789abcd", "0123456789abce", "../x", "d", "e"]

gpus = st.integers(-1, 2)
idents = st.sampled_from(IDS)
small = st.integers(-1, 27)
sizes = st.one_of(st.integers(-1, CARD + 1), st.sampled_from([0, 1, CARD // 3, CARD]))
likely_gpus = st.lists(st.sampled_from([0, 0, 1, 1, 2]), max_size=3).map(tuple)
creates = st.builds(
    Create,
    id=idents,
    gpus=likely_gpus,
    memsize=st.none() | st.lists(st.integers(0, CARD // 2), max_size=3).map(tuple),
    weight=st.none() | st.integers(-1, 9),
    highprio=st.booleans(),
)
commands: st.SearchStrategy[Command] = st.one_of(
    creates,
    creates,
    st.builds(Destroy, idents),
    st.builds(SetPolicy, gpus, st.integers(-1, 6)),
    st.builds(SetMaxInst, gpus, small),
    st.builds(SetPrioRatio, gpus, st.integers(18, 101)),
    st.builds(SetDefaultMemsize, sizes),
    st.builds(SetWeight, gpus, idents, small),
    st.builds(SetHighprio, gpus, idents, st.integers(-1, 2)),
    st.builds(SetMemsize, gpus, idents, sizes),
)


def new(overcommit: bool) -> State:
    cards = [Gpu(index, f"GPU-00000000-0000-0000-0000-{index:012x}", "Test", CARD) for index in (0, 1)]
    return State(cards, GpuSettings(max_inst=6), overcommit=overcommit)


def run(state: State, sequence: list[Command], check: Callable[[], None]) -> None:
    for command in sequence:
        before = copy.deepcopy(vars(state))
        try:
            state.apply(command)
            event(type(command).__name__ + " done")
        except CommandError as error:
            assert vars(state) == before
            assert str(error).isprintable()
            event(type(command).__name__ + " " + error.name)
        check()


@settings(max_examples=150, deadline=None)
@given(st.lists(commands, max_size=25), st.booleans())
def test_the_sums_hold(sequence: list[Command], overcommit: bool) -> None:
    state = new(overcommit)

    def check() -> None:
        shorts = [instance.short for instance in state.instances.values()]
        assert len(set(shorts)) == len(shorts)
        for gpu, chosen in state.settings.items():
            here = state.on_gpu(gpu)
            shares = [instance.shares[gpu] for instance in here]
            assert 1 <= chosen.max_inst <= 25
            assert 20 <= chosen.prio_ratio <= 99
            assert len(here) <= chosen.max_inst
            assert sum(share.weight for share in shares) + state.free_weight(gpu) == chosen.max_inst
            assert state.free_weight(gpu) >= 0
            assert all(share.weight >= 0 and 1 <= share.memsize <= CARD for share in shares)
            if not overcommit:
                assert sum(share.memsize for share in shares) + state.free_memory(gpu) == CARD
        for ident, instance in state.instances.items():
            assert ident == instance.id
            assert instance.shares

    run(state, sequence, check)


@settings(max_examples=150, deadline=None)
@given(st.lists(commands, max_size=15), st.sets(idents), st.sampled_from(Policy))
def test_plans_are_sound(sequence: list[Command], busy: set[str], number: Policy) -> None:
    state = new(overcommit=False)

    def check() -> None:
        for gpu, chosen in state.settings.items():
            own = copy.copy(chosen)
            own.policy = number
            shares = [(instance.id, instance.shares[gpu]) for instance in state.on_gpu(gpu)]
            plan = policy.plan(own, shares, busy)
            assert plan == policy.plan(own, shares), "who is busy changes what is shown, not what the gate does"
            assert [turn.id for turn in plan.turns] == [ident for ident, _ in shares]
            assert [turn.quantum_ns == 0 for turn in plan.turns] == [share.weight == 0 for _, share in shares]
            assert [turn.high for turn in plan.turns] == [share.highprio for _, share in shares]
            assert plan.unowned_ns >= 0
            ring = sum(turn.quantum_ns for turn in plan.turns if not turn.high) + plan.unowned_ns
            if number in (Policy.FAIR, Policy.FIXED):
                assert ring == chosen.max_inst * UNIT_SLICE_NS
            assert set(plan.entitled) == {turn.id for turn in plan.turns}
            assert all(0 <= percent <= 100 for percent in plan.entitled.values())
            assert all(plan.entitled[turn.id] == 0 for turn in plan.turns if turn.quantum_ns == 0)
            if not plan.native:
                assert sum(plan.entitled[ident] for ident in plan.entitled if ident in busy) <= 100.000001

    run(state, sequence, check)
