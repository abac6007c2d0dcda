"""The driver's libraries by name, and where they lie. Apart from find.py, which takes five times as long to import."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

CUDA, NVML = "libcuda.so.1", "libnvidia-ml.so.1"
# Debian, Ubuntu; Debian's alternatives; Red Hat, SUSE; NVIDIA's container images; WSL; NixOS; a plain .run install
FOLDERS = tuple(map(Path, (
    "/usr/lib/x86_64-linux-gnu", "/usr/lib/x86_64-linux-gnu/nvidia/current", "/usr/lib64", "/usr/lib64/nvidia",
    "/usr/local/nvidia/lib64", "/usr/local/nvidia/lib", "/usr/lib/wsl/lib", "/run/opengl-driver/lib", "/usr/lib",
    "/lib/x86_64-linux-gnu", "/lib64")))
REAL = "real"
"""The folder beside the hook whose libcuda.so.1 and libnvidia-ml.so.1 lead to the real files: links, or, where the
proxies are mounted over those (cover.py), mounts of them."""


@dataclass(frozen=True)
class Driver:
    """The real files (no symbolic links) of one driver."""

    cuda: Path
    nvml: Path
