"""Containers from create to their end: what is registered, what is refused, and that nothing stays."""

import dataclasses
import errno
import json
import logging
import os
import socket
import stat
import struct
import sys
from pathlib import Path
from typing import Any

import pytest
import trio
import trio.testing

from cgpusched.commands import Create, Destroy, SetMaxInst, SetWeight
from cgpusched.containers import wire
from cgpusched.daemon.containers import book as module
from cgpusched.daemon.containers import places
from cgpusched.daemon.containers.runtime import RuntimeServer
from cgpusched.daemon.server.peers import Peer
from cgpusched.driver.find import packaged

ASKING = Path(__file__).parent / "asking.py"
ID = "0123456789abcdef" * 4
OTHER = "fedcba9876543210" * 4
MIB = 1 << 20


async def running(world: Any, id: str = ID, *wrapper: str, **variables: object) -> Any:
    """A container that was made, with its runtime gone; its first process."""
    bundle = world.bundle(**variables)
    made = await world.create(id, bundle)
    assert made.status == 1, made
    first = await world.first(*wrapper)
    assert (await world.hook(id, first.pid)).status == 1
    await made.end()
    return first


# Create


async def test_create_registers_and_edits(world: Any) -> None:
    made = await world.create(ID)
    assert (made.status, made.text) == (1, "")
    instance = world.system.state.instances[ID]
    assert {gpu: share.memsize for gpu, share in instance.shares.items()} == {0: 6043 * MIB, 1: 6043 * MIB}
    assert {(share.weight, share.highprio) for share in instance.shares.values()} == {(1, False)}
    assert (instance.owner, instance.ephemeral) == (0, False)
    assert world.marks == [ID]
    assert "NVIDIA_VISIBLE_DEVICES=all" in made.spec["process"]["env"]
    binds = {mount["destination"]: mount for mount in made.spec["mounts"]}
    run, lib = world.places.runtime, world.base / "lib"
    assert {place: mount["source"] for place, mount in binds.items()} == {
        "/usr/local/cgpu/lib": str(lib),
        "/usr/local/cgpu/lib/real": str(run / "real"),
        "/usr/local/cgpu/lib/real/libcuda.so.1": str(world.base / "driver/libcuda.so.550"),
        "/usr/local/cgpu/lib/real/libnvidia-ml.so.1": str(world.base / "driver/libnvidia-ml.so.550"),
        "/usr/local/cgpu/sock": str(run / "inst" / ID),
        "/usr/local/cgpu/sim": str(run / "sim"),
        "/run/cgpu": str(run / "view" / ID),
    }
    writable = [place for place, mount in binds.items() if "ro" not in mount["options"]]
    assert writable == ["/usr/local/cgpu/sim"]
    no_program = [place for place, mount in binds.items() if "noexec" in mount["options"]]
    assert sorted(no_program) == ["/run/cgpu", "/usr/local/cgpu/sim", "/usr/local/cgpu/sock"]
    assert made.spec["hooks"]["createRuntime"] == [
        {"path": str(world.places.binary), "args": ["cgpu-runtime", "hook"]}]
    assert made.spec["root"] == {"path": "rootfs"}


async def test_weight_priority_and_gpus(world: Any) -> None:
    bundle = world.bundle(ALIYUN_COM_GPU_SCHD_WEIGHT=3, ALIYUN_COM_GPU_HIGH_PRIO=1, ALIYUN_COM_GPU_VISIBLE_DEVICES=1,
                          NVIDIA_VISIBLE_DEVICES="0,1", ALIYUN_COM_GPU_MEM_CONTAINER="2")
    made = await world.create(ID, bundle)
    shares = world.system.state.instances[ID].shares
    assert list(shares) == [1] and (shares[1].weight, shares[1].highprio) == (3, True)
    assert "NVIDIA_VISIBLE_DEVICES=0,1" in made.spec["process"]["env"]


async def test_mixed_mode_reaches_the_container_s_programs(world: Any) -> None:
    bundle = world.bundle(ALIYUN_COM_GPU_VISIBLE_DEVICES=1, NVIDIA_VISIBLE_DEVICES="0,1")
    made = await world.create(ID, bundle)
    instance = world.system.state.instances[ID]
    assert (list(instance.shares), instance.native, instance.seen) == ([1], (0,), (0, 1))
    assert "NVIDIA_VISIBLE_DEVICES=0,1" in made.spec["process"]["env"]
    native, shared = (world.system.state.gpus[index].uuid for index in range(2))
    limits = (world.clients.folder(ID) / "limits").read_text()
    assert limits == f"{native} native\n{shared} {6043 * MIB}\n"
    client = await world.attach(ID)
    assert client.error == 0
    assert [gpu.id for gpu in world.system.state.on_gpu(0)] == []
    client.sock.close()


@pytest.mark.parametrize("variables", [
    {"ALIYUN_COM_GPU_MEM_CONTAINER": None, "ALIYUN_COM_GPU_SCHD_WEIGHT": 3}, {"CGPU_DISABLE": "true"},
    {"ALIYUN_COM_GPU_MEM_CONTAINER": "1,0"},
])  # fmt: skip
async def test_off_is_none_of_ours(world: Any, variables: Any, caplog: pytest.LogCaptureFixture) -> None:
    made = await world.create("any/name at all", world.bundle(**variables))
    assert (made.status, made.text, made.spec) == (0, "", None)
    assert world.ids == world.marks == []
    warned = any("container without cGPU" in line for line in caplog.messages)
    assert warned is (variables.get("ALIYUN_COM_GPU_MEM_CONTAINER") != "1,0")


async def test_an_image_cannot_disable_it_where_that_is_configured(world: Any) -> None:
    world.containers._ignore_disable = True
    made = await world.create(ID, world.bundle(CGPU_DISABLE="true"))
    assert made.status == 1 and world.ids == [ID]


@pytest.mark.parametrize(("id", "variables", "code", "words"), [
    (ID, {"ALIYUN_COM_GPU_MEM_CONTAINER": "abc"}, errno.EINVAL, "ALIYUN_COM_GPU_MEM_CONTAINER='abc'"),
    (ID, {"ALIYUN_COM_GPU_MEM_DEV": None}, errno.EINVAL, "ALIYUN_COM_GPU_MEM_DEV is not set"),
    (ID, {"ALIYUN_COM_GPU_VISIBLE_DEVICES": 7}, errno.EINVAL, "is no GPU of this node"),
    (ID, {"ALIYUN_COM_GPU_SCHD_WEIGHT": 99}, errno.EINVAL, "an integer 1-20 is allowed"),
    ("policy", {}, errno.EINVAL, "is no instance ID"),
    ("bad+name", {}, errno.EINVAL, "is no instance ID"),
    ("x" * 129, {}, errno.EINVAL, "is no instance ID"),
    (ID[:12] + "f" * 52, {}, errno.EEXIST, f"the first 12 characters are those of instance {ID[:12]}-bare"),
])  # fmt: skip
async def test_refused(world: Any, id: str, variables: Any, code: int, words: str) -> None:
    if code == errno.EEXIST:
        world.system.apply(Create(f"{ID[:12]}-bare", (0,), (MIB,)))
    before = world.ids
    made = await world.create(id, world.bundle(**variables))
    assert made.status == -code and words in made.text and "\n" not in made.text and made.spec is None
    assert world.ids == before and world.marks == []


async def test_exhausted(world: Any) -> None:
    world.system.apply(Create("big", (0,), (10000 * MIB,), 18))
    memory = await world.create(ID)
    assert memory.status == -errno.ENOSPC and "more than GPU 0 has unallotted" in memory.text
    small = {"ALIYUN_COM_GPU_MEM_CONTAINER": 1}
    weight = await world.create(ID, world.bundle(ALIYUN_COM_GPU_SCHD_WEIGHT=3, **small))
    assert weight.status == -errno.ENOSPC and "weight=3 is more than is free on GPU 0" in weight.text
    world.system.apply(SetWeight(0, "big", 1))
    world.system.apply(SetMaxInst(0, 1))
    full = await world.create(ID, world.bundle(**small))
    assert full.status == -errno.ENOSPC and "GPU 0 is full: max_inst is 1" in full.text
    assert world.ids == ["big"] and world.marks == []


@pytest.mark.parametrize("spoil", [
    lambda path: path.unlink(), lambda path: path.write_text("{"), lambda path: path.write_text("[]"),
    lambda path: (path.unlink(), path.mkdir()), lambda path: (path.unlink(), os.mkfifo(path)),
    lambda path: path.write_text('{"process": {"env": [1]}}'),
    lambda path: os.truncate(path, (16 << 20) + 1),
])  # fmt: skip
async def test_a_spoilt_configuration(world: Any, spoil: Any) -> None:
    bundle = world.bundle()
    spoil(bundle / "config.json")
    made = await world.create(ID, bundle)
    assert made.status < 0 and "config.json" in made.text
    assert world.ids == world.marks == []


async def test_an_edit_that_fails_leaves_nothing(world: Any) -> None:
    bundle = world.bundle()
    config = json.loads((bundle / "config.json").read_text()) | {"mounts": "none"}
    (bundle / "config.json").write_text(json.dumps(config))
    made = await world.create(ID, bundle)
    assert made.status == -errno.EINVAL and "mounts is a string" in made.text
    assert world.ids == world.marks == []


async def test_a_mark_that_cannot_be_made_leaves_nothing(world: Any) -> None:
    os.rmdir(world.places.runtime / "ct")
    made = await world.create(ID)
    assert made.status == -errno.ENOENT and f"ct/{ID}" in made.text
    assert world.ids == []


# The life of one


async def test_a_runtime_that_ends_without_the_hook(world: Any, until: Any) -> None:
    made = await world.create(ID)
    assert world.ids == [ID]
    await made.end()
    await until(lambda: not world.ids)
    assert world.marks == [] and not (world.places.runtime / "inst" / ID).exists()


async def test_one_who_stays_in_the_askers_place(world: Any) -> None:
    """podman's precreate hook ends at once; it names who goes on."""
    asker = await world.ask("create", ID, world.bundle(), "--parent")
    await asker.end()
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert world.ids == [ID]
    refused = await world.ask("create", OTHER, world.bundle(), "--null")
    assert refused.status == -errno.EINVAL and "no pidfd" in refused.text and world.ids == [ID]


async def test_it_lives_as_long_as_its_first_process(world: Any, until: Any) -> None:
    first = await running(world)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert world.ids == [ID], "the runtime's end no longer counts"
    await first.kill()
    await until(lambda: not world.ids)
    assert world.marks == []


ELF = b"\x7fELF\x02\x01" + bytes(10) + b"\x03\x00\x3e\x00"


async def test_what_the_hook_is_told(world: Any) -> None:
    bundle = world.bundle(LD_LIBRARY_PATH="/opt/lib:/usr/local/cuda/compat")
    for path in ("usr/lib64/libcuda.so.550.54", "opt/lib/libnvidia-ml.so.1", "opt/other/libcuda.so.1"):
        (bundle / "rootfs" / path).parent.mkdir(parents=True)
        (bundle / "rootfs" / path).write_bytes(ELF)
    os.symlink("libcuda.so.550.54", bundle / "rootfs/usr/lib64/libcuda.so.1")
    made = await world.create(ID, bundle)
    (bundle / "config.json").write_text(json.dumps(made.spec))
    first = await world.first()
    told = await world.hook(ID, first.pid)
    cuda, nvml = (str(world.base / "lib" / name) for name in ("libcuda.so.1", "libnvidia-ml.so.1"))
    rows = [tuple(line.split("\t")) for line in told.text.splitlines()]
    assert rows[0] == ("root", str(bundle / "rootfs"))
    assert sorted(rows[1:]) == [
        ("bind", cuda, "/opt/other/libcuda.so.1", "ro"),  # where no loader looks
        ("bind", cuda, "/usr/lib64/libcuda.so.550.54", "ro"),
        ("bind", nvml, "/opt/lib/libnvidia-ml.so.1", "ro"),
        ("bind", nvml, "/usr/lib64/libnvidia-ml.so.1", "ro"),  # where the loader looks there was none
    ]
    again = await world.hook(ID, first.pid)
    assert (again.status, again.text) == (0, ""), "the hook stands there twice: nothing is mounted twice"


@pytest.mark.parametrize(("mode", "folders", "merged"), [
    ("auto", 1, False), ("auto", 33, True), ("always", 1, True), ("never", 33, False)])
async def test_when_a_container_preloads(
    world: Any, mode: str, folders: int, merged: bool, caplog: pytest.LogCaptureFixture
) -> None:
    world.containers._places = dataclasses.replace(world.places, preload=mode)
    bundle = world.bundle(LD_LIBRARY_PATH=":".join(f"/opt/{number}" for number in range(folders)))
    (bundle / "rootfs/etc").mkdir(parents=True)
    (bundle / "rootfs/etc/ld.so.preload").write_text("/own.so")
    first = await world.first()
    told = await world.hook(ID, first.pid)
    file = world.clients.folder(ID) / "ld.so.preload"
    assert (f"bind\t{file}\t/etc/ld.so.preload\tro\n" in told.text) is merged is file.exists()
    assert not merged or file.read_text() == "/usr/local/cgpu/lib/libcgpu-preload.so.1\n/own.so"
    warned = any("driver not covered" in line and "preload is never" in line for line in caplog.messages)
    assert warned is (mode == "never")


async def test_an_image_full_of_drivers(world: Any) -> None:
    bundle = world.bundle()
    for number in range(300):
        folder = bundle / "rootfs/opt" / f"{number:03}{'x' * 200}"
        folder.mkdir(parents=True)
        (folder / "libcuda.so.1").write_bytes(ELF)
    first = await world.first()
    told = await world.hook(ID, first.pid)
    assert told.status == 1
    rows = [line.split("\t")[2] for line in told.text.splitlines()[1:]]
    usual = [f"/usr/lib/x86_64-linux-gnu/{name}" for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
    assert set(usual) <= set(rows)
    assert len([row for row in rows if row.startswith(("/opt", "/usr/lib/"))]) == places.COVERS_MAX
    assert told.text.endswith("/ld.so.preload\t/etc/ld.so.preload\tro\n")


async def test_an_image_whose_folders_lead_in_circles(world: Any) -> None:
    bundle = world.bundle()
    (bundle / "rootfs").mkdir()
    os.symlink("usr", bundle / "rootfs/usr")
    first = await world.first()
    told = await world.hook(ID, first.pid)
    assert told.status == 1 and told.text.splitlines()[-1].split("\t")[2] == (
        "/usr/lib/x86_64-linux-gnu/libnvidia-ml.so.1")  # fmt: skip


async def test_a_container_that_comes_by_the_hook_alone(world: Any, until: Any) -> None:
    """CDI: nobody has edited its configuration."""
    world.bundle(CGPU_CDI_DEVICE_1=1)
    first = await world.first()
    told = await world.hook(ID, first.pid)
    assert told.status == 1 and list(world.system.state.instances[ID].shares) == [1] and world.marks == [ID]
    binds = [line.split("\t")[2:] for line in told.text.splitlines() if line.startswith("bind\t")]
    mounts = [[mount.target, "rw" if mount.writable else "ro"] for mount in world.places.mounts(ID)]
    assert binds[: len(mounts)] == mounts and all("/usr/lib" in target for target, _ in binds[len(mounts) :])
    await first.kill()
    await until(lambda: not world.ids)


async def test_a_hook_of_a_container_that_is_none_of_ours(world: Any) -> None:
    world.bundle(ALIYUN_COM_GPU_MEM_CONTAINER=None)
    first = await world.first()
    told = await world.hook("a/plain name", first.pid)
    assert (told.status, told.text) == (0, "") and world.ids == []


@pytest.mark.parametrize("text", [
    "", "{", "[]", "{}", '{"id": "a", "pid": 0, "bundle": "/b"}', '{"id": "a", "pid": true, "bundle": "/b"}',
    '{"id": "a", "pid": 1, "bundle": "/b"}', '{"id": 3, "pid": 99, "bundle": "/b"}',
    '{"id": "a", "pid": 99, "bundle": "b"}', '{"id": "a", "pid": 99, "bundle": "/b\\u0000"}', "[" * 30000,
])  # fmt: skip
async def test_a_state_that_is_none(world: Any, text: str) -> None:
    told = await world.ask("hook", text)
    assert told.status == -errno.EINVAL and "state" in told.text


async def test_a_hook_whose_process_has_ended(world: Any, until: Any) -> None:
    made = await world.create(ID)
    first = await world.first()
    await first.kill()
    told = await world.hook(ID, first.pid)
    assert told.status == -errno.ESRCH and f"process {first.pid} has ended" in told.text
    await made.end()
    await until(lambda: not world.ids)


async def test_a_second_first_process_is_refused(world: Any) -> None:
    first = await running(world)
    other = await world.first()
    told = await world.hook(ID, other.pid)
    assert told.status == -errno.EEXIST and world.ids == [ID]
    assert first.process.poll() is None


async def test_a_runtime_that_never_runs_the_hook(
    world: Any, until: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(module, "HOOK_SECONDS", 0.05)
    made = await world.create(ID)
    await until(lambda: not world.ids)
    assert made.process.poll() is None
    assert any("did not run our hook" in line for line in caplog.messages)


async def test_restart_waits_for_the_former_life(world: Any, until: Any) -> None:
    first = await running(world)
    attached = await world.attach(ID)
    assert attached.error == 0
    await first.kill()
    await until(lambda: not world.containers._book[ID].alive)
    answers = []

    async def again() -> None:
        answers.append(await world.create(ID))

    async with trio.open_nursery() as nursery:
        nursery.start_soon(again)
        await trio.sleep(0.3)
        assert answers == []
        attached.sock.close()
    assert answers[0].status == 1 and world.ids == [ID] and world.marks == [ID]


async def test_restart_of_one_that_does_not_go(
    world: Any, until: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(module, "GO_SECONDS", 0.05)
    first = await running(world)
    attached = await world.attach(ID)
    alive = await world.create(ID)
    assert alive.status == -errno.EEXIST and "is registered already" in alive.text
    await first.kill()
    await until(lambda: not world.containers._book[ID].alive)
    busy = await world.create(ID)
    assert busy.status == -errno.EBUSY and "1 processes of its former life" in busy.text
    attached.sock.close()
    await until(lambda: not world.ids)
    assert (await world.create(ID)).status == 1


async def test_two_creates_at_once(world: Any) -> None:
    answers = []

    async def create() -> None:
        answers.append((await world.create(ID)).status)

    async with trio.open_nursery() as nursery:
        for _ in range(4):
            nursery.start_soon(create)
    assert sorted(answers) == [-errno.EEXIST] * 3 + [1] and world.ids == [ID]


async def test_delete(world: Any, until: Any) -> None:
    assert (await world.ask("delete", ID)).status == 0, "a plain container's"
    first = await running(world)
    assert (await world.ask("delete", ID)).status == 1
    assert world.ids == [ID], "it still runs, and the runtime may fail to end it"
    await first.kill()
    gone = await world.ask("delete", ID)
    assert gone.status in (0, 1) and world.ids == world.marks == [], "gone when delete is answered"


async def test_destroyed_by_an_administrator(world: Any) -> None:
    first = await running(world)
    world.system.apply(Destroy(ID))
    assert world.marks == [] and world.containers.viewers() == {}
    assert (await world.ask("delete", ID)).status == 0
    await first.kill()
    assert (await world.create(ID)).status == 1


async def test_many_come_and_go(world: Any, until: Any) -> None:
    before = len(os.listdir("/proc/self/fd"))
    small = world.bundle(ALIYUN_COM_GPU_MEM_CONTAINER=1, ALIYUN_COM_GPU_MEM_DEV=60)
    for turn in range(3):
        askers: list[Any] = []

        async def create(number: int, turn: int = turn, askers: list[Any] = askers) -> None:
            askers.append(await world.create(f"many-{turn}-{number}", small))

        async with trio.open_nursery() as nursery:
            for number in range(8):
                nursery.start_soon(create, number)
        assert [asker.status for asker in askers] == [1] * 8
        for asker in askers:
            await asker.end()
        await until(lambda: not world.ids)
    for process in world.processes:
        for pipe in (process.stdin, process.stdout):
            await pipe.aclose()
    await until(lambda: len(os.listdir("/proc/self/fd")) <= before)
    assert world.marks == []


# Who may attach


async def test_a_stranger_at_a_containers_socket(world: Any) -> None:
    await running(world, ID, "unshare", "--pid", "--fork")
    refused = await world.attach(ID)
    assert refused.error == errno.EACCES and f"process {os.getpid()} is not in container" in refused.text
    refused.sock.close()


async def test_a_program_in_the_container_attaches(world: Any) -> None:
    first = await running(world, ID, "unshare", "--pid", "--fork")
    inside, folder = ["nsenter", "--target", str(first.pid), "--pid"], str(world.clients.folder(ID))
    program = await trio.run_process([*inside, sys.executable, "-S", str(ASKING), folder, "attach"],
                                     capture_stdout=True, stdin=b"")  # fmt: skip
    assert json.loads(program.stdout) == {"error": 0, "text": ""}


async def test_before_the_first_process_is_known_the_socket_is_all(world: Any) -> None:
    await world.create(ID)
    attached = await world.attach(ID)
    assert attached.error == 0
    attached.sock.close()


# The socket and the files


@pytest.mark.parametrize("raw", [
    b"\0", b"\0" * 16, struct.pack("<IIiI", wire.MAGIC, 2, 1, 0), struct.pack("<IIiI", wire.MAGIC, 1, 9, 0),
    struct.pack("<IIiI", wire.MAGIC, 1, -1, 0), struct.pack("<IIiI", wire.MAGIC, 1, 1, 0) + b"id",
    struct.pack("<IIiI", wire.MAGIC, 1, 1, 0) + b"\0/b\0", struct.pack("<IIiI", wire.MAGIC, 1, 1, 0) + b"a\0b\0c\0",
    struct.pack("<IIiI", wire.MAGIC, 1, 3, 0) + b"a\0b", struct.pack("<IIiI", wire.MAGIC, 1, 3, 0),
])  # fmt: skip
async def test_nonsense_is_dropped(world: Any, raw: bytes) -> None:
    assert (await world.ask("raw", raw.hex())).text == "closed"
    assert (await world.create(ID)).status == 1, "and the next is served"


async def test_a_create_without_a_bundle(world: Any) -> None:
    head = struct.pack("<IIiI", wire.MAGIC, 1, 1, 0)
    told = await world.ask("raw", (head + b"id\0/b\0").hex())
    assert told.status == -errno.EINVAL and "bundle" in told.text


async def test_only_root_is_answered(tmp_path: Any, until: Any, caplog: pytest.LogCaptureFixture) -> None:
    async def never(*_: object) -> wire.Answer:
        raise AssertionError

    def nobody(sock: socket.socket) -> Peer:
        return Peer(os.getpid(), 1000, frozenset(), os.pidfd_open(os.getpid()))

    async with trio.open_nursery() as nursery:
        await nursery.start(RuntimeServer(tmp_path / "sock", never, nobody).serve)
        assert stat.S_IMODE((tmp_path / "sock").stat().st_mode) == 0o600
        with trio.socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as sock:
            await sock.connect(str(tmp_path / "sock"))
            assert await sock.recv(1) == b""
        nursery.cancel_scope.cancel()
    assert any("uid 1000 may not" in line for line in caplog.messages) and not (tmp_path / "sock").exists()


def test_answers_fit() -> None:
    long = wire.refusal(errno.EINVAL, "a\nb\t" + "c" * 100000)
    assert long.text.startswith("a b c") and len(long.packed()) < 5000
    with pytest.raises(ValueError, match="an answer of"):
        wire.Answer(1, "x" * 70000).packed()


async def test_what_is_put_on_the_node(world: Any) -> None:
    places = world.places
    assert places.binary.read_bytes() == packaged("bin/cgpu-runtime").read_bytes()
    assert stat.S_IMODE(places.binary.stat().st_mode) == 0o755
    conf = places.binary.with_name("cgpu-runtime.conf").read_text()
    assert conf == f"socket {places.socket}\nruntime runc\n"
    (places.runtime / "ct" / "stale").touch()
    inode = places.binary.stat().st_ino
    places.prepare()
    assert world.marks == [] and places.binary.stat().st_ino == inode
    assert sorted(path.name for path in places.real.iterdir()) == ["libcuda.so.1", "libnvidia-ml.so.1"]


@pytest.fixture(autouse=True)
def _log_level(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
