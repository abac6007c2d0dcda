"""Mixed mode: GPUs that the program has whole, beside those that its instance shares."""

from __future__ import annotations

import ctypes
import errno
import os
from pathlib import Path
from typing import Any

import pytest

MIB, GIB = 1 << 20, 1 << 30
CARD = 24 * GIB
OOM = 2
SHARED = 2  # the card that is shared, and its number for the program


def uuid_text(n: int) -> str:
    h = (bytes([0xA0 + n, n]) + bytes(range(n, n + 14))).hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


@pytest.fixture
def mixed(hook: Any) -> Any:
    """Of the node's five cards the program sees four: it shares 2, and has 3, 0 and 1 whole."""
    hook.native(3, 0, 1)
    hook.start([GIB], cards=5, first=SHARED)
    return hook


def current(hook: Any, device: int) -> None:
    hook.lib.stub_current(device, 0)


def handle(hook: Any, index: int) -> ctypes.c_void_p:
    device = ctypes.c_void_p()
    assert hook.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(index), ctypes.byref(device)) == 0
    return device


@pytest.mark.parametrize(("own", "expected"), [
    (None, [0, 1, 2, 3]), ("2", [2]), ("3,0", [3, 0]), ("2,4,0", [2]), ("1,1", []), (uuid_text(3), [3]),
    (uuid_text(4), []), ("GPU-a1,GPU-a2", [1, 2]),
])  # fmt: skip
def test_cuda_sees_them_in_the_nodes_order(
    mixed: Any, monkeypatch: pytest.MonkeyPatch, own: str | None, expected: list[int]
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    if own is not None:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    assert mixed.call("cuInit", 0) == 0
    assert mixed.lib.stub_seen_visible().decode() == ",".join(map(uuid_text, expected))


def test_the_order_among_several_shared_ones(hook: Any) -> None:
    hook.native(4, 0)
    hook.start([GIB, GIB], cards=5, first=2)
    assert hook.call("cuInit", 0) == 0
    assert hook.lib.stub_seen_visible().decode() == ",".join(map(uuid_text, [0, 2, 3, 4]))


def test_only_the_shared_one_is_ours(mixed: Any) -> None:
    assert [mixed.lib.hook_gpu_of_device(device) for device in range(5)] == [-1, -1, 0, -1, -1]
    assert mixed.lib.hook_gpus() == 1


def test_memory_of_a_native_one_is_neither_limited_nor_counted(mixed: Any) -> None:
    current(mixed, 0)
    result, block = mixed.alloc(20 * GIB)
    assert result == 0 and mixed.used() == 0
    current(mixed, SHARED)
    assert mixed.alloc(2 * GIB)[0] == OOM
    assert mixed.alloc(2 * MIB)[0] == 0 and mixed.used() == 2 * MIB
    assert mixed.free(block) == 0 and mixed.used() == 2 * MIB


def test_a_stream_s_context_counts_and_not_how_many_are_shared(mixed: Any) -> None:
    """One shared GPU does not mean that a stream is of that."""
    current(mixed, SHARED)
    for device, charged in ((0, 0), (SHARED, GIB // 2)):
        stream = ctypes.c_void_p(mixed.lib.stub_context(device, 1))
        ptr = ctypes.c_uint64()
        assert mixed.call("cuMemAllocAsync", ctypes.byref(ptr), ctypes.c_size_t(GIB // 2), stream) == 0
        assert mixed.used() == charged


def test_physical_memory_counts_where_it_lies(mixed: Any) -> None:
    current(mixed, SHARED)
    for device, size, expected in ((1, 4 * GIB, 0), (SHARED, 4 * GIB, OOM)):
        properties = (ctypes.c_int * 8)(1, 0, 1, device)  # pinned, no handle type, on a device
        made = ctypes.c_uint64()
        assert mixed.call("cuMemCreate", ctypes.byref(made), ctypes.c_size_t(size), properties,
                          ctypes.c_uint64(0)) == expected
    assert mixed.used() == 0


@pytest.mark.parametrize(("device", "total"), [(0, CARD), (SHARED, GIB), (3, CARD)])
def test_what_cuda_says_of_memory(mixed: Any, device: int, total: int) -> None:
    free, found = ctypes.c_size_t(), ctypes.c_size_t()
    current(mixed, device)
    assert mixed.call("cuMemGetInfo_v2", ctypes.byref(free), ctypes.byref(found)) == 0
    assert (free.value, found.value) == (total, total)
    assert mixed.call("cuDeviceTotalMem_v2", ctypes.byref(found), device) == 0
    assert found.value == total


def test_nvml_counts_finds_and_numbers_them(mixed: Any) -> None:
    count, index = ctypes.c_uint(), ctypes.c_uint(99)
    assert mixed.call("nvmlDeviceGetCount_v2", ctypes.byref(count)) == 0
    assert count.value == 4
    for place in range(4):
        assert mixed.call("nvmlDeviceGetIndex", handle(mixed, place), ctypes.byref(index)) == 0
        assert index.value == place
    device = ctypes.c_void_p()
    for card, expected in ((0, 0), (SHARED, 0), (3, 0), (4, 6)):  # 6: not found
        assert mixed.call("nvmlDeviceGetHandleByUUID", uuid_text(card).encode(), ctypes.byref(device)) == expected
    assert mixed.call("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(4), ctypes.byref(device)) == 2


def test_nvml_shows_the_native_ones_memory_and_processes_as_they_are(mixed: Any) -> None:
    pids = [os.getpid(), 4000001, 4000002]
    mixed.lib.stub_processes(len(pids), (ctypes.c_uint32 * len(pids))(*pids))
    totals, listed = [], []
    for place in range(4):
        memory, room = (ctypes.c_uint64 * 3)(), ctypes.c_uint(8)
        entries = (ctypes.c_uint64 * (8 * 3))()
        assert mixed.call("nvmlDeviceGetMemoryInfo", handle(mixed, place), memory) == 0
        assert mixed.call("nvmlDeviceGetComputeRunningProcesses_v3", handle(mixed, place), ctypes.byref(room),
                          entries) == 0
        totals.append(memory[0])
        listed.append(room.value)
    assert totals == [CARD, CARD, GIB, CARD]
    assert listed[0] == listed[1] == listed[3] == len(pids) and listed[SHARED] < len(pids)


# No daemon: what the file beside the socket says


def without_daemon(hook: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> bool:
    (tmp_path / "limits").write_text(text)
    monkeypatch.setenv("CGPU_SOCKET", str(tmp_path / "gate.sock"))
    hook.cards(5)
    hook.lib.stub_joins(-errno.ENOENT)
    hook.lib.stub_bind(b"")
    return bool(hook.lib.hook_join(False))


LIMITS = f"{uuid_text(0)} native\n{uuid_text(SHARED)} {GIB}\n{uuid_text(3)} native\n"


def test_limits_without_a_daemon(hook: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert without_daemon(hook, monkeypatch, tmp_path, LIMITS)
    assert hook.call("cuInit", 0) == 0
    assert hook.lib.stub_seen_visible().decode() == ",".join(map(uuid_text, [0, 2, 3]))
    current(hook, SHARED)
    assert hook.alloc(2 * GIB)[0] == OOM
    current(hook, 3)
    assert hook.alloc(2 * GIB)[0] == 0


@pytest.mark.parametrize("text", [f"{uuid_text(0)} native\n", LIMITS.replace("native", "Native"),
                                  LIMITS + "GPU-1 native\n"])
def test_limits_that_are_none(hook: Any, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str) -> None:
    assert not without_daemon(hook, monkeypatch, tmp_path, text)
    assert hook.lib.seen_gpus() == hook.lib.hook_gpus() == 0
