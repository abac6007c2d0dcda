"""What the driver tests share: a compiler, and a way to run a program with a clean environment."""

import os
import subprocess
from collections.abc import Callable
from pathlib import Path

ROOT = Path(__file__).parents[2]
SRC = Path(__file__).parent / "src"
FLAGS = ["-std=gnu11", "-O1", "-g", "-Wall", "-fPIC"]
INCLUDES = [f"-I{ROOT}/csrc/{folder}" for folder in ("abi", "client", "hook")]
HOOK_FLAGS = [*FLAGS, "-Wextra", "-Werror", "-fvisibility=hidden", *INCLUDES, "-include", f"{ROOT}/csrc/abi/glibc217.h",
              "-Wl,-z,now,-z,nodelete,--no-as-needed", "-l:libpthread.so.0", "-l:libdl.so.2",
              "-Wl,-soname,libcgpu-hook.so.1"]

Compile = Callable[..., Path]


def gcc(*args: str | Path) -> None:
    done = subprocess.run(["gcc", *map(str, args)], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr


def run(*command: str | Path, env: dict[str, str] | None = None, code: int = 0) -> str:
    """Runs a program without any of this machine's CGPU_ variables; gives stdout."""
    clean = {key: value for key, value in os.environ.items() if not key.startswith(("CGPU_", "LD_"))}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=60, env=clean | (env or {}))
    assert done.returncode == code, f"exit {done.returncode}: {done.stdout}{done.stderr}"
    return done.stdout
