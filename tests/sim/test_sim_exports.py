"""What the two libraries export, what they need, and cuGetProcAddress."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

LIBS = ["libcuda.so.1", "libnvidia-ml.so.1"]
ROOT = Path(__file__).resolve().parents[2]


def libraries(machine: Any) -> Path:
    return Path(machine.environ()["CGPU_SIM_LIB"])


@pytest.mark.parametrize(("library", "table"), list(zip(LIBS, ["cuda_exports.inc", "nvml_exports.inc"], strict=True)))
def test_exports_are_the_tables(machine: Any, tmp_path: Path, library: str, table: str) -> None:
    subprocess.run([sys.executable, str(ROOT / "csrc/tables/emit.py"), str(tmp_path / "gen")], check=True)
    wanted = set(re.findall(r"X\((\w+)\)", (tmp_path / "gen" / table).read_text()))
    listing = subprocess.run(["nm", "-D", "--defined-only", str(libraries(machine) / library)], check=True,
                             capture_output=True,
                             text=True).stdout
    assert {line.split()[-1] for line in listing.splitlines()} == wanted


@pytest.mark.parametrize("library", LIBS)
def test_needs_no_newer_glibc_than_2_17(machine: Any, library: str) -> None:
    listing = subprocess.run(["objdump", "-T", str(libraries(machine) / library)], check=True, capture_output=True,
                             text=True).stdout
    versions = {tuple(map(int, found.split("."))) for found in re.findall(r"GLIBC_([0-9.]+)", listing)}
    assert versions and max(versions) <= (2, 17)


LOOKUP = """
status = c_int(-1)
def ask(name, version, flags=0):
    pointer = c_void_p(1)
    code = cu.lib.cuGetProcAddress_v2(c_char_p(name.encode()), byref(pointer), version, c_ulonglong(flags),
                                      byref(status))
    assert code == 0
    return pointer.value, status.value
def export(name):
    return ctypes.cast(getattr(cu.lib, name), c_void_p).value
"""


def test_get_proc_address(machine: Any) -> None:
    machine.run(LOOKUP + """
assert ask("cuMemAlloc", 2000) == (export("cuMemAlloc"), 0)
assert ask("cuMemAlloc", 3020) == ask("cuMemAlloc", 13000) == ask("cuMemAlloc", 99000) == (export("cuMemAlloc_v2"), 0)
assert ask("cuMemAlloc_v2", 13000) == (None, 1)         # names are asked for without suffixes
assert ask("cuNoSuchThing", 13000) == (None, 1)
assert ask("", 0) == (None, 1)                          # cudart's probe
assert ask("cuLaunchKernelEx", 11050) == (None, 2)      # came with 11.6
assert ask("cuCtxCreate", 12020) == (export("cuCtxCreate_v3"), 0)
assert ask("cuCtxCreate", 13000) == (export("cuCtxCreate_v4"), 0)
assert ask("cuGetProcAddress", 12020) == (export("cuGetProcAddress_v2"), 0)
assert ask("cuGetProcAddress", 11030) == (export("cuGetProcAddress"), 0)
assert ask("cuLaunchKernel", 13000, 2) == (export("cuLaunchKernel_ptsz"), 0)
assert ask("cuLaunchKernel", 13000, 1) == (export("cuLaunchKernel"), 0)
assert ask("cuMemcpyHtoD", 13000, 2) == (export("cuMemcpyHtoD_v2_ptds"), 0)
assert ask("cuMemcpyHtoD", 6000, 2) == (export("cuMemcpyHtoD_v2"), 0)   # older than the per-thread forms
assert ask("cuMemAlloc", 13000, 2) == (export("cuMemAlloc_v2"), 0)      # has none
assert result(cu.cuGetProcAddress, c_char_p(b"cuNoSuchThing"), byref(c_void_p()), 13000, 0) == 500
assert result(cu.cuGetProcAddress_v2, None, byref(c_void_p()), 13000, 0, None) == 1
table = c_void_p(1)
assert result(cu.cuGetExportTable, byref(table), c_char_p(bytes(16))) == 500 and not table.value
""")


def test_every_table_row_is_answered_by_its_export(machine: Any, tmp_path: Path) -> None:
    subprocess.run([sys.executable, str(ROOT / "csrc/tables/emit.py"), str(tmp_path)], check=True)
    rows = re.findall(r'\{"(\w+)", (\d+), (\d), "(\w+)"\}', (tmp_path / "cuda_api.h").read_text())
    assert len(rows) > 600
    machine.run(LOOKUP + f"""
rows = {rows!r}
for name, version, flags, name_of_export in rows:
    if int(version) <= 13000:
        assert ask(name, int(version), int(flags)) == (export(name_of_export), 0), (name, version, flags)
""")


def test_what_is_not_implemented_says_so(machine: Any) -> None:
    machine.run("""
context()
assert result(cu.cuTexObjectCreate, None, None, None, None) == 801
assert result(cu.cuCheckpointProcessLock, None, None) == 801
assert result(nv().nvmlDeviceSetMigMode, None, None, None) == 3
""")


def test_nothing_but_init_before_init(machine: Any) -> None:
    machine.run("""
n = c_int()
assert result(cu.cuDeviceGetCount, byref(n)) == 3
assert result(cu.cuMemAlloc_v2, byref(c_ulonglong()), 1) == 3
assert result(cu.cuDriverGetVersion, byref(n)) == 0 and n.value == 13000
assert result(cu.cuInit, 1) == 1
name = c_char_p()
cu.cuGetErrorName(2, byref(name)); assert name.value == b"CUDA_ERROR_OUT_OF_MEMORY"
cu.cuGetErrorString(2, byref(name)); assert name.value == b"out of memory"
assert result(cu.cuGetErrorName, 12345, byref(name)) == 1 and name.value is None
""")


def test_what_is_not_simulated_is_said_to_be_missing(machine: Any) -> None:
    """A program that asks first never meets the refusal: sparse arrays, timeline semaphores, dma-buf."""
    machine.run("""
context()
for attribute in (112, 114, 124):
    value = c_int(7)
    cu.cuDeviceGetAttribute(byref(value), attribute, 0)
    assert value.value == 0, attribute
for name in ("cuMemMapArrayAsync", "cuImportExternalSemaphore", "cuMemGetHandleForAddressRange"):
    assert cu.lib[name]() == 801, name
""")
