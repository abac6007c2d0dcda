"""What the soak looks at: an instance's pages through the daemon's own descriptors, and a steered process of it."""

from __future__ import annotations

import contextlib
import mmap
import os
import struct
import subprocess
from collections.abc import Iterator
from pathlib import Path

from node import Node

MIB, GIB = 1 << 20, 1 << 30
UNIT, PAGE = 512, 2 * MIB
"""Steps in which memory is counted below 2 MiB, and from there on (docs/memory.md)."""
SLOTS = 512
CTL_LIMIT, CTL_OTHER, CTL_GENERATIONS = 128, 136, 320
REPORT_MUTEX, REPORT_TOTAL, REPORT_SLOTS, SLOT_BYTES = 64, 128, 4096, 256
SLOT_GEN, SLOT_PID, SLOT_USED = 0, 4, 128


def charged(size: int) -> int:
    step = UNIT if size < PAGE else PAGE
    return -(-size // step) * step


def environment(node: Node, ident: str) -> dict[str, str]:
    """That of a program in the instance."""
    return {**os.environ, "LD_LIBRARY_PATH": str(node.base / "lib"), "CGPU_SIM_DIR": str(node.runtime / "sim"),
            "CGPU_SOCKET": str(node.runtime / "inst" / ident / "gate.sock")}


class Pages:
    """The pages of a node's only instance, on its only GPU (csrc/abi/cgpu_abi.h has the offsets)."""

    def __init__(self, node: Node) -> None:
        assert node.daemon
        self.ctl = self._map(node.daemon.pid, "cgpu-control")
        self.report = self._map(node.daemon.pid, "cgpu-report")

    @staticmethod
    def _map(pid: int, name: str) -> mmap.mmap:
        found = {}
        for fd in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(OSError):
                if f"memfd:{name} " in os.readlink(fd):
                    found[fd.stat().st_ino] = fd
        assert len(found) == 1, f"{len(found)} pages called {name}"
        with open(found.popitem()[1], "rb") as file:
            return mmap.mmap(file.fileno(), 0, prot=mmap.PROT_READ)

    def close(self) -> None:
        self.ctl.close()
        self.report.close()

    def _ctl(self, offset: int, form: str = "Q") -> int:
        return int(struct.unpack_from(f"<{form}", self.ctl, offset)[0])

    def _report(self, offset: int, form: str = "Q") -> int:
        return int(struct.unpack_from(f"<{form}", self.report, offset)[0])

    @property
    def limit(self) -> int:
        return self._ctl(CTL_LIMIT)

    @property
    def other(self) -> int:
        """What the daemon adds for contexts and modules."""
        return self._ctl(CTL_OTHER)

    @property
    def total(self) -> int:
        """The sum as processes keep it. What was given back since it was last added up is still in it, and what
        the dead held is until the next operation of a living one."""
        return self._report(REPORT_TOTAL)

    @property
    def held(self) -> int:
        """The sum of the slots, which is what counts."""
        bases = [REPORT_SLOTS + SLOT_BYTES * slot for slot in range(SLOTS)]
        return sum(self._report(base + SLOT_USED) for base in bases if self._report(base + SLOT_GEN, "I"))

    def live(self) -> dict[int, int]:
        """Bytes that each live process holds, by pid."""
        found = {}
        for slot, owner in enumerate(struct.unpack_from(f"<{SLOTS}I", self.ctl, CTL_GENERATIONS)):
            base = REPORT_SLOTS + SLOT_BYTES * slot
            if owner and self._report(base + SLOT_GEN, "I") == owner:
                found[self._report(base + SLOT_PID, "I")] = self._report(base + SLOT_USED)
        return found

    def owned(self) -> int:
        """Slots that the daemon has given out."""
        return sum(owner != 0 for owner in struct.unpack_from(f"<{SLOTS}I", self.ctl, CTL_GENERATIONS))

    def kept(self) -> int:
        """Slots that say they belong to somebody, dead or alive."""
        return sum(self._report(REPORT_SLOTS + SLOT_BYTES * slot + SLOT_GEN, "I") != 0 for slot in range(SLOTS))

    @property
    def mutex(self) -> int:
        """The first word of the ledger's mutex, the futex: who holds it, or that he died holding it. 0 = it is free."""
        return self._report(REPORT_MUTEX, "I")


class Worker:
    """A process of the instance. ``blocks``: what each of its blocks counts, oldest first."""

    def __init__(self, program: Path, env: dict[str, str]) -> None:
        self.process = subprocess.Popen([program], env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
                                        bufsize=1)
        self.blocks: list[int] = []
        self.churning = False
        assert self.read() == "ready"

    @property
    def pid(self) -> int:
        return self.process.pid

    @property
    def used(self) -> int:
        return sum(self.blocks)

    def read(self) -> str:
        assert self.process.stdout
        return self.process.stdout.readline().strip()

    def ask(self, *words: object) -> str:
        """One command and its answer; empty when it died."""
        self.tell(*words)
        return self.read()

    def tell(self, *words: object) -> None:
        assert self.process.stdin
        self.process.stdin.write(" ".join(map(str, words)) + "\n")
        self.process.stdin.flush()

    def alloc(self, size: int) -> int:
        result = int(self.ask("alloc", size))
        if result == 0:
            self.blocks.append(charged(size))
        return result

    def free(self, number: int) -> int:
        self.blocks.pop(number)
        return int(self.ask("free", number))

    def kill(self) -> None:
        self.process.kill()
        self.gone()

    def gone(self) -> int:
        """Waits for its end; gives its exit status, negative for a signal."""
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()
        self.blocks = []
        return self.process.wait(30)


@contextlib.contextmanager
def pages_of(node: Node) -> Iterator[Pages]:
    pages = Pages(node)
    try:
        yield pages
    finally:
        pages.close()
