"""Frees around the driver's call: refused, several of one address, addresses handed out anew before a call is back."""

from __future__ import annotations

import ctypes
import random
from typing import Any

import pytest

GIB = 1 << 30
POINTER = 0
MANY = 40_000
"""Blocks: enough that tables have grown and lines are full."""
FLIGHTS = 256
"""Frees that the ledger keeps an eye on at once."""


class Entry(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_int), ("pooled", ctypes.c_bool), ("bytes", ctypes.c_uint64),
                ("owner", ctypes.c_void_p)]


class Release(ctypes.Structure):
    _fields_ = [("flight", ctypes.c_void_p), ("taken", ctypes.c_uint64)]


class Begun:
    """A free whose driver's call is not back yet."""

    def __init__(self, key: int, release: Release) -> None:
        self.key = key
        self.release = release


class Ledger:
    """The ledger of one loaded copy; each block is charged as it is put."""

    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.lib = hook.lib
        self.lib.ledger_put.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
        self.lib.ledger_releasing.argtypes = [ctypes.c_int, ctypes.c_uint64]
        self.lib.ledger_releasing.restype = Release
        self.lib.ledger_released.argtypes = [Release, ctypes.c_int, ctypes.c_uint64, ctypes.c_bool]
        self.lib.ledger_released.restype = None

    def put(self, key: int, size: int, owner: int | None = None) -> None:
        assert self.lib.ledger_charge(0, size)
        self.lib.ledger_put(POINTER, key, ctypes.byref(Entry(bytes=size, owner=owner)))

    def begin(self, key: int) -> Begun:
        return Begun(key, self.lib.ledger_releasing(POINTER, key))

    def end(self, begun: Begun, freed: bool = True) -> int:
        """Bytes that it gives back; 0: it was not what freed a block."""
        before = self.hook.used()
        self.lib.ledger_released(begun.release, POINTER, begun.key, freed)
        return int(before - self.hook.used())

    def free(self, key: int) -> int:
        return self.end(self.begin(key))


@pytest.fixture(params=[0, MANY], ids=["few", "many"])
def ledger(request: pytest.FixtureRequest, hook: Any) -> Ledger:
    """With no other blocks, or many. The others are not charged."""
    hook.start([8 * GIB])
    made = Ledger(hook)
    for n in range(request.param):
        made.lib.ledger_put(POINTER, 0x5000_0000_0000 + (n << 12), ctypes.byref(Entry(bytes=512)))
    return made


KEY = 0x7F00_0000_0000


def test_refused(ledger: Ledger) -> None:
    ledger.put(KEY, 4096)
    assert ledger.end(ledger.begin(KEY), freed=False) == 0
    assert ledger.hook.used() == 4096
    assert ledger.free(KEY) == 4096 and ledger.free(KEY) == 0
    assert ledger.hook.used() == 0


@pytest.mark.parametrize("through", [0, 1])
@pytest.mark.parametrize("first_back", [0, 1])
def test_two_free_one_address(ledger: Ledger, through: int, first_back: int) -> None:
    """Whichever the driver lets through and whichever is back first: one refund."""
    ledger.put(KEY, 4096)
    releases = [ledger.begin(KEY), ledger.begin(KEY)]
    freed = {n: ledger.end(releases[n], freed=n == through) for n in (first_back, 1 - first_back)}
    assert freed == {through: 4096, 1 - through: 0}
    assert ledger.hook.used() == 0


@pytest.mark.parametrize("more", [0, 1, 200])
def test_handed_out_anew_before_the_call_is_back(ledger: Ledger, more: int) -> None:
    """The free gives back the old block and leaves the new one alone, also once others were put after that."""
    ledger.put(KEY, 4096)
    release = ledger.begin(KEY)
    ledger.put(KEY, 8192)
    for n in range(more):
        ledger.put(KEY + ((n + 1) << 12), 512)
    assert ledger.end(release) == 4096
    assert ledger.hook.used() == 8192 + 512 * more
    assert ledger.free(KEY) == 8192
    assert ledger.hook.used() == 512 * more


def test_freed_anew_before_the_first_call_is_back(ledger: Ledger) -> None:
    ledger.put(KEY, 4096)
    first = ledger.begin(KEY)
    ledger.put(KEY, 8192)
    second = ledger.begin(KEY)
    assert ledger.end(second) == 8192 and ledger.end(first) == 4096
    assert ledger.hook.used() == 0


def test_a_free_went_unseen(ledger: Ledger) -> None:
    """Its charge is given back by the next life of the address, at the latest when that ends."""
    ledger.put(KEY, 4096)
    ledger.put(KEY, 8192)
    assert ledger.free(KEY) == 8192
    assert ledger.hook.used() == 0


def test_refused_and_yet_handed_out_anew(ledger: Ledger) -> None:
    """Somebody has freed the old block, unseen."""
    ledger.put(KEY, 4096)
    release = ledger.begin(KEY)
    ledger.put(KEY, 8192)
    second = ledger.begin(KEY)
    assert ledger.end(release, freed=False) == 4096 and ledger.end(second, freed=False) == 0
    assert ledger.hook.used() == 8192
    assert ledger.free(KEY) == 8192


def test_more_under_way_than_are_watched(ledger: Ledger) -> None:
    keys = [KEY + (n << 12) for n in range(2 * FLIGHTS)]
    for key in keys:
        ledger.put(key, 512)
    releases = [ledger.begin(key) for key in keys]
    assert sum(bool(begun.release.flight) for begun in releases) == FLIGHTS
    for n, release in enumerate(releases):
        assert ledger.end(release, freed=n % 2 == 0) == (512 if n % 2 == 0 else 0)
    assert ledger.hook.used() == 512 * FLIGHTS
    assert [ledger.free(key) for key in keys] == [0, 512] * FLIGHTS


def test_a_context_s_end(ledger: Ledger) -> None:
    """A free that comes back after it finds nothing."""
    for n in range(100):
        ledger.put(KEY + (n << 12), 512, owner=0x1000 + n % 2)
    late = [ledger.begin(KEY + (n << 12)) for n in range(2)]
    ledger.lib.ledger_drop_owner(ctypes.c_void_p(0x1000))
    assert ledger.hook.used() == 50 * 512
    assert [ledger.end(release) for release in late] == [0, 512]
    assert [ledger.free(KEY + (n << 12)) for n in range(100)] == [0, 0] + [0, 512] * 49


def test_any_order(ledger: Ledger) -> None:
    """Against a model: blocks come, frees begin and end in any order, some refused, addresses come again at once."""
    chance = random.Random(4)
    live: dict[int, int] = {}
    under_way: list[tuple[Begun, int]] = []
    for _ in range(20_000):
        key = KEY + (chance.randrange(60) << 12)
        if len(under_way) > 20 or (under_way and chance.random() < 0.4):
            release, size = under_way.pop(chance.randrange(len(under_way)))
            assert ledger.end(release, freed=size > 0) == size
        elif key in live and chance.random() < 0.2:  # refused; alone, since the driver would see it before any other
            assert ledger.end(ledger.begin(key), freed=False) == 0
        elif key in live:
            under_way.append((ledger.begin(key), live.pop(key)))
        elif all(release.key != key for release, _ in under_way) or chance.random() < 0.5:
            if sum(release.key == key for release, _ in under_way) > 1:
                continue
            live[key] = 512 * chance.randrange(1, 100)
            ledger.put(key, live[key])
        assert ledger.hook.used() == sum(live.values()) + sum(size for _, size in under_way)
