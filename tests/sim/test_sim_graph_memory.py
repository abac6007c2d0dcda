"""Allocation and free nodes: when graphs take memory, how much, and when it goes."""

from __future__ import annotations

from typing import Any

import pytest

UUID = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
GRAPHS = """
class PoolProps(ctypes.Structure):
    _fields_ = [("type", c_uint), ("handles", c_uint), ("where", c_uint), ("id", c_int), ("win", c_void_p),
                ("max", c_size_t), ("usage", ctypes.c_ushort), ("reserved", ctypes.c_ubyte * 54)]
class Alloc(ctypes.Structure):
    _fields_ = [("props", PoolProps), ("access", c_void_p), ("count", c_size_t), ("bytes", c_size_t),
                ("at", c_ulonglong)]
class Any(ctypes.Structure):
    _fields_ = [("type", c_uint), ("zero", c_int * 3), ("alloc", Alloc), ("rest", c_char * 256)]
def graph():
    out = c_void_p(); cu.cuGraphCreate(byref(out), 0); return out
def add_alloc(g, size, *deps, **props):
    node, p = c_void_p(), Alloc(PoolProps(1, where=1, **props), None, 0, size)
    cu.cuGraphAddMemAllocNode(byref(node), g, (c_void_p * len(deps))(*deps), len(deps), byref(p))
    return p.at, node
def add_free(g, at, *deps):
    node = c_void_p(); cu.cuGraphAddMemFreeNode(byref(node), g, (c_void_p * len(deps))(*deps), len(deps), at)
    return node
def instance(g, flags=0):
    out = c_void_p(); cu.cuGraphInstantiateWithFlags(byref(out), g, flags); return out
def attribute(which):
    value = c_ulonglong(); cu.cuDeviceGetGraphMemAttribute(0, which, byref(value)); return value.value / MIB
def now():
    '''in use and reserved, MiB; what is reserved is what the GPU lacks'''
    assert attribute(2) * MIB == used()
    return attribute(0), attribute(2)
def run(x, on):
    cu.cuGraphLaunch(x, on); cu.cuStreamSynchronize(on)
context(); used(); s, k = stream(1), Kernels()
"""


@pytest.fixture(autouse=True)
def _gpu(machine: Any) -> None:
    machine.configure(f"{UUID} {64 << 20} Small")


def test_memory_is_taken_at_the_first_launch_and_kept(machine: Any) -> None:
    machine.run(GRAPHS + """
g = graph(); at, a = add_alloc(g, 10 * MIB); f = add_free(g, at, a); x = instance(g); assert now() == (0, 0)
run(x, s); assert now() == (0, 10); run(x, s); assert now() == (0, 10)
assert attribute(1) == attribute(3) == 10
cu.cuDeviceGraphMemTrim(0); assert now() == (0, 0) and attribute(3) == 10
for high in (1, 3):
    cu.cuDeviceSetGraphMemAttribute(0, high, byref(c_ulonglong(0)))
assert attribute(1) == attribute(3) == 0
cu.cuGraphUpload(x, s); cu.cuStreamSynchronize(s); assert now() == (0, 10)         # before it is launched
cu.cuGraphExecDestroy(x); cu.cuGraphDestroy(g); assert now() == (0, 10)            # kept for other graphs
cu.cuDeviceGraphMemTrim(0); assert now() == (0, 0)
""")


def test_one_after_the_other_shares(machine: Any) -> None:
    machine.run(GRAPHS + """
g = graph(); one, a = add_alloc(g, 10 * MIB); f = add_free(g, one, a); two, b = add_alloc(g, 6 * MIB, f)
add_free(g, two, b); run(instance(g), s); assert now() == (0, 10)                  # the most at one time
h = graph(); p, a = add_alloc(h, 10 * MIB); q, b = add_alloc(h, 6 * MIB, a)
add_free(h, q, add_free(h, p, b)); run(instance(h), s); assert now() == (0, 16)
""")


def test_streams_that_run_at_once_do_not_share(machine: Any) -> None:
    machine.run(GRAPHS + """
other = stream(1); graphs = []
for _ in range(3):
    g = graph(); node = c_void_p()
    at, a = add_alloc(g, 8 * MIB)
    class Kernel(ctypes.Structure):
        _fields_ = [("f", c_void_p), ("dims", c_uint * 7), ("params", c_void_p), ("extra", c_void_p),
                    ("kern", c_void_p), ("ctx", c_void_p)]
    kernel = Kernel(k.spin_ms50.value, (c_uint * 7)(1, 1, 1, 1, 1, 1, 0))
    cu.cuGraphAddKernelNode_v2(byref(node), g, byref(a), 1, byref(kernel)); add_free(g, at, node)
    graphs.append(instance(g))
cu.cuGraphLaunch(graphs[0], s); cu.cuGraphLaunch(graphs[1], s); assert now() == (8, 8)   # one after the other
cu.cuGraphLaunch(graphs[2], other); assert now() == (16, 16)
cu.cuDeviceGraphMemTrim(0); assert now() == (16, 16)                               # still needed
sync(); assert now() == (0, 16); cu.cuDeviceGraphMemTrim(0); assert now() == (0, 0)
""")


def test_what_a_graph_leaves_allocated(machine: Any) -> None:
    machine.run(GRAPHS + """
g = graph(); at, _ = add_alloc(g, 4 * MIB); x = instance(g)
assert result(cu.cuMemFreeAsync, at, s) == 1 and result(cu.cuMemFree_v2, at) == 1  # not allocated before a launch
run(x, s); put(at, b"mine"); assert now() == (4, 4) and get(at, 4) == b"mine"
cu.cuDeviceGraphMemTrim(0); assert now() == (4, 4)
assert result(cu.cuGraphLaunch, x, s) == 1                                         # not freed yet
cu.cuMemFreeAsync(at, s); cu.cuStreamSynchronize(s); assert now() == (0, 4) and result(cu.cuMemFreeAsync, at, s) == 1
run(x, s); cu.cuMemFree_v2(at); assert now() == (0, 4)
h = graph(); add_free(h, at); y = instance(h); run(x, s); run(y, s); assert now() == (0, 4) # by another graph
assert result(cu.cuGraphLaunch, y, s) == 1
run(x, s); cu.cuGraphExecDestroy(x); cu.cuGraphDestroy(g); assert now() == (4, 4) and get(at, 4) == b"mine"
cu.cuMemFree_v2(at); cu.cuDeviceGraphMemTrim(0); assert now() == (0, 0) and result(cu.cuMemFree_v2, at) == 1
g = graph(); add_alloc(g, 4 * MIB); x = instance(g, 1)                             # frees at the next launch itself
run(x, s); run(x, s); assert now() == (4, 4)
""")


def test_out_of_memory_is_the_launch_s(machine: Any) -> None:
    machine.run(GRAPHS + """
g = graph(); at, a = add_alloc(g, 40 * MIB); add_free(g, at, a); x = instance(g); p = mem_alloc(30 * MIB)
assert result(cu.cuGraphLaunch, x, s) == result(cu.cuGraphUpload, x, s) == 2 and used() == 30 * MIB
cu.cuMemFree_v2(p); run(x, s); assert now() == (0, 40)
assert result(mem_alloc, 30 * MIB) == 2                                            # nobody takes it away unasked
cu.cuDeviceGraphMemTrim(0); assert result(mem_alloc, 30 * MIB) == 0
assert result(add_alloc, graph(), 65 * MIB) == 2
""")


def test_capture(machine: Any) -> None:
    machine.run(GRAPHS + """
outside, at, g = c_ulonglong(), c_ulonglong(), c_void_p(); cu.cuMemAllocAsync(byref(outside), MIB, s); n = c_size_t()
cu.cuStreamBeginCapture_v2(s, 0)
cu.cuMemAllocAsync(byref(at), 4 * MIB, s); cu.cuMemsetD8Async(at.value, 5, 4 * MIB, s)
assert result(cu.cuMemFreeAsync, outside.value, s) == 1                            # no graph's
cu.cuMemFreeAsync(at.value, s); cu.cuStreamEndCapture(s, byref(g)); assert used() == MIB
cu.cuGraphGetNodes(g, None, byref(n)); assert n.value == 3
nodes = (c_void_p * 3)(); cu.cuGraphGetNodes(g, nodes, byref(n)); kinds = []
for node in nodes:
    kind = c_uint(); cu.cuGraphNodeGetType(c_void_p(node), byref(kind)); kinds.append(kind.value)
assert kinds == [10, 2, 11]
x = instance(g); run(x, s); assert attribute(2) == 4 and used() == 5 * MIB; cu.cuMemFree_v2(outside.value)
pool, reserved = c_void_p(), c_ulonglong(); cu.cuDeviceGetDefaultMemPool(byref(pool), 0)
cu.cuMemPoolGetAttribute(pool, 5, byref(reserved)); assert reserved.value == 0 and used() == 4 * MIB
""")


def test_what_such_a_graph_does_not_allow(machine: Any) -> None:
    machine.run(GRAPHS + """
g = graph(); at, a = add_alloc(g, MIB); x = instance(g); parent, node = graph(), c_void_p()
assert result(instance, g) == 801                                                  # one at a time
cu.cuGraphExecDestroy(x); instance(g)
assert result(cu.cuGraphClone, byref(c_void_p()), g) == 801 and result(cu.cuGraphDestroyNode, a) == 801
assert result(cu.cuGraphAddChildGraphNode, byref(node), parent, None, 0, g) == 801
f = add_free(g, at, a); assert result(add_free, g, at, a) == 1                     # twice
assert result(add_free, g, at + 8) == result(add_free, g, mem_alloc(64)) == result(add_free, g, 0) == 1
assert result(add_alloc, g, 0) == 1 and result(lambda: add_alloc(g, MIB, handles=1)) == 801
for which, value in ((0, 0), (2, 0), (1, 5), (7, 0)):
    assert result(cu.cuDeviceSetGraphMemAttribute, 0, which, byref(c_ulonglong(value))) == 1
assert result(cu.cuDeviceGetGraphMemAttribute, 3, 0, byref(c_ulonglong())) == 101
assert result(cu.cuDeviceGetGraphMemAttribute, 0, 0, None) == 1 and result(cu.cuDeviceGraphMemTrim, 3) == 101
p = Any(type=10, alloc=Alloc(PoolProps(1, where=1), None, 0, 2 * MIB))
cu.cuGraphAddNode(byref(node), parent, None, 0, byref(p))
assert p.alloc.at; back = Alloc(); cu.cuGraphMemAllocNodeGetParams(node, byref(back))
assert (back.at, back.bytes) == (p.alloc.at, 2 * MIB)
""")


def test_the_context_s_end(machine: Any) -> None:
    machine.run(GRAPHS + """
g = graph(); at, _ = add_alloc(g, 4 * MIB); x = instance(g); run(x, s); assert now() == (4, 4)
cu.cuDevicePrimaryCtxReset_v2(0); assert now() == (0, 0)
cu.cuGraphExecDestroy(x); cu.cuGraphDestroy(g)
""")
