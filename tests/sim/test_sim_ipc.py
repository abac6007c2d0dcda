"""cuIpc...: memory of cuMemAlloc and events in several processes."""

from __future__ import annotations

from typing import Any

import pytest

UUID = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
IPC = """
class Handle(ctypes.Structure):
    _fields_ = [("bytes", c_char * 64)]
def handle_of(pointer):
    out = (ctypes.c_ubyte * 64)(); cu.cuIpcGetMemHandle(out, pointer); return bytes(out)
def boxed(handle):
    return (Handle * 1).from_buffer_copy(handle)[0]
def opened(handle, flags=1):
    out = c_ulonglong(); cu.cuIpcOpenMemHandle_v2(byref(out), boxed(handle), flags); return out.value
def event_handle(event):
    out = (ctypes.c_ubyte * 64)(); cu.cuIpcGetEventHandle(out, event); return bytes(out)
def opened_event(handle):
    out = c_void_p(); cu.cuIpcOpenEventHandle(byref(out), boxed(handle)); return out
"""


@pytest.fixture(autouse=True)
def _gpu(machine: Any) -> None:
    machine.configure(f"{UUID} {256 << 20} Small")


@pytest.mark.parametrize("size", [100, 5000, 3 << 20, 100 << 20])
def test_memory(machine: Any, size: int) -> None:
    machine.run(IPC + f"SIZE = {size}" + """
def other(peer):
    context(); at = opened(peer.recv()); total = peer.recv(); base, size = c_ulonglong(), c_size_t()
    assert get(at, 3) == b"abc" and get(at + SIZE - 3, 3) == b"xyz" and used() == total and mine() == 0
    cu.cuMemGetAddressRange_v2(byref(base), byref(size), at + 9); assert (base.value, size.value) == (at, SIZE)
    assert result(cu.cuMemcpyHtoD_v2, at, c_char_p(b"." * (SIZE + 1)), SIZE + 1) == 1
    put(at, b"ABC"); peer.send("written"); peer.recv(); assert get(at, 3) == b"new"
    cu.cuIpcCloseMemHandle(at); assert result(cu.cuIpcCloseMemHandle, at) == 1 and used() == total; peer.send("closed")
peer = Peer(other); context(); neighbours = [mem_alloc(SIZE) for _ in range(2)]; at = neighbours.pop(0)
put(at, b"abc"); put(at + SIZE - 3, b"xyz"); put(neighbours[0], b"mine"); before = used()
handle = handle_of(at); assert handle_of(at + 3) == handle and used() == mine() == before
peer.send(handle); peer.send(before); peer.recv()
assert get(at, 3) == b"ABC" and get(at + SIZE - 3, 3) == b"xyz" and get(neighbours[0], 4) == b"mine"
put(at, b"new"); peer.send("look"); peer.recv(); peer.join()
cu.cuMemFree_v2(at); cu.cuMemFree_v2(neighbours[0]); assert used() == 0
""")


def test_a_freed_allocation_counts_until_the_last_closes_it(machine: Any) -> None:
    """And its address is not given to another allocation before."""
    machine.run(IPC + """
def other(peer):
    context(); handle = peer.recv(); at = opened(handle); assert opened(handle) == at     # twice: counted
    peer.send("have"); peer.recv()
    assert get(at, 4) == b"kept"; cu.cuIpcCloseMemHandle(at); assert get(at, 4) == b"kept" and used() == 2 * MIB
    cu.cuIpcCloseMemHandle(at); assert used() == MIB; peer.send("closed"); peer.recv()
    assert result(opened, handle) == 400                                                  # freed by now
    peer.send("seen")
peer = Peer(other); context(); at = mem_alloc(MIB); put(at, b"kept"); peer.send(handle_of(at)); peer.recv()
cu.cuMemFree_v2(at); assert used() == mine() == MIB and result(cu.cuMemFree_v2, at) == 1
second = mem_alloc(MIB); assert second != at; put(second, b"other"); peer.send("look"); peer.recv()
assert used() == MIB; peer.send("again"); peer.recv(); peer.join()
cu.cuMemFree_v2(second); assert used() == 0
""")


def test_either_side_is_killed(machine: Any) -> None:
    machine.run(IPC + """
def importer(peer):
    context(); opened(peer.recv()); peer.send("have"); peer.recv()
def exporter(peer):
    context(); mem_alloc(MIB); at = mem_alloc(2 * MIB); put(at, b"kept"); peer.send(handle_of(at)); peer.recv()
victim, maker = Peer(importer), Peer(exporter); context()
at = mem_alloc(MIB); victim.send(handle_of(at)); victim.recv(); victim.kill(); cu.cuMemFree_v2(at)
handle = maker.recv(); at = opened(handle); assert mine() == 0 and used() == 3 * MIB
maker.kill(); assert used() == mine() == 2 * MIB and get(at, 4) == b"kept"
cu.cuIpcCloseMemHandle(at); assert used() == 0
assert result(opened, handle) == 400                                  # its process is gone
""")


def test_a_context_s_end_closes_what_it_opened(machine: Any) -> None:
    machine.run(IPC + """
def importer(peer):
    context(); opened(peer.recv()); cu.cuDevicePrimaryCtxRelease_v2(0); peer.send("released"); peer.recv()
peer = Peer(importer); context(); at = mem_alloc(MIB); peer.send(handle_of(at)); peer.recv()
cu.cuMemFree_v2(at); assert used() == 0; peer.send("end"); peer.join()
""")


def test_errors(machine: Any) -> None:
    machine.run(IPC + """
context(); at = mem_alloc(MIB); handle = handle_of(at); managed, pinned = c_ulonglong(), c_void_p(); value = c_uint()
assert result(opened, handle) == 201                                  # one's own
assert result(opened, handle, 0) == 1 and result(opened, bytes(64)) == 400
assert result(cu.cuIpcOpenMemHandle_v2, None, boxed(handle), 1) == 1
cu.cuMemAllocManaged(byref(managed), MIB, 1); cu.cuMemHostAlloc(byref(pinned), MIB, 0)
for wrong in (managed.value, pinned.value, map_it(create(2 * MIB), 2 * MIB), 0, 4096):
    assert result(handle_of, wrong) == 1
assert result(cu.cuIpcCloseMemHandle, at) == 1 and result(cu.cuIpcGetMemHandle, None, at) == 1
cu.cuPointerGetAttribute(byref(value), 10, at); assert value.value == 1
cu.cuPointerGetAttribute(byref(value), 10, managed.value); assert value.value == 0
""")


def test_many_exports_leave_nothing(machine: Any) -> None:
    machine.run(IPC + """
def importer(peer):
    context()
    for _ in range(200):
        at = opened(peer.recv()); cu.cuIpcCloseMemHandle(at); peer.send("closed")
    peer.send(len(os.listdir("/proc/self/fd")) < 30)
peer = Peer(importer); context(); mem_alloc(MIB); used(); before, addresses = 0, set()
for i in range(200):
    at = mem_alloc((100 << 20) if i % 10 == 0 else MIB); addresses.add(at)
    peer.send(handle_of(at)); peer.recv(); cu.cuMemFree_v2(at)
    before = len(os.listdir("/proc/self/fd")) if i == 1 else before     # one of each size was exported
assert peer.recv(); peer.join()
assert used() == MIB and len(os.listdir("/proc/self/fd")) <= before and len(addresses) < 20, len(addresses)
""")


def test_events(machine: Any) -> None:
    machine.run(IPC + """
def other(peer):
    context(); k = Kernels(); e = opened_event(peer.recv()); s = stream(1); at = mem_alloc(4); mark = event()
    assert result(cu.cuEventQuery, e) == 600                          # still running over there
    cu.cuStreamWaitEvent(s, e, 0); cu.cuMemsetD8Async(at, 7, 4, s); assert result(cu.cuStreamQuery, s) == 600
    cu.cuEventSynchronize(e); assert result(cu.cuEventQuery, e) == 0
    cu.cuStreamSynchronize(s); assert get(at, 4) == bytes([7]) * 4
    launch(k.spin_ms20, s); cu.cuEventRecord(e, s); peer.send("recorded"); peer.recv()
    assert result(cu.cuEventElapsedTime, byref(c_float()), e, e) == 400 and result(event_handle, e) == 1
    cu.cuEventDestroy_v2(e)
peer = Peer(other); context(); k = Kernels(); e = event(6); launch(k.spin_ms200); cu.cuEventRecord(e, None)
peer.send(event_handle(e)); peer.recv()
assert result(cu.cuEventQuery, e) == 600                              # the other's record counts here
cu.cuEventSynchronize(e); peer.send("end"); peer.join()
assert result(cu.cuEventQuery, e) == 0
assert result(event_handle, event()) == 1 and result(opened_event, event_handle(e)) == 201
assert result(opened_event, bytes(64)) == 400 and result(cu.cuEventCreate, byref(c_void_p()), 4) == 1
cu.cuEventDestroy_v2(e); assert result(event_handle, e) == 400
""")


def test_an_event_of_a_killed_process_is_over(machine: Any) -> None:
    machine.run(IPC + """
def other(peer):
    context(); k = Kernels(); e = event(6); launch(k.spin_ms1000, times=100); cu.cuEventRecord(e, None)
    peer.send(event_handle(e)); peer.recv()
peer = Peer(other); context(); e, s, at = opened_event(peer.recv()), stream(1), mem_alloc(4)
cu.cuStreamWaitEvent(s, e, 0); cu.cuMemsetD8Async(at, 1, 4, s)
assert result(cu.cuEventQuery, e) == 600 and result(cu.cuStreamQuery, s) == 600
peer.kill(); cu.cuStreamSynchronize(s); assert result(cu.cuEventQuery, e) == 0
""")
