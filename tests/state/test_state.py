"""Every rule of the state, with its errno; a refused command changes nothing."""

import copy
from errno import EBUSY, EEXIST, EINVAL, ENOENT, ENOSPC

import pytest

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
    Upgrade,
)
from cgpusched.errors import CommandError
from cgpusched.model import Gpu, GpuSettings, Policy, Share
from cgpusched.state import State

GIB = 1 << 30
CARD = 24 * GIB


def gpu(index: int, memory: int = CARD) -> Gpu:
    return Gpu(index, f"GPU-00000000-0000-0000-0000-{index:012x}", "Test", memory, simulated=True)


def make(count: int = 2, **options: object) -> State:
    return State([gpu(index) for index in range(count)], **options)  # type: ignore[arg-type]


def contents(state: State) -> dict[str, object]:
    return copy.deepcopy(vars(state))


def refused(state: State, command: Command, code: int, *words: str) -> None:
    before, order = contents(state), list(state.instances)
    with pytest.raises(CommandError) as error:
        state.apply(command)
    assert error.value.errno == code, str(error.value)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 400
    for word in words:
        assert word in str(error.value)
    assert contents(state) == before
    assert list(state.instances) == order


def add(state: State, ident: str, *gpus: int, memsize: int = GIB, **options: object) -> None:
    state.apply(Create(ident, gpus or (0,), (memsize,), **options))  # type: ignore[arg-type]


# Settings


def test_defaults() -> None:
    state = make()
    assert state.settings == {0: GpuSettings(Policy.PREEMPTIVE, 20, 90), 1: GpuSettings(Policy.PREEMPTIVE, 20, 90)}
    assert (state.default_memsize, state.instances, state.free_weight(0), state.free_memory(1)) == (0, {}, 20, CARD)


def test_settings_are_copied() -> None:
    common = GpuSettings(max_inst=5)
    state = make(settings=common)
    state.apply(SetMaxInst(0, 7))
    assert (common.max_inst, state.settings[0].max_inst, state.settings[1].max_inst) == (5, 7, 5)
    by_gpu = make(settings={1: GpuSettings(Policy.FIXED)})
    assert [by_gpu.settings[i].policy for i in (0, 1)] == [Policy.PREEMPTIVE, Policy.FIXED]


@pytest.mark.parametrize("value", range(6))
def test_policy(value: int) -> None:
    state = make()
    state.apply(SetPolicy(1, value))
    assert (state.settings[0].policy, state.settings[1].policy) == (1, value)


@pytest.mark.parametrize("value", [-1, 6, 1 << 70])
def test_policy_refused(value: int) -> None:
    refused(make(), SetPolicy(0, value), EINVAL, "0/policy", str(value), "0-5")


@pytest.mark.parametrize("value", [20, 90, 99])
def test_prio_ratio(value: int) -> None:
    state = make()
    state.apply(SetPrioRatio(0, value))
    assert state.settings[0].prio_ratio == value


@pytest.mark.parametrize("value", [0, 19, 100])
def test_prio_ratio_refused(value: int) -> None:
    refused(make(), SetPrioRatio(0, value), EINVAL, "0/prio_ratio", str(value), "20-99")


@pytest.mark.parametrize("value", [1, 20, 25])
def test_max_inst(value: int) -> None:
    state = make()
    state.apply(SetMaxInst(0, value))
    assert (state.settings[0].max_inst, state.free_weight(0)) == (value, value)


@pytest.mark.parametrize("value", [0, 26])
def test_max_inst_out_of_range(value: int) -> None:
    refused(make(), SetMaxInst(0, value), EINVAL, "0/max_inst", str(value), "1-25")


def test_max_inst_below_the_weights_is_busy() -> None:
    state = make()
    add(state, "a", weight=4)
    refused(state, SetMaxInst(0, 3), EBUSY, "0/max_inst", "3", "at least 4")
    state.apply(SetMaxInst(0, 4))
    state.apply(SetMaxInst(1, 1))  # the other GPU has nothing on it


def test_max_inst_below_the_count_is_busy() -> None:
    state = make()
    for ident in "abc":
        add(state, ident, weight=0)
    refused(state, SetMaxInst(0, 2), EBUSY, "at least 3")
    state.apply(SetMaxInst(0, 3))


@pytest.mark.parametrize("value", [0, 1, CARD, 100 * CARD])
def test_default_memsize(value: int) -> None:
    """More than a card is taken: which card an instance will be on is not known yet. Create refuses it then."""
    state = make()
    state.apply(SetDefaultMemsize(value))
    assert state.default_memsize == value


@pytest.mark.parametrize("value", [-1, 1 << 63])
def test_default_memsize_refused(value: int) -> None:
    refused(make(), SetDefaultMemsize(value), EINVAL, "default_memsize")


@pytest.mark.parametrize("command", [SetPolicy(2, 1), SetMaxInst(-1, 1), SetPrioRatio(9, 50), SetWeight(2, "a", 1)])
def test_unknown_gpu(command: Command) -> None:
    refused(make(), command, EINVAL, "GPU 0, 1")


# Shares


def test_weight() -> None:
    state = make()
    add(state, "a")
    add(state, "b")
    assert state.apply(SetWeight(0, "a", 19)) is state.instances["a"]
    assert state.free_weight(0) == 0
    refused(state, SetWeight(0, "b", 2), ENOSPC, "0/b/weight", "0-1")
    refused(state, SetWeight(0, "a", 20), ENOSPC, "0-19")
    state.apply(SetWeight(0, "a", 0))
    state.apply(SetWeight(0, "b", 20))
    assert state.free_weight(0) == 0


@pytest.mark.parametrize("value", [-1, 26])
def test_weight_out_of_range(value: int) -> None:
    state = make()
    add(state, "a")
    refused(state, SetWeight(0, "a", value), EINVAL, "0/a/weight", "0-25")


def test_weight_at_creation_switches_policy_but_a_write_does_not() -> None:
    state = make()
    add(state, "a")
    state.apply(SetWeight(0, "a", 5))
    assert state.settings[0].policy == Policy.PREEMPTIVE


def test_highprio() -> None:
    state = make()
    add(state, "a")
    add(state, "b")
    state.apply(SetHighprio(0, "a", 1))
    assert state.instances["a"].shares[0].highprio is True
    assert not state.notes
    state.apply(SetHighprio(0, "b", 1))
    assert state.notes[0].warning and "one is advised" in state.notes[0].text
    state.apply(SetHighprio(0, "a", 0))
    assert state.instances["a"].shares[0].highprio is False
    for value in (2, -1):
        refused(state, SetHighprio(0, "a", value), EINVAL, "0/a/highprio", "0-1")


def test_memsize() -> None:
    state = make()
    add(state, "a", memsize=10 * GIB)
    add(state, "b", memsize=10 * GIB)
    state.apply(SetMemsize(0, "a", 14 * GIB))
    assert state.free_memory(0) == 0
    refused(state, SetMemsize(0, "b", 10 * GIB + 1), ENOSPC, "0/b/memsize", "10GiB")
    refused(state, SetMemsize(0, "b", CARD + 1), EINVAL, "0/b/memsize", "24GiB")
    refused(state, SetMemsize(0, "b", 0), EINVAL, "0/b/memsize")
    state.apply(SetMemsize(0, "b", 1))
    state.apply(SetMemsize(0, "a", CARD - 1))


def test_overcommit() -> None:
    state = make(overcommit=True)
    add(state, "a", memsize=CARD)
    add(state, "b", memsize=CARD)
    assert state.free_memory(0) == 0
    refused(state, SetMemsize(0, "b", CARD + 1), EINVAL)
    refused(state, Create("c", (0,), (CARD + 1,)), EINVAL)
    # Where overcommit was switched off in between, giving back is still allowed, and so is keeping.
    state.overcommit = False
    state.apply(SetMemsize(0, "a", CARD))
    state.apply(SetMemsize(0, "a", CARD - 1))
    refused(state, SetMemsize(0, "a", CARD), ENOSPC)


@pytest.mark.parametrize("command", [SetWeight(1, "a", 1), SetHighprio(0, "b", 1), SetMemsize(0, "aa", GIB)])
def test_no_such_instance(command: Command) -> None:
    state = make()
    add(state, "a")
    refused(state, command, ENOENT, "no instance")


# Creation and its end


def test_create() -> None:
    state = make()
    made = state.apply(Create("a" * 64, (1, 0), (GIB, 2 * GIB), 3, True, True, 1000))
    assert made is state.instances["a" * 64]
    assert list(made.shares) == [1, 0]
    assert list(made.shares.values()) == [Share(GIB, 3, True), Share(2 * GIB, 3, True)]
    assert (made.ephemeral, made.owner, made.short) == (True, 1000, "a" * 12)
    assert state.find("a" * 12) is state.find(made.id) is made
    assert state.find("a" * 11) is None
    assert state.on_gpu(0) == [made]


def test_native_gpus() -> None:
    """They take nothing of the GPU's weights and memory, and put all into the host's order."""
    state = make(4)
    made = state.apply(Create("a", (3, 1), (GIB, 2 * GIB), 3, native=(2, 0)))
    assert made is not None
    assert (made.native, made.seen, list(made.shares)) == ((0, 2), (0, 1, 2, 3), [1, 3])
    assert (made.shares[3].memsize, made.shares[1].memsize) == (GIB, 2 * GIB)
    assert state.on_gpu(0) == [] and state.free_weight(0) == 20 and state.free_memory(0) == CARD
    other = state.apply(Create("b", (3, 1), (GIB,)))
    assert other is not None and other.seen == (3, 1)
    refused(state, Create("c", (0,), (GIB,), native=(4,)), EINVAL, "native=4", "no such GPU")
    refused(state, Create("c", (0,), (GIB,), native=(0,)), EINVAL, "native=0", "twice")
    refused(state, Create("c", (0,), (GIB,), native=(1, 1)), EINVAL, "native=1", "twice")
    refused(make(17), Create("c", (0,), (GIB,), native=tuple(range(1, 17))), EINVAL, "17 GPUs", "1-16")


@pytest.mark.parametrize(
    ("sizes", "expected"),  # the published rule for lists over four GPUs, in GiB
    [((3,), [3, 3, 3, 3]), ((3, 1), [3, 1, 1, 1]), ((3, 4, 5, 6), [3, 4, 5, 6])],
)
def test_the_last_of_a_list_repeats(sizes: tuple[int, ...], expected: list[int]) -> None:
    state = make(4)
    made = state.apply(Create("a", (0, 1, 2, 3), tuple(size * GIB for size in sizes)))
    assert made is not None
    assert [share.memsize // GIB for share in made.shares.values()] == expected


def test_lists_refused() -> None:
    state = make()
    refused(state, Create("a", (0,), (GIB, GIB)), EINVAL, "2 sizes for 1 GPUs")
    refused(state, Create("a", (0, 1), ()), EINVAL, "0 sizes")
    refused(state, Create("a", (0, 1), (GIB, 0)), EINVAL, "memsize")
    refused(state, Create("a", (0, 0), (GIB,)), EINVAL, "gpu=0", "twice")
    refused(state, Create("a", (), (GIB,)), EINVAL, "1-16")
    refused(make(17), Create("a", tuple(range(17)), (GIB,)), EINVAL, "1-16")
    assert make(17).apply(Create("a", tuple(range(16)), (GIB,))) is not None


@pytest.mark.parametrize("ident", ["", "..", "../x", "a/b", "x" * 300, "policy", "inst_ctl", "a b", "a\n"])
def test_bad_ids(ident: str) -> None:
    refused(make(), Create(ident, (0,), (GIB,)), EINVAL, "create", "1-128")


def test_duplicates() -> None:
    state = make()
    add(state, "0123456789abcdef")
    refused(state, Create("0123456789abcdef", (1,), (GIB,)), EEXIST, "exists")
    refused(state, Create("0123456789abXXXX", (0,), (GIB,)), EEXIST, "first 12 characters", "0123456789abcdef")
    refused(state, Create("0123456789ab", (1,), (GIB,)), EEXIST, "0123456789abcdef")
    add(state, "0123456789aX")


def test_unknown_gpu_at_creation() -> None:
    refused(make(), Create("a", (0, 2), (GIB,)), EINVAL, "gpu=2", "GPU 0, 1")
    refused(State([]), Create("a", (0,), (GIB,)), EINVAL, "this node has none")


def test_default_memsize_serves_who_names_none() -> None:
    state = make()
    refused(state, Create("a"), EINVAL, "memsize", "default_memsize is 0")
    state.apply(SetDefaultMemsize(6 * GIB))
    state.apply(Create("a", (0, 1)))
    assert [share.memsize for share in state.instances["a"].shares.values()] == [6 * GIB, 6 * GIB]
    state.apply(SetDefaultMemsize(25 * GIB))
    refused(state, Create("b"), EINVAL, "default_memsize", "25GiB")


def test_memory_at_creation() -> None:
    state = make()
    add(state, "a", memsize=20 * GIB)
    refused(state, Create("b", (0,), (4 * GIB + 1,)), ENOSPC, "unallotted", "4GiB")
    refused(state, Create("b", (0,), (25 * GIB,)), EINVAL)
    refused(state, Create("b", (1, 0), (5 * GIB,)), ENOSPC, "GPU 0")  # and nothing is on GPU 1 either
    add(state, "b", memsize=4 * GIB)


def test_past_max_inst() -> None:
    state = make(settings=GpuSettings(max_inst=2))
    add(state, "a", weight=0)
    add(state, "b", weight=0)
    refused(state, Create("c", (1, 0), (GIB,), 0), ENOSPC, "max_inst is 2")
    state.apply(Destroy("a"))
    add(state, "c")


def test_unnamed_weight() -> None:
    state = make(settings=GpuSettings(max_inst=3))
    add(state, "a", weight=2)
    add(state, "b")
    assert (state.instances["b"].shares[0].weight, state.notes) == (1, ())
    add(state, "c", 1, 0)
    assert [share.weight for share in state.instances["c"].shares.values()] == [1, 0]
    assert [(note.gpu, note.warning) for note in state.notes] == [(0, True)]
    assert "free_weight" in state.notes[0].text


def test_named_weight() -> None:
    state = make(settings=GpuSettings(max_inst=3))
    add(state, "a", weight=2)
    refused(state, Create("b", (1, 0), (GIB,), 2), ENOSPC, "weight=2", "GPU 0", "0-1")
    refused(state, Create("b", (0,), (GIB,), 4), ENOSPC, "weight=4", "0-1")
    refused(state, Create("b", (0,), (GIB,), 26), EINVAL, "weight", "0-25")
    refused(state, Create("b", (0,), (GIB,), -1), EINVAL, "0-25")
    add(state, "b", weight=1)
    add(state, "c", weight=0)
    assert state.notes == ()  # who asks for 0 gets it without a warning


@pytest.mark.parametrize(("policy", "after"), [(0, 2), (1, 2), (2, 2), (3, 3), (4, 4), (5, 5)])
def test_weight_over_1_at_creation_switches_policy_2_on(policy: int, after: int) -> None:
    state = make(3)
    for index in (0, 1, 2):
        state.apply(SetPolicy(index, policy))
    add(state, "one", 0, weight=1)
    assert state.settings[0].policy == policy
    add(state, "two", 0, 2, weight=2)
    assert [state.settings[index].policy for index in (0, 1, 2)] == [after, policy, after]
    assert [note.gpu for note in state.notes] == ([0, 2] if after != policy else [])


def test_two_high_priorities_at_creation_are_noted() -> None:
    state = make()
    add(state, "a", highprio=True)
    assert not state.notes
    add(state, "b", highprio=True)
    assert [note.warning for note in state.notes] == [True]


def test_destroy() -> None:
    state = make()
    add(state, "a", 0, 1, weight=20, memsize=CARD)
    gone = state.apply(Destroy("a"))
    assert gone is not None and gone.id == "a"
    assert (state.free_weight(0), state.free_memory(1), state.instances) == (20, CARD, {})
    refused(state, Destroy("a"), ENOENT, "destroy 'a'", "no such instance")
    refused(state, Destroy("x\n" * 1000), ENOENT)


def test_destroy_takes_the_full_id_only() -> None:
    state = make()
    add(state, "0123456789abcdef")
    refused(state, Destroy("0123456789ab"), ENOENT)


def test_upgrade_is_not_the_states_business() -> None:
    state = make()
    before = contents(state)
    result = state.apply(Upgrade())
    assert result is None
    assert contents(state) == before


def test_notes_are_the_last_commands() -> None:
    state = make()
    add(state, "a", weight=2)
    assert state.notes
    state.apply(SetPolicy(0, 1))
    assert state.notes == ()


def test_restore() -> None:
    state = make()
    for ident in ("a", "b", "c"):
        add(state, ident)
    kept = state.instances["a"]
    saved, before = state.snapshot(), contents(state)
    changes: list[Command] = [SetWeight(0, "a", 5), SetPolicy(0, 3), SetDefaultMemsize(7), SetMemsize(0, "b", 1)]
    for command in (*changes, Destroy("a"), Create("d", (1,), (1,))):
        state.apply(command)
    state.restore(saved)
    assert contents(state) == before
    assert list(state.instances) == ["a", "b", "c"]
    assert state.instances["a"] is kept
