"""What CUDA and NVML tell a program about memory, and that they agree."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

MIB, GIB = 1 << 20, 1 << 30
U32 = 0xFFFFFFFF
UNTOUCHED = 0xABCD


class Memory(ctypes.Structure):
    _fields_ = [(name, ctypes.c_uint64) for name in ("total", "free", "used")]


class MemoryV2(ctypes.Structure):
    _fields_ = [("version", ctypes.c_uint), ("total", ctypes.c_uint64), ("reserved", ctypes.c_uint64),
                ("free", ctypes.c_uint64), ("used", ctypes.c_uint64)]


V2 = ctypes.sizeof(MemoryV2) | 2 << 24


def mem_info(hook: Any, name: str = "cuMemGetInfo_v2") -> tuple[int, int]:
    free, total = ctypes.c_uint64(UNTOUCHED), ctypes.c_uint64(UNTOUCHED)
    assert hook.call(name, ctypes.byref(free), ctypes.byref(total)) == 0
    mask = (1 << 64) - 1 if name.endswith("_v2") else U32
    return free.value & mask, total.value & mask


def handle(hook: Any, index: int = 0) -> Any:
    device = ctypes.c_void_p()
    assert hook.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)) == 0
    return device


def nvml(hook: Any) -> Memory:
    memory = Memory()
    assert hook.call("nvmlDeviceGetMemoryInfo", handle(hook), ctypes.byref(memory)) == 0
    return memory


def nvml_v2(hook: Any) -> MemoryV2:
    memory = MemoryV2(version=V2)
    assert hook.call("nvmlDeviceGetMemoryInfo_v2", handle(hook), ctypes.byref(memory)) == 0
    return memory


@pytest.mark.parametrize(("limit", "held", "other", "free", "total"), [
    (GIB, 0, 0, GIB, GIB),
    (GIB, 100 * MIB, 0, 924 * MIB, GIB),
    (GIB, 100 * MIB, 50 * MIB, 874 * MIB, GIB),
    (GIB, 0, 2 * GIB, 0, GIB),                  # never negative
    (100 * GIB, 0, 0, 20 * GIB, 24 * GIB),      # never more than the card
    (22 * GIB, 0, 0, 20 * GIB, 22 * GIB),       # never more free than the card has
    (0, 0, 0, 0, 0),
])
def test_all_views_agree(hook: Any, limit: int, held: int, other: int, free: int, total: int) -> None:
    hook.start([limit])
    hook.cards(1, 24 * GIB, 20 * GIB)
    hook.ctl[0].set(hook.ctl[0].OTHER, other)
    if held:
        assert hook.alloc(held)[0] == 0
    used = min(held + other, total)
    assert mem_info(hook) == (free, total)
    assert mem_info(hook, "cuMemGetInfo") == (min(free, U32), min(total, U32))
    one, two = nvml(hook), nvml_v2(hook)
    assert (one.free, one.total, one.used) == (free, total, used)
    assert (two.free, two.total, two.used, two.reserved, two.version) == (free, total, used, 0, V2)
    size, old = ctypes.c_uint64(), ctypes.c_uint32()
    assert hook.call("cuDeviceTotalMem_v2", ctypes.byref(size), 0) == 0
    assert hook.call("cuDeviceTotalMem", ctypes.byref(old), 0) == 0
    assert (size.value, old.value) == (total, min(total, U32))


def test_null_pointers(hook: Any) -> None:
    hook.start([GIB])
    value = ctypes.c_uint64(UNTOUCHED)
    for name in ("cuMemGetInfo_v2", "cuMemGetInfo"):
        assert hook.call(name, None, ctypes.byref(value)) == 0
        assert value.value & U32 == GIB
        assert hook.call(name, ctypes.byref(value), None) == 0
        assert value.value & U32 == GIB
    assert hook.call("cuMemGetInfo_v2", None, None) == 1  # the driver's own answer


def test_errors_leave_the_program_s_variables(hook: Any) -> None:
    hook.start([GIB])
    a, b = ctypes.c_uint64(UNTOUCHED), ctypes.c_uint64(UNTOUCHED)
    for name in ("cuMemGetInfo_v2", "cuMemGetInfo"):
        hook.fail(name, 201)
        assert hook.call(name, ctypes.byref(a), ctypes.byref(b)) == 201
    for name in ("cuDeviceTotalMem_v2", "cuDeviceTotalMem"):
        hook.fail(name, 101)
        assert hook.call(name, ctypes.byref(a), 0) == 101
    assert a.value == b.value == UNTOUCHED
    assert hook.call("nvmlDeviceGetMemoryInfo", handle(hook), None) == 2


def test_another_process_s_memory_counts(hook: Any) -> None:
    hook.start([GIB])
    page = hook.pages[0]
    hook.ctl[0].own(5, 1)
    page.map[4096 + 5 * 256:4096 + 5 * 256 + 4] = (1).to_bytes(4, "little")
    page.map[4096 + 5 * 256 + 128:4096 + 5 * 256 + 136] = (300 * MIB).to_bytes(8, "little")
    page.map[128:136] = (300 * MIB).to_bytes(8, "little")
    assert mem_info(hook) == (724 * MIB, GIB)
    hook.ctl[0].bury(5)
    assert mem_info(hook) == (GIB, GIB)


def test_old_drivers_without_the_new_names(hook: Any) -> None:
    hook.start([GIB], without="cuMemGetInfo_v2 cuDeviceTotalMem_v2")
    hook.cards(1, 2 * GIB, 2 * GIB)
    assert mem_info(hook, "cuMemGetInfo") == (GIB, GIB)
    old = ctypes.c_uint32()
    assert hook.call("cuDeviceTotalMem", ctypes.byref(old), 0) == 0
    assert old.value == GIB


def test_memory_info_of_an_unknown_layout(hook: Any) -> None:
    """A structure younger than the hook would show the card: refused as an old NVML refuses it."""
    hook.start([GIB])
    memory = MemoryV2(version=0x3000030)
    assert hook.call("nvmlDeviceGetMemoryInfo_v2", handle(hook), ctypes.byref(memory)) == 25


def test_bar1_in_proportion(hook: Any) -> None:
    hook.start([6 * GIB])
    memory = Memory()
    assert hook.call("nvmlDeviceGetBAR1MemoryInfo", handle(hook), ctypes.byref(memory)) == 0
    total, free, used = memory.total, memory.free, memory.used
    assert (total, used, free) == (256 * MIB, MIB // 4, 256 * MIB - MIB // 4)


def test_without_an_instance(hook: Any) -> None:
    hook.cards(2, 24 * GIB, 20 * GIB)
    hook.lib.stub_bind(b"")
    hook.lib.stub_current(0, 0)
    assert mem_info(hook) == (20 * GIB, 24 * GIB)
    assert (nvml(hook).total, nvml_v2(hook).reserved) == (24 * GIB, 7)
    count = ctypes.c_uint()
    assert hook.call("nvmlDeviceGetCount_v2", ctypes.byref(count)) == 0 and count.value == 2
    assert hook.lib.stub_join_count() == 1


def crowd(hook: Any) -> None:
    """On the card run this process, one in slot 3, one that died in slot 4, and 191 of other tenants."""
    hook.start([GIB])
    for slot, pid, owner in ((3, 4000001, 1), (4, 4000002, 0)):
        hook.pages[0].map[4096 + 256 * slot:4096 + 256 * slot + 8] = (1 | pid << 32).to_bytes(8, "little")
        hook.ctl[0].own(slot, owner)
    pids = [4000000, os.getpid(), 4000001, 4000002, *range(4000100, 4000290)]
    hook.lib.stub_processes(len(pids), (ctypes.c_uint * len(pids))(*pids))


class Process(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_uint64), ("gi", ctypes.c_uint), ("ci", ctypes.c_uint)]


class ProcessV1(ctypes.Structure):
    _fields_ = [("pid", ctypes.c_uint), ("memory", ctypes.c_uint64)]


@pytest.mark.parametrize("name", [f"nvmlDeviceGet{kind}RunningProcesses{suffix}" for suffix in ("", "_v2", "_v3")
                                  for kind in ("Compute", "Graphics", "MPSCompute")])
def test_process_lists(hook: Any, name: str) -> None:
    kind = Process if name[-3:] in ("_v2", "_v3") else ProcessV1
    crowd(hook)
    entries, count, device = (kind * 8)(), ctypes.c_uint(8), handle(hook)
    assert hook.call(name, device, ctypes.byref(count), entries) == 0
    assert [entries[i].pid for i in range(count.value)] == [os.getpid(), 4000001]
    count.value = 1
    assert hook.call(name, device, ctypes.byref(count), entries) == 7 and count.value == 2
    count.value = 0
    assert hook.call(name, device, ctypes.byref(count), None) == 7 and count.value == 2
    hook.lib.stub_processes(1, (ctypes.c_uint * 1)(4000000))
    count.value = 0
    assert hook.call(name, device, ctypes.byref(count), None) == 0 and count.value == 0


def structure(size: int, pid: int) -> Any:
    """An entry of `size` bytes with its pid at an offset."""
    class Entry(ctypes.Structure):
        _fields_ = [("before", ctypes.c_uint8 * pid), ("pid", ctypes.c_uint),
                    ("rest", ctypes.c_uint8 * (size - pid - 4))]

    return Entry


@pytest.mark.parametrize("name, size, pid", [("nvmlDeviceGetAccountingPids", 4, 0),
                                             ("nvmlDeviceGetEncoderSessions", 32, 4),
                                             ("nvmlDeviceGetFBCSessions", 48, 4)])
def test_other_lists_of_processes(hook: Any, name: str, size: int, pid: int) -> None:
    crowd(hook)
    entries, count, device = (structure(size, pid) * 8)(), ctypes.c_uint(8), handle(hook)
    assert hook.call(name, device, ctypes.byref(count), entries) == 0
    assert [entries[i].pid for i in range(count.value)] == [os.getpid(), 4000001]
    count.value = 0
    assert hook.call(name, device, ctypes.byref(count), None) == 7 and count.value == 2


def test_process_detail_list(hook: Any) -> None:
    class Details(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint), ("mode", ctypes.c_uint), ("count", ctypes.c_uint),
                    ("array", ctypes.c_void_p)]

    crowd(hook)
    entries, device = (structure(32, 0) * 8)(), handle(hook)
    details = Details(24 | 1 << 24, 1, 8, ctypes.addressof(entries))
    assert hook.call("nvmlDeviceGetRunningProcessDetailList", device, ctypes.byref(details)) == 0
    assert [entries[i].pid for i in range(details.count)] == [os.getpid(), 4000001]
    details.count, details.array = 0, None
    assert hook.call("nvmlDeviceGetRunningProcessDetailList", device, ctypes.byref(details)) == 7 and details.count == 2
    details.version = 24 | 2 << 24
    assert hook.call("nvmlDeviceGetRunningProcessDetailList", device, ctypes.byref(details)) == 25


def test_process_utilization(hook: Any) -> None:
    crowd(hook)
    samples, count, device = (structure(32, 0) * 8)(), ctypes.c_uint(8), handle(hook)
    since = ctypes.c_uint64(77)
    assert hook.call("nvmlDeviceGetProcessUtilization", device, samples, ctypes.byref(count), since) == 0
    assert [samples[i].pid for i in range(count.value)] == [os.getpid(), 4000001]
    assert hook.call("nvmlDeviceGetProcessUtilization", device, None, ctypes.byref(count), since) == 7
    assert count.value == 2
    hook.lib.stub_processes(1, (ctypes.c_uint * 1)(4000000))
    assert hook.call("nvmlDeviceGetProcessUtilization", device, samples, ctypes.byref(count), since) == 6
    assert count.value == 0


def test_processes_utilization_info(hook: Any) -> None:
    class Info(ctypes.Structure):
        _fields_ = [("version", ctypes.c_uint), ("count", ctypes.c_uint), ("since", ctypes.c_uint64),
                    ("array", ctypes.c_void_p)]

    crowd(hook)
    entries, device = (structure(40, 8) * 8)(), handle(hook)
    info = Info(24 | 1 << 24, 8, 77, ctypes.addressof(entries))
    assert hook.call("nvmlDeviceGetProcessesUtilizationInfo", device, ctypes.byref(info)) == 0
    assert [entries[i].pid for i in range(info.count)] == [os.getpid(), 4000001]
    info.version = 24 | 2 << 24
    assert hook.call("nvmlDeviceGetProcessesUtilizationInfo", device, ctypes.byref(info)) == 25


def test_accounts_of_others_are_not_there(hook: Any) -> None:
    crowd(hook)
    stats, device = (ctypes.c_uint64 * 16)(), handle(hook)
    assert hook.call("nvmlDeviceGetAccountingStats", device, ctypes.c_uint(4000001), stats) == 0
    assert hook.call("nvmlDeviceGetAccountingStats", device, ctypes.c_uint(4000000), stats) == 6
