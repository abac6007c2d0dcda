"""The table against a dictionary, over any sequence of operations; keys that collide and wrap around the end."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


class Entry(ctypes.Structure):
    _fields_ = [("key", ctypes.c_uint64), ("value", ctypes.c_uint64)]


class Table(ctypes.Structure):
    _fields_ = [("entries", ctypes.POINTER(Entry)), ("mask", ctypes.c_uint64), ("count", ctypes.c_uint64),
                ("bits", ctypes.c_int), ("shard", ctypes.c_int), ("arena", ctypes.c_void_p)]


class LedgerEntry(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_int), ("pooled", ctypes.c_bool), ("bytes", ctypes.c_uint64),
                ("owner", ctypes.c_void_p)]


INVERSE = pow(0x9E3779B97F4A7C15, -1, 1 << 64)


def key_at(place: int, n: int) -> int:
    """The n-th key whose home in a table of 256 is ``place``."""
    return (place << 52 | n) * INVERSE % (1 << 64)


@pytest.fixture(scope="module")
def library(memory_library: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(memory_library))
    for name in ("table_put", "table_take"):
        getattr(lib, name).restype = ctypes.c_bool
    lib.table_take.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_void_p]
    return lib


keys = st.one_of(
    st.builds(key_at, st.sampled_from([0, 1, 2, 127, 253, 254, 255]), st.integers(0, 20)),
    st.integers(0, 40).map(lambda n: n << 21),
    st.integers(0, (1 << 64) - 1),
)
operations = st.lists(st.tuples(st.sampled_from("pppt"), keys, st.integers(1, (1 << 64) - 1)), max_size=300)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_like_a_dictionary(library: ctypes.CDLL, steps: list[tuple[str, int, int]]) -> None:
    table, model = Table(), dict[int, int]()
    old = Entry()
    for what, key, value in steps:
        if what == "p":
            assert library.table_put(ctypes.byref(table), ctypes.byref(Entry(key=key, value=value)), ctypes.byref(old))
            assert old.value == model.get(key, 0)
            model[key] = value
        else:
            assert library.table_take(ctypes.byref(table), key, ctypes.byref(old)) == (key in model)
            if key in model:
                assert old.value == model.pop(key)
        assert table.count == len(model)
    places = table.mask + 1 if table.entries else 0
    assert {table.entries[i].key: table.entries[i].value for i in range(places) if table.entries[i].value} == model
    for key, value in model.items():
        assert library.table_take(ctypes.byref(table), key, ctypes.byref(old)) and old.value == value
    library.table_free(ctypes.byref(table))
    assert not table.entries


def test_grows_and_empties(library: ctypes.CDLL) -> None:
    table, old, many = Table(), Entry(), 20000
    for n in range(many):
        assert library.table_put(ctypes.byref(table), ctypes.byref(Entry(key=n << 20, value=n + 1)), ctypes.byref(old))
    assert table.count == many and table.mask + 1 >= 2 * many
    for n in reversed(range(many)):
        assert library.table_take(ctypes.byref(table), n << 20, ctypes.byref(old)) and old.value == n + 1
    assert table.count == 0
    library.table_free(ctypes.byref(table))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(1, 1 << 30).map(lambda n: 512 * n), st.booleans()),
                max_size=120))
def test_a_context_s_end_drops_its_blocks_only(library: ctypes.CDLL, blocks: list[tuple[int, int, bool]]) -> None:
    """Blocks of contexts 1..3 and of none (0), some freed, context 2 retagged as 9; then contexts end in turn."""
    got = LedgerEntry()
    put, take = library.ledger_put, library.ledger_take
    put.argtypes = take.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
    take.restype = ctypes.c_bool
    for n, (context, size, _) in enumerate(blocks):
        put(n % 2, n << 9, ctypes.byref(LedgerEntry(bytes=size, owner=context)))
    live = dict(enumerate(blocks))
    for n, (_, size, freed) in enumerate(blocks):
        if freed:
            assert take(n % 2, n << 9, ctypes.byref(got)) and got.bytes == size
            del live[n]
    library.ledger_retag_owner(ctypes.c_void_p(2), ctypes.c_void_p(9))
    for ends, gone in ((2, 99), (9, 2), (3, 3)):
        library.ledger_drop_owner(ctypes.c_void_p(ends))
        live = {n: block for n, block in live.items() if block[0] != gone}
    for n in range(len(blocks)):
        assert take(n % 2, n << 9, ctypes.byref(got)) == (n in live)
