"""A client of the real scheduler thread, from csrc/abi/cgpu_abi.h: maps what it is handed, and obeys (or not)."""

import mmap
import os
import struct
import time
from collections.abc import Callable

from shared import put

from cgpusched.gate import Gate, Region, agent_channel

MS, S = 1_000_000, 1_000_000_000
CTL = {"magic": (0, "I"), "version": (4, "I"), "generation": (8, "Q"), "gpu": (32, "I"), "grant": (64, "Q"),
       "deadline_ns": (72, "Q"), "flags": (80, "I"), "mem_limit": (128, "Q"), "mem_other": (136, "Q"),
       "dead_seq": (144, "Q"), "mem_total": (152, "Q"), "mem_context": (160, "Q"), "contexts": (168, "Q"),
       "span_ns": (192, "I"), "window": (196, "I"), "overlap_ns": (200, "I"), "grace_ns": (204, "I"),
       "heartbeat_ns": (256, "Q"), "busy_ns": (264, "Q")}
SLOT = {"gen": (0, "I"), "pid": (4, "I"), "opened": (64, "Q"), "acked": (72, "Q"), "drained": (80, "Q"),
        "idle": (88, "Q"), "demand": (96, "I"), "inflight_ns": (104, "Q"), "mem_used": (128, "Q"),
        "mem_peak": (136, "Q"), "mem_refused": (144, "Q"), "launches": (192, "Q"), "ungated": (200, "Q"),
        "unknown": (208, "Q"), "kernel_ns": (216, "Q"), "dirty": (224, "Q")}
SLOT_GEN, SLOTS_AT, SLOT_SIZE, REPORT_SIZE = 320, 4096, 256, 4096 + 512 * 256
PAUSED, NODRAIN, NATIVE = 1, 2, 4


def eventually(condition: Callable[[], bool], seconds: float = 5) -> None:
    """Polls until it holds, or fails."""
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end, "did not come true in time"
        time.sleep(0.0005)


class FakeClient:
    """One process of an instance; a context manager. ``die`` is what the daemon does at its end."""

    def __init__(self, gate: Gate, region: Region, enter: bool = True) -> None:
        self.gate, self.region = gate, region
        self.agent_fd, theirs = agent_channel()
        try:
            self.slot, self.gen = gate.attach(region, self.agent_fd)
        finally:
            os.close(self.agent_fd)
        self.agent_fd = theirs
        self.ctl_map = mmap.mmap(region.ctl_fd, 4096, prot=mmap.PROT_READ)
        self.report_map = mmap.mmap(region.report_fd, REPORT_SIZE)
        self.bell_fd = os.dup(region.bell_fd)
        self.attached = True
        if enter:
            self.set(gen=self.gen, pid=os.getpid())

    def __enter__(self) -> "FakeClient":
        return self

    def __exit__(self, *_: object) -> None:
        if self.attached:
            self.die()
        self.ctl_map.close()
        self.report_map.close()
        os.close(self.agent_fd)
        os.close(self.bell_fd)

    def ctl(self, name: str) -> int:
        offset, kind = CTL[name]
        return int(struct.unpack_from(kind, self.ctl_map, offset)[0])

    def slot_gen(self, slot: int) -> int:
        return int(struct.unpack_from("I", self.ctl_map, SLOT_GEN + 4 * slot)[0])

    def set(self, **values: int) -> None:
        for name, value in values.items():
            offset, kind = SLOT[name]
            put(self.report_map, SLOTS_AT + SLOT_SIZE * self.slot + offset, kind, value)

    def get(self, name: str) -> int:
        offset, kind = SLOT[name]
        return int(struct.unpack_from(kind, self.report_map, SLOTS_AT + SLOT_SIZE * self.slot + offset)[0])

    def bell(self) -> None:
        os.write(self.bell_fd, struct.pack("Q", 1))

    @property
    def word(self) -> int:
        return self.ctl("grant")

    @property
    def granted(self) -> bool:
        return bool(self.word & 1)

    def ask(self) -> None:
        self.set(demand=1)
        self.bell()

    def accept(self, seconds: float = 5) -> int:
        """Waits for the grant and opens it; gives the word."""
        eventually(lambda: self.granted, seconds)
        word = self.word
        self.set(drained=0, idle=0, acked=0, opened=word)
        if self.word != word:
            self.set(acked=word, drained=word)
            self.bell()
            return self.accept(seconds)
        self.set(demand=0)
        return word

    def let_go(self, word: int, idle: bool = False, drained: bool = True) -> None:
        if idle:
            self.set(idle=word)
        self.set(acked=word)
        if drained:
            self.set(drained=word)
        self.bell()

    def rung(self) -> bool:
        """Was the agent rung since the last call?"""
        got = False
        while True:
            try:
                got |= bool(os.read(self.agent_fd, 8))
            except BlockingIOError:
                return got

    def die(self) -> None:
        self.attached = False
        self.gate.detach(self.region, self.slot)
