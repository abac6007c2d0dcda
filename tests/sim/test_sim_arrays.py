"""Mipmapped arrays and arrays without memory."""

from __future__ import annotations

from typing import Any

import pytest

UUID = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
ARRAYS = """
class Desc(ctypes.Structure):
    _fields_ = [("w", c_size_t), ("h", c_size_t), ("d", c_size_t), ("format", c_uint), ("channels", c_uint),
                ("flags", c_uint)]
class Needs(ctypes.Structure):
    _fields_ = [("size", c_size_t), ("alignment", c_size_t), ("reserved", c_uint * 4)]
def mipmapped(levels, w, h=0, d=0, format=1, channels=1, flags=0):
    out = c_void_p(); cu.cuMipmappedArrayCreate(byref(out), byref(Desc(w, h, d, format, channels, flags)), levels)
    return out
def level(array, n):
    out = c_void_p(); cu.cuMipmappedArrayGetLevel(byref(out), array, n); return out
def size(array):
    d = Desc(); cu.cuArray3DGetDescriptor_v2(byref(d), array); return d.w, d.h, d.d
context()
"""


@pytest.fixture(autouse=True)
def _gpu(machine: Any) -> None:
    machine.configure(f"{UUID} {64 << 20} Small")


def test_levels(machine: Any) -> None:
    machine.run(ARRAYS + """
a = mipmapped(99, 1024, 512, channels=4)                              # no more levels than there are
sizes = []
while not result(cu.cuMipmappedArrayGetLevel, byref(c_void_p()), a, len(sizes)):
    sizes.append(size(level(a, len(sizes))))
assert sizes == [(1024 >> i, max(512 >> i, 1), 0) for i in range(11)]
rounded = lambda n: (n + 511) // 512 * 512
assert used() == sum(rounded(4 * w * h) for w, h, _ in sizes)
assert level(a, 1).value == level(a, 1).value != level(a, 2).value
data = os.urandom(256); out = ctypes.create_string_buffer(256)
for i in (3, 4):
    cu.cuMemcpyHtoA_v2(level(a, i), 0, c_char_p(data[i:]), 200)
for i in (3, 4):
    cu.cuMemcpyAtoH_v2(out, level(a, i), 0, 200); assert out.raw[:200] == data[i:i + 200]
assert result(cu.cuArrayDestroy, level(a, 3)) == 400                  # goes with the whole
kept = level(a, 3); cu.cuMipmappedArrayDestroy(a); assert used() == 0
assert result(cu.cuMipmappedArrayDestroy, a) == 400 and result(size, kept) == 400 and result(level, a, 0) == 400
assert size(level(mipmapped(3, 8, 8, 8), 2)) == (2, 2, 2)
assert size(level(mipmapped(3, 8, 8, 6, flags=1), 2)) == (2, 2, 6)    # layers stay
assert size(level(mipmapped(0, 8, 8), 0)) == (8, 8, 0)
""")


def test_errors(machine: Any) -> None:
    machine.run(ARRAYS + """
for bad in (dict(w=0), dict(w=8, format=99), dict(w=8, channels=3)):
    assert result(lambda: mipmapped(1, **bad)) == 1
assert result(mipmapped, 1, 8192, 8192, 2) == 2 and result(mipmapped, 1, 2**62, 8, 8) == 2 and used() == 0
assert result(lambda: mipmapped(1, 8, flags=0x40)) == 801             # sparse
assert result(cu.cuMipmappedArrayCreate, None, byref(Desc(8, 8, 0, 1, 1)), 1) == 1
assert result(cu.cuMipmappedArrayCreate, byref(c_void_p()), None, 1) == 1
a = mipmapped(2, 64, 64); assert result(level, a, 2) == 1 and result(cu.cuMipmappedArrayGetLevel, None, a, 0) == 1
assert result(cu.cuMipmappedArrayGetMemoryRequirements, byref(Needs()), a, 0) == 1
cu.cuDevicePrimaryCtxReset_v2(0); assert used() == 0 and result(cu.cuMipmappedArrayDestroy, a) == 400
""")


def test_memory_to_be_mapped_later(machine: Any) -> None:
    machine.run(ARRAYS + """
a, needs = c_void_p(), Needs(); cu.cuArray3DCreate_v2(byref(a), byref(Desc(1000, 10, 0, 1, 1, 0x80)))
assert used() == 0; cu.cuArrayGetMemoryRequirements(byref(needs), a, 0); assert needs.size == 10240
assert result(cu.cuMemcpyHtoA_v2, a, 0, c_char_p(b"nowhere"), 7) == 1
assert result(cu.cuArrayGetMemoryRequirements, byref(needs), a, 7) == 101; cu.cuArrayDestroy(a)
m = mipmapped(2, 1024, flags=0x80); cu.cuMipmappedArrayGetMemoryRequirements(byref(needs), m, 0)
assert needs.size == 1536 and used() == 0; cu.cuMipmappedArrayDestroy(m)
cu.cuArray3DCreate_v2(byref(a), byref(Desc(1000, 10, 0, 1, 1, 0))); assert used() == 10240
assert result(cu.cuArrayGetMemoryRequirements, byref(needs), a, 0) == 1; cu.cuArrayDestroy(a); assert used() == 0
""")
