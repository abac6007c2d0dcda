"""Where a turn begins and ends: the start, the full turn, the early acknowledgement and what it does not dare."""

from __future__ import annotations

import struct
import time
from pathlib import Path
from typing import Any

MS = 1_000_000
DEADLINE, START = 72, 88  # offsets in the control page


def now_ns() -> int:
    return time.clock_gettime_ns(time.CLOCK_MONOTONIC)


def device_until(tmp_path: Path) -> int:
    """When all that was ever submitted to the device ends."""
    return int(struct.unpack_from("<Q", (tmp_path / "device").read_bytes(), 0)[0])


def learn(daemon: Any, program: Any, ns: int, times: int = 4) -> None:
    daemon.grant()
    for _ in range(times):
        program.do(f"0 launch {ns}")
        program.do("0 sync")


def test_the_first_submission_waits_for_the_start(daemon: Any, start: Any, tmp_path: Path) -> None:
    program = start()
    for _ in range(3):
        program.blocked("0 launch 1000")
        begin = now_ns() + 900_000
        daemon.page.put(START, begin)
        word = daemon.grant()
        program.wait("0 launch 0")
        assert device_until(tmp_path) - 1000 >= begin
        daemon.revoke()
        daemon.until(lambda word=word: daemon.page.slot(0, "drained") == word)


def test_a_start_moved_to_now_is_seen(daemon: Any, start: Any) -> None:
    program = start()
    program.blocked("0 launch 1000")
    daemon.page.put(START, now_ns() + 900_000)
    daemon.grant()
    daemon.page.put(START, 0)
    program.wait("0 launch 0")


def test_a_start_beyond_reason_is_not_believed(daemon: Any, start: Any) -> None:
    program = start()
    program.blocked("0 launch 1000")
    daemon.page.put(START, now_ns() + 3_600_000 * MS)
    daemon.grant()
    program.wait("0 launch 0")


def test_the_agent_keeps_the_time_though_the_daemon_never_rings(daemon: Any, start: Any) -> None:
    """Launchers wake it by a descriptor of their own: what they wrote to the daemon's would come to the daemon."""
    program = start()
    program.blocked("0 launch 1000")
    word = daemon.grant(deadline_in_ns=30 * MS)
    program.wait("0 launch 0")
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)


def test_a_full_turn_ends_while_its_program_synchronises(daemon: Any, start: Any, tmp_path: Path) -> None:
    """It does not let go for want of work: the program has more, and only waits."""
    program = start()
    learn(daemon, program, 60 * MS)
    for _ in range(5):  # the look that sees it must come before the work ends, which a busy machine may miss
        word = daemon.grant(deadline_in_ns=10_000 * MS)
        program.do(f"0 launch {60 * MS}")
        daemon.page.put(DEADLINE, device_until(tmp_path) + 100_000)
        daemon.poke()
        program.do("0 sync")
        daemon.until(lambda word=word: daemon.page.slot(0, "drained") == word)
        if daemon.page.slot(0, "idle") != word:
            return
    raise AssertionError("it went idle each time")


def test_long_work_of_unknown_length_is_not_acknowledged_early(daemon: Any, start: Any) -> None:
    program = start()
    word = daemon.grant()
    program.do(f"0 launch {150 * MS}")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "acked") == word)
    assert daemon.page.slot(0, "drained") == word


def test_work_that_outlasted_its_prediction_is_not_acknowledged_early_again(daemon: Any, start: Any) -> None:
    program = start()
    learn(daemon, program, MS)
    for surprise in range(3):
        word = daemon.grant()
        program.do(f"0 launch {11 * MS}")
        daemon.revoke()
        daemon.until(lambda word=word: daemon.page.slot(0, "acked") == word)
        if surprise:
            assert daemon.page.slot(0, "drained") == word
        daemon.until(lambda word=word: daemon.page.slot(0, "drained") == word)
        learn(daemon, program, MS, 2)


def test_the_end_is_reported_as_the_device_had_it(daemon: Any, start: Any, tmp_path: Path) -> None:
    program = start()
    learn(daemon, program, 20 * MS)
    word = daemon.grant()
    program.do(f"0 launch {20 * MS}")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)
    assert device_until(tmp_path) - MS < daemon.page.slot(0, "end") <= now_ns()
