"""Memory pools: what they reserve is what the GPU lacks; and pools whose allocations other processes have too."""

from __future__ import annotations

from typing import Any

import pytest

UUID = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
POOLS = """
class PoolProps(ctypes.Structure):
    _fields_ = [("type", c_uint), ("handles", c_uint), ("where", c_uint), ("id", c_int), ("win", c_void_p),
                ("max", c_size_t), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 54)]
def pool(handles=0, most=0, keep=0):
    out = c_void_p(); cu.cuMemPoolCreate(byref(out), byref(PoolProps(1, handles, 1, 0, None, most)))
    cu.cuMemPoolSetAttribute(out, 4, byref(c_ulonglong(keep))); return out
def attribute(p, which):
    out = c_ulonglong(); cu.cuMemPoolGetAttribute(p, which, byref(out)); return out.value / MIB
def state(p):
    '''reserved now and at most, used now and at most, in MiB'''
    return tuple(attribute(p, which) for which in (5, 6, 7, 8))
def alloc(p, size, on):
    out = c_ulonglong(); cu.cuMemAllocFromPoolAsync(byref(out), size, p, on); return out.value
def free(at, on):
    cu.cuMemFreeAsync(at, on)
def pool_fd(p):
    out = c_int(-1); cu.cuMemPoolExportToShareableHandle(byref(out), p, 1, 0); return out.value
def pool_of(fd):
    out = c_void_p()
    try:
        cu.cuMemPoolImportFromShareableHandle(byref(out), fd, 1, 0)
    finally:
        os.close(fd)
    return out
def exported(at):
    out = (ctypes.c_ubyte * 64)(); cu.cuMemPoolExportPointer(out, at); return bytes(out)
def imported(p, data):
    out = c_ulonglong(); cu.cuMemPoolImportPointer(byref(out), p, (ctypes.c_ubyte * 64)(*data)); return out.value
"""


@pytest.fixture(autouse=True)
def _gpu(machine: Any) -> None:
    machine.configure(f"{UUID} {64 << 20} Small")


@pytest.mark.parametrize("handles", [0, 1])
def test_reserved_is_what_the_gpu_lacks(machine: Any, handles: int) -> None:
    machine.run(POOLS + f"HANDLES = {handles}" + """
context(); s = stream(1); p = pool(HANDLES, keep=8 * MIB)
a, b, c = (alloc(p, size * MIB, s) for size in (4, 6, 10)); assert state(p) == (20, 20, 20, 20) and used() == 20 * MIB
free(a, s); free(c, s); assert state(p) == (20, 20, 6, 20) and used() == 20 * MIB      # nothing goes before a sync
cu.cuStreamSynchronize(s); assert attribute(p, 5) * MIB == used() and attribute(p, 5) in (6, 10)  # down to 8, or in use
a = alloc(p, 4 * MIB, s); free(a, s); free(b, s); sync(); assert used() <= 8 * MIB
cu.cuMemPoolTrimTo(p, 0); assert state(p) == (0, 20, 0, 20) and used() == 0
a = alloc(p, 2 * MIB, s); put(a, b"bytes"); assert get(a, 5) == b"bytes"
for high in (6, 8):
    cu.cuMemPoolSetAttribute(p, high, byref(c_ulonglong(0)))
assert state(p) == (2, 2, 2, 2)
for which, value in ((6, 1), (5, 0), (7, 0)):
    assert result(cu.cuMemPoolSetAttribute, p, which, byref(c_ulonglong(value))) == 1
free(a, s); cu.cuStreamSynchronize(s); assert state(p) == (2, 2, 0, 2) and used() == 2 * MIB
again = alloc(p, 2 * MIB, s); assert again == a and used() == 2 * MIB
cu.cuMemPoolDestroy(p); put(again, b"valid"); assert used() == 2 * MIB                  # until its last block goes
free(again, s); cu.cuStreamSynchronize(s); assert used() == 0 and result(cu.cuMemPoolTrimTo, p, 0) == 1
""")


def test_what_is_kept_makes_room_and_limits_hold(machine: Any) -> None:
    machine.run(POOLS + """
context(); s = stream(1); p = pool(keep=2**64 - 1); a = alloc(p, 40 * MIB, s); free(a, s); cu.cuStreamSynchronize(s)
assert used() == 40 * MIB and result(mem_alloc, 30 * MIB) == 2   # another's call takes nothing away
b = alloc(p, 5 * MIB, s); assert used() == 45 * MIB
c = alloc(p, 50 * MIB, s); assert used() == 55 * MIB                                    # its own does
cu.cuMemPoolTrimTo(p, 0); assert used() == 55 * MIB
small = pool(most=4 * MIB); alloc(small, 3 * MIB, s); assert result(alloc, small, 2 * MIB, s) == 2
""")


def test_default_pools(machine: Any) -> None:
    machine.run(POOLS + """
context(); d, current, mine, at, s = c_void_p(), c_void_p(), pool(), c_ulonglong(), stream(1)
cu.cuDeviceGetDefaultMemPool(byref(d), 0); cu.cuDeviceGetMemPool(byref(current), 0); assert d.value == current.value
assert result(cu.cuMemPoolDestroy, d) == 800
cu.cuDeviceSetMemPool(0, mine); cu.cuMemAllocAsync(byref(at), MIB, s); assert attribute(mine, 7) == 1
cu.cuDeviceGetMemPool(byref(current), 0); assert current.value == mine.value
cu.cuMemPoolDestroy(mine); cu.cuDeviceGetMemPool(byref(current), 0); assert current.value == d.value
assert result(pool_fd, d) == 1 and result(exported, at.value) == 1                      # not made to be exported
""")


def test_another_process_has_it_too(machine: Any) -> None:
    machine.run(POOLS + """
def other(peer):
    context(); s = stream(1); _, fd = peer.recv(1); p = pool_of(fd); data = peer.recv(); at = imported(p, data)
    assert get(at, 4) == b"here" and used() == 10 * MIB and mine() == 0
    put(at + 6 * MIB - 4, b"back"); assert result(imported, p, data) == 1               # once at a time
    assert result(alloc, p, MIB, s) == 1 and result(cu.cuDeviceSetMemPool, 0, p) == 1 and result(pool_fd, p) == 1
    free(at, s); cu.cuStreamSynchronize(s); assert result(cu.cuMemFree_v2, at) == 1
    at = imported(p, data); peer.send("have"); peer.recv()
    assert get(at, 4) == b"here"; cu.cuMemFree_v2(at); peer.send("freed"); peer.recv()
peer = Peer(other); context(); s = stream(1); p = pool(handles=1)
a, b = alloc(p, 6 * MIB, s), alloc(p, 4 * MIB, s); put(a, b"here"); put(b, b"mine")
peer.send("pool", pool_fd(p)); peer.send(exported(a)); peer.recv(); assert get(a + 6 * MIB - 4, 4) == b"back"
free(a, s); cu.cuStreamSynchronize(s)                        # too early, but counted as long as it is mapped
assert attribute(p, 5) == 4 and used() == mine() == 10 * MIB and get(b, 4) == b"mine"
put(alloc(p, 6 * MIB, s), b"another"); peer.send("free it"); peer.recv(); assert used() == mine() == 10 * MIB
peer.kill(); assert used() == mine() == 10 * MIB
""")


def test_either_side_is_killed(machine: Any) -> None:
    machine.run(POOLS + """
def maker(peer):
    context(); s = stream(1); p = pool(handles=1, keep=2**64 - 1); at = alloc(p, 6 * MIB, s); put(at, b"kept")
    alloc(p, 4 * MIB, s); peer.send("pool", pool_fd(p)); peer.send(exported(at)); peer.recv()
def importer(peer):
    context(); _, fd = peer.recv(1); imported(pool_of(fd), peer.recv()); peer.send("have"); peer.recv()
first, second = Peer(maker), Peer(importer); context(); s = stream(1)
_, fd = first.recv(1); data = first.recv(); second.send("pool", fd); second.send(data); second.recv()
p = pool_of(fd); at = imported(p, data); assert used() == 10 * MIB and mine() == 0
first.kill(); assert used() == 6 * MIB and get(at, 4) == b"kept"                        # one of the two has it now
second.kill(); assert used() == mine() == 6 * MIB
cu.cuMemPoolDestroy(p); assert get(at, 4) == b"kept"
free(at, s); cu.cuStreamSynchronize(s); assert used() == 0
""")


def test_errors(machine: Any) -> None:
    machine.run(POOLS + """
context(); s, value = stream(1), c_int(); p, q = pool(handles=1), pool(); fd, at = pool_fd(p), alloc(p, MIB, s)
cu.cuDeviceGetAttribute(byref(value), 119, 0); assert value.value == 1
assert result(pool_of, os.dup(fd)) == 1                                                 # one's own
assert result(pool_of, os.open("/dev/null", os.O_RDWR)) == 1 and result(take, os.dup(fd)) == 1
assert result(pool_of, export(create(2 * MIB))) == 1
assert result(cu.cuMemPoolExportToShareableHandle, byref(c_int()), p, 8, 0) == 1
assert result(cu.cuMemPoolExportToShareableHandle, byref(c_int()), p, 1, 1) == 1
assert result(exported, at + 512) == result(exported, alloc(q, MIB, s)) == result(exported, mem_alloc(MIB)) == 1
assert result(imported, p, exported(at)) == 1 and result(imported, q, bytes(64)) == 1
assert result(lambda: pool(handles=8)) == 801
""")
