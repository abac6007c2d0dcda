#!/usr/bin/env python3
"""Makes cuda_api.tsv and nvml_api.tsv from NVIDIA's public headers. Run it when a new CUDA brings new names;
a build never does: the tables are data in the tree.

    python3 csrc/tables/generate.py --cuda /usr/local/cuda/include --nvml DIR [--pynvml FILE]

``--cuda``    the toolkit's include folder (cudaTypedefs.h and its GL, EGL, VDPAU and profiler siblings).
``--nvml``    folder of nvml.h (PyPI: nvidia-nvml-dev).  ``--pynvml``  pynvml.py (PyPI: nvidia-ml-py), which still names
              functions that the header dropped.

Only names and version numbers are taken: facts. How an export is named follows from the versions: sort a name's plain
versions; the oldest is exported as it is, the n-th as ``_vN``. A per-thread variant (flags 2) appends ``_ptsz`` or
``_ptds`` to the newest plain variant that existed when it came.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterable
from pathlib import Path

HERE = Path(__file__).resolve().parent
TYPEDEF_HEADERS = ["cudaTypedefs.h", "cudaGLTypedefs.h", "cudaEGLTypedefs.h", "cudaVDPAUTypedefs.h",
                   "cudaProfilerTypedefs.h"]
TYPEDEF = re.compile(r"^\s*typedef\s[^;]*?PFN_(?P<name>cu\w+?)_v(?P<version>\d+)(?:_(?P<thread>ptsz|ptds))?\s*\)", re.M)
WINDOWS_ONLY = {"cuWGLGetDevice"}

# Exported by drivers 535 and 550 but in no typedef header: the exports are known, their versions are not.
EXPORTS_ONLY = ["cuEGLApiInit", "cuMemGetAttribute", "cuMemGetAttribute_v2"]
# The debugger's side door. Partly data symbols; a program never asks for them through cuGetProcAddress.
DEBUGGER = """
cudbgApiAttach cudbgApiClientPid cudbgApiClientRevision cudbgApiDetach cudbgApiInit cudbgAttachHandlerAvailable
cudbgDebuggerCapabilities cudbgDebuggerInitialized cudbgDetachSuspendedDevicesMask cudbgEnableIntegratedMemcheck
cudbgEnableLaunchBlocking cudbgEnablePreemptionDebugging cudbgGetAPI cudbgGetAPIVersion cudbgInjectionPath cudbgIpcFlag
cudbgMain cudbgReportDriverApiError cudbgReportDriverApiErrorFlags cudbgReportDriverInternalError
cudbgReportedDriverApiErrorCode cudbgReportedDriverApiErrorFuncNameAddr cudbgReportedDriverApiErrorFuncNameSize
cudbgReportedDriverInternalErrorCode cudbgResumeForAttachDetach cudbgRpcEnabled cudbgSessionId cudbgUseExternalDebugger
""".split()
# Newer than the headers above; known by name only (from the loader of cuda-bindings 13.5), not wrapped, not exported by
# the simulated driver.
NAMES_ONLY = [("cuMemcpyWithAttributesAsync", 13020), ("cuMemcpy3DWithAttributesAsync", 13020),
              ("cuStreamBeginCaptureToCig", 13020), ("cuStreamEndCaptureToCig", 13020),
              ("cuStreamBeginRecaptureToGraph", 13030), ("cuFabricCpyBatchAsync", 13050)]
# Exported by 535 and 550, in neither source: nvidia-smi's side door, and two names that were renamed.
NVML_EXTRA = ["nvmlInternalGetExportTable", "nvmlGetBlacklistDeviceCount", "nvmlGetBlacklistDeviceInfoByIndex"]

Row = tuple[str, int, int, str]


def exports(found: Iterable[tuple[str, int, str]]) -> list[Row]:
    """Rows for (name, version, '' or 'ptsz' or 'ptds'), in name order, then flags, then version."""
    plain: dict[str, set[int]] = {}
    threaded: dict[str, set[tuple[int, str]]] = {}
    for name, version, thread in found:
        plain.setdefault(name, set())
        if thread:
            threaded.setdefault(name, set()).add((version, thread))
        else:
            plain[name].add(version)
    rows: list[Row] = []
    for name, versions in sorted(plain.items()):
        variant = {v: name if n == 1 else f"{name}_v{n}" for n, v in enumerate(sorted(versions), 1)}
        rows += [(name, version, 0, export) for version, export in variant.items()]
        for version, thread in sorted(threaded.get(name, set())):
            base = max((v for v in variant if v <= version), default=None)
            rows.append((name, version, 2, f"{variant[base] if base is not None else name}_{thread}"))
    return rows


def cuda_rows(include: Path) -> list[Row]:
    found: set[tuple[str, int, str]] = set()
    for header in TYPEDEF_HEADERS:
        for match in TYPEDEF.finditer((include / header).read_text(encoding="utf-8", errors="replace")):
            if match["name"] not in WINDOWS_ONLY:
                found.add((match["name"], int(match["version"]), match["thread"] or ""))
    rows = exports(found)
    rows += [("-", 0, 0, export) for export in sorted([*EXPORTS_ONLY, *DEBUGGER])]
    rows += [(name, version, 0, "-") for name, version in sorted(NAMES_ONLY)]
    return rows


def nvml_names(include: Path, pynvml: Path | None) -> list[str]:
    names = set(NVML_EXTRA)
    names.update(re.findall(r"\bDECLDIR\b[\s*\w]*?\b(nvml\w+)\s*\(", (include / "nvml.h").read_text(errors="replace")))
    if pynvml:
        names.update(re.findall(r"_nvmlGetFunctionPointer\(\s*[\"'](nvml\w+)[\"']", pynvml.read_text(errors="replace")))
    return sorted(names)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cuda", type=Path, required=True)
    parser.add_argument("--nvml", type=Path, required=True)
    parser.add_argument("--pynvml", type=Path)
    args = parser.parse_args()
    header = "# Made by csrc/tables/generate.py (its head says how); do not edit.\n"
    lines = [f"{name}\t{version}\t{flags}\t{export}\n" for name, version, flags, export in cuda_rows(args.cuda)]
    (HERE / "cuda_api.tsv").write_text("name\tversion\tflags\texport\n" + header + CUDA_NOTE + "".join(lines))
    names = [f"{name}\n" for name in nvml_names(args.nvml, args.pynvml)]
    (HERE / "nvml_api.tsv").write_text("export\n" + header + "".join(names))


CUDA_NOTE = """\
# flags: 0 plain, 2 per-thread default stream (only names that have such a variant have a row with 2).
# name "-": exported, but in no header. export "-": known by name only, newer than the headers.
"""

if __name__ == "__main__":
    main()
