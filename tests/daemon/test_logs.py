"""Log lines: one event a line, values that cannot break out of it, journald's prefixes."""

import io
import logging
import os
import sys
from typing import Any

import pytest

from cgpusched import fields
from cgpusched.daemon import logs


@pytest.mark.parametrize(("value", "shown"), [
    ("plain", "plain"), (7, "7"), ("", '""'), ("two words", '"two words"'), ('say "x"', '"say \\"x\\""'),
    ("a\nb\x1b[0m", '"a\\nb\\x1b[0m"'), ("back\\slash", '"back\\\\slash"'), ("ü", "ü"), ("\u202e", '"\\u202e"'),
])  # fmt: skip
def test_quote(value: object, shown: str) -> None:
    assert fields.quote(value) == shown


def test_pairs_leave_none_out() -> None:
    assert fields.pairs(a=1, b=None, c="x y") == 'a=1 c="x y"'


def record(message: str, level: int = logging.WARNING, exc_info: Any = None) -> logging.LogRecord:
    return logging.LogRecord("cgpusched.daemon.server.clients", level, "f", 1, message, (), exc_info)


def test_journal_prefixes_every_line() -> None:
    try:
        raise ValueError("inside")
    except ValueError:
        text = logs.Formatter(journal=True).format(record("failed", logging.ERROR, sys.exc_info()))
    lines = text.splitlines()
    assert lines[0] == "<3>clients failed" and len(lines) > 3
    assert all(line.startswith("<3>clients ") for line in lines) and lines[-1].endswith("ValueError: inside")
    assert logs.Formatter(journal=True).format(record("x")) == "<4>clients x"
    assert logs.Formatter(journal=True).format(record("x", logging.INFO)) == "<6>clients x"


def test_terminal_lines_have_time_and_level() -> None:
    text = logs.Formatter(journal=False).format(record("x a=1"))
    assert text.split()[1:] == ["warning", "clients", "x", "a=1"]


def test_journal_is_told_by_device_and_inode() -> None:
    with open("/dev/null", "w") as stream:
        stat = os.fstat(stream.fileno())
        assert logs.to_journal(stream, {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino}"})
        assert not logs.to_journal(stream, {"JOURNAL_STREAM": f"{stat.st_dev}:{stat.st_ino + 1}"})
        for value in ("", "junk", "1:2:3", "a:b"):
            assert not logs.to_journal(stream, {"JOURNAL_STREAM": value})
    assert not logs.to_journal(io.StringIO(), {"JOURNAL_STREAM": "1:2"})


def test_damper_lets_a_burst_through_and_tells_the_rest() -> None:
    now = 100.0
    damper = logs.Damper(burst=2, seconds=10, clock=lambda: now)
    assert [damper.note() for _ in range(5)] == ["", "", None, None, None]
    now = 110.0
    assert [damper.note() for _ in range(3)] == [" held_back=3", "", None]
