"""What systemd is told, and that a service manager gone deaf stops nothing."""

import os
import socket
from pathlib import Path
from typing import Any

import pytest
import trio

from cgpusched.daemon.notify import Notifier, feed_watchdog


@pytest.fixture
def manager(tmp_path: Path) -> Any:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind(str(tmp_path / "notify"))
        sock.settimeout(5)
        yield sock


def test_sends_lines(manager: socket.socket) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": manager.getsockname()})
    notifier.send("READY=1", "STATUS=well")
    assert manager.recv(100) == b"READY=1\nSTATUS=well"
    notifier.close()


def test_abstract_sockets() -> None:
    name = f"cgpufs-test-{os.getpid()}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        sock.bind("\0" + name)
        sock.settimeout(5)
        notifier = Notifier({"NOTIFY_SOCKET": "@" + name})
        notifier.send("READY=1")
        assert sock.recv(100) == b"READY=1"
        notifier.close()


def test_without_systemd_nothing_happens() -> None:
    notifier = Notifier({})
    notifier.send("READY=1")
    assert notifier.watchdog_seconds is None
    notifier.close()


def test_a_deaf_manager_is_survived(tmp_path: Path, caplog: Any) -> None:
    notifier = Notifier({"NOTIFY_SOCKET": str(tmp_path / "gone")})
    notifier.send("READY=1")
    assert "notify failed" in caplog.text
    notifier.close()


@pytest.mark.parametrize(("environ", "seconds"), [
    ({"WATCHDOG_USEC": "15000000"}, 15.0), ({"WATCHDOG_USEC": "15000000", "WATCHDOG_PID": str(os.getpid())}, 15.0),
    ({"WATCHDOG_USEC": "15000000", "WATCHDOG_PID": "1"}, None), ({"WATCHDOG_USEC": "0"}, None),
    ({"WATCHDOG_USEC": "soon"}, None), ({}, None),
])  # fmt: skip
def test_watchdog_period(environ: dict[str, str], seconds: float | None) -> None:
    assert Notifier(environ).watchdog_seconds == seconds


async def test_watchdog_is_fed_only_while_the_loop_beats(autojump_clock: Any, caplog: Any) -> None:
    notifier, sent = Notifier({"WATCHDOG_USEC": "3000000"}), []
    notifier.send = lambda *lines: sent.append(lines)  # type: ignore[method-assign]
    beats = iter([1, 2, 2, 2, 3])
    with trio.move_on_after(4.5):
        await feed_watchdog(notifier, lambda: next(beats))
    assert sent == [("WATCHDOG=1",)] * 3
    assert caplog.text.count("watchdog not fed") == 2
