"""The state as bytes: there and back, what is refused, and what a changed node makes of it."""

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgpusched import store
from cgpusched.commands import Create, Destroy, SetHighprio, SetMaxInst, SetPolicy, SetPrioRatio, SetWeight
from cgpusched.model import Gpu, GpuSettings, Policy, Share
from cgpusched.state import State
from cgpusched.store import Process, StoredContainer, StoreError

GIB = 1 << 30
GPUS = [Gpu(index, f"GPU-0000000{index}-1111-2222-3333-444444444444", "card", 24 * GIB) for index in range(2)]
BOOT = {gpu.index: GpuSettings(Policy.FAIR, 5, 50) for gpu in GPUS}


def full() -> State:
    state = State(GPUS, default_memsize=3 * GIB)
    for command in (SetPolicy(1, 3), SetMaxInst(1, 24), SetPrioRatio(0, 30), Create("bare", (1, 0), (GIB, 2 * GIB), 2),
                    Create("run-1", (0,), (GIB,), 0, False, True, 1000), SetWeight(1, "bare", 7),
                    SetHighprio(1, "bare", 1)):  # fmt: skip
        state.apply(command)
    return state


def everything(state: State) -> tuple[Any, ...]:
    instances = [(one.id, list(one.shares.items()), one.ephemeral, one.owner) for one in state.instances.values()]
    return state.settings, state.default_memsize, instances


def content(state: State | None = None, **changes: Any) -> bytes:
    data = json.loads(store.dump(state or full(), "boot-1", {"run-1": [Process(7, 99)]},
                                 [StoredContainer("bare", Process(8, 1), None)], Destroy("x")))  # fmt: skip
    for key, value in changes.items():
        *path, last = key.split("__")
        at = data
        for step in path:
            at = at[int(step) if step.isdigit() else step]
        at[last] = value
    return json.dumps(data).encode()


def back(bytes_: bytes, gpus: list[Gpu] = GPUS) -> tuple[State, list[str]]:
    return store.restore(store.load(bytes_), gpus, BOOT, 0, False)


def test_there_and_back() -> None:
    state = full()
    stored = store.load(content(state))
    again, lines = store.restore(stored, GPUS, BOOT, 0, False)
    assert everything(again) == everything(state) and lines == []
    assert list(again.instances["bare"].shares) == [1, 0], "in the order its programs see"
    assert (stored.boot, stored.anchors, stored.containers) == (
        "boot-1", {"run-1": (Process(7, 99),)}, (StoredContainer("bare", Process(8, 1), None),))
    assert stored.last == store.sign(Destroy("x")) != store.sign(Destroy("y"))
    assert again.weight_sum(1) == 7


def test_nothing_stored_is_what_the_configuration_says() -> None:
    state, lines = store.restore(store.Stored(), GPUS, BOOT, 5 * GIB, True)
    assert (state.settings, state.default_memsize, state.overcommit, state.instances) == (BOOT, 5 * GIB, True, {})
    assert lines == []


def test_unknown_keys_are_for_later_versions() -> None:
    again, _ = back(content(colour="red"))
    assert everything(again) == everything(full())


@given(cut=st.integers(0, 2000))
def test_cut_off_anywhere(cut: int) -> None:
    whole = content()
    if cut < len(whole):
        with pytest.raises(StoreError):
            store.load(whole[:cut])


@given(data=st.binary(max_size=200) | st.from_regex(r'\{"version": ?1.*\}').map(str.encode))
def test_garbage(data: bytes) -> None:
    with pytest.raises(StoreError):
        store.load(data)


@pytest.mark.parametrize("change", [
    {"version": 2}, {"version": 0}, {"version": True}, {"version": "1"}, {"boot": 1}, {"default_memsize": -1},
    {"default_memsize": 1.5}, {"gpus": {}}, {"gpus": {"GPU-1": {}}}, {"instances__0__id": "../../etc"},
    {"instances__0__id": "run-1"}, {"instances__0__shares": []}, {"instances__0__shares__0__weight": 26},
    {"instances__0__shares__0__weight": 25}, {"instances__0__shares__0__memsize": 0}, {"instances__0__owner": -1},
    {"instances__0__shares__0__highprio": 1}, {"instances__0__ephemeral": None}, {"anchors": {"run-1": [[0, 1]]}},
    {"anchors": {"run-1": [[1]]}}, {"anchors": {"a/b": []}}, {"containers": [{"id": "x"}]}, {"last": 3},
    {"instances__0__shares__1__gpu": "GPU-00000001-1111-2222-3333-444444444444"},
], ids=str)  # fmt: skip
def test_what_does_not_fit_is_refused(change: dict[str, Any]) -> None:
    with pytest.raises(StoreError):
        store.load(content(**change))


def test_a_gpu_that_has_gone() -> None:
    state, lines = back(content(), [GPUS[1]])
    assert list(state.instances) == ["bare"] and list(state.instances["bare"].shares) == [1]
    assert len(lines) == 2 and all(GPUS[0].uuid in line for line in lines)


def test_gpus_that_were_numbered_anew() -> None:
    first, second = GPUS
    renumbered = [Gpu(0, second.uuid, "card", 24 * GIB), Gpu(1, first.uuid, "card", 24 * GIB)]
    state, _ = back(content(), renumbered)
    assert state.settings[0].policy is Policy.FIXED and list(state.instances["bare"].shares) == [0, 1]


def test_a_smaller_card() -> None:
    state, _ = back(content(), [Gpu(0, GPUS[0].uuid, "card", GIB // 2), GPUS[1]])
    assert state.instances["run-1"].shares[0].memsize == GIB // 2


def test_native_gpus() -> None:
    first, second = GPUS
    state = State(GPUS)
    state.apply(Create("mixed", (1,), (GIB,), native=(0,)))
    whole = store.dump(state, "b", {}, [])
    again, lines = back(whole)
    assert again.instances["mixed"] == state.instances["mixed"] and lines == []
    left, lines = back(whole, [second])
    assert left.instances["mixed"].native == () and list(left.instances["mixed"].shares) == [1]
    assert len(lines) == 1 and first.uuid in lines[0]
    older = json.loads(whole)
    del older["instances"][0]["native"]
    assert back(json.dumps(older).encode())[0].instances["mixed"].native == ()
    for wrong in ([first.uuid] * 2, [second.uuid], ["GPU-1"], first.uuid, None):
        older["instances"][0]["native"] = wrong
        with pytest.raises(StoreError):
            store.load(json.dumps(older).encode())


def test_native_gpus_in_limits() -> None:
    first, second = (gpu.uuid for gpu in GPUS)
    shares, native = store.limits(f"{first} native\n{second} 5\n")
    assert (shares, native) == (((second, Share(5)),), (first,))
    found = [store.StoredInstance("one", shares, native=native)]
    assert store.rebuild(found, {second: GpuSettings()}, {}).instances[0].native == (first,)


def test_rebuilt_from_what_the_folders_say() -> None:
    uuids = [gpu.uuid for gpu in GPUS]
    found = [store.StoredInstance(f"i{number}", store.limits(f"{uuids[0]} {GIB}\n{uuids[1]} 5\n")[0], owner=number)
             for number in range(4)]
    has = {uuids[0]: GpuSettings(max_inst=3), uuids[1]: GpuSettings(max_inst=20)}
    stored = store.rebuild(found, has, {"i1": Process(3, 4)})
    assert [(one.id, one.ephemeral, one.owner) for one in stored.instances] == [
        ("i0", True, 0), ("i1", False, 1), ("i2", True, 2)]  # the fourth has no room
    assert stored.instances[0].shares == ((uuids[0], Share(GIB)), (uuids[1], Share(5)))
    assert stored.containers == (StoredContainer("i1", None, Process(3, 4)),)


@pytest.mark.parametrize("text", ["", "x", "GPU-1 5\n", f"{GPUS[0].uuid} 0\n", f"{GPUS[0].uuid} 1 2\n",
                                  f"{GPUS[0].uuid} 1\n" * 2, f"{GPUS[0].uuid} native\n",
                                  f"{GPUS[0].uuid} 1\n{GPUS[0].uuid} native\n"])
def test_limits_that_are_none(text: str) -> None:
    with pytest.raises(StoreError):
        store.limits(text)
