"""Physical memory that processes share through descriptors: the bytes, the counts, and who may die when."""

from __future__ import annotations

from typing import Any

import pytest

UUID = "GPU-aaaaaaaa-1111-2222-3333-444444444444"


@pytest.fixture(autouse=True)
def _small(machine: Any) -> None:
    machine.configure(f"{UUID} {64 << 20} Small")


def test_shared_bytes_count_once(machine: Any) -> None:
    machine.run("""
def other(peer):
    context(); _, fd = peer.recv(1)
    h = take(fd); at = map_it(h, 4 * MIB)
    assert get(at, 5) == b"hello" and mine() == 0 and used() == 4 * MIB
    put(at + 4 * MIB - 5, b"there"); peer.send("written"); peer.recv()
    cu.cuMemRelease(h); cu.cuMemUnmap(at, 4 * MIB); assert used() == 4 * MIB; peer.send("gone")
peer = Peer(other); context()
h = create(4 * MIB); at = map_it(h, 4 * MIB); put(at, b"hello")       # mapped before it is exported, and still the same
fd = export(h); assert used() == mine() == 4 * MIB
peer.send("take", fd); os.close(fd); peer.recv()
assert get(at, 5) == b"hello" and get(at + 4 * MIB - 5, 5) == b"there" and used() == mine() == 4 * MIB
peer.send("release"); peer.recv(); peer.join()
cu.cuMemUnmap(at, 4 * MIB); assert used() == 4 * MIB
cu.cuMemRelease(h); assert used() == 0
""")


def test_references_go_in_any_order(machine: Any) -> None:
    """The first to have made it lets go first; its bytes stay its own until the importer has let go too."""
    machine.run("""
def other(peer):
    context(); _, fd = peer.recv(1)
    h = take(os.dup(fd)); again = take(fd)                           # twice: one more handle, not more memory
    at = map_it(h, 2 * MIB); kept = c_ulonglong()
    cu.cuMemRetainAllocationHandle(byref(kept), at); peer.send("have"); peer.recv()
    for handle in (h, again, kept.value):
        cu.cuMemRelease(handle); assert used() == 2 * MIB
    assert get(at, 2) == b"ab" and result(cu.cuMemRelease, h) == 1
    cu.cuMemUnmap(at, 2 * MIB); assert used() == 0; peer.send("gone")
peer = Peer(other); context(); h = create(2 * MIB); at = map_it(h, 2 * MIB); put(at, b"ab"); fd = export(h)
peer.send("take", fd); peer.recv()
cu.cuMemRelease(h); cu.cuMemUnmap(at, 2 * MIB); assert used() == mine() == 2 * MIB
peer.send("release"); peer.recv(); assert used() == mine() == 0
back = take(fd); assert used() == mine() == 2 * MIB                  # the descriptor had kept the bytes
assert get(map_it(back, 2 * MIB), 2) == b"ab"; peer.join()
""")


def test_the_maker_is_killed(machine: Any) -> None:
    """What it shared passes to who still has it, the rest is gone."""
    machine.run("""
def maker(peer):
    context(); h = create(2 * MIB); put(map_it(h, 2 * MIB), b"kept"); create(6 * MIB); mem_alloc(MIB)
    peer.send("made", export(h)); peer.recv()
peer = Peer(maker); context(); _, fd = peer.recv(1)
h = take(fd); assert used() == 9 * MIB and mine() == 0
peer.kill(); assert used() == mine() == 2 * MIB
at = map_it(h, 2 * MIB); assert get(at, 4) == b"kept"
cu.cuMemUnmap(at, 2 * MIB); cu.cuMemRelease(h); assert used() == 0
""")


def test_importers_are_killed(machine: Any) -> None:
    machine.run("""
def importer(peer):
    context(); _, fd = peer.recv(1)
    map_it(take(fd), 2 * MIB); peer.send("have"); peer.recv()
peers = [Peer(importer) for _ in range(3)]; context(); h = create(2 * MIB)
for peer in peers:
    peer.send("take", export(h)); peer.recv()
peers[0].kill(); assert used() == mine() == 2 * MIB
cu.cuMemRelease(h); assert used() == 2 * MIB
peers[2].kill(); assert used() == mine() == 2 * MIB
peers[1].kill(); assert used() == mine() == 0
""")


def test_memory_that_nobody_has_any_more_must_fit_again(machine: Any) -> None:
    machine.run("""
def maker(peer):
    context(); fd = export(create(40 * MIB)); peer.send("made", fd); peer.recv()
peer = Peer(maker); context(); _, fd = peer.recv(1); peer.kill()
whole = mem_alloc(40 * MIB); assert result(take, os.dup(fd)) == 2
cu.cuMemFree_v2(whole); assert result(take, os.dup(fd)) == 0 and used() == mine() == 40 * MIB
""")


def test_killed_at_any_moment(machine: Any) -> None:
    """Makers and importers that share all the time and are killed: nothing stays counted, nothing is lost."""
    machine.run("""
import random
chaos = random.Random(3)
def sharer(peer):
    context(); handles = []; peer.send("ready")
    while True:
        h = create(2 * MIB); fd = export(h); handles.append(take(fd)); cu.cuMemRelease(h)
        at = map_it(handles[-1], 2 * MIB)
        if len(handles) > 2:                                         # 6 MiB each at most: all of them fit, and h
            cu.cuMemRelease(handles.pop(0))
        cu.cuMemUnmap(at, 2 * MIB); cu.cuMemAddressFree(at, 2 * MIB)
def importer(peer):
    context(); _, fd = peer.recv(1); peer.send("ready")
    while True:
        h = take(os.dup(fd)); cu.cuMemRelease(h)
makers = [Peer(sharer) for _ in range(8)]; takers = [Peer(importer) for _ in range(8)]
context(); h = create(2 * MIB); fd = export(h)
for peer in takers:
    peer.send("take", fd)
for peer in makers + takers:
    peer.recv()
everybody = makers + takers; chaos.shuffle(everybody)
for peer in everybody:
    time.sleep(chaos.uniform(0, 0.02)); peer.kill(); assert mine() == 2 * MIB
assert used() == 2 * MIB
cu.cuMemRelease(h); assert used() == 0
""")


def test_properties_and_errors(machine: Any) -> None:
    machine.run("""
context(); prop, h, value = Prop(), create(2 * MIB), c_int()
cu.cuDeviceGetAttribute(byref(value), 103, 0); assert value.value == 1
taken = take(export(h)); cu.cuMemGetAllocationPropertiesFromHandle(byref(prop), taken)
assert (prop.type, prop.handles, prop.where, prop.id) == (1, 1, 1, 0)
assert result(export, create(2 * MIB, handles=0)) == 1                 # made without wanting to be exported
assert result(cu.cuMemExportToShareableHandle, byref(c_int()), h, 1, 1) == 1
assert result(cu.cuMemExportToShareableHandle, byref(c_int()), h, 8, 0) == 1
assert result(cu.cuMemExportToShareableHandle, None, h, 1, 0) == 1
assert result(cu.cuMemExportToShareableHandle, byref(c_int()), 12345678, 1, 0) == 1
assert result(create, 2 * MIB, 8) == 801 and result(create, 2 * MIB, 2) == 801
read, write = os.pipe()
assert result(take, read) == 1 and result(take, os.open("/dev/null", os.O_RDWR)) == 1
assert result(cu.cuMemImportFromShareableHandle, byref(c_ulonglong()), 99, 1) == 1
assert result(cu.cuMemImportFromShareableHandle, None, write, 1) == 1
""")


@pytest.mark.parametrize("where", [2, 3, 4])
def test_host_memory_is_not_the_gpu_s(machine: Any, where: int) -> None:
    machine.run(f"WHERE = {where}" + """
def other(peer):
    context(); _, fd = peer.recv(1); put(map_it(take(fd), 2 * MIB), b"host"); assert used() == 0; peer.send("done")
peer = Peer(other); context(); h = create(2 * MIB, where=WHERE); at = map_it(h, 2 * MIB); fd = export(h)
cu.cuMemSetAccess(at, 2 * MIB, byref(Access(2, 0, 3)), 1)
peer.send("take", fd); peer.recv(); assert get(at, 4) == b"host" and used() == 0; peer.join()
""")


def test_a_gpu_that_the_other_does_not_see(machine: Any) -> None:
    machine.configure(f"{UUID} {64 << 20} One", f"GPU-bbbbbbbb-1111-2222-3333-444444444444 {64 << 20} Two")
    machine.run("""
def other(peer):
    os.environ["CUDA_VISIBLE_DEVICES"] = "1"; context(); _, fd = peer.recv(1); assert result(take, fd) == 101
    peer.send("no"); _, fd = peer.recv(1); prop = Prop()
    cu.cuMemGetAllocationPropertiesFromHandle(byref(prop), take(fd)); assert prop.id == 0; peer.send("yes")
peer = Peer(other); context(0)
peer.send("take", export(create(2 * MIB))); peer.recv()
h = c_ulonglong(); cu.cuMemCreate(byref(h), 2 * MIB, byref(Prop(1, 1, 1, 1)), 0)
peer.send("take", export(h.value)); peer.recv(); peer.join()
""")


def test_no_descriptor_is_left(machine: Any) -> None:
    machine.run("""
context(); create(2 * MIB); count = lambda: len(os.listdir("/proc/self/fd")); before = count()
for _ in range(300):
    h = create(2 * MIB); fd = export(h); again = take(fd); at = map_it(again, 2 * MIB)
    cu.cuMemRelease(h); cu.cuMemRelease(again); cu.cuMemUnmap(at, 2 * MIB); cu.cuMemAddressFree(at, 2 * MIB)
assert count() == before and used() == 2 * MIB
""")
