"""What tenants load must load on their glibc, which may be as old as 2.17."""

import re
from pathlib import Path

import pytest
from driver_tools import run

from cgpusched.driver.find import packaged
from cgpusched.errors import UserError

LIBRARIES = ["hook/libcgpu-hook.so.1", "sim/libcuda.so.1", "sim/libnvidia-ml.so.1"]


@pytest.fixture(params=LIBRARIES)
def library(request: pytest.FixtureRequest) -> Path:
    try:
        return packaged(request.param)
    except UserError as error:
        pytest.skip(str(error))


def too_new(symbols: str) -> set[str]:
    """Versions above 2.17 in objdump's output, and those with letters: GLIBC_PRIVATE and GLIBC_ABI_* are as bad."""
    found = set(re.findall(r"GLIBC_[0-9A-Z_.]+", symbols))
    return {version for version in found
            if not re.fullmatch(r"GLIBC_2\.\d+(\.\d+)?", version) or int(version.split(".")[1]) > 17}


def test_no_symbol_is_newer_than_2_17(library: Path) -> None:
    symbols = run("objdump", "-T", library)
    assert "GLIBC_2." in symbols
    assert not too_new(symbols), [line for line in symbols.splitlines() if too_new(line)]


def test_the_check_can_fail() -> None:
    assert too_new("GLIBC_2.2.5 GLIBC_2.17 GLIBC_2.18 GLIBC_2.34 GLIBC_PRIVATE GLIBC_ABI_DT_RELR") == {
        "GLIBC_2.18", "GLIBC_2.34", "GLIBC_PRIVATE", "GLIBC_ABI_DT_RELR"}


def test_the_old_homes_of_what_it_uses_are_needed(library: Path) -> None:
    """Without these an old glibc finds no pthread_create or dlopen, though every version looks right."""
    needed = set(re.findall(r"NEEDED.*\[(.*)\]", run("readelf", "-dW", library)))
    assert {"libpthread.so.0", "libdl.so.2", "libc.so.6"} <= needed
    assert needed <= {"libpthread.so.0", "libdl.so.2", "libc.so.6", "libcgpu-hook.so.1", "ld-linux-x86-64.so.2"}


def test_it_loads_into_a_program_that_knows_nothing_of_it(library: Path) -> None:
    assert run("/bin/true", env={"LD_PRELOAD": str(library)}) == ""


def test_the_hook_exports_only_what_a_proxy_needs() -> None:
    try:
        hook = packaged("hook/libcgpu-hook.so.1")
    except UserError as error:
        pytest.skip(str(error))
    names = {line.split()[2] for line in run("nm", "-D", "--defined-only", hook).splitlines()}
    # the linker's bounds of the section of wrappers are protected: no other library can take their place
    assert names - {"__start_cgpu_entries", "__stop_cgpu_entries"} == {"cgpu_proxy_bind"}
