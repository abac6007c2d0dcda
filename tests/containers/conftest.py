"""The book of containers with its socket, on a real gate and with real processes in the place of runtimes."""

import json
import os
import socket
import subprocess
import sys
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import trio

sys.path.insert(0, str(Path(__file__).parent))  # for the modules beside the tests

from asking import HELLO  # noqa: E402

from cgpufs.views import Views  # noqa: E402
from cgpusched.daemon.containers.book import Containers  # noqa: E402
from cgpusched.daemon.containers.places import Places  # noqa: E402
from cgpusched.daemon.containers.runtime import RuntimeServer  # noqa: E402
from cgpusched.daemon.server.clients import Clients  # noqa: E402
from cgpusched.daemon.system import System  # noqa: E402
from cgpusched.driver.names import Driver  # noqa: E402
from cgpusched.gate import Gate  # noqa: E402
from cgpusched.model import Gpu  # noqa: E402
from cgpusched.state import State  # noqa: E402

T4 = 15109 << 20
ASKING = Path(__file__).parent / "asking.py"


@dataclass
class Asker:
    """A process that asked as cgpu-runtime does, and lives on."""

    process: trio.Process
    status: int
    text: str
    spec: Any
    """The new configuration; None: none came."""

    async def end(self) -> None:
        self.process.kill()
        await self.process.wait()


@dataclass
class World:
    system: System
    containers: Containers
    clients: Clients
    places: Places
    base: Path
    nursery: trio.Nursery

    @property
    def ids(self) -> list[str]:
        return list(self.system.state.instances)

    @property
    def marks(self) -> list[str]:
        return sorted(os.listdir(self.places.runtime / "ct"))

    def bundle(self, name: str = "bundle", **variables: object) -> Path:
        """A bundle whose configuration asks for 6 of 15 GiB, unless ``variables`` say otherwise (None: not set)."""
        values = {"ALIYUN_COM_GPU_MEM_CONTAINER": 6, "ALIYUN_COM_GPU_MEM_DEV": 15} | variables
        env = ["PATH=/bin", *(f"{key}={value}" for key, value in values.items() if value is not None)]
        path = self.base / name
        path.mkdir(exist_ok=True)
        (path / "config.json").write_text(json.dumps({"process": {"env": env}, "root": {"path": "rootfs"}}))
        return path

    async def ask(self, *words: object) -> Asker:
        process = await trio.lowlevel.open_process(
            [sys.executable, "-S", str(ASKING), str(self.places.socket), *map(str, words)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip
        self.processes.append(process)
        assert process.stdout is not None
        line = b""
        with trio.fail_after(30):
            while not line.endswith(b"\n"):
                piece = await process.stdout.receive_some(65536)
                assert piece, f"it ended: {line!r}"
                line += piece
        return Asker(process, **json.loads(line))

    async def create(self, id: str, bundle: Path | None = None) -> Asker:
        return await self.ask("create", id, bundle or self.bundle())

    async def hook(self, id: str, pid: int, bundle: Path | None = None) -> Asker:
        state = {"ociVersion": "1.0.2", "id": id, "status": "creating", "pid": pid,
                 "bundle": str(bundle or self.base / "bundle")}
        return await self.ask("hook", json.dumps(state))

    async def first(self, *wrapper: str) -> "First":
        """A container's first process."""
        process = await trio.lowlevel.open_process([*wrapper, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        self.processes.append(process)
        assert process.stdin is not None and process.stdout is not None
        await process.stdin.send_all(b"up\n")
        with trio.fail_after(10):
            assert await process.stdout.receive_some(3) == b"up\n"  # it is cat by now
        if not wrapper:
            return First(process, process.pid)
        children = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()
        return First(process, int(children[0]) if children else process.pid)

    async def attach(self, id: str) -> "Attached":
        """This process as a client of the instance."""
        sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        folder = os.open(self.clients.folder(id), os.O_PATH)
        try:
            await sock.connect(f"/proc/self/fd/{folder}/gate.sock")
        finally:
            os.close(folder)
        await sock.send(HELLO)
        welcome, ancillary, _, _ = await sock.recvmsg(65536, socket.CMSG_SPACE(4 * 64))
        for _, _, content in ancillary:
            for at in range(0, len(content), 4):
                os.close(int.from_bytes(content[at : at + 4], "little"))
        error = int.from_bytes(welcome[8:12], "little", signed=True)
        return Attached(sock, error, welcome[152:280].split(b"\0")[0].decode())

    processes: list[trio.Process]


@dataclass
class First:
    process: trio.Process
    pid: int
    """The container's first process: the child, where a wrapper stays in front of it."""

    async def kill(self) -> None:
        os.kill(self.pid, 9)
        await self.process.wait()


@dataclass
class Attached:
    sock: trio.socket.SocketType
    error: int
    text: str


@pytest.fixture
async def world(tmp_path: Path) -> AsyncIterator[World]:
    if os.geteuid() != 0:
        pytest.skip("only root is answered")
    runtime = tmp_path / "run"
    (runtime / "inst").mkdir(parents=True)
    gpus = [Gpu(index, f"GPU-0000000{index}-1111-2222-3333-444444444444", "test", T4, simulated=True)
            for index in range(2)]
    driver = Driver(tmp_path / "driver/libcuda.so.550", tmp_path / "driver/libnvidia-ml.so.550")
    places = Places(runtime, tmp_path / "lib", driver, Path("/run/cgpu"), tmp_path / "bin/cgpu-runtime", ("runc",),
                    runtime / "sim")
    places.prepare()
    gate = Gate()
    gate.start()
    processes: list[trio.Process] = []
    containers: Containers
    try:
        async with trio.open_nursery() as nursery:
            system = System(State(gpus), gate)
            clients = Clients(system, runtime, nursery, on_detach=lambda id: containers.detached(id),
                              foreign=lambda pid, id: containers.owners().is_foreign(pid, id),
                              container=lambda id: containers.has(id))
            containers = Containers(system, places, nursery, system.apply)
            system.on_change += [clients.changed, containers.changed]
            await nursery.start(RuntimeServer(places.socket, containers.answer).serve)
            yield World(system, containers, clients, places, tmp_path, nursery, processes)
            for process in processes:
                if process.poll() is None:
                    process.kill()
                await process.wait()
                for pipe in (process.stdin, process.stdout):
                    if pipe is not None:
                        await pipe.aclose()
            clients.close()
            nursery.cancel_scope.cancel()
    finally:
        gate.close()


@pytest.fixture
def views(world: World) -> Views:
    return Views(world.system, world.containers.viewers)


@pytest.fixture
def until() -> Callable[..., Any]:
    """``await until(condition, seconds)``: polls, and fails when the deadline comes."""

    async def poll(condition: Callable[[], object], seconds: float = 10.0) -> None:
        with trio.fail_after(seconds):
            while not condition():
                await trio.sleep(0.005)

    return poll
