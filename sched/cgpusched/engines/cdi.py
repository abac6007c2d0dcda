"""The CDI specification: ``--device cgpu.local/gpu=0`` for engines that know the Container Device Interface.

CDI's edits are fixed when the file is written, so they hold no share: they name the GPUs in the environment and have
our hook run, which registers the container by what its environment asks for, and mounts what it needs. A container that
also came through ``cgpu-runtime`` is registered by then, and gets nothing twice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

Named = tuple[int, str]
"""A GPU's index and its UUID."""

VERSION = "0.5.0"
"""Of the CDI specification: what podman 4.3 knows."""
KIND = "cgpu.local/gpu"
DEVICE = "CGPU_CDI_DEVICE_"
"""A variable of this name and a GPU's index for each device that was asked for."""


SHARED_FILES = ("nvidiactl", "nvidia-uvm", "nvidia-uvm-tools", "nvidia-modeset")
"""What programs open besides their GPU's own file."""


def device_files(gpus: Iterable[int], folder: Path) -> dict[int, list[str]]:
    """The device files of each GPU in ``folder`` (/dev), those that are there; none for a simulated one."""
    shared = [str(folder / name) for name in SHARED_FILES if (folder / name).exists()]
    return {gpu: [str(folder / f"nvidia{gpu}"), *shared] for gpu in gpus if (folder / f"nvidia{gpu}").exists()}


def specification(gpus: Iterable[Named], binary: str, nodes: Mapping[int, list[str]]) -> dict[str, Any]:
    """``nodes``: the device files each GPU needs, by its index."""
    devices = [{"name": name, "containerEdits": edits} for name, edits in _devices(list(gpus), nodes)]
    hook = {"hookName": "createRuntime", "path": binary, "args": ["cgpu-runtime", "hook"]}
    return {"cdiVersion": VERSION, "kind": KIND, "devices": devices, "containerEdits": {"hooks": [hook]}}


def _devices(gpus: list[Named], nodes: Mapping[int, list[str]]) -> list[tuple[str, dict[str, Any]]]:
    single = [(name, _edits([gpu], nodes)) for gpu in gpus for name in (str(gpu[0]), gpu[1])]
    return [*single, ("all", _edits(gpus, nodes))]


def _edits(gpus: list[Named], nodes: Mapping[int, list[str]]) -> dict[str, Any]:
    edits: dict[str, Any] = {"env": [f"{DEVICE}{index}=1" for index, _ in gpus]}
    paths = sorted({path for index, _ in gpus for path in nodes.get(index, [])})
    if paths:
        edits["deviceNodes"] = [{"path": path} for path in paths]
    return edits
