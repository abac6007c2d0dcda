"""The client's side of the grant protocol, against a daemon stand-in that follows a script."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

MS = 1_000_000
PAUSED, NODRAIN, NATIVE = 1, 2, 4


def threads_named(pid: int, name: str) -> int:
    return sum((task / "comm").read_text().strip() == name for task in Path(f"/proc/{pid}/task").iterdir())


def test_blocks_while_closed_and_accepts_a_grant(daemon: Any, start: Any) -> None:
    program = start()
    program.blocked("0 launch 1000")
    assert daemon.page.slot(0, "demand") == 1
    assert os.eventfd_read(daemon.page.bell) >= 1
    word = daemon.grant()
    program.wait("0 launch 0")
    assert daemon.page.slot(0, "opened") == word
    assert daemon.page.slot(0, "demand") == 0
    assert daemon.page.slot(0, "acked") == 0


def test_two_threads_wait_and_both_go(daemon: Any, start: Any) -> None:
    program = start()
    program.blocked("1 launch 1000")
    program.blocked("2 launch 1000")
    assert daemon.page.slot(0, "demand") == 2
    daemon.grant()
    program.wait("1 launch 0")
    program.wait("2 launch 0")
    assert daemon.page.slot(0, "demand") == 0
    assert threads_named(program.process.pid, "cgpu-agent") == 1


def test_early_acknowledgement_then_drained(daemon: Any, start: Any) -> None:
    daemon.page.overlap(20 * MS)
    program = start()
    daemon.grant()
    for _ in range(3):  # learns the length
        program.do(f"0 launch {100 * MS}")
        program.do("0 sync")
    word = daemon.grant()
    program.do(f"0 launch {100 * MS}")
    began = time.monotonic()
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "inflight") > 0)
    assert 20 * MS < daemon.page.slot(0, "inflight") < 110 * MS
    early = late = 0.0
    end = began + 5
    while not late and time.monotonic() < end:
        acked, drained = daemon.page.slot(0, "acked"), daemon.page.slot(0, "drained")
        if acked == word and not early:
            early = time.monotonic() - began
        if drained == word:
            late = time.monotonic() - began
    assert 0.05 < early < late < 0.2
    assert daemon.page.slot(0, "idle") == 0
    program.blocked("0 launch 1000")
    daemon.grant()
    program.wait("0 launch 0")


def test_unknown_work_is_not_acknowledged_early(daemon: Any, start: Any) -> None:
    program = start()
    word = daemon.grant()
    program.do("0 launch 1000")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)
    assert daemon.page.slot(0, "acked") == word


def test_nodrain_acknowledges_at_once(daemon: Any, start: Any) -> None:
    program = start()
    daemon.flags(NODRAIN)
    word = daemon.grant()
    program.do(f"0 launch {300 * MS}")
    began = time.monotonic()
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "acked") == word)
    assert time.monotonic() - began < 0.15
    assert daemon.page.slot(0, "drained") != word
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)


def test_lets_go_at_the_deadline_by_itself(daemon: Any, start: Any) -> None:
    program = start()
    daemon.grant()
    program.do("0 launch 1000")
    program.tell("0 busy 1000000")
    word = daemon.grant(deadline_in_ns=50 * MS)
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)
    launches = daemon.page.slot(0, "launches")
    time.sleep(0.05)
    assert daemon.page.slot(0, "launches") == launches  # the word is still there, but not for us
    assert daemon.page.grant == word
    again = daemon.grant(deadline_in_ns=50 * MS)
    daemon.until(lambda: daemon.page.slot(0, "drained") == again)
    assert daemon.page.slot(0, "launches") > launches


def test_idle_holder_lets_go_and_may_come_back(daemon: Any, start: Any) -> None:
    program = start()
    word = daemon.grant(deadline_in_ns=60_000 * MS)
    program.do("0 launch 100000")
    program.do("0 sync")
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)
    assert daemon.page.slot(0, "idle") == word
    assert daemon.page.slot(0, "acked") == word
    program.do("0 launch 100000")  # the daemon has not closed the word
    program.do("0 sync")
    daemon.until(lambda: daemon.page.slot(0, "idle") == word)


def test_idle_holder_that_never_synchronised_lets_go(daemon: Any, start: Any) -> None:
    program = start()
    word = daemon.grant(deadline_in_ns=60_000 * MS)
    program.do("0 launch 100000")
    daemon.until(lambda: daemon.page.slot(0, "idle") == word)


def test_holder_keeps_the_device_while_nobody_waits(daemon: Any, start: Any) -> None:
    program = start()
    word = daemon.grant()
    program.do("0 launch 1000")
    program.do("0 sync")
    time.sleep(0.05)
    assert daemon.page.slot(0, "acked") == 0
    daemon.page.put(72, time.clock_gettime_ns(time.CLOCK_MONOTONIC) + 60_000 * MS)
    daemon.poke()
    daemon.until(lambda: daemon.page.slot(0, "idle") == word)


def test_killed_while_holding_leaves_a_slot_to_the_next(daemon: Any, start: Any) -> None:
    first = start()
    daemon.grant()
    first.do("0 launch 1000")
    os.kill(first.process.pid, signal.SIGKILL)
    daemon.until(lambda: 0 not in daemon.clients)
    second = start()
    second.do("0 launch 1000")
    assert daemon.page.slot(1, "opened") == daemon.page.grant


def test_daemon_death_opens_the_gate(daemon: Any, start: Any) -> None:
    program = start()
    program.blocked("0 launch 1000")
    daemon.kill()
    program.wait("0 launch 0", 2.5)
    for _ in range(20):
        program.do("0 launch 1000")
    assert daemon.page.slot(0, "ungated") == 1


def test_silent_daemon_opens_the_gate_until_it_speaks_again(daemon: Any, start: Any) -> None:
    program = start()
    program.blocked("0 launch 1000")
    daemon.page.beating = False
    program.wait("0 launch 0", 2.5)
    assert daemon.page.slot(0, "ungated") == 1
    daemon.page.beating = True
    time.sleep(0.3)
    program.blocked("0 launch 1000")
    daemon.grant()
    program.wait("0 launch 0")
    assert daemon.page.slot(0, "ungated") == 1


def test_paused_stays_closed_even_then(daemon: Any, start: Any) -> None:
    program = start()
    daemon.flags(PAUSED)
    program.blocked("0 launch 1000")
    daemon.kill()
    time.sleep(1.5)
    assert "0 launch 0" not in program.lines
    assert daemon.page.slot(0, "ungated") == 0


def test_joins_a_new_daemon(daemon: Any, start: Any, new_daemon: Any) -> None:
    program = start()
    daemon.grant()
    program.do("0 launch 1000")
    daemon.kill()
    successor = new_daemon()
    program.joined_again()
    program.blocked("0 launch 1000")
    word = successor.grant()
    program.wait("0 launch 0")
    assert successor.page.slot(0, "opened") == word
    assert successor.page.slot(0, "ungated") == 0


def test_waiting_launcher_asks_the_new_daemon(daemon: Any, start: Any, new_daemon: Any) -> None:
    program = start()
    program.blocked("0 launch 1000")
    daemon.kill()
    successor = new_daemon()
    daemon.until(lambda: successor.page.slot(0, "demand") == 1)
    successor.grant()
    program.wait("0 launch 0")


def test_forked_child_joins_anew(daemon: Any, start: Any) -> None:
    program = start()
    daemon.grant()
    program.do("0 launch 1000")
    program.do("0 fork 1000")
    assert daemon.joined == 2
    assert daemon.page.slot(1, "launches") + (daemon.page.slot(1, "opened") & 1) >= 1
    program.do("0 launch 1000")
    assert daemon.clients.keys() == {0}


def test_captured_launches_pass_and_the_capture_lives(daemon: Any, start: Any) -> None:
    program = start()
    daemon.grant()
    program.do("1 other 1000000")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") & 1)
    program.do("0 begin")
    for _ in range(5):
        program.do("0 launch 1000")  # the gate is closed
    program.blocked("1 other 1000000")  # a stream that is not captured waits
    word = daemon.grant(deadline_in_ns=2000 * MS)
    program.wait("1 other 0")
    for _ in range(20):
        program.do("1 other 100000")
    daemon.until(lambda: daemon.page.slot(0, "idle") == word)  # the agent has queried meanwhile
    program.do("0 end")


def test_callback_launches_do_not_wait(daemon: Any, start: Any) -> None:
    program = start()
    program.do("0 callback")  # the gate was never open
    assert daemon.page.slot(0, "opened") == 0


def test_threads_that_end_are_forgotten(daemon: Any, start: Any) -> None:
    program = start()
    word = daemon.grant()
    for _ in range(20):
        program.do("1 ptsz 1000")
        program.do("1 exit")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)
    assert daemon.page.slot(0, "dirty") == 0


def test_per_thread_stream_drains(daemon: Any, start: Any) -> None:
    program = start()
    word = daemon.grant()
    program.do(f"1 ptsz {10 * MS}")
    program.do(f"1 ptsz {10 * MS}")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)


def test_destroyed_stream_still_drains(daemon: Any, start: Any) -> None:
    program = start()
    word = daemon.grant()
    program.do(f"0 launch {200 * MS}")
    program.do("0 destroy")
    began = time.monotonic()
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)
    assert time.monotonic() - began > 0.1


def test_graph_lengths_are_learned(daemon: Any, start: Any) -> None:
    program = start()
    daemon.grant()
    for _ in range(4):
        program.do(f"0 graph {80 * MS}")
        program.do("0 sync")
    word = daemon.grant()
    program.do(f"0 graph {80 * MS}")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "inflight") > 0)
    assert 10 * MS < daemon.page.slot(0, "inflight") < 90 * MS
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)


def test_errno_survives(daemon: Any, start: Any) -> None:
    program = start()
    program.blocked("0 errno 1000")
    daemon.grant()
    program.wait("0 errno 0")


def test_closed_descriptors_are_replaced(daemon: Any, start: Any) -> None:
    program = start()
    daemon.grant()
    program.do("0 launch 1000")
    program.do("0 closefds")
    daemon.poke()  # the agent's sleep keeps the descriptors alive until then
    daemon.until(lambda: 0 not in daemon.clients)
    daemon.grant()
    program.tell("0 launch 1000")
    daemon.until(lambda: 1 in daemon.clients)
    program.wait("0 launch 0")
