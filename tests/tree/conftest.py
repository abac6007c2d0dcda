"""A tree to test: mounted by a program of its own, and taken off again whatever the test did."""

import contextlib
import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside the tests

from mounted import Served, detach  # noqa: E402


@pytest.fixture
def mountpoint(tmp_path: Path) -> Iterator[Path]:
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("mounting needs root and /dev/fuse")
    path = tmp_path / "cgpu"
    path.mkdir()
    yield path
    detach(path)


@pytest.fixture
def serve(mountpoint: Path) -> Iterator[Callable[..., Served]]:
    """Starts servers of ``mountpoint``; whatever is left of them is killed at the end."""
    started: list[Served] = []

    def start(*args: str, pass_fds: tuple[int, ...] = (), path: Path | None = None) -> Served:
        started.append(Served(path or mountpoint, *args, pass_fds=pass_fds))
        return started[-1]

    yield start
    for served in started:
        with contextlib.suppress(subprocess.TimeoutExpired):
            served.stop()
        if served.process.poll() is None:
            served.kill()
        for pipe in (served.process.stdin, served.process.stdout):
            if pipe is not None:
                with contextlib.suppress(BrokenPipeError):
                    pipe.close()


@pytest.fixture
def served(serve: Callable[..., Served]) -> Served:
    return serve().wait_ready()


@pytest.fixture
def tree(served: Served) -> Path:
    return served.path
