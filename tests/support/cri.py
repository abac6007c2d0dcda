"""containerd's CRI service, asked as a kubelet asks it: gRPC over a Unix socket, without a library for it.

Messages are given and taken as field numbers of Kubernetes' runtime.v1 (cri-api's api.proto). One connection a call.
"""

from __future__ import annotations

import socket
import struct
from collections.abc import Iterator
from pathlib import Path

DATA, HEADERS, SETTINGS, PING = 0, 1, 4, 6
END_STREAM, ACK, END_HEADERS = 1, 1, 4
PREFACE = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n"

Field = tuple[int, "str | bytes | int"]


class Refused(Exception):
    """The service answered with an error; its words are in containerd's log."""


def message(*fields: Field) -> bytes:
    """Those fields in protobuf's encoding; a field may come several times."""
    out = b""
    for number, value in fields:
        if isinstance(value, int):
            out += _varint(number << 3) + _varint(value)
        else:
            data = value.encode() if isinstance(value, str) else value
            out += _varint(number << 3 | 2) + _varint(len(data)) + data
    return out


def fields(data: bytes) -> dict[int, list[bytes | int]]:
    """The reverse: each field's values in their order."""
    found: dict[int, list[bytes | int]] = {}
    at = 0
    while at < len(data):
        tag, at = _read_varint(data, at)
        value: bytes | int
        if tag & 7 == 0:
            value, at = _read_varint(data, at)
        else:
            assert tag & 7 == 2, f"wire type {tag & 7}"
            length, at = _read_varint(data, at)
            value, at = data[at : at + length], at + length
        found.setdefault(tag >> 3, []).append(value)
    return found


def text(data: bytes, number: int) -> str:
    """The one string in that field; empty where there is none."""
    values = fields(data).get(number, [b""])
    assert isinstance(values[-1], bytes)
    return values[-1].decode()


def call(path: Path, method: str, request: bytes) -> bytes:
    """Calls ``runtime.v1.METHOD`` and gives the answer. Refused: there came none."""
    with socket.socket(socket.AF_UNIX) as sock:
        sock.settimeout(60)
        sock.connect(str(path))
        names = {":method": "POST", ":scheme": "http", ":path": f"/runtime.v1.{method}", ":authority": "localhost",
                 "content-type": "application/grpc", "te": "trailers"}
        headers = b"".join(b"\0" + _string(key) + _string(value) for key, value in names.items())
        sock.sendall(PREFACE + _frame(SETTINGS, 0, 0, b"") + _frame(HEADERS, END_HEADERS, 1, headers)
                     + _frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, len(request)) + request))
        body = b""
        for kind, flags, payload in _frames(sock):
            if kind in (SETTINGS, PING) and not flags & ACK:
                sock.sendall(_frame(kind, ACK, 0, payload if kind == PING else b""))
            elif kind == DATA:
                body += payload
            if kind in (DATA, HEADERS) and flags & END_STREAM:
                break
    if not body:
        raise Refused(method)
    return body[5:]


def _string(word: str) -> bytes:
    """A header's name or value in HPACK's plain form; before a name a zero says that it is not to be remembered."""
    return bytes([len(word)]) + word.encode()


def _frame(kind: int, flags: int, stream: int, payload: bytes) -> bytes:
    return struct.pack(">I", len(payload))[1:] + struct.pack(">BBI", kind, flags, stream) + payload


def _frames(sock: socket.socket) -> Iterator[tuple[int, int, bytes]]:
    with sock.makefile("rb") as stream:
        while len(head := stream.read(9)) == 9:
            kind, flags, _ = struct.unpack(">BBI", head[3:])
            yield kind, flags, stream.read(int.from_bytes(head[:3], "big"))


def _varint(value: int) -> bytes:
    out = b""
    while value > 127:
        out += bytes([value & 127 | 128])
        value >>= 7
    return out + bytes([value])


def _read_varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        if byte < 128:
            return value, at
