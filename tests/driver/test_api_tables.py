"""The table of names, the wrappers and what the C build makes of both agree."""

import re
import subprocess
import sys
from pathlib import Path

import pytest
from driver_tools import ROOT, gcc, run

from cgpusched.driver.find import packaged
from cgpusched.errors import UserError

sys.path.insert(0, str(ROOT / "csrc/tables"))
import emit  # noqa: E402
import generate  # noqa: E402

DATA = Path(__file__).parent / "data/driver-550.txt"
ROWS = [tuple(row) for row in emit.table("cuda_api.tsv")]
NVML = {row[0] for row in emit.table("nvml_api.tsv")}
EXPORTS = {row[3] for row in ROWS} - {"-"}


def test_the_suffix_rule() -> None:
    """The oldest plain version is the bare name; a per-thread variant hangs on the newest plain one of its time."""
    found = [("cuA", 2000, ""), ("cuA", 3020, ""), ("cuA", 7000, "ptsz"), ("cuA", 9000, ""), ("cuB", 7000, "ptds"),
             ("cuB", 4000, ""), ("cuC", 12080, ""), ("cuC", 12080, "ptsz"), ("cuC", 13000, ""), ("cuC", 13000, "ptsz")]
    assert generate.exports(found) == [
        ("cuA", 2000, 0, "cuA"), ("cuA", 3020, 0, "cuA_v2"), ("cuA", 9000, 0, "cuA_v3"),
        ("cuA", 7000, 2, "cuA_v2_ptsz"),
        ("cuB", 4000, 0, "cuB"), ("cuB", 7000, 2, "cuB_ptds"),
        ("cuC", 12080, 0, "cuC"), ("cuC", 13000, 0, "cuC_v2"),
        ("cuC", 12080, 2, "cuC_ptsz"), ("cuC", 13000, 2, "cuC_v2_ptsz")]


@pytest.mark.parametrize(("name", "version", "flags", "export"), [
    ("cuMemAlloc", 2000, 0, "cuMemAlloc"), ("cuMemAlloc", 3020, 0, "cuMemAlloc_v2"),
    ("cuCtxCreate", 11040, 0, "cuCtxCreate_v3"), ("cuGetProcAddress", 12000, 0, "cuGetProcAddress_v2"),
    ("cuMemcpyHtoD", 7000, 2, "cuMemcpyHtoD_v2_ptds"), ("cuLaunchKernelEx", 11060, 2, "cuLaunchKernelEx_ptsz"),
    ("cuStreamGetCaptureInfo", 12030, 2, "cuStreamGetCaptureInfo_v3_ptsz"),
    ("cuGLMapBufferObject", 7000, 2, "cuGLMapBufferObject_v2_ptds"),
    ("cuDevicePrimaryCtxReset", 7000, 0, "cuDevicePrimaryCtxReset"),
    ("cuMemcpyBatchAsync", 12080, 2, "cuMemcpyBatchAsync_ptsz"), ("cuProfilerStart", 4000, 0, "cuProfilerStart")])
def test_known_facts(name: str, version: int, flags: int, export: str) -> None:
    assert (name, str(version), str(flags), export) in ROWS


def test_everything_that_driver_550_exports_is_known() -> None:
    lines = [line.split() for line in DATA.read_text().splitlines() if not line.startswith("#")]
    assert len(lines) == 656 + 350
    assert not {name for library, _, name in lines if library == "cuda"} - EXPORTS
    assert not {name for library, _, name in lines if library == "nvml"} - NVML


def test_rows_are_well_formed_and_each_is_there_once() -> None:
    keys = [row[:3] for row in ROWS if row[0] != "-"]
    assert len(keys) == len(set(keys)) and len(ROWS) > 700
    named = [row for row in ROWS if row[0] != "-" and row[3] != "-"]
    assert named == sorted(named, key=lambda row: (row[0], int(row[2]), int(row[1]))), "procaddr.c searches by halves"
    assert len({row[3] for row in named}) == len(named), "an export is one variant of one name"
    assert {row[2] for row in ROWS} == {"0", "2"}
    assert all(re.fullmatch(r"cu\w+", name) for name in EXPORTS)


def test_the_toolkits_headers_say_the_same() -> None:
    include = next((path for path in sorted(Path("/usr/local").glob("cuda*/include"), reverse=True)
                    if (path / "cudaTypedefs.h").exists() and "13000" in version_line(path)), None)
    if include is None:
        pytest.skip("no CUDA 13.0 headers on this machine")
    assert [tuple(map(str, row)) for row in generate.cuda_rows(include)] == ROWS


def version_line(include: Path) -> str:
    lines = (include / "cuda.h").read_text().splitlines()
    return next((line for line in lines if line.startswith("#define CUDA_VERSION")), "")


def test_the_c_form_says_the_same(tables: Path, tmp_path: Path) -> None:
    source = tmp_path / "print.c"
    source.write_text("""
        #include <stdio.h>
        #include "cuda_api.h"
        #define X(symbol) puts("export " #symbol);
        int main(void) {
            for (int i = 0; i < CUDA_API_ROWS; i++)
                printf("row %s %d %d %s\\n", cuda_api_rows[i].name, cuda_api_rows[i].version, cuda_api_rows[i].flags,
                       cuda_api_rows[i].export_name);
        #include "cuda_exports.inc"
        #undef X
        #define X(symbol) puts("nvml " #symbol);
        #include "nvml_exports.inc"
        #undef X
        #define X(name) puts("known " name);
        #include "cuda_known.inc"
        }""")
    gcc(source, "-o", tmp_path / "print", f"-I{tables}")
    lines = [line.split() for line in run(tmp_path / "print").splitlines()]
    assert [tuple(line[1:]) for line in lines if line[0] == "row"] == [r for r in ROWS if r[0] != "-" and r[3] != "-"]
    exports = [line[1] for line in lines if line[0] == "export"]
    assert exports == sorted(e for e in EXPORTS if not e.startswith("cudbg"))
    assert {line[1] for line in lines if line[0] == "nvml"} == NVML
    known = [line[1] for line in lines if line[0] == "known"]
    assert known == sorted((EXPORTS | {row[0] for row in ROWS}) - {"-"}), "unknown.c searches by halves"


def test_emit_leaves_unchanged_files_alone(tables: Path) -> None:
    before = {path: path.stat().st_mtime_ns for path in tables.iterdir()}
    subprocess.run([sys.executable, str(ROOT / "csrc/tables/emit.py"), str(tables)], check=True)
    assert {path: path.stat().st_mtime_ns for path in tables.iterdir()} == before


@pytest.fixture
def entries() -> dict[str, list[str]]:
    """What the shipped hook declares: 'wrap' and 'entry' -> names, from its symbols."""
    try:
        hook = packaged("hook/libcgpu-hook.so.1")
    except UserError as error:
        pytest.skip(str(error))
    symbols = run("nm", hook)
    return {"wrap": re.findall(r" t wrap_((?:cu|nvml)\w+)$", symbols, re.M),
            "entry": re.findall(r" [dDrR] hook_entry_(\w+)$", symbols, re.M)}


def test_no_wrapper_names_what_the_table_does_not_know(entries: dict[str, list[str]]) -> None:
    assert len(entries["wrap"]) > 50
    assert not set(entries["entry"]) - EXPORTS - NVML
    assert set(entries["wrap"]) <= set(entries["entry"])


def test_no_name_is_wrapped_twice(entries: dict[str, list[str]]) -> None:
    assert sorted(entries["wrap"]) == sorted(set(entries["wrap"]))
