"""Who pays for the time around a hand-over: the scheduling step fed by hand."""

from __future__ import annotations

from typing import Any

import pytest

from cgpusched._gate import ffi, lib

MS, US = 1_000_000, 1000
QUANTUM = 5 * MS


class Pair:
    """Two entities of weight 1, the first granted at time 0 and both waiting."""

    def __init__(self, overlap: int = 200 * US) -> None:
        tuning = ffi.new("struct core_tuning *")
        lib.core_tuning_default(tuning)
        tuning.overlap_ns = overlap
        self.c = ffi.new("struct core *")
        lib.core_init(self.c, tuning, 0)
        plan = ffi.new("struct core_plan *", {"count": 2, "skip_idle": 1, "drain": 1, "high_percent": 90})
        for i in (0, 1):
            plan.turn[i].entity, plan.turn[i].quantum_ns = i, QUANTUM
        self.step(0, *[{"type": lib.CORE_JOIN, "entity": i} for i in (0, 1)], {"type": lib.CORE_PLAN, "plan": plan})
        self.report(0, 0, demand=1)
        self.report(0, 1, demand=1)
        self.report(10 * US, 0, opened=1, holds=1, undrained=1)

    def step(self, now: int, *events: dict[str, Any]) -> None:
        actions, count = ffi.new("struct core_action[]", lib.CORE_ACTIONS), ffi.new("uint32_t *")
        lib.core_step(self.c, now, ffi.new("struct core_event[]", list(events)), len(events), actions, count)

    def report(self, now: int, who: int, **what: int) -> None:
        report = {"epoch": self.c.entity[who].epoch, **what}
        self.step(now, {"type": lib.CORE_REPORT, "entity": who, "report": report})

    def busy(self, who: int) -> int:
        return int(self.c.entity[who].busy_ns)

    def total(self) -> int:
        return int(self.c.idle_ns) + self.busy(0) + self.busy(1)

    def hand_over(self, acked: int, end: int) -> None:
        """The deadline has passed; the first lets go at ``acked`` with work predicted to end at ``end``."""
        self.step(QUANTUM)
        self.report(acked, 0, opened=1, undrained=1, end_ns=end)
        assert self.c.holder == 1


def test_the_start_of_a_grant_is_the_predicted_end_of_the_work_ahead() -> None:
    pair = Pair()
    pair.hand_over(QUANTUM, QUANTUM + 150 * US)
    assert lib.core_start(pair.c, 1) == QUANTUM + 150 * US
    pair.report(QUANTUM + 100 * US, 0, opened=1, end_ns=QUANTUM + 90 * US)  # it drained earlier
    assert lib.core_start(pair.c, 1) == 0


def test_a_predicted_end_is_believed_up_to_the_overlap() -> None:
    pair = Pair()
    pair.hand_over(QUANTUM, QUANTUM + 3_600_000 * MS)
    assert lib.core_start(pair.c, 1) == QUANTUM + 200 * US


def test_what_passes_until_we_hear_of_the_drain_is_the_successors() -> None:
    pair = Pair()
    pair.hand_over(QUANTUM, QUANTUM + 150 * US)
    before = pair.c.entity[1].credit
    pair.report(QUANTUM + 250 * US, 0, opened=1, end_ns=QUANTUM + 160 * US)
    assert pair.busy(0) == QUANTUM + 160 * US
    assert pair.busy(1) == 90 * US
    assert before - pair.c.entity[1].credit == 90 * US
    assert pair.total() == pair.c.total_ns == QUANTUM + 250 * US


@pytest.mark.parametrize("end", [1, QUANTUM - 4 * MS])
def test_an_end_long_ago_is_believed_up_to_the_overlap(end: int) -> None:
    pair = Pair()
    pair.hand_over(QUANTUM, QUANTUM + 150 * US)
    pair.report(QUANTUM + 400 * US, 0, opened=1, end_ns=end)
    assert pair.busy(0) == QUANTUM + 200 * US
    assert pair.total() == pair.c.total_ns


@pytest.mark.parametrize("end", [0, QUANTUM + 600 * US, 2**64 - 1])
def test_without_a_past_end_the_leaver_pays_until_it_is_seen_drained(end: int) -> None:
    pair = Pair()
    pair.hand_over(QUANTUM, QUANTUM + 150 * US)
    pair.report(QUANTUM + 500 * US, 0, opened=1, end_ns=end)
    assert pair.busy(0) == QUANTUM + 500 * US
    assert pair.busy(1) == 0


def test_the_time_is_nobodys_if_nobody_came_next() -> None:
    pair = Pair()
    pair.step(QUANTUM)
    pair.report(QUANTUM + 100 * US, 0, opened=1, end_ns=QUANTUM + 40 * US)  # acknowledged and drained in one
    assert pair.busy(0) == QUANTUM + 40 * US
    assert pair.total() == pair.c.total_ns


def test_a_lone_holder_was_busy_before_we_heard_that_it_opened() -> None:
    pair = Pair()
    pair.step(QUANTUM)
    pair.report(QUANTUM, 0, opened=1, idle=1)  # drained, and asks no more
    pair.step(QUANTUM + MS)
    assert pair.c.holder == 1 and not pair.c.contended
    pair.step(QUANTUM + 6 * MS)
    assert pair.busy(1) == 0
    pair.report(QUANTUM + 7 * MS, 1, opened=1, holds=1, undrained=1)
    assert pair.busy(1) == 7 * MS
    assert pair.total() == pair.c.total_ns == QUANTUM + 7 * MS
