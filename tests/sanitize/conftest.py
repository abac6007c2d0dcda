"""The C built with the compiler's sanitizers, and what they report of whoever runs with it."""

from __future__ import annotations

import os
import shlex
import shutil
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
CC = shlex.split(os.environ.get("CC", "gcc"))

def runtime(name: str) -> str:
    """The path of a sanitizer's runtime library. Skips the test where the compiler has none."""
    if shutil.which(CC[0]) is None:
        pytest.skip(f"there is no compiler {CC[0]}")
    done = subprocess.run([*CC, f"-print-file-name={name}"], capture_output=True, text=True, check=False)
    path = done.stdout.strip()
    if not os.path.isabs(path):
        pytest.skip(f"{CC[0]} has no {name}")
    return path


@dataclass
class Sanitized:
    """A build, the environment to run it in, and the folder that reports go to."""

    folder: Path
    flags: list[str]
    env: dict[str, str]
    reports: Path = field(init=False)

    def __post_init__(self) -> None:
        self.reports = self.folder / "reports"
        self.reports.mkdir(parents=True)

    def compile(self, out: Path, *arguments: str | Path) -> Path:
        subprocess.run([*CC, "-std=gnu11", "-O1", "-g", *self.flags, "-o", out, *arguments], check=True, cwd=ROOT)
        return out

    def said(self) -> str:
        """All reports so far, which are forgotten then."""
        texts = []
        for path in sorted(self.reports.iterdir()):
            texts.append(path.read_text(errors="replace"))
            path.unlink()
        return "\n".join(texts)


@pytest.fixture(scope="session")
def addresses(tmp_path_factory: pytest.TempPathFactory) -> Sanitized:
    """AddressSanitizer and UndefinedBehaviorSanitizer: the package with sanitized libraries, first on PYTHONPATH."""
    preload = [runtime("libasan.so"), runtime("libubsan.so")]
    folder = tmp_path_factory.mktemp("addresses")
    # With both runtimes in a process UBSan's report goes to stderr, whatever log_path says: so it ends the process.
    flags = ["-fsanitize=address,undefined", "-fno-sanitize-recover=undefined", "-fno-omit-frame-pointer"]
    made = Sanitized(folder, flags, {})
    # build_ffi.py writes beside itself: a copy of it keeps what is generated for others out of this, and the reverse
    shutil.copy(ROOT / "build_ffi.py", folder)
    for part in ("csrc", "systemd"):
        (folder / part).symlink_to(ROOT / part)
    build = "import build_ffi, pathlib; build_ffi.build(pathlib.Path('out').resolve())"
    subprocess.run([sys.executable, "-c", build], cwd=folder, check=True,
                   env=os.environ | {"CFLAGS": shlex.join(["-O1", *flags]), "PYTHONPATH": str(folder)})
    package = folder / "out/sched/cgpusched"
    shutil.copytree(ROOT / "sched/cgpusched", package, dirs_exist_ok=True,
                    ignore=shutil.ignore_patterns("*.so", "lib", "__pycache__"))
    # Python's own leaks are not ours. What the tests compile, and no compiler itself, runs with the sanitizers.
    made.env = os.environ | {
        "LD_PRELOAD": " ".join(preload), "CC": shlex.join(["env", "-u", "LD_PRELOAD", *CC, *flags]),
        "PYTHONPATH": str(package.parent), "PYTHONDONTWRITEBYTECODE": "1", "PYTHONMALLOC": "malloc",
        "ASAN_OPTIONS": f"detect_leaks=0:verify_asan_link_order=0:log_path={made.reports}/asan",
        "UBSAN_OPTIONS": "print_stacktrace=1",
    }  # fmt: skip
    return made


@pytest.fixture(scope="session")
def threads(tmp_path_factory: pytest.TempPathFactory) -> Sanitized:
    """ThreadSanitizer. ``-Wno-tsan``: it knows no fences, so what is ordered by one alone must be told to it."""
    runtime("libtsan.so")
    folder = tmp_path_factory.mktemp("threads")
    made = Sanitized(folder, ["-fsanitize=thread", "-Wno-tsan"], {})
    made.env = os.environ | {
        "TSAN_OPTIONS": f"suppressions={ROOT}/tests/sanitize/ordered.supp:log_path={made.reports}/tsan"}
    return made
