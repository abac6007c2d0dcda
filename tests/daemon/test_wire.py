"""The messages against the C header itself, and parsers against anything."""

import struct
import subprocess
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgpusched.daemon.server import requests, wire
from cgpusched.errors import CommandError

ROOT = Path(__file__).resolve().parents[2]

PRINT = r"""
#include <stdio.h>
#include "cgpu_abi.h"
#define S(t) printf("%zu\n", sizeof(t))
#define O(t, f) printf("%zu\n", offsetof(struct t, f))
int main(void) {
    S(struct cgpu_hello); S(struct cgpu_welcome); S(struct cgpu_welcome_gpu);
    O(cgpu_hello, flags); O(cgpu_welcome, error); O(cgpu_welcome, ngpus); O(cgpu_welcome, id); O(cgpu_welcome, text);
    O(cgpu_welcome, gpu); O(cgpu_welcome_gpu, slot); O(cgpu_welcome_gpu, flags); O(cgpu_welcome_gpu, mem_limit);
    O(cgpu_welcome_gpu, mem_total);
    printf("%u\n%u\n%d\n%d\n%u\n", CGPU_ABI_MAGIC, CGPU_ABI_VERSION, CGPU_MAX_GPUS, CGPU_SLOTS, CGPU_HELLO_INFO);
    printf("%u\n%u\n%u\n", CGPU_GPU_NATIVE, CGPU_GPU_NOTES, CGPU_GPU_PIDS);
    S(struct cgpu_note); O(cgpu_note, number);
}
"""


def test_header_and_python_agree(tmp_path: Path) -> None:
    source = tmp_path / "print.c"
    source.write_text(PRINT)
    subprocess.run(["gcc", f"-I{ROOT}/csrc/abi", "-o", tmp_path / "print", source], check=True)
    told = subprocess.run([tmp_path / "print"], capture_output=True, text=True, check=True).stdout.split()

    def at(layout: struct.Struct, *fields: object) -> int:
        """Where the one field that is not zero lies."""
        raw = layout.pack(*fields)
        return next(index for index, byte in enumerate(raw) if byte)

    head, gpu = wire.WELCOME, wire.WELCOME_GPU
    assert [int(number) for number in told] == [
        wire.HELLO.size, wire.WELCOME_SIZE, gpu.size,
        at(wire.HELLO, 0, 0, 0, 1), at(head, 0, 0, 1, 0, b"", b""), at(head, 0, 0, 0, 1, b"", b""),
        at(head, 0, 0, 0, 0, b"x", b""), at(head, 0, 0, 0, 0, b"", b"x"), head.size,
        at(gpu, b"", 0, 1, 0, 0, 0, 0), at(gpu, b"", 0, 0, 0, 1, 0, 0), at(gpu, b"", 0, 0, 0, 0, 1, 0),
        at(gpu, b"", 0, 0, 0, 0, 0, 1),
        wire.ABI_MAGIC, wire.ABI_VERSION, wire.MAX_GPUS, wire.SLOTS, wire.HELLO_INFO, wire.GPU_NATIVE,
        wire.GPU_NOTES, wire.GPU_PIDS, wire.NOTE.size, at(wire.NOTE, 0, 1),
    ]  # fmt: skip


def test_a_refusal_is_terminated_whatever_its_text() -> None:
    raw = wire.refusal("i" * 128, 11, "t" * 500)
    assert len(raw) == wire.WELCOME_SIZE
    assert raw[8:12] == struct.pack("<i", 11)
    assert raw[16 + 128] == 0 and raw[152 + 127] == 0 and raw[152 + 126] == ord("t")


def test_native_gpus_come_after_the_shared_ones_and_do_not_count() -> None:
    shared = [wire.WelcomeGpu(bytes([index] * 16), index, 7, 8, 9, 10) for index in (1, 3)]
    raw = wire.welcome("x", shared, [wire.NativeGpu(b"n" * 16, 2, 11)])
    assert len(raw) == wire.WELCOME_SIZE and struct.unpack_from("<I", raw, 12) == (2,)
    entries = [wire.WELCOME_GPU.unpack_from(raw, 280 + 48 * place) for place in range(4)]
    assert entries[:2] == [(bytes([index] * 16), index, 7, 8, 0, 9, 10) for index in (1, 3)]
    assert entries[2] == (b"n" * 16, 2, 0, 0, wire.GPU_NATIVE, 0, 11)
    assert not any(raw[280 + 48 * 3 :])


@given(st.binary(max_size=130))
def test_hello_parses_or_says_why(data: bytes) -> None:
    try:
        hello = wire.parse_hello(data)
    except wire.ProtocolError as error:
        assert str(error)
    else:
        assert len(data) == 64 and hello.pid == struct.unpack_from("<I", data, 8)[0]


@given(st.binary(max_size=40))
def test_note_parses_or_says_why(data: bytes) -> None:
    try:
        note = wire.parse_note(data)
    except wire.ProtocolError as error:
        assert str(error)
    else:
        assert wire.note(note) == data[:8] + bytes(8)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=10), inner, max_size=4),
    max_leaves=10,
)
KEYS = st.sampled_from(["do", "id", "gpus", "memsize", "weight", "highprio", "x"])
DO = st.sampled_from(["run", "create", "destroy", "list", "status", "", "RUN"])


@given(st.binary(max_size=200) | JSON.map(lambda value: requests.json.dumps(value).encode()) | st.builds(
    lambda do, rest: requests.json.dumps({**rest, "do": do}).encode(), DO, st.dictionaries(KEYS, JSON, max_size=4)))
def test_requests_parse_or_are_refused_in_one_line(line: bytes) -> None:
    try:
        request = requests.parse(line)
    except CommandError as error:
        assert error.name == "EINVAL" and "\n" not in str(error) and len(str(error)) < 300
    else:
        shares = request.shares
        assert request.do in ("run", "create", "destroy", "list", "status")
        assert request.id is None or type(request.id) is str
        assert all(type(n) is int and n >= 0 for n in (shares.gpus or ()) + (shares.memsize or ()))
        assert shares.weight is None or type(shares.weight) is int


def test_an_unknown_key_is_named_and_cut() -> None:
    with pytest.raises(CommandError, match="run: unknown key"):
        requests.parse(b'{"do": "run", "' + b"k" * 10000 + b'": 1}')
