"""The task that reconciles: what it asks and when, and that nothing which hangs holds it or the daemon up."""

import threading
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import pytest
import trio

from cgpusched.commands import Create
from cgpusched.daemon.audit import auditor
from cgpusched.daemon.audit.auditor import PATIENCE, SAMPLES, Auditor
from cgpusched.daemon.system import System
from cgpusched.errors import UserError
from cgpusched.model import Gpu
from cgpusched.state import State

GIB = 1 << 30


class Desk:
    """An auditor over a system with a fake gate; NVML and /proc say what the test says."""

    def __init__(self, gate: Any, gpus: list[Gpu]) -> None:
        self.gate = gate
        self.system = System(State(gpus), gate)
        self.gpu = gpus[0]
        self.used: dict[int, int] = {}
        self.owners: dict[int, str] = {}
        self.asked: list[int] = []
        self.reads = 0
        self.read: Callable[[Gpu], Mapping[int, int]] = lambda gpu: self.used
        self.owner: Callable[[int], str | None] = self._owner
        self.auditor = Auditor(self.system, self._read, lambda: self.owner, 1.0, lambda: 0.0)
        self.system.apply(Create("a", (0,), (GIB,)))

    def _read(self, gpu: Gpu) -> Mapping[int, int]:
        self.reads += 1
        return self.read(gpu)

    def _owner(self, pid: int) -> str | None:
        self.asked.append(pid)
        return self.owners.get(pid)

    async def look(self, times: int = 1) -> None:
        for _ in range(times):
            await self.auditor.look(self.gpu)

    @property
    def memory(self) -> list[tuple[int, int]]:
        return self.system.memory("a", 0)

    @property
    def state(self) -> str:
        return self.system.usage()[0].audit


@pytest.fixture
def desk(gate: Any, gpus: list[Gpu]) -> Desk:
    return Desk(gate, gpus)


@pytest.fixture
def hang() -> Iterator[Callable[..., Any]]:
    """A call that does not come back before the test ends."""
    over = threading.Event()

    def call(*_: object) -> Any:
        assert over.wait(20)
        raise UserError("too late")

    yield call
    over.set()


async def test_what_nvml_sees_counts(desk: Desk) -> None:
    desk.system.attach_process("a", 70, 0)
    desk.used = {70: 300, 71: 40, 72: 5}
    desk.owners = {71: "a"}
    assert desk.state == "off"
    await desk.look(2)
    assert desk.memory == [(70, 300), (71, 40)]
    assert desk.asked == [71, 72] * 2, "a connected one is known"
    assert desk.state == "ok"


async def test_a_rise_is_looked_at_more_closely_and_steady_memory_is_not(desk: Desk) -> None:
    desk.owners = {71: "a"}
    desk.used = {71: 40}
    for reads in (1, 1 + SAMPLES, 1, 1):
        desk.reads = 0
        await desk.look()
        assert desk.reads == reads
    desk.used = {71: 30}
    desk.reads = 0
    await desk.look()
    assert (desk.reads, desk.memory) == (1, [(71, 30)])


async def test_memory_that_only_some_samples_saw_does_not_count(desk: Desk) -> None:
    desk.owners = {71: "a"}
    seen = iter([40, 40, 40, 7, 40, 40])
    desk.read = lambda gpu: {71: next(seen)}
    await desk.look(2)
    assert desk.memory == [(71, 7)]


async def test_an_instance_that_is_not_on_that_gpu_is_not_charged_there(desk: Desk) -> None:
    desk.system.apply(Create("b", (1,), (GIB,)))
    desk.used = {71: 40}
    desk.owners = {71: "b"}
    await desk.look(2)
    assert desk.system.memory("b", 0) == [] and desk.system.memory("b", 1) == []


async def test_figures_are_given_up_after_some_failures_and_one_line_says_so(desk: Desk, caplog: Any) -> None:
    caplog.set_level("INFO")
    desk.used, desk.owners = {71: 2 * GIB}, {71: "a"}
    await desk.look(2)
    caplog.clear()

    def fails(gpu: Gpu) -> Mapping[int, int]:
        raise UserError("GPU is lost")

    desk.read = fails
    await desk.look(PATIENCE - 1)
    assert desk.memory == [(71, 2 * GIB)] and not caplog.messages
    await desk.look(3)
    assert desk.memory == [] and desk.state == "GPU is lost"
    assert [line for line in caplog.messages if "audit" in line] == ['no audit gpu=0 reason="GPU is lost"']
    desk.read = lambda gpu: desk.used
    await desk.look(2)
    assert desk.memory == [(71, 2 * GIB)] and desk.state == "ok"
    assert [line for line in caplog.messages if "audit" in line][1:] == ["audit again gpu=0"]


async def test_one_failure_is_none(desk: Desk, caplog: Any) -> None:
    caplog.set_level("INFO")
    answers: list[Any] = [UserError("busy"), {}] * 10

    def read(gpu: Gpu) -> Mapping[int, int]:
        answer = answers.pop(0)
        if isinstance(answer, UserError):
            raise answer
        return dict(answer)

    desk.read = read
    await desk.look(20)
    assert not [line for line in caplog.messages if "audit" in line] and desk.state == "ok"


async def test_an_nvml_that_hangs_is_given_up_and_only_one_thread_with_it(
    desk: Desk, hang: Any, monkeypatch: Any
) -> None:
    monkeypatch.setattr(auditor, "NVML_SECONDS", 0.05)
    desk.read = hang
    await desk.look(PATIENCE)
    assert "did not answer" in desk.state
    assert desk.reads == 1


async def test_a_process_that_makes_its_reader_wait_is_asked_about_once(
    desk: Desk, hang: Any, monkeypatch: Any, caplog: Any
) -> None:
    monkeypatch.setattr(auditor, "OWNER_SECONDS", 0.05)
    desk.used, desk.owners = {70: 9, 71: 40}, {71: "a"}
    desk.owner = lambda pid: hang() if pid == 70 else desk._owner(pid)
    await desk.look(3)
    assert desk.memory == [(71, 40)]
    assert [line for line in caplog.messages if "/proc" in line] == ["/proc does not answer gpu=0 pid=70"]
    desk.used = {}
    await desk.look()
    desk.used, desk.owner, desk.owners = {70: 9}, desk._owner, {70: "a"}  # another process of that number
    await desk.look(2)
    assert desk.memory == [(70, 9)]


async def test_it_goes_on_with_all_gpus(desk: Desk, nursery: trio.Nursery, until: Any) -> None:
    seen: list[int] = []
    desk.read = lambda gpu: seen.append(gpu.index) or {}
    desk.auditor = Auditor(desk.system, desk.read, lambda: desk.owner, 0.01)
    nursery.start_soon(desk.auditor.run_forever)
    await until(lambda: len(seen) >= 6)
    assert seen[:6] == [0, 1] * 3


async def test_a_lost_gpu_is_given_up_alone(desk: Desk, nursery: trio.Nursery, until: Any) -> None:
    seen: list[int] = []

    def read(gpu: Gpu) -> Mapping[int, int]:
        if gpu.index == 0:
            raise UserError("GPU is lost")
        seen.append(gpu.index)
        return {}

    desk.read = read
    desk.auditor = Auditor(desk.system, desk.read, lambda: desk.owner, 0.01)
    nursery.start_soon(desk.auditor.run_forever)
    await until(lambda: desk.state == "GPU is lost" and len(seen) > PATIENCE)
    assert [usage.audit for usage in desk.system.usage()] == ["GPU is lost", "ok"]


async def test_processes_of_a_lost_gpu_keep_nobody_else_waiting(desk: Desk) -> None:
    """Its NVML may take its time to fail: nobody is counted there any more, and who asked goes on."""
    desk.system.apply(Create("b", (1,), (GIB,)))
    desk.system.attach_process("a", 70, 0)
    desk.system.attach_process("b", 80, 0)

    def read(gpu: Gpu) -> Mapping[int, int]:
        asked.append(gpu.index)
        if gpu.index == 0:
            raise UserError("GPU is lost")
        return {80: 300}

    asked: list[int] = []
    desk.read = read
    await desk.look(PATIENCE)
    assert desk.state == "GPU is lost"
    asked.clear()
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.auditor._count_forever)
        with trio.fail_after(10):
            await desk.auditor.count(0, 70)
            await desk.auditor.count(1, 80)
        nursery.cancel_scope.cancel()
    assert desk.system.memory("b", 1) == [(80, 300)] and 0 not in asked


async def test_who_asks_is_counted_when_the_answer_comes(desk: Desk) -> None:
    desk.system.attach_process("a", 70, 0)
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.auditor.run_forever)
        with trio.fail_after(10):
            while desk.state != "ok":
                await trio.sleep(0.01)
        assert dict(desk.memory) == {70: 0}
        desk.used = {70: 300}
        with trio.fail_after(10):
            await desk.auditor.count(0, 70)
        assert desk.memory == [(70, 300)]
        nursery.cancel_scope.cancel()


async def test_those_who_ask_together_share_a_look(desk: Desk) -> None:
    for pid in range(70, 90):
        desk.system.attach_process("a", pid, 0)
    desk.reads = 0
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.auditor.run_forever)
        async with trio.open_nursery() as asking:
            for pid in range(70, 90):
                asking.start_soon(desk.auditor.count, 0, pid)
        assert desk.reads <= 3, "the regular one, and one or two"
        nursery.cancel_scope.cancel()


async def test_a_regular_look_under_way_does_not_undo_a_count(desk: Desk) -> None:
    """It read NVML before the context was there, and is held up since."""
    desk.system.attach_process("a", 70, 0)
    held, go = trio.Event(), threading.Event()

    def slow_owner(pid: int) -> None:
        trio.from_thread.run_sync(held.set)
        assert go.wait(20)

    desk.owner, desk.used = slow_owner, {71: 5}
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.auditor.run_forever)
        await held.wait()
        desk.used = {70: 300, 71: 5}
        await desk.auditor.count(0, 70)
        assert desk.memory == [(70, 300)]
        reads = desk.reads
        go.set()
        with trio.fail_after(10):
            while desk.reads == reads and desk.state != "ok":
                await trio.sleep(0.01)
        assert desk.memory == [(70, 300)]
        nursery.cancel_scope.cancel()


async def test_nobody_waits_for_figures_that_cannot_be_had(desk: Desk, monkeypatch: Any, hang: Any) -> None:
    def fails(gpu: Gpu) -> Mapping[int, int]:
        raise UserError("GPU is lost")

    desk.system.attach_process("a", 70, 0)
    monkeypatch.setattr(auditor, "COUNT_SECONDS", 0.05)
    desk.read = fails
    async with trio.open_nursery() as nursery:
        nursery.start_soon(desk.auditor.run_forever)
        with trio.fail_after(10):
            await desk.auditor.count(0, 70)
            desk.read = hang
            await desk.auditor.count(0, 70)
        assert dict(desk.memory) == {70: 0}
        nursery.cancel_scope.cancel()
