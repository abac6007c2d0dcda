"""Readers without end in containers, and a kernel that cannot repeat what a dead daemon had read."""

import errno
import json
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import node as node_module
import pytest
from node import BIN, ROOT, Node, build_c, wait_until

ID = "0123456789abcdef" * 4
ASKING = ROOT / "tests/containers/asking.py"
SLOWED = 200
"""Files that a container may read while the administrator reads one: about 16, without the load of the machine."""


@pytest.fixture
def view(node: Node) -> Iterator[Path]:
    """The view of a registered container."""
    bundle = node.base / "bundle"
    (bundle / "rootfs").mkdir(parents=True)
    env = ["ALIYUN_COM_GPU_MEM_CONTAINER=1", "ALIYUN_COM_GPU_MEM_DEV=24"]
    (bundle / "config.json").write_text(json.dumps({"process": {"env": env}, "root": {"path": "rootfs"}}))
    words = [sys.executable, "-S", ASKING, node.runtime / "runtime.sock", "create", ID, bundle]
    with subprocess.Popen(words, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as maker:
        assert maker.stdout and json.loads(maker.stdout.readline())["status"] == 1
        yield node.runtime / "view" / ID
        maker.kill()


def test_a_container_that_reads_its_view_without_end(node: Node, view: Path, busy: Path, tmp_path: Path) -> None:
    """From 64 threads: the administrator's tree and socket are slowed and not starved, and turns go on."""
    hammer = build_c(Path(__file__).with_name("hammer.c"), tmp_path / "hammer")
    for ident in ("one", "two"):
        node.run(ident, busy, 300, 60, 64)
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 2, "both to run")
    with subprocess.Popen([hammer, view / "0" / ID[:12] / "meminfo", "64"], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True, bufsize=1) as reading:  # fmt: skip
        assert reading.stdin and reading.stdout

        def count() -> int:
            assert reading.stdin and reading.stdout
            reading.stdin.write("\n")
            return int(reading.stdout.readline())

        try:
            wait_until(lambda: count() > 1000, "the readers to be at it")
            used, meanwhile = node.busy_ns(), []
            for _ in range(50):
                before = count()
                assert node.read("0/policy") == "1\n"
                meanwhile.append(count() - before)
            assert min(meanwhile) < SLOWED, "what the load of this machine adds aside"
            for number in range(1, 6):
                node.write(f"{number}MiB", "default_memsize")
                assert node.read("default_memsize") == f"{number << 20}\n"
                assert node.ctl("list").stdout
            wait_until(lambda: all(node.busy_ns()[ident] > used[ident] for ident in ("one", "two")), "turns to go on")
        finally:
            reading.kill()


# Before Linux 6.9

OLD = """#!{python}
import sys
from cgpufs import mount
mount.can_resend = lambda: False
from cgpusched.daemon.main import main
sys.exit(main())
"""


@pytest.fixture
def old(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Node]:
    """A node whose daemons take the kernel for one that cannot re-send."""
    folder = tmp_path / "bin-old"
    folder.mkdir()
    for name in ("cgpuctl", "cgpu-smi"):
        (folder / name).symlink_to(BIN / name)
    program = folder / "cgpud"
    program.write_text(OLD.format(python=sys.executable))
    program.chmod(0o755)
    monkeypatch.setattr(node_module, "BIN", folder)
    node = Node(tmp_path)
    try:
        node.start()
        yield node
    finally:
        node.stop()


class Users:
    """Threads that read and write the tree, and what they were answered."""

    def __init__(self, node: Node) -> None:
        self.node = node
        self.ended = threading.Event()
        self.failed: list[int | None] = []
        self.counts = [0] * 6
        works: list[Callable[[int], None]] = [self.read, self.read, self.read, self.read, self.write, self.write]
        self.threads = [threading.Thread(target=self.run, args=(work, n)) for n, work in enumerate(works)]
        for thread in self.threads:
            thread.start()

    def run(self, work: Callable[[int], None], number: int) -> None:
        while not self.ended.is_set():
            try:
                work(number)
                self.counts[number] += 1
            except OSError as error:
                self.failed.append(error.errno)

    def read(self, number: int) -> None:
        assert self.node.read("version").count(".") == 2

    def write(self, number: int) -> None:
        name, value = ("default_memsize", "0/prio_ratio")[number - 4], 20 + (self.counts[number] + number) % 70
        self.node.write(value, name)
        assert self.node.read(name) == f"{value}\n"

    def more(self) -> None:
        """Waits until each has been answered anew."""
        before = list(self.counts)
        wait_until(lambda: all(now > was for now, was in zip(self.counts, before, strict=True)), "all to be answered")

    def end(self) -> None:
        self.ended.set()
        for thread in self.threads:
            thread.join(60)
        assert not any(thread.is_alive() for thread in self.threads), "nobody waits for ever"


def test_an_old_kernel_loses_nothing_at_an_upgrade_and_hangs_nobody_after_a_crash(old: Node) -> None:
    users = Users(old)
    try:
        users.more()
        for _ in range(3):
            ready = old.log.read_text().count(" service ready ")
            old.write(1, "upgrade")
            wait_until(lambda: old.log.read_text().count(" service ready ") > ready, "the upgrade")  # noqa: B023
            users.more()
        assert users.failed == [], "what was begun is ended first"
        for _ in range(3):
            old.kill_daemon(signal.SIGKILL)
            old.start()
            users.more()
    finally:
        users.end()
    assert set(users.failed) <= {errno.ECONNABORTED}
    assert old.read("version").count(".") == 2
