"""The control socket: what each request does, who may ask for it, and what a bad client costs."""

import json
import os
import socket
import stat
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cgpusched.commands import Create
from cgpusched.config import ControlConfig
from cgpusched.daemon.server import control
from cgpusched.daemon.server.access import Access
from cgpusched.daemon.server.control import Control, ControlServer
from cgpusched.daemon.server.peers import Peer, identify
from cgpusched.errors import UserError

GIB = 1 << 30
GROUP = 4711


class Lives:
    def __init__(self) -> None:
        self.calls: list[tuple[str, ...]] = []
        self.count = 0

    def begin(self, ident: str, socket: str, pidfd: int, owner: int) -> None:
        os.close(pidfd)
        self.calls.append(("begin", ident, socket, owner))

    def join(self, ident: str, pidfd: int) -> None:
        os.close(pidfd)
        self.calls.append(("join", ident))

    async def settled(self) -> None:
        pass

    def anchors(self, ident: str) -> int:
        return self.count


class Desk:
    """A control server whose clients are whoever the test says."""

    def __init__(self, world: Any, config: ControlConfig) -> None:
        self.world = world
        self.lives = Lives()
        self.uid, self.groups = 0, frozenset({0})
        self.path = world.runtime / "control.sock"
        self.control = Control(
            world.state, partial(world.system.apply, log_refusal=False), Access(config, {"gpu": GROUP}.get), self.lives,
            lambda ident: {"CGPU_SOCKET": str(world.clients.socket(ident)), "CGPU_SIM_DIR": "/sim"},
            Path("/lib/dir"), lambda: {"gpus": []}, world.clients.count,
        )  # fmt: skip
        self.server = ControlServer(self.path, self.control.answer, self.who)

    def who(self, sock: socket.socket) -> Peer:
        peer = identify(sock)
        peer.uid, peer.groups = self.uid, self.groups
        return peer

    def become(self, uid: int, *groups: int) -> None:
        self.uid, self.groups = uid, frozenset(groups)

    async def connect(self) -> trio.SocketStream:
        return await trio.open_unix_socket(str(self.path))

    async def ask(self, do: str, **arguments: Any) -> dict[str, Any]:
        return await self.raw(json.dumps({"do": do, **arguments}).encode() + b"\n")

    async def raw(self, data: bytes) -> dict[str, Any]:
        with trio.fail_after(5):
            async with await self.connect() as stream:
                await stream.send_all(data)
                return json.loads(await line(stream))


async def line(stream: trio.SocketStream) -> bytes:
    data = b""
    while not data.endswith(b"\n"):
        piece = await stream.receive_some(65536)
        if not piece:
            break
        data += piece
    return data


@pytest.fixture
async def open_desk(world: Any, nursery: trio.Nursery) -> AsyncIterator[Callable[..., Any]]:
    async def start(**limits: Any) -> Desk:
        desk = Desk(world, ControlConfig(**limits))
        await nursery.start(desk.server.serve)
        return desk

    yield start
    nursery.cancel_scope.cancel()


async def test_everybody_may_connect(open_desk: Any) -> None:
    desk = await open_desk()
    assert stat.S_IMODE(desk.path.stat().st_mode) == 0o666


async def test_create_list_destroy(open_desk: Any, world: Any) -> None:
    desk = await open_desk()
    made = await desk.ask("create", id="one", gpus=[1, 0], memsize=[GIB], weight=3, highprio=True)
    assert made == {"ok": True, "id": "one"}
    instance = world.state.instances["one"]
    assert not instance.ephemeral and instance.owner == 0 and list(instance.shares) == [1, 0]
    share = {"memsize": GIB, "weight": 3, "highprio": True}
    assert await desk.ask("list") == {"ok": True, "instances": [{
        "id": "one", "short": "one", "ephemeral": False, "owner": 0, "processes": 0,
        "gpus": [{"gpu": 1, **share}, {"gpu": 0, **share}], "native": [],
    }]}  # fmt: skip
    assert await desk.ask("destroy", id="one") == {"ok": True}
    assert not world.state.instances


async def test_destroy_takes_the_short_name(open_desk: Any, world: Any) -> None:
    desk = await open_desk()
    await desk.ask("create", id="abcdefghijklmnop", memsize=[GIB])
    assert (await desk.ask("destroy", id="abcdefghijkl"))["ok"]
    assert (await desk.ask("destroy", id="abcdefghijkl")) == {
        "ok": False, "errno": "ENOENT", "error": "destroy 'abcdefghijkl': no such instance"}  # fmt: skip


async def test_run_makes_an_ephemeral_instance(open_desk: Any, world: Any) -> None:
    desk = await open_desk()
    reply = await desk.ask("run", memsize=[GIB])
    ident = reply["id"]
    assert ident.startswith("run-") and len(ident) == 12
    path = str(world.clients.socket(ident))
    assert reply == {"ok": True, "id": ident, "socket": path, "lib_dir": "/lib/dir",
                     "env": {"CGPU_SOCKET": path, "CGPU_SIM_DIR": "/sim"}}  # fmt: skip
    assert world.state.instances[ident].ephemeral
    assert desk.lives.calls == [("begin", ident, path, 0)]
    assert Path(path).is_socket()


async def test_run_joins_by_id(open_desk: Any, world: Any) -> None:
    desk = await open_desk()
    first = await desk.ask("run", id="mine", memsize=[GIB])
    second = await desk.ask("run", id="mine")
    assert first == second
    assert [call[0] for call in desk.lives.calls] == ["begin", "join"]
    refused = await desk.ask("run", id="mine", weight=2)
    assert refused["errno"] == "EINVAL" and refused["error"].startswith("run --id mine: that instance exists")
    desk.lives.count = control.ANCHORS_LIMIT
    assert (await desk.ask("run", id="mine"))["errno"] == "EAGAIN"


async def test_refusals_are_the_states_own(open_desk: Any) -> None:
    desk = await open_desk()
    assert (await desk.ask("create", id="a/b", memsize=[GIB]))["errno"] == "EINVAL"
    assert (await desk.ask("create", id="big", memsize=[25 * GIB]))["errno"] == "EINVAL"
    assert (await desk.ask("create", id="much", memsize=[GIB], weight=21))["errno"] == "ENOSPC"
    assert (await desk.ask("create", id="none"))["error"].startswith("create none: no memsize")
    assert (await desk.ask("create", id="far", gpus=[7], memsize=[GIB]))["error"].endswith("this node has GPU 0, 1")


@pytest.mark.parametrize("do", ["create", "run", "destroy"])
async def test_strangers_are_told_which_group(open_desk: Any, world: Any, do: str) -> None:
    desk = await open_desk(group="gpu")
    desk.become(1000, 1000)
    reply = await desk.ask(do, id="one")
    assert reply["errno"] == "EPERM"
    assert reply["error"] == (f"{do}: only root and members of group gpu may, and uid 1000 is not in it "
                              "(a new member must log in again)")  # fmt: skip
    assert not world.state.instances


async def test_without_a_group_only_root(open_desk: Any) -> None:
    desk = await open_desk()
    desk.become(1000, GROUP)
    assert (await desk.ask("run"))["error"] == "run: only root may (no group is configured: [control] group)"


async def test_a_group_that_does_not_exist_lets_nobody_in(open_desk: Any) -> None:
    desk = await open_desk(group="nosuch")
    desk.become(1000, GROUP)
    assert (await desk.ask("run"))["errno"] == "EPERM"


async def test_strangers_may_look(open_desk: Any) -> None:
    desk = await open_desk(group="gpu")
    desk.become(1000)
    assert (await desk.ask("list"))["ok"] and (await desk.ask("status"))["ok"]


@pytest.mark.parametrize(("limits", "asked", "error"), [
    ({"max_memsize": 2 * GIB}, {"memsize": [GIB, 3 * GIB], "gpus": [0, 1]},
     "memsize 3GiB is more than members of group gpu may have: 2GiB"),
    ({"max_weight": 2}, {"memsize": [GIB], "weight": 3}, "weight 3 is more than members of group gpu may have: 2"),
    ({}, {"memsize": [GIB], "highprio": True},
     "high priority is more than members of group gpu may have: none ([control] highprio)"),
    ({"max_instances": 0}, {"memsize": [GIB]},
     "an instance beside the 0 that uid 1000 has is more than members of group gpu may have: 0"),
])  # fmt: skip
async def test_members_have_limits(open_desk: Any, world: Any, limits: Any, asked: Any, error: str) -> None:
    desk = await open_desk(group="gpu", **limits)
    desk.become(1000, 1000, GROUP)
    reply = await desk.ask("create", id="one", **asked)
    assert (reply["errno"], reply["error"]) == ("EPERM", f"create 'one': {error}")
    assert not world.state.instances
    desk.become(0)
    assert (await desk.ask("create", id="one", **asked))["ok"], "root has none"


async def test_a_default_memsize_is_no_way_past_the_limit(open_desk: Any, world: Any) -> None:
    desk = await open_desk(group="gpu", max_memsize=GIB)
    world.state.default_memsize = 2 * GIB
    desk.become(1000, GROUP)
    assert (await desk.ask("run"))["errno"] == "EPERM"


async def test_members_own_what_they_make(open_desk: Any, world: Any) -> None:
    desk = await open_desk(group="gpu")
    world.system.apply(Create("roots", (0,), (GIB,)))
    desk.become(1000, GROUP)
    assert (await desk.ask("run", id="hers", memsize=[GIB]))["ok"]
    assert world.state.instances["hers"].owner == 1000
    assert (await desk.ask("run", id="roots"))["error"] == "run --id roots: instance roots belongs to root"
    assert (await desk.ask("destroy", id="roots"))["errno"] == "EPERM"
    desk.become(1001, GROUP)
    assert (await desk.ask("run", id="hers"))["error"] == "run --id hers: instance hers belongs to uid 1000"
    assert (await desk.ask("destroy", id="hers"))["errno"] == "EPERM"
    desk.become(1000, GROUP)
    assert (await desk.ask("destroy", id="hers"))["ok"]


async def test_root_makes_them_for_others(open_desk: Any, world: Any) -> None:
    desk = await open_desk(group="gpu")
    assert (await desk.ask("create", id="hers", memsize=[GIB], user=1000))["ok"]
    assert (await desk.ask("run", id="his", memsize=[GIB], user=1001))["ok"]
    assert [one.owner for one in world.state.instances.values()] == [1000, 1001]
    again = await desk.ask("run", id="his", user=1001)
    assert again["errno"] == "EINVAL" and again["error"].startswith("run --id his: that instance exists")
    desk.become(1000, GROUP)
    assert (await desk.ask("run", id="hers"))["ok"]
    assert (await desk.ask("create", id="own", memsize=[GIB], user=1000))["ok"]
    refused = await desk.ask("create", id="given", memsize=[GIB], user=1001)
    assert refused["errno"] == "EPERM" and "only root may make one for another user" in refused["error"]


BAD = [
    b"\n", b"{\n", b"[]\n", b"null\n", b"\xff\xfe\n", b"[" * 60000 + b"\n", b'{"do": 7}\n', b'{"do": "reboot"}\n',
    b"{}\n", b'{"do": "create"}\n', b'{"do": "create", "id": 7}\n', b'{"do": "destroy", "id": null}\n',
    b'{"do": "list", "id": "a"}\n', b'{"do": "run", "weight": -1}\n', b'{"do": "run", "weight": true}\n',
    b'{"do": "run", "weight": 1.0}\n', b'{"do": "run", "weight": NaN}\n', b'{"do": "run", "gpus": 0}\n',
    b'{"do": "run", "gpus": []}\n', b'{"do": "run", "memsize": ["1GiB"]}\n', b'{"do": "run", "highprio": 1}\n',
    b'{"do": "run", "colour": 1}\n', b'{"do": "run", "user": "root"}\n', b'{"do": "run", "user": 4294967295}\n',
    b'{"do": "run", "memsize": [' + b"9" * 5000 + b"]}\n",
    b'{"do": "run", "gpus": [' + b"0," * 64 + b"0]}\n",
]  # fmt: skip


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
async def test_bad_requests_are_refused_in_one_line(open_desk: Any, world: Any, data: bytes) -> None:
    desk = await open_desk()
    reply = await desk.raw(data)
    assert reply["ok"] is False and reply["errno"] == "EINVAL" and reply["error"]
    assert "\n" not in reply["error"] and len(reply["error"]) < 200
    assert not world.state.instances


async def test_several_requests_on_one_connection_also_in_pieces(open_desk: Any) -> None:
    desk = await open_desk()
    async with await desk.connect() as stream:
        await stream.send_all(b'{"do": "list"}\n{"do": "nonsense"}\n{"do": ')
        assert [json.loads(one)["ok"] for one in await lines(stream, 2)] == [True, False]
        await stream.send_all(b'"list"}\n')
        assert json.loads(await line(stream))["ok"]


async def lines(stream: trio.SocketStream, count: int) -> list[bytes]:
    data = b""
    with trio.fail_after(5):
        while data.count(b"\n") < count:
            data += await stream.receive_some(65536)
    return data.splitlines()


async def test_a_request_without_end_is_cut(open_desk: Any) -> None:
    desk = await open_desk()
    async with await desk.connect() as stream:
        await stream.send_all(b"x" * (control.LINE_LIMIT + 1))
        reply = json.loads(await line(stream))
        assert reply["errno"] == "EMSGSIZE"
        with trio.fail_after(5):
            assert await stream.receive_some(1) == b""


async def test_a_reader_that_does_not_read_holds_up_nobody(open_desk: Any, monkeypatch: Any, caplog: Any) -> None:
    monkeypatch.setattr(control, "WRITE_SECONDS", 0.1)
    desk = await open_desk()
    big = {"gpus": ["x" * 4_000_000]}
    desk.control.status = lambda: big
    async with await desk.connect() as slow:
        await slow.send_all(b'{"do": "status"}\n')
        assert (await desk.ask("list"))["ok"]
        with trio.fail_after(5):
            while "does not read its answer" not in caplog.text:
                await trio.sleep(0.01)


async def test_a_silent_client_is_hung_up_on(open_desk: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(control, "IDLE_SECONDS", 0.05)
    desk = await open_desk()
    async with await desk.connect() as stream:
        await stream.send_all(b'{"do":')
        with trio.fail_after(5):
            assert await stream.receive_some(1) == b""


async def test_one_users_connections_are_few(open_desk: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(control, "CONNECTIONS_OF_A_USER", 2)
    desk = await open_desk()
    desk.become(1000)
    first, second = await desk.connect(), await desk.connect()
    async with first, second:
        await first.send_all(b'{"do": "list"}\n')
        await second.send_all(b'{"do": "list"}\n')
        await line(first)
        await line(second)
        async with await desk.connect() as third:
            with trio.fail_after(5):
                answer = json.loads(await line(third))
                assert answer["errno"] == "EAGAIN" and "uid 1000 has 2 of at most 2" in answer["error"]
                assert await third.receive_some(1) == b""
        desk.become(1001)
        assert (await desk.ask("list"))["ok"], "another user's"
    with trio.fail_after(5):
        while desk.server._users:  # nobody is remembered
            await trio.sleep(0.01)


async def test_root_does_not_wait_for_a_user_database_that_hangs(open_desk: Any) -> None:
    desk = await open_desk(group="gpu")
    hang = threading.Event()
    object.__setattr__(desk.control.access, "lookup", lambda name: hang.wait(10) and None)
    desk.become(1000, 1000)
    async with trio.open_nursery() as asking:
        try:
            for number in range(3):
                asking.start_soon(partial(desk.ask, "create", id=f"user{number}", memsize=[GIB]))
            await trio.testing.wait_all_tasks_blocked(0.05)
            desk.become(0)
            assert (await desk.ask("create", id="root", memsize=[GIB]))["ok"]
            assert not hang.is_set()
        finally:
            hang.set()


async def test_other_users_together_leave_room_for_root(open_desk: Any, monkeypatch: Any) -> None:
    """A user can have many uids (those of his user namespaces), and so many times one user's connections."""
    monkeypatch.setattr(control, "CONNECTIONS_OF_OTHERS", 3)
    desk = await open_desk()
    streams = []
    for uid in (1000, 1001, 1002):
        desk.become(uid)
        streams.append(await desk.connect())
        await streams[-1].send_all(b'{"do": "list"}\n')
        assert json.loads(await line(streams[-1]))["ok"]
    desk.become(1003)
    answer = await desk.ask("list")
    assert answer["errno"] == "EAGAIN" and "all users 3 of 3" in answer["error"]
    desk.become(0)
    for _ in range(5):
        assert (await desk.ask("list"))["ok"]
    for stream in streams:
        await stream.aclose()


async def test_what_others_are_refused_does_not_fill_the_log(open_desk: Any, caplog: Any) -> None:
    desk = await open_desk(group="gpu")
    for uid in (1000, 0):
        desk.become(uid, GROUP)
        caplog.clear()
        for _ in range(30):
            assert (await desk.ask("create", id="one", gpus=[7], memsize=[GIB]))["errno"] == "EINVAL"
        lines = [record.getMessage() for record in caplog.records if "refused" in record.getMessage()]
        assert len(lines) == (30 if uid == 0 else 10) and all(f"uid={uid} " in text for text in lines)


async def test_a_bug_costs_one_connection(open_desk: Any, caplog: Any) -> None:
    desk = await open_desk()

    def bug() -> dict[str, Any]:
        raise RuntimeError("bug")

    desk.control.status = bug
    async with await desk.connect() as stream:
        await stream.send_all(b'{"do": "status"}\n')
        with trio.fail_after(5):
            assert await stream.receive_some(1) == b""
    assert (await desk.ask("list"))["ok"]
    assert "connection failed" in caplog.text


async def test_a_left_over_socket_is_replaced_and_removed(open_desk: Any, world: Any) -> None:
    with socket.socket(socket.AF_UNIX) as stale:
        stale.bind(str(world.runtime / "control.sock"))
    desk = await open_desk()
    assert (await desk.ask("list"))["ok"]


async def test_a_file_in_the_sockets_place_is_not(world: Any) -> None:
    desk = Desk(world, ControlConfig())
    desk.path.write_text("mine")
    with pytest.raises(UserError, match="cannot listen at .*control.sock: not a socket"):
        await desk.server.serve()
    assert desk.path.read_text() == "mine"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can take groups on")
async def test_supplementary_groups_are_the_kernels(tmp_path: Path) -> None:
    code = "import socket, sys; s = socket.socket(socket.AF_UNIX); s.connect(sys.argv[1]); sys.stdin.read()"
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(str(tmp_path / "sock"))
        listener.listen()
        listener.settimeout(10)
        with subprocess.Popen([sys.executable, "-c", code, str(tmp_path / "sock")], stdin=subprocess.PIPE,
                              extra_groups=[GROUP, 4712]) as process:  # fmt: skip
            accepted, _ = listener.accept()
            with accepted:
                peer = identify(accepted)
            peer.close()
            process.kill()
        assert (peer.pid, peer.groups) == (process.pid, frozenset({os.getgid(), GROUP, 4712}))


async def test_who_is_asked_of_the_kernel(world: Any) -> None:
    ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
    with ours, theirs:
        peer = identify(ours)
        try:
            assert (peer.pid, peer.uid) == (os.getpid(), os.getuid())
            assert peer.groups == frozenset({os.getgid(), *os.getgroups()})
            assert "pidfd" in os.readlink(f"/proc/self/fd/{peer.pidfd}")
        finally:
            peer.close()
