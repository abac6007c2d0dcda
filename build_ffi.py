"""Builds the cffi gate module and the C libraries; also hatchling's build hook (pyproject.toml names it).

``python build_ffi.py`` rebuilds in place after a C change. Nothing but a C compiler is needed: no CUDA toolkit.

==========================================  ==================================================================
``cgpusched/_gate.abi3.so``                 the gate's daemon side (csrc/gate), through cffi
``cgpusched/lib/hook/libcgpu-hook.so.1``    the wrappers (csrc/hook) and the gate's client side (csrc/client)
``cgpusched/lib/hook/libcgpu-preload.so.1`` what containers preload where a driver cannot be covered (csrc/preload)
``cgpusched/lib/sim/libcuda.so.1``          the simulated driver
``cgpusched/lib/sim/libnvidia-ml.so.1``     the simulated NVML
``cgpusched/lib/bin/cgpu-runtime``          the OCI runtime (csrc/runtime), a program
``cgpusched/lib/systemd/cgpud.service``     the unit (systemd/), for ``cgpuctl setup systemd``
==========================================  ==================================================================
"""

from __future__ import annotations

import os
import platform
import shlex
import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from cffi import FFI

try:
    from hatchling.builders.hooks.plugin.interface import BuildHookInterface
except ImportError:  # `python build_ffi.py` in an environment without hatchling
    BuildHookInterface = object  # type: ignore[assignment,misc]

ROOT = Path(__file__).resolve().parent
GATE = "sched/cgpusched/_gate.abi3.so"
LIB = "sched/cgpusched/lib"

WARNINGS = ["-Wall", "-Wextra", "-Wshadow", "-Wvla"]
FLAGS = ["-std=gnu11", "-O2", "-g", *WARNINGS]
LIBRARY = ["-fPIC", "-shared", "-fvisibility=hidden", "-U_FORTIFY_SOURCE"]
INCLUDE = ["-Icsrc/abi", "-Icsrc/gate", "-Icsrc/client", "-Icsrc/hook", "-Icsrc/sim"]
PROGRAM = ["-fPIE", "-pie", "-Wl,-z,relro,-z,now"]
# Tenants' images may have a glibc as old as 2.17: bind to the old versions of what moved into libc.so.6 later, and name
# the libraries those lived in (empty stubs on a new glibc). tests/test_glibc.py checks the result.
OLD_GLIBC = ["-include", "csrc/abi/glibc217.h", "-Wl,-z,now,-z,nodelete,--no-as-needed", "-l:libpthread.so.0",
             "-l:libdl.so.2"]


def cc(out: Path, *args: str, kind: Sequence[str] = LIBRARY) -> None:
    """Compiles one shared library (or what ``kind`` makes); ``CC`` and ``CFLAGS`` of the environment are honoured."""
    out.parent.mkdir(parents=True, exist_ok=True)
    compiler = shlex.split(os.environ.get("CC", "gcc"))
    extra = shlex.split(os.environ.get("CFLAGS", ""))
    fresh = out.with_name(f".{out.name}.{os.getpid()}")  # whoever starts meanwhile finds the old one, whole
    subprocess.run([*compiler, *FLAGS, *kind, *INCLUDE, "-o", str(fresh), *args, *extra], check=True, cwd=ROOT)
    fresh.replace(out)


def sources(pattern: str) -> list[str]:
    """C files below csrc/, sorted, relative to the checkout."""
    return sorted(str(path.relative_to(ROOT)) for path in (ROOT / "csrc").glob(pattern))


def generated() -> Path:
    """Runs the generators of csrc/tables; gives the folder of what they wrote."""
    out = ROOT / "build" / "generated"
    out.mkdir(parents=True, exist_ok=True)
    subprocess.run([sys.executable, str(ROOT / "csrc/tables/emit.py"), str(out)], check=True)
    return out


def build_gate(out: Path) -> None:
    ffibuilder = FFI()
    ffibuilder.cdef((ROOT / "csrc/gate/gate.cdef").read_text())
    ffibuilder.set_source("cgpusched._gate", '#include "core.h"\n#include "gang.h"\n#include "server.h"')
    gate_c = ROOT / "build" / "_gate.c"
    gate_c.parent.mkdir(exist_ok=True)
    ffibuilder.emit_c_code(str(gate_c))
    # cffi's own C is not ours to lint
    cc(out, str(gate_c), *sources("gate/*.c"), f"-I{sysconfig.get_path('include')}",
       "-DPy_LIMITED_API=0x030b0000", "-Wno-unused-parameter", "-Wno-shadow", "-Wno-missing-field-initializers",
       "-lpthread")


def build(base: Path) -> list[str]:
    """Builds everything below ``base``; gives the paths made, relative to it."""
    tables = generated()
    include = f"-I{tables}"
    build_gate(base / GATE)
    hook = f"{LIB}/hook/libcgpu-hook.so.1"
    cc(base / hook, *sources("hook/*.c"), *sources("client/*.c"), include, "-Wl,-soname,libcgpu-hook.so.1", *OLD_GLIBC)
    preload = f"{LIB}/hook/libcgpu-preload.so.1"
    cc(base / preload, *sources("preload/*.c"), "-nostdlib", "-fno-builtin", "-fno-stack-protector",
       "-Wl,-soname,libcgpu-preload.so.1,-z,now,-z,nodelete")
    sim_cuda, sim_nvml = f"{LIB}/sim/libcuda.so.1", f"{LIB}/sim/libnvidia-ml.so.1"
    shared = sources("sim/shared/*.c")
    cc(base / sim_cuda, *sources("sim/cuda/*.c"), *shared, include, "-Wl,-Bsymbolic,-soname,libcuda.so.1", *OLD_GLIBC)
    cc(base / sim_nvml, *sources("sim/nvml/*.c"), *shared, include, "-Wl,-Bsymbolic,-soname,libnvidia-ml.so.1",
       *OLD_GLIBC)
    runtime = f"{LIB}/bin/cgpu-runtime"
    cc(base / runtime, *sources("runtime/*.c"), kind=PROGRAM)
    unit = f"{LIB}/systemd/cgpud.service"
    (base / unit).parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(ROOT / "systemd/cgpud.service", base / unit)
    return [GATE, hook, preload, sim_cuda, sim_nvml, runtime, unit]


class Build(BuildHookInterface[Any] if hasattr(BuildHookInterface, "__class_getitem__") else object):  # type: ignore[misc]
    """hatchling's hook: in the tree for an editable install, else below build/wheel and into the wheel."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        base = ROOT if version == "editable" else ROOT / "build" / "wheel"
        made = build(base)
        if version != "editable":
            for path in made:
                build_data["force_include"][str(base / path)] = path.removeprefix("sched/")
        build_data["pure_python"] = False
        tag = sysconfig.get_platform().replace("-", "_").replace(".", "_")
        build_data["tag"] = f"cp311-abi3-{tag}"


if __name__ == "__main__":
    if platform.machine() not in ("x86_64", "AMD64"):
        sys.exit(f"build_ffi: {platform.machine()} is not supported yet: only x86-64 is")
    build(ROOT)
