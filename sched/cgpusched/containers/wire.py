"""The messages of cgpud's socket for cgpu-runtime: one packet each way, little-endian (csrc/runtime/ask.c).

A question is magic, version, kind and a zero, 32 bits each, then what the kind says. An answer has the status in the
kind's place, then text: 0, it is none of ours; 1, done; below 0, minus an errno, and the text is one line for the user.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass
from enum import IntEnum

from cgpusched.errors import UserError
from cgpusched.units import show

MAGIC = 0x72706763  # "cgpr"
VERSION = 1
TEXT_MAX = 65536
"""Bytes after the head, either way."""
NOT_OURS, DONE = 0, 1

HEAD = struct.Struct("<IIiI")


class ProtocolError(Exception):
    """The peer does not speak our protocol; ``str()`` says how it differs."""


class Kind(IntEnum):
    CREATE = 1
    HOOK = 2
    DELETE = 3
    PRECREATE = 4
    """Comes with a descriptor of the configuration, and has no payload."""


@dataclass(frozen=True)
class Question:
    kind: Kind
    id: str = ""
    """Of a create or delete."""
    bundle: str = ""
    """Path of a create's bundle; the descriptor sent with it is what counts."""
    state: bytes = b""
    """Of a hook: the OCI state, JSON."""


@dataclass(frozen=True)
class Answer:
    status: int
    text: str = ""
    fd: int = -1
    """To send with it: the new config.json."""

    def packed(self) -> bytes:
        text = self.text.encode("utf-8", "surrogateescape")
        if len(text) > TEXT_MAX:
            raise ValueError(f"an answer of {len(text)} bytes")
        return HEAD.pack(MAGIC, VERSION, self.status, 0) + text


def refusal(code: int, text: str) -> Answer:
    """``code``: an errno. The text is made one line, and fits."""
    return Answer(-code, " ".join(text.split())[:4096])


def parse(data: bytes) -> Question:
    """Raises ProtocolError."""
    if not HEAD.size <= len(data) <= HEAD.size + TEXT_MAX:
        raise ProtocolError(f"a question of {len(data)} bytes")
    magic, version, number, _ = HEAD.unpack_from(data)
    if magic != MAGIC:
        raise ProtocolError(f"magic {magic:#x} where {MAGIC:#x} is due")
    if version != VERSION:
        raise ProtocolError(f"version {version} where {VERSION} is due")
    try:
        kind = Kind(number)
    except ValueError:
        raise ProtocolError(f"a question of kind {number}") from None
    payload = data[HEAD.size :]
    if kind is Kind.HOOK:
        return Question(kind, state=payload)
    if kind is Kind.PRECREATE:
        if payload:
            raise ProtocolError(f"a precreate with {len(payload)} bytes")
        return Question(kind)
    strings = payload.split(b"\0")
    if len(strings) != (3 if kind is Kind.CREATE else 2) or strings.pop() or not strings[0]:
        raise ProtocolError(f"a {kind.name.lower()} whose strings are not as they should be")
    ident, *bundle = (part.decode("utf-8", "surrogateescape") for part in strings)
    return Question(kind, ident, "".join(bundle))


def lines(*rows: Iterable[str]) -> str:
    """The text that a hook gets: a line a row, fields separated by tabs.

    UserError: a field has either in it, or another control character, so that it would be more than one; or they are
    too many for an answer.
    """
    rows = tuple(map(tuple, rows))
    for field in (field for row in rows for field in row):
        if not field.isprintable():
            raise UserError(f"{show(field)}: a path without control characters is allowed")
    text = "".join("\t".join(row) + "\n" for row in rows)
    if len(text.encode("utf-8")) > TEXT_MAX:
        raise UserError(f"what is to be mounted in the container takes {len(text)} bytes: {TEXT_MAX} are allowed")
    return text
