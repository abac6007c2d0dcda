"""cgpu-runtime without a daemon: a stand-in that answers what a test says, and a next runtime that notes its call."""

import array
import json
import os
import shutil
import socket
import stat
import struct
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
from node import Node, running_node

from cgpusched.driver.find import packaged

HEAD = struct.Struct("<IIiI")
MAGIC, VERSION = 0x72706763, 1
CREATE, HOOK, DELETE, PRECREATE = 1, 2, 3, 4


@contextmanager
def standing_node(base: Path, gpus: str) -> Iterator[Node]:
    """A real node whose cgpu-runtime goes on with a stand-in that waits for the end of its input."""
    if os.geteuid() != 0 or not os.path.exists("/dev/fuse"):
        pytest.skip("cgpud needs root and /dev/fuse")
    runtime = base / "next"
    runtime.write_text("#!/bin/sh\nexec cat\n")
    runtime.chmod(0o755)
    (base / "config.toml").write_text(f'runtimes = ["{runtime}"]\n')
    with running_node(base, gpus) as one:
        yield one


class StandIn:
    """The daemon's socket. Answers by ``status``, ``text`` and, if ``spec`` is set, a descriptor of that."""

    def __init__(self, path: Path) -> None:
        self.status = 0
        self.text = ""
        self.spec: bytes | None = None
        self.silent = False
        self.asked: list[tuple[int, bytes, str]] = []
        """kind, payload, and the configuration that came along, as a file or in a directory (or "")."""
        self._listener = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._listener.bind(str(path))
        self._listener.listen()
        self._thread = threading.Thread(target=self._serve)
        self._thread.start()

    def _serve(self) -> None:
        while True:
            connection, _ = self._listener.accept()
            with connection:
                data, fds, _, _ = socket.recv_fds(connection, 1 << 17, 1)
                if not data:
                    return
                self._answer(connection, data, fds)

    def _answer(self, connection: socket.socket, data: bytes, fds: list[int]) -> None:
        magic, version, kind, _ = HEAD.unpack_from(data)
        assert (magic, version) == (MAGIC, VERSION)
        seen = ""
        for fd in fds:
            folder = stat.S_ISDIR(os.fstat(fd).st_mode)
            with open(os.open("config.json", os.O_RDONLY, dir_fd=fd) if folder else f"/proc/self/fd/{fd}") as file:
                seen = file.read()
            os.close(fd)
        self.asked.append((kind, data[HEAD.size:], seen))
        if self.silent:
            connection.recv(1)  # until the other side has had enough
            return
        reply = HEAD.pack(MAGIC, VERSION, self.status, 0) + self.text.encode()
        if self.spec is None:
            connection.send(reply)
            return
        fd = os.memfd_create("spec")
        os.write(fd, self.spec)
        connection.sendmsg([reply], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", [fd]))])
        os.close(fd)

    def close(self) -> None:
        with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as last:
            last.connect(self._listener.getsockname())
        self._thread.join()
        self._listener.close()


class Bench:
    """The program with its configuration beside it, a bundle, and a next runtime."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.run_dir = base / "run"
        (self.run_dir / "ct").mkdir(parents=True)
        self.program = base / "bin" / "cgpu-runtime"
        self.program.parent.mkdir()
        shutil.copy(packaged("bin/cgpu-runtime"), self.program)
        self.program.chmod(0o755)
        self.bundle = base / "bundle"
        self.bundle.mkdir()
        self.noted = base / "noted"
        self.next = self._script(base / "next", f'{{ pwd; printf "%s\\n" "$@"; }} >{self.noted}; exit 7')
        self.log = base / "log.json"
        self.configure(self.next)

    def _script(self, path: Path, body: str) -> Path:
        path.write_text(f"#!/bin/sh\n{body}\n")
        path.chmod(0o755)
        return path

    @property
    def socket(self) -> Path:
        return self.run_dir / "runtime.sock"

    def configure(self, *runtimes: Path | str) -> None:
        lines = [f"socket {self.socket}", *(f"runtime {one}" for one in runtimes), "later a key of a newer version"]
        Path(f"{self.program}.conf").write_text("\n".join(lines) + "\n")

    def spec(self, *env: str) -> str:
        text = json.dumps({"ociVersion": "1.0.2", "process": {"args": ["true"], "env": ["PATH=/bin", *env]}})
        (self.bundle / "config.json").write_text(text)
        return text

    def __call__(self, *arguments: Path | str, stdin: str = "", **env: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run([self.program, *arguments], capture_output=True, text=True, check=False, input=stdin,
                              cwd=self.base, env={"PATH": os.environ["PATH"], **env}, timeout=60)

    def create(self, ident: str = "c1", **env: str) -> "subprocess.CompletedProcess[str]":
        return self("--log", self.log, "--log-format", "json", "create", "--bundle", self.bundle, "--pid-file",
                    self.base / "pid", ident, **env)

    def went_on(self) -> list[str] | None:
        """The arguments that the next runtime was run with; None: it was not."""
        return self.noted.read_text().splitlines()[1:] if self.noted.exists() else None

    def logged(self) -> dict[str, Any]:
        entry = json.loads(self.log.read_text().splitlines()[-1])
        assert isinstance(entry, dict)
        return entry
