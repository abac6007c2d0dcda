"""Every CUDA wrapper has the prototype that NVIDIA's own headers give its export, in each of its variants.

A wrapper declares its prototype by hand, so nothing else would notice a wrong width. The hook's sources are compiled
once more with cuda.h in the place of our cuda_min.h, and each wrapper compared with the typedef that cudaTypedefs.h has
for the (name, version, flags) of its export.
"""

from __future__ import annotations

import csv
import os
import re
import shlex
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (Path("/usr/local/cuda/include"), Path("/usr/local/cuda-13.0/include"))
# no typedef: reached by dlsym alone. cuCtxDestroy, cuStreamDestroy: their first variants left the headers with CUDA 4
WITHOUT_TYPEDEF = {"cuGetExportTable"}

pytestmark = pytest.mark.skipif(not any((folder / "cudaTypedefs.h").exists() for folder in FOLDERS),
                                reason="needs the CUDA toolkit's headers")


def wrapped(source: Path) -> list[str]:
    """Names that one file of the hook wraps, as the preprocessor sees them."""
    done = subprocess.run([*shlex.split(os.environ.get("CC", "gcc")), "-E", "-P", "-std=gnu11",
                           *(f"-I{ROOT}/csrc/{folder}" for folder in ("abi", "client", "hook")),
                           f"-I{ROOT}/build/generated", str(source)], capture_output=True, text=True, check=True)
    return re.findall(r"hook_entry_(\w+) __attribute__.{0,200}?\(void \*\)wrap_\1,", done.stdout, re.S)


def typedefs() -> dict[str, str]:
    """Export -> the name of its function type."""
    with (ROOT / "csrc/tables/cuda_api.tsv").open() as file:
        rows = [row for row in csv.DictReader(file, delimiter="\t") if row["flags"]]
    header = next(folder for folder in FOLDERS if (folder / "cudaTypedefs.h").exists()) / "cudaTypedefs.h"
    known = set(re.findall(r"\*(PFN_\w+)\)", header.read_text()))
    found = {}
    for row in rows:
        base = f"PFN_{row['name']}_v{row['version']}"
        for end in ("_ptsz", "_ptds") if int(row["flags"]) else ("",):
            if base + end in known:
                found[row["export"]] = base + end
    return found


def test_prototypes_are_nvidias(tmp_path: Path) -> None:
    include = next(folder for folder in FOLDERS if (folder / "cudaTypedefs.h").exists())
    (tmp_path / "cuda_min.h").write_text(
        "#ifndef CGPU_CUDA_MIN_H\n#define CGPU_CUDA_MIN_H\n#define __CUDA_API_VERSION_INTERNAL\n"
        f'#include "{include}/cuda.h"\n#include "{include}/cudaTypedefs.h"\n#endif\n')
    types, checked, missing = typedefs(), 0, []
    for source in sorted((ROOT / "csrc/hook").glob("*.c")):
        lines = [f'#include "{source}"']
        for name in wrapped(source):
            if not name.startswith("cu"):
                continue
            if name not in types:
                missing.append(name)
                continue
            checked += 1
            lines.append(f"_Static_assert(__builtin_types_compatible_p(__typeof__(&wrap_{name}), {types[name]}), "
                         f'"{name} is not {types[name]}");')
        (tmp_path / source.name).write_text("\n".join(lines))
        done = subprocess.run(
            [*shlex.split(os.environ.get("CC", "gcc")), "-fsyntax-only", "-std=gnu11", "-w", f"-I{tmp_path}",
             f"-I{include}", *(f"-I{ROOT}/csrc/{folder}" for folder in ("client", "hook", "abi")),
             f"-I{ROOT}/build/generated",
             str(tmp_path / source.name)], capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    assert checked > 220
    assert set(missing) <= WITHOUT_TYPEDEF, missing
