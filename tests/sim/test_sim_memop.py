"""Values in memory that streams wait for and write."""

from __future__ import annotations

from typing import Any

import pytest

OPS = """
class Op(ctypes.Structure):
    _fields_ = [("kind", c_uint), ("at", c_ulonglong), ("value", c_ulonglong), ("flags", c_uint),
                ("alias", c_ulonglong), ("pad", c_ulonglong)]
def ops(*each):
    return (Op * len(each))(*(Op(*op) for op in each))
def pinned(size=64):
    out = c_void_p(); cu.cuMemHostAlloc(byref(out), size, 0); ctypes.memset(out.value, 0, size); return out.value
def word(at):
    return c_uint.from_address(at)
def busy(s):
    return result(cu.cuStreamQuery, s) == 600
context(); k = Kernels(); s, other = stream(1), stream(1); at = pinned()
"""


def test_a_wait_for_the_host(machine: Any) -> None:
    machine.run(OPS + """
p = mem_alloc(4)
cu.cuStreamWaitValue32_v2(s, at, 5, 0); cu.cuMemsetD8Async(p, 1, 4, s); cu.cuMemcpyDtoHAsync_v2(at + 8, p, 4, s)
assert busy(s); word(at).value = 4; time.sleep(0.02); assert busy(s) and word(at + 8).value == 0
cpu = time.process_time(); time.sleep(0.5); assert time.process_time() - cpu < 0.1      # waiting costs little
word(at).value = 5; cu.cuStreamSynchronize(s); assert word(at + 8).value == 0x01010101
cu.cuStreamWaitValue32(s, at, 5, 0); cu.cuStreamSynchronize(s)                          # it is already there
""")


def test_streams_wake_each_other(machine: Any) -> None:
    """Each waits for the other's value in turn; what was before a write is done by then."""
    machine.run(OPS + """
start, end = event(), event(); p = mem_alloc(64); cu.cuMemsetD8_v2(p, 0, 64)
cu.cuEventRecord(start, s)
for i in range(1, 51):
    cu.cuStreamWriteValue32_v2(s, p, i, 0); cu.cuStreamWaitValue64_v2(s, p + 8, i, 1)
    cu.cuStreamWaitValue32_v2(other, p, i, 1); launch(k.spin_us100, other)
    cu.cuStreamWriteValue64_v2(other, p + 8, i, 1)
cu.cuEventRecord(end, s); cu.cuEventSynchronize(end); assert elapsed_ms(start, end) >= 5
assert int.from_bytes(get(p, 4), "little") == 50 == int.from_bytes(get(p + 8, 8), "little")
""")


@pytest.mark.parametrize(("flags", "value", "no", "yes"), [
    (0, 10, (9, 0, 10 - 2**31), (10, 11, 10 + 2**31 - 1)), (1, 10, (9, 11), (10,)), (2, 6, (0, 9), (2, 4, 15)),
    (3, 0xF0, (0xFFFFFFFF, 0xFFFFFF0F), (0, 0xFFFFFFFE))])
def test_conditions(machine: Any, flags: int, value: int, no: tuple[int, ...], yes: tuple[int, ...]) -> None:
    machine.run(OPS + f"flags, value, no, yes = {flags}, {value}, {no}, {yes}" + """
for last in yes:
    word(at).value = no[0] & 0xffffffff; cu.cuStreamWaitValue32_v2(s, at, value, flags)
    for wrong in no:
        word(at).value = wrong & 0xffffffff; time.sleep(0.005); assert busy(s), wrong
    word(at).value = last; cu.cuStreamSynchronize(s)
    ctypes.c_uint64.from_address(at).value = last          # 64 bits: the same where it does not wrap
    if flags in (0, 1, 2) and last < 2**31:
        cu.cuStreamWaitValue64_v2(s, at, value, flags); cu.cuStreamSynchronize(s)
""")


def test_a_batch_in_order(machine: Any) -> None:
    machine.run(OPS + """
cu.cuStreamBatchMemOp_v2(s, 4, ops((1, at, 1, 1), (2, at + 8, 7, 0), (6, 0, 0, 0), (5, at + 16, 2**40, 0)), 0)
time.sleep(0.01); assert word(at + 8).value == 0; word(at).value = 1; cu.cuStreamSynchronize(s)
assert word(at + 8).value == 7 and c_ulonglong.from_address(at + 16).value == 2**40
""")


def test_processes_wake_each_other(machine: Any) -> None:
    machine.run("""
def other(peer):
    context(); _, fd = peer.recv(1); at = map_it(take(fd), 2 * MIB); s = stream(1)
    cu.cuStreamWaitValue32_v2(s, at, 1, 1); cu.cuStreamWriteValue32_v2(s, at + 4, 2, 0); cu.cuStreamSynchronize(s)
peer = Peer(other); context(); h = create(2 * MIB); at = map_it(h, 2 * MIB); s = stream(1)
peer.send("take", export(h)); cu.cuStreamWriteValue32_v2(s, at, 1, 0); cu.cuStreamWaitValue32_v2(s, at + 4, 2, 1)
cu.cuStreamSynchronize(s); peer.join()
""")


def test_in_graphs(machine: Any) -> None:
    machine.run(OPS + """
g, x, node, kind, n = c_void_p(), c_void_p(), c_void_p(), c_uint(), c_size_t(1)
cu.cuStreamBeginCapture_v2(s, 0); cu.cuStreamWaitValue32_v2(s, at, 1, 1); cu.cuStreamWriteValue32_v2(s, at + 4, 9, 0)
cu.cuStreamEndCapture(s, byref(g)); cu.cuGraphGetNodes(g, byref(node), byref(n))
cu.cuGraphNodeGetType(node, byref(kind)); assert kind.value == 12 and word(at + 4).value == 0
class Batch(ctypes.Structure):
    _fields_ = [("ctx", c_void_p), ("count", c_uint), ("ops", c_void_p), ("flags", c_uint)]
more = ops((2, at + 8, 5, 0)); batch = Batch(None, 1, ctypes.addressof(more), 0)
copy = c_void_p(); cu.cuGraphAddBatchMemOpNode(byref(node), g, None, 0, byref(batch)); cu.cuGraphClone(byref(copy), g)
assert result(cu.cuGraphAddBatchMemOpNode, byref(node), None, None, 0, byref(batch)) == 1
cu.cuGraphInstantiateWithFlags(byref(x), copy, 0); cu.cuGraphDestroyNode(node); cu.cuGraphDestroy(g)
cu.cuGraphDestroy(copy)
cu.cuGraphLaunch(x, s); assert busy(s) and word(at + 4).value == 0
word(at).value = 1; cu.cuStreamSynchronize(s); assert word(at + 4).value == 9 and word(at + 8).value == 5
cu.cuGraphExecDestroy(x)
""")


def test_errors(machine: Any) -> None:
    machine.run(OPS + """
value = c_int(); mine = ctypes.create_string_buffer(64)
for attribute in (92, 93, 94, 122, 123):
    cu.cuDeviceGetAttribute(byref(value), attribute, 0); assert value.value == 1
assert result(cu.cuStreamWaitValue32_v2, s, at + 1, 0, 0) == result(cu.cuStreamWaitValue64_v2, s, at + 4, 0, 0) == 1
assert result(cu.cuStreamWriteValue32_v2, s, ctypes.addressof(mine), 0, 0) == 1 # memory that the driver does not know
assert result(cu.cuStreamWaitValue32_v2, s, 0, 0, 0) == 1
assert result(cu.cuStreamWaitValue32_v2, s, at, 0, 4) == result(cu.cuStreamWriteValue32_v2, s, at, 0, 2) == 1
assert result(cu.cuStreamWaitValue32_v2, s, at, 0, 1 << 30) == 801
assert result(cu.cuStreamWaitValue32_v2, c_void_p(4096), at, 0, 0) == 400
one = ops((2, at, 1, 0), (99, at, 1, 0))
assert result(cu.cuStreamBatchMemOp_v2, s, 2, one, 0) == 1; cu.cuStreamSynchronize(s); assert word(at).value == 0
for count, flags in ((0, 0), (257, 0), (1, 1)):
    assert result(cu.cuStreamBatchMemOp_v2, s, count, one, flags) == 1
assert result(cu.cuStreamBatchMemOp_v2, s, 1, None, 0) == 1
""")
