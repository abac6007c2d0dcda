"""Fixtures of the simulated driver's contract tests: each test has a simulated machine of its own below tmp_path, and
every program that uses it runs as a process of its own, so that a test can kill it."""

from __future__ import annotations

import os
import struct
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

HERE = Path(__file__).resolve().parent
LIBRARIES = Path(os.environ.get("CGPU_SIM_LIB", HERE.parents[1] / "sched/cgpusched/lib/sim"))
DEADLINE = 60
GIB = 1 << 30


class Machine:
    """A simulated machine: its folder, and the programs that run on it."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.children: list[subprocess.Popen[str]] = []
        folder.chmod(0o1777)

    def configure(self, *lines: str) -> None:
        (self.folder / "sim.conf").write_text("".join(line + "\n" for line in lines))

    def environ(self, **extra: str) -> dict[str, str]:
        env = {name: value for name, value in os.environ.items() if not name.startswith(("CGPU_", "CUDA_"))}
        return env | {"CGPU_SIM_DIR": str(self.folder), "CGPU_SIM_LIB": str(LIBRARIES), "CGPU_SIM_DEBUG": "1",
                      "LD_LIBRARY_PATH": str(LIBRARIES), "PYTHONPATH": str(HERE)} | extra

    def start(self, code: str, **extra: str) -> subprocess.Popen[str]:
        """A Python program with everything of cu.py in scope."""
        child = subprocess.Popen([sys.executable, "-c", "from cu import *\n" + code], text=True,
                                 env=self.environ(**extra),
                                 stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        self.children.append(child)
        return child

    def run(self, code: str, **extra: str) -> str:
        """Runs it to its end; its output. A failure shows its traceback."""
        child = self.start(code, **extra)
        out, err = child.communicate(timeout=DEADLINE)
        assert child.returncode == 0, err
        return out

    def run_binary(self, *args: str, **extra: str) -> str:
        done = subprocess.run(args, env=self.environ(**extra), capture_output=True, text=True, timeout=DEADLINE)
        assert done.returncode == 0, done.stderr
        return done.stdout

    def state(self, index: int = 0) -> Path:
        return sorted(self.folder.glob("gpu-*.state"))[index]

    def busy(self, index: int = 0) -> tuple[int, dict[int, int]]:
        """Nanoseconds of device time so far: of all, and by pid. As csrc/sim/shared/state.h says, from outside."""
        with self.state(index).open("rb") as file:
            head = file.read(48)
            total, = struct.unpack_from("<Q", head, 16)
            slots, header, size = struct.unpack_from("<IIQ", head[:44] + b"\0" * 4, 32)
            size &= 0xFFFFFFFF
            by_pid = {}
            for slot in range(slots):
                file.seek(header + slot * size)
                _state, pid, busy = struct.unpack("<IIQ", file.read(16))
                by_pid[pid] = busy
        return total, by_pid

    def close(self) -> None:
        for child in self.children:
            if child.poll() is None:
                child.kill()
            child.communicate(timeout=DEADLINE)


@pytest.fixture
def machine(tmp_path: Path) -> Iterator[Machine]:
    if not (LIBRARIES / "libcuda.so.1").exists():
        pytest.fail(f"{LIBRARIES}/libcuda.so.1 is not built: python build_ffi.py")
    folder = tmp_path / "sim"
    folder.mkdir()
    it = Machine(folder)
    yield it
    it.close()


@pytest.fixture
def program(tmp_path: Path) -> Callable[[str], str]:
    """Compiles a C program against the simulated driver; its path."""

    def compile_it(source: str) -> str:
        path = HERE / source
        out = tmp_path / path.stem
        subprocess.run(["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", f"-I{HERE.parents[1]}/csrc/abi", "-o",
                        str(out), str(path),
                        str(LIBRARIES / "libcuda.so.1"), "-lpthread"], check=True, timeout=DEADLINE)
        return str(out)

    return compile_it
