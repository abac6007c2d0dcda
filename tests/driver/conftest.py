"""Builds what the driver tests load: small libraries made by the C compiler, and the hook with test wrappers in it."""

import subprocess
import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parent))  # importlib mode does not: for driver_tools

from driver_tools import FLAGS, HOOK_FLAGS, ROOT, SRC, Compile, gcc  # noqa: E402


@pytest.fixture(scope="session")
def tables(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of what csrc/tables/emit.py writes."""
    out = tmp_path_factory.mktemp("tables")
    subprocess.run([sys.executable, str(ROOT / "csrc/tables/emit.py"), str(out)], check=True)
    return out


@pytest.fixture(scope="session")
def hook(tmp_path_factory: pytest.TempPathFactory, tables: Path) -> Path:
    """The binding part of the hook, with the wrappers of src/wrappers.c."""
    out = tmp_path_factory.mktemp("hook") / "libcgpu-hook.so.1"
    parts = [ROOT / "csrc/hook" / f"{name}.c" for name in ("init", "log", "procaddr", "selfbind", "unknown")]
    gcc(*parts, SRC / "wrappers.c", "-shared", "-o", out, f"-I{tables}", *HOOK_FLAGS)
    return out


@pytest.fixture
def compile_library(tmp_path: Path) -> Compile:
    """compile_library(name, C text, *flags) -> a shared library in a folder of its own."""

    def make(name: str, text: str, *flags: str | Path) -> Path:
        out = tmp_path / "real" / name
        out.parent.mkdir(exist_ok=True)
        source = tmp_path / f"{name}.c"
        source.write_text(text)
        gcc(source, "-shared", "-o", out, *FLAGS, "-w", *flags)
        return out

    return make


@pytest.fixture
def compile_program(tmp_path: Path) -> Compile:
    """compile_program(name, C text, *flags) -> an executable."""

    def make(name: str, text: str, *flags: str | Path) -> Path:
        out, source = tmp_path / name, tmp_path / f"{name}.main.c"
        source.write_text(text)
        gcc(source, "-o", out, *FLAGS, "-w", *flags, "-ldl")
        return out

    return make
