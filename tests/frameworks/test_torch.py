"""PyTorch, Triton and torch.compile, unmodified, on the simulated driver with a stand-in cudart.

Each runs in an instance of 1 GiB. The bounds on device times are lower ones: that so many kernels of 100 us passed
through the device.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

GIB, MIB = 1 << 30, 1 << 20
KERNELS_MS = 50 * 0.1
# the three allocators: what PYTORCH_ALLOC_CONF says, the back end's name, how its message gives the capacity
ALLOCATORS = [
    pytest.param("backend:native", "native", "total capacity of 1024.00 MiB", id="native"),
    pytest.param("backend:cudaMallocAsync", "cudaMallocAsync", "Device limit : 1024.00 MiB", id="cudaMallocAsync"),
    pytest.param("expandable_segments:True", "native", "total capacity of 1024.00 MiB", id="expandable_segments"),
]

pytestmark = pytest.mark.timeout(600)


@pytest.mark.parametrize(("conf", "backend", "words"), ALLOCATORS)
def test_memory(full: Any, conf: str, backend: str, words: str) -> None:
    said = full.python("torch_memory_program.py", PYTORCH_ALLOC_CONF=conf)
    assert said["backend"] == backend
    assert int(said["total"]) == int(said["properties"]) == int(said["empty"]) == GIB
    assert int(said["held"]) <= GIB - 64 * MIB
    assert int(said["full"]) <= 192 * MIB  # 64 MiB and 768 MiB of a GiB are taken
    assert words in said["oom"]


@pytest.mark.parametrize(("conf", "backend", "words"), ALLOCATORS)
def test_streams_events_graphs_and_autograd(full: Any, conf: str, backend: str, words: str) -> None:
    said = full.python("torch_streams_program.py", PYTORCH_ALLOC_CONF=conf)
    assert float(said["kernels_ms"]) >= KERNELS_MS
    assert said["ordered"] == "True"
    for value in ("3", "4"):
        assert float(said[f"replay_{value}_ms"]) >= KERNELS_MS
        assert said[f"replay_{value}"] == f"[{value}.0]"  # what the captured copy moved this time
    assert float(said["training_ms"]) >= 3 * 5 * 0.1  # three steps of a product, its sum, their gradients, the update
    assert said["gradient"] == "[4096]"


def test_forked_loader_workers(full: Any) -> None:
    said = full.python("torch_loader_program.py")
    assert said == {"right": "256", "workers": "2", "pinned": "True"}


@pytest.mark.parametrize("conf", [pytest.param("backend:native", id="ipc"),
                                  pytest.param("expandable_segments:True", id="vmm")])
def test_two_processes_share_a_tensor(full: Any, conf: str) -> None:
    """The other reads what is in it and writes it; it costs the quota once, and nothing is left of the other."""
    said = full.python("torch_share_program.py", PYTORCH_ALLOC_CONF=conf)
    assert said == {"exit": "0", "received": "True", "counted_twice": "False", "returned": "True", "after": "0"}


def test_triton_and_compile(full: Any, tmp_path: Path) -> None:
    said = full.python("triton_program.py", TRITON_CACHE_DIR=tmp_path / "triton",
                       TORCHINDUCTOR_CACHE_DIR=tmp_path / "inductor")
    assert float(said["triton_ms"]) >= 20 * 0.5
    assert said["shape"] == "[256]" and int(said["kernels"]) >= 1
    assert float(said["compiled_ms"]) >= 20 * 0.1
