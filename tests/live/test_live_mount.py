"""The mounts outlive the daemon: killed, upgraded or restarted under load, nobody who uses them notices."""

import errno
import json
import os
import signal
import socket
import subprocess
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from node import BIN, descriptors, settled_descriptors, wait_until

GIB = 1 << 30


class Load:
    """Readers, a writer that verifies, two programs 1:2 and a loop of allocations in an instance of its own."""

    def __init__(self, node: Any, workers: Any, busy: Path, alloc: Path) -> None:
        self.node, self.workers = node, workers
        for _ in range(2):
            workers.start("read", node.tree)
        workers.start("write", node.tree)
        for id, weight in (("one", 1), ("two", 2)):
            node.run(id, busy, 500, 60, 64, weight=weight)
        node.write("create loop memsize=1GiB weight=0", "inst_ctl")
        env = {**os.environ, "LD_LIBRARY_PATH": str(node.base / "lib"), "CGPU_SIM_DIR": str(node.runtime / "sim"),
               "CGPU_SOCKET": str(node.runtime / "inst/loop/gate.sock")}
        self.results: list[tuple[int, str]] = []
        self.ended = threading.Event()

        def allocate() -> None:
            while not self.ended.is_set():
                for size in (GIB // 2, 2 * GIB):
                    done = subprocess.run([alloc, str(size)], env=env, stdin=subprocess.DEVNULL, text=True,
                                          capture_output=True, timeout=30, check=False)  # fmt: skip
                    self.results.append((size, done.stdout))

        self.thread = threading.Thread(target=allocate)
        self.thread.start()
        wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 2, "both to run")

    def end(self) -> None:
        """Nothing failed, nothing was lost, and shares are as they should be."""
        try:
            wait_until(lambda: sum(len(one["processes"]) for one in self.gpu()["instances"]) >= 2, "both to be back")
            wait_until(self.is_shared, "shares of 1:2, once what was used meanwhile is paid back", 40)
        finally:
            self.ended.set()
            self.thread.join(30)
        found = self.workers.end()
        assert [one["failed"] for one in found] == [[]] * 3
        assert all(one["count"] > 20 for one in found), found
        assert self.results
        assert {result for size, result in self.results if size < GIB} == {"0\n"}
        assert {result for size, result in self.results if size > GIB} == {"2\n"}, "held to its memory all the time"
        assert all(program.poll() is None for program in self.node.programs)

    def is_shared(self) -> bool:
        shares = self.node.shares(2)
        return 1.8 * shares["one"] < shares["two"] < 2.2 * shares["one"]

    def gpu(self) -> dict[str, Any]:
        return self.node.status()["gpus"][0]  # type: ignore[no-any-return]


@pytest.fixture
def load(node: Any, workers: Any, busy: Path, alloc: Path) -> Any:
    some = Load(node, workers, busy, alloc)
    yield some
    some.ended.set()
    some.thread.join(30)


def mounts(below: Path) -> dict[str, str]:
    """What is mounted there, by path, and its device."""
    rows = [line.split() for line in Path("/proc/self/mountinfo").read_text().splitlines()]
    return {row[4]: row[2] for row in rows if row[4].startswith(f"{below}/")}


def test_killed_under_load(node: Any, load: Load) -> None:
    before = mounts(node.base)
    for _ in range(3):
        node.restart()
    assert mounts(node.base) == before, "the same mounts"
    load.end()


def test_upgraded_under_load(node: Any, load: Load) -> None:
    before, pid = mounts(node.base), node.daemon.pid
    for _ in range(3):
        node.upgrade()
    assert mounts(node.base) == before and node.daemon.poll() is None and node.daemon.pid == pid
    assert node.read("upgrade") == "idle\n"
    load.end()


def test_what_asks_in_between_waits(node: Any) -> None:
    """The control socket's queue outlives the daemon too."""
    node.kill_daemon()
    asking = subprocess.Popen([BIN / "cgpuctl", "list"], env=node.env, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
    reading = subprocess.Popen(["cat", node.path("version")], stdout=subprocess.PIPE)
    try:
        node.start()
        assert asking.wait(20) == 0, asking.stderr and asking.stderr.read()
        assert reading.communicate(timeout=20)[0].count(b".") == 2
    finally:
        for process in (asking, reading):
            process.kill()
            process.communicate()


def test_an_upgrade_that_would_not_start(node: Any) -> None:
    """The new program is asked first: this one goes on, and the node says why."""
    config, pid = node.base / "config.toml", node.daemon.pid
    config.write_text("nonsense = 1\n")
    node.write(1, "upgrade")
    wait_until(lambda: node.read("upgrade").startswith("failed: "), "the refusal")
    assert "nonsense" in node.read("upgrade")
    config.write_text("")
    node.upgrade()
    assert node.read("upgrade") == "idle\n" and node.daemon.pid == pid


def test_an_upgrade_leaves_nothing_behind(node: Any) -> None:
    """Descriptors are as many after the fifth as after the first; only the kept ones are handed on."""
    node.upgrade()

    first = settled_descriptors(node.daemon.pid)
    for _ in range(4):
        node.upgrade()
    wait_until(lambda: not descriptors(node.daemon.pid) - first, "no more than at first")
    children = Path(f"/proc/{node.daemon.pid}/task/{node.daemon.pid}/children").read_text()
    assert children == "", "not even the keeper is its child"


def test_signals_during_an_upgrade(node: Any) -> None:
    """None ends the program that is not yet there; a SIGTERM stops the new one in good order."""
    for _ in range(3):
        before = node.readies()
        node.write(1, "upgrade")
        while node.readies() == before:
            node.daemon.send_signal(signal.SIGHUP)
            assert node.daemon.poll() is None
    node.write(1, "upgrade")
    node.daemon.send_signal(signal.SIGTERM)
    assert node.daemon.wait(20) == 0
    assert mounts(node.base) == {}


def test_a_stop_in_good_order_leaves_nothing(node: Any, keepers: Callable[[Path], list[int]]) -> None:
    wait_until(lambda: len(keepers(node.runtime)) == 1, "a keeper")
    node.daemon.send_signal(signal.SIGTERM)
    assert node.daemon.wait(20) == 0
    assert mounts(node.base) == {}
    wait_until(lambda: not keepers(node.runtime), "the keeper's end")
    assert not list(node.runtime.glob("*.sock"))


def test_the_keeper_killed(node: Any, keepers: Callable[[Path], list[int]], workers: Any) -> None:
    """Another takes its place and holds the same."""
    workers.start("read", node.tree)
    (keeper,) = wait_until(lambda: keepers(node.runtime), "a keeper")
    os.kill(keeper, signal.SIGKILL)
    (other,) = wait_until(lambda: [pid for pid in keepers(node.runtime) if pid != keeper], "another keeper")
    wait_until(lambda: sum("fuse" in os.readlink(path) for path in Path(f"/proc/{other}/fd").iterdir()) == 2, "mounts")
    node.restart()
    assert [one["failed"] for one in workers.end()] == [[]]


def test_the_keeper_and_the_daemon_killed(node: Any, keepers: Callable[[Path], list[int]]) -> None:
    """Then the mounts end: who asks is told so, and the next daemon makes new ones."""
    node.write("create bare memsize=1GiB", "inst_ctl")
    (keeper,) = wait_until(lambda: keepers(node.runtime), "a keeper")
    node.kill_daemon(signal.SIGSTOP)
    os.kill(keeper, signal.SIGKILL)
    node.kill_daemon()
    wait_until(lambda: not keepers(node.runtime), "its end")
    with pytest.raises(OSError) as error:
        node.read("version")
    assert error.value.errno in (errno.ENOTCONN, errno.ECONNABORTED), "the latter: asked before the end was through"
    node.start()
    assert node.read("inst_ctl").startswith("bare ")


def test_a_crash_loop_ends_in_errors(node: Any, keepers: Callable[[Path], list[int]]) -> None:
    """Requests wait for a successor, but not for ever: after five failed starts the tree answers with an error."""
    node.kill_daemon()
    reading = subprocess.Popen(["cat", node.path("version")], stderr=subprocess.PIPE, text=True)
    try:
        command = [BIN / "cgpud", "--simulate", "1x24GiB", "--mount", node.tree, "--runtime-dir", node.runtime,
                   "--lib-dir", "/proc/nowhere", "--config", node.base / "config.toml"]  # fmt: skip
        for _ in range(5):
            assert subprocess.run(command, capture_output=True, timeout=20, check=False).returncode == 1
            assert reading.poll() is None
        last = subprocess.run(command, capture_output=True, text=True, timeout=20, check=False)
        assert "crash loop" in last.stderr
        assert "connection abort" in reading.communicate(timeout=20)[1]
        with pytest.raises(OSError) as error:
            node.read("version")
        assert error.value.errno == errno.ENOTCONN
    finally:
        reading.kill()
        reading.communicate()
    wait_until(lambda: not keepers(node.runtime), "the keeper's end")
    node.start()
    assert node.read("version").count(".") == 2


class Manager:
    """A service manager with a descriptor store, as systemd has it."""

    def __init__(self, base: Path) -> None:
        self.path = base / "notify"
        self.log = base / "cgpud.log"
        self.status = ""
        self.sock = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        self.sock.bind(str(self.path))
        self.store: dict[str, int] = {}

    def wait_ready(self) -> None:
        self.sock.settimeout(20)
        while True:
            data, fds, _, _ = socket.recv_fds(self.sock, 4096, 4)
            lines = dict(line.split("=", 1) for line in data.decode().splitlines())
            if "FDSTORE" in lines:
                self.forget(lines["FDNAME"])
                self.store[lines["FDNAME"]] = fds[0]
            elif "FDSTOREREMOVE" in lines:
                self.forget(lines["FDNAME"])
            elif "READY" in lines:
                self.status = lines["STATUS"]
                return

    def forget(self, name: str) -> None:
        if name in self.store:
            os.close(self.store.pop(name))

    def start(self, command: list[Any]) -> subprocess.Popen[bytes]:
        """As systemd does it: the descriptors from number 3, in the process that has their pid in its environment."""
        code = ("import fcntl,json,os,sys\n"
                "m = json.loads(sys.argv[1]); high = [fcntl.fcntl(fd, fcntl.F_DUPFD, 99) for fd in m.values()]\n"
                "for n,fd in enumerate(high, 3): os.dup2(fd, n, inheritable=True)\n"
                "os.environ.update(LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(m)), LISTEN_FDNAMES=':'.join(m))\n"
                "os.execv(sys.argv[2], sys.argv[2:])")
        placed = {name: fd for name, fd in self.store.items()}
        with open(self.log, "ab") as log:
            process = subprocess.Popen(
                ["python3", "-c", code, json.dumps(placed), *map(str, command)], pass_fds=tuple(placed.values()),
                env={**os.environ, "NOTIFY_SOCKET": str(self.path)}, stderr=log)  # fmt: skip
        self.wait_ready()
        return process

    def close(self) -> None:
        self.sock.close()
        for name in list(self.store):
            self.forget(name)


def leave(tree: Path, base: Path) -> None:
    """Unmounts what a test that failed has left."""
    for path in (tree, base / "run/view"):
        if str(path) in mounts(base):
            subprocess.run(["umount", "--lazy", path], check=False)


def test_a_wrong_configuration_gives_way_to_the_last_right_one(tmp_path: Path) -> None:
    """Where a service manager keeps the mounts: it lets them go when the service fails."""
    tree, file, manager = tmp_path / "tree", tmp_path / "config.toml", Manager(tmp_path)
    command = [BIN / "cgpud", "--simulate", "1x24GiB", "--mount", tree, "--runtime-dir", tmp_path / "run",
               "--lib-dir", tmp_path / "lib", "--config", file]  # fmt: skip
    file.write_text("overcommit = true")
    process = manager.start(command)
    try:
        before, names = mounts(tmp_path), set(manager.store)
        file.write_text("policy = 9")
        for ident in ("one", "two"):  # again: it is kept on, too
            process.kill()
            process.wait(20)
            manager.log.write_text("")
            process = manager.start(command)
            assert mounts(tmp_path) == before and set(manager.store) == names
            assert f"the configuration is refused, and what it said before holds: {file}: policy = 9" in manager.status
            assert "error main configuration refused" in manager.log.read_text()
            (tree / "inst_ctl").write_text(f"create {ident} gpu=0 memsize=20GiB\n")  # of 24
        (tree / "upgrade").write_text("1\n")
        wait_until(lambda: "failed" in (tree / "upgrade").read_text(), "the upgrade to be refused")
        process.kill()
        process.wait(20)
        file.write_text("log_level = 'info'")
        process = manager.start(command)
        assert mounts(tmp_path) == before and set(manager.store) == names and "refused" not in manager.status
        process.terminate()
        assert process.wait(20) == 0
        assert mounts(tmp_path) == {}
    finally:
        process.kill()
        process.wait(20)
        manager.close()
        leave(tree, tmp_path)
    file.write_text("policy = 9")
    first = subprocess.run(command, capture_output=True, text=True, timeout=30, check=False)
    assert (first.returncode, first.stderr) == (2, f"cgpud: {file}: policy = 9: an integer 0-5 is allowed\n")


def test_a_service_managers_store(tmp_path: Path, workers: Any, keepers: Callable[[Path], list[int]]) -> None:
    tree, runtime = tmp_path / "tree", tmp_path / "run"
    command = [BIN / "cgpud", "--simulate", "1x24GiB", "--mount", tree, "--runtime-dir", runtime, "--lib-dir",
               tmp_path / "lib"]  # fmt: skip
    manager = Manager(tmp_path)
    process = None
    try:
        process = manager.start(command)
        before = mounts(tmp_path)
        assert sorted(name.partition(".")[0] for name in manager.store) == [
            "config", "control", "runtime", "tree", "tree-init", "view", "view-init"]
        assert keepers(runtime) == []
        names = set(manager.store)
        workers.start("read", tree)
        workers.start("write", tree)
        for number in range(4):
            if number < 2:
                process.kill()
                process.wait(20)
                process = manager.start(command)
            else:
                (tree / "upgrade").write_text("1\n")
                manager.wait_ready()
        assert mounts(tmp_path) == before and set(manager.store) == names
        assert [one["failed"] for one in workers.end()] == [[], []]
        process.terminate()
        assert process.wait(20) == 0
        assert mounts(tmp_path) == {}
    finally:
        if process is not None and process.poll() is None:
            process.kill()
            process.wait()
        manager.close()
        leave(tree, tmp_path)
