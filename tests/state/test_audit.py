"""What the audit makes of readings, as tables: differences, what counts of them, and what is held against whom."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgpusched.daemon.audit.verdict import Facts, Hidden, Rules, Sample, Standing, difference, judge, news

PID = 70


def sample(before: int, used: int | None, after: int) -> Sample:
    return Sample({PID: before}, {} if used is None else {PID: used}, {PID: after})


@pytest.mark.parametrize(("samples", "hidden"), [
    ([(0, 300, 0)], 300),
    ([(100, 300, 100)], 200),
    ([(300, 300, 300)], 0),
    ([(400, 300, 400)], 0),  # managed memory that is not on the device
    ([(0, 300, 300)], 0),  # allocated before NVML was read
    ([(300, 300, 0)], 0),  # freed after it
    ([(0, None, 0)], 0),  # dead, or no context yet
    ([(0, 300, 0), (0, 200, 0)], 200),
    ([(0, 300, 0), (100, 300, 100)], 200),
    ([(0, 300, 0), (0, None, 0)], 0),
    ([(0, 500, 0), (500, 500, 500)], 0),  # taken and freed between the readings, once
    ([], 0),
])  # fmt: skip
def test_difference(samples: list[tuple[int, int | None, int]], hidden: int) -> None:
    assert difference([sample(*one) for one in samples], PID) == hidden


def test_a_process_without_a_ledger_hides_all_it_uses() -> None:
    assert difference([Sample({1: 5}, {PID: 300}, {1: 5})], PID) == 300


@pytest.mark.parametrize(("found", "counted"), [
    ([300], [0]),
    ([300, 300], [0, 300]),
    ([300, 200, 400], [0, 200, 200]),
    ([300, 0, 300], [0, 0, 0]),  # seen once each time
    ([300, 300, 100, 300], [0, 300, 100, 100]),  # down at once, up after two
    ([300, 300, 0], [0, 300, 0]),
])  # fmt: skip
def test_what_counts_was_found_twice_and_falls_at_once(found: list[int], counted: list[int]) -> None:
    hidden, seen = Hidden(), []
    for one in found:
        hidden = hidden.after(one)
        seen.append(hidden.now)
    assert seen == counted


RULES = Rules(context=50, tolerance=20)


def facts(memsize: int = 100, ledger: int = 0, hidden: dict[int, int] | None = None,
          strays: dict[int, int] | None = None) -> Facts:
    return Facts(memsize, ledger, hidden or {}, strays or {})


@pytest.mark.parametrize(("found", "unhooked", "unexplained", "excess"), [
    (facts(), (), (), 0),
    (facts(ledger=100), (), (), 0),
    (facts(ledger=60, hidden={1: 40}), (), (), 0),
    (facts(ledger=100, hidden={1: 20}), (), (), 0),  # a module that was loaded when all was taken
    (facts(ledger=100, hidden={1: 21}), (), (), 21),
    (facts(hidden={1: 50, 2: 50}), (), (), 0),
    (facts(hidden={1: 51, 2: 9}), (), (1,), 0),
    (facts(strays={5: 1, 4: 2, 3: 0}), (4, 5), (), 0),  # within its memory, and past the hook all the same
    (facts(ledger=100, hidden={1: 60}, strays={9: 5}), (9,), (1,), 65),
])  # fmt: skip
def test_what_is_held_against_an_instance(
    found: Facts, unhooked: tuple[int, ...], unexplained: tuple[int, ...], excess: int
) -> None:
    standing = judge(Standing(), found, RULES)
    assert (standing.unhooked, standing.unexplained, standing.excess) == (unhooked, unexplained, excess)
    assert standing.over == (excess > 0)
    assert standing.bypasses == len(unhooked) + len(unexplained)
    assert standing.overs == int(excess > 0)


def test_the_counters_count_beginnings() -> None:
    standing = Standing()
    steps = [({9: 5}, 1, 0), ({9: 5}, 1, 0), ({9: 5, 8: 1}, 2, 0), ({9: 300}, 2, 1), ({9: 301}, 2, 1), ({}, 2, 1),
             ({9: 300}, 3, 2)]
    for strays, bypasses, overs in steps:
        standing = judge(standing, facts(strays=strays), RULES)
        assert (standing.bypasses, standing.overs) == (bypasses, overs)


def test_what_was_there_when_memsize_was_lowered_may_stay() -> None:
    standing = judge(Standing(), facts(memsize=100, ledger=90), RULES)
    for ledger, hidden, over in ((90, 0, False), (90, 20, False), (90, 31, True), (40, 30, False), (90, 20, True)):
        standing = judge(standing, facts(memsize=10, ledger=ledger, hidden={1: hidden}), RULES)
        assert standing.over == over, (ledger, hidden)


BYTES = st.integers(0, 200)


@given(st.lists(st.tuples(st.integers(1, 200), BYTES, BYTES, BYTES), max_size=20))
def test_an_instance_within_its_memory_is_never_over(looks: list[tuple[int, int, int, int]]) -> None:
    standing, most = Standing(), 0
    for memsize, ledger, hidden, stray in looks:
        found = facts(memsize, ledger, {1: hidden}, {2: stray})
        standing = judge(standing, found, RULES)
        most = max(most, memsize)
        assert memsize <= standing.allowed <= most
        assert not standing.over or found.total > memsize + RULES.tolerance


def words(old: Standing, new: Standing, found: Facts) -> list[str]:
    return [f"{one.words}{'' if one.warning else ' (info)'} {one.fields}" for one in news(old, new, found)]


def test_the_log_hears_of_each_change_once() -> None:
    found = facts(memsize=1 << 30, hidden={1: 3 << 30}, strays={9: 5})
    bad = judge(Standing(), found, RULES)
    assert words(Standing(), bad, found) == [
        "a process uses the GPU past the hook {'pid': 9, 'used': '5'}",
        "a process uses memory that the hook does not know {'pid': 1, 'used': '3GiB'}",
        "over its memory {'used': '3221225477', 'memsize': '1GiB'}",
    ]
    again = judge(bad, found, RULES)
    assert words(bad, again, found) == []
    fewer = judge(again, facts(memsize=4 << 30, strays={9: 5}), RULES)
    assert words(again, fewer, facts(memsize=4 << 30, strays={9: 5})) == [
        "no longer over its memory (info) {'used': '5', 'memsize': '4GiB'}"
    ]
    good = judge(fewer, facts(), RULES)
    assert words(fewer, good, facts()) == ["nothing passes the hook any more (info) {}"]
