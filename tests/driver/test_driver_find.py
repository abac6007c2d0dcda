"""Finding the node's driver, reading damaged libraries, installing the proxies."""

import os
import stat
import subprocess
import threading
from pathlib import Path

import pytest
from driver_tools import Compile
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from cgpusched.driver import elf, find, proxy
from cgpusched.driver.find import Driver, find_driver
from cgpusched.errors import UserError

CUDA = "int cuInit(unsigned f) { return 0; }"
NVML = "int nvmlInit_v2(void) { return 0; }"


@pytest.fixture
def node(compile_library: Compile, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A node as Debian lays it out: a link to the file with the version in its name. Nothing else is looked at."""
    monkeypatch.delenv("CGPU_DRIVER_DIR", raising=False)
    monkeypatch.setattr(find, "FOLDERS", (tmp_path / "real",))
    monkeypatch.setattr(find, "_loader_cache", list)
    compile_library("libcuda.so.550.163.01", CUDA, "-Wl,-soname,libcuda.so.1")
    compile_library("libnvidia-ml.so.550.163.01", NVML, "-Wl,-soname,libnvidia-ml.so.1")
    folder = tmp_path / "real"
    (folder / "libcuda.so.1").symlink_to("libcuda.so.550.163.01")
    (folder / "libnvidia-ml.so.1").symlink_to("libnvidia-ml.so.550.163.01")
    return folder


def expected(node: Path) -> Driver:
    return Driver((node / "libcuda.so.550.163.01").resolve(), (node / "libnvidia-ml.so.550.163.01").resolve())


def test_the_usual_folders(node: Path) -> None:
    assert find_driver() == expected(node)


def test_no_driver(node: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (node / "libnvidia-ml.so.1").unlink()
    assert find_driver() is None, "one without the other is no driver"
    monkeypatch.setattr(find, "FOLDERS", (tmp_path,))
    assert find_driver() is None


def test_the_loaders_cache_comes_first(node: Path, compile_library: Compile, tmp_path: Path,
                                       monkeypatch: pytest.MonkeyPatch) -> None:
    for name, text in (("libcuda.so.1", CUDA), ("libnvidia-ml.so.1", NVML)):
        compile_library(f"../{name}", text)
    monkeypatch.setattr(find, "_loader_cache", lambda: [tmp_path / "libnvidia-ml.so.1", tmp_path / "libcuda.so.1"])
    assert find_driver() == Driver(tmp_path / "libcuda.so.1", tmp_path / "libnvidia-ml.so.1")


def test_the_cache_is_read_as_ldconfig_prints_it(monkeypatch: pytest.MonkeyPatch) -> None:
    text = ("3 libs found in cache `/etc/ld.so.cache'\n"
            "\tlibcuda.so.1 (libc6) => /usr/lib/i386-linux-gnu/libcuda.so.1\n"
            "\tlibcuda.so.1 (libc6,x86-64) => /opt/nv/libcuda.so.1\n"
            "\tlibcudart.so.1 (libc6,x86-64) => /opt/nv/libcudart.so.1\n"
            "\tlibnvidia-ml.so.1 (libc6,x86-64) => /opt/nv/libnvidia-ml.so.1\n")
    monkeypatch.setattr(find.subprocess, "run", lambda *_, **__: subprocess.CompletedProcess([], 0, text, ""))
    assert find._loader_cache() == [Path("/opt/nv/libcuda.so.1"), Path("/opt/nv/libnvidia-ml.so.1")]


def test_a_node_without_ldconfig(monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(*_: object, **__: object) -> None:
        raise FileNotFoundError

    monkeypatch.setattr(find.subprocess, "run", missing)
    assert find._loader_cache() == []


def test_ours_stubs_and_other_machines_are_passed_over(node: Path, hook: Path, tmp_path: Path,
                                                       monkeypatch: pytest.MonkeyPatch) -> None:
    """The daemon's own proxies may well come first on the loader's path; the packaged simulated driver never counts."""
    proxy.install_proxies(expected(node), tmp_path / "proxies", hook)
    stubs = tmp_path / "stubs"
    stubs.mkdir()
    other = tmp_path / "other"
    other.mkdir()
    packaged = tmp_path / "cgpusched"
    (packaged / "lib").mkdir(parents=True)
    for name in ("libcuda.so.1", "libnvidia-ml.so.1"):
        content = (node / name).read_bytes()
        (stubs / name).write_bytes(content)
        (packaged / "lib" / name).write_bytes(content)
        (other / name).write_bytes(content[:18] + b"\xb7\x00" + content[20:])  # aarch64
    monkeypatch.setattr(find.resources, "files", lambda _: packaged)
    monkeypatch.setattr(find, "FOLDERS", (tmp_path / "proxies", stubs, other, packaged / "lib", node))
    assert find_driver() == expected(node)


def test_a_named_folder(node: Path, hook: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(find, "FOLDERS", ())
    assert find_driver(node) == expected(node)
    monkeypatch.setenv("CGPU_DRIVER_DIR", str(node))
    assert find_driver() == expected(node)
    monkeypatch.setenv("CGPU_DRIVER_DIR", str(tmp_path))
    with pytest.raises(UserError, match="libcuda.so.1: not found"):
        find_driver()
    proxy.install_proxies(expected(node), tmp_path / "proxies", hook)
    with pytest.raises(UserError, match="is a proxy of ours"):
        find_driver(tmp_path / "proxies")


def test_is_proxy(node: Path, hook: Path, tmp_path: Path) -> None:
    proxy.install_proxies(expected(node), tmp_path / "proxies", hook)
    assert find.is_proxy(tmp_path / "proxies/libcuda.so.1") and not find.is_proxy(node / "libcuda.so.1")


def test_packaged_says_what_is_missing() -> None:
    with pytest.raises(UserError, match=r"lib/nothing\.so: missing; build it first"):
        find.packaged("nothing.so")


# ---- installing ----

def test_install_is_idempotent_and_replaces_by_rename(node: Path, hook: Path, tmp_path: Path) -> None:
    out = tmp_path / "a/b"
    proxy.install_proxies(expected(node), out, hook)
    names = ["libcgpu-hook.so.1", "libcuda.so.1", "libnvidia-ml.so.1"]
    assert sorted(path.name for path in out.iterdir()) == [*names, "real"]
    assert Driver(*((out / "real" / name).readlink() for name in names[1:])) == expected(node)
    assert all(stat.S_IMODE((out / name).stat().st_mode) == 0o755 for name in names)
    before = {name: (out / name).stat() for name in names}
    proxy.install_proxies(expected(node), out, hook)
    assert {name: (out / name).stat() for name in names} == before
    with (out / "libcuda.so.1").open("rb") as held:  # a program that runs on it keeps what it has
        content = held.read()
        (out / "libnvidia-ml.so.1").write_bytes(b"broken")
        (out / "libcuda.so.1").chmod(0o600)
        proxy.install_proxies(expected(node), out, hook)
        held.seek(0)
        assert held.read() == content
    assert (out / "libcuda.so.1").stat().st_ino != before["libcuda.so.1"].st_ino
    assert elf.read(out / "libnvidia-ml.so.1").soname == "libnvidia-ml.so.1"
    assert sorted(path.name for path in out.iterdir()) == [*names, "real"], "no temporary file stays"
    assert len(list((out / "real").iterdir())) == 2


def test_a_reader_never_sees_half_a_file(node: Path, hook: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    real = expected(node)
    proxy.install_proxies(real, out, hook)
    good, stop, bad = len((out / "libcuda.so.1").read_bytes()), threading.Event(), []

    def read() -> None:
        while not stop.is_set():
            if len((out / "libcuda.so.1").read_bytes()) != good:
                bad.append(1)

    reader = threading.Thread(target=read)
    reader.start()
    for _ in range(30):
        (out / "libcuda.so.1").chmod(0o700)  # makes it write the file anew
        proxy.install_proxies(real, out, hook)
    stop.set()
    reader.join(10)
    assert not bad


def test_a_bad_library_changes_nothing(node: Path, hook: Path, tmp_path: Path) -> None:
    broken = tmp_path / "libnvidia-ml.so.1"
    broken.write_bytes(b"\x7fELF")
    with pytest.raises(UserError, match="libnvidia-ml"):
        proxy.install_proxies(Driver(expected(node).cuda, broken), tmp_path / "out", hook)
    assert not (tmp_path / "out").exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="/proc refuses root too, but says so differently to others")
def test_a_folder_that_cannot_be_written(node: Path, hook: Path) -> None:
    with pytest.raises(UserError, match="/proc.*cannot be written"):
        proxy.install_proxies(expected(node), Path("/proc/cgpu-nowhere"), hook)


# ---- damaged files ----

@pytest.fixture(scope="module")
def bytes_of_a_library(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    folder = tmp_path_factory.mktemp("fuzz")
    (folder / "a.c").write_text("int one(void) { return 1; } int two(void) { return 2; } int data = 3;")
    (folder / "script").write_text("V1 { global: one; local: *; }; V2 { global: two; } V1;")
    subprocess.run(["gcc", "-shared", "-fPIC", "-s", "-o", folder / "a.so", folder / "a.c",
                    f"-Wl,--version-script={folder}/script"], check=True, timeout=60)
    return (folder / "a.so").read_bytes()


@settings(max_examples=300, deadline=2000, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_damaged_file_is_refused_in_one_line_or_read(
        bytes_of_a_library: bytes, tmp_path: Path, data: st.DataObject) -> None:
    content = bytearray(bytes_of_a_library)
    # where the headers, the dynamic section and the tables are
    interesting = st.one_of(st.integers(0, 0x600), st.integers(len(content) - 0x1800, len(content) - 1))
    for at in data.draw(st.lists(interesting, min_size=1, max_size=8)):
        content[at] = data.draw(st.sampled_from([0, 1, 0x7F, 0x80, 0xFF]))
    if data.draw(st.booleans()):
        del content[data.draw(st.integers(0, len(content) - 1)):]
    path = tmp_path / "damaged.so"
    path.write_bytes(content)
    try:
        proxy.write_proxy(path, "libcuda.so.1")
    except UserError as error:
        assert "\n" not in str(error) and str(path) in str(error)
