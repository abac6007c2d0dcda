"""cgpu-runtime and NVIDIA's runtime in one chain before runc, in both orders and modes.

Whatever driver NVIDIA's brings in, and whatever the image has of one, programs find our proxies. NVIDIA's side is
stood in for by tests/support/nvidia.py.
"""

import json
import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import engines
import nvidia
import pytest
from node import ROOT, build_c
from world import ASKS, OUT_OF_MEMORY, TOOLS, Bundles, gpus_of, instances, low_level, make_image, node_over

pytestmark = pytest.mark.timeout(300)
LIB = f"/{engines.MULTIARCH}"
DRIVER = [f"{LIB}/{name}.{nvidia.VERSION}" for name in nvidia.NAMES]
NAMES = ["libcuda.so.1", "libnvidia-ml.so.1", *(f"{LIB}/{name}.1" for name in nvidia.NAMES), *DRIVER]
COMPAT = "/usr/local/cuda/compat/libcuda.so.1"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundles]:
    root = engines.fetch()
    base = tmp_path_factory.mktemp("chain")
    make_image(base)
    probe = build_c(ROOT / "tests/engines/probe.c", base / "bin/probe")
    programs = [probe, *(base / "bin" / name for name in ("alloc", "nvidia-smi"))]
    image = engines.image(base / "probe.tar", [*TOOLS, *programs])
    with engines.cgroup_parent(f"cgpu-test-{os.getpid()}") as parent, node_over(root, base) as node:
        one = Bundles(node, low_level(root, base / "stand-ins"), base, image, parent)
        one.probe()
        yield one


class Chain(Bundles):
    """Bundles whose runtime is the first of a chain."""

    nvidia: Path
    """The folder of NVIDIA's stand-in."""

    @property
    def is_ours_first(self) -> bool:
        return self.program.name == "cgpu-runtime"


def ours(base: Path, made: Bundles, following: Path) -> Path:
    """cgpu-runtime, going on with that."""
    program = base / "bin/cgpu-runtime"
    program.parent.mkdir()
    shutil.copy(made.node.binary, program)
    program.with_name("cgpu-runtime.conf").write_text(f"socket {made.node.runtime}/runtime.sock\nruntime {following}\n")
    return program


@pytest.fixture(params=["legacy", "cdi"])
def mode(request: pytest.FixtureRequest) -> str:
    assert isinstance(request.param, str)
    return request.param


@pytest.fixture(params=["ours first", "theirs first"])
def chain(made: Bundles, mode: str, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Chain]:
    one = Chain(made.node, made.runc, tmp_path, made.image, made.parent)
    one.nvidia = tmp_path / "nvidia"
    if request.param == "ours first":
        one.program = ours(tmp_path, made, nvidia.make(one.nvidia, mode, made.runc))
    else:
        one.program = nvidia.make(one.nvidia, mode, ours(tmp_path, made, made.runc))
    yield one
    one.close()


def probed(chain: Bundles, ident: str, *paths: str) -> list[str]:
    return chain("exec", ident, "probe", *paths).stdout.splitlines()


def test_what_nvidia_brings_in_is_covered(chain: Chain) -> None:
    # first, NVIDIA's runtime does nothing unless its own variable is set, as NVIDIA's images have it
    chain.create("gpu", *ASKS, *([] if chain.is_ours_first else ["NVIDIA_VISIBLE_DEVICES=all"]))
    chain("start", "gpu")
    assert probed(chain, "gpu", *NAMES) == ["proxy"] * len(NAMES)
    assert gpus_of(chain("exec", "gpu", "nvidia-smi").stdout) == ["6043"]
    tried = chain("exec", "gpu", "sh", "-c", f"alloc {6044 << 20} </dev/null; alloc {6042 << 20} </dev/null")
    assert tried.stdout.split() == [OUT_OF_MEMORY, "0"]
    there = chain("exec", "gpu", "sh", "-c", "mount").stdout
    for path in DRIVER:
        assert f" {path} " in there, "the stand-in has brought in no driver"
    assert (chain.nvidia / "visible").read_text() == "all"


def test_a_container_that_is_not_ours_has_nvidias_own_driver(chain: Chain) -> None:
    for number, env in enumerate((["NVIDIA_VISIBLE_DEVICES=all"],
                                  ["NVIDIA_VISIBLE_DEVICES=all", "CGPU_DISABLE=true", *ASKS])):
        ident = f"plain{number}"
        chain.create(ident, *env)
        chain("start", ident)
        assert instances(chain.node) == []
        assert probed(chain, ident, *NAMES) == ["driver"] * len(NAMES)


def test_a_compat_folder_of_the_image_is_covered(chain: Chain) -> None:
    bundle = chain.make("compat", *ASKS, f"LD_LIBRARY_PATH={os.path.dirname(COMPAT)}:/opt/mine")
    for place in (COMPAT, "/opt/mine/libcuda.so.1", "/usr/local/cuda-12.4/compat/libcuda.so.550.1"):
        path = bundle / "rootfs" / place.lstrip("/")
        path.parent.mkdir(parents=True)
        shutil.copy(chain.nvidia / f"libcuda.so.{nvidia.VERSION}", path)
    chain("create", "--bundle", bundle, "compat")
    chain("start", "compat")
    paths = [COMPAT, "/opt/mine/libcuda.so.1", "/usr/local/cuda-12.4/compat/libcuda.so.550.1", "libcuda.so.1"]
    assert probed(chain, "compat", *paths) == ["proxy"] * len(paths)


def test_nvidia_gets_the_list_that_ours_names(chain: Chain) -> None:
    chain.create("listed", *ASKS, "ALIYUN_COM_GPU_VISIBLE_DEVICES=0", "NVIDIA_VISIBLE_DEVICES=all")
    spec = json.loads((chain.base / "bundle-listed/config.json").read_text())
    assert "NVIDIA_VISIBLE_DEVICES=0" in spec["process"]["env"]
    # where NVIDIA's runtime comes first it has read its own variable before us; its prestart hook reads it again
    assert (chain.nvidia / "visible").read_text() == ("0" if chain.is_ours_first else "all")


def test_a_loop_of_the_two_ends(made: Bundles, tmp_path: Path) -> None:
    program = ours(tmp_path, made, tmp_path / "nvidia/nvidia-container-runtime")
    nvidia.make(tmp_path / "nvidia", "legacy", program)
    done = subprocess.run([program, "--version"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert "a loop of runtimes" in done.stderr
