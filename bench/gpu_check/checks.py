"""All checks, in the order in which they run: the cheap and telling ones first, should the time run out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import check_memory
import check_programs
import check_time
from daemon import Site
from results import Recorder


@dataclass(frozen=True)
class Check:
    body: Callable[[Site, Recorder], None]
    seconds: float
    """It is ended after that long."""


CHECKS = {
    "quota": Check(check_memory.quota, 30),
    "context": Check(check_memory.context, 30),
    "killed": Check(check_memory.killed, 30),
    "resized": Check(check_memory.resized, 30),
    "nvml": Check(check_memory.nvml, 20),
    "nvidia-smi": Check(check_memory.nvidia_smi, 60),
    "graphs": Check(check_programs.graphs, 30),
    "launches": Check(check_time.launches, 60),
    "cudart": Check(check_programs.cudart, 30),
    "cublas": Check(check_programs.cublas, 30),
    "torch": Check(check_programs.torch, 90),
    "torch-oom": Check(check_programs.torch_oom, 90),
    "cupy": Check(check_programs.cupy, 60),
    "numba": Check(check_programs.numba, 60),
    "ratio": Check(check_time.ratio, 90),
    "training": Check(check_time.training, 90),
    "hand-over": Check(check_time.hand_over, 30),
    "drain": Check(check_time.drain, 40),
    "ratio-torch": Check(check_time.ratio_torch, 90),
}
