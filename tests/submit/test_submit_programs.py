"""Kinds of programs against a gate that opens and closes by script: none may hang, none may see a spoilt capture."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

MS = 1_000_000
GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
LAUNCH, ALLOC, WAIT = 0, 1, 2
NOT_PERMITTED = 800


@contextmanager
def turns(daemon: Any, on_ms: float = 3, off_ms: float = 2, gpus: int = 1) -> Iterator[None]:
    """Meanwhile the gate is opened for a short turn again and again, as with a busy rival."""
    stop = threading.Event()

    def run() -> None:
        while not stop.is_set():
            for gpu in range(gpus):
                daemon.grant(int(on_ms * MS), gpu=gpu)
            daemon.poke()
            time.sleep(on_ms / 1000)
            for gpu in range(gpus):
                daemon.revoke(gpu=gpu)
            time.sleep(off_ms / 1000)

    thread = threading.Thread(target=run)
    thread.start()
    try:
        yield
    finally:
        stop.set()
        thread.join()


def settled(daemon: Any, gpu: int = 0) -> bool:
    """All that was opened has been acknowledged and drained."""
    page = daemon.pages[gpu]
    return bool(page.slot(0, "opened") == page.slot(0, "acked") == page.slot(0, "drained"))


# ---- threads, streams, contexts ----

def test_several_threads_streams_and_contexts(daemon: Any, program: Callable[..., Any]) -> None:
    one = program()
    with turns(daemon):
        one.do("5 another 0")  # a context of its own
        for thread, line in enumerate(("busy 2 100 400", "busy 3 20 400", "busy 0 50 400", "busy 1 50 400")):
            one.tell(f"{thread} {line}")
        one.tell("5 busy 1 100 400")
        for thread in (0, 1, 2, 3, 5):
            one.wait(f"{thread} busy 0")
    daemon.revoke()
    daemon.until(lambda: settled(daemon))
    assert daemon.page.slot(0, "dirty") == 0
    assert daemon.page.slot(0, "launches") > 500


def test_per_thread_default_streams_of_threads_that_come_and_go(daemon: Any, program: Callable[..., Any]) -> None:
    one = program()
    with turns(daemon):
        for _ in range(10):
            for thread in (1, 2, 3):
                one.tell(f"{thread} launches 1 50 20")
            for thread in (1, 2, 3):
                one.wait(f"{thread} launches 0")
                one.do(f"{thread} end-thread")
    daemon.revoke()
    daemon.until(lambda: settled(daemon))
    assert daemon.page.slot(0, "dirty") == 0


@pytest.mark.parametrize("line", ["busy 2 200 500", "synchronising 2 200 500", "polling 2 200 500"])
def test_habits_of_waiting(daemon: Any, program: Callable[..., Any], line: str) -> None:
    """Never synchronises; after each launch; polls events."""
    one = program()
    with turns(daemon):
        one.do(f"0 {line}")
    daemon.revoke()
    daemon.until(lambda: settled(daemon))
    assert daemon.page.slot(0, "dirty") == 0
    assert daemon.page.slot(0, "launches") >= 450 or "busy" in line


@pytest.mark.parametrize("how", ["ex", "coop"])
def test_other_launches_wait_too(daemon: Any, program: Callable[..., Any], how: str) -> None:
    one = program()
    one.blocked(f"0 {how} 2 100")
    word = daemon.grant()
    one.wait(f"0 {how} 0")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)


def test_green_contexts_wait_like_any(daemon: Any, program: Callable[..., Any]) -> None:
    """A stream of one, and with one current its default streams; one may end with work of its streams behind it."""
    one = program()
    one.do("0 green 0 2")
    one.do("1 green 1 3")
    one.do("2 greencurrent 0")
    for line in ("0 launch 2 100", "1 launch 3 100", "2 launch 0 100"):
        one.blocked(line)
    word = daemon.grant()
    for line in ("0 launch 0", "1 launch 0", "2 launch 0"):
        one.wait(line)
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)
    assert daemon.page.slot(0, "launches") == 3
    with turns(daemon):
        for thread, stream in ((0, 2), (1, 3), (2, 0)):
            one.tell(f"{thread} synchronising {stream} 100 300")
        for thread in (0, 1, 2):
            one.wait(f"{thread} synchronising 0")
        one.do("1 greenend 1")
        one.do("1 busy 4 100 200")
        one.do("2 busy 0 100 200")
    daemon.revoke()
    daemon.until(lambda: settled(daemon))
    assert daemon.page.slot(0, "dirty") == 0


def test_a_stream_of_another_device_waits_for_that_devices_gate(daemon2: Any, program: Callable[..., Any]) -> None:
    """The current context is device 0's all the while."""
    one = program()
    daemon2.grant(gpu=0)
    one.do("0 launch 2 10")
    one.blocked("0 launch 8 10")
    daemon2.grant(gpu=1)
    one.wait("0 launch 0")
    assert daemon2.pages[1].slot(0, "opened")


def test_a_launch_on_two_devices_holds_both_gates(daemon2: Any, program: Callable[..., Any]) -> None:
    one = program()
    first = daemon2.grant(gpu=0)
    one.blocked("0 both 50")
    assert daemon2.pages[1].slot(0, "demand") == 1
    daemon2.revoke(gpu=0)
    daemon2.until(lambda: daemon2.pages[0].slot(0, "drained") in (0, first))
    daemon2.grant(gpu=1)
    daemon2.until(lambda: daemon2.pages[0].slot(0, "demand") == 1)
    assert "0 both 0" not in one.lines
    daemon2.grant(gpu=0)
    one.wait("0 both 0")
    with turns(daemon2, gpus=2):
        for _ in range(100):
            one.do("0 both 200")
    for gpu in (0, 1):
        daemon2.revoke(gpu=gpu)
        daemon2.until(lambda at=gpu: settled(daemon2, at))
        assert daemon2.pages[gpu].slot(0, "dirty") == daemon2.pages[gpu].slot(0, "ungated") == 0


def test_gates_that_are_never_open_together_do_not_hang_it(daemon2: Any, program: Callable[..., Any]) -> None:
    one = program()
    stop = threading.Event()

    def alternate() -> None:
        while not stop.is_set():
            for gpu in (0, 1):
                daemon2.grant(2 * MS, gpu=gpu)
                daemon2.revoke(gpu=1 - gpu)
                time.sleep(0.002)

    thread = threading.Thread(target=alternate)
    thread.start()
    try:
        one.do("0 both 50", 5)
    finally:
        stop.set()
        thread.join()


# ---- capture ----

@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_captures_pass_a_closed_gate(daemon: Any, program: Callable[..., Any], mode: int) -> None:
    one = program()
    daemon.grant()
    one.do("0 launch 4 10")  # lanes exist
    one.do("0 launch 5 10")
    one.do("0 sync")
    daemon.revoke()
    daemon.until(lambda: settled(daemon))
    one.do(f"0 begin 4 {mode}")
    for line in ("launch 4 10", "record 1 4", "wait 1 5", "launch 5 10", "memset 5 4096", "record 2 5", "wait 2 4",
                 "host 4 0", "launch 4 10", "end 4", "nodes 5"):
        one.do(f"0 {line}")
    assert settled(daemon)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_captures_beside_busy_threads_stay_whole(daemon: Any, program: Callable[..., Any], mode: int) -> None:
    """The agent and other threads record and query events all the while; six nodes are in each graph, no more."""
    one = program()
    with turns(daemon, 2, 1):
        for thread, line in enumerate(("busy 2 50 1000", "busy 1 100 1000", "synchronising 3 100 1000")):
            one.tell(f"{thread + 1} {line}")
        one.do(f"0 captures {mode} 150", 30)
        for thread in (1, 2):
            one.wait(f"{thread} busy 0")
        one.wait("3 synchronising 0", 30)
    assert daemon.page.slot(0, "dirty") == 0


def test_capture_of_a_blocking_stream_with_work_in_the_legacy_stream(daemon: Any, program: Callable[..., Any]) -> None:
    """The legacy stream may not even be recorded in then: the agent must close the turn without it."""
    one = program()
    word = daemon.grant()
    one.do("0 launch 0 20000")
    one.do(f"0 begin 6 {RELAXED}")
    one.do("0 launch 6 10")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)
    one.do("0 launch 6 10")
    one.do("0 end 6")
    one.do("0 nodes 2")


def test_no_event_of_the_agent_lands_in_a_capture_that_begins_meanwhile(
        daemon: Any, strict: Callable[..., Any]) -> None:
    """The agent has asked whether the stream captures (no) and is in the driver to record when the capture begins."""
    one = strict(FAKE_SLOW_RECORD_US="200000")
    word = daemon.grant()
    one.do("0 launch 1000")
    daemon.revoke()
    time.sleep(0.05)
    assert daemon.page.slot(0, "drained") != word
    one.do("0 begin")
    time.sleep(0.3)
    one.do("0 end")
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)


def test_a_program_that_reads_a_captured_host_node_sees_its_own_function(
        daemon: Any, program: Callable[..., Any]) -> None:
    one = program()
    daemon.grant()
    one.do(f"0 captures {THREAD_LOCAL} 1")
    one.do("0 ownhost")


# ---- host functions ----

@pytest.mark.parametrize("how", ["host", "callback"])
@pytest.mark.parametrize("kind", [LAUNCH, ALLOC])
def test_host_functions_that_call_the_driver_come_back(daemon: Any, program: Callable[..., Any], how: str,
                                                       kind: int) -> None:
    """While the gate is closed. What the driver says of the call is its own affair: it forbids them."""
    one = program()
    one.do(f"0 {how} 2 {kind}")
    one.tell("0 called 1")
    one.wait(f"0 called {NOT_PERMITTED}")
    assert daemon.page.slot(0, "opened") == 0


def test_host_node_of_a_graph_that_launches_comes_back(daemon: Any, program: Callable[..., Any]) -> None:
    one = program()
    one.do(f"0 hostgraph {LAUNCH}")
    daemon.grant()
    one.do("0 graph 2")
    one.tell("0 called 1")
    one.wait(f"0 called {NOT_PERMITTED}")


def test_host_function_that_waits_for_later_launches(daemon: Any, program: Callable[..., Any]) -> None:
    """Its stream stands until the launching thread has launched a hundred more: no launch may wait for it."""
    one = program()
    daemon.grant()
    for _ in range(30):
        one.do("0 launch 2 50")  # a length is known
    one.do(f"0 host 2 {WAIT}")
    one.do("0 launches 2 50 100")
    one.do("0 flag 1")
    one.do("0 sync")


def test_host_function_that_waits_for_a_thread_at_the_closed_gate(daemon: Any, program: Callable[..., Any]) -> None:
    """The turn ends although the stream stands; the next one lets the thread go, and the stream."""
    one = program()
    word = daemon.grant()
    one.do("0 launch 2 50")
    one.do(f"0 host 2 {WAIT}")
    one.do("0 launch 2 50")
    daemon.revoke()
    one.blocked("1 launch 3 50")
    daemon.until(lambda: daemon.page.slot(0, "drained") == word, 3)
    assert daemon.page.slot(0, "dirty") == 1
    daemon.grant()
    one.wait("1 launch 0")
    one.do("1 flag 1")
    one.do("0 sync")


# ---- copies ----

def test_copies_of_pageable_memory_wait_and_go_on(daemon: Any, program: Callable[..., Any]) -> None:
    one = program()
    one.blocked("0 copies 20 1000000")
    with turns(daemon):
        one.wait("0 copies 0")
    daemon.revoke()
    daemon.until(lambda: settled(daemon))
    assert daemon.page.slot(0, "dirty") == 0


def test_a_copy_behind_long_work_does_not_hold_up_the_turns_end(daemon: Any, program: Callable[..., Any]) -> None:
    """It waits in the driver for a kernel of 300 ms; the turn ends and is acknowledged before its end."""
    one = program()
    daemon.page.overlap(100 * MS)
    daemon.grant()
    for _ in range(3):
        one.do("0 launch 0 300000")
        one.do("0 sync")
    word = daemon.grant(60_000 * MS)
    one.do("0 launch 0 300000")
    began = time.monotonic()
    one.tell("0 dtoh 4096")
    time.sleep(0.02)
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "acked") == word)
    acked = time.monotonic() - began
    assert daemon.page.slot(0, "drained") != word, "the mark was waited for"
    assert acked < 0.29
    daemon.until(lambda: daemon.page.slot(0, "drained") == word)
    assert "0 dtoh 0" not in one.lines
    daemon.grant()
    one.wait("0 dtoh 0")


# ---- graphs ----

def test_graphs_of_any_size(daemon: Any, program: Callable[..., Any]) -> None:
    one = program()
    one.do("0 capture 2 3 20")
    one.do("0 capture 3 500 100")
    one.blocked("0 upload 2")
    with turns(daemon, 20, 5):
        one.wait("0 upload 0")
        for _ in range(30):
            one.do("0 graph 2")
        for _ in range(4):
            one.do("0 graph 3")  # 50 ms: longer than the turn
        one.do("0 sync")
    daemon.revoke()
    daemon.until(lambda: settled(daemon))
    assert daemon.page.slot(0, "dirty") == 0


# ---- without membarrier ----

@pytest.mark.parametrize("line", ["busy 2 100 500", "synchronising 2 100 500", "busy 1 50 500"])
def test_without_membarrier(daemon: Any, program: Callable[..., Any], line: str) -> None:
    """Old kernels and strict seccomp profiles lack it: every launch then marks itself with an exchange."""
    one = program(DOES_WITHOUT_MEMBARRIER="1")
    one.blocked("2 launch 3 10")
    with turns(daemon):
        one.wait("2 launch 0")
        one.tell("1 busy 3 20 500")
        one.do(f"0 {line}")
        one.wait("1 busy 0")
    daemon.revoke()
    daemon.until(lambda: settled(daemon))
    launches = daemon.page.slot(0, "launches")
    one.blocked("0 launch 2 10")
    assert daemon.page.slot(0, "launches") == launches > 100
    assert daemon.page.slot(0, "dirty") == 0


# ---- the end ----

def test_a_cancelled_thread_does_not_die_inside_a_launch(daemon: Any, program: Callable[..., Any]) -> None:
    """With a lock of ours, or counted as waiting: here where the hook says that the daemon is gone."""
    one = program()
    daemon.kill()
    one.tell("1 cancelled 2 10")
    one.wait("1 cancelled 0")
    assert daemon.page.slot(0, "demand") == 0
    one.do("2 launch 2 10")



@pytest.mark.parametrize("thread", [0, 1])
def test_exit_while_the_agent_works(daemon: Any, program: Callable[..., Any], thread: int) -> None:
    for _ in range(10):
        one = program()
        with turns(daemon, 1, 1):
            one.tell("3 busy 3 50 10000")
            one.tell("0 launches 2 50 50")
            one.tell(f"{thread} exit 7")
            assert one.process.wait(10) == 7
