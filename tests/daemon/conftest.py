"""A system with a fake gate: real descriptors and slots, no scheduling."""

import errno
import os
import socket
import struct
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from fcntl import F_ADD_SEALS, F_SEAL_GROW, F_SEAL_SHRINK, fcntl
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import trio

from cgpusched.daemon.server.clients import Clients
from cgpusched.daemon.system import System
from cgpusched.model import Gpu
from cgpusched.state import State

CTL_SIZE, REPORT_SIZE, SLOTS = 4096, 4096 + 512 * 256, 512
GIB = 1 << 30


@dataclass
class FakeRegion:
    gpu: int
    id: str
    mem_limit: int
    ctl_fd: int
    report_fd: int
    bell_fd: int
    slots: dict[int, int] = field(default_factory=dict)
    """slot -> generation"""
    closed: bool = False
    context: int = 0


class FakeGate:
    def __init__(self) -> None:
        self.regions: list[FakeRegion] = []
        self.plans: dict[int, Any] = {}
        self.generation = 0
        self.slots_max = SLOTS
        self.busy_ns: dict[tuple[str, int], int] = {}
        self.used: dict[tuple[str, int], int] = {}

    def add_gpu(self, index: int, uuid: bytes, memory: int) -> None:
        assert len(uuid) == 16

    def add_region(self, gpu: int, ident: str, mem_limit: int) -> FakeRegion:
        ctl, report = os.memfd_create("ctl", os.MFD_ALLOW_SEALING), os.memfd_create("report", os.MFD_ALLOW_SEALING)
        os.ftruncate(ctl, CTL_SIZE)
        os.ftruncate(report, REPORT_SIZE)
        for fd in (ctl, report):
            fcntl(fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW)
        region = FakeRegion(gpu, ident, mem_limit, ctl, report, os.eventfd(0))
        self.regions.append(region)
        return region

    def remove_region(self, region: FakeRegion) -> None:
        assert not region.closed
        region.closed = True
        for fd in (region.ctl_fd, region.report_fd, region.bell_fd):
            os.close(fd)
        self.regions.remove(region)

    def set_plan(self, gpu: int, plan: Any) -> None:
        self.plans[gpu] = plan

    def set_memory(self, region: FakeRegion, limit: int, other: int) -> None:
        region.mem_limit = limit

    def set_context(self, region: FakeRegion, size: int) -> None:
        region.context = size

    def attach(self, region: FakeRegion, agent_fd: int) -> tuple[int, int]:
        os.close(os.dup(agent_fd))
        free = next((slot for slot in range(self.slots_max) if slot not in region.slots), None)
        if free is None:
            raise OSError(errno.EAGAIN, "no slot is free")
        self.generation += 1
        region.slots[free] = self.generation
        return free, self.generation

    def detach(self, region: FakeRegion, slot: int) -> None:
        assert not region.closed
        del region.slots[slot]

    def processes(self, region: FakeRegion) -> list[Any]:
        used = self.used.get((region.id, region.gpu), 0)
        return [
            SimpleNamespace(slot=slot, mem_used=used, mem_peak=used, mem_refused=0, launches=1, ungated=0, unknown=0,
                            dirty=0, kernel_ns=0)
            for slot in region.slots
        ]  # fmt: skip

    def usage(self, region: FakeRegion) -> Any:
        busy = self.busy_ns.get((region.id, region.gpu), 0)
        return SimpleNamespace(busy_ns=busy, turns=0, waiting=busy > 0, holding=False, overdue=0)

    def gpu_usage(self, gpu: int) -> Any:
        return SimpleNamespace(busy_ns=0, turns=0, native=False, fallbacks=0, starved=0, fallback=False)

    def close(self) -> None:
        for region in list(self.regions):
            self.remove_region(region)


@dataclass
class World:
    gate: FakeGate
    state: State
    system: System
    clients: Clients
    runtime: Path
    nursery: trio.Nursery
    detached: list[str]


@pytest.fixture
def gate() -> Iterator[FakeGate]:
    fake = FakeGate()
    yield fake
    fake.close()


@pytest.fixture
def gpus() -> list[Gpu]:
    return [
        Gpu(index, f"GPU-0000000{index}-1111-2222-3333-444444444444", "test", 24 * GIB, simulated=True)
        for index in range(2)
    ]


@pytest.fixture
async def world(gate: FakeGate, gpus: list[Gpu], tmp_path: Path) -> AsyncIterator[World]:
    runtime = tmp_path / "run"
    (runtime / "inst").mkdir(parents=True)
    state = State(gpus)
    system = System(state, gate)
    detached: list[str] = []
    async with trio.open_nursery() as nursery:
        clients = Clients(system, runtime, nursery, on_detach=detached.append)
        system.on_change.append(clients.changed)
        yield World(gate, state, system, clients, runtime, nursery, detached)
        clients.close()
        nursery.cancel_scope.cancel()


HELLO = struct.pack("<IIII48x", 0x75706763, 1, 4242, 0)


class Program:
    """A client as csrc/client/offer.c is one: says hello, takes the welcome and its descriptors."""

    def __init__(self, sock: trio.socket.SocketType) -> None:
        self.sock = sock
        self.welcome = b""
        self.fds: list[int] = []

    async def receive(self) -> None:
        self.welcome, ancillary, flags, _ = await self.sock.recvmsg(65536, socket.CMSG_SPACE(4 * 64))
        assert not flags & (socket.MSG_TRUNC | socket.MSG_CTRUNC)
        for level, kind, data in ancillary:
            assert (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS)
            self.fds += struct.unpack(f"={len(data) // 4}i", data)

    @property
    def head(self) -> tuple[int, int, int, int, str, str]:
        """magic, version, error, ngpus, id, text at cgpu_abi.h's offsets."""
        magic, version, error, ngpus = struct.unpack_from("<IIiI", self.welcome, 0)
        return magic, version, error, ngpus, _string(self.welcome[16:152]), _string(self.welcome[152:280])

    def gpu(self, index: int) -> tuple[bytes, int, int, int, int, int]:
        """uuid, gpu, slot, slot_gen, mem_limit, mem_total."""
        uuid, gpu, slot, gen, _, limit, total = struct.unpack_from("<16sIIIIQQ", self.welcome, 280 + 48 * index)
        return uuid, gpu, slot, gen, limit, total

    def close(self) -> None:
        self.sock.close()
        for fd in self.fds:
            os.close(fd)
        self.fds.clear()


def _string(raw: bytes) -> str:
    return raw.split(b"\0")[0].decode()


@pytest.fixture
async def join() -> AsyncIterator[Callable[..., Any]]:
    """``await join(path, hello=...)`` gives a Program that was answered."""
    programs: list[Program] = []

    async def connect(path: Path, hello: bytes = HELLO, receive: bool = True) -> Program:
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        program = Program(sock)
        programs.append(program)
        with _address(path) as address:
            await sock.connect(address)
        if hello:
            await sock.send(hello)
        if receive:
            await program.receive()
        return program

    yield connect
    for program in programs:
        program.close()


@contextmanager
def _address(path: Path) -> Iterator[str]:
    folder = os.open(path.parent, os.O_PATH)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


@pytest.fixture
def until() -> Callable[..., Any]:
    """``await until(condition, seconds)``: polls, and fails when the deadline comes."""

    async def poll(condition: Callable[[], object], seconds: float = 5.0) -> None:
        with trio.fail_after(seconds):
            while not condition():
                await trio.sleep(0.005)

    return poll
