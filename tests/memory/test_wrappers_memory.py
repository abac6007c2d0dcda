"""Every wrapper of allocating and freeing calls: charged before, refunded on failure, never in the driver's way."""

from __future__ import annotations

import ctypes
import itertools
from typing import Any

import pytest

OOM, MIB, GIB = 2, 1 << 20, 1 << 30
DEVICE, HOST = 1, 2


def ref(value: Any) -> Any:
    return ctypes.byref(value)


class Entry(ctypes.Structure):
    _fields_ = [("gpu", ctypes.c_int), ("pooled", ctypes.c_bool), ("bytes", ctypes.c_uint64),
                ("owner", ctypes.c_void_p)]


class Prop(ctypes.Structure):
    _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("id", ctypes.c_int),
                ("meta", ctypes.c_void_p), ("flags", ctypes.c_uint64)]


class Array3D(ctypes.Structure):
    _fields_ = [("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("depth", ctypes.c_size_t),
                ("format", ctypes.c_int), ("channels", ctypes.c_uint), ("flags", ctypes.c_uint)]


class Array2D(ctypes.Structure):
    _fields_ = [("width", ctypes.c_size_t), ("height", ctypes.c_size_t), ("format", ctypes.c_int),
                ("channels", ctypes.c_uint)]


class Array3DOld(ctypes.Structure):
    _fields_ = [("width", ctypes.c_uint), ("height", ctypes.c_uint), ("depth", ctypes.c_uint), ("format", ctypes.c_int),
                ("channels", ctypes.c_uint), ("flags", ctypes.c_uint)]


class Array2DOld(ctypes.Structure):
    _fields_ = [("width", ctypes.c_uint), ("height", ctypes.c_uint), ("format", ctypes.c_int),
                ("channels", ctypes.c_uint)]


U8 = 1
WIDE = dict(width=4 * MIB, height=0, format=U8, channels=1)

# name, arguments after the output pointer for 4 MiB, output type, what frees it with which arguments after the key
ALLOCATORS: list[tuple[str, list[Any], Any, str, list[Any]]] = [
    ("cuMemAlloc_v2", [ctypes.c_size_t(4 * MIB)], ctypes.c_uint64, "cuMemFree_v2", []),
    ("cuMemAlloc", [ctypes.c_uint(4 * MIB)], ctypes.c_uint32, "cuMemFree", []),
    ("cuMemAllocManaged", [ctypes.c_size_t(4 * MIB), ctypes.c_uint(1)], ctypes.c_uint64, "cuMemFree_v2", []),
    ("cuMemAllocAsync", [ctypes.c_size_t(4 * MIB), None], ctypes.c_uint64, "cuMemFreeAsync", [None]),
    ("cuMemAllocAsync_ptsz", [ctypes.c_size_t(4 * MIB), None], ctypes.c_uint64, "cuMemFreeAsync_ptsz", [None]),
    ("cuMemAllocFromPoolAsync", [ctypes.c_size_t(4 * MIB), ctypes.c_void_p(5), None], ctypes.c_uint64,
     "cuMemFree_v2", []),
    ("cuMemAllocFromPoolAsync_ptsz", [ctypes.c_size_t(4 * MIB), ctypes.c_void_p(5), None], ctypes.c_uint64,
     "cuMemFreeAsync", [None]),
    ("cuMemCreate", [ctypes.c_size_t(4 * MIB), ref(Prop(location=DEVICE)), ctypes.c_uint64(0)], ctypes.c_uint64,
     "cuMemRelease", []),
    ("cuArrayCreate_v2", [ref(Array2D(**WIDE))], ctypes.c_uint64, "cuArrayDestroy", []),
    ("cuArrayCreate", [ref(Array2DOld(**WIDE))], ctypes.c_uint64, "cuArrayDestroy", []),
    ("cuArray3DCreate_v2", [ref(Array3D(**WIDE))], ctypes.c_uint64, "cuArrayDestroy", []),
    ("cuArray3DCreate", [ref(Array3DOld(**WIDE))], ctypes.c_uint64, "cuArrayDestroy", []),
    ("cuMipmappedArrayCreate", [ref(Array3D(**WIDE)), ctypes.c_uint(1)], ctypes.c_uint64,
     "cuMipmappedArrayDestroy", []),
]
# what the stub counts the call under
REAL = {"cuMemAllocAsync_ptsz": "cuMemAllocAsync", "cuMemAllocFromPoolAsync": "cuMemAllocAsync",
        "cuMemAllocFromPoolAsync_ptsz": "cuMemAllocAsync", "cuMemFreeAsync_ptsz": "cuMemFreeAsync"}


@pytest.mark.parametrize(("name", "args", "kind", "free", "free_args"), ALLOCATORS, ids=[a[0] for a in ALLOCATORS])
class TestEachAllocator:
    def test_charges_and_gives_back(self, hook: Any, name: str, args: list[Any], kind: Any, free: str,
                                    free_args: list[Any]) -> None:
        hook.start([GIB])
        out = kind(0)
        assert hook.call(name, ref(out), *args) == 0
        assert hook.used() == 4 * MIB and hook.pages[0].peak() == 4 * MIB
        assert hook.call(free, out, *free_args) == 0
        assert hook.used() == 0

    def test_over_the_quota_the_driver_is_not_called(self, hook: Any, name: str, args: list[Any], kind: Any, free: str,
                                                     free_args: list[Any]) -> None:
        hook.start([6 * MIB])
        out = kind(0)
        assert hook.call(name, ref(out), *args) == 0
        again = kind(77)
        before = hook.calls(REAL.get(name, name))
        assert hook.call(name, ref(again), *args) == OOM
        assert again.value == 77 and hook.calls(REAL.get(name, name)) == before
        assert hook.used() == 4 * MIB and hook.pages[0].refused() == 1
        assert hook.call(free, out, *free_args) == 0
        assert hook.call(name, ref(again), *args) == 0

    def test_a_failing_driver_leaves_no_charge(self, hook: Any, name: str, args: list[Any], kind: Any, free: str,
                                               free_args: list[Any]) -> None:
        hook.start([GIB])
        out = kind(77)
        hook.fail(REAL.get(name, name), 999)
        assert hook.call(name, ref(out), *args) == 999
        assert out.value == 77 and hook.used() == 0 and hook.pages[0].refused() == 0

    def test_a_failing_free_keeps_the_charge(self, hook: Any, name: str, args: list[Any], kind: Any, free: str,
                                             free_args: list[Any]) -> None:
        hook.start([GIB])
        out = kind(0)
        assert hook.call(name, ref(out), *args) == 0
        hook.fail(REAL.get(free, free), 700)
        assert hook.call(free, out, *free_args) == 700
        assert hook.used() == 4 * MIB
        assert hook.call(free, out, *free_args) == 0
        assert hook.used() == 0

    def test_without_an_instance_all_passes(self, hook: Any, name: str, args: list[Any], kind: Any, free: str,
                                            free_args: list[Any]) -> None:
        hook.cards(1)
        hook.lib.stub_bind(b"")
        assert not hook.lib.hook_join(False)
        hook.lib.stub_current(0, 0)
        out = kind(0)
        assert hook.call(name, ref(out), *args) == 0
        assert hook.call(free, out, *free_args) == 0


@pytest.mark.parametrize(("name", "free"), [("cuMemFree_v2", 0), ("cuMemFree", 0), ("cuMemFreeAsync", 1),
                                            ("cuMemRelease", 0), ("cuArrayDestroy", 0), ("cuMipmappedArrayDestroy", 0)])
def test_unknown_frees_are_the_drivers_to_answer(hook: Any, name: str, free: int) -> None:
    hook.start([GIB])
    assert hook.alloc(MIB)[0] == 0
    for answer in (0, 1, 400):
        hook.fail(name, answer)
        assert hook.call(name, ctypes.c_uint64(0x1234), None) == answer
    assert hook.used() == MIB and hook.calls(name) == 3


def test_twice_freed(hook: Any) -> None:
    hook.start([GIB])
    _, first = hook.alloc(MIB)
    assert hook.alloc(MIB)[0] == 0
    assert hook.free(first) == 0
    hook.fail("cuMemFree_v2", 1)
    assert hook.free(first) == 1
    assert hook.used() == MIB


def test_an_address_handed_out_again_is_charged_once(hook: Any) -> None:
    """Its first owner went by a way that no wrapper saw."""
    hook.start([GIB])
    hook.lib.ledger_put.argtypes = [ctypes.c_int, ctypes.c_uint64, ctypes.c_void_p]
    for size in (3 * MIB, 5 * MIB):
        assert hook.lib.ledger_charge(0, size)
        hook.lib.ledger_put(0, 0x7000, ref(Entry(bytes=size)))
    assert hook.used() == 5 * MIB


@pytest.mark.parametrize(("asked", "charged"), [
    (0, 0), (1, 512), (512, 512), (513, 1024), (2 * MIB - 1, 2 * MIB), (2 * MIB, 2 * MIB), (2 * MIB + 1, 4 * MIB),
    (5 * MIB, 6 * MIB)])
def test_what_the_device_rounds_to(hook: Any, asked: int, charged: int) -> None:
    hook.start([GIB])
    assert hook.alloc(asked)[0] == 0
    assert hook.used() == charged


@pytest.mark.parametrize("size", [GIB + 1, 1 << 40, (1 << 64) - 1, (1 << 64) - 600])
def test_absurd_sizes(hook: Any, size: int) -> None:
    hook.start([GIB])
    assert hook.alloc(size) == (OOM, 0xDEAD)
    assert hook.alloc(GIB)[0] == 0


@pytest.mark.parametrize(("name", "word"), [("cuMemAllocPitch_v2", ctypes.c_size_t),
                                            ("cuMemAllocPitch", ctypes.c_uint)])
@pytest.mark.parametrize(("granule", "charged"), [(512, 4 * MIB), (32, MIB), (4096, 32 * MIB)])
def test_pitch(hook: Any, name: str, word: Any, granule: int, charged: int) -> None:
    """The driver's own pitch decides, not the one assumed before the call."""
    hook.start([GIB])
    hook.lib.stub_pitch(ctypes.c_size_t(granule))
    out, pitch = ctypes.c_uint64(0), word(0)
    assert hook.call(name, ref(out), ref(pitch), word(100), word(8192), ctypes.c_uint(4)) == 0
    assert pitch.value == -(-100 // granule) * granule
    assert hook.used() == charged
    assert hook.call("cuMemFree_v2", out) == 0
    assert hook.used() == 0


@pytest.mark.parametrize(("name", "free", "word"), [("cuMemAllocPitch_v2", "cuMemFree_v2", ctypes.c_size_t),
                                                    ("cuMemAllocPitch", "cuMemFree", ctypes.c_uint)])
def test_pitch_over_the_quota(hook: Any, name: str, free: str, word: Any) -> None:
    hook.start([8 * MIB])
    out, pitch = ctypes.c_uint64(77), word(77)
    assert hook.call(name, ref(out), ref(pitch), word(1024), word(16384), ctypes.c_uint(4)) == OOM
    assert hook.calls(name) == 0
    hook.lib.stub_pitch(ctypes.c_size_t(4096))  # 4 MiB by our guess, 32 MiB by the driver's pitch
    assert hook.call(name, ref(out), ref(pitch), word(100), word(8192), ctypes.c_uint(4)) == OOM
    assert (out.value, pitch.value) == (77, 77) and hook.calls(free) == 1
    assert hook.used() == 0


def test_capture_is_not_charged(hook: Any) -> None:
    hook.start([GIB])
    hook.lib.stub_capturing(1)
    out = ctypes.c_uint64(0)
    for name in ("cuMemAllocAsync", "cuMemAllocAsync_ptsz"):
        assert hook.call(name, ref(out), ctypes.c_size_t(4 * GIB), None) == 0
    assert hook.call("cuMemFreeAsync", out, None) == 0
    assert hook.used() == 0


def test_pools_by_location(hook: Any) -> None:
    hook.start([GIB])

    class Props(ctypes.Structure):
        _fields_ = [("type", ctypes.c_int), ("handles", ctypes.c_int), ("location", ctypes.c_int), ("id", ctypes.c_int),
                    ("rest", ctypes.c_char * 80)]

    pool, out = ctypes.c_void_p(), ctypes.c_uint64()
    for location, charged in ((HOST, 0), (DEVICE, MIB)):
        assert hook.call("cuMemPoolCreate", ref(pool), ref(Props(location=location))) == 0
        assert hook.call("cuMemAllocFromPoolAsync", ref(out), ctypes.c_size_t(MIB), pool, None) == 0
        assert hook.used() == charged
    assert hook.call("cuMemPoolImportFromShareableHandle", ref(pool), None, 1, ctypes.c_uint64(0)) == 0
    assert hook.call("cuMemAllocFromPoolAsync", ref(out), ctypes.c_size_t(MIB), pool, None) == 0
    assert hook.used() == MIB


@pytest.mark.parametrize(("flags", "charged"), [(0, 4 * MIB), (0x40, 0), (0x80, 0)])
def test_sparse_arrays_take_nothing(hook: Any, flags: int, charged: int) -> None:
    hook.start([GIB])
    out = ctypes.c_void_p()
    assert hook.call("cuArray3DCreate_v2", ref(out), ref(Array3D(**WIDE, flags=flags))) == 0
    assert hook.used() == charged


@pytest.mark.parametrize(("width", "height", "depth", "kind", "channels", "levels", "charged"), [
    (1024, 1024, 0, 0x20, 4, 1, 16 * MIB),
    (1024, 1024, 2, 0x10, 1, 1, 4 * MIB),
    (1024, 1024, 0, 0x20, 4, 11, 22 * MIB),  # a third more for the smaller levels
    (1 << 40, 1 << 40, 1 << 40, 0x20, 4, 1, None),
])
def test_array_sizes(hook: Any, width: int, height: int, depth: int, kind: int, channels: int, levels: int,
                     charged: int | None) -> None:
    hook.start([GIB])
    out, d = ctypes.c_void_p(), Array3D(width, height, depth, kind, channels, 0)
    result = hook.call("cuMipmappedArrayCreate", ref(out), ref(d), ctypes.c_uint(levels))
    assert result == (OOM if charged is None else 0)
    assert hook.used() == (charged or 0)


class TestByHandle:
    def create(self, hook: Any, location: int = DEVICE) -> Any:
        handle = ctypes.c_uint64(0)
        assert hook.call("cuMemCreate", ref(handle), ctypes.c_size_t(2 * MIB), ref(Prop(location=location)),
                         ctypes.c_uint64(0)) == 0
        return handle

    def map(self, hook: Any, at: int, handle: Any, size: int = 2 * MIB) -> int:
        return int(hook.call("cuMemMap", ctypes.c_uint64(at), ctypes.c_size_t(size), ctypes.c_size_t(0), handle,
                             ctypes.c_uint64(0)))

    def unmap(self, hook: Any, at: int, size: int = 2 * MIB) -> int:
        return int(hook.call("cuMemUnmap", ctypes.c_uint64(at), ctypes.c_size_t(size)))

    def test_release_then_unmap(self, hook: Any) -> None:
        hook.start([GIB])
        handle = self.create(hook)
        assert self.map(hook, 0x1000000, handle) == 0
        assert hook.call("cuMemRelease", handle) == 0
        assert hook.used() == 2 * MIB
        assert self.unmap(hook, 0x1000000) == 0
        assert hook.used() == 0

    def test_unmap_then_release(self, hook: Any) -> None:
        hook.start([GIB])
        handle = self.create(hook)
        assert self.map(hook, 0x1000000, handle) == 0
        assert self.unmap(hook, 0x1000000) == 0
        assert hook.used() == 2 * MIB
        assert hook.call("cuMemRelease", handle) == 0
        assert hook.used() == 0

    def test_one_unmap_over_many_mappings(self, hook: Any) -> None:
        hook.start([GIB])
        handles = [self.create(hook) for _ in range(4)]
        for i, handle in enumerate(handles):
            assert self.map(hook, 0x1000000 + 2 * MIB * i, handle) == 0
            assert hook.call("cuMemRelease", handle) == 0
        assert hook.used() == 8 * MIB
        assert self.unmap(hook, 0x1000000, 6 * MIB) == 0
        assert hook.used() == 2 * MIB
        assert self.unmap(hook, 0x1000000 + 6 * MIB) == 0
        assert hook.used() == 0

    @pytest.mark.parametrize("order", list(itertools.permutations(range(3))))
    def test_any_64_bits_are_a_handle(self, hook: Any, order: tuple[int, ...]) -> None:
        """Three that the table of handles cannot tell apart, released in any order, each twice."""
        values = [5, 1 << 48 | 4, 2 << 48 | 7]
        given = iter(values)

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_uint64))
        def create(handle: Any) -> int:
            handle[0] = next(given)
            return 0

        hook.start([GIB])
        hook.replace("cuMemCreate", create)
        handles = [self.create(hook) for _ in values]
        assert [handle.value for handle in handles] == values
        for n, which in enumerate(order):
            for _ in range(2):
                assert hook.call("cuMemRelease", handles[which]) == 0
                assert hook.used() == (2 - n) * 2 * MIB

    def test_retained_handle(self, hook: Any) -> None:
        hook.start([GIB])
        handle, again = self.create(hook), ctypes.c_uint64(0)
        assert self.map(hook, 0x1000000, handle) == 0
        assert hook.call("cuMemRelease", handle) == 0
        assert hook.call("cuMemRetainAllocationHandle", ref(again), ctypes.c_void_p(0x1000000)) == 0
        assert self.unmap(hook, 0x1000000) == 0
        assert hook.used() == 2 * MIB
        assert hook.call("cuMemRelease", again) == 0
        assert hook.used() == 0

    def test_failures_change_nothing(self, hook: Any) -> None:
        hook.start([GIB])
        handle = self.create(hook)
        hook.fail("cuMemMap", 1)
        assert self.map(hook, 0x1000000, handle) == 1
        assert self.map(hook, 0x1000000, handle) == 0
        hook.fail("cuMemUnmap", 1)
        assert self.unmap(hook, 0x1000000) == 1
        hook.fail("cuMemRelease", 1)
        assert hook.call("cuMemRelease", handle) == 1
        assert hook.call("cuMemRelease", handle) == 0
        assert hook.used() == 2 * MIB
        assert self.unmap(hook, 0x1000000) == 0
        assert hook.used() == 0

    def test_host_and_imported_memory_is_not_charged(self, hook: Any) -> None:
        hook.start([GIB])
        for location in (HOST, 3, 4):
            handle = self.create(hook, location)
            assert self.map(hook, 0x1000000, handle) == 0
            assert self.unmap(hook, 0x1000000) == 0
            assert hook.call("cuMemRelease", handle) == 0
        imported = ctypes.c_uint64(0)
        assert hook.call("cuMemImportFromShareableHandle", ref(imported), None, 1) == 0
        assert self.map(hook, 0x1000000, imported) == 0
        assert self.unmap(hook, 0x1000000) == 0
        assert hook.call("cuMemRelease", imported) == 0
        assert hook.used() == 0


class MapInfo(ctypes.Structure):
    """CUarrayMapInfo of a region of a level."""
    _fields_ = [("resource_type", ctypes.c_int), ("resource", ctypes.c_void_p), ("subresource_type", ctypes.c_int),
                ("pad", ctypes.c_int), ("level", ctypes.c_uint), ("layer", ctypes.c_uint),
                ("offset", ctypes.c_uint * 3), ("extent", ctypes.c_uint * 3), ("operation", ctypes.c_int),
                ("handle_type", ctypes.c_int), ("handle", ctypes.c_uint64), ("at", ctypes.c_uint64),
                ("devices", ctypes.c_uint), ("flags", ctypes.c_uint), ("rest", ctypes.c_uint * 2)]


class TestWhatElseHoldsMemory:
    """A multicast object and a sparse array hold memory as a mapping does."""

    create, map, unmap = TestByHandle.create, TestByHandle.map, TestByHandle.unmap

    def multicast(self, hook: Any) -> Any:
        out = ctypes.c_uint64()
        assert hook.call("cuMulticastCreate", ref(out), None) == 0
        return out

    def bind(self, hook: Any, out: Any, handle: Any, at: int = 0) -> int:
        return int(hook.call("cuMulticastBindMem", out, ctypes.c_size_t(at), handle, ctypes.c_size_t(0),
                             ctypes.c_size_t(2 * MIB), ctypes.c_uint64(0)))

    def test_multicast_until_unbound(self, hook: Any) -> None:
        hook.start([GIB])
        out, handles = self.multicast(hook), [self.create(hook) for _ in range(3)]
        for n, handle in enumerate(handles):
            assert self.bind(hook, out, handle, 2 * MIB * n) == 0
            assert hook.call("cuMemRelease", handle) == 0
        assert hook.used() == 6 * MIB
        assert hook.call("cuMulticastUnbind", out, 1, ctypes.c_size_t(0), ctypes.c_size_t(6 * MIB)) == 0
        assert hook.used() == 6 * MIB  # of another device
        hook.fail("cuMulticastUnbind", 1)
        assert hook.call("cuMulticastUnbind", out, 0, ctypes.c_size_t(0), ctypes.c_size_t(4 * MIB)) == 1
        assert hook.call("cuMulticastUnbind", out, 0, ctypes.c_size_t(0), ctypes.c_size_t(4 * MIB)) == 0
        assert hook.used() == 2 * MIB
        assert hook.call("cuMemRelease", out) == 0
        assert hook.used() == 0

    def test_multicast_object_lives_while_it_is_mapped(self, hook: Any) -> None:
        hook.start([GIB])
        out, handle = self.multicast(hook), self.create(hook)
        assert self.bind(hook, out, handle) == 0
        assert self.map(hook, 0x1000000, out) == 0
        assert hook.call("cuMemRelease", handle) == 0 == hook.call("cuMemRelease", out)
        assert hook.used() == 2 * MIB
        assert self.unmap(hook, 0x1000000) == 0
        assert hook.used() == 0

    def test_multicast_by_address(self, hook: Any) -> None:
        hook.start([GIB])
        out, handle = self.multicast(hook), self.create(hook)
        assert self.map(hook, 0x1000000, handle) == 0
        assert hook.call("cuMulticastBindAddr", out, ctypes.c_size_t(0), ctypes.c_uint64(0x1100000),
                         ctypes.c_size_t(MIB), ctypes.c_uint64(0)) == 0
        assert self.unmap(hook, 0x1000000) == 0 == hook.call("cuMemRelease", handle)
        assert hook.used() == 2 * MIB
        assert hook.call("cuMulticastUnbind", out, 0, ctypes.c_size_t(0), ctypes.c_size_t(MIB)) == 0
        assert hook.used() == 0

    def test_a_failed_bind_holds_nothing(self, hook: Any) -> None:
        hook.start([GIB])
        out, handle = self.multicast(hook), self.create(hook)
        hook.fail("cuMulticastBindMem", 1)
        assert self.bind(hook, out, handle) == 1
        assert hook.call("cuMemRelease", handle) == 0
        assert hook.used() == 0

    @pytest.mark.parametrize("name", ["cuMemMapArrayAsync", "cuMemMapArrayAsync_ptsz"])
    def test_sparse_array(self, hook: Any, name: str) -> None:
        hook.start([GIB])
        array = ctypes.c_void_p()
        assert hook.call("cuArray3DCreate_v2", ref(array), ref(Array3D(**WIDE, flags=0x40))) == 0
        handles = [self.create(hook) for _ in range(3)]
        tiles = (MapInfo * 3)(*(MapInfo(resource=array, operation=1, handle=handle.value, offset=(64 * n, 0, 0))
                                for n, handle in enumerate(handles)))
        assert hook.call(name, tiles, 3, None) == 0
        for handle in handles:
            assert hook.call("cuMemRelease", handle) == 0
        assert hook.used() == 6 * MIB
        tiles[0].operation = 2
        hook.fail("cuMemMapArrayAsync", 1)
        assert hook.call(name, tiles, 1, None) == 1 and hook.used() == 6 * MIB
        assert hook.call(name, tiles, 1, None) == 0 and hook.used() == 4 * MIB
        again = self.create(hook)
        tiles[1].handle = again.value  # takes the place of what was there
        assert hook.call(name, ref(tiles[1]), 1, None) == 0 and hook.used() == 4 * MIB
        assert hook.call("cuMemRelease", again) == 0 and hook.used() == 4 * MIB
        assert hook.call("cuArrayDestroy", array) == 0
        assert hook.used() == 0


@pytest.mark.parametrize(("name", "more"), [("cuArray3DCreate_v2", ()),
                                            ("cuMipmappedArrayCreate", (ctypes.c_uint(1),))])
class TestArrayRequirements:
    """Where the driver says what an array needs, that is the charge."""

    @pytest.mark.parametrize("size", [MIB, 12 * MIB])
    def test_the_estimate_is_corrected(self, hook: Any, name: str, more: tuple[Any, ...], size: int) -> None:
        hook.start([GIB])
        hook.lib.stub_array_needs(ctypes.c_size_t(size))
        out = ctypes.c_void_p()
        assert hook.call(name, ref(out), ref(Array3D(**WIDE)), *more) == 0
        assert hook.used() == size
        assert hook.call("cuMipmappedArrayDestroy" if more else "cuArrayDestroy", out) == 0
        assert hook.used() == 0

    def test_what_does_not_fit_is_taken_back(self, hook: Any, name: str, more: tuple[Any, ...]) -> None:
        hook.start([8 * MIB])
        hook.lib.stub_array_needs(ctypes.c_size_t(12 * MIB))
        out = ctypes.c_void_p(77)
        assert hook.call(name, ref(out), ref(Array3D(**WIDE)), *more) == OOM
        assert out.value == 77 and hook.used() == 0
        assert hook.calls("cuMipmappedArrayDestroy" if more else "cuArrayDestroy") == 1


class TestContexts:
    def fill(self, hook: Any) -> int:
        """2 MiB in each of two contexts, and by handle, which no context owns."""
        for n in (1, 2):
            hook.lib.stub_current(0, n)
            assert hook.alloc(MIB)[0] == 0
            out = ctypes.c_uint64()
            assert hook.call("cuMemAllocAsync", ref(out), ctypes.c_size_t(MIB), None) == 0
        handle = ctypes.c_uint64(0)
        assert hook.call("cuMemCreate", ref(handle), ctypes.c_size_t(2 * MIB), ref(Prop(location=DEVICE)),
                         ctypes.c_uint64(0)) == 0
        return 6 * MIB

    @pytest.mark.parametrize("name", ["cuCtxDestroy", "cuCtxDestroy_v2", "cuCtxDetach"])
    def test_destroy(self, hook: Any, name: str) -> None:
        hook.start([GIB])
        total = self.fill(hook)
        context = ctypes.c_void_p(hook.lib.stub_context(0, 1))
        hook.fail(name, 201)
        assert hook.call(name, context) == 201
        assert hook.used() == total
        assert hook.call(name, context) == 0
        assert hook.used() == total - 2 * MIB
        assert hook.call(name, context) == 0
        assert hook.used() == total - 2 * MIB

    def test_what_is_allocated_while_its_end_is_refused(self, hook: Any) -> None:
        """Another thread's, under the context's own name, beside what was set apart for its end."""
        hook.start([GIB])
        context = ctypes.c_void_p(hook.lib.stub_context(0, 1))
        hook.lib.stub_current(0, 1)
        assert hook.alloc(MIB)[0] == 0
        answers = [999, 999, 0]

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p)
        def destroy(_: int) -> int:
            if answers[0]:
                assert hook.alloc(2 * MIB)[0] == 0
            return answers.pop(0)

        hook.replace("cuCtxDestroy_v2", destroy)
        assert [hook.call("cuCtxDestroy_v2", context) for _ in range(2)] == [999, 999]
        assert hook.used() == 5 * MIB, "its blocks: one from before, one of either try"
        assert hook.call("cuCtxDestroy_v2", context) == 0
        assert hook.used() == 0

    @pytest.mark.parametrize(("known", "takes"), [(1, 6 * MIB), (0, 0)])
    def test_a_context_made_while_one_is_made(self, hook: Any, known: int, takes: int) -> None:
        """By what the driver calls back in the same thread. The outer one counts, and is told of."""
        hook.start([GIB])
        hook.ctl[0].set(hook.ctl[0].CONTEXT, 6 * MIB)
        hook.ctl[0].set(hook.ctl[0].CONTEXTS, known)
        made: list[int] = []

        def create(out: Any, n: int) -> int:
            return int(hook.call("cuCtxCreate_v2", ref(out), ctypes.c_uint(n), 0))

        @ctypes.CFUNCTYPE(ctypes.c_int, ctypes.POINTER(ctypes.c_void_p), ctypes.c_uint, ctypes.c_int)
        def driver(out: Any, n: int, _: int) -> int:
            if n:
                assert create(ctypes.c_void_p(), n - 1) == 0
            made.append(hook.used())
            out[0] = hook.lib.stub_context(0, n + 1)
            return 0

        hook.replace("cuCtxCreate_v2", driver)
        context = ctypes.c_void_p()
        assert create(context, 1) == 0
        assert made == [takes, takes] and hook.used() == takes
        assert hook.lib.stub_notes() == 1 - known
        assert create(ctypes.c_void_p(), 0) == 0 and hook.used() == 2 * takes, "the next one waits for nobody"
        assert hook.call("cuCtxDestroy_v2", context) == 0
        assert hook.used() == takes

    def test_detach_of_one_attached_is_not_its_end(self, hook: Any) -> None:
        hook.start([GIB])
        total = self.fill(hook)
        context = ctypes.c_void_p(hook.lib.stub_context(0, 1))
        assert hook.call("cuCtxAttach", ref(ctypes.c_void_p()), 0) == 0
        assert hook.call("cuCtxDetach", context) == 0
        assert hook.used() == total

    @pytest.mark.parametrize("suffix", ["", "_v2"])
    def test_primary_release(self, hook: Any, suffix: str) -> None:
        hook.start([GIB])
        for _ in range(2):
            hook.lib.stub_retain(0)
        hook.lib.stub_current(0, 0)
        assert hook.alloc(MIB)[0] == 0
        assert hook.call(f"cuDevicePrimaryCtxRelease{suffix}", 0) == 0
        assert hook.used() == MIB
        assert hook.call(f"cuDevicePrimaryCtxRelease{suffix}", 0) == 0
        assert hook.used() == 0
        assert hook.call(f"cuDevicePrimaryCtxRelease{suffix}", 0) == 201

    @pytest.mark.parametrize("suffix", ["", "_v2"])
    def test_primary_reset(self, hook: Any, suffix: str) -> None:
        hook.start([GIB])
        for _ in range(2):
            hook.lib.stub_retain(0)
        assert hook.alloc(MIB)[0] == 0
        hook.fail("cuDevicePrimaryCtxReset_v2", 999)
        assert hook.call(f"cuDevicePrimaryCtxReset{suffix}", 0) == 999
        assert hook.used() == MIB
        assert hook.call(f"cuDevicePrimaryCtxReset{suffix}", 0) == 0
        assert hook.used() == 0

    def test_green_contexts_live_in_the_primary_one(self, hook: Any) -> None:
        hook.start([GIB])
        hook.lib.stub_retain(0)
        green = ctypes.c_void_p()
        assert hook.call("cuGreenCtxCreate", ref(green), None, 0, 0) == 0
        hook.lib.stub_current(0, 5)
        assert hook.alloc(MIB)[0] == 0
        hook.fail("cuGreenCtxDestroy", 999)
        assert hook.call("cuGreenCtxDestroy", green) == 999 and hook.used() == MIB
        assert hook.call("cuGreenCtxDestroy", green) == 0
        assert hook.used() == MIB
        hook.lib.stub_current(0, 0)
        assert hook.call("cuDevicePrimaryCtxRelease_v2", 0) == 0
        assert hook.used() == 0

    def test_the_last_green_context_ends_the_primary_one(self, hook: Any) -> None:
        hook.start([GIB])
        green = ctypes.c_void_p()
        assert hook.call("cuGreenCtxCreate", ref(green), None, 0, 0) == 0
        assert hook.alloc(MIB)[0] == 0
        assert hook.call("cuGreenCtxDestroy", green) == 0
        assert hook.used() == 0

    def test_two_gpus(self, hook: Any) -> None:
        """Each allocation counts where its context or stream is."""
        hook.start([GIB, 2 * GIB], cards=2)
        assert hook.alloc(MIB)[0] == 0
        hook.lib.stub_current(1, 0)
        assert hook.alloc(3 * MIB)[0] == 0
        assert (hook.used(0), hook.used(1)) == (MIB, 4 * MIB)
        out, stream = ctypes.c_uint64(), ctypes.c_void_p(hook.lib.stub_context(0, 3))
        assert hook.call("cuMemAllocAsync", ref(out), ctypes.c_size_t(MIB), stream) == 0
        assert (hook.used(0), hook.used(1)) == (2 * MIB, 4 * MIB)
        assert hook.call("cuCtxDestroy_v2", stream) == 0
        assert (hook.used(0), hook.used(1)) == (MIB, 4 * MIB)

    def test_no_current_context(self, hook: Any) -> None:
        hook.start([GIB])
        hook.lib.stub_current(-1, 0)
        hook.fail("cuMemAlloc_v2", 201)
        assert hook.alloc(MIB) == (201, 0xDEAD)
        assert hook.used() == 0


@pytest.mark.parametrize(("kind", "channels", "size"), [
    (0x01, 1, 1 << 20), (0x02, 2, 4 << 20), (0x20, 4, 16 << 20), (0xc0, 1, 1 << 20), (0xc2, 4, 4 << 20),
    (0xc5, 4, 8 << 20), (0x91, 4, 1 << 19), (0x97, 1, 1 << 19), (0x9d, 4, 1 << 20), (0xb0, 3, 3 << 19),
    (0x50, 4, 4 << 20), (0xb1, 4, 8 << 20)])
def test_formats_of_arrays(hook: Any, kind: int, channels: int, size: int) -> None:
    """A mebi of elements; block-compressed and planar formats take less than an element times its channels."""
    hook.start([GIB])
    out = ctypes.c_void_p()
    assert hook.call("cuArrayCreate_v2", ref(out), ref(Array2D(1024, 1024, kind, channels))) == 0
    assert hook.used() == (size if size < 2 * MIB else -(-size // (2 * MIB)) * 2 * MIB)
