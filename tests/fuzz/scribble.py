"""A tenant that takes part in nothing and writes what it likes: scribble.py GATE_SOCKET SEED, until it is killed.

It says hello, maps what it is handed, prints a line, and fills its report pages: with noise, with what is nearly true,
and with both while it rings the bell as fast as it can. Now and then it takes a grant and keeps it.
"""

from __future__ import annotations

import array
import contextlib
import mmap
import os
import random
import socket
import struct
import sys
import time

HELLO = struct.pack("<IIII48x", 0x75706763, 1, 4242, 0)
CTL, REPORT, SLOT, SLOTS = 4096, 4096 + 512 * 256, 256, 512
GRANT, SLOT_GEN = 64, 320
OPENED, ACKED, DRAINED, IDLE, DEMAND, INFLIGHT, FIRST, END = 64, 72, 80, 88, 96, 104, 112, 120
MEMORY, COUNTERS = (128, 136, 144), (192, 200, 208, 216, 224)
EDGES = (0, 1, 2, 1 << 31, (1 << 32) - 1, 1 << 32, 1 << 62, (1 << 63) - 1, 1 << 63, (1 << 64) - 1)


class Tenant:
    def __init__(self, path: str, seed: str) -> None:
        self.random = random.Random(seed)
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(path)
        self.sock.send(HELLO)
        welcome, ancillary, _, _ = self.sock.recvmsg(65536, socket.CMSG_SPACE(64))
        fds = array.array("i")
        for _, _, content in ancillary:
            fds.frombytes(content)
        self.slot, self.gen = struct.unpack_from("<II", welcome, 280 + 20)
        _, ctl, report, self.bell = fds
        self.ctl = mmap.mmap(ctl, CTL, prot=mmap.PROT_READ)
        self.report = mmap.mmap(report, REPORT)

    def put(self, slot: int, offset: int, value: int) -> None:
        struct.pack_into("<Q", self.report, CTL + slot * SLOT + offset, value)

    def number(self) -> int:
        word = struct.unpack_from("<Q", self.ctl, GRANT)[0]
        near = (word, word | 1, word & ~1, word - 2, word + 2)
        some = self.random.choice(EDGES), self.random.choice(near), self.random.getrandbits(64)
        return int(self.random.choice(some)) & (1 << 64) - 1

    def noise(self) -> None:
        at = self.random.randrange(REPORT)
        end = min(REPORT, at + self.random.choice((1, 8, 256, 65536)))
        self.report[at:end] = self.random.randbytes(end - at)

    def nearly_true(self) -> None:
        """As a process of its own slot, so that it is listened to."""
        struct.pack_into("<II", self.report, CTL + self.slot * SLOT, self.gen, self.random.getrandbits(32))
        for offset in (OPENED, ACKED, DRAINED, IDLE, INFLIGHT, FIRST, END, *MEMORY, *COUNTERS):
            if self.random.random() < 0.5:
                self.put(self.slot, offset, self.number())
        struct.pack_into("<I", self.report, CTL + self.slot * SLOT + DEMAND, self.random.choice((0, 1, 2**32 - 1)))

    def ring(self) -> None:
        with contextlib.suppress(BlockingIOError):
            os.write(self.bell, struct.pack("<Q", self.random.choice((1, 1, 1, 2**64 - 2))))

    def sulk(self) -> None:
        """Takes the grant, perhaps with hours of work, and does not let go for a while."""
        struct.pack_into("<II", self.report, CTL + self.slot * SLOT, self.gen, 1)
        struct.pack_into("<I", self.report, CTL + self.slot * SLOT + DEMAND, 1)
        work = self.random.choice((0, 2**63))
        until = time.monotonic() + 0.15
        while time.monotonic() < until:
            (word,) = struct.unpack_from("<Q", self.ctl, GRANT)
            if word & 1:
                for offset, value in ((ACKED, 0), (DRAINED, 0), (IDLE, 0), (INFLIGHT, work), (OPENED, word)):
                    self.put(self.slot, offset, value)
            self.ring()

    def run(self) -> None:
        os.set_blocking(self.bell, False)
        print("in", flush=True)
        while True:
            for _ in range(200):
                self.random.choice((self.noise, self.nearly_true, self.nearly_true))()
                self.ring()
            for _ in range(self.random.randrange(2000)):
                self.ring()
            if self.random.random() < 0.3:
                self.sulk()


if __name__ == "__main__":
    Tenant(*sys.argv[1:3]).run()
