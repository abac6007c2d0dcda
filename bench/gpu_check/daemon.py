"""The daemon of the check, its instances, and programs in them or bare beside them."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import secrets
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeVar

from machine import HERE, Machine, with_path

T = TypeVar("T")

READY_S = 75.0
"""A driver without its persistence daemon wakes the card for many seconds."""


class Failed(Exception):
    """The check's own finding: what is wrong."""


def until(condition: Callable[[], T], what: str, seconds: float = 20.0) -> T:
    """Polls until ``condition()`` is true and gives its value; Failed naming ``what`` after that long."""
    deadline = time.monotonic() + seconds
    while not (value := condition()):
        if time.monotonic() > deadline:
            raise Failed(f"waited {seconds:.0f} s in vain for {what}")
        time.sleep(0.02)
    return value


def last_line(text: str) -> dict[str, Any]:
    """The JSON there: what a library printed before it is passed over."""
    return dict(json.loads(text.strip().splitlines()[-1]))


class Daemon:
    """cgpud with folders of its own, with the tree where this machine can have one."""

    def __init__(self, machine: Machine, base: Path, tree: bool) -> None:
        self.machine, self.base, self.tree = machine, base, tree
        machine.runtime, machine.lib = str(base / "run"), str(base / "lib")
        machine.tree = str(base / "tree")
        self.process: subprocess.Popen[bytes] | None = None

    @property
    def log(self) -> Path:
        return self.base / "cgpud.log"

    def start(self) -> None:
        """Failed, with the daemon's own reason, where it does not come up."""
        if self.tree:
            try:
                self._start(["-m", "cgpusched.daemon.main"])
                self.machine.fuse = ""
                return
            except Failed as error:
                self.machine.fuse = str(error)
                self.stop()
        self.tree = False
        self.machine.fuse = self.machine.fuse or "not asked for"
        self._start([str(HERE / "serve.py")])

    def _start(self, how: list[str]) -> None:
        (self.base / "config.toml").write_text("")
        options = ["--mount", self.machine.tree, "--runtime-dir", self.machine.runtime, "--lib-dir", self.machine.lib,
                   "--config", str(self.base / "config.toml")]
        if self.machine.simulated:
            options += ["--simulate", "1x24GiB"]
        with open(self.log, "wb") as log:
            self.process = subprocess.Popen([sys.executable, *how, *options], stdout=log, stderr=log,
                                            env=with_path(self.machine.python_path))
        until(self._ready, "cgpud to come up", READY_S)

    def _ready(self) -> bool:
        assert self.process
        if self.process.poll() is not None:
            raise Failed((self.log.read_text().strip().splitlines() or ["cgpud ended without a word"])[-1])
        return b" ready " in self.log.read_bytes()

    def alive(self) -> bool:
        return self.process is not None and self.process.poll() is None

    def stop(self) -> None:
        if self.process and self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(15)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        if os.path.ismount(self.machine.tree):
            subprocess.run(["umount", "-l", self.machine.tree], check=False)


class Site:
    """What a check works with: instances, programs, the daemon's answers. ``close()`` ends what was started."""

    def __init__(self, machine: Machine) -> None:
        self.machine = machine
        self.running: list[subprocess.Popen[str]] = []
        self.instances: list[str] = []
        self._number = itertools.count()
        self._prefix = f"c{secrets.token_hex(3)}"  # the tree shows 12 characters, and they must differ

    # -- the daemon --

    def ask(self, do: str, **arguments: object) -> dict[str, Any]:
        """One request to the control socket; Failed with the daemon's reason."""
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(20)
            sock.connect(f"{self.machine.runtime}/control.sock")
            sock.sendall(json.dumps({"do": do, **arguments}).encode() + b"\n")
            answer = json.loads(sock.makefile().readline())
        if not answer.get("ok"):
            raise Failed(f"cgpud refused {do}: {answer.get('error')}")
        return dict(answer)

    def usage(self, ident: str) -> dict[str, Any]:
        """What ``status`` has for an instance on GPU 0."""
        for one in self.ask("status")["gpus"][0]["instances"]:
            if one["id"] == ident:
                return dict(one)
        raise Failed(f"status does not show {ident}")

    def create(self, memory: int, weight: int = 1) -> str:
        ident = f"{self._prefix}{next(self._number)}"
        self.ask("create", id=ident, memsize=[memory], weight=weight)
        self.instances.append(ident)
        return ident

    # -- programs --

    def environment(self, ident: str | None, libraries: bool = False) -> dict[str, str]:
        """Of a program in that instance; None: bare. ``libraries``: it loads cudart or cuBLAS of those found here.

        Frameworks bring libraries of their own, and must not get others.
        """
        machine = self.machine
        env = {key: value for key, value in os.environ.items() if not key.startswith("CGPU_")}
        folders = [machine.sim_lib] if machine.simulated and ident is None else []
        if ident is not None:
            folders = [machine.lib]
            env["CGPU_SOCKET"] = f"{machine.runtime}/inst/{ident}/gate.sock"
        if machine.simulated:
            env |= {"CGPU_SIM_DIR": f"{machine.runtime}/sim", "CGPU_SIM_CONTEXT_BYTES": str(300 << 20)}
        if libraries:
            env["CGPU_CHECK_CUBLAS"] = machine.libraries.get("cublas", "")
            # those that load each other by name (cuBLAS its Lt) lie beside each other
            folders += sorted({str(Path(path).parent) for path in machine.libraries.values()})
        env["LD_LIBRARY_PATH"] = ":".join([*folders, *filter(None, [env.get("LD_LIBRARY_PATH")])])
        return env

    def start(self, ident: str | None, *command: object, libraries: bool = False, **env: str) -> subprocess.Popen[str]:
        program = subprocess.Popen([str(part) for part in command], env=self.environment(ident, libraries) | env,
                                   text=True, errors="replace", stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                   stderr=subprocess.PIPE)
        self.running.append(program)
        return program

    def output(self, program: subprocess.Popen[str], seconds: float = 60) -> str:
        """What it printed; Failed with the last line of its stderr where it did not end well."""
        try:
            out, err = program.communicate(timeout=seconds)
        except subprocess.TimeoutExpired:
            program.kill()
            program.communicate()
            raise Failed(f"{self.name(program)} did not end within {seconds:.0f} s") from None
        finally:
            if program.poll() is not None and program in self.running:
                self.running.remove(program)
        if program.returncode:
            last = (err.strip().splitlines() or ["?"])[-1]
            raise Failed(f"{self.name(program)}: status {program.returncode}: {last}")
        return out

    @staticmethod
    def name(program: subprocess.Popen[str]) -> str:
        arguments: Sequence[str] = program.args  # type: ignore[assignment]
        return " ".join(Path(part).name for part in arguments)

    def run(self, ident: str | None, *command: object, seconds: float = 60, libraries: bool = False, **env: str) -> str:
        return self.output(self.start(ident, *command, libraries=libraries, **env), seconds)

    def json(self, ident: str | None, *command: object, libraries: bool = False, **env: str) -> dict[str, Any]:
        """The last line that it printed, as JSON."""
        return last_line(self.run(ident, *command, libraries=libraries, **env))

    @contextlib.contextmanager
    def neighbour(self, ident: str, *command: object) -> Iterator[subprocess.Popen[str]]:
        """A program in that instance, until the end of the block."""
        program = self.start(ident, *command)
        try:
            yield program
        finally:
            program.kill()
            program.communicate()
            self.running.remove(program)

    def close(self) -> None:
        for program in self.running:
            program.kill()
        for program in self.running:
            program.communicate()
        self.running.clear()
        for ident in self.instances:
            until(lambda: self._destroy(ident), f"{ident} to be destroyed", 10)  # noqa: B023
        self.instances.clear()

    def _destroy(self, ident: str) -> bool:
        try:
            self.ask("destroy", id=ident)
        except Failed:  # its processes are not gone yet
            return False
        return True
