"""The instance's GPUs only, numbered from 0: CUDA_VISIBLE_DEVICES around cuInit, and NVML's handles."""

from __future__ import annotations

import ctypes
import os
from typing import Any

import pytest

GIB = 1 << 30


def uuid_text(n: int) -> str:
    h = (bytes([0xA0 + n, n]) + bytes(range(n, n + 14))).hex()
    return f"GPU-{h[:8]}-{h[8:12]}-{h[12:16]}-{h[16:20]}-{h[20:]}"


# The instance has the node's cards 1, 2 and 3.
TRANSLATIONS: list[tuple[str | None, list[int]]] = [
    (None, [1, 2, 3]),
    ("", []),
    ("0", [1]),
    ("2,0", [3, 1]),
    ("0,1,2", [1, 2, 3]),
    ("0, 1 ,2 ", [1, 2, 3]),
    ("3", []),            # the node has a card 3, the instance has not
    ("0,3,1", [1]),       # ends at the first that names none
    ("0,-1,1", [1]),
    ("-1", []),
    ("NoDevFiles", []),
    ("0,,1", [1]),
    (",0", []),
    ("0x1", []),
    ("1abc", []),
    ("99999999999999999999", []),
    ("0,0", []),
    (uuid_text(2), [2]),
    (uuid_text(2).upper(), [2]),
    ("GPU-a1", [1]),
    ("GPU-a3,GPU-a1", [3, 1]),
    ("GPU-a", []),        # not one alone
    ("GPU-", []),
    ("GP", []),
    (uuid_text(0), []),   # the node's, not the instance's
    (uuid_text(1) + "0", []),
    ("MIG-a1", []),
]


@pytest.mark.parametrize(("own", "expected"), TRANSLATIONS, ids=[repr(t[0]) for t in TRANSLATIONS])
def test_what_the_driver_sees(hook: Any, monkeypatch: pytest.MonkeyPatch, own: str | None, expected: list[int]) -> None:
    if own is None:
        monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    else:
        monkeypatch.setenv("CUDA_VISIBLE_DEVICES", own)
    hook.start([GIB] * 3, cards=4, first=1)
    assert hook.call("cuInit", 0) == 0
    assert hook.lib.stub_seen_visible().decode() == ",".join(uuid_text(n) for n in expected)
    getenv = ctypes.CDLL(None).getenv
    getenv.restype = ctypes.c_char_p
    assert getenv(b"CUDA_VISIBLE_DEVICES") == (None if own is None else own.encode())


def test_only_the_first_success_matters(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    hook.start([GIB] * 2, cards=2)
    hook.fail("cuInit", 100)
    assert hook.call("cuInit", 0) == 100
    assert os.environ["CUDA_VISIBLE_DEVICES"] == "1"
    assert hook.call("cuInit", 0) == 0
    assert hook.lib.stub_seen_visible().decode() == uuid_text(1)
    assert hook.call("cuInit", 0) == 0
    assert hook.lib.stub_seen_visible().decode() == "1"  # untouched: the driver no longer looks


def test_without_an_instance(hook: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3")
    hook.cards(4)
    hook.lib.stub_bind(b"")
    assert hook.call("cuInit", 0) == 0
    assert hook.lib.stub_seen_visible() == b"3"


def test_devices_map_to_the_instance_s_gpus(hook: Any) -> None:
    hook.start([GIB] * 2, cards=4, first=1)
    assert [hook.lib.hook_gpu_of_device(device) for device in (-1, 0, 1, 2, 3, 4, 64)] == [-1, -1, 0, 1, -1, -1, -1]
    hook.lib.stub_current(2, 0)
    assert hook.lib.hook_current_gpu() == 1
    hook.lib.stub_current(0, 0)
    assert hook.lib.hook_current_gpu() == -1
    hook.lib.stub_current(-1, 0)
    assert hook.lib.hook_current_gpu() == -1


class Nvml:
    def __init__(self, hook: Any) -> None:
        self.hook = hook
        self.device = ctypes.c_void_p()

    def get(self, name: str, *args: Any) -> int:
        self.device = ctypes.c_void_p(0xDEAD)
        return int(self.hook.call(name, *args, ctypes.byref(self.device)))

    def index(self) -> int:
        index = ctypes.c_uint(99)
        assert self.hook.call("nvmlDeviceGetIndex", self.device, ctypes.byref(index)) == 0
        return index.value


@pytest.fixture
def nvml(hook: Any) -> Nvml:
    """The node has four cards, the instance the two in the middle."""
    hook.cards(4)
    for gpu in range(2):
        hook.offer(gpu, GIB, card=1 + gpu)
    hook.lib.stub_joins(2)
    hook.lib.stub_bind(b"")
    return Nvml(hook)


@pytest.mark.parametrize("name", ["nvmlDeviceGetCount", "nvmlDeviceGetCount_v2"])
def test_count(nvml: Nvml, name: str) -> None:
    count = ctypes.c_uint()
    assert nvml.hook.call(name, ctypes.byref(count)) == 0
    assert count.value == 2


@pytest.mark.parametrize("name", ["nvmlDeviceGetHandleByIndex", "nvmlDeviceGetHandleByIndex_v2"])
def test_by_index(nvml: Nvml, name: str) -> None:
    for gpu in range(2):
        assert nvml.get(name, ctypes.c_uint(gpu)) == 0
        assert nvml.index() == gpu
    for absent in (2, 3, 4, 0xFFFFFFFF):
        assert nvml.get(name, ctypes.c_uint(absent)) == 2
        assert nvml.device.value == 0xDEAD
    assert nvml.hook.call(name, ctypes.c_uint(0), None) == 2


@pytest.mark.parametrize("name", [f"nvmlDeviceGetHandleBy{key}" for key in (
    "PciBusId", "PciBusId_v2", "Serial", "UUID", "UUIDV")])
def test_by_name(nvml: Nvml, name: str) -> None:
    def key(card: int) -> Any:
        if name.endswith("V"):
            return (b"\1\0\0\0\1\0\0\0" + uuid_text(card).encode()).ljust(64, b"\0")
        return uuid_text(card).encode() if name.endswith("UUID") else str(card).encode()

    for card, gpu in ((1, 0), (2, 1)):
        assert nvml.get(name, key(card)) == 0
        assert nvml.index() == gpu
    for card in (0, 3, 7):
        assert nvml.get(name, key(card)) == 6
        assert nvml.device.value == 0xDEAD
    assert nvml.hook.call(name, key(1), None) == 2


def test_each_gpu_has_its_own_memory(nvml: Nvml) -> None:
    nvml.hook.ctl[1].set(nvml.hook.ctl[1].LIMIT, 3 * GIB)
    totals = []
    for gpu in range(2):
        memory = (ctypes.c_uint64 * 3)()
        assert nvml.get("nvmlDeviceGetHandleByIndex_v2", ctypes.c_uint(gpu)) == 0
        assert nvml.hook.call("nvmlDeviceGetMemoryInfo", nvml.device, memory) == 0
        totals.append(memory[0])
    assert totals == [GIB, 3 * GIB]
