"""When an instance of cgpuctl run ends: after its anchors, its clients and what was started in it, and not before."""

import os
import subprocess
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any

import pytest
import trio
import trio.testing

from cgpusched.daemon import lifetime
from cgpusched.daemon.lifetime import Lifetimes, started_with

SOCKET = "/nowhere/inst/one/gate.sock"


class Bench:
    """Lifetimes with clients and a /proc of the test's own."""

    def __init__(self, nursery: trio.Nursery) -> None:
        self.ended: list[str] = []
        self.clients = 0
        self.found: list[list[int]] = []
        self.scans = 0
        self.lives = Lifetimes(nursery, lambda _: self.clients, self.end, self.scan)

    def end(self, ident: str) -> None:
        self.ended.append(ident)
        self.lives.forget(ident)

    def scan(self, variable: str, value: str, owner: int) -> list[int]:
        assert (variable, value) == ("CGPU_SOCKET", SOCKET)
        self.scans += 1
        return self.found.pop(0) if self.found else []


@pytest.fixture
async def bench(nursery: trio.Nursery, monkeypatch: Any) -> Bench:
    monkeypatch.setattr(lifetime, "SCAN_PAUSE_SECONDS", 0.01)
    return Bench(nursery)


@pytest.fixture
def process() -> Iterator[Callable[..., "subprocess.Popen[bytes]"]]:
    started: list[subprocess.Popen[bytes]] = []

    def start(**more: Any) -> "subprocess.Popen[bytes]":
        started.append(subprocess.Popen(["sleep", "1000"], **more))
        return started[-1]

    yield start
    for one in started:
        one.kill()
        one.wait()


@pytest.fixture(autouse=True)
async def no_descriptor_is_left() -> AsyncIterator[None]:
    before = len(os.listdir("/proc/self/fd"))
    yield
    await trio.testing.wait_all_tasks_blocked()
    assert len(os.listdir("/proc/self/fd")) <= before + 1  # listdir's own


async def test_ends_with_its_anchor(bench: Bench, process: Any, until: Any) -> None:
    anchor = process()
    bench.lives.begin("one", SOCKET, os.pidfd_open(anchor.pid), 0)
    await trio.testing.wait_all_tasks_blocked(0.02)
    assert bench.lives.anchors("one") == 1 and not bench.ended and bench.scans == 0
    anchor.kill()
    await until(lambda: bench.ended == ["one"])
    assert bench.scans == 2, "one empty scan may have missed a process that was being forked"
    assert bench.lives.anchors("one") == 0


async def test_a_joined_process_keeps_it(bench: Bench, process: Any, until: Any) -> None:
    first, second = process(), process()
    bench.lives.begin("one", SOCKET, os.pidfd_open(first.pid), 0)
    bench.lives.join("one", os.pidfd_open(second.pid))
    first.kill()
    await until(lambda: bench.lives.anchors("one") == 1)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert not bench.ended
    second.kill()
    await until(lambda: bench.ended == ["one"])


async def test_an_attached_client_keeps_it(bench: Bench, process: Any, until: Any) -> None:
    anchor = process()
    bench.clients = 1
    bench.lives.begin("one", SOCKET, os.pidfd_open(anchor.pid), 0)
    anchor.kill()
    await until(lambda: bench.lives.anchors("one") == 0)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert not bench.ended and bench.scans == 0
    bench.clients = 0
    bench.lives.detached("one")
    await until(lambda: bench.ended == ["one"])


async def test_a_process_with_the_environment_keeps_it(bench: Bench, process: Any, until: Any) -> None:
    anchor, child, grandchild = process(), process(), process()
    bench.found = [[os.pidfd_open(child.pid)], [], [os.pidfd_open(grandchild.pid)]]
    bench.lives.begin("one", SOCKET, os.pidfd_open(anchor.pid), 0)
    anchor.kill()
    await until(lambda: bench.scans == 1 and bench.lives.anchors("one") == 1)
    child.kill()
    await until(lambda: bench.scans == 3)
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert not bench.ended, "the second scan found another"
    grandchild.kill()
    await until(lambda: bench.ended == ["one"])


async def test_destroyed_by_somebody_else(bench: Bench, process: Any) -> None:
    anchor = process()
    bench.lives.begin("one", SOCKET, os.pidfd_open(anchor.pid), 0)
    await trio.testing.wait_all_tasks_blocked()
    bench.lives.forget("one")
    await trio.testing.wait_all_tasks_blocked()
    anchor.kill()
    await trio.testing.wait_all_tasks_blocked(0.05)
    assert not bench.ended


async def test_join_of_a_kept_instance_takes_nothing(bench: Bench, process: Any) -> None:
    bench.lives.join("kept", os.pidfd_open(process().pid))
    assert bench.lives.anchors("kept") == 0


def pid_of(pidfd: int) -> int:
    with open(f"/proc/self/fdinfo/{pidfd}") as info:
        return next(int(line.split()[1]) for line in info if line.startswith("Pid:"))


async def test_started_with_finds_exactly_that_value(process: Any) -> None:
    mine = f"/somewhere/{os.getpid()}/gate.sock"
    right = process(env={"CGPU_SOCKET": mine, "OTHER": "1"})
    process(env={"CGPU_SOCKET": mine + "x"})
    process(env={"XCGPU_SOCKET": mine, "V": f"CGPU_SOCKET={mine}"})
    found = started_with("CGPU_SOCKET", mine)
    try:
        assert [pid_of(fd) for fd in found] == [right.pid]
    finally:
        for fd in found:
            os.close(fd)


async def test_started_with_takes_a_few(process: Any) -> None:
    mine = f"/somewhere/{os.getpid()}/many.sock"
    for _ in range(10):
        process(env={"CGPU_SOCKET": mine})
    found = started_with("CGPU_SOCKET", mine)
    for fd in found:
        os.close(fd)
    assert len(found) == lifetime.SCAN_ENOUGH


@pytest.mark.skipif(os.getuid() != 0, reason="only root can start programs of other users")
async def test_only_its_owner_can_keep_an_instance(process: Any) -> None:
    mine = f"/somewhere/{os.getpid()}/owned.sock"
    env = {"CGPU_SOCKET": mine}
    users = {uid: process(env=env, user=uid).pid for uid in (0, 4711, 4712)}
    for owner, expected in ((4711, {users[0], users[4711]}), (0, set(users.values()))):
        found = started_with("CGPU_SOCKET", mine, owner)
        pids = {pid_of(fd) for fd in found}
        for fd in found:
            os.close(fd)
        assert pids == expected


async def test_settled_waits_for_what_ends_now_and_not_for_what_ends_later(
    bench: Bench, process: Any, until: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lifetime, "SCAN_PAUSE_SECONDS", 0.3)
    first, second = process(), process()
    bench.lives.begin("one", SOCKET, os.pidfd_open(first.pid), 0)
    bench.lives.begin("two", SOCKET, os.pidfd_open(second.pid), 0)
    first.kill()
    await until(lambda: bench.scans == 1)
    async with trio.open_nursery() as waiting:

        async def wait() -> None:
            await bench.lives.settled()
            assert bench.ended == ["one"]

        waiting.start_soon(wait)
        await trio.sleep(0.2)
        second.kill()
    await until(lambda: bench.ended == ["one", "two"])


async def test_after_a_change_of_daemon_settled_waits_for_what_ended_meanwhile(
    bench: Bench, process: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(lifetime, "RESUME_SECONDS", 0.2)
    kept = process()
    bench.lives.resume("used", SOCKET, 0, [lifetime.process_of(kept.pid)])
    await bench.lives.settled()
    assert not bench.ended
    bench.lives.resume("gone", SOCKET, 0)
    await bench.lives.settled()
    assert bench.ended == ["gone"]
    bench.clients = 1
    monkeypatch.setattr(lifetime, "RESUME_SECONDS", 1000)
    bench.lives.resume("back", SOCKET, 0)
    with trio.fail_after(lifetime.SETTLE_SECONDS / 2):
        await bench.lives.settled()
    assert bench.ended == ["gone"] and bench.lives.anchors("used") == 1
    kept.kill()


async def test_who_is_waited_for_is_known_by_pid(bench: Bench, process: Any, until: Any) -> None:
    first, second, found = process(), process(), process()
    bench.lives.begin("one", SOCKET, os.pidfd_open(first.pid), 0)
    bench.lives.join("one", os.pidfd_open(second.pid))
    assert bench.lives.pids() == {first.pid: "one", second.pid: "one"}
    bench.found = [[os.pidfd_open(found.pid)]]
    first.kill()
    second.kill()
    await until(lambda: bench.lives.pids() == {found.pid: "one"})
    found.kill()
    await until(lambda: bench.ended == ["one"])
    assert bench.lives.pids() == {}


async def test_a_pidfd_of_the_dead_has_no_pid(process: Any) -> None:
    one = process()
    pidfd = os.pidfd_open(one.pid)
    try:
        assert lifetime.pid_of(pidfd) == one.pid
        one.kill()
        one.wait()
        assert lifetime.pid_of(pidfd) is None
    finally:
        os.close(pidfd)
