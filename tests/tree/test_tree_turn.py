"""How a session waits: on the spot while a client is about to ask, through trio before others have waited too long."""

import os
from collections.abc import Iterator

import pytest
import trio
import trio.testing

from cgpufs.turn import Turn

LONG = 3600.0


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    ends = os.pipe()
    yield ends
    for fd in ends:
        os.close(fd)


async def test_what_comes_at_once_is_read_on_the_spot(pipe: tuple[int, int]) -> None:
    turn = Turn(3, LONG)
    os.write(pipe[1], b"x")
    with trio.testing.assert_checkpoints():
        await turn.readable(pipe[0])
    for _ in range(2):
        with trio.testing.assert_no_checkpoints():
            await turn.readable(pipe[0])
    with trio.testing.assert_checkpoints():
        await turn.readable(pipe[0])


async def test_others_have_their_turn_however_much_there_is_to_read(pipe: tuple[int, int]) -> None:
    turn, seen, rounds = Turn(5, LONG), [0], 0
    os.write(pipe[1], b"x")

    async def other() -> None:
        nonlocal rounds
        while True:
            await trio.lowlevel.checkpoint()
            rounds += 1
            seen.append(0)

    async with trio.open_nursery() as nursery:
        nursery.start_soon(other)
        for _ in range(100):
            await turn.readable(pipe[0])
            seen[-1] += 1
        nursery.cancel_scope.cancel()
    # trio runs the tasks of a round in any order: two turns may come between two of the other's
    assert max(seen) <= 2 * 5 and rounds >= 10


async def test_a_turn_ends_with_its_time(pipe: tuple[int, int]) -> None:
    turn = Turn(1000, 0.0)
    os.write(pipe[1], b"x")
    for _ in range(3):
        with trio.testing.assert_checkpoints():
            await turn.readable(pipe[0])


async def test_it_can_be_cancelled_while_nothing_comes(pipe: tuple[int, int]) -> None:
    turn = Turn(1000, LONG)
    os.write(pipe[1], b"x")
    await turn.readable(pipe[0])
    os.read(pipe[0], 1)
    with trio.move_on_after(0.01) as scope:
        await turn.readable(pipe[0])
    assert scope.cancelled_caught


async def test_what_was_withdrawn_is_waited_for_again(pipe: tuple[int, int], monkeypatch: pytest.MonkeyPatch) -> None:
    woken = 0

    async def wakes_for_nothing_at_first(fd: int) -> None:
        nonlocal woken
        await trio.lowlevel.checkpoint()
        woken += 1
        if woken == 3:
            os.write(pipe[1], b"x")

    monkeypatch.setattr(trio.lowlevel, "wait_readable", wakes_for_nothing_at_first)
    await Turn(1, LONG).readable(pipe[0])
    assert woken == 3


async def test_another_descriptor_is_another_question(pipe: tuple[int, int]) -> None:
    turn = Turn(1000, LONG)
    os.write(pipe[1], b"x")
    await turn.readable(pipe[0])
    quiet = os.pipe()
    try:
        with trio.move_on_after(0.01) as scope:
            await turn.readable(quiet[0])
        assert scope.cancelled_caught
    finally:
        for fd in quiet:
            os.close(fd)
