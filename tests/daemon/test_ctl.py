"""cgpuctl as a user meets it: real processes against a real control socket, the gate behind it a fake."""

import json
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import trio

from cgpusched.cli import ctl, link
from cgpusched.commands import Create, Destroy
from cgpusched.config import ControlConfig
from cgpusched.daemon.lifetime import Lifetimes
from cgpusched.daemon.server.access import Access
from cgpusched.daemon.server.control import Control, ControlServer

GIB = 1 << 30
CTL = [sys.executable, "-m", "cgpusched.cli.ctl"]


class Daemon:
    def __init__(self, world: Any, nursery: trio.Nursery) -> None:
        self.world = world
        self.path = world.runtime / "control.sock"
        self.lib = world.runtime / "lib"
        self.lib.mkdir()
        (self.lib / "libcuda.so.1").touch()
        self.lives = Lifetimes(nursery, world.clients.count, lambda ident: world.system.apply(Destroy(ident)))
        world.clients._on_detach = self.lives.detached
        world.system.on_change.append(
            lambda command, _: self.lives.forget(command.id) if isinstance(command, Destroy) else None
        )
        control = Control(
            world.state, world.system.apply, Access(ControlConfig()), self.lives,
            lambda ident: {"CGPU_SOCKET": str(world.clients.socket(ident)), "CGPU_SIM_DIR": "/sim/dir"},
            self.lib, lambda: {"version": "1", "simulated": False, "gpus": []}, world.clients.count,
        )  # fmt: skip
        self.server = ControlServer(self.path, control.answer)

    @property
    def ids(self) -> list[str]:
        return list(self.world.state.instances)

    async def ctl(self, *arguments: str, **more: Any) -> "subprocess.CompletedProcess[bytes]":
        with trio.fail_after(20):
            return await trio.run_process([*CTL, "--socket", str(self.path), *arguments], check=False,
                                          capture_stdout=True, capture_stderr=True, **more)  # fmt: skip


@pytest.fixture
async def daemon(world: Any, nursery: trio.Nursery) -> AsyncIterator[Daemon]:
    made = Daemon(world, nursery)
    await nursery.start(made.server.serve)
    yield made
    nursery.cancel_scope.cancel()


async def test_run_hands_on_environment_and_exit_status(daemon: Daemon, until: Any) -> None:
    code = "import os, json, sys; print(json.dumps(dict(os.environ))); sys.exit(42)"
    done = await daemon.ctl("run", "--mem", "1GiB", "--id", "mine", "--", sys.executable, "-c", code,
                            env={**os.environ, "LD_LIBRARY_PATH": "/theirs"})  # fmt: skip
    assert (done.returncode, done.stderr) == (42, b"")
    env = json.loads(done.stdout)
    assert env["LD_LIBRARY_PATH"] == f"{daemon.lib}:/theirs"
    assert env["CGPU_SOCKET"] == str(daemon.world.clients.socket("mine"))
    assert env["CGPU_SIM_DIR"] == "/sim/dir"
    await until(lambda: not daemon.ids)


async def test_a_program_never_runs_without_its_limits(daemon: Daemon, until: Any) -> None:
    (daemon.lib / "libcuda.so.1").unlink()
    done = await daemon.ctl("run", "--mem", "1GiB", "--", "echo", "ran")
    assert (done.returncode, done.stdout) == (125, b"") and b"would run without its limits" in done.stderr
    await until(lambda: not daemon.ids)


def test_an_empty_library_path_gets_no_colon() -> None:
    reply = {"lib_dir": "/our/lib", "env": {}}
    assert ctl.environment(reply, {"LD_LIBRARY_PATH": ""})["LD_LIBRARY_PATH"] == "/our/lib"
    assert ctl.environment(reply, {})["LD_LIBRARY_PATH"] == "/our/lib"


async def test_run_passes_its_options(daemon: Daemon) -> None:
    code = "import sys; sys.stdin.read()"
    command = [*CTL, "--socket", str(daemon.path), "run", "--gpu", "1,0", "--mem", "1GiB,2GiB", "--weight", "3",
               "--highprio", sys.executable, "-c", code]  # fmt: skip
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        try:
            with trio.fail_after(10):
                while not daemon.ids:
                    await trio.sleep(0.01)
            (instance,) = daemon.world.state.instances.values()
        finally:
            process.kill()
    assert {gpu: (s.memsize, s.weight, s.highprio) for gpu, s in instance.shares.items()} == {
        1: (GIB, 3, True), 0: (2 * GIB, 3, True)}  # fmt: skip
    assert list(instance.shares) == [1, 0] and instance.ephemeral


async def test_commands_own_options_are_its_own(daemon: Daemon) -> None:
    done = await daemon.ctl("run", "--mem", "1GiB", "echo", "--id", "-x", "--", "--help")
    assert done.stdout == b"--id -x -- --help\n"


async def test_signals_are_cmds(daemon: Daemon, until: Any) -> None:
    done = await daemon.ctl("run", "--mem", "1GiB", "--", "sh", "-c", "kill -TERM $$")
    assert done.returncode == -signal.SIGTERM
    await until(lambda: not daemon.ids)


async def test_sigpipe_is_as_cmd_expects(daemon: Daemon) -> None:
    done = await daemon.ctl("run", "--mem", "1GiB", "--", "sh", "-c", "grep SigIgn /proc/self/status")
    ignored = int(done.stdout.split()[1], 16)
    assert not ignored & (1 << (signal.SIGPIPE - 1) | 1 << (signal.SIGXFSZ - 1))


@pytest.mark.parametrize(("cmd", "status"), [("/no/such/thing", 127), ("no-such-command", 127), ("/etc/passwd", 126),
                                             ("/", 126), ("", 127)])  # fmt: skip
async def test_what_cannot_be_executed(daemon: Daemon, until: Any, cmd: str, status: int) -> None:
    done = await daemon.ctl("run", "--mem", "1GiB", "--", cmd)
    assert done.returncode == status
    assert done.stderr.startswith(f"cgpuctl: {cmd}: ".encode()) and done.stderr.count(b"\n") == 1
    await until(lambda: not daemon.ids)


async def test_kill_9_ends_the_instance(daemon: Daemon, until: Any) -> None:
    with subprocess.Popen([*CTL, "--socket", str(daemon.path), "run", "--mem", "1GiB", "sleep", "1000"]) as process:
        try:
            await until(lambda: daemon.ids)
        finally:
            process.kill()
    await until(lambda: not daemon.ids)


async def test_a_child_left_behind_keeps_it(daemon: Daemon, until: Any) -> None:
    """The shell exits at once; what it left in the background has the instance's environment and no connection yet."""
    with subprocess.Popen(
        [*CTL, "--socket", str(daemon.path), "run", "--mem", "1GiB", "sh", "-c", "sleep 1000 & echo $!"],
        stdout=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        child = int(await trio.to_thread.run_sync(process.stdout.readline))
        try:
            await trio.to_thread.run_sync(process.wait)
            (ident,) = daemon.ids
            await until(lambda: daemon.lives.anchors(ident) == 1)
            await trio.sleep(0.5)  # two scans' time: the end would come within it
            assert daemon.ids == [ident]
        finally:
            os.kill(child, signal.SIGKILL)
    await until(lambda: not daemon.ids)


async def test_joining_keeps_it_for_both(daemon: Daemon, until: Any) -> None:
    command = [*CTL, "--socket", str(daemon.path), "run", "--id", "both"]
    with subprocess.Popen([*command, "--mem", "1GiB", "sleep", "1000"]) as first:
        await until(lambda: daemon.ids)
        with subprocess.Popen([*command, "sleep", "1000"]) as second:
            await until(lambda: daemon.lives.anchors("both") == 2)
            first.kill()
            await until(lambda: daemon.lives.anchors("both") == 1)
            assert daemon.ids == ["both"]
            second.kill()
    await until(lambda: not daemon.ids)


async def test_create_list_destroy(daemon: Daemon) -> None:
    assert (await daemon.ctl("create", "kept", "--mem", "3GiB", "--weight", "2")).stdout == b"kept\n"
    listed = (await daemon.ctl("list")).stdout.decode().splitlines()
    assert [line.split() for line in listed] == [
        ["ID", "GPU", "MEMSIZE", "WEIGHT", "HIGHPRIO", "PROCESSES", "OWNER", "LIFE"],
        ["kept", "0", "3GiB", "2", "0", "0", "0", "kept"],
    ]
    (one,) = json.loads((await daemon.ctl("list", "--json")).stdout)
    assert one["id"] == "kept" and one["gpus"] == [{"gpu": 0, "memsize": 3 * GIB, "weight": 2, "highprio": False}]
    done = await daemon.ctl("destroy", "kept")
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")


async def test_list_shows_native_gpus(daemon: Daemon) -> None:
    daemon.world.system.apply(Create("mixed", (1,), (GIB,), native=(0,)))
    listed = (await daemon.ctl("list")).stdout.decode().splitlines()
    assert [line.split() for line in listed[1:]] == [
        ["mixed", "1", "1GiB", "1", "0", "0", "0", "kept"],
        ["mixed", "0", "native", "-", "-", "0", "0", "kept"],
    ]
    (one,) = json.loads((await daemon.ctl("list", "--json")).stdout)
    assert one["native"] == [0]


async def test_refusals_are_one_line(daemon: Daemon) -> None:
    done = await daemon.ctl("destroy", "nobody")
    assert (done.returncode, done.stderr) == (1, b"cgpuctl: destroy 'nobody': no such instance\n")
    done = await daemon.ctl("run", "--mem", "99GiB", "--", "true")
    assert done.returncode == 125
    assert done.stderr.count(b"\n") == 1 and b"99GiB is not allowed" in done.stderr


@pytest.mark.parametrize("arguments", [
    ("run", "--mem", "1gib", "--", "true"), ("run", "--gpu", "0;1", "true"), ("run", "--weight", "-1", "true"),
    ("run", "--nonsense", "true"), ("run", "--mem"),
])  # fmt: skip
def test_usage_errors_of_run_are_125(arguments: tuple[str, ...], capsys: Any) -> None:
    with pytest.raises(SystemExit) as info:
        ctl.main(arguments)
    assert info.value.code == 125
    assert "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize("arguments", [("create",), ("frobnicate",), (), ("create", "x", "--mem", "1_0")])
def test_usage_errors_are_2(arguments: tuple[str, ...], capsys: Any) -> None:
    with pytest.raises(SystemExit) as info:
        ctl.main(arguments)
    assert info.value.code == 2


def test_run_without_cmd(capsys: Any) -> None:
    assert ctl.main(["run", "--mem", "1GiB", "--"]) == 125
    assert capsys.readouterr().err == "cgpuctl: run: no CMD given (see cgpuctl run --help)\n"


def test_no_daemon(tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "control.sock"
    assert ctl.main(["--socket", str(path), "list"]) == 3
    assert capsys.readouterr().err == f"cgpuctl: cgpud is not running: nobody answers at {path}\n"
    assert ctl.main(["--socket", str(path), "run", "true"]) == 125


def test_environment_names_the_socket(tmp_path: Path, monkeypatch: Any, capsys: Any) -> None:
    monkeypatch.setenv("CGPU_CONTROL", str(tmp_path / "elsewhere.sock"))
    assert ctl.main(["list"]) == 3
    assert "elsewhere.sock" in capsys.readouterr().err


async def test_what_answers_is_not_cgpud(tmp_path: Path, nursery: trio.Nursery) -> None:
    path = tmp_path / "sock"
    with trio.socket.socket(trio.socket.AF_UNIX) as listener:
        await listener.bind(str(path))
        listener.listen(8)

        async def answer(data: bytes) -> None:
            sock, _ = await listener.accept()
            with sock:
                await sock.recv(1000)
                await sock.send(data)

        nursery.start_soon(answer, b"HTTP/1.1 400 Bad Request\r\n")
        with pytest.raises(link.NoDaemon, match="is not cgpud"):
            await trio.to_thread.run_sync(lambda: link.ask(str(path), "list"))


async def test_a_socket_path_longer_than_an_address(world: Any, nursery: trio.Nursery) -> None:
    folder = world.runtime / ("deep" * 20) / ("deep" * 20)
    folder.mkdir(parents=True)
    world.runtime = folder
    daemon = Daemon(world, nursery)
    await nursery.start(daemon.server.serve)
    world.system.apply(Create("one", (0,), (GIB,)))
    assert b"one" in (await daemon.ctl("list")).stdout
    nursery.cancel_scope.cancel()


@pytest.mark.parametrize("command", ["ctl", "smi"])
async def test_output_that_cannot_be_written(daemon: Daemon, command: str) -> None:
    arguments = [sys.executable, "-m", f"cgpusched.cli.{command}", "--socket", str(daemon.path),
                 *(["list"] if command == "ctl" else [])]  # fmt: skip
    with open("/dev/full", "w") as full:
        done = await trio.run_process(arguments, stdout=full, capture_stderr=True, check=False)
    assert done.returncode == 1 and done.stderr.count(b"\n") == 1 and b"cannot write: No space left" in done.stderr
    closed = ["sh", "-c", '"$@" >&- 2>&-', "sh", *arguments]
    assert (await trio.run_process(closed, check=False)).returncode == 0


def test_help_and_version(capsys: Any) -> None:
    for arguments in (["--help"], ["run", "--help"], ["create", "--help"], ["--version"]):
        with pytest.raises(SystemExit) as info:
            ctl.main(arguments)
        assert info.value.code == 0
    assert "cgpuctl" in capsys.readouterr().out


def test_many_at_once_wait_instead_of_failing(tmp_path: Path) -> None:
    """A daemon that is slow to accept has a full queue: that is no reason to give up at once."""
    path = tmp_path / "sock"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(path))
        listener.listen(0)
        answers: list[Any] = []
        asking = [threading.Thread(target=lambda: answers.append(link.ask(str(path), "list"))) for _ in range(8)]
        for one in asking:
            one.start()
        time.sleep(0.3)  # by then all but two have met the full queue
        for _ in asking:
            listener.settimeout(10)
            with listener.accept()[0] as sock:
                sock.recv(1000)
                sock.sendall(b'{"ok": true}\n')
        for one in asking:
            one.join(10)
    assert answers == [{"ok": True}] * 8


def test_a_queue_that_stays_full_is_given_up_on(tmp_path: Path, monkeypatch: Any) -> None:
    monkeypatch.setattr(link, "TIMEOUT_SECONDS", 1.0)
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as listener, socket.socket(socket.AF_UNIX) as taken:
        listener.bind(path)
        listener.listen(0)
        taken.connect(path)
        with pytest.raises(link.NoDaemon, match="gave up after 1 s"):
            link.ask(path, "list")


def test_a_reason_given_before_hanging_up_is_shown(tmp_path: Path) -> None:
    path = str(tmp_path / "sock")
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(path)
        listener.listen(1)

        def refuse() -> None:
            with listener.accept()[0] as sock:
                sock.sendall(b'{"ok": false, "error": "too many", "errno": "EAGAIN"}\n')

        thread = threading.Thread(target=refuse)
        thread.start()
        with pytest.raises(link.Refused, match="too many"):
            link.ask(path, "create", id="x" * 50_000)
        thread.join(10)
