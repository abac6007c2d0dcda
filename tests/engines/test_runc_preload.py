"""Copies of the driver where no loader looks: covered where we find them, else caught by a merged ld.so.preload."""

import contextlib
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
from world import ASKS, OUT_OF_MEMORY, Bundles, gpus_of, instances, low_level, make_image, node_over

from cgpusched.containers import preload

pytestmark = pytest.mark.timeout(300)
LINE = f"/usr/local/cgpu/lib/{preload.LIBRARY}\n"
APP = "/opt/app/lib/libcuda.so.1"
DEEP = "/data/a/b/libcuda.so.1"
ODD = "/opt/odd\nname/libcuda.so.1"
OWN = '#include <stdlib.h>\n__attribute__((constructor)) static void own(void) { setenv("OWN", "preloaded", 1); }\n'


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundles]:
    root = engines.fetch()
    base = tmp_path_factory.mktemp("preload")
    make_image(base)
    programs = ["alloc", "nvidia-smi", "probe"]
    build_c(ROOT / "tests/engines/probe.c", base / "bin/probe")
    tools = ["cat", "sleep", "true", "ls"]
    image = engines.image(base / "probe.tar", [*tools, *(base / "bin" / one for one in programs)])
    (base / "driver.c").write_text(nvidia.DRIVER)
    build_c(base / "driver.c", base / "libcuda.so.1", "-shared", "-fPIC")
    (base / "own.c").write_text(OWN)
    build_c(base / "own.c", base / "own.so", "-shared", "-fPIC")
    with engines.cgroup_parent(f"cgpu-test-{os.getpid()}") as parent, node_over(root, base) as node:
        one = Bundles(node, low_level(root, base / "stand-ins"), base, image, parent)
        one.probe()
        yield one


@contextlib.contextmanager
def bundles(made: Bundles, base: Path, mode: str) -> Iterator[Bundles]:
    """With a daemon whose ``preload`` is that."""
    config = made.node.base / "config.toml"
    lines = [line for line in config.read_text().splitlines() if not line.startswith("preload")]
    text = "\n".join([*lines, f'preload = "{mode}"', ""])
    if config.read_text() != text:
        made.node.stop()
        config.write_text(text)
        made.node.start()
    with contextlib.closing(Bundles(made.node, made.runc, base, made.image, made.parent)) as one:
        yield one


@pytest.fixture
def runc(made: Bundles, tmp_path: Path) -> Iterator[Bundles]:
    with bundles(made, tmp_path, "auto") as one:
        yield one


@pytest.fixture
def always(made: Bundles, tmp_path: Path) -> Iterator[Bundles]:
    with bundles(made, tmp_path, "always") as one:
        yield one


@pytest.fixture
def driver(made: Bundles) -> Path:
    return made.base / "libcuda.so.1"


def put(driver: Path, root: Path, *places: str) -> None:
    for place in places:
        path = root / place.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(driver, path)


def start(runc: Bundles, ident: str, bundle: Path, *binds: tuple[Path, str, str]) -> None:
    """``binds``: source, destination and propagation."""
    spec = json.loads((bundle / "config.json").read_text())
    for source, place, propagation in binds:
        spec["mounts"].append({"destination": place, "type": "bind", "source": str(source),
                               "options": ["rbind", propagation]})
        if "shared" in propagation:
            spec["linux"]["rootfsPropagation"] = propagation
    (bundle / "config.json").write_text(json.dumps(spec))
    runc("create", "--bundle", bundle, ident)
    runc("start", ident)


def probed(runc: Bundles, ident: str, *paths: str) -> list[str]:
    return runc("exec", ident, "probe", *paths).stdout.splitlines()


def works(runc: Bundles, ident: str) -> None:
    smi = runc("exec", ident, "nvidia-smi")
    assert (gpus_of(smi.stdout), smi.stderr) == (["6043"], "")
    tried = "; ".join(f"alloc {size << 20} </dev/null" for size in (6044, 6042))
    assert runc("exec", ident, "sh", "-c", tried).stdout.split() == [OUT_OF_MEMORY, "0"]


def test_a_copy_in_the_image_is_covered(runc: Bundles, driver: Path, tmp_path: Path) -> None:
    bundle = runc.make("covered", *ASKS)
    put(driver, bundle / "rootfs", APP)
    put(driver, tmp_path, "volume/lib64/libcuda.so.1", "volume/a/b/libcuda.so.1")
    start(runc, "covered", bundle, (tmp_path / "volume", "/data", "rprivate"))
    # below a volume we look into the usual places alone; what lies deeper is for `always`
    assert probed(runc, "covered", APP, "/data/lib64/libcuda.so.1", DEEP) == ["proxy", "proxy", "driver"]
    assert not (bundle / "rootfs/etc/ld.so.preload").exists()
    works(runc, "covered")


def test_always_catches_what_covering_does_not(always: Bundles, driver: Path, tmp_path: Path) -> None:
    put(driver, tmp_path, "volume/a/b/libcuda.so.1")
    bundle = always.make("volume", *ASKS)
    start(always, "volume", bundle, (tmp_path / "volume", "/data", "rprivate"))
    assert always("exec", "volume", "cat", preload.FILE).stdout == LINE
    assert probed(always, "volume", DEEP, "libcuda.so.1") == ["proxy", "proxy"]
    put(driver, tmp_path, "volume/later/libcuda.so.1")
    assert probed(always, "volume", "/data/later/libcuda.so.1", "/data/a/../later/libcuda.so.1") == ["proxy", "proxy"]
    works(always, "volume")
    plain = always.make("plain")
    start(always, "plain", plain, (tmp_path / "volume", "/data", "rprivate"))
    assert probed(always, "plain", DEEP) == ["driver"]


@pytest.mark.parametrize("how", ["file", "link"])
def test_the_images_own_lines_are_kept(always: Bundles, made: Bundles, how: str) -> None:
    bundle = always.make("own", *ASKS)
    etc, own = bundle / "rootfs/etc", "/usr/local/own.so  # the image's\n"
    shutil.copy(made.base / "own.so", bundle / "rootfs/usr/local/own.so")
    (etc / ("ld.so.preload" if how == "file" else "elsewhere")).write_text(own)
    if how == "link":
        (etc / "ld.so.preload").symlink_to("/etc/elsewhere")
    start(always, "own", bundle)
    assert always("exec", "own", "cat", preload.FILE).stdout == LINE + own
    assert always("exec", "own", "sh", "-c", "echo $OWN").stdout == "preloaded\n"
    assert (etc / ("ld.so.preload" if how == "file" else "elsewhere")).read_text() == own
    works(always, "own")


@pytest.mark.parametrize("odd", ["folder", "fifo", "loop", "proc", "out", "big"])
def test_a_file_that_cannot_be_merged_is_left(always: Bundles, tmp_path: Path, odd: str) -> None:
    bundle = always.make(odd, *ASKS)
    file = bundle / "rootfs/etc/ld.so.preload"
    outside = tmp_path / "outside"
    outside.write_text("/node/only.so\n")
    match odd:
        case "folder":
            file.mkdir()
        case "fifo":  # which the loader itself would wait at: nothing can be run in there
            file.symlink_to("/etc/pipe")
            os.mkfifo(file.with_name("pipe"))
        case "big":
            file.write_bytes(b"\n" * (preload.SIZE_MAX + 1))
        case _:
            file.symlink_to({"loop": "ld.so.preload", "proc": "/proc/1/environ", "out": str(outside)}[odd])
    always("create", "--bundle", bundle, odd)
    assert instances(always.node) == [odd]
    assert outside.read_text() == "/node/only.so\n"
    with open("/proc/self/mounts") as mounts:
        assert str(outside) not in mounts.read()
    log = always.node.log.read_text()
    assert (f"driver not covered id={odd} " in log) is (odd != "out"), "a link out of the image leads to a place in it"
    if odd in ("folder", "loop", "big"):
        always("start", odd)
        works(always, odd)


def test_auto_preloads_where_a_copy_cannot_be_covered(runc: Bundles, driver: Path) -> None:
    bundle = runc.make("odd", *ASKS)
    put(driver, bundle / "rootfs", ODD)
    start(runc, "odd", bundle)
    assert runc("exec", "odd", "cat", preload.FILE).stdout == LINE
    assert probed(runc, "odd", ODD) == ["proxy"]
    assert 'container preloads id=odd reason="' in runc.node.log.read_text()
    works(runc, "odd")


@pytest.fixture
def volume(driver: Path, tmp_path: Path) -> Iterator[Path]:
    """A mount of the node's that is shared."""
    folder = tmp_path / "shared"
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "cgpu-test", folder], check=True)
    subprocess.run(["mount", "--make-shared", folder], check=True)
    put(driver, folder, "lib/libcuda.so.1", "run/cgpu/file")
    yield folder
    engines.unmount_below(folder)


def test_nothing_is_mounted_where_the_node_would_have_it_too(runc: Bundles, volume: Path) -> None:
    bundle = runc.make("shared", *ASKS)
    start(runc, "shared", bundle, (volume, "/data", "rshared"))
    assert probed(runc, "shared", "/data/lib/libcuda.so.1") == ["proxy"], "by ld.so.preload"
    works(runc, "shared")
    with open("/proc/self/mounts") as mounts:
        assert f"{volume}/" not in mounts.read()
    bundle = runc.make("refused", *ASKS)
    spec = json.loads((bundle / "config.json").read_text())
    spec["mounts"] = [one for one in spec["mounts"] if one["destination"] != "/run"]
    (bundle / "config.json").write_text(json.dumps(spec))
    with pytest.raises(AssertionError, match="a mount with shared propagation at or above '/run/cgpu'"):
        start(runc, "refused", bundle, (volume / "run", "/run", "rshared"))
    with open("/proc/self/mounts") as mounts:
        assert f"{volume}/" not in mounts.read()
