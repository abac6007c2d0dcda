"""What is made of NVML's lists of processes, and of what it refuses."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from cgpusched.daemon.audit.nvml import LISTS, Nvml, Unreadable
from cgpusched.errors import UserError
from cgpusched.model import Gpu

GIB = 1 << 30
GPU = Gpu(0, "GPU-00000000-1111-2222-3333-444444444444", "Test", 24 * GIB)
COMPUTE, GRAPHICS, MPS = LISTS


class NVMLError(Exception):
    def __init__(self, value: int) -> None:
        super().__init__(f"NVML error {value}")
        self.value = value


class Module:
    """pynvml with lists of its own: a list of (pid, bytes), or the error that a call raises."""

    NVMLError = NVMLError
    NVML_ERROR_NOT_SUPPORTED, NVML_ERROR_INSUFFICIENT_SIZE, NVML_ERROR_FUNCTION_NOT_FOUND = 3, 7, 13
    LOST = 15

    def __init__(self, **lists: list[tuple[int, int | None]] | int) -> None:
        self.lists: dict[str, Any] = {COMPUTE: [], GRAPHICS: [], MPS: [], **lists}
        self.calls: list[str] = []
        self.init: list[int] = []
        for name in (*LISTS, *(f"{one}_v2" for one in LISTS)):
            setattr(self, name, lambda handle, name=name: self._list(name))

    def _list(self, name: str) -> list[Any]:
        found = self.lists.get(name, self.NVML_ERROR_FUNCTION_NOT_FOUND)
        if isinstance(found, int):
            raise NVMLError(found)
        return [SimpleNamespace(pid=pid, usedGpuMemory=used) for pid, used in found]

    def nvmlInit(self) -> None:
        self.calls.append("init")
        if self.init:
            raise NVMLError(self.init.pop())

    def nvmlShutdown(self) -> None:
        self.calls.append("shutdown")

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        assert uuid == GPU.uuid
        return "handle"


def used(**lists: list[tuple[int, int | None]] | int) -> dict[int, int]:
    return Nvml(Path("/lib"), load=lambda path: Module(**lists)).used(GPU)


@pytest.mark.parametrize(("lists", "expected"), [
    ({}, {}),
    ({COMPUTE: [(1, 10), (2, 20)]}, {1: 10, 2: 20}),
    ({COMPUTE: [(1, 10)], GRAPHICS: [(1, 10), (3, 5)]}, {1: 10, 3: 5}),
    ({COMPUTE: [(1, 10)], MPS: [(4, 7)]}, {1: 10, 4: 7}),
    ({COMPUTE: [(1, 10), (1, 5)]}, {1: 15}),
    ({COMPUTE: [(1, 10), (2, None)]}, {1: 10}),
    ({COMPUTE: [(1, 1 << 63)]}, {1: 24 * GIB}),
    ({COMPUTE: [(1, 10)], GRAPHICS: 3, MPS: 3}, {1: 10}),
    ({COMPUTE: 13, f"{COMPUTE}_v2": [(1, 10)]}, {1: 10}),
    ({COMPUTE: [(1, 10)], GRAPHICS: 13, MPS: 13}, {1: 10}),
])  # fmt: skip
def test_lists(lists: Any, expected: dict[int, int]) -> None:
    assert used(**lists) == expected


@pytest.mark.parametrize(("lists", "why"), [
    ({COMPUTE: 3}, "NVML error 3"),
    ({COMPUTE: 13}, "lists no processes"),
    ({COMPUTE: [(1, None)]}, "does not say how much"),
    ({COMPUTE: 7}, "NVML error 7"),
    ({COMPUTE: [(1, 1)], GRAPHICS: 15}, "NVML error 15"),
])  # fmt: skip
def test_what_cannot_be_read(lists: Any, why: str) -> None:
    with pytest.raises(Unreadable, match=why):
        used(**lists)


def test_a_driver_that_comes_back_is_asked_anew() -> None:
    module = Module()
    nvml = Nvml(Path("/lib"), load=lambda path: module)
    assert nvml.used(GPU) == {} and nvml.used(GPU) == {} and module.calls == ["init"]
    module.lists[COMPUTE] = Module.LOST
    with pytest.raises(Unreadable):
        nvml.used(GPU)
    assert module.calls == ["init", "shutdown"]
    module.init = [9]  # the driver is not loaded
    with pytest.raises(Unreadable, match="NVML error 9"):
        nvml.used(GPU)
    module.lists[COMPUTE] = [(1, 10)]
    assert nvml.used(GPU) == {1: 10}
    module.lists[COMPUTE] = Module.NVML_ERROR_INSUFFICIENT_SIZE  # more processes came between two calls: no reason to
    with pytest.raises(Unreadable):
        nvml.used(GPU)
    assert module.calls == ["init", "shutdown", "init", "init"]


def test_a_library_that_cannot_be_loaded() -> None:
    def load(path: Path) -> Any:
        raise UserError(f"cannot load {path}")

    with pytest.raises(Unreadable, match="cannot load /lib"):
        Nvml(Path("/lib"), load=load).used(GPU)


def test_the_simulated_nvml_is_told_where(monkeypatch: Any) -> None:
    monkeypatch.setenv("CGPU_SIM_DIR", "/elsewhere")
    seen: list[str] = []

    def load(path: Path) -> Module:
        import os

        seen.append(os.environ["CGPU_SIM_DIR"])
        return Module()

    Nvml(Path("/lib"), Path("/run/cgpud/sim"), load).used(GPU)
    assert seen == ["/run/cgpud/sim"]
