"""The client socket's messages as bytes: what csrc/abi/cgpu_abi.h declares as cgpu_hello, cgpu_welcome, cgpu_note."""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass

ABI_MAGIC = 0x75706763
ABI_VERSION = 1
MAX_GPUS = 16
SLOTS = 512
HELLO_INFO = 1
GPU_NATIVE = 1
GPU_NOTES = 2
GPU_PIDS = 4

_BEGIN = struct.Struct("<II")
"""Magic and version: of every version's hello and welcome."""
HELLO = struct.Struct("<IIII48x")
WELCOME = struct.Struct("<IIiI136s128s")
WELCOME_GPU = struct.Struct("<16sIIIIQQ")
NOTE = struct.Struct("<II8x")
WELCOME_SIZE = WELCOME.size + MAX_GPUS * WELCOME_GPU.size


class ProtocolError(Exception):
    """The peer does not speak our protocol; ``str()`` says how it differs."""


class VersionError(ProtocolError):
    """It speaks another version of it."""


@dataclass(frozen=True)
class Hello:
    pid: int
    """As the process counts itself: information only."""
    flags: int

    @property
    def info_only(self) -> bool:
        """An NVML-only process: it wants the limits and the pages, and takes no part in the gate."""
        return bool(self.flags & HELLO_INFO)


def parse_hello(data: bytes) -> Hello:
    magic, version = _BEGIN.unpack(data[: _BEGIN.size]) if len(data) >= _BEGIN.size else (ABI_MAGIC, ABI_VERSION)
    if magic != ABI_MAGIC:
        raise ProtocolError(f"magic {magic:#x} where {ABI_MAGIC:#x} is due")
    if version != ABI_VERSION:  # what follows may be of any form
        raise VersionError(f"ABI version {version} where {ABI_VERSION} is due")
    if len(data) != HELLO.size:
        raise ProtocolError(f"hello of {len(data)} bytes where {HELLO.size} are due")
    _, _, pid, flags = HELLO.unpack(data)
    return Hello(pid, flags)


@dataclass(frozen=True)
class Note:
    """The process has taken memory on this GPU that no hook counts. Answered as it came."""

    gpu: int
    number: int


def parse_note(data: bytes) -> Note:
    if len(data) != NOTE.size:
        raise ProtocolError("it sent more than a hello")
    return Note(*NOTE.unpack(data))


def note(one: Note) -> bytes:
    return NOTE.pack(one.gpu, one.number)


@dataclass(frozen=True)
class WelcomeGpu:
    """One GPU as the client is told of it. Sizes in bytes; ``slot_gen`` 0 = no slot of its own."""

    uuid: bytes
    gpu: int
    slot: int
    slot_gen: int
    mem_limit: int
    mem_total: int
    flags: int = 0
    """GPU_NOTES, GPU_PIDS."""


@dataclass(frozen=True)
class NativeGpu:
    """One that the client sees whole. ``memory``: the card's, in bytes."""

    uuid: bytes
    gpu: int
    memory: int


def welcome(instance: str, gpus: Sequence[WelcomeGpu], native: Sequence[NativeGpu] = ()) -> bytes:
    """The answer to a good hello, ``gpus`` in the order the program shall see them."""
    head = WELCOME.pack(ABI_MAGIC, ABI_VERSION, 0, len(gpus), instance.encode(), b"")
    shared = b"".join(
        WELCOME_GPU.pack(gpu.uuid, gpu.gpu, gpu.slot, gpu.slot_gen, gpu.flags, gpu.mem_limit, gpu.mem_total)
        for gpu in gpus
    )
    whole = b"".join(WELCOME_GPU.pack(gpu.uuid, gpu.gpu, 0, 0, GPU_NATIVE, 0, gpu.memory) for gpu in native)
    return (head + shared + whole).ljust(WELCOME_SIZE, b"\0")


def refusal(instance: str, code: int, text: str) -> bytes:
    """The answer when there is nothing to hand out: ``code`` is an errno, ``text`` says why."""
    head = WELCOME.pack(ABI_MAGIC, ABI_VERSION, code, 0, instance.encode(), text.encode()[:127])
    return head.ljust(WELCOME_SIZE, b"\0")
