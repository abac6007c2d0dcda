"""The table against a dictionary, over any sequence of operations; keys that collide and wrap around the end."""

from __future__ import annotations

import ctypes
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st


class Table(ctypes.Structure):
    _fields_ = [("lines", ctypes.c_void_p), ("mask", ctypes.c_uint64), ("count", ctypes.c_uint64),
                ("bits", ctypes.c_int), ("shard", ctypes.c_int), ("arena", ctypes.c_void_p)]


class LedgerEntry(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_int), ("pooled", ctypes.c_bool), ("bytes", ctypes.c_uint64),
                ("owner", ctypes.c_void_p)]


LINE = 5
LINES = 64
"""Of a table that has not grown."""


def home(key: int) -> int:
    return (key * 0x9E3779B97F4A7C15 << 4) % (1 << 64) >> 58


AT = {line: [key << 9 for key in range(1, 20_000) if home(key << 9) == line] for line in (0, 1, 31, 62, 63)}
"""Keys whose home is that line."""


@pytest.fixture(scope="module")
def library(memory_library: Path) -> ctypes.CDLL:
    lib = ctypes.CDLL(str(memory_library))
    lib.table_put.argtypes = [ctypes.c_void_p, ctypes.c_uint64, ctypes.c_uint64, ctypes.c_void_p]
    lib.table_put.restype = ctypes.c_bool
    lib.table_take.argtypes = lib.table_find.argtypes = [ctypes.c_void_p, ctypes.c_uint64]
    lib.table_take.restype = lib.table_find.restype = ctypes.c_uint64
    lib.table_next.argtypes = [ctypes.c_void_p] * 4
    lib.table_next.restype = ctypes.c_bool
    return lib


def contents(library: ctypes.CDLL, table: Table) -> dict[int, int]:
    place, key, value = ctypes.c_uint64(), ctypes.c_uint64(), ctypes.c_uint64()
    found = {}
    while library.table_next(*(ctypes.byref(one) for one in (table, place, key, value))):
        assert key.value not in found
        found[key.value] = value.value
    return found


keys = st.one_of(
    st.sampled_from(sorted(AT)).flatmap(lambda line: st.sampled_from(AT[line][:20])),
    st.integers(1, 40).map(lambda n: n << 21),
    st.integers(1, (1 << 48) - 1),
)
operations = st.lists(st.tuples(st.sampled_from("pppto"), keys, st.integers(1, (1 << 48) - 1)), max_size=300)


@settings(max_examples=150, deadline=None)
@given(operations)
def test_like_a_dictionary(library: ctypes.CDLL, steps: list[tuple[str, int, int]]) -> None:
    """Lines that overflow into the next, also around the end."""
    table, model = Table(), dict[int, int]()
    here, old = ctypes.byref(table), ctypes.c_uint64()
    for what, key, value in steps:
        assert library.table_find(here, key) == model.get(key, 0)
        if what == "p":
            assert library.table_put(here, key, value, ctypes.byref(old))
            assert old.value == model.get(key, 0)
            model[key] = value
        elif what == "o":  # out of range: never there
            for none in (0, 1 << 48 | key):
                assert library.table_find(here, none) == library.table_take(here, none) == 0
        else:
            assert library.table_take(here, key) == model.pop(key, 0)
        assert table.count == len(model)
    assert contents(library, table) == model
    for key, value in model.items():
        assert library.table_take(here, key) == value
    assert not contents(library, table)
    library.table_free(here)
    assert not table.lines


def test_a_line_overflows_and_empties(library: ctypes.CDLL) -> None:
    """Four lines' worth of keys of the last line; nothing of it is left behind, however often."""
    table, old = Table(), ctypes.c_uint64()
    here, many = ctypes.byref(table), AT[LINES - 1][:4 * LINE]
    for turn in range(100):
        for key in many:
            assert library.table_put(here, key, key + turn, ctypes.byref(old)) and old.value == 0
        for key in many if turn % 2 else reversed(many):
            assert library.table_take(here, key) == key + turn
    assert table.mask == LINES - 1 and table.count == 0
    size = 64 * LINES
    assert not any(word for word in (ctypes.c_uint64 * (size // 8)).from_address(table.lines)[::8])
    assert not any((ctypes.c_uint32 * (size // 4)).from_address(table.lines)[15::16]), "entries that went past a line"
    library.table_free(here)


@pytest.mark.parametrize(("key", "value"), [(0, 1), (1 << 48, 1), (1, 0), (1, 1 << 48)])
def test_out_of_range(library: ctypes.CDLL, key: int, value: int) -> None:
    table, old = Table(), ctypes.c_uint64()
    assert not library.table_put(ctypes.byref(table), key, value, ctypes.byref(old)) and not table.lines


def test_grows_and_empties(library: ctypes.CDLL) -> None:
    table, old, many = Table(), ctypes.c_uint64(), 20000
    here = ctypes.byref(table)
    for n in range(1, many):
        assert library.table_put(here, n << 20, n, ctypes.byref(old))
    assert table.count == many - 1 and (table.mask + 1) * LINE * 4 >= 5 * table.count
    for n in reversed(range(1, many)):
        assert library.table_take(here, n << 20) == n
    assert table.count == 0
    library.table_free(here)


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
        put(n % 2, n + 1 << 9, ctypes.byref(LedgerEntry(bytes=size, owner=context)))
    live = dict(enumerate(blocks))
    for n, (_, size, freed) in enumerate(blocks):
        if freed:
            assert take(n % 2, n + 1 << 9, ctypes.byref(got)) and got.bytes == size
            del live[n]
    library.ledger_retag_owner(ctypes.c_void_p(2), ctypes.c_void_p(9))
    for ends, gone in ((2, 99), (9, 2), (3, 3)):
        library.ledger_drop_owner(ctypes.c_void_p(ends))
        live = {n: block for n, block in live.items() if block[0] != gone}
    for n in range(len(blocks)):
        assert take(n % 2, n + 1 << 9, ctypes.byref(got)) == (n in live)
