"""What the driver keeps beyond the blocks in use counts: pools by what they reserve, and graph memory."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

OOM, MIB, GIB = 2, 1 << 20, 1 << 30
DEVICE = 1


class Props(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("id", ctypes.c_int),
                ("rest", ctypes.c_char * 80)]


class Pools:
    """The stub driver's pools behind the wrappers. ``reserved`` is what the driver really has."""

    def __init__(self, hook: Any, limit: int, chunk: int, card: int = 64 * GIB) -> None:
        self.hook = hook
        hook.start([limit])
        hook.lib.stub_pools(ctypes.c_uint64(chunk), ctypes.c_uint64(card))

    def default(self) -> ctypes.c_void_p:
        return ctypes.c_void_p(self.hook.lib.stub_pool(0))

    def create(self) -> ctypes.c_void_p:
        pool = ctypes.c_void_p()
        assert self.hook.call("cuMemPoolCreate", ctypes.byref(pool), ctypes.byref(Props(location=DEVICE))) == 0
        return pool

    def alloc(self, size: int, pool: ctypes.c_void_p | None = None) -> tuple[int, int]:
        ptr = ctypes.c_uint64(0xDEAD)
        name, more = ("cuMemAllocAsync", ()) if pool is None else ("cuMemAllocFromPoolAsync", (pool,))
        return self.hook.call(name, ctypes.byref(ptr), ctypes.c_size_t(size), *more, None), ptr.value

    def free(self, address: int) -> None:
        assert self.hook.call("cuMemFreeAsync", ctypes.c_uint64(address), None) == 0

    def threshold(self, pool: ctypes.c_void_p, size: int) -> None:
        assert self.hook.call("cuMemPoolSetAttribute", pool, 4, ctypes.byref(ctypes.c_uint64(size))) == 0

    def sync(self) -> None:
        self.hook.lib.stub_synchronized()

    def reserved(self) -> int:
        return sum(int(self.hook.lib.stub_pool_reserved(n)) for n in range(16))


def test_what_a_pool_reserves_counts_until_it_is_given_back(hook: Any) -> None:
    pools = Pools(hook, GIB, chunk=32 * MIB)
    _, first = pools.alloc(MIB)
    assert hook.used() == 32 * MIB
    pools.free(first)
    assert hook.used() == 32 * MIB == pools.reserved()
    pools.sync()
    assert hook.used() == 0 == pools.reserved()


def test_a_threshold_keeps_it_and_a_trim_gives_it_back(hook: Any) -> None:
    pools = Pools(hook, GIB, chunk=2 * MIB)
    pools.threshold(pools.default(), 1 << 63)
    _, first = pools.alloc(8 * MIB)
    pools.free(first)
    pools.sync()
    assert hook.used() == 8 * MIB
    assert hook.call("cuMemPoolTrimTo", pools.default(), ctypes.c_size_t(0)) == 0
    assert hook.used() == 0


def test_a_reused_block_costs_no_question(hook: Any) -> None:
    pools = Pools(hook, GIB, chunk=2 * MIB)
    pools.threshold(pools.default(), 1 << 63)
    _, first = pools.alloc(4 * MIB)
    pools.free(first)
    pools.sync()
    before = hook.lib.stub_pool_asks()
    for _ in range(100):
        result, again = pools.alloc(4 * MIB)
        assert (result, again) == (0, first)
        pools.free(again)
        pools.sync()
    assert hook.lib.stub_pool_asks() == before and hook.used() == 4 * MIB


def test_before_a_refusal_unused_memory_is_given_back(hook: Any) -> None:
    """By any allocating call; also memory whose free is under way, unless that may wait for the program itself."""
    pools = Pools(hook, 64 * MIB, chunk=2 * MIB)
    pools.threshold(pools.default(), 1 << 63)
    _, first = pools.alloc(48 * MIB)
    pools.free(first)
    hook.lib.stub_stalls(1)
    assert hook.alloc(32 * MIB) == (OOM, 0xDEAD)
    assert hook.used() == 48 * MIB and hook.pages[0].refused() == 1 and hook.lib.stub_pool_synchronised() == 0
    hook.lib.stub_stalls(0)
    assert hook.alloc(32 * MIB)[0] == 0
    assert hook.used() == 32 * MIB and hook.pages[0].refused() == 1


def test_another_pool_gives_way(hook: Any) -> None:
    pools = Pools(hook, 64 * MIB, chunk=2 * MIB)
    pools.threshold(pools.default(), 1 << 63)
    _, first = pools.alloc(48 * MIB)
    pools.free(first)
    other = pools.create()
    assert pools.alloc(60 * MIB, other)[0] == 0
    assert hook.used() == 60 * MIB == pools.reserved()


def test_over_the_quota_the_driver_is_not_called(hook: Any) -> None:
    pools = Pools(hook, 64 * MIB, chunk=2 * MIB)
    assert pools.alloc(60 * MIB)[0] == 0
    assert pools.alloc(6 * MIB) == (OOM, 0xDEAD)
    assert hook.used() == 60 * MIB == pools.reserved() and hook.pages[0].refused() == 1
    assert pools.alloc(4 * MIB)[0] == 0


def test_a_growth_that_could_not_be_foreseen(hook: Any) -> None:
    """The driver takes whole chunks: what passes the quota goes back, and the call fails."""
    pools = Pools(hook, 40 * MIB, chunk=32 * MIB)
    _, first = pools.alloc(MIB)
    assert hook.used() == 32 * MIB
    assert pools.alloc(2 * MIB) == (OOM, 0xDEAD)  # between chunks: 32 MiB more
    assert hook.used() == 32 * MIB == pools.reserved()
    pools.free(first)
    pools.sync()
    assert hook.used() == 0 == pools.reserved()


def test_a_failing_driver_leaves_no_charge(hook: Any) -> None:
    pools = Pools(hook, GIB, chunk=2 * MIB, card=8 * MIB)
    assert pools.alloc(16 * MIB) == (OOM, 0xDEAD)
    assert hook.used() == 0 and hook.pages[0].refused() == 0


def test_a_synchronous_free_gives_back_at_once(hook: Any) -> None:
    pools = Pools(hook, GIB, chunk=2 * MIB)
    _, first = pools.alloc(8 * MIB)
    assert hook.free(first) == 0
    assert hook.used() == 0


def test_a_destroyed_pool_counts_until_its_last_block(hook: Any) -> None:
    pools = Pools(hook, GIB, chunk=2 * MIB)
    pool = pools.create()
    blocks = [pools.alloc(4 * MIB, pool)[1] for _ in range(3)]
    pools.free(blocks.pop())
    assert hook.call("cuMemPoolDestroy", pool) == 0
    asks = hook.lib.stub_pool_asks()
    assert hook.used() >= 8 * MIB == pools.reserved()
    for block in blocks:
        assert hook.used() >= pools.reserved()
        pools.free(block)
    assert hook.used() > 0  # those frees may be under way
    pools.sync()
    assert hook.used() == 0
    assert hook.lib.stub_pool_asks() == asks  # its handle is dead


def test_the_default_pool_cannot_be_destroyed(hook: Any) -> None:
    pools = Pools(hook, GIB, chunk=2 * MIB)
    _, first = pools.alloc(4 * MIB)
    assert hook.call("cuMemPoolDestroy", pools.default()) == 800
    pools.free(first)
    pools.sync()
    assert hook.used() == 0


def test_the_current_pool_changes(hook: Any) -> None:
    pools = Pools(hook, GIB, chunk=2 * MIB)
    assert pools.alloc(2 * MIB)[0] == 0
    pool = pools.create()
    assert hook.call("cuDeviceSetMemPool", 0, pool) == 0
    _, block = pools.alloc(4 * MIB)
    assert hook.used() == 6 * MIB
    pools.free(block)
    assert hook.call("cuMemPoolDestroy", pool) == 0
    pools.sync()
    assert hook.used() == 2 * MIB


def test_primary_reset_takes_all(hook: Any) -> None:
    pools = Pools(hook, GIB, chunk=2 * MIB)
    pool = pools.create()
    hook.lib.stub_retain(0)
    blocks = [pools.alloc(4 * MIB)[1], pools.alloc(4 * MIB, pool)[1]]
    for block in blocks:  # what the driver does
        pools.free(block)
    hook.lib.stub_synchronize()
    assert hook.call("cuDevicePrimaryCtxReset", 0) == 0
    assert hook.used() == 0
    _, block = pools.alloc(2 * MIB, pool)
    assert hook.used() == 2 * MIB
    pools.free(block)
    pools.sync()
    assert hook.used() == 0


@pytest.mark.parametrize("chunk", [512, 2 * MIB, 32 * MIB])
def test_never_less_than_the_card_has(hook: Any, chunk: int) -> None:
    """Any sequence: the charge covers what is reserved at every moment, and is 0 at the end."""
    pools = Pools(hook, GIB, chunk)
    dice = random.Random(chunk)
    places: list[ctypes.c_void_p | None] = [None, pools.create(), pools.create()]
    live: list[int] = []
    for _ in range(3000):
        what = dice.random()
        if what < 0.45:
            result, block = pools.alloc(dice.choice([100, 4096, MIB, 3 * MIB, 40 * MIB]), dice.choice(places))
            assert result in (0, OOM)
            if result == 0:
                live.append(block)
        elif what < 0.85 and live:
            block = live.pop(dice.randrange(len(live)))
            if dice.random() < 0.8:
                pools.free(block)
            else:
                assert hook.free(block) == 0
        elif what < 0.9:
            pools.sync()
            assert hook.used() >= pools.reserved()
        elif what < 0.95:
            pools.threshold(dice.choice([p or pools.default() for p in places]), dice.choice([0, 16 * MIB, 1 << 63]))
        else:
            pool = dice.choice([p or pools.default() for p in places])
            assert hook.call("cuMemPoolTrimTo", pool, ctypes.c_size_t(0)) == 0
        assert pools.reserved() <= hook.used() <= GIB
    for block in live:
        pools.free(block)
    pools.sync()
    for place in places:
        assert hook.call("cuMemPoolTrimTo", place or pools.default(), ctypes.c_size_t(0)) == 0
    assert hook.used() == 0 == pools.reserved()


class TestGraphs:
    """Nodes: bytes of an allocation, or minus how many nodes back the one is that is freed."""

    def graph(self, hook: Any, *nodes: int) -> ctypes.c_void_p:
        graph = ctypes.c_void_p(hook.lib.stub_graph(0, len(nodes), (ctypes.c_int64 * len(nodes))(*nodes)))
        for _ in nodes:
            assert hook.call("cuGraphAddMemAllocNode", None, graph, None, ctypes.c_size_t(0), None) == 0
        return graph

    def exec(self, hook: Any, *nodes: int) -> ctypes.c_void_p:
        out = ctypes.c_void_p()
        assert hook.call("cuGraphInstantiateWithFlags", ctypes.byref(out), self.graph(hook, *nodes),
                         ctypes.c_uint64(0)) == 0
        return out

    def takes(self, hook: Any, size: int) -> None:
        hook.lib.stub_graph_takes(ctypes.c_uint64(size))

    def test_a_launch_takes_and_a_trim_gives_back(self, hook: Any) -> None:
        Pools(hook, 64 * MIB, chunk=2 * MIB)
        graph = self.exec(hook, 20 * MIB, 10 * MIB)
        assert hook.used() == 0
        self.takes(hook, 32 * MIB)
        for _ in range(3):
            assert hook.lib.stub_launch(graph) == 0
            assert hook.used() == 32 * MIB
        hook.lib.stub_graph_uses(ctypes.c_uint64(0))
        assert hook.call("cuGraphExecDestroy", graph) == 0
        assert hook.used() == 32 * MIB
        assert hook.call("cuDeviceGraphMemTrim", 0) == 0
        assert hook.used() == 0

    def test_what_does_not_fit_is_not_launched(self, hook: Any) -> None:
        Pools(hook, 64 * MIB, chunk=2 * MIB)
        assert hook.alloc(40 * MIB)[0] == 0
        graph = self.exec(hook, 20 * MIB, 10 * MIB)
        self.takes(hook, 32 * MIB)
        assert hook.lib.stub_launch(graph) == OOM
        assert hook.used() == 40 * MIB and hook.lib.stub_graph_reserved() == 0 and hook.pages[0].refused() == 1

    def test_freed_within_the_graph_is_not_needed_twice(self, hook: Any) -> None:
        Pools(hook, 64 * MIB, chunk=2 * MIB)
        graph = self.exec(hook, 40 * MIB, -1, 40 * MIB, -1, 40 * MIB, -1)
        self.takes(hook, 40 * MIB)
        assert hook.lib.stub_launch(graph) == 0
        assert hook.used() == 40 * MIB

    def test_unused_graph_memory_gives_way(self, hook: Any) -> None:
        Pools(hook, 64 * MIB, chunk=2 * MIB)
        graph = self.exec(hook, 40 * MIB, -1)
        self.takes(hook, 40 * MIB)
        assert hook.lib.stub_launch(graph) == 0
        hook.lib.stub_graph_uses(ctypes.c_uint64(0))
        _, block = hook.alloc(60 * MIB)
        assert hook.used() == 60 * MIB
        assert hook.lib.stub_launch(graph) == OOM  # it would have to map its memory again
        assert hook.call("cuCtxDestroy_v2", ctypes.c_void_p(hook.lib.stub_context(0, 0))) == 0
        assert hook.lib.stub_launch(graph) == 0
        assert hook.used() == 40 * MIB

    def test_upload_while_instantiating(self, hook: Any) -> None:
        class Params(ctypes.Structure):
            _fields_ = [("flags", ctypes.c_uint64), ("stream", ctypes.c_void_p), ("node", ctypes.c_void_p),
                        ("result", ctypes.c_int)]

        Pools(hook, 64 * MIB, chunk=2 * MIB)
        out = ctypes.c_void_p(77)
        self.takes(hook, 80 * MIB)
        assert hook.call("cuGraphInstantiateWithParams", ctypes.byref(out), self.graph(hook, 80 * MIB),
                         ctypes.byref(Params(flags=2))) == OOM
        assert out.value == 77 and hook.used() == 0
        self.takes(hook, 30 * MIB)
        assert hook.call("cuGraphInstantiateWithParams", ctypes.byref(out), self.graph(hook, 30 * MIB),
                         ctypes.byref(Params(flags=2))) == 0
        assert hook.used() == 30 * MIB

    def test_more_than_foreseen_counts_all_the_same(self, hook: Any) -> None:
        Pools(hook, 64 * MIB, chunk=2 * MIB)
        graph = self.exec(hook, 20 * MIB)
        self.takes(hook, 80 * MIB)
        assert hook.lib.stub_launch(graph) == 0
        assert hook.used() == 80 * MIB
        assert hook.alloc(512)[0] == OOM
