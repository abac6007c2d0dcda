"""The control socket's requests as typed values: one strict parser, one line that names what is wrong."""

from __future__ import annotations

import errno
import json
from dataclasses import dataclass
from typing import Any

from cgpusched.errors import CommandError
from cgpusched.units import show

UID_END = (1 << 32) - 1
"""-1 is nobody's."""


@dataclass(frozen=True)
class Shares:
    """What ``create`` and ``run`` say about a new instance; None = not said."""

    gpus: tuple[int, ...] | None = None
    memsize: tuple[int, ...] | None = None
    weight: int | None = None
    highprio: bool | None = None

    @property
    def said(self) -> bool:
        return (self.gpus, self.memsize, self.weight, self.highprio) != (None, None, None, None)


@dataclass(frozen=True)
class Request:
    do: str
    id: str | None
    shares: Shares
    user: int | None = None
    """uid that is to own the new instance."""


_KEYS = {
    "list": frozenset[str](),
    "status": frozenset[str](),
    "destroy": frozenset({"id"}),
    "create": frozenset({"id", "gpus", "memsize", "weight", "highprio", "user"}),
    "run": frozenset({"id", "gpus", "memsize", "weight", "highprio", "user"}),
}


def _wrong(message: str) -> CommandError:
    return CommandError(errno.EINVAL, message)


def parse(line: bytes) -> Request:
    """One line of the socket. Raises CommandError (EINVAL)."""
    try:
        data: Any = json.loads(line)
    except (ValueError, RecursionError):
        raise _wrong("a request is one JSON object on one line") from None
    if not isinstance(data, dict):
        raise _wrong("a request is one JSON object on one line")
    do = data.pop("do", None)
    if not isinstance(do, str) or do not in _KEYS:
        raise _wrong(f"unknown request {show(do)}: {', '.join(_KEYS)}")
    for key in data:
        if key not in _KEYS[do]:
            raise _wrong(f"{do}: unknown key {show(key)}")
    ident = data.get("id")
    if ident is not None and not isinstance(ident, str) or ident is None and do in ("create", "destroy"):
        raise _wrong(f"{do}: id must be a string")
    return Request(do, ident, Shares(
        _integers(do, data, "gpus"), _integers(do, data, "memsize"), _integer(do, data, "weight"),
        _boolean(do, data, "highprio"),
    ), _uid(do, data))  # fmt: skip


def _is_integer(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 1 << 63


def _integer(do: str, data: dict[str, Any], key: str) -> int | None:
    value = data.get(key)
    if value is not None and not _is_integer(value):
        raise _wrong(f"{do}: {key} must be an integer, not negative")
    return value


def _uid(do: str, data: dict[str, Any]) -> int | None:
    value = _integer(do, data, "user")
    if value is not None and value >= UID_END:
        raise _wrong(f"{do}: user must be a uid")
    return value


def _integers(do: str, data: dict[str, Any], key: str) -> tuple[int, ...] | None:
    value = data.get(key)
    if value is None:
        return None
    if not isinstance(value, list) or not 1 <= len(value) <= 64 or not all(map(_is_integer, value)):
        raise _wrong(f"{do}: {key} must be a list of 1-64 integers, none negative")
    return tuple(value)


def _boolean(do: str, data: dict[str, Any], key: str) -> bool | None:
    value = data.get(key)
    if value is not None and not isinstance(value, bool):
        raise _wrong(f"{do}: {key} must be true or false")
    return value
