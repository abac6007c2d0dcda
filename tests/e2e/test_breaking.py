"""What an unkind user, an unlucky moment or many programs at once do to a whole node: nothing that lasts."""

import contextlib
import errno
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node import BIN, ROOT, Node, build_c, descriptors, running_node, settled_descriptors, wait_until

sys.path.insert(0, str(ROOT / "tests/tree"))
import oracle  # noqa: E402  # the tables of docs/tree.md

GIB = 1 << 30
OUT_OF_MEMORY = 2
C0FFEE = "c0ffee00" * 8


@pytest.fixture(scope="module")
def alloc(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return build_c(ROOT / "tests/e2e/alloc.c", tmp_path_factory.mktemp("bin") / "alloc")


@pytest.fixture
def example(tmp_path: Path) -> Iterator[Node]:
    """The node that docs/tree.md shows."""
    with running_node(tmp_path, "2x24GiB") as node:
        node.write(f"create {C0FFEE} memsize=3GiB weight=2", "inst_ctl")
        node.write("create bare-1 gpu=0,1 memsize=1GiB,2GiB", "inst_ctl")
        yield node


def inside(node: Node, ident: str) -> dict[str, str]:
    """The environment of a program in that instance."""
    return {**os.environ, "LD_LIBRARY_PATH": str(node.base / "lib"), "CGPU_SIM_DIR": str(node.runtime / "sim"),
            "CGPU_SOCKET": str(node.runtime / "inst" / ident / "gate.sock")}


def refusal(node: Node, path: str, data: bytes) -> str:
    fd = os.open(node.tree / path, os.O_WRONLY | os.O_TRUNC)
    try:
        os.write(fd, data)
    except OSError as error:
        return errno.errorcode[error.errno or 0]
    finally:
        os.close(fd)
    return "taken"


# The tree of the real daemon


def test_the_reference_holds_on_a_real_node(example: Node) -> None:
    for path, entries in oracle.listings().items():
        assert sorted(os.listdir(example.tree / path.strip("/"))) == sorted(entries)
    expected = 0
    for path in oracle.writable():
        before = example.read(path)
        for what, data in oracle.malformed():
            assert refusal(example, path, data) == "EINVAL", (path, what)
            expected += 1
        assert example.read(path) == before
    for path, text, error in [*oracle.refused(), *(("inst_ctl", *row) for row in oracle.refused_commands())]:
        before = example.read(path)
        assert refusal(example, path, text.encode() + b"\n") == error, (path, text)
        assert example.read(path) == before
        expected += 1
    assert [line for line in example.log.read_text().splitlines() if "Traceback" in line or " error " in line] == []
    assert example.log.read_text().count(" refused ") == expected, "one line each"
    for path, text, reads in oracle.taken():
        was = example.read(path).strip()
        example.write(text, path)
        assert example.read(path) == f"{reads}\n"
        example.write(was, path)


# Much at once


def test_settings_that_flip_a_thousand_times_a_second(node: Node, busy: Path) -> None:
    names = ["one", "two"]
    for name in names:
        node.run(name, busy, 500, 60, 64)
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 2, "both to run")
    values = {
        "policy": "012345", "max_inst": ["20", "25"], "prio_ratio": ["20", "99"], "one/weight": "123",
        "two/weight": "12", "one/highprio": "01", "two/memsize": ["1GiB", "32MiB"],
    }  # fmt: skip
    stop = time.monotonic() + 3
    failed: list[OSError] = []

    def flip(path: str) -> None:
        fd = os.open(node.tree / "0" / path, os.O_WRONLY)
        try:
            for number in range(10**9):
                if time.monotonic() > stop:
                    break
                choice = values[path]
                os.write(fd, choice[number % len(choice)].encode())
                time.sleep(0.001)
        except OSError as error:
            failed.append(error)
        finally:
            os.close(fd)

    threads = [threading.Thread(target=flip, args=(path,)) for path in values]
    for thread in threads:
        thread.start()
    before = node.busy_ns()
    while time.monotonic() < stop - 1:
        time.sleep(0.8)
        now = node.busy_ns()
        assert all(now[name] > before[name] for name in names), "both get turns, whatever is written"
        before = now
    for thread in threads:
        thread.join()
    assert not failed
    for path, text in (("policy", 1), ("one/highprio", 0), ("one/weight", 1), ("two/weight", 1), ("two/memsize", GIB)):
        node.write(text, 0, path)
        assert node.read(0, path) == f"{text}\n"
    assert node.read(0, "two/meminfo").startswith(f"Free: {GIB - (64 << 20)}\n")
    time.sleep(0.5)
    shares = node.shares(1.5)
    assert shares["one"] == pytest.approx(shares["two"], rel=0.15) and sum(shares.values()) > 0.8
    assert [program.poll() for program in node.programs] == [None, None]


def test_a_hundred_programs_start_at_once(node: Node, alloc: Path) -> None:
    node.ctl("create", "many", "--mem", "1GiB")
    assert node.daemon
    before = settled_descriptors(node.daemon.pid)
    programs = [subprocess.Popen([alloc, str(4 << 20)], env=inside(node, "many"), stdin=subprocess.PIPE,
                                 stdout=subprocess.PIPE) for _ in range(100)]  # fmt: skip
    try:
        results = [program.stdout.readline() for program in programs if program.stdout]
        assert results == [b"0\n"] * 100
        free, *lines = node.read(0, "many", "meminfo").splitlines()
        assert free == f"Free: {GIB - 100 * (4 << 20)}"
        assert sorted(lines) == sorted(f"PID: {program.pid} Mem: {4 << 20}" for program in programs)
    finally:
        for program in programs:
            program.kill()
            program.communicate()
    wait_until(lambda: node.read(0, "many", "meminfo") == f"Free: {GIB}\n", "all of it to come back")
    wait_until(lambda: not descriptors(node.daemon.pid) - before, "their descriptors to go")  # type: ignore[union-attr]


def test_forty_runs_at_once(node: Node) -> None:
    """Each gets into the instance, and each its own exit status out."""
    node.ctl("create", "job", "--mem", "1GiB")
    command = [BIN / "cgpuctl", "run", "--id", "job", "--", "sh", "-c"]
    runs = [subprocess.Popen([*command, f"exit {number}"], env=node.env, stderr=subprocess.PIPE)
            for number in range(40)]  # fmt: skip
    assert [(run.communicate()[1], run.returncode) for run in runs] == [(b"", number) for number in range(40)]


def test_kills_at_any_moment_leave_nothing(node: Node, alloc: Path, busy: Path) -> None:
    """Programs killed in every stage of their lives, and trees of forked ones: no memory, slot or descriptor stays."""
    node.ctl("create", "kept", "--mem", "8GiB")
    env = inside(node, "kept")
    assert node.daemon
    subprocess.run([alloc, "1"], env=env, stdin=subprocess.DEVNULL, check=True, capture_output=True)
    node.ctl("run", "--mem", "1GiB", "--", "true")
    wait_until(lambda: node.ctl("list", "--json").stdout.count('"id"') == 1, "the first instance to go")
    pid, before = node.daemon.pid, settled_descriptors(node.daemon.pid)
    stop = time.monotonic() + 6
    chance = random.Random(1)
    wrong: list[object] = []

    def kill(command: list[Any], environment: dict[str, str], longest: float) -> None:
        while time.monotonic() < stop:
            with subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL,
                                  stderr=subprocess.DEVNULL) as program:  # fmt: skip
                time.sleep(longest * chance.random() ** 2)
                program.kill()

    def fork() -> None:
        while time.monotonic() < stop:
            done = subprocess.run([alloc, "fork", "6", str(1 << 20)], env=env, stdin=subprocess.DEVNULL,
                                  capture_output=True, check=False)  # fmt: skip
            if done.returncode:
                wrong.append(done)

    program = [busy, "100", "100", "64"]
    killers = [
        threading.Thread(target=kill, args=(program, env, 0.08)),
        threading.Thread(target=kill, args=([BIN / "cgpuctl", "run", "--mem", "1GiB", "--", *program], node.env, 0.3)),
        threading.Thread(target=fork),
    ]
    for thread in killers:
        thread.start()
    for thread in killers:
        thread.join()
    assert not wrong
    wait_until(lambda: node.ctl("list", "--json").stdout.count('"id"') == 1, "the instances of run to go")
    wait_until(lambda: node.read(0, "kept", "meminfo") == f"Free: {8 * GIB}\n", "all memory to come back")
    wait_until(lambda: not descriptors(pid) - before, f"the descriptors to be {before} again")
    assert sorted(os.listdir(node.runtime / "inst")) == ["kept"]
    assert node.read(0, "free_weight") == "19\n"


# The daemon's end and its successor


def test_stopped_under_load_and_started_again(tmp_path: Path, alloc: Path, busy: Path) -> None:
    """Programs run on within their memory; the next daemon comes up in the same folders, whoever stands in them."""
    node = Node(tmp_path)
    stop = threading.Event()
    try:
        node.start()
        program = node.run("busy", busy, 1000, 60, 64, out=tmp_path / "out")
        node.ctl("create", "kept", "--mem", "1GiB")
        wait_until(lambda: (tmp_path / "out").read_text(), "it to run")

        def read() -> None:
            while not stop.is_set():
                with contextlib.suppress(OSError):
                    node.read(0, "policy")

        readers = [threading.Thread(target=read) for _ in range(4)]
        for reader in readers:
            reader.start()
        for sign in (signal.SIGTERM, signal.SIGKILL):
            with subprocess.Popen(["sleep", "100"], cwd=node.path(0)) as standing:
                assert node.daemon
                node.kill_daemon(sign)
                assert node.daemon.wait(10) == (0 if sign == signal.SIGTERM else -signal.SIGKILL)
                if sign == signal.SIGTERM:  # a program that starts now keeps to the limits file
                    for size, result in ((GIB // 2, 0), (GIB + 1, OUT_OF_MEMORY)):
                        done = subprocess.run([alloc, str(size)], env=inside(node, "kept"), stdin=subprocess.DEVNULL,
                                              capture_output=True, timeout=30, check=False)  # fmt: skip
                        assert done.stdout == b"%d\n" % result
                node.start()
                standing.kill()
            assert {line.split()[0] for line in node.read("inst_ctl").splitlines()} == {"busy", "kept"}
            lines = (tmp_path / "out").read_text().count("\n")
            wait_until(lambda: (tmp_path / "out").read_text().count("\n") > lines, "the program to run on")  # noqa: B023
        stop.set()
        for reader in readers:
            reader.join(10)
        assert program.poll() is None
        assert "Traceback" not in node.log.read_text()
    finally:
        stop.set()
        node.stop()


def test_a_daemon_that_stood_still_is_obeyed_again(node: Node, busy: Path) -> None:
    """Meanwhile programs run, the paused one does not, and afterwards everybody waits for his turn again."""
    for name in ("one", "two", "paused"):
        node.run(name, busy, 300, 60, 64, out=node.base / f"{name}.out")
    wait_until(lambda: len([ns for ns in node.busy_ns().values() if ns > 10**8]) == 3, "all to run")
    node.write(0, 0, "paused", "weight")
    time.sleep(0.3)
    assert node.daemon
    held = node.busy_ns()["paused"]
    lines = (node.base / "one.out").read_text().count("\n")
    node.kill_daemon(signal.SIGSTOP)
    try:
        wait_until(lambda: (node.base / "one.out").read_text().count("\n") >= lines + 3, "the program to run on")
    finally:
        node.kill_daemon(signal.SIGCONT)

    def is_even() -> bool:
        shares = node.shares(1.5)
        return all(abs(shares[name] - 0.5) < 0.08 for name in ("one", "two"))

    wait_until(is_even, "equal shares: who had more meanwhile pays that back first", 30)
    assert node.busy_ns()["paused"] == held


def test_two_daemons_do_not_fight_over_a_mount(node: Node, tmp_path: Path) -> None:
    other = [BIN / "cgpud", "--simulate", "1x1GiB", "--mount", node.tree, "--runtime-dir", tmp_path / "other",
             "--lib-dir", tmp_path / "lib2", "--config", node.base / "config.toml"]  # fmt: skip
    done = subprocess.run(other, capture_output=True, text=True, timeout=30, check=False)
    assert done.returncode == 1 and "another cgpud serves its tree there" in done.stderr
    assert node.read("version") and node.daemon and node.daemon.poll() is None


# Other users

MEMBER = """
import os, sys
from cgpusched.cli import ctl
from cgpusched.driver import cover  # what ctl imports later: this Python may be unreadable for that user
ctl.build_parser()  # loads all that it needs before root is given up: this Python may be root's alone
uid, gid, *arguments = sys.argv[1:]
os.setgroups([int(gid)])
os.setresgid(*[int(uid)] * 3)
os.setresuid(*[int(uid)] * 3)
sys.exit(ctl.main(arguments))
"""


@pytest.fixture
def shared(alloc: Path) -> Iterator[Node]:
    """A node in a folder that every user reaches, with limits for group 4711."""
    if os.geteuid():
        pytest.skip("needs root, to become other users")
    base = Path(tempfile.mkdtemp(prefix="cgpufs-test-"))
    try:
        base.chmod(0o755)
        shutil.copy(alloc, base / "alloc")
        (base / "config.toml").write_text(
            "[control]\ngroup = '4711'\nmax_memsize = '2GiB'\nmax_weight = 3\nmax_instances = 2\n"
        )
        with running_node(base) as node:
            yield node
    finally:
        shutil.rmtree(base)


def test_members_of_the_group_have_instances_of_their_own(shared: Node) -> None:
    def become(uid: int, gid: int, *arguments: object, **options: Any) -> "subprocess.Popen[str]":
        command = [sys.executable, "-c", MEMBER, str(uid), str(gid), *map(str, arguments)]
        return subprocess.Popen(command, env=shared.env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                stderr=subprocess.PIPE, text=True, cwd=shared.base, **options)  # fmt: skip

    def refused(uid: int, gid: int, *arguments: object) -> str:
        process = become(uid, gid, *arguments)
        _, error = process.communicate(timeout=30)
        assert process.returncode in (1, 125) and error.count("\n") == 1, error
        return error

    with become(5001, 4711, "run", "--id", "mine", "--mem", "1GiB", "--", "./alloc", GIB // 2) as program:
        assert program.stdout and program.stdout.readline() == "0\n"
        meminfo = f"Free: {GIB // 2}\nPID: {program.pid} Mem: {GIB // 2}\n"
        assert shared.read(0, "mine", "meminfo") == meminfo
        assert (shared.runtime / "inst/mine/gate.sock").stat().st_uid == 5001
        with become(5001, 4711, "run", "--id", "mine", "--", "./alloc", GIB // 2 + (2 << 20)) as second:
            assert second.stdout and second.stdout.readline() == f"{OUT_OF_MEMORY}\n", "one quota for both"
        assert "belongs to uid 5001" in refused(5002, 4711, "run", "--id", "mine", "--", "true")
        assert "belongs to uid 5001" in refused(5002, 4711, "destroy", "mine")
        assert "its processes use the GPU" in refused(5001, 4711, "destroy", "mine")
        assert "group 4711 may" in refused(5003, 4712, "run", "--mem", "1GiB", "--", "true")
        assert "memsize 3GiB is more" in refused(5001, 4711, "run", "--mem", "3GiB", "--", "true")
        assert "weight 4 is more" in refused(5001, 4711, "create", "more", "--mem", "1GiB", "--weight", "4")
        assert "high priority is more" in refused(5001, 4711, "create", "more", "--mem", "1GiB", "--highprio")
        kept = become(5001, 4711, "create", "kept", "--mem", "1GiB")
        assert kept.communicate(timeout=30) == ("kept\n", "")
        assert "beside the 2 that uid 5001 has" in refused(5001, 4711, "create", "third", "--mem", "1GiB")
        with pytest.raises(PermissionError):
            os.seteuid(5001)
            try:
                (shared.tree / "0/mine/weight").write_text("3\n")
            finally:
                os.seteuid(0)
    wait_until(lambda: not shared.path(0, "mine").exists(), "the instance to go with its program")
    listed: Callable[[], list[Any]] = lambda: json.loads(shared.ctl("list", "--json").stdout)  # noqa: E731
    assert [(one["id"], one["owner"]) for one in listed()] == [("kept", 5001)]
    shared.ctl("destroy", "kept")
    assert listed() == []


def test_roots_instances_take_whom_they_were_made_for(shared: Node) -> None:
    """Root's own take root's programs: a user who goes to its socket all the same is not let in, and takes no slot."""
    shared.ctl("create", "roots", "--mem", "1GiB")
    shared.ctl("create", "hers", "--mem", "1GiB", "--user", "5001")

    def start(ident: str, uid: int) -> "subprocess.Popen[str]":
        return subprocess.Popen(["./alloc", str(GIB // 2)], env=inside(shared, ident), cwd=shared.base, user=uid,
                                group=uid, extra_groups=[], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    for ident, uid, welcome in (("roots", 0, True), ("roots", 5001, False), ("hers", 0, True), ("hers", 5001, True),
                                ("hers", 5002, False)):  # fmt: skip
        with start(ident, uid) as program:
            assert program.stdout and program.stdout.readline() == "0\n"
            listed = [one["processes"] for one in json.loads(shared.ctl("list", "--json").stdout) if one["id"] == ident]
            assert listed == [int(welcome)], (ident, uid)
            program.communicate("")
        wait_until(lambda: f"Free: {GIB}\n" == shared.read(0, ident, "meminfo"), "its memory to come back")  # noqa: B023
    become = ["setpriv", "--reuid=5001", "--regid=5001", "--clear-groups", "./alloc", str(GIB // 2)]
    with subprocess.Popen([BIN / "cgpuctl", "run", "--id", "given", "--mem", "1GiB", "--user", "5001", "--", *become],
                          env=shared.env, cwd=shared.base, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                          text=True) as program:  # fmt: skip
        assert program.stdout and program.stdout.readline() == "0\n"
        assert f"PID: {program.pid} Mem: {GIB // 2}\n" in shared.read(0, "given", "meminfo")
        program.communicate("")
