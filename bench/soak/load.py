"""The load of a soak: two programs at 1:2 and a loop of allocations in containers, and who reads and writes the tree.

The containers are runc's, made through cgpu-runtime as an engine would. They have the host's PID namespace, so that the
simulated device's timeline, which knows programs by their own pid, tells them apart.
"""

from __future__ import annotations

import json
import signal
import subprocess
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from node import Node, wait_until
from world import Bundles

KERNEL_US = 1000
WEIGHTS = {"one": 1, "two": 2}
ALLOCATING = "loop"
MIB = 1 << 20
WITHIN, BEYOND = 512 * MIB, 2048 * MIB
FOREVER_S = 1_000_000


@dataclass
class Found:
    """What one user of the tree or a GPU found (user.c)."""

    what: str
    count: int
    lost: int
    failed: int
    first: list[str]
    longest_ns: int
    waits: list[tuple[int, int]]


class User:
    """A running user.c."""

    def __init__(self, what: str, process: subprocess.Popen[str], out: Path) -> None:
        self.what = what
        self.process = process
        self._out = out

    def end(self) -> Found:
        """Stops it; RuntimeError if it had ended before."""
        if self.process.poll() is not None:
            raise RuntimeError(f"{self.what} ended with {self.process.returncode}: {self._out.read_text()[-500:]}")
        self.process.send_signal(signal.SIGTERM)
        self.process.wait(60)
        return Found(self.what, **json.loads(self._out.read_text().splitlines()[-1]))


class Load:
    """Starts it all; ``end()`` gives what they found, ``close()`` leaves nothing."""

    def __init__(self, node: Node, bundles: Bundles, program: Path) -> None:
        """``program``: user.c, which is in the bundles' image, too."""
        self._node, self._bundles, self._program = node, bundles, program
        self.base = bundles.base
        self.users: list[User] = []
        self._processes: list[subprocess.Popen[str]] = []
        self.pids: dict[str, int] = {}
        """The containers' first processes."""

    def start(self) -> None:
        for ident, weight in WEIGHTS.items():
            self._run(ident, ["load", "-k", str(KERNEL_US), "-t", str(FOREVER_S)], weight)
        allocating = self._run(ALLOCATING, ["user", "allocate", str(WITHIN), str(BEYOND)], 1)
        self.users.append(User("allocations", allocating, self._out(ALLOCATING)))
        self._node.write(0, 0, ALLOCATING, "weight")  # it launches nothing: its turns would pass with the device idle
        for ident in WEIGHTS:
            name = f"reader in {ident}"
            process = self._bundles.popen("exec", ident, "user", "read", "/run/cgpu", **self._output(name))
            self.users.append(User(name, process, self._out(name)))
        for name, what in (("reader 1", "read"), ("reader 2", "read"), ("writer", "write")):
            process = subprocess.Popen([self._program, what, self._node.tree], text=True, **self._output(name))
            self.users.append(User(name, process, self._out(name)))

    def _run(self, ident: str, command: list[str], weight: int) -> subprocess.Popen[str]:
        env = ["ALIYUN_COM_GPU_MEM_CONTAINER=1", "ALIYUN_COM_GPU_MEM_DEV=24", f"ALIYUN_COM_GPU_SCHD_WEIGHT={weight}"]
        bundle = self._bundles.make(ident, *env, command=command)
        config = bundle / "config.json"
        spec = json.loads(config.read_text())
        spec["linux"]["namespaces"] = [one for one in spec["linux"]["namespaces"] if one["type"] != "pid"]
        config.write_text(json.dumps(spec))
        process = self._bundles.popen("run", "--bundle", bundle, "--pid-file", bundle / "pid", ident,
                                      **self._output(ident))
        self._processes.append(process)
        wait_until(lambda: (bundle / "pid").exists() or process.poll() is not None, f"container {ident}")
        if process.poll() is not None:
            raise RuntimeError(f"container {ident} did not start: {self._out(ident).read_text()[-500:]}")
        self.pids[ident] = int((bundle / "pid").read_text())
        return process

    def _out(self, name: str) -> Path:
        return self.base / f"{name.replace(' ', '-')}.out"

    def _output(self, name: str) -> dict[str, Any]:
        out = open(self._out(name), "w")  # noqa: SIM115  # the child's from then on
        return {"stdin": subprocess.DEVNULL, "stdout": out, "stderr": subprocess.STDOUT}

    def ended(self) -> list[str]:
        """Containers whose program has ended, which none must."""
        return [ident for ident, process in zip((*WEIGHTS, ALLOCATING), self._processes, strict=True)
                if process.poll() is not None]

    def end(self) -> list[Found]:
        return [user.end() for user in self.users]

    def close(self) -> None:
        for process in [*self._processes, *(user.process for user in self.users)]:
            if process.poll() is None:
                process.kill()
            process.wait()
        self._bundles.close()
