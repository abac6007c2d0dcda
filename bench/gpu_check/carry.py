"""Fills build/gpu-check/carried: all that a machine without pip and network needs beside the checkout."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

from machine import CARRIED, PROGRAMS, ROOT, build_programs

PURE = ("trio", "nvidia-ml-py")
PYTHONS = ("3.11", "3.12", "3.13", "3.14")


def carry() -> int:
    """Runs in the built environment, with a network. Gives the exit status."""
    if not (ROOT / "sched/cgpusched/lib/hook/libcgpu-hook.so.1").is_file():
        print("gpu-check: build first: make, or python build_ffi.py", file=sys.stderr)
        return 2
    shutil.rmtree(CARRIED, ignore_errors=True)
    leave = shutil.ignore_patterns("__pycache__")
    shutil.copytree(ROOT / "sched/cgpusched", CARRIED / "package/cgpusched", ignore=leave)
    shutil.copytree(ROOT / "cgpufs", CARRIED / "package/cgpufs", ignore=leave)
    pip(CARRIED / "site", *PURE)
    for version in PYTHONS:
        pip(CARRIED / f"cp{version}", "cffi", "--no-deps", "--only-binary=:all:", "--implementation=cp",
            f"--python-version={version}", f"--abi=cp{version.replace('.', '')}", "--platform=manylinux2014_x86_64",
            "--platform=manylinux_2_17_x86_64")
    (CARRIED / "bin").mkdir()
    if set(build_programs(CARRIED / "bin")) != set(PROGRAMS):
        print("gpu-check: the C programs do not compile (gcc?)", file=sys.stderr)
        return 2
    size = sum(file.stat().st_size for file in CARRIED.rglob("*") if file.is_file())
    print(f"{CARRIED}: {size / 1e6:.0f} MB, for Python {', '.join(PYTHONS)}")
    return 0


def pip(target: Path, *arguments: str) -> None:
    subprocess.run([sys.executable, "-m", "pip", "install", "--quiet", "--no-compile", "--disable-pip-version-check",
                    "--target", str(target), *arguments], check=True)
