"""The real scheduler thread against clients that map what it hands out."""

import contextlib
import errno
import os
import random
import struct
import threading
import time

import pytest
from gate_fake import MS, NATIVE, NODRAIN, PAUSED, REPORT_SIZE, FakeClient, S, eventually

from cgpusched.gate import Gate, Tuning, agent_channel
from cgpusched.plan import GpuPlan, Turn

GIB = 1 << 30
UUID = bytes(range(16))


@pytest.fixture
def gate():
    with Gate() as gate:
        gate.add_gpu(0, UUID, 24 * GIB)
        gate.start()
        yield gate


def instances(gate, *ids, gpu=0, **options):
    """Regions for these instances, each with a turn of one slice."""
    regions = [gate.add_region(gpu, id_, GIB) for id_ in ids]
    gate.set_plan(gpu, GpuPlan(tuple(Turn(id_, 5 * MS) for id_ in ids), **options))
    return regions


def test_page_says_what_the_client_needs(gate):
    (region,) = instances(gate, "a")
    with FakeClient(gate, region) as client:
        assert client.ctl("magic") == 0x75706763 and client.ctl("version") == 1 and client.ctl("gpu") == 0
        assert client.ctl_map[16:32] == UUID
        assert (client.ctl("mem_limit"), client.ctl("mem_total"), client.ctl("mem_other")) == (GIB, 24 * GIB, 0)
        assert (client.ctl("span_ns"), client.ctl("window")) == (625_000, 2)
        assert (client.ctl("overlap_ns"), client.ctl("grace_ns")) == (Tuning().overlap_ns, 150_000)
        assert client.slot_gen(client.slot) == client.gen != 0
        assert not client.granted and client.word != 0
        gate.set_memory(region, 2 * GIB, 5)
        assert client.ctl("contexts") == 0
        gate.set_context(region, 7)
        assert client.ctl("contexts") == 1
        assert (client.ctl("mem_limit"), client.ctl("mem_other"), client.ctl("mem_context")) == (2 * GIB, 5, 7)


def test_what_a_high_priority_instance_waits_for_is_kept_short(gate):
    region, high = instances(gate, "a", "high")
    with FakeClient(gate, region) as client, FakeClient(gate, high) as other:
        gate.set_plan(0, GpuPlan((Turn("a", 5 * MS), Turn("high", 5 * MS, high=True))))
        assert (client.ctl("span_ns"), client.ctl("window")) == (300_000, 2)
        assert (other.ctl("span_ns"), other.ctl("window")) == (300_000, 2)
        client.set(kernel_ns=MS)
        client.ask()
        client.accept()
        assert (client.ctl("span_ns"), client.ctl("window")) == (300_000, 1)
        gate.set_plan(0, GpuPlan((Turn("a", 5 * MS), Turn("high", 5 * MS))))
        assert (client.ctl("span_ns"), client.ctl("window")) == (625_000, 2)


def test_grant_comes_alone_without_a_deadline(gate):
    (region,) = instances(gate, "a")
    with FakeClient(gate, region) as client:
        client.ask()
        client.accept()
        assert client.ctl("deadline_ns") == 0
        eventually(lambda: gate.usage(region).holding)
        assert not gate.usage(region).waiting


def test_contention_sets_a_deadline_then_closes(gate):
    first, second = instances(gate, "a", "b")
    with FakeClient(gate, first) as a, FakeClient(gate, second) as b:
        a.ask()
        word = a.accept()
        a.rung()
        b.ask()
        eventually(lambda: a.word == word and a.ctl("deadline_ns") != 0 or a.word == word & ~1)
        eventually(a.rung)
        eventually(lambda: not a.granted)
        assert not b.granted  # a has not let go
        a.let_go(word)
        other = b.accept()
        a.ask()
        eventually(lambda: not b.granted)
        b.let_go(other, drained=False)
        again = a.accept()  # the early acknowledgement is enough
        assert again > word
        before = a.ctl("deadline_ns")
        b.let_go(other)
        eventually(lambda: gate.usage(first).busy_ns > 0)
        assert a.word != again or a.ctl("deadline_ns") >= before


def test_idle_holder_gives_way_at_once(gate):
    first, second = instances(gate, "a", "b")
    with FakeClient(gate, first) as a, FakeClient(gate, second) as b:
        a.ask()
        word = a.accept()
        a.let_go(word, idle=True)
        assert a.word == word  # nobody else wants it: it may take it again by itself
        b.ask()
        b.accept()
        assert a.word == word & ~1


def test_idle_holder_that_took_it_again_is_seen(gate):
    first, second = instances(gate, "a", "b")
    with FakeClient(gate, first) as a, FakeClient(gate, second) as b:
        a.ask()
        for _ in range(20):
            word = a.accept()
            a.let_go(word, idle=True)
            eventually(lambda: gate.usage(first).turns >= 1)
            if a.accept() == word:  # silently; the server may look between its stores, and grant anew
                break
        else:
            pytest.fail("it was granted anew each time")
        b.ask()
        eventually(lambda: not a.granted)
        assert not b.granted
        a.let_go(word)
        b.accept()


def test_death_of_the_holder_frees_the_device(gate):
    first, second = instances(gate, "a", "b")
    with FakeClient(gate, first) as a, FakeClient(gate, second) as b:
        a.ask()
        a.accept()
        b.ask()
        a.die()
        begin = time.monotonic()
        b.accept()
        assert time.monotonic() - begin < 1


def test_death_of_one_process_leaves_the_other_holding(gate):
    first, second = instances(gate, "a", "b")
    with FakeClient(gate, first) as a, FakeClient(gate, first) as sibling, FakeClient(gate, second) as b:
        a.ask()
        word = a.accept()
        sibling.set(drained=0, idle=0, acked=0, opened=word)
        b.ask()
        eventually(lambda: not a.granted)
        a.die()
        for _ in range(20):
            gate.usage(first)
            assert not b.granted
        sibling.let_go(word)
        b.accept()


def test_a_stopped_holder_is_passed_over(gate):
    first, second = instances(gate, "a", "b")
    with FakeClient(gate, first) as a, FakeClient(gate, second) as b:
        a.ask()
        word = a.accept()
        begin = time.monotonic()
        b.ask()
        b.accept()
        assert 0.04 < time.monotonic() - begin < 1
        assert gate.usage(first).overdue == 1
        a.ask()
        eventually(lambda: gate.usage(first).waiting)
        assert not a.granted
        a.let_go(word)  # it goes on
        eventually(lambda: not b.granted or b.ctl("deadline_ns") != 0)


def test_pause_closes_and_unpause_opens(gate):
    (region,) = instances(gate, "a")
    with FakeClient(gate, region) as client:
        client.ask()
        word = client.accept()
        gate.set_plan(0, GpuPlan((Turn("a", 0),)))
        assert client.word == word & ~1 and client.ctl("flags") & PAUSED
        client.let_go(word)
        client.ask()
        eventually(lambda: gate.usage(region).waiting)
        assert not client.granted
        gate.set_plan(0, GpuPlan((Turn("a", 5 * MS),)))
        client.accept()
        assert not client.ctl("flags") & PAUSED


def test_native_opens_all_and_back(gate):
    regions = instances(gate, "a", "b", "c", native=True)
    gate.set_plan(0, GpuPlan((Turn("a", 5 * MS), Turn("b", 5 * MS), Turn("c", 0)), native=True))
    with FakeClient(gate, regions[0]) as a, FakeClient(gate, regions[1]) as b, FakeClient(gate, regions[2]) as c:
        assert a.granted and b.granted and not c.granted
        assert a.ctl("flags") & NATIVE and c.ctl("flags") & PAUSED and gate.gpu_usage(0).native
        words = a.accept(), b.accept()
        gate.set_plan(0, GpuPlan((Turn("a", 5 * MS), Turn("b", 5 * MS)), drain=False))
        assert not a.granted and not b.granted
        assert a.ctl("flags") & (NATIVE | NODRAIN) == NODRAIN
        a.ask()
        a.let_go(words[0])
        assert not a.granted
        b.let_go(words[1])
        a.accept()
        assert not b.granted


def test_an_unnamed_region_gets_no_turn(gate):
    (region,) = instances(gate, "a")
    other = gate.add_region(0, "b", GIB)
    with FakeClient(gate, region), FakeClient(gate, other) as b:
        b.ask()
        eventually(lambda: gate.usage(other).waiting)
        assert not b.granted


def test_close_leaves_the_gates_open():
    gate = Gate()
    gate.add_gpu(0, UUID, GIB)
    gate.start()
    regions = instances(gate, "a", "b")
    gate.set_plan(0, GpuPlan((Turn("a", 5 * MS), Turn("b", 0))))
    with FakeClient(gate, regions[0]) as a, FakeClient(gate, regions[1]) as b:
        gate.close()
        a.attached = b.attached = False
        assert a.granted and a.ctl("flags") & NATIVE and a.ctl("deadline_ns") == 0
        assert not b.granted
    with pytest.raises(ValueError):
        gate.loops  # noqa: B018


# ---- several GPUs ----

def test_an_instance_over_two_gpus_has_its_turns_on_both_at_once(gate):
    gate.add_gpu(1, bytes(16), 24 * GIB)
    regions = {(gpu, name): gate.add_region(gpu, name, GIB) for gpu in (0, 1) for name in ("a", "b")}
    for gpu in (0, 1):
        gate.set_plan(gpu, GpuPlan((Turn("a", 5 * MS), Turn("b", 5 * MS))))
    with contextlib.ExitStack() as stack:
        clients = {key: stack.enter_context(FakeClient(gate, region)) for key, region in regions.items()}
        a0, a1, b0, b1 = clients[0, "a"], clients[1, "a"], clients[0, "b"], clients[1, "b"]
        for client in clients.values():
            client.ask()
        mixed = turns = 0
        end = time.monotonic() + 10
        while turns < 40:
            assert time.monotonic() < end
            open_ = [client for client in clients.values() if client.granted]
            words = [(client, client.accept()) for client in open_ if client.granted]
            if len(words) == 2:
                names = {client.region.id for client, _ in words}
                turns, mixed = turns + 1, mixed + (len(names) > 1)
            for client, word in words:
                client.ask()
                client.let_go(word)
        assert mixed <= 2  # at first each is an instance of one GPU
        # one that ends gives what was reserved for it back at once, on both
        for region in (regions[0, "a"], regions[1, "a"]):
            gate.remove_region(region)
        a0.attached = a1.attached = False
        for client in (b0, b1):
            client.ask()
            client.accept()


# ---- life, figures, limits ----

def test_heartbeat_and_an_idle_thread(gate):
    regions = instances(gate, *(f"i{n}" for n in range(20)))
    with FakeClient(gate, regions[7]) as client:
        beat = client.ctl("heartbeat_ns")
        loops, begin = gate.loops, time.monotonic()
        eventually(lambda: client.ctl("heartbeat_ns") >= beat + 500 * MS)
        elapsed = time.monotonic() - begin
        assert 4 <= gate.loops - loops <= 12 * elapsed + 3
        assert time.monotonic_ns() - client.ctl("heartbeat_ns") < S


def test_slots_are_given_and_taken_back(gate):
    (region,) = instances(gate, "a")
    ours, theirs = agent_channel()
    try:
        taken = [gate.attach(region, ours) for _ in range(512)]
        assert len({slot for slot, _ in taken}) == 512 and len({generation for _, generation in taken}) == 512
        with pytest.raises(OSError) as error:
            gate.attach(region, ours)
        assert error.value.errno == errno.EAGAIN
        gate.detach(region, 300)
        gate.detach(region, 7)
        with pytest.raises(OSError) as error:
            gate.detach(region, 7)
        assert error.value.errno == errno.ENOENT
        assert {gate.attach(region, ours)[0], gate.attach(region, ours)[0]} == {7, 300}
    finally:
        os.close(ours)
        os.close(theirs)


def test_a_slot_taken_back_is_announced(gate):
    (region,) = instances(gate, "a")
    with FakeClient(gate, region) as watcher, FakeClient(gate, region) as client:
        sequence = watcher.ctl("dead_seq")
        client.die()
        assert watcher.ctl("dead_seq") == sequence + 1
        assert watcher.slot_gen(client.slot) == 0
        with FakeClient(gate, region) as third:
            assert third.slot != client.slot  # unused longest comes first
            assert third.gen != client.gen


def test_figures_are_checked_copies(gate):
    (region,) = instances(gate, "a")
    with FakeClient(gate, region) as client, FakeClient(gate, region, enter=False) as stranger:
        client.set(mem_used=5 * MS, mem_peak=2**64 - 1, mem_refused=3, launches=10, ungated=2, unknown=1, dirty=4,
                   kernel_ns=2**63)
        stranger.set(mem_used=77, gen=stranger.gen + 1)
        first, second = sorted(gate.processes(region), key=lambda use: use.slot)
        assert (first.mem_used, first.mem_peak, first.mem_refused) == (5 * MS, 24 * GIB, 3)
        assert (first.launches, first.ungated, first.unknown, first.dirty) == (10, 2, 1, 4)
        assert first.kernel_ns == 10 * S
        assert (second.slot, second.mem_used) == (stranger.slot, 0)
        assert gate.gpu_usage(0).fallbacks == 2
        client.die()
        assert gate.gpu_usage(0).fallbacks == 2
        assert [use.slot for use in gate.processes(region)] == [stranger.slot]


def test_refusals(gate):
    (region,) = instances(gate, "a")
    for call, code in [(lambda: gate.add_gpu(0, UUID, 1), errno.EEXIST),
                       (lambda: gate.add_region(0, "a", 1), errno.EEXIST),
                       (lambda: gate.add_region(9, "x", 1), errno.ENODEV),
                       (lambda: gate.set_plan(0, GpuPlan((Turn("x", 1),))), errno.ENOENT),
                       (lambda: gate.set_plan(9, GpuPlan()), errno.ENODEV),
                       (lambda: gate.attach(region, 1_000_000), errno.EBADF),
                       (lambda: gate.start(), errno.EALREADY)]:
        with pytest.raises(OSError) as error:
            call()
        assert error.value.errno == code
    gate.remove_region(region)
    with pytest.raises(OSError):
        gate.usage(region)
    for n in range(64):
        gate.add_region(0, f"r{n}", 1)
    with pytest.raises(OSError) as error:
        gate.add_region(0, "one more", 1)
    assert error.value.errno == errno.ENOSPC


def test_removal_of_the_holder_frees_the_device(gate):
    first, second = instances(gate, "a", "b")
    with FakeClient(gate, first) as a, FakeClient(gate, second) as b:
        a.ask()
        a.accept()
        b.ask()
        gate.remove_region(first)
        a.attached = False
        assert not a.granted
        b.accept()


def test_no_descriptor_is_left_behind():
    before = sorted(os.listdir("/proc/self/fd"))
    gate = Gate()
    gate.add_gpu(0, UUID, GIB)
    gate.start()
    for region in instances(gate, "a", "b"):
        with FakeClient(gate, region):
            pass
    gate.close()
    gate.close()
    assert sorted(os.listdir("/proc/self/fd")) == before


# ---- hostile clients ----

def rounds(client, seconds):
    """Lives honestly for a while: opens, lets go, asks again. Gives the turns and the longest wait."""
    end, turns, longest = time.monotonic() + seconds, 0, 0.0
    while time.monotonic() < end:
        client.ask()
        begin = time.monotonic()
        word = client.accept()
        longest = max(longest, time.monotonic() - begin)
        client.let_go(word)
        turns += 1
    return turns, longest


def test_garbage_and_a_bell_storm_harm_only_their_own(gate):
    bad, good = instances(gate, "bad", "good")
    stop = threading.Event()
    source = random.Random(7)
    with FakeClient(gate, bad) as scribbler, FakeClient(gate, good) as honest:
        def scribble():
            while not stop.is_set():
                at = source.randrange(0, REPORT_SIZE - 8) & ~7
                scribbler.report_map[at:at + 8] = source.choice(
                    [b"\xff" * 8, bytes(8), struct.pack("Q", scribbler.word | 1), source.randbytes(8)])
                base = 4096 + 256 * scribbler.slot
                struct.pack_into("I", scribbler.report_map, base, scribbler.gen)
                struct.pack_into("Q", scribbler.report_map, base + 64 + 8 * source.randrange(6),
                                 source.choice([scribbler.word | 1, scribbler.word, 2**64 - 1, 0]))
                scribbler.bell()
        thread = threading.Thread(target=scribble)
        thread.start()
        try:
            turns, longest = rounds(honest, 3)
        finally:
            stop.set()
            thread.join()
        assert turns >= 30
        # its claims of work in flight are believed once, up to 2 s; after that its neighbours wait 50 ms at a time
        assert longest < 2.6
        assert gate.usage(good).overdue == 0


def test_a_bell_storm_does_not_spin_the_thread():
    with Gate(Tuning(bells_per_s=500)) as gate:
        gate.add_gpu(0, UUID, GIB)
        gate.start()
        noisy, quiet = instances(gate, "noisy", "quiet")
        stop = threading.Event()
        with FakeClient(gate, noisy) as storm, FakeClient(gate, quiet) as other:
            def ring():
                while not stop.is_set():
                    storm.bell()
            thread = threading.Thread(target=ring)
            loops, begin = gate.loops, time.monotonic()
            thread.start()
            try:
                eventually(lambda: time.monotonic() - begin > 0.5)
                seen, elapsed = gate.loops - loops, time.monotonic() - begin
                other.ask()
                other.accept()
            finally:
                stop.set()
                thread.join()
            assert seen < 64 + (500 + 2 * 500 + 20) * elapsed


@pytest.mark.parametrize("kind", ["eventfd", "socket"])
def test_an_agent_that_cannot_be_rung_blocks_nobody(gate, kind):
    first, second = instances(gate, "a", "b")
    with FakeClient(gate, first) as a, FakeClient(gate, second) as b:
        a.die()
        ours, theirs = (agent_channel() if kind == "socket" else (os.eventfd(0, 0), -1))
        slot, gen = gate.attach(first, ours)
        a.slot, a.gen, a.attached = slot, gen, True
        a.set(gen=gen)
        if kind == "eventfd":
            os.set_blocking(ours, True)
            os.write(ours, struct.pack("Q", 2**64 - 2))
        a.ask()
        a.accept()
        b.ask()
        b.accept()  # after a's 50 ms
        loops = gate.loops
        eventually(lambda: gate.loops > loops + 2)
        for fd in (ours, theirs):
            if fd >= 0:
                os.close(fd)
