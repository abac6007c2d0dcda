"""A node whose daemon comes and goes, and what runs on it meanwhile."""

import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node import ROOT, Node, build_c, wait_until

WORKER = Path(__file__).parent / "worker.py"


@pytest.fixture(scope="session")
def busy(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """demo/busy.c: kernels of so many microseconds for so many seconds beside an allocation of so many MiB."""
    return build_c(ROOT / "demo/busy.c", tmp_path_factory.mktemp("bin") / "busy")


@pytest.fixture(scope="session")
def alloc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_c(ROOT / "tests/e2e/alloc.c", tmp_path_factory.mktemp("bin") / "alloc")


class Live(Node):
    """A node that tells how often its daemons became ready."""

    def readies(self) -> int:
        return self.log.read_text().count(" service ready ")

    def start(self) -> None:
        before = self.readies() if self.log.exists() else 0
        super().start()
        wait_until(lambda: self.readies() > before, "READY")

    def restart(self) -> None:
        self.kill_daemon()
        self.start()

    def upgrade(self) -> None:
        """``echo 1 > upgrade``, until the same process is ready again."""
        before = self.readies()
        self.write(1, "upgrade")
        wait_until(lambda: self.readies() > before, f"the upgrade: {self.read('upgrade')}")


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Live]:
    """A cgpud of its own with one simulated GPU of 24 GiB."""
    node = Live(tmp_path)
    try:
        node.start()
        yield node
    finally:
        node.stop()


class Workers:
    """Processes that use the tree."""

    def __init__(self) -> None:
        self.processes: list[subprocess.Popen[str]] = []

    def start(self, what: str, tree: Path) -> None:
        self.processes.append(subprocess.Popen([sys.executable, "-S", WORKER, what, str(tree)], text=True,
                                               stdin=subprocess.PIPE, stdout=subprocess.PIPE))

    def end(self) -> list[dict[str, Any]]:
        """What each found."""
        found = [json.loads(process.communicate("", timeout=30)[0]) for process in self.processes]
        self.processes.clear()
        return found


@pytest.fixture
def workers() -> Iterator[Workers]:
    some = Workers()
    yield some
    for process in some.processes:
        process.kill()
        process.communicate()


@pytest.fixture
def keepers() -> Callable[[Path], list[int]]:
    """Pids of the keepers of a runtime folder; one that has not found its name yet (it forks first) is none."""

    def find(runtime: Path) -> list[int]:
        found = []
        for path in Path("/proc").glob("[0-9]*/cmdline"):
            try:
                words = path.read_bytes().split(b"\0")
                name = path.with_name("comm").read_text().strip()
            except OSError:
                continue
            if name == "cgpud-keeper" and str(runtime).encode() in words:
                found.append(int(path.parent.name))
        return found

    return find
