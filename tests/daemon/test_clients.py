"""The client socket: what is answered, what is handed out, and what each kind of misuse costs whom."""

import logging
import os
import random
import signal
import socket
import stat
import struct
import subprocess
import sys
import textwrap
from contextlib import suppress
from errno import EACCES, EAGAIN, EPROTO
from fcntl import F_GET_SEALS, F_SEAL_SHRINK, fcntl
from typing import Any

import pytest
import trio
import trio.testing

from cgpusched.commands import Create, Destroy, SetMemsize
from cgpusched.daemon.server import wire
from cgpusched.errors import CommandError

GIB = 1 << 30
HELLO = struct.pack("<IIII48x", 0x75706763, 1, 4242, 0)
INFO = struct.pack("<IIII48x", 0x75706763, 1, 4242, 1)


def create(world: Any, ident: str = "one", **more: Any) -> Any:
    world.system.apply(Create(ident, more.pop("gpus", (0,)), more.pop("memsize", (GIB,)), **more))
    return world.clients.socket(ident)


def slots(world: Any, ident: str = "one") -> list[int]:
    return [len(region.slots) for region in world.gate.regions if region.id == ident]


async def test_welcome_tells_every_gpu_in_the_programs_order(world: Any, join: Any) -> None:
    path = create(world, gpus=(1, 0), memsize=(3 * GIB, 4 * GIB))
    with trio.fail_after(5):
        program = await join(path)
    assert len(program.welcome) == 280 + 48 * 16
    assert program.head == (0x75706763, 1, 0, 2, "one", "")
    for position, (index, limit) in enumerate(((1, 3 * GIB), (0, 4 * GIB))):
        uuid, gpu, slot, generation, mem_limit, mem_total = program.gpu(position)
        assert uuid.hex() == f"0000000{index}111122223333444444444444"
        assert (gpu, mem_limit, mem_total) == (index, limit, 24 * GIB)
        assert world.gate.regions[position].slots == {slot: generation}
    assert program.welcome[280 + 96 :] == bytes(48 * 14)


async def test_native_gpus_are_told_of_and_come_with_nothing(world: Any, join: Any) -> None:
    path = create(world, gpus=(1,), memsize=(3 * GIB,), native=(0,))
    program = await join(path)
    assert program.head == (0x75706763, 1, 0, 1, "one", "") and len(program.fds) == 4
    assert program.gpu(0)[1] == 1
    uuid, gpu, slot, generation, flags, limit, total = wire.WELCOME_GPU.unpack_from(program.welcome, 280 + 48)
    assert uuid.hex() == "00000000111122223333444444444444"
    assert (gpu, slot, generation, flags, limit, total) == (0, 0, 0, wire.GPU_NATIVE, 0, 24 * GIB)
    assert [region.gpu for region in world.gate.regions] == [1]


async def test_limits_name_native_gpus_in_the_programs_order(world: Any) -> None:
    path = create(world, gpus=(1,), memsize=(3 * GIB,), native=(0,))
    native, shared = (world.state.gpus[index].uuid for index in range(2))
    assert (path.parent / "limits").read_text() == f"{native} native\n{shared} {3 * GIB}\n"
    world.system.apply(SetMemsize(1, "one", GIB))
    assert (path.parent / "limits").read_text() == f"{native} native\n{shared} {GIB}\n"


async def test_descriptors_are_agent_then_control_report_bell_of_each_gpu(world: Any, join: Any) -> None:
    program = await join(create(world, gpus=(0, 1)))
    names = [os.readlink(f"/proc/self/fd/{fd}").split(" ")[0] for fd in program.fds]
    assert names[0].startswith("socket:")
    assert names[1:] == ["/memfd:ctl", "/memfd:report", "anon_inode:[eventfd]"] * 2
    assert [os.fstat(program.fds[i]).st_size for i in (1, 2)] == [4096, 4096 + 512 * 256]
    assert all(fcntl(program.fds[i], F_GET_SEALS) & F_SEAL_SHRINK for i in (1, 2)), "a shrunk page would kill us"


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
@pytest.mark.parametrize("owner", [0, 4711])
async def test_a_socket_is_not_for_others_to_fill(world: Any, owner: int) -> None:
    """Who may not attach must not be able to take up the connections of those who may: root's own likewise."""
    path = create(world, owner=owner)
    assert (stat.S_IMODE(path.stat().st_mode), path.stat().st_uid) == (0o600, owner)
    code = """if True:
        import os, socket, sys
        os.chdir(sys.argv[1])  # as root: the test's own folders are root's alone, and so may this Python be
        os.setgroups([])
        os.setresuid(*[int(sys.argv[2])] * 3)
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET).connect("gate.sock")
    """
    for uid in (0, 4711, 4712):
        command = [sys.executable, "-c", code, str(path.parent), str(uid)]
        done = await trio.run_process(command, check=False, capture_stderr=True)
        assert (done.returncode == 0) is (uid in (0, owner)), done.stderr
        assert done.returncode == 0 or b"PermissionError" in done.stderr


async def test_folder_and_limits_are_everybodys_to_reach_and_a_containers_socket(world: Any) -> None:
    world.clients._container = lambda ident: ident == "one"
    path = create(world, gpus=(0, 1), memsize=(GIB, 2 * GIB))
    assert stat.S_IMODE(path.stat().st_mode) == 0o666
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o711
    limits = path.parent / "limits"
    assert stat.S_IMODE(limits.stat().st_mode) == 0o644
    uuids = [gpu.uuid for gpu in world.state.gpus.values()]
    assert limits.read_text() == f"{uuids[0]} {GIB}\n{uuids[1]} {2 * GIB}\n"
    world.system.apply(SetMemsize(1, "one", 5 * GIB))
    assert limits.read_text() == f"{uuids[0]} {GIB}\n{uuids[1]} {5 * GIB}\n"
    assert sorted(os.listdir(path.parent)) == ["gate.sock", "limits"]


async def test_an_id_longer_than_a_socket_address(world: Any, join: Any, until: Any) -> None:
    ident = "x" * 128
    path = create(world, ident)
    assert len(str(path)) < 108 < len(str(world.clients.folder(ident)))
    program = await join(path)
    assert program.head[2:5] == (0, 1, ident)
    assert (path.parent / "limits").read_text().endswith(f" {GIB}\n")
    program.close()
    await until(lambda: world.clients.count(ident) == 0)
    world.system.apply(Destroy(ident))
    assert os.listdir(world.runtime / "inst") == []


async def test_end_of_the_connection_detaches(world: Any, join: Any, until: Any) -> None:
    program = await join(create(world))
    assert slots(world) == [1] and world.clients.count("one") == 1
    program.close()
    await until(lambda: slots(world) == [0])
    assert world.clients.count("one") == 0 and world.detached == ["one"]


CLIENT = """
    import os, socket, struct, sys
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    sock.connect(sys.argv[1])
    sock.send(struct.pack("<IIII48x", 0x75706763, 1, os.getpid(), 0))
    sock.recv(65536)
    if sys.argv[2] == "fork" and os.fork() == 0:  # the child holds a copy of the connection
        print(os.getpid(), flush=True)
        sys.stdin.read()
        os._exit(0)
    if sys.argv[2] != "fork":
        print("joined", flush=True)
    while True:
        import time; time.sleep(1000)
"""


def spawn(path: Any, mode: str) -> "subprocess.Popen[str]":
    return subprocess.Popen([sys.executable, "-c", textwrap.dedent(CLIENT), str(path), mode], text=True,
                            stdin=subprocess.PIPE, stdout=subprocess.PIPE)  # fmt: skip


async def test_sigkill_detaches_and_leaves_others_alone(world: Any, join: Any, until: Any) -> None:
    path = create(world)
    await join(path)
    with spawn(path, "plain") as process:
        try:
            assert process.stdout is not None
            assert await trio.to_thread.run_sync(process.stdout.readline) == "joined\n"
            assert [a.pid for a in world.system.attached("one")] == [os.getpid(), process.pid]
        finally:
            process.send_signal(signal.SIGKILL)
        await until(lambda: slots(world) == [1])
        assert [a.pid for a in world.system.attached("one")] == [os.getpid()]


async def test_death_counts_although_a_child_holds_the_connection(world: Any, until: Any) -> None:
    path = create(world)
    with spawn(path, "fork") as process:
        try:
            assert process.stdout is not None
            child = int(await trio.to_thread.run_sync(process.stdout.readline))
            assert slots(world) == [1]
        finally:
            process.kill()
        await until(lambda: slots(world) == [0])
        os.kill(child, 0)  # it lives, and has the socket still


GARBAGE = [
    (HELLO[:63], "short"),
    (HELLO + b"x", "long"),
    (b"\0" * 64, "magic"),
    (b"A" * 60000, "huge"),
]


@pytest.mark.parametrize("data", [data for data, _ in GARBAGE], ids=[name for _, name in GARBAGE])
async def test_a_bad_hello_is_hung_up_on_and_logged(world: Any, join: Any, caplog: Any, data: bytes) -> None:
    path = create(world)
    good = await join(path)
    with trio.fail_after(5):
        bad = await join(path, data, receive=False)
        assert await bad.sock.recv(100) == b""
    assert [r.levelname for r in caplog.records if "client dropped" in r.message] == ["WARNING"]
    assert f"instance=one pid={os.getpid()}" in caplog.text
    assert slots(world) == [1] and good.fds


@pytest.mark.parametrize("size", [8, 16, 64, 200])
async def test_a_hello_of_another_version_is_told_so(world: Any, join: Any, caplog: Any, size: int) -> None:
    """Magic and version stand at the head of every version's hello; what follows may be of any form."""
    path = create(world)
    program = await join(path, struct.pack("<II", 0x75706763, 2).ljust(size, b"\xff"))
    assert program.head[:3] == (0x75706763, 1, EPROTO) and program.head[5] == "ABI version 2 where 1 is due"
    with trio.fail_after(5):
        assert await program.sock.recv(100) == b""
    assert ["ABI version 2 where 1 is due" in r.message for r in caplog.records if r.levelname == "WARNING"] == [True]
    assert slots(world) == [0] and not program.fds


async def test_fuzzed_hellos_change_nothing(world: Any, join: Any, until: Any) -> None:
    path, dice = create(world), random.Random(7)
    good = await join(path)
    for _ in range(200):
        data = bytearray(HELLO if dice.random() < 0.7 else dice.randbytes(dice.randrange(1, 200)))
        data[dice.randrange(min(8, len(data)))] ^= 1 << dice.randrange(8)  # never a good head
        with trio.fail_after(5):
            bad = await join(path, bytes(data), receive=False)
            answer = await bad.sock.recv(100)
        bad.close()
        assert answer == b"" or struct.unpack_from("<IIi", answer) == (0x75706763, 1, EPROTO)
        assert (answer == b"") == (len(data) < 8 or data[:4] != HELLO[:4])
    assert slots(world) == [1] and good.fds
    again = await join(path)
    assert again.head[2] == 0


async def test_log_lines_a_tenant_can_provoke_are_few(world: Any, join: Any, caplog: Any) -> None:
    path = create(world)
    for _ in range(50):
        bad = await join(path, b"junk", receive=False)
        await bad.sock.recv(1)
        bad.close()
    assert sum("client dropped" in record.message for record in caplog.records) == 10


async def test_talking_after_the_hello_ends_the_connection(world: Any, join: Any, until: Any, caplog: Any) -> None:
    program = await join(create(world))
    await program.sock.send(b"more")
    await until(lambda: slots(world) == [0])
    await until(lambda: 'reason="it sent more than a hello"' in caplog.text)


def flags(program: Any) -> int:
    return int(wire.WELCOME_GPU.unpack_from(program.welcome, 280)[4])


@pytest.fixture
def counted(world: Any) -> list[tuple[int, int]]:
    """What the clients had counted: GPU and pid."""
    asked: list[tuple[int, int]] = []

    async def take_in(gpu: int, pid: int) -> None:
        asked.append((gpu, pid))

    world.clients._take_in = take_in
    return asked


async def test_a_note_is_answered_when_it_was_taken_in(world: Any, join: Any, counted: Any) -> None:
    program = await join(create(world, gpus=(1,)))
    assert flags(program) == wire.GPU_NOTES
    with trio.fail_after(5):
        for number in (1, 7, 2**32 - 1):
            note = wire.note(wire.Note(1, number))
            await program.sock.send(note)
            assert await program.sock.recv(100) == note
    assert counted == [(1, os.getpid())] * 3 and slots(world) == [1]


@pytest.mark.parametrize("hello, gpu, reason", [(HELLO, 0, "nobody asked for"), (INFO, 1, "nobody asked for")])
async def test_a_note_out_of_place_ends_the_connection(
    world: Any, join: Any, until: Any, counted: Any, caplog: Any, hello: bytes, gpu: int, reason: str
) -> None:
    program = await join(create(world, gpus=(1,)), hello)
    await program.sock.send(wire.note(wire.Note(gpu, 1)))
    with trio.fail_after(5):
        assert await program.sock.recv(100) == b""
    await until(lambda: reason in caplog.text)
    assert slots(world) == [0] and not counted


async def test_without_an_audit_no_notes_are_taken(world: Any, join: Any, until: Any) -> None:
    program = await join(create(world))
    assert flags(program) == 0
    await program.sock.send(wire.note(wire.Note(0, 1)))
    await until(lambda: slots(world) == [0])


async def test_who_never_reads_the_answers_is_dropped(
    world: Any, join: Any, until: Any, counted: Any, caplog: Any
) -> None:
    program = await join(create(world))

    async def talk() -> None:
        with suppress(OSError):
            while True:
                await program.sock.send(wire.note(wire.Note(0, 1)))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            nursery.start_soon(talk)
            await until(lambda: slots(world) == [0], 15)
            nursery.cancel_scope.cancel()
    await until(lambda: "does not read" in caplog.text)


async def test_who_counts_processes_as_nvml_does_is_told(world: Any, join: Any) -> None:
    world.clients._alike = lambda pid: pid == os.getpid()
    assert flags(await join(create(world))) == wire.GPU_PIDS
    assert flags(await join(create(world, "two"), INFO)) == wire.GPU_PIDS


async def test_sent_descriptors_are_dropped(world: Any, join: Any, until: Any) -> None:
    path = create(world)
    before = set(os.listdir("/proc/self/fd"))
    sock = trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    with sock, open("/dev/null") as null:
        await sock.connect(str(path))
        await sock.sendmsg([HELLO], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("=i", null.fileno()))])
        assert len(await sock.recv(65536)) == wire.WELCOME_SIZE
        names = [os.readlink(f"/proc/self/fd/{fd}") for fd in set(os.listdir("/proc/self/fd")) - before
                 if os.path.lexists(f"/proc/self/fd/{fd}")]  # fmt: skip
        assert names.count("/dev/null") == 1


async def test_300_at_once(world: Any, join: Any, until: Any) -> None:
    path, programs = create(world), []

    async def one() -> None:
        programs.append(await join(path))

    with trio.fail_after(20):
        async with trio.open_nursery() as nursery:
            for _ in range(300):
                nursery.start_soon(one)
    assert all(program.head[2] == 0 and len(program.fds) == 4 for program in programs)
    assert len({program.gpu(0)[2] for program in programs}) == 300
    assert slots(world) == [300]
    for program in programs:
        program.close()
    await until(lambda: slots(world) == [0])


async def test_a_full_instance_says_so_and_others_are_served(world: Any, join: Any, caplog: Any) -> None:
    world.gate.slots_max = 2
    path, other = create(world), create(world, "two")
    for _ in range(2):
        assert (await join(path)).head[2] == 0
    third = await join(path)
    assert third.head[2] == EAGAIN and "no slot is free" in third.head[5] and not third.fds
    assert (await join(other)).head[2] == 0
    assert "client refused" in caplog.text


async def test_silent_connections_hold_up_their_own_instance_only(world: Any, join: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("cgpusched.daemon.server.clients.CONNECTIONS", 3)
    path, other = create(world), create(world, "two")
    silent = [await join(path, b"", receive=False) for _ in range(3)]
    waiting = await join(path, receive=False)
    with trio.move_on_after(0.2) as patience:
        await waiting.receive()
    assert patience.cancelled_caught, "it was let in beyond the limit"
    with trio.fail_after(5):
        assert (await join(other)).head[2] == 0
        silent[0].close()
        await waiting.receive()
    assert waiting.head[2] == 0


async def test_a_silent_connection_is_closed_in_time(world: Any, join: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("cgpusched.daemon.server.clients.HELLO_SECONDS", 0.05)
    silent = await join(create(world), b"", receive=False)
    with trio.fail_after(5):
        assert await silent.sock.recv(1) == b""


async def test_accepting_is_paced(world: Any, join: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr("cgpusched.daemon.server.clients.BURST", 4)
    monkeypatch.setattr("cgpusched.daemon.server.clients.RATE", 50.0)
    path = create(world)
    world.clients._doors["one"].tokens = 4.0
    began = trio.current_time()
    for _ in range(9):
        (await join(path)).close()
    assert trio.current_time() - began >= 0.08, "five beyond the burst at 50 a second take 100 ms"


async def test_info_processes_get_pages_and_no_slot(world: Any, join: Any) -> None:
    program = await join(create(world), struct.pack("<IIII48x", 0x75706763, 1, 1, 1))
    assert program.head[2:4] == (0, 1) and len(program.fds) == 4
    assert program.gpu(0)[2:4] == (0, 0)
    assert slots(world) == [0] and world.clients.count("one") == 0


@pytest.mark.parametrize(
    ("owner", "container", "refusal"),
    [(1000, False, ""), (2000, False, "instance one belongs to uid 2000"), (0, False, "instance one belongs to root"),
     (0, True, "")],
)  # fmt: skip
async def test_a_users_instance_is_that_users(
    world: Any, join: Any, owner: int, container: bool, refusal: str
) -> None:
    """Also for those who were handed a connection. A container's programs have any uid."""
    from cgpusched.daemon.server.peers import identify

    def as_1000(sock: socket.socket) -> Any:
        peer = identify(sock)
        peer.uid = 1000
        return peer

    world.clients._who = as_1000
    world.clients._container = lambda ident: container
    program = await join(create(world, owner=owner))
    assert (program.head[2], program.head[5]) == (EACCES if refusal else 0, refusal)


async def test_destroy_hangs_up_and_removes_the_folder(world: Any, join: Any, until: Any) -> None:
    path = create(world)
    program = await join(path, INFO)  # an NVML-only process has no turn to lose
    world.system.apply(Destroy("one"))
    with trio.fail_after(5):
        assert await program.sock.recv(1) == b""
    assert not path.parent.exists() and world.clients.count("one") == 0
    await join(create(world))  # the name is free again


async def test_an_instance_without_a_socket_is_not_made(world: Any) -> None:
    (world.runtime / "inst").rmdir()
    with pytest.raises(CommandError, match="create one: "):
        create(world)
    assert not world.state.instances and not world.gate.regions


async def test_close_keeps_the_limits(world: Any) -> None:
    path = create(world)
    world.clients.close()
    assert os.listdir(path.parent) == ["limits"]


async def test_nothing_leaks(world: Any, join: Any, until: Any) -> None:
    path = create(world)
    (await join(path)).close()
    await until(lambda: slots(world) == [0])
    await trio.testing.wait_all_tasks_blocked()
    before = len(os.listdir("/proc/self/fd"))
    for hello in [HELLO] * 30 + [b"junk"] * 10:
        program = await join(path, hello, receive=hello is HELLO)
        program.close()
    await until(lambda: slots(world) == [0])
    await trio.testing.wait_all_tasks_blocked()
    assert len(os.listdir("/proc/self/fd")) == before


@pytest.fixture(autouse=True)
def levels(caplog: Any) -> None:
    caplog.set_level(logging.INFO)
