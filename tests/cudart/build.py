"""Builds the stand-in CUDA runtime (driver.h says what it is) against the headers of an ``nvidia-cuda-runtime`` wheel.

    python build.py INCLUDE OUT

writes ``OUT/libcudart.so.13``, a ``libcudart.so`` beside it to link with, and ``OUT/libcudart_standin.a``. What the
headers declare and the C files do not implement becomes a stub: it answers cudaErrorNotSupported and, with
CGPU_CUDART_LOG set, says its name on stderr.
"""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
TWICE = ("copy", "stream", "launch")  # once more in the form for a thread's own default stream
FLAGS = ["-std=gnu11", "-O2", "-g", "-fPIC", "-Wall", "-Wextra", "-Wshadow", "-Wno-attributes",
         "-Wno-deprecated-declarations"]
OWN_STREAM = "-DCUDA_API_PER_THREAD_DEFAULT_STREAM"
STUBS = """#include <stdio.h>
#include <stdlib.h>
__attribute__((noinline)) static int absent(const char *name)
{
    if (getenv("CGPU_CUDART_LOG"))
        fprintf(stderr, "the stand-in cudart has no %s\\n", name);
    return 801; /* cudaErrorNotSupported */
}
#define STUB(name) int name(void); int name(void) { return absent(#name); }
"""
NAMES = """
const char *cudaGetErrorName(int error);
const char *cudaGetErrorName(int error)
{
    switch (error) {
    CASES
    }
    return "unrecognized error code";
}
"""


def headers(include: Path, *flags: str) -> str:
    """The runtime's declarations as the C compiler sees them."""
    done = subprocess.run(["gcc", "-E", "-P", f"-I{include}", *flags, include / "cuda_runtime_api.h"],
                          capture_output=True, text=True, check=True)
    return done.stdout


def declared(include: Path) -> set[str]:
    """The names of every function that answers an error, in both forms."""
    found: set[str] = set()
    for flags in ((), (OWN_STREAM,)):
        found |= set(re.findall(r"\bcudaError_t\s+(cuda\w+)\s*\(", headers(include, *flags)))
    return found


def error_names(include: Path) -> str:
    """C for cudaGetErrorName: the names of enum cudaError."""
    body = re.search(r"enum\s+cudaError\s*\{(.*?)\}", headers(include), re.S)
    assert body, "no enum cudaError in the headers"
    found = re.findall(r"(cuda\w+)\s*=\s*(\d+)", body[1])
    return NAMES.replace("CASES", "\n    ".join(f'case {value}: return "{name}";' for name, value in found))


def implemented(objects: list[Path]) -> set[str]:
    symbols = subprocess.run(["nm", "--defined-only", "--format=just-symbols", *objects], capture_output=True,
                             text=True, check=True)
    return set(symbols.stdout.split())


def build(include: Path, out: Path) -> Path:
    """Makes everything in ``out``; gives the shared library. CalledProcessError when a compiler fails."""
    out.mkdir(parents=True, exist_ok=True)
    objects = []
    for source in sorted(HERE.glob("*.c")):
        for suffix, flags in (("", []), ("_own", [OWN_STREAM]))[:1 + (source.stem in TWICE)]:
            objects.append(out / f"{source.stem}{suffix}.o")
            subprocess.run(["gcc", *FLAGS, *flags, f"-I{include}", "-c", source, "-o", objects[-1]], check=True)
    stubs = out / "stubs.c"
    stubs.write_text(STUBS + "".join(f"STUB({name})\n" for name in sorted(declared(include) - implemented(objects)))
                     + error_names(include))
    objects.append(out / "stubs.o")
    subprocess.run(["gcc", "-O2", "-fPIC", "-c", stubs, "-o", objects[-1]], check=True)
    exports = out / "exports.map"
    exports.write_text("libcudart.so.13 { global: cuda*; __cuda*; local: *; };\n")
    library = out / "libcudart.so.13"
    subprocess.run(["gcc", "-shared", "-o", library, *objects, "-Wl,-soname,libcudart.so.13",
                    f"-Wl,--version-script={exports}", "-lpthread", "-ldl"], check=True)
    link = out / "libcudart.so"
    link.unlink(missing_ok=True)
    link.symlink_to(library.name)
    archive = out / "libcudart_standin.a"
    archive.unlink(missing_ok=True)
    subprocess.run(["ar", "rcs", archive, *objects], check=True)
    return library


if __name__ == "__main__":
    print(build(Path(sys.argv[1]), Path(sys.argv[2])))
