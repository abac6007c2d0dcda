"""The memory part of the hook with a stub driver and a stub gate (stub.h), loaded anew for each test."""

from __future__ import annotations

import _ctypes
import ctypes
import itertools
import mmap
import os
import shlex
import shutil
import struct
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from shared import put

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
PARTS = ["table", "ledger", "account", "instance", "visible", "context", "memory", "pool", "pools", "graph_memory",
         "vmm", "array", "info", "nvml", "nvml_process"]
MIB = 1 << 20
GIB = 1 << 30
OOM = 2
SLOT0, SLOT_BYTES = 4096, 256


def compile_c(out: Path, sources: list[str], *flags: str) -> Path:
    """Builds ``sources`` of this folder with the memory part of the hook."""
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    hook = [str(ROOT / "csrc/hook" / f"{part}.c") for part in PARTS]
    subprocess.run([*compiler, "-std=gnu11", "-O2", "-g", "-Wall", "-Wextra", "-Werror", "-fPIC",
                    *(f"-I{ROOT}/csrc/{folder}" for folder in ("abi", "client", "hook")), f"-I{HERE}", "-o", str(out),
                    *(str(HERE / name) for name in sources), *hook, "-lpthread", *flags], check=True)
    return out


@pytest.fixture(scope="session")
def compile_memory() -> Callable[..., Path]:
    return compile_c


@pytest.fixture(scope="session")
def memory_library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("memory") / "libmemory.so"
    return compile_c(out, ["stub_gate.c", "stub_driver.c", "stub_pools.c"], "-shared", "-DCGPU_TLS=__thread")


@pytest.fixture(scope="session")
def memory_worker(tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("memory") / "worker"
    return compile_c(out, ["worker.c", "stub_gate.c", "stub_driver.c"])


class Page:
    """The report pages of one GPU, as the daemon reads them."""

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)

    def slot(self, index: int, offset: int, form: str = "Q") -> int:
        return int(struct.unpack_from(form, self.map, SLOT0 + SLOT_BYTES * index + offset)[0])

    def used(self, index: int = 0) -> int:
        return self.slot(index, 128)

    def peak(self, index: int = 0) -> int:
        return self.slot(index, 136)

    def refused(self, index: int = 0) -> int:
        return self.slot(index, 144)

    def gen(self, index: int = 0) -> int:
        return self.slot(index, 0, "I")

    def total(self) -> int:
        """What counts: the sum of the slots."""
        return sum(self.used(slot) for slot in range(512) if self.gen(slot))

    def kept_total(self) -> int:
        """As it was last added up; what was given back since may still be in it."""
        return int(struct.unpack_from("Q", self.map, 128)[0])


class Ctl:
    """The control page of one GPU, written as the daemon does."""

    LIMIT, OTHER, DEAD_SEQ, CONTEXT, CONTEXTS, SLOT_GEN = 128, 136, 144, 160, 168, 320

    def __init__(self, path: Path) -> None:
        with path.open("r+b") as file:
            self.map = mmap.mmap(file.fileno(), 0)

    def set(self, offset: int, value: int, form: str = "Q") -> None:
        put(self.map, offset, form, value)

    def get(self, offset: int, form: str = "Q") -> int:
        return int(struct.unpack_from(form, self.map, offset)[0])

    def own(self, slot: int, generation: int) -> None:
        self.set(self.SLOT_GEN + 4 * slot, generation, "I")

    def bury(self, slot: int) -> None:
        """The slot's process has died."""
        self.own(slot, 0)
        self.set(self.DEAD_SEQ, self.get(self.DEAD_SEQ) + 1)


def uuid(n: int) -> bytes:
    return bytes([0xA0 + n, n]) + bytes(range(n, n + 14))


def uuid_text(n: int) -> str:
    h = uuid(n).hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


class Hook:
    """One loaded copy. ``call`` goes through a wrapper as a program's call does."""

    def __init__(self, library: Path, folder: Path) -> None:
        self.folder = folder
        self.lib = ctypes.CDLL(str(library))
        self.lib.stub_context.restype = ctypes.c_void_p
        self.lib.stub_wrapper.restype = ctypes.c_void_p
        self.lib.stub_pool.restype = self.lib.stub_graph.restype = ctypes.c_void_p
        self.lib.stub_pool_reserved.restype = self.lib.stub_graph_reserved.restype = ctypes.c_uint64
        self.lib.stub_seen_visible.restype = ctypes.c_char_p
        self.lib.stub_make_pages.argtypes = [ctypes.c_char_p, ctypes.c_char_p, ctypes.c_uint64, ctypes.c_uint64,
                                             ctypes.c_char_p]
        self.lib.stub_native.argtypes = [ctypes.c_uint32, ctypes.c_char_p]
        self.lib.ledger_charge.argtypes = [ctypes.c_int, ctypes.c_uint64]
        self.lib.ledger_charge.restype = ctypes.c_bool
        self.lib.ledger_refund.argtypes = [ctypes.c_int, ctypes.c_uint64]
        self.lib.hook_join.restype = ctypes.c_bool
        self.pages: dict[int, Page] = {}
        self.ctl: dict[int, Ctl] = {}

    def paths(self, gpu: int, age: int = 0) -> tuple[bytes, bytes]:
        return str(self.folder / f"ctl{gpu}.{age}").encode(), str(self.folder / f"report{gpu}.{age}").encode()

    def cards(self, count: int, total: int = 24 * GIB, free: int | None = None) -> None:
        """The node's cards; uuid(n) is the n-th's."""
        ids = b"".join(uuid(n) for n in range(count))
        self.lib.stub_cards(count, ids, ctypes.c_uint64(total), ctypes.c_uint64(total if free is None else free))

    def offer(self, gpu: int, limit: int, card: int = 0, slot: int = 0, age: int = 0, total: int = 24 * GIB) -> None:
        """Makes pages for the instance's GPU ``gpu``, which is the node's ``card``."""
        ctl, report = self.paths(gpu, age)
        assert self.lib.stub_make_pages(ctl, report, limit, total, uuid(card)) == 0
        self.ctl[gpu], self.pages[gpu] = Ctl(Path(ctl.decode())), Page(Path(report.decode()))
        self.ctl[gpu].own(slot, 7)
        assert self.lib.stub_offer(gpu, ctl, report, slot) == 0
        self.lib.stub_index(gpu, card)

    def native(self, *cards: int) -> None:
        """The instance to be joined has these whole, beside its shared ones."""
        for card in cards:
            self.lib.stub_native(card, uuid(card))

    def start(self, limits: list[int], cards: int = 1, first: int = 0, without: str = "") -> None:
        """Joins an instance whose GPUs are the node's cards ``first`` on; the first's context is current."""
        self.cards(cards)
        for gpu, limit in enumerate(limits):
            self.offer(gpu, limit, card=first + gpu)
        self.lib.stub_joins(len(limits))
        self.lib.stub_bind(without.encode())
        assert self.lib.hook_join(False)
        self.lib.stub_current(first, 0)

    def call(self, name: str, *args: Any) -> int:
        address = self.lib.stub_wrapper(name.encode())
        assert address, f"no wrapper for {name}"
        function: Callable[..., int] = ctypes.CFUNCTYPE(ctypes.c_int)(address)
        function.argtypes = None  # type: ignore[attr-defined]
        return function(*args)

    def replace(self, name: str, function: Any) -> None:
        """The driver's ``name`` becomes a ctypes callback, which the caller keeps."""
        self.lib.stub_replace(name.encode(), function)

    def fail(self, name: str, result: int = 999) -> None:
        self.lib.stub_fail(name.encode(), result)

    def calls(self, name: str) -> int:
        return int(self.lib.stub_calls(name.encode()))

    def alloc(self, size: int, name: str = "cuMemAlloc_v2") -> tuple[int, int]:
        """(result, address); address 0xdead: untouched."""
        ptr = ctypes.c_uint64(0xDEAD)
        return self.call(name, ctypes.byref(ptr), ctypes.c_size_t(size)), ptr.value

    def free(self, address: int, name: str = "cuMemFree_v2") -> int:
        return self.call(name, ctypes.c_uint64(address))

    def used(self, gpu: int = 0) -> int:
        """As the slot has it; the total that is kept is never below."""
        assert self.pages[gpu].kept_total() >= self.pages[gpu].used()
        return self.pages[gpu].used()


copies = itertools.count()


@pytest.fixture
def hook(memory_library: Path, tmp_path: Path) -> Iterator[Hook]:
    """A copy of the library under a name of its own: its state starts empty."""
    copy = tmp_path / f"libmemory{next(copies)}.so"
    shutil.copy(memory_library, copy)
    loaded = Hook(copy, tmp_path)
    yield loaded
    _ctypes.dlclose(loaded.lib._handle)
