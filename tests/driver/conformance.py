"""What a driver's cuGetProcAddress answers, and what NVIDIA's CUDA runtimes ask it."""

from __future__ import annotations

import csv
import functools
import re
import subprocess
import sys
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from driver_tools import FLAGS, ROOT, SRC, gcc, run

RUNTIMES = {"11.8": "nvidia-cuda-runtime-cu11==11.8.*", "12.0": "nvidia-cuda-runtime-cu12==12.0.*",
            "12.9": "nvidia-cuda-runtime-cu12==12.9.*", "13.0": "nvidia-cuda-runtime==13.0.*",
            "13": "nvidia-cuda-runtime==13.*"}
"""PyPI's packages; the last is the newest there is."""


@dataclass(frozen=True, order=True)
class Question:
    name: str
    version: int
    flags: int


@dataclass(frozen=True)
class Answer:
    """``status`` is -1 where the caller could not be told. ``function``: ``library+offset``, or ``-`` for NULL."""

    result: int
    status: int
    function: str


def table() -> list[tuple[Question, str]]:
    """cuda_api.tsv: each question with the export that answers it, from that version up to the next of the name."""
    with open(ROOT / "csrc/tables/cuda_api.tsv") as file:
        lines = csv.reader((line for line in file if not line.startswith("#")), delimiter="\t")
        next(lines)
        return [(Question(name, int(version), int(flags)), export) for name, version, flags, export in lines
                if name != "-" and export != "-"]


def table_export(question: Question) -> str | None:
    """The export that should answer, by the table; None where it knows of none."""
    for flags in (question.flags & 2, 0):  # a name without a per-thread variant answers with the plain one
        fitting = [(row.version, export) for row, export in _rows().get(question.name, ())
                   if row.flags == flags and row.version <= question.version]
        if fitting:
            return max(fitting)[1]
    return None


@functools.cache
def _rows() -> dict[str, list[tuple[Question, str]]]:
    found: dict[str, list[tuple[Question, str]]] = defaultdict(list)
    for row, export in table():
        found[row.name].append((row, export))
    return found


def ask(library: Path, questions: Iterable[Question], folder: Path, **env: str) -> dict[tuple[str, Question], Answer]:
    """(API, question) -> answer, of the driver at ``library``."""
    program, file = folder / "answers", folder / "questions"
    if not program.exists():
        gcc(SRC / "answers.c", "-o", program, *FLAGS, "-ldl")
    file.write_text("".join(f"{one.name or '-'} {one.version} {one.flags}\n" for one in questions))
    found = {}
    for line in run(program, library, file, env=env).splitlines():
        api, name, version, flags, result, status, function = line.split(" ")
        question = Question("" if name == "-" else name, int(version), int(flags))
        found[api, question] = Answer(int(result), int(status), function)
    return found


def symbols(library: Path, *options: str) -> dict[str, set[str]]:
    """``library+offset`` -> the names of the functions there, as nm lists them."""
    found: dict[str, set[str]] = defaultdict(set)
    for at, name in re.findall(r"^(\w+) [tTiW] (\w+)", run("nm", *options, library), re.M):
        found[f"{library.name}+{int(at, 16):x}"].add(name)
    return found


def lookups(release: str, folder: Path) -> list[Question]:
    """What that release's cudart asks of a driver, in its order. Needs the network."""
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--dest", folder]
    subprocess.run([*pip, RUNTIMES[release]], check=True, capture_output=True, timeout=300)
    (wheel,) = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        (member,) = [name for name in archive.namelist() if re.search(r"/libcudart\.so\.\d+(\.\d+)?$", name)]
        cudart = Path(archive.extract(member, folder))
    gcc(SRC / "recorder.c", "-shared", "-o", folder / "libcuda.so.1", *FLAGS, "-w", "-Wl,-soname,libcuda.so.1")
    record = folder / "lookups"
    code = "import ctypes, sys; ctypes.CDLL(sys.argv[1]).cudaGetDeviceCount(ctypes.byref(ctypes.c_int()))"
    run(sys.executable, "-c", code, cudart, env={"LD_LIBRARY_PATH": str(folder), "LOOKUPS": str(record)})
    asked = [line.split() for line in record.read_text().splitlines()]
    return [Question("" if name == "-" else name, int(version), int(flags)) for name, version, flags in asked]


def suffixless(export: str) -> str:
    """cuMemcpyHtoDAsync of cuMemcpyHtoDAsync_v2_ptsz: what cuGetProcAddress calls it."""
    return re.sub(r"(_v\d+)?(_pt[sd][sz])?$", "", export)
