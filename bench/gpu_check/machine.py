"""What this machine has: a Python that can run cgpud, CUDA libraries, Pythons with frameworks, a compiler."""

from __future__ import annotations

import glob
import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import asdict, dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
ROOT = HERE.parents[1]
STATE = ROOT / "build" / "gpu-check"
CARRIED = STATE / "carried"
PROGRAMS = ("load", "costs", "memory")
FRAMEWORKS = ("torch", "cupy", "numba")
CONDAS = ("/opt/conda", "/opt/miniconda3", "~/miniconda3", "~/anaconda3", "~/miniforge3", "/opt/venv", "/venv")
"""Prefixes of Pythons that people install beside PATH."""
NEEDED = "import trio, pynvml, cgpusched._gate, cgpusched.daemon.server.clients; import cgpusched.driver.find as f; " \
         "f.packaged('hook/libcgpu-hook.so.1')"


class Skip(Exception):
    """This machine cannot do it, or has no need to: the reason."""


@dataclass
class Machine:
    """Paths and facts, found once and handed to every check as JSON."""

    simulated: bool
    python_path: list[str] = field(default_factory=list)
    """What PYTHONPATH must have for cgpud and its commands; empty where this Python has them by itself."""
    programs: dict[str, str] = field(default_factory=dict)
    """The C programs by name."""
    libraries: dict[str, str] = field(default_factory=dict)
    """cudart, cublas: the files."""
    pythons: dict[str, str] = field(default_factory=dict)
    """A Python that has this framework, by its name."""
    nvidia_smi: str = ""
    device: str = ""
    driver: str = ""
    memory: int = 0
    """Bytes of the card."""
    fuse: str = ""
    """Why there is no tree; empty = there is one."""
    runtime: str = ""
    lib: str = ""
    tree: str = ""
    sim_lib: str = ""
    """Folder of the simulated driver, where that is used."""

    def write(self, path: Path) -> None:
        path.write_text(json.dumps(asdict(self), indent=1))

    @staticmethod
    def read(path: Path) -> Machine:
        return Machine(**json.loads(path.read_text()))


def run(*command: object, env: dict[str, str] | None = None, seconds: float = 60) -> subprocess.CompletedProcess[str]:
    """A command to its end, its output as text; a status of 127 where it cannot be had or does not end."""
    arguments = [str(part) for part in command]
    try:
        return subprocess.run(arguments, env=env, capture_output=True, text=True, errors="replace", timeout=seconds,
                              check=False)
    except (OSError, subprocess.SubprocessError) as error:
        return subprocess.CompletedProcess(arguments, 127, "", str(error))


def with_path(paths: Iterable[str]) -> dict[str, str]:
    """The environment with these in front of PYTHONPATH."""
    return os.environ | {"PYTHONPATH": ":".join([*paths, *filter(None, [os.environ.get("PYTHONPATH")])])}


def python_path() -> list[str]:
    """Where this Python finds the built package and all that it imports. Skip, with what was tried: nowhere."""
    version = f"{sys.version_info.major}.{sys.version_info.minor}"
    tries = {
        "this Python": [str(ROOT / "sched"), str(ROOT)],
        ".venv": [str(ROOT / "sched"), str(ROOT), str(ROOT / f".venv/lib/python{version}/site-packages")],
        "build/gpu-check/carried": [str(CARRIED / part) for part in ("package", "site", f"cp{version}")],
    }
    failed = []
    for name, paths in tries.items():
        done = run(sys.executable, "-c", NEEDED, env=with_path(paths))
        if done.returncode == 0:
            return paths
        failed.append(f"{name}: {(done.stderr.strip().splitlines() or ['?'])[-1]}")
    raise Skip(f"no build that {sys.executable} ({version}) can run; " + "; ".join(failed))


def build_programs(out: Path) -> dict[str, str]:
    """Compiles the C programs, or takes the carried ones where there is no compiler."""
    found = {}
    for name in PROGRAMS:
        built = out / name
        source = HERE / "programs" / f"{name}.c"
        if shutil.which("gcc"):
            done = run("gcc", "-std=gnu11", "-O2", "-Wall", f"-I{ROOT}/csrc/abi", "-o", built, source, "-ldl")
            if done.returncode == 0:
                found[name] = str(built)
                continue
        carried = CARRIED / "bin" / name
        if run("ldd", carried).returncode == 0:
            found[name] = str(carried)
    return found


def libraries(pythons: Iterable[str]) -> dict[str, str]:
    """The newest libcudart and libcublas of the toolkit, the loader's cache or a Python's wheels."""
    folders = ["/usr/local/cuda*/lib64", "/usr/local/cuda*/targets/x86_64-linux/lib", "/opt/cuda/lib64",
               "/usr/lib/x86_64-linux-gnu", "/usr/lib64", "/opt/conda/lib"]
    for python in pythons:
        done = run(python, "-c", "import nvidia; print('\\n'.join(nvidia.__path__))")
        for path in done.stdout.split() if done.returncode == 0 else []:
            folders += [f"{path}/*/lib", f"{path}/lib"]
    found = {}
    for name in ("cudart", "cublas"):
        files = [path for folder in folders for path in glob.glob(f"{folder}/lib{name}.so*")]
        if files:
            found[name] = max(files, key=lambda path: (version_of(path), -len(path)))
    return found


def version_of(path: str) -> tuple[int, ...]:
    """12.4 of ``libcudart.so.12.4``."""
    return tuple(int(part) for part in path.rpartition(".so")[2].split(".") if part.isdigit())


def pythons() -> dict[str, str]:
    """For each framework the first Python that has it: PATH's, conda's, and those of its environments."""
    seen: dict[str, None] = {}
    folders = os.environ.get("PATH", "").split(":")
    for base in map(os.path.expanduser, CONDAS):
        folders += [f"{prefix}/bin" for prefix in [base, *glob.glob(f"{base}/envs/*")]]
    folders += [str(ROOT / ".venv-frameworks-full/bin"), str(ROOT / ".venv-frameworks/bin")]
    for folder in folders:
        for path in sorted(glob.glob(f"{folder}/python3*")):
            if re.fullmatch(r"python3(\.\d+)?", Path(path).name) and os.access(path, os.X_OK):
                seen.setdefault(path)
    found: dict[str, str] = {}
    code = "import importlib.util, sys; print(*[n for n in sys.argv[1:] if importlib.util.find_spec(n)])"
    for path in seen:
        done = run(path, "-c", code, *FRAMEWORKS, seconds=20)
        for name in done.stdout.split() if done.returncode == 0 else []:
            found.setdefault(name, path)
        if len(found) == len(FRAMEWORKS):
            break
    return found
