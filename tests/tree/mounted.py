"""What the tests of a mounted tree are made with."""

import contextlib
import ctypes
import json
import os
import selectors
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[1]

_libc = ctypes.CDLL(None, use_errno=True)


def detach(path: Path) -> None:
    while any(line.split()[4] == str(path) for line in open("/proc/self/mountinfo")):
        assert _libc.umount2(os.fsencode(path), 2) == 0, os.strerror(ctypes.get_errno())


class Served:
    """A running tree_server."""

    def __init__(self, path: Path, *args: str, pass_fds: tuple[int, ...] = ()) -> None:
        self.path = path
        env = {**os.environ, "PYTHONPATH": f"{REPOSITORY}:{REPOSITORY / 'sched'}"}
        self.process = subprocess.Popen(
            [sys.executable, str(HERE / "tree_server.py"), str(path), *args],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=env, pass_fds=pass_fds,
        )  # fmt: skip

    def wait_ready(self) -> "Served":
        assert self._line(20) == {"ready": True}
        return self

    def ask(self, question: str, seconds: float = 10) -> object:
        assert self.process.stdin is not None
        self.process.stdin.write(question.encode() + b"\n")
        self.process.stdin.flush()
        return self._line(seconds)

    def _line(self, seconds: float) -> object:
        assert self.process.stdout is not None
        with selectors.DefaultSelector() as selector:
            selector.register(self.process.stdout, selectors.EVENT_READ)
            if not selector.select(seconds):
                raise AssertionError(f"the server said nothing for {seconds} s")
        line = self.process.stdout.readline()
        assert line, f"the server ended: {self.process.wait()}"
        return json.loads(line)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait(10)

    def stop(self) -> int:
        """Ends it in good order; its exit status."""
        assert self.process.stdin is not None
        with contextlib.suppress(BrokenPipeError):
            self.process.stdin.close()
        try:
            return self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.kill()
            raise
        finally:
            if self.process.stdout is not None:
                self.process.stdout.close()


def eventually(condition: Callable[[], bool], seconds: float = 10) -> bool:
    """Polls until ``condition`` holds; False at the deadline."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.01)
    return False
