"""Allocation of every kind, copies, pointers."""

from __future__ import annotations

from typing import Any

UUID = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
INFO = """
def used():
    free, total = c_size_t(), c_size_t()
    cu.cuMemGetInfo_v2(byref(free), byref(total))
    return total.value - free.value
"""


def test_alloc_and_free(machine: Any) -> None:
    machine.configure(f"{UUID} {64 << 20} Small")
    machine.run(INFO + """
context()
p = mem_alloc(1000); assert used() == 1024 and p % 256 == 0
base, size = c_ulonglong(), c_size_t()
cu.cuMemGetAddressRange_v2(byref(base), byref(size), p + 500); assert (base.value, size.value) == (p, 1000)
assert result(cu.cuMemFree_v2, p + 1) == 1
assert result(cu.cuMemFree_v2, 0x1234567) == 1
cu.cuMemFree_v2(p); assert used() == 0
assert result(cu.cuMemFree_v2, p) == 1                       # twice
cu.cuMemFree_v2(0)
assert result(cu.cuMemAlloc_v2, byref(base), 0) == 1
assert result(cu.cuMemAlloc_v2, byref(base), 65 * MIB) == 2
assert result(cu.cuMemAlloc_v2, byref(base), 2**63) == 2
assert result(cu.cuMemAlloc_v2, byref(base), 2**64 - 1) == 2
whole = mem_alloc(64 * MIB); assert result(cu.cuMemAlloc_v2, byref(base), 1) == 2
cu.cuMemFree_v2(whole); cu.cuMemFree_v2(mem_alloc(64 * MIB)); assert used() == 0
p, pitch = c_ulonglong(), c_size_t()
cu.cuMemAllocPitch_v2(byref(p), byref(pitch), 1000, 10, 4); assert pitch.value == 1024 and used() == 10240
cu.cuMemFree_v2(p.value)
cu.cuMemAllocManaged(byref(p), 4096, 1); ctypes.memset(p.value, 5, 4096); assert used() == 4096
flag = c_uint(); cu.cuPointerGetAttribute(byref(flag), 8, p.value); assert flag.value == 1
cu.cuMemFree_v2(p.value); assert used() == 0
assert result(cu.cuMemGetInfo_v2, None, None) == 0           # either may be NULL
""")


def test_the_old_variant_has_pointers_of_32_bits(machine: Any) -> None:
    machine.run(INFO + """
context()
p, out = c_uint(), ctypes.create_string_buffer(100)
cu.cuMemAlloc(byref(p), 100)
cu.cuMemcpyHtoD(p, c_char_p(b"y" * 100), 100); cu.cuMemcpyDtoH(out, p, 100); assert out.raw == b"y" * 100
cu.cuMemFree(p); assert used() == 0
""")


def test_many_blocks(machine: Any) -> None:
    machine.run(INFO + """
context()
blocks = [mem_alloc(512 * (1 + i % 7)) for i in range(20000)]
assert len(set(blocks)) == 20000 and used() == sum(512 * (1 + i % 7) for i in range(20000))
for p in blocks[::2] + blocks[1::2]:
    cu.cuMemFree_v2(p)
assert used() == 0
""")


def test_copies_move_bytes(machine: Any) -> None:
    machine.run("""
context()
data, out = os.urandom(MIB), ctypes.create_string_buffer(MIB)
a, b = mem_alloc(MIB), mem_alloc(MIB)
cu.cuMemcpyHtoD_v2(a, c_char_p(data), MIB); cu.cuMemcpyDtoD_v2(b, a, MIB); cu.cuMemcpyDtoH_v2(out, b, MIB)
assert out.raw == data
cu.cuMemsetD8_v2(a, 7, MIB); cu.cuMemsetD32_v2(a + 4, 0x01020304, 2); cu.cuMemsetD16_v2(a, 0x0506, 1)
cu.cuMemcpyDtoH_v2(out, a, MIB); assert out.raw[:14] == bytes([6, 5, 7, 7, 4, 3, 2, 1, 4, 3, 2, 1, 7, 7])
assert result(cu.cuMemsetD32_v2, a + 1, 0, 1) == 1
assert result(cu.cuMemcpyHtoD_v2, a + 1, c_char_p(data), MIB) == 1       # one byte too far
assert result(cu.cuMemcpyDtoH_v2, out, 0x1000, 1) == 1
cu.cuMemcpyHtoD_v2(0x1000, None, 0)
cu.cuMemcpy(ctypes.addressof(out), b, 100); assert out.raw[:100] == data[:100]
s = stream(1)
for i in range(100):                                                     # order in a stream
    cu.cuMemsetD8Async(a, i, MIB, s)
cu.cuMemcpyDtoHAsync_v2(out, a, MIB, s); cu.cuStreamSynchronize(s); assert out.raw == bytes([99]) * MIB
held = ctypes.create_string_buffer(b"early", 5)
cu.cuMemcpyHtoDAsync_v2(a, held, 5, s); held.raw = b"later"              # pageable: taken when asked for
cu.cuStreamSynchronize(s); cu.cuMemcpyDtoH_v2(out, a, 5); assert out.raw[:5] == b"early"
""")


def test_boxes_and_arrays(machine: Any) -> None:
    machine.run("""
context()
class Box(ctypes.Structure):
    _fields_ = [("sx", c_size_t), ("sy", c_size_t), ("st", c_uint), ("sh", c_void_p), ("sd", c_ulonglong),
                ("sa", c_void_p),
                ("sp", c_size_t), ("dx", c_size_t), ("dy", c_size_t), ("dt", c_uint), ("dh", c_void_p), ("dd",
                                                                                                         c_ulonglong),
                ("da", c_void_p), ("dp", c_size_t), ("w", c_size_t), ("h", c_size_t)]
data = bytes(range(100))
host = ctypes.create_string_buffer(data, 100)
p = mem_alloc(64)
cu.cuMemcpy2D_v2(byref(Box(st=1, sh=ctypes.addressof(host), sp=10, sx=2, sy=1, dt=2, dd=p, dp=8, w=4, h=3)))
out = ctypes.create_string_buffer(64); cu.cuMemcpyDtoH_v2(out, p, 20)
assert [out.raw[8 * y:8 * y + 4] for y in range(3)] == [data[12 + 10 * y:16 + 10 * y] for y in range(3)]
class Desc(ctypes.Structure):
    _fields_ = [("w", c_size_t), ("h", c_size_t), ("f", c_uint), ("n", c_uint)]
array = c_void_p()
cu.cuArrayCreate_v2(byref(array), byref(Desc(5, 4, 1, 2)))               # 10 bytes a row
cu.cuMemcpyHtoA_v2(array, 0, host, 10)
cu.cuMemcpy2D_v2(byref(Box(st=1, sh=ctypes.addressof(host), sp=10, dt=3, da=array.value, w=10, h=4)))
back = ctypes.create_string_buffer(40)
cu.cuMemcpy2D_v2(byref(Box(st=3, sa=array.value, dt=1, dh=ctypes.addressof(back), dp=10, w=10, h=4)))
assert back.raw == data[:40]
assert result(cu.cuMemcpy2D_v2,
              byref(Box(st=3, sa=array.value, dt=1, dh=ctypes.addressof(back), dp=10, w=10, h=5))) == 1
cu.cuArrayDestroy(array); assert result(cu.cuArrayDestroy, array) == 400
""")


def test_host_memory(machine: Any) -> None:
    machine.run(INFO + """
context()
p, d, n = c_void_p(), c_ulonglong(), c_uint()
cu.cuMemHostAlloc(byref(p), 1000, 0); ctypes.memset(p.value, 1, 1000); assert used() == 0
cu.cuMemHostGetDevicePointer_v2(byref(d), p, 0); assert d.value == p.value
cu.cuPointerGetAttribute(byref(n), 2, p.value); assert n.value == 1
cu.cuMemFreeHost(p); assert result(cu.cuMemFreeHost, p) == 1
mine = ctypes.create_string_buffer(5000)
cu.cuMemHostRegister_v2(mine, 5000, 0); assert result(cu.cuMemHostRegister_v2, mine, 5000, 0) == 712
cu.cuMemHostUnregister(mine); assert result(cu.cuMemHostUnregister, mine) == 713
assert result(cu.cuPointerGetAttribute, byref(n), 2, ctypes.addressof(mine)) == 1
""")


def test_pools(machine: Any) -> None:
    machine.configure(f"{UUID} {64 << 20} Small")
    machine.run(INFO + """
context()
pool, p, q, v, s = c_void_p(), c_ulonglong(), c_ulonglong(), c_ulonglong(), stream(1)
def attribute(which):
    cu.cuMemPoolGetAttribute(pool, which, byref(v)); return v.value
cu.cuDeviceGetDefaultMemPool(byref(pool), 0)
cu.cuMemPoolSetAttribute(pool, 4, byref(c_ulonglong(2**64 - 1)))           # keep all
cu.cuMemAllocAsync(byref(p), 10 * MIB, s); cu.cuMemFreeAsync(p.value, s)
cu.cuMemAllocAsync(byref(q), 10 * MIB, s); assert p.value == q.value        # the same stream may have it at once
cu.cuMemFreeAsync(q.value, s); cu.cuStreamSynchronize(s)
assert attribute(7) == 0 and attribute(5) == 10 * MIB == used()             # used, reserved
cu.cuMemPoolTrimTo(pool, 0); assert attribute(5) == 0 == used()
cu.cuMemPoolSetAttribute(pool, 4, byref(c_ulonglong(0)))
cu.cuMemAllocAsync(byref(p), MIB, s); cu.cuMemFreeAsync(p.value, s); cu.cuStreamSynchronize(s); assert used() == 0
assert result(cu.cuMemFreeAsync, p.value, s) == 1
assert result(cu.cuMemAllocAsync, byref(p), 65 * MIB, s) == 2
cu.cuMemAllocAsync(byref(p), MIB, None); cu.cuMemFree_v2(p.value); assert used() == 0
""")


def test_virtual_memory(machine: Any) -> None:
    machine.configure(f"{UUID} {64 << 20} Small")
    machine.run(INFO + """
context()
class Prop(ctypes.Structure):
    _fields_ = [("type", c_uint), ("handles", c_uint), ("where", c_uint), ("id", c_int), ("win", c_void_p),
                ("flags", c_char * 8)]
class Access(ctypes.Structure):
    _fields_ = [("where", c_uint), ("id", c_int), ("flags", c_uint)]
prop, h, h2, va, g = Prop(type=1, where=1), c_ulonglong(), c_ulonglong(), c_ulonglong(), c_size_t()
cu.cuMemGetAllocationGranularity(byref(g), byref(prop), 0); assert g.value == 2 * MIB
cu.cuMemAddressReserve(byref(va), 8 * MIB, 0, 0, 0); assert used() == 0
assert result(cu.cuMemCreate, byref(h), 3 * MIB, byref(prop), 0) == 1
cu.cuMemCreate(byref(h), 2 * MIB, byref(prop), 0); cu.cuMemCreate(byref(h2), 4 * MIB, byref(prop), 0)
assert used() == 6 * MIB
assert result(cu.cuMemCreate, byref(c_ulonglong()), 60 * MIB, byref(prop), 0) == 2
cu.cuMemMap(va.value, 2 * MIB, 0, h.value, 0); cu.cuMemMap(va.value + 2 * MIB, 4 * MIB, 0, h2.value, 0)
assert result(cu.cuMemMap, va.value, 2 * MIB, 0, h.value, 0) == 1               # taken
cu.cuMemSetAccess(va.value, 6 * MIB, byref(Access(1, 0, 3)), 1)
data = os.urandom(6 * MIB); out = ctypes.create_string_buffer(6 * MIB)
cu.cuMemcpyHtoD_v2(va.value, c_char_p(data), 6 * MIB)
cu.cuMemRelease(h.value); assert used() == 6 * MIB                              # still mapped
assert result(cu.cuMemRelease, h.value) == 1
cu.cuMemUnmap(va.value + 2 * MIB, 4 * MIB); assert used() == 6 * MIB            # still a handle
cu.cuMemMap(va.value + 4 * MIB, 4 * MIB, 0, h2.value, 0)
cu.cuMemSetAccess(va.value + 4 * MIB, 4 * MIB, byref(Access(1, 0, 3)), 1)
cu.cuMemcpyDtoH_v2(out, va.value + 4 * MIB, 4 * MIB); assert out.raw[:4 * MIB] == data[2 * MIB:]
assert result(cu.cuMemAddressFree, va.value, 8 * MIB) == 1                      # mappings in it
assert result(cu.cuMemUnmap, va.value, MIB) == 1
cu.cuMemUnmap(va.value, 2 * MIB); assert used() == 4 * MIB
cu.cuMemRelease(h2.value); cu.cuMemUnmap(va.value + 4 * MIB, 4 * MIB); assert used() == 0
cu.cuMemAddressFree(va.value, 8 * MIB)
host = Prop(type=1, where=2); cu.cuMemCreate(byref(h), 2 * MIB, byref(host), 0); assert used() == 0   # not the GPU's
""")
