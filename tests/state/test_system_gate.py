"""The system over the real gate: what the fake of test_system.py promises, the real one does."""

import os
import struct
from mmap import ACCESS_READ, mmap

import pytest

from cgpusched.commands import Create, Destroy, SetMemsize, SetPolicy, SetShut, SetWeight
from cgpusched.daemon.system import System
from cgpusched.errors import CommandError
from cgpusched.gate import Gate, agent_channel
from cgpusched.model import Gpu
from cgpusched.state import State

GIB = 1 << 30
PAUSED, NODRAIN, NATIVE, SHUT = 1, 2, 4, 8


def test_commands_reach_the_control_page() -> None:
    cards = [Gpu(i, f"GPU-00112233-4455-6677-8899-aabbccddee{i:02x}", "Test", 24 * GIB) for i in (0, 1)]
    with Gate() as gate:
        system = System(State(cards), gate)
        system.apply(Create("a", (1, 0), (2 * GIB,)))
        region = system.regions("a")[1]
        with mmap(region.ctl_fd, 4096, access=ACCESS_READ) as page:

            def flags() -> int:
                return int(struct.unpack_from("<I", page, 80)[0])

            def memory() -> tuple[int, ...]:
                return struct.unpack_from("<QQQQ", page, 128)

            assert page[16:32].hex() == "00112233445566778899aabbccddee01"
            assert (memory()[0], memory()[3]) == (2 * GIB, 24 * GIB)
            assert flags() == 0
            system.apply(SetMemsize(1, "a", 3 * GIB))
            assert memory()[0] == 3 * GIB
            system.apply(SetPolicy(1, 4))
            assert flags() & NODRAIN
            system.apply(SetPolicy(1, 5))
            assert flags() & NATIVE
            system.apply(SetWeight(1, "a", 0))
            assert flags() & PAUSED
        system.apply(Destroy("a"))
        with pytest.raises(CommandError):
            system.attach_process("a", 1, -1)
        system.apply(Create("a", (0,), (GIB,)))


def test_processes_come_and_go() -> None:
    card = Gpu(0, "GPU-00112233-4455-6677-8899-aabbccddeeff", "Test", 24 * GIB)
    with Gate() as gate:
        system = System(State([card]), gate)
        system.apply(Create("a", (0,), (GIB,)))
        channels = [agent_channel() for _ in range(2)]
        try:
            first, second = (system.attach_process("a", 70 + i, ours) for i, (ours, _) in enumerate(channels))
            assert first.tickets[0].slot != second.tickets[0].slot
            assert 0 not in (first.tickets[0].generation, second.tickets[0].generation)
            system.sample(1)
            system.sample(2)
            assert system.usage()[0].instances[0].percent == 0.0
            assert system.memory("a", 0) == []
            system.detach_process(first)
            system.detach_process(second)
            system.apply(Destroy("a"))
        finally:
            for channel in channels:
                for fd in channel:
                    os.close(fd)


def test_a_shut_gate_says_so_and_opens_again() -> None:
    card = Gpu(0, "GPU-00112233-4455-6677-8899-aabbccddeeff", "Test", 24 * GIB)
    with Gate() as gate:
        system = System(State([card]), gate)
        for ident in "ab":
            system.apply(Create(ident, (0,), (GIB,)))
        pages = [mmap(system.regions(ident)[0].ctl_fd, 4096, access=ACCESS_READ) for ident in "ab"]

        def shown() -> list[tuple[int, int]]:
            """Flags, and whether the word is granted."""
            return [(struct.unpack_from("<I", page, 80)[0], page[64] & 1) for page in pages]

        system.apply(SetPolicy(0, 5))
        assert shown() == [(NATIVE, 1), (NATIVE, 1)]
        system.apply(SetShut(0, "a", True))
        assert shown() == [(SHUT, 0), (NATIVE, 1)]
        system.apply(SetWeight(0, "a", 0))
        assert shown()[0] == (SHUT, 0)
        system.apply(SetShut(0, "a", False))
        assert shown()[0] == (PAUSED, 0)
        system.apply(SetWeight(0, "a", 1))
        assert shown() == [(NATIVE, 1), (NATIVE, 1)]
        system.apply(SetShut(0, "a", True))
        gate.close()  # nobody is left to open it: as a paused one, it stays
        assert shown() == [(SHUT, 0), (NATIVE, 1)]
        for page in pages:
            page.close()
