"""What the daemon lives in fails: its memory, its disk, the clock, a GPU, the numbers of processes."""

import contextlib
import errno
import json
import os
import socket
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node import BIN, Node, wait_until

GIB = 1 << 30
YEAR = 365 * 86400


def instances(node: Node) -> dict[str, dict[str, Any]]:
    """By name, as each is on its first GPU."""
    return {one["id"]: one for gpu in reversed(node.status()["gpus"]) for one in gpu["instances"]}


def instance(node: Node, ident: str) -> dict[str, Any]:
    return instances(node)[ident]


def run_on(node: Node, *idents: str) -> None:
    """All of them get device time."""
    wait_until(lambda: set(idents) <= set(instances(node)), "all to be there")
    before = {ident: instance(node, ident)["busy_ns"] for ident in idents}
    wait_until(lambda: all(instance(node, ident)["busy_ns"] > before[ident] + 10**8 for ident in idents), "all to run")


# Memory


@contextlib.contextmanager
def memory_limit(pid: int, size: int) -> Iterator[None]:
    """Puts a process into a cgroup of its own that may have so much more memory, by either version of cgroups."""
    for top, limit in (("/sys/fs/cgroup/memory", "memory.limit_in_bytes"), ("/sys/fs/cgroup", "memory.max")):
        folder = Path(top, f"cgpu-test-{os.getpid()}")
        try:
            folder.mkdir()
        except OSError:
            continue
        try:
            if not (folder / limit).exists() or not (folder / "cgroup.procs").exists():
                continue
            try:
                for swap in ("memory.swappiness", "memory.swap.max"):
                    if (folder / swap).exists():
                        (folder / swap).write_text("0")
                (folder / limit).write_text(str(size))
                (folder / "cgroup.procs").write_text(str(pid))
            except OSError:
                continue
            try:
                yield
            finally:  # what of it still lives goes back
                with contextlib.suppress(OSError):
                    Path(top, "cgroup.procs").write_text(str(pid))
            return
        finally:
            wait_until(lambda: not _stays(folder), "the cgroup to be empty")  # noqa: B023
    pytest.skip("no memory cgroup can be made here")


def _stays(folder: Path) -> bool:
    try:
        folder.rmdir()
    except OSError as error:
        return error.errno == errno.EBUSY
    return False


def test_out_of_memory(node: Node, busy: Path) -> None:
    """The kernel kills the daemon for it, in the middle of whatever it was at: as after any crash, nothing is lost."""
    assert node.daemon
    for ident in ("one", "two"):
        node.run(ident, busy, 300, 60, 64)
    node.write("create kept memsize=2GiB weight=3", "inst_ctl")
    wait_until(lambda: "two" in node.read("inst_ctl"), "both")
    run_on(node, "one", "two")
    before = node.read("inst_ctl")
    with contextlib.ExitStack() as held, memory_limit(node.daemon.pid, 1 << 20):
        for _ in range(200):  # root's may be so many, and a request so long
            one = held.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
            with contextlib.suppress(OSError):
                one.connect(str(node.runtime / "control.sock"))
                one.settimeout(1)
                one.sendall(b" " * 60000)
            if node.daemon.poll() is not None:
                break
        assert node.daemon.wait(30) == -9
    node.start()
    assert node.read("inst_ctl") == before
    run_on(node, "one", "two")
    assert all(program.poll() is None for program in node.programs)


# Disk


@pytest.fixture
def small(tmp_path: Path) -> Iterator[Node]:
    """A node whose runtime folder is a file system of its own, with little room."""
    node = Node(tmp_path)
    node.runtime.mkdir()
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=16M,mode=755", "tmpfs", node.runtime],
                          capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"no file system can be mounted here: {done.stderr.strip()}")
    try:
        node.start()
        yield node
    finally:
        node.stop()
        subprocess.run(["umount", "-l", node.runtime], check=True)


def fill(folder: Path) -> Path:
    path = folder / "filler"
    with open(path, "wb", buffering=0) as file:
        for size in (1 << 16, 4096, 1):
            with contextlib.suppress(OSError):
                while file.write(bytes(size)):
                    pass
    return path


def test_a_full_disk(small: Node) -> None:
    """Commands fail with ENOSPC and change nothing; what is read is right; a start says in a line why it cannot be."""
    small.write("create one memsize=1GiB weight=2", "inst_ctl")
    wait_until(lambda: '"one"' in (small.runtime / "counters.json").read_text(), "the last that is written by itself")
    before = {name: small.read(name) for name in ("inst_ctl", "0/policy", "default_memsize")}
    filler = fill(small.runtime)
    for value, *path in [("create two memsize=1GiB", "inst_ctl"), ("destroy one", "inst_ctl"), (3, "0", "policy"),
                         ("2GiB", "0", "one", "memsize"), ("1GiB", "default_memsize")]:  # fmt: skip
        with pytest.raises(OSError) as refused:
            small.write(value, *path)
        assert refused.value.errno == errno.ENOSPC, path
    assert {name: small.read(name) for name in before} == before
    assert small.ctl("create", "two", "--mem", "1GiB", check=False).returncode == 1
    assert small.status()["gpus"][0]["instances"][0]["id"] == "one"
    small.kill_daemon()
    config = small.base / "config.toml"
    failed = subprocess.run([BIN / "cgpud", "--simulate", "1x24GiB", "--mount", small.tree, "--runtime-dir",
                             small.runtime, "--lib-dir", small.base / "lib", "--config", config],
                            capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert failed.returncode == 1 and "Traceback" not in failed.stderr, failed.stderr
    assert os.strerror(errno.ENOSPC) in failed.stderr.splitlines()[-1]
    filler.unlink()
    small.start()
    assert {name: small.read(name) for name in before} == before
    small.write("create two memsize=1GiB", "inst_ctl")
    assert "Traceback" not in small.log.read_text()


# The clock


def test_the_wall_clock_jumps(clock: Callable[[int], None], tmp_path: Path, busy: Path) -> None:
    """By a year, there and back: turns, limits, connections and the state know nothing of it."""
    node = Node(tmp_path)
    try:
        node.start()
        for ident, weight in (("one", 1), ("two", 2)):
            node.run(ident, busy, 300, 60, 64, weight=weight)
        wait_until(lambda: "two" in node.read("inst_ctl"), "both")
        run_on(node, "one", "two")
        quiet = node.log.read_text()
        shown = subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout
        for ahead in (YEAR, -YEAR, 0):
            clock(ahead)
            run_on(node, "one", "two")
            node.write(2, "0", "policy")
            assert node.read("0/one/meminfo").startswith("Free: ")
        clock(YEAR)
        now = subprocess.run(["date", "+%s"], capture_output=True, text=True, check=True).stdout
        assert int(now) - int(shown) > YEAR // 2, "the clock did jump"
        node.kill_daemon()
        node.start()
        run_on(node, "one", "two")
        found = {ident: instance(node, ident) for ident in ("one", "two")}
        assert all(one["counters"]["dirty"] == 0 for one in found.values())
        assert node.status()["gpus"][0]["starved"] == 0
        new = node.log.read_text().removeprefix(quiet)
        assert [line for line in new.splitlines() if " ERROR " in line or " error " in line] == []
    finally:
        node.stop()


# A GPU


def test_a_gpu_that_is_gone_at_the_next_start(tmp_path: Path, busy: Path) -> None:
    """It leaves its instances, and who had none but it ends; the others' programs run on, and by their turns again."""
    node = Node(tmp_path, "2x24GiB")
    try:
        node.start()
        node.write("create gone gpu=1 memsize=1GiB", "inst_ctl")
        node.run("both", busy, 300, 60, 64, gpu="0,1")
        node.run("one", busy, 300, 60, 64, gpu="0")
        wait_until(lambda: node.read("inst_ctl").count("\n") == 3, "all three")
        run_on(node, "both", "one")
        node.kill_daemon()
        node.simulate = "1x24GiB"
        (tmp_path / "config.toml").write_text("[gpu.1]\npolicy = 1\n")
        node.start()
        assert "a GPU's configuration is left out" in node.log.read_text()
        assert sorted(os.listdir(node.tree)) == ["0", "default_memsize", "inst_ctl", "upgrade", "version"]
        left = sorted(line.split(" memsize")[0] for line in node.read("inst_ctl").splitlines())
        assert left == ["both gpu=0", "one gpu=0"]
        assert node.log.read_text().count("has gone") == 2
        run_on(node, "both", "one")
        assert all(program.poll() is None for program in node.programs)
        wait_until(lambda: all(instance(node, ident)["processes"] for ident in ("both", "one")), "both to be back")
    finally:
        node.stop()


# Processes' numbers


def test_a_number_that_is_another_processs_by_now(node: Node) -> None:
    """The state names processes by pid and start time: one that has the pid of a dead one keeps nothing alive."""
    held = [node.run(ident, "env", "-i", "/bin/sleep", 60) for ident in ("mine", "others")]
    wait_until(lambda: node.read("inst_ctl").count("\n") == 2, "both")
    for program in held:
        wait_until(lambda: Path(f"/proc/{program.pid}/environ").read_bytes() == b"", "its own environment")  # noqa: B023
    node.kill_daemon()
    file = node.runtime / "state.json"
    state = json.loads(file.read_text())
    ((pid, start),) = state["anchors"]["others"]
    state["anchors"]["others"] = [[pid, start - 1]]
    file.write_text(json.dumps(state))
    node.start()
    wait_until(lambda: node.read("inst_ctl").startswith("mine ") and "others" not in node.read("inst_ctl"),
               "the end of the one whose process has another's number")
    assert all(program.poll() is None for program in held), "nobody touches the process that has the number"
