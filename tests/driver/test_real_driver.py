"""The real driver libraries behind our proxies, without a GPU.

Skipped unless ``CGPU_TEST_REAL_DRIVER`` is set: to a folder with libcuda.so.1 and libnvidia-ml.so.1, or to
``download``, which fetches Debian's packages (non-free, not ours to ship) with a package configuration of its own into
a temporary folder.
"""

import os
import subprocess
from pathlib import Path

import pytest
from driver_tools import FLAGS, SRC, gcc, run

from cgpusched.driver import elf, find, proxy

WANTED = os.environ.get("CGPU_TEST_REAL_DRIVER", "")
pytestmark = pytest.mark.skipif(not WANTED, reason="CGPU_TEST_REAL_DRIVER is not set")
PACKAGES = {"535": "bookworm", "550": "trixie"}


def download(series: str, folder: Path) -> Path:
    """Debian's libcuda1 and libnvidia-ml1 of that series, unpacked; gives the folder of the libraries."""
    for part in ("lists/partial", "cache/archives/partial", "deb"):
        (folder / part).mkdir(parents=True)
    key = "/usr/share/keyrings/debian-archive-keyring.gpg"
    source = f"deb [signed-by={key}] http://deb.debian.org/debian {PACKAGES[series]} non-free\n"
    (folder / "sources.list").write_text(source)
    options = [f"Dir::Etc::sourcelist={folder}/sources.list", "Dir::Etc::sourceparts=-",
               f"Dir::State::lists={folder}/lists", f"Dir::Cache={folder}/cache", "APT::Sandbox::User=root"]
    apt = ["apt-get", *(word for option in options for word in ("-o", option))]
    subprocess.run([*apt, "update"], check=True, capture_output=True, timeout=120)
    subprocess.run([*apt, "download", "libcuda1", "libnvidia-ml1"], check=True, capture_output=True, timeout=300,
                   cwd=folder / "deb")
    for package in (folder / "deb").iterdir():
        subprocess.run(["dpkg-deb", "-x", str(package), str(folder)], check=True, timeout=60)
    return folder / "usr/lib/x86_64-linux-gnu/nvidia/current"


@pytest.fixture(scope="module", params=list(PACKAGES) if WANTED == "download" else ["named"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> find.Driver:
    folder = Path(WANTED) if request.param == "named" else download(request.param, tmp_path_factory.mktemp("nonfree"))
    found = find.find_driver(folder)
    assert found
    return found


def test_the_proxies_offer_the_same_functions(driver: find.Driver, hook: Path, tmp_path: Path) -> None:
    proxy.install_proxies(driver, tmp_path / "lib", hook)
    for real, name in ((driver.cuda, find.CUDA), (driver.nvml, find.NVML)):
        ours, theirs = elf.read(tmp_path / "lib" / name), elf.read(real)
        assert ours.functions == theirs.functions and len(ours.functions) > 300
        assert ours.soname == theirs.soname == name


def test_a_program_sees_the_same_driver(driver: find.Driver, hook: Path, tables: Path, tmp_path: Path) -> None:
    proxy.install_proxies(driver, tmp_path / "lib", hook)
    program, log = tmp_path / "compare", tmp_path / "log"
    gcc(SRC / "compare.c", "-o", program, *FLAGS, f"-I{tables}", "-ldl")
    real = run(program, driver.cuda, driver.nvml)
    assert real.startswith("cuInit ") and real.count("\n") > 600
    assert run(program, tmp_path / "lib" / find.CUDA, tmp_path / "lib" / find.NVML, env={"CGPU_LOG": str(log)}) == real
    assert not log.exists(), log.read_text()
