"""An instance's pages as one of its own processes gets them: what a test sees of the others' states in the gate.

It joins as an NVML-only process does, which has no slot and keeps nobody waiting. csrc/abi/cgpu_abi.h has the offsets.
"""

from __future__ import annotations

import array
import mmap
import os
import socket
import struct
from pathlib import Path

MAGIC, VERSION, INFO = 0x75706763, 1, 1
CTL, SLOT, FIRST = 4096, 256, 4096
SLOTS = 512


class Observer:
    """One instance on its first GPU."""

    def __init__(self, sock: Path) -> None:
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self.sock.connect(str(sock))
        self.sock.send(struct.pack("<IIII48x", MAGIC, VERSION, os.getpid(), INFO))
        _, ancillary, _, _ = self.sock.recvmsg(1 << 16, socket.CMSG_SPACE(64 * 4))
        fds = [fd for _, _, data in ancillary for fd in array.array("i", data)]
        self.ctl = mmap.mmap(fds[1], CTL, prot=mmap.PROT_READ)
        self.report = mmap.mmap(fds[2], FIRST + SLOTS * SLOT)
        for fd in fds:
            os.close(fd)

    def close(self) -> None:
        self.sock.close()
        self.ctl.close()
        self.report.close()

    def _word(self, slot: int, offset: int) -> int:
        return int(struct.unpack_from("<Q", self.report, FIRST + slot * SLOT + offset)[0])

    def slot_of(self, pid: int) -> int | None:
        """The live slot of that process."""
        for slot in range(SLOTS):
            gen, of = struct.unpack_from("<II", self.report, FIRST + slot * SLOT)
            if gen and of == pid and gen == struct.unpack_from("<I", self.ctl, 320 + 4 * slot)[0]:
                return slot
        return None

    @property
    def grant(self) -> int:
        return int(struct.unpack_from("<Q", self.ctl, 64)[0])

    def state_of(self, pid: int) -> str:
        """``holding`` a grant that stands; ``closing``: it was told to let go and has not; ``draining``: it has let go,
        and its work has not ended; else ``closed``, or ``gone``.
        """
        slot = self.slot_of(pid)
        if slot is None:
            return "gone"
        opened, acked, drained = (self._word(slot, offset) for offset in (64, 72, 80))
        if not opened or drained == opened and acked == opened:
            return "closed"
        if acked == opened:
            return "draining"
        return "holding" if self.grant == opened else "closing"
