#!/usr/bin/env python3
"""Writes the C forms of cuda_api.tsv and nvml_api.tsv: ``emit.py OUTDIR``.

cuda_api.h        every (name, version, flags) that cuGetProcAddress knows, with the export that answers it
cuda_exports.inc  X(symbol) for each export of libcuda, sorted, each once (the debugger's cudbg* left out)
cuda_known.inc    X("name") for every name we have heard of: also the debugger's, and those newer than the headers
nvml_exports.inc  X(symbol) for each export of libnvidia-ml
"""

from __future__ import annotations

import sys
from pathlib import Path

HERE = Path(__file__).resolve().parent
NOTE = "/* Made by csrc/tables/emit.py from the tables beside it. */\n"


def table(name: str) -> list[list[str]]:
    """Rows of a table: no header line, no comments."""
    lines = (HERE / name).read_text(encoding="ascii").splitlines()[1:]
    return [line.split("\t") for line in lines if line and not line.startswith("#")]


def write(path: Path, text: str) -> None:
    """Leaves the file's time alone when nothing changed, so that nothing is rebuilt for it."""
    if not path.exists() or path.read_text(encoding="ascii") != text:
        path.write_text(text, encoding="ascii")


def emit(out: Path) -> None:
    rows = table("cuda_api.tsv")
    full = [row for row in rows if row[0] != "-" and row[3] != "-"]
    exports = {row[3] for row in rows} - {"-"}
    known = sorted((exports | {row[0] for row in rows}) - {"-"})
    write(out / "cuda_api.h", NOTE + "".join([
        "#ifndef CGPU_CUDA_API_H\n#define CGPU_CUDA_API_H\n",
        "struct cuda_api_row {\n    const char *name;\n    int version;\n    int flags;\n",
        "    const char *export_name;\n};\n",
        f"enum {{ CUDA_API_ROWS = {len(full)} }};\n",
        "/* Sorted by name, then flags, then version. */\n",
        "static const struct cuda_api_row cuda_api_rows[CUDA_API_ROWS] = {\n",
        *(f'    {{"{name}", {version}, {flags}, "{export}"}},\n' for name, version, flags, export in full),
        "};\n#endif\n"]))
    symbols = sorted(export for export in exports if not export.startswith("cudbg"))
    write(out / "cuda_exports.inc", NOTE + "".join(f"X({symbol})\n" for symbol in symbols))
    write(out / "cuda_known.inc", NOTE + "".join(f'X("{name}")\n' for name in known))
    write(out / "nvml_exports.inc", NOTE + "".join(f"X({row[0]})\n" for row in table("nvml_api.tsv")))


if __name__ == "__main__":
    if len(sys.argv) != 2:
        sys.exit("usage: emit.py OUTDIR")
    Path(sys.argv[1]).mkdir(parents=True, exist_ok=True)
    emit(Path(sys.argv[1]))
