"""Multicast objects, and external memory."""

from __future__ import annotations

from typing import Any

import pytest

A, B = "GPU-aaaaaaaa-1111-2222-3333-444444444444", "GPU-bbbbbbbb-1111-2222-3333-444444444444"
MULTICAST = """
class ObjectProp(ctypes.Structure):
    _fields_ = [("devices", c_uint), ("size", c_size_t), ("handles", c_ulonglong), ("flags", c_ulonglong)]
def multicast(devices=2, size=4 * MIB, handles=0):
    out = c_ulonglong()
    cu.cuMulticastCreate(byref(out), byref(ObjectProp(devices, size, handles, 0)))
    return out.value
def memory(device, size=4 * MIB):
    out = c_ulonglong(); cu.cuMemCreate(byref(out), size, byref(Prop(1, 1, 1, device)), 0); return out.value
def used_of(device):
    return nv().memory(device)[0]
"""
EXTERNAL = """
class HandleDesc(ctypes.Structure):
    _fields_ = [("type", c_uint), ("fd", c_ulonglong), ("name", c_void_p), ("size", c_ulonglong), ("flags", c_uint),
                ("reserved", c_uint * 16)]
class BufferDesc(ctypes.Structure):
    _fields_ = [("offset", c_ulonglong), ("size", c_ulonglong), ("flags", c_uint), ("reserved", c_uint * 16)]
def external(fd, size, kind=1):
    out = c_void_p()
    try:
        cu.cuImportExternalMemory(byref(out), byref(HandleDesc(kind, fd, None, size)))
    except CudaError:
        os.close(fd)                                          # the driver's only when it has taken it
        raise
    return out
def buffer(memory, offset, size, flags=0):
    out = c_ulonglong(); cu.cuExternalMemoryGetMappedBuffer(byref(out), memory, byref(BufferDesc(offset, size, flags)))
    return out.value
"""


@pytest.fixture(autouse=True)
def _gpus(machine: Any) -> None:
    machine.configure(f"{A} {64 << 20} One", f"{B} {64 << 20} Two")


def test_binding_holds_memory(machine: Any) -> None:
    machine.run(MULTICAST + """
context(); size, value = c_size_t(), c_int()
cu.cuDeviceGetAttribute(byref(value), 132, 0); assert value.value == 1
cu.cuMulticastGetGranularity(byref(size), byref(ObjectProp(2, 4 * MIB, 0, 0)), 0); assert size.value == 2 * MIB
m, one, two = multicast(), memory(0), memory(1); assert (used_of(0), used_of(1)) == (4 * MIB, 4 * MIB)  # none itself
cu.cuMulticastAddDevice(m, 0)
assert result(cu.cuMulticastBindMem, m, 0, one, 0, 4 * MIB, 0) == 800          # not all of its GPUs are there yet
assert result(map_it, m, 4 * MIB) == 800
assert result(cu.cuMulticastAddDevice, m, 0) == 1; cu.cuMulticastAddDevice(m, 1)
at = c_ulonglong(); cu.cuMemAddressReserve(byref(at), 4 * MIB, 0, 0, 0); cu.cuMemMap(at.value, 4 * MIB, 0, two, 0)
cu.cuMulticastBindMem(m, 0, one, 0, 4 * MIB, 0); cu.cuMulticastBindAddr(m, 2 * MIB, at.value + 2 * MIB, 2 * MIB, 0)
cu.cuMemRelease(one); cu.cuMemRelease(two); cu.cuMemUnmap(at.value, 4 * MIB)
assert (used_of(0), used_of(1)) == (4 * MIB, 4 * MIB)                          # bound
over = map_it(m, 4 * MIB); put(over, b"all"); assert get(over, 3) == b"all"
assert result(cu.cuMulticastUnbind, m, 0, 0, 2 * MIB) == 1; cu.cuMulticastUnbind(m, 0, 0, 4 * MIB)
assert (used_of(0), used_of(1)) == (0, 4 * MIB) and result(cu.cuMulticastUnbind, m, 0, 0, 4 * MIB) == 1
cu.cuMemRelease(m); assert used_of(1) == 4 * MIB                               # still mapped
cu.cuMemUnmap(over, 4 * MIB); assert used_of(1) == 0
""")


def test_of_two_processes(machine: Any) -> None:
    machine.run(MULTICAST + """
def other(peer):
    context(1); _, fd = peer.recv(1); m = take(fd); cu.cuMulticastAddDevice(m, 1); peer.send("added"); peer.recv()
    h = memory(1); cu.cuMulticastBindMem(m, 0, h, 0, 4 * MIB, 0); cu.cuMemRelease(h)
    at = map_it(m, 4 * MIB); put(at, b"seen"); peer.send("bound"); peer.recv()
peer = Peer(other); context(0); m = multicast(handles=1); cu.cuMulticastAddDevice(m, 0)
peer.send("take", export(m)); peer.recv(); assert result(cu.cuMulticastAddDevice, m, 1) == 1
at = map_it(m, 4 * MIB); cu.cuMulticastBindMem(m, 0, memory(0), 0, 4 * MIB, 0); peer.send("go"); peer.recv()
assert get(at, 4) == b"seen" and (used_of(0), used_of(1)) == (4 * MIB, 4 * MIB)
peer.kill(); assert (used_of(0), used_of(1)) == (4 * MIB, 0)
""")


def test_multicast_errors(machine: Any) -> None:
    machine.run(MULTICAST + """
context(); m, h = multicast(), memory(0); cu.cuMulticastAddDevice(m, 0); cu.cuMulticastAddDevice(m, 1)
for bad in (dict(devices=0), dict(size=MIB), dict(size=0)):
    assert result(lambda: multicast(**bad)) == 1
assert result(lambda: multicast(handles=8)) == 801 and result(cu.cuMulticastAddDevice, m, 2) == 101
assert result(cu.cuMulticastAddDevice, h, 0) == 1 and result(cu.cuMulticastBindMem, h, 0, h, 0, 4 * MIB, 0) == 1
for offset, within, size, flags in ((MIB, 0, 2 * MIB, 0), (0, MIB, 2 * MIB, 0), (0, 0, MIB, 0),
                                    (4 * MIB, 0, 2 * MIB, 0), (0, 4 * MIB, 2 * MIB, 0), (0, 0, 8 * MIB, 0),
                                    (0, 0, 2 * MIB, 1), (0, 0, 0, 0)):
    assert result(cu.cuMulticastBindMem, m, offset, h, within, size, flags) == 1
cu.cuMulticastBindMem(m, 0, h, 0, 2 * MIB, 0)
assert result(cu.cuMulticastBindMem, m, 0, h, 2 * MIB, 2 * MIB, 0) == 1        # another lies there
assert result(cu.cuMulticastBindAddr, m, 2 * MIB, mem_alloc(2 * MIB), 2 * MIB, 0) == 1
host = c_ulonglong(); cu.cuMemCreate(byref(host), 2 * MIB, byref(Prop(1, 0, 2, 0)), 0)
assert result(cu.cuMulticastBindMem, m, 2 * MIB, host.value, 0, 2 * MIB, 0) == 1
single = multicast(devices=1); cu.cuMulticastAddDevice(single, 1)
assert result(cu.cuMulticastAddDevice, single, 0) == 1
assert result(cu.cuMulticastBindMem, single, 0, h, 0, 2 * MIB, 0) == 101
""")


def test_external_memory(machine: Any) -> None:
    machine.run(EXTERNAL + """
def other(peer):
    context(); nv().memory(); _, fd = peer.recv(1); count = lambda: len(os.listdir("/proc/self/fd")); before = count()
    m = external(fd, 4 * MIB); assert count() == before                       # the descriptor was taken
    whole, part = buffer(m, 0, 4 * MIB), buffer(m, MIB + 100, 1000)
    assert get(part, 4) == b"part"; put(whole + 8, b"back"); assert used() == 4 * MIB and mine() == 0
    assert result(buffer, m, 4 * MIB - 10, 11) == result(buffer, m, 0, 0) == result(buffer, m, 0, 8, 1) == 1
    cu.cuDestroyExternalMemory(m); assert result(cu.cuDestroyExternalMemory, m) == result(buffer, m, 0, 8) == 400
    assert get(part, 4) == b"part"; cu.cuMemFree_v2(part); peer.send("have"); peer.recv()
    assert used() == 4 * MIB; cu.cuMemFree_v2(whole); assert used() == 0 and result(cu.cuMemFree_v2, whole) == 1
    assert count() < before; peer.send("freed")
peer = Peer(other); context(); h = create(4 * MIB); at = map_it(h, 4 * MIB); put(at + MIB + 100, b"part")
fd = export(h)
peer.send("import", fd); os.close(fd); peer.recv(); assert get(at + 8, 4) == b"back"
cu.cuMemUnmap(at, 4 * MIB); cu.cuMemRelease(h); assert used() == mine() == 4 * MIB
peer.send("free"); peer.recv(); peer.join(); assert used() == 0
""")


def test_external_memory_errors(machine: Any) -> None:
    machine.run(EXTERNAL + """
context(); h = create(2 * MIB)
assert result(external, export(h), 2 * MIB + 1) == result(external, export(h), 0) == 1
assert result(external, export(h), 2 * MIB, 9) == 801
assert result(external, os.open("/dev/null", os.O_RDWR), 4096) == 1
assert result(cu.cuImportExternalMemory, None, byref(HandleDesc(1, 0, None, 4096))) == 1
m = external(export(h), 2 * MIB); buffer(m, 0, 4096); cu.cuMemRelease(h); cu.cuDestroyExternalMemory(m)
assert used() == 2 * MIB; cu.cuDevicePrimaryCtxReset_v2(0); assert used() == 0  # the buffer went with the context
""")
