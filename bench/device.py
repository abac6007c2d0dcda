"""The simulated device's own timeline, read from outside (csrc/sim/shared/state.h has the offsets).

Shares come from here, not from what programs or the daemon say of themselves.
"""

import mmap
import struct
from pathlib import Path

MAGIC = 0x6D697367
VERSION = 1


class Device:
    """One simulated GPU's state file, mapped read-only."""

    def __init__(self, path: Path) -> None:
        with open(path, "rb") as file:
            self._map = mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)
        magic, version = struct.unpack_from("<II", self._map, 0)
        if (magic, version) != (MAGIC, VERSION):
            raise ValueError(f"{path} is not the state of a simulated GPU of version {VERSION}")

    def now_ns(self) -> int:
        """Up to when the device has been simulated."""
        return int(struct.unpack_from("<Q", self._map, 8)[0])

    def busy_ns(self) -> int:
        """Kernel time of all processes so far."""
        return int(struct.unpack_from("<Q", self._map, 16)[0])

    def by_pid(self) -> dict[int, int]:
        """Kernel time of each live process so far, in ns."""
        slots, header, size = struct.unpack_from("<III", self._map, 32)
        busy = {}
        for slot in range(slots):
            state, pid, ns = struct.unpack_from("<IIQ", self._map, header + slot * size)
            if state == 1:
                busy[pid] = ns
        return busy
