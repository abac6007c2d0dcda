"""Inputs that are nearly right: those of the corpus, changed a little, the same ones for the same seed."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

CORPUS = Path(__file__).resolve().parent / "corpus"
CASES = int(os.environ.get("CGPU_FUZZ_CASES", "1500"))
"""Inputs of each target. 1,500 take about a second; by hand a hundred thousand."""
SEED = int(os.environ.get("CGPU_FUZZ_SEED", "1"))
SIZE_MAX = 70_000
PIECES = [
    b"", b"\0", b"\n", b"\r\n", b"\t", b" ", b"=", b",", b"-1", b"0", b"00", b"1e999", b"1.5", b"NaN", b"Infinity",
    b"null", b"true", b"[]", b"{}", b"[[[[[[[[", b"{\"a\":" * 50, b"\"\\ud800\"", b"\"\\u0000\"", b"..",
    b"/", b"../../..", b"//", b"%s%n", b"\xff", b"\xc0\x80", b"\xf0\x9f\x92\xa9", b"\xd9\xa3", b"9" * 25, b"9" * 5000,
    b"18446744073709551616", b"9223372036854775807", b"4294967296", b"GiB", b"T", b"'''", b"\"", b"#",
    b"[", b"]", b"}", b"A" * 200, b"x" * 5000,
]  # fmt: skip
"""What parsers trip over."""


def corpus(target: str) -> list[bytes]:
    """The files of a target, in order of their names."""
    return [path.read_bytes() for path in sorted((CORPUS / target).iterdir())]


def mutated(source: random.Random, seeds: list[bytes]) -> bytes:
    """One of ``seeds``, after one to six changes."""
    data = bytearray(source.choice(seeds))
    for _ in range(source.choice((1, 1, 1, 2, 3, 6))):
        at = source.randrange(len(data) + 1)
        end = min(len(data), at + source.choice((1, 1, 2, 4, 8, 32)))
        match source.randrange(7):
            case 0 if data:
                data[at % len(data)] ^= 1 << source.randrange(8)
            case 1:
                del data[at:end]
            case 2:
                data[at:at] = source.choice(PIECES)
            case 3:
                data[at:end] = source.choice(PIECES)
            case 4:
                data[at:at] = data[at:end] * source.choice((1, 2, 20))
            case 5:
                other = source.choice(seeds)
                data[at:] = other[source.randrange(len(other) + 1):]
            case _:
                data[at:end] = source.randbytes(end - at)
    return bytes(data[:SIZE_MAX])


def cases(target: str) -> Iterator[bytes]:
    """The corpus as it is, then CASES changed inputs."""
    seeds = corpus(target)
    yield from seeds
    source = random.Random(f"{target} {SEED}")
    for _ in range(CASES):
        yield mutated(source, seeds)
