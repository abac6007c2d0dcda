"""One quota, many processes: never past it together, never refused while it fits, exact whoever is killed whenever."""

from __future__ import annotations

import ctypes
import random
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from shared import put

OOM, MIB, GIB = 2, 1 << 20, 1 << 30
DEADLINE = 60.0
Spawn = Callable[..., "subprocess.Popen[str]"]


@pytest.fixture
def instance(hook: Any) -> Any:
    """Pages for one GPU; ``hook`` itself takes no part until it joins."""
    hook.cards(1)
    hook.offer(0, limit=64 * MIB, slot=0)
    return hook


@pytest.fixture
def spawn(instance: Any, memory_worker: Path) -> Iterator[Spawn]:
    running: list[subprocess.Popen[str]] = []

    def start(mode: str, slot: int, threads: int, size: int, generation: int = 1) -> subprocess.Popen[str]:
        instance.ctl[0].own(slot, generation)
        ctl, report = (path.decode() for path in instance.paths(0))
        process = subprocess.Popen([str(memory_worker), mode, ctl, report, str(slot), str(threads), str(size)],
                                   stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        running.append(process)
        return process

    yield start
    for process in running:
        process.kill()
        process.communicate()


def join(instance: Any) -> None:
    """``hook`` itself takes part, in slot 0; its context is current."""
    instance.lib.stub_joins(1)
    instance.lib.stub_bind(b"")
    assert instance.lib.hook_join(False)
    instance.lib.stub_current(0, 0)


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.0005)


def finish(process: subprocess.Popen[str]) -> str:
    """Ends its input; gives what it printed. It exits well, having given everything back."""
    out, _ = process.communicate(timeout=DEADLINE)
    assert process.returncode == 0, out
    assert "total 0" in out and "OVER" not in out
    return out


def test_racing_to_the_limit(instance: Any, spawn: Spawn) -> None:
    """8 threads in each of 4 processes, blocks that fill the quota to the last byte."""
    workers = [spawn("fill", slot, 8, MIB // 16) for slot in range(4)]
    granted = 0
    for worker in workers:
        assert worker.stdout
        granted += int(worker.stdout.readline().removeprefix("granted "))
    assert granted == 64 * 16
    assert instance.pages[0].total() == 64 * MIB == sum(instance.pages[0].used(slot) for slot in range(4))
    for worker in workers:
        finish(worker)
    assert instance.pages[0].total() == 0


def test_never_refused_while_it_fits(instance: Any, spawn: Spawn) -> None:
    """4 x 8 threads that together never pass the limit, beside four that always ask for too much."""
    workers = [spawn("quiet", slot, 8, 2 * MIB) for slot in range(4)]
    until(lambda: all(instance.pages[0].refused(slot) > 300 for slot in range(4)))
    for worker in workers:
        assert "refused 0 of " in finish(worker)
    assert instance.pages[0].total() == 0


def test_killed_at_any_moment(instance: Any, spawn: Spawn) -> None:
    """Eight threads go on while 200 processes of four threads each are killed; then nothing is left or lost."""
    page, ctl = instance.pages[0], instance.ctl[0]

    def started(slot: int, process: subprocess.Popen[str]) -> bool:
        return page.peak(slot) > 0 or process.poll() is not None

    survivor = spawn("churn", 0, 8, 2 * MIB)
    for i in range(200):
        slot = 1 + i % 3
        victim = spawn("churn", slot, 4, MIB, generation=i + 1)
        until(partial(started, slot, victim))
        time.sleep(random.random() * 0.002)
        victim.send_signal(signal.SIGKILL)
        out, _ = victim.communicate(timeout=DEADLINE)
        assert victim.returncode == -signal.SIGKILL, out
        if i % 5:  # else: the slot is given away again before anyone has noticed
            ctl.bury(slot)
    for slot in (1, 2, 3):
        ctl.bury(slot)
    finish(survivor)
    # the dead ones' share goes at the next operation
    last = spawn("fill", 5, 1, 64 * MIB)
    assert last.stdout and last.stdout.readline() == "granted 1\n"
    finish(last)
    assert page.total() == 0 and all(page.used(slot) == 0 for slot in range(512) if page.gen(slot))


def test_fork_while_threads_allocate(instance: Any, spawn: Spawn) -> None:
    assert "total 0" in finish(spawn("fork", 0, 3, MIB))


def test_given_back_while_it_moves_to_another_slot(instance: Any, spawn: Spawn) -> None:
    """Nothing that is given back is lost with the slot that is left, nor comes off twice."""
    assert "total 0" in finish(spawn("move", 0, 3, MIB))
    assert instance.pages[0].total() == 0


class TestDeadSlots:
    def test_died_in_the_middle_of_a_charge(self, instance: Any, spawn: Spawn) -> None:
        """Who was there before repairs the total at once, long before the daemon has noticed."""
        page = instance.pages[0]
        join(instance)
        assert spawn("torn", 1, 0, 2 * MIB).wait(DEADLINE) == -signal.SIGKILL
        assert (page.kept_total(), page.used(1)) == (2 * MIB, 4 * MIB)
        assert instance.alloc(62 * MIB)[0] == 2
        assert page.kept_total() == page.total() == 4 * MIB
        assert instance.alloc(60 * MIB)[0] == 0
        instance.ctl[0].bury(1)
        assert instance.alloc(4 * MIB)[0] == 0
        assert instance.used() == 64 * MIB

    def test_reaped_when_buried(self, instance: Any, spawn: Spawn) -> None:
        page, ctl = instance.pages[0], instance.ctl[0]
        victim = spawn("fill", 1, 1, MIB)
        assert victim.stdout and victim.stdout.readline() == "granted 64\n"
        victim.kill()
        victim.wait(DEADLINE)
        alive = spawn("fill", 2, 1, MIB)
        assert alive.stdout and alive.stdout.readline() == "granted 0\n"  # the daemon has not noticed yet
        finish(alive)
        ctl.bury(1)
        alive = spawn("fill", 2, 1, MIB, generation=2)
        assert alive.stdout and alive.stdout.readline() == "granted 64\n"
        assert page.gen(1) == 0 and page.total() == 64 * MIB
        finish(alive)

    def test_an_owner_that_has_lost_its_connection_alone(self, instance: Any, spawn: Spawn) -> None:
        """A sibling takes its slot for a dead one's. When it is back it has what it had, less what it freed."""
        page, ctl = instance.pages[0], instance.ctl[0]
        join(instance)
        assert instance.alloc(40 * MIB)[0] == 0
        _, freed = instance.alloc(8 * MIB)
        ctl.bury(0)
        sibling = spawn("fill", 1, 1, MIB)
        assert sibling.stdout and sibling.stdout.readline() == "granted 64\n"
        assert (page.gen(0), page.total()) == (0, 64 * MIB)
        assert instance.free(freed) == 0
        ctl.own(3, 8)
        assert instance.lib.stub_offer(0, *instance.paths(0), 3) == 0
        instance.lib.stub_rejoin()
        assert page.used(3) == 40 * MIB and page.total() == page.kept_total() == 104 * MIB
        finish(sibling)
        assert page.total() == 40 * MIB

    def test_who_has_lost_its_connection_has_no_more_room_for_that(self, instance: Any, spawn: Spawn) -> None:
        """It still counts what it has, though siblings do not; and that is not taken off twice when it moves on."""
        page, ctl = instance.pages[0], instance.ctl[0]
        join(instance)
        assert instance.alloc(48 * MIB)[0] == 0
        ctl.bury(0)
        sibling = spawn("fill", 1, 1, 8 * MIB)
        assert sibling.stdout and sibling.stdout.readline() == "granted 8\n"
        ctl.set(ctl.LIMIT, 128 * MIB)
        assert instance.alloc(17 * MIB)[0] == OOM and instance.alloc(16 * MIB)[0] == 0
        assert spawn("torn", 2, 0, 512).wait(DEADLINE) == -signal.SIGKILL  # the next one to charge adds all up anew
        assert instance.lib.ledger_force(0, ctypes.c_uint64(512))
        kept = page.kept_total()
        assert kept >= 128 * MIB, "its own and the sibling's"
        instance.offer(0, limit=64 * MIB, slot=5, age=1)
        instance.lib.stub_rejoin()
        assert instance.pages[0].used(5) == 64 * MIB + 512
        assert page.kept_total() == kept, "the sibling's is there still"
        finish(sibling)

    def test_a_slot_taken_by_another_is_left_alone(self, instance: Any, spawn: Spawn) -> None:
        """Where all the others were given away first; what its first owner had is the audit's to find."""
        page, ctl = instance.pages[0], instance.ctl[0]
        join(instance)
        assert instance.alloc(40 * MIB)[0] == 0
        ctl.bury(0)
        heir = spawn("fill", 0, 1, 8 * MIB, generation=9)
        assert heir.stdout and heir.stdout.readline() == "granted 8\n"
        ctl.own(3, 10)
        assert instance.lib.stub_offer(0, *instance.paths(0), 3) == 0
        instance.lib.stub_rejoin()
        assert (page.gen(0), page.used(0), page.used(3)) == (9, 64 * MIB, 0)
        finish(heir)

    def test_a_slot_given_to_another(self, instance: Any, spawn: Spawn) -> None:
        page = instance.pages[0]
        victim = spawn("fill", 1, 1, MIB)
        assert victim.stdout and victim.stdout.readline() == "granted 64\n"
        victim.kill()
        victim.wait(DEADLINE)
        heir = spawn("fill", 1, 1, MIB, generation=2)
        assert heir.stdout and heir.stdout.readline() == "granted 64\n"
        assert page.total() == page.used(1) == 64 * MIB
        finish(heir)


class TestOneProcess:
    def test_other_use_counts(self, hook: Any) -> None:
        hook.start([64 * MIB])
        hook.ctl[0].set(hook.ctl[0].OTHER, 60 * MIB)
        assert hook.alloc(4 * MIB)[0] == 0
        assert hook.alloc(512)[0] == 2

    def test_limit_changed_live(self, hook: Any) -> None:
        hook.start([64 * MIB])
        _, first = hook.alloc(48 * MIB)
        hook.ctl[0].set(hook.ctl[0].LIMIT, 32 * MIB)
        assert hook.alloc(512)[0] == 2
        assert hook.used() == 48 * MIB
        hook.ctl[0].set(hook.ctl[0].LIMIT, 50 * MIB)
        assert hook.alloc(2 * MIB)[0] == 0
        assert hook.free(first) == 0
        assert hook.used() == 2 * MIB

    def test_rejoin_enters_what_is_held_whatever_the_limit(self, hook: Any) -> None:
        hook.start([64 * MIB])
        _, first = hook.alloc(48 * MIB)
        old = hook.pages[0]
        hook.offer(0, limit=16 * MIB, slot=9, age=1)
        hook.lib.stub_rejoin()
        assert hook.pages[0].used(9) == hook.pages[0].total() == 48 * MIB
        assert old.total() == 0 and old.gen(0) == 0
        assert hook.alloc(512)[0] == 2
        assert hook.free(first) == 0
        assert hook.pages[0].used(9) == hook.pages[0].total() == 0
        hook.offer(0, limit=16 * MIB, slot=8, age=2)
        hook.lib.stub_rejoin()
        assert (hook.pages[0].used(8), hook.pages[0].peak(8)) == (0, 48 * MIB), "it has used the GPU"

    @pytest.mark.parametrize("slot", [0, 3])
    def test_rejoin_of_the_same_pages(self, hook: Any, slot: int) -> None:
        """A program has closed our socket: the same daemon gives the same pages, at another address, another slot."""
        hook.start([64 * MIB])
        assert hook.alloc(48 * MIB)[0] == 0
        hook.ctl[0].own(0, 0)
        hook.ctl[0].own(slot, 8)
        ctl, report = hook.paths(0)
        assert hook.lib.stub_offer(0, ctl, report, slot) == 0
        hook.lib.stub_rejoin()
        assert hook.pages[0].used(slot) == hook.pages[0].total() == 48 * MIB
        assert hook.pages[0].gen(slot) == 8

    def test_an_nvml_process_turns_to_cuda(self, hook: Any) -> None:
        hook.cards(1)
        hook.offer(0, limit=64 * MIB, slot=2)
        hook.lib.stub_joins(1)
        hook.lib.stub_bind(b"")
        assert hook.lib.hook_join(True) and hook.lib.stub_join_count() == 1
        assert hook.pages[0].gen(2) == 0
        assert hook.lib.hook_join(True) and hook.lib.stub_join_count() == 1
        assert hook.call("cuInit", 0) == 0 and hook.lib.stub_join_count() == 2
        hook.lib.stub_current(0, 0)
        assert hook.pages[0].gen(2) == 7
        assert hook.alloc(MIB)[0] == 0
        assert hook.pages[0].used(2) == MIB

    def test_an_nvml_process_turns_to_cuda_and_a_gpu_was_lost(self, hook: Any) -> None:
        """The other keeps its place, and its limit."""
        hook.cards(2)
        for gpu, limit in enumerate((64 * MIB, 8 * MIB)):
            hook.offer(gpu, limit=limit, card=gpu)
        hook.lib.stub_joins(2)
        hook.lib.stub_bind(b"")
        assert hook.lib.hook_join(True)
        hook.lib.stub_lose(0)
        assert hook.call("cuInit", 0) == 0 and hook.lib.stub_join_count() == 2
        hook.lib.stub_current(1, 0)
        assert hook.alloc(MIB)[0] == 0 and hook.alloc(8 * MIB)[0] == 2
        assert (hook.pages[0].total(), hook.pages[1].total()) == (0, MIB)

    def test_a_new_daemon_s_page_comes_while_the_slots_are_added_up(self, hook: Any) -> None:
        """It knows none of them yet: those who are there already must not look dead."""
        hook.start([64 * MIB])
        page, ctl = hook.pages[0], hook.ctl[0]
        for slot in (20, 21):  # of one page of memory
            ctl.own(slot, 1)
            put(page.map, 4096 + 256 * slot, "I", 1)
            put(page.map, 4096 + 256 * slot + 128, "Q", 24 * MIB)
        put(page.map, 128, "Q", 48 * MIB)
        assert hook.alloc(16 * MIB)[0] == 0
        hook.lib.stub_replace_when_read(0, hook.paths(0)[0], 20)
        assert hook.alloc(2 * MIB)[0] == OOM
        assert page.kept_total() == 64 * MIB

    def test_no_drift(self, hook: Any) -> None:
        hook.start([64 * MIB])
        dice, live = random.Random(4), []
        for _ in range(5000):
            if live and dice.random() < 0.5:
                assert hook.free(live.pop(dice.randrange(len(live)))) == 0
            else:
                result, address = hook.alloc(dice.randrange(1, 4 * MIB))
                if result == 0:
                    live.append(address)
        for address in live:
            assert hook.free(address) == 0
        assert hook.used() == 0


class TestWithoutDaemon:
    """The socket is there, nobody answers: the limits file beside it holds, for each process alone."""

    @pytest.fixture
    def limits(self, hook: Any, monkeypatch: pytest.MonkeyPatch) -> Path:
        monkeypatch.setenv("CGPU_SOCKET", str(hook.folder / "gate.sock"))
        hook.cards(1)
        hook.lib.stub_bind(b"")
        hook.lib.stub_joins(-111)
        hook.lib.stub_current(0, 0)
        return Path(hook.folder / "limits")

    UUID = "GPU-a0000001-0203-0405-0607-08090a0b0c0d"

    def test_limit_holds(self, hook: Any, limits: Path) -> None:
        limits.write_text(f"{self.UUID} {64 * MIB}\n")
        assert hook.lib.hook_join(False)
        _, first = hook.alloc(60 * MIB)
        assert hook.alloc(6 * MIB)[0] == 2
        assert hook.free(first) == 0
        assert hook.alloc(64 * MIB)[0] == 0

    def test_what_is_held_is_entered_when_it_answers(self, hook: Any, limits: Path) -> None:
        limits.write_text(f"{self.UUID} {64 * MIB}\n")
        assert hook.lib.hook_join(False)
        _, first = hook.alloc(60 * MIB)
        hook.offer(0, limit=GIB)
        hook.lib.stub_joins(1)
        until(lambda: hook.lib.hook_join(False) and hook.pages[0].used() > 0)
        assert hook.used() == 60 * MIB
        assert hook.free(first) == 0
        assert hook.used() == 0

    @pytest.mark.parametrize("text", ["", "\n", "GPU-1 5\n", f"{UUID}\n", f"{UUID} 1x\n", f"{UUID} -1\n", f"{UUID} \n",
                                      f"{UUID} 99999999999999999999999\n", f"{UUID}  5\n", "\0" * 50])
    def test_a_bad_file_is_no_instance(self, hook: Any, limits: Path, text: str) -> None:
        limits.write_text(text)
        assert not hook.lib.hook_join(False)

    def test_no_file_is_no_instance(self, hook: Any, limits: Path) -> None:
        assert not hook.lib.hook_join(False)
