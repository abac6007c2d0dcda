"""From one daemon's end to the next one's welcome: whose the device is meanwhile, and what is said of that later."""

from __future__ import annotations

import select
import socket
import threading
from pathlib import Path
from typing import Any

import pytest

MS = 1_000_000
FOREVER = 3_600_000 * MS


def test_who_had_the_last_turn_goes_on(daemon: Any, start: Any) -> None:
    """It let go at its deadline, and the daemon died before it saw that: nobody else was granted the device."""
    program = start()
    word = daemon.grant(deadline_in_ns=20 * MS)
    program.tell(f"1 busy {MS}")
    daemon.until(lambda: daemon.page.slot(0, "drained") == word and daemon.page.slot(0, "demand") == 1)
    daemon.kill()
    daemon.until(lambda: daemon.page.slot(0, "acked") == 0)
    assert daemon.page.slot(0, "opened") == word and daemon.page.slot(0, "ungated") == 0


def test_who_had_none_does_not(daemon: Any, start: Any) -> None:
    """Not by what its page says, at least: only by the fallback, which is counted."""
    program = start()
    daemon.grant()
    program.do("0 launch 1000")
    daemon.revoke()
    daemon.until(lambda: daemon.page.slot(0, "drained") & 1)
    program.blocked("0 launch 1000")
    daemon.kill()
    program.wait("0 launch 0", 20)
    assert daemon.page.slot(0, "ungated") == 1


@pytest.mark.parametrize("wanted", [True, False])
def test_the_next_daemon_is_told_what_it_used(daemon: Any, start: Any, new_daemon: Any, wanted: bool) -> None:
    """Unless nobody else wanted the device (no deadline)."""
    program = start()
    daemon.grant(deadline_in_ns=FOREVER if wanted else 0)
    for _ in range(20):  # its kernels' length is learnt
        program.do(f"0 launch {2 * MS}")
    program.do("0 sync")
    daemon.until(lambda: daemon.page.slot(0, "length") > 0)
    daemon.kill()
    for _ in range(40):
        program.do(f"0 launch {2 * MS}")
    program.do("0 sync")
    successor = new_daemon()
    daemon.until(lambda: 0 in successor.clients and successor.page.slot(0, "gen"))
    if wanted:
        daemon.until(lambda: successor.page.slot(0, "away") > 20 * MS)
    successor.grant()
    program.do(f"0 launch {MS}")
    assert (successor.page.slot(0, "away") > 0) is wanted


def test_a_daemon_that_dies_with_it_in_its_queue(daemon: Any, start: Any, new_daemon: Any) -> None:
    """The next one takes it in: it need not be held to its memory alone for as long as it lives."""
    path: Path = daemon.path
    daemon.kill()
    with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as dying:
        dying.bind(str(path))
        dying.listen(1)
        begun: list[Any] = []
        starting = threading.Thread(target=lambda: begun.append(start()))
        starting.start()
        assert select.select([dying], [], [], 20)[0], "it did not connect"
        path.unlink()
    successor = new_daemon()
    starting.join(20)
    assert begun and successor.joined == 1
    successor.grant()
    begun[0].do("0 launch 1000")
    assert successor.page.slot(0, "opened") == successor.page.grant
