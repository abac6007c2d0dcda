"""Docker and images that are odd, or that try to lead what we do in a container elsewhere on the node.

Whatever is in the image: nothing of the node is changed, and the container works, or does not start and says why in one
line.
"""

import io
import os
import shutil
import subprocess
import tarfile
from collections.abc import Callable, Iterator
from pathlib import Path

import debs
import engines
import pytest
from node import ROOT, build_c
from world import ASKS, OUT_OF_MEMORY, SIX, World, docker_world, gpus_of

from cgpusched.containers import preload

pytestmark = pytest.mark.timeout(300)
MULTIARCH = engines.MULTIARCH
USUAL = f"{MULTIARCH}/libcuda.so.1"
ELF = b"\x7fELF\x02\x01" + bytes(10) + b"\x03\x00\x3e\x00"
Change = Callable[[tarfile.TarFile], None]


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    base = tmp_path_factory.mktemp("hostile")
    with docker_world(base) as world:
        yield world


@pytest.fixture
def docker(made: World) -> Iterator[World]:
    yield made
    made.clean()


@pytest.fixture
def canary(tmp_path: Path) -> Iterator[Path]:
    """A folder of the node's that links of an image lead to; it must stay as it is, and so must /etc."""
    folder = tmp_path / "canary"
    (folder / "lib").mkdir(parents=True)
    (folder / "ld.so.preload").write_text("/node/only.so\n")
    (folder / "lib/libcuda.so.1").write_text("the node's")

    def seen() -> dict[str, object]:
        found = {str(path): path.read_text() if path.is_file() else "" for path in sorted(folder.rglob("*"))}
        return {**found, "/etc": sorted(os.listdir("/etc"))}

    before = seen()
    yield folder
    assert seen() == before
    with open("/proc/self/mounts") as mounts:
        assert str(folder) not in mounts.read()


def entry(tar: tarfile.TarFile, name: str, kind: bytes, link: str = "", content: bytes = b"") -> None:
    """``kind``: a type of tarfile's. A device is /dev/zero."""
    one = tarfile.TarInfo(name)
    one.type, one.linkname, one.size, one.mode = kind, link, len(content), 0o755
    one.devmajor, one.devminor = (1, 5) if kind == tarfile.CHRTYPE else (0, 0)
    tar.addfile(one, io.BytesIO(content))


def link(name: str, target: str) -> Change:
    return lambda tar: entry(tar, name, tarfile.SYMTYPE, target)


def thing(name: str, kind: bytes, content: bytes = b"") -> Change:
    return lambda tar: entry(tar, name, kind, content=content)


def load(docker: World, tmp_path: Path, *changes: Change) -> str:
    """The image ``odd``: the tiny one, changed."""
    shutil.copy(docker.docker.base / "image.tar", tmp_path / "odd.tar")
    with tarfile.open(tmp_path / "odd.tar", "a") as tar:
        for change in changes:
            change(tar)
    docker.docker("import", tmp_path / "odd.tar", "odd")
    return "odd"


def works(docker: World, image: str, *options: str) -> str:
    short = docker.run(*SIX, *options, image=image)
    assert gpus_of(docker.docker("exec", short, "nvidia-smi").stdout) == ["6043"]
    tried = "; ".join(f"alloc {size << 20} </dev/null" for size in (6044, 6042))
    assert docker.docker("exec", short, "sh", "-c", tried).stdout.split() == [OUT_OF_MEMORY, "0"]
    return short


def one_line(docker: World, image: str, why: str) -> None:
    said = docker.refused(*SIX[2:], image=image)
    told = [line for line in said.splitlines() if why in line]
    assert len(told) == 1, said


@pytest.mark.parametrize("where", ["usr/local/cgpu", "usr/local/cgpu/lib", "usr/local/cgpu/sock"])
@pytest.mark.parametrize("how", ["{canary}", "/../../../../../..{canary}", "../../../../../../../../..{canary}"])
def test_our_folder_is_a_link_to_the_nodes(docker: World, canary: Path, tmp_path: Path, where: str, how: str) -> None:
    works(docker, load(docker, tmp_path, link(where, how.format(canary=canary))))


@pytest.mark.parametrize("target", ["/etc", "{canary}", "/../../etc"])
def test_the_trees_place_is_a_link_to_the_nodes(docker: World, canary: Path, tmp_path: Path, target: str) -> None:
    works(docker, load(docker, tmp_path, link("run/cgpu", target.format(canary=canary))))


def test_our_folder_leads_into_proc(docker: World, canary: Path, tmp_path: Path) -> None:
    one_line(docker, load(docker, tmp_path, link("usr/local/cgpu", "/proc/sys")), "inside /proc")
    # that is its own root: our folder lies over its /lib, which harms nobody else
    image = load(docker, tmp_path, link("usr/local/cgpu", "/proc/1/root"))
    assert "libc.so.6" in docker.docker("run", "--rm", *SIX, image, "true", check=False).stderr


@pytest.mark.parametrize("where", ["run/cgpu", "usr/local/cgpu", "usr/local/cgpu/lib"])
def test_a_file_where_a_folder_should_be(docker: World, canary: Path, tmp_path: Path, where: str) -> None:
    one_line(docker, load(docker, tmp_path, thing(where, tarfile.REGTYPE, b"x")), "not a directory")


def test_a_folder_where_the_library_should_be(docker: World, canary: Path, tmp_path: Path) -> None:
    image = load(docker, tmp_path, thing(USUAL, tarfile.DIRTYPE))
    one_line(docker, image, f"/{USUAL} in the container is no file")


@pytest.mark.parametrize("kind", [tarfile.FIFOTYPE, tarfile.CHRTYPE, tarfile.REGTYPE])
def test_no_library_where_the_library_should_be(docker: World, canary: Path, tmp_path: Path, kind: bytes) -> None:
    works(docker, load(docker, tmp_path, thing(USUAL, kind)))


@pytest.mark.parametrize("target", ["{canary}/lib/libcuda.so.1", "../../../../../..{canary}/lib/libcuda.so.1",
                                    "nothing", "/proc/self/exe"])
def test_the_library_is_a_link(docker: World, canary: Path, tmp_path: Path, target: str) -> None:
    image = load(docker, tmp_path, link(USUAL, target.format(canary=canary)))
    if target.startswith("/proc"):
        one_line(docker, image, "/proc/self/exe in the container")
    else:
        works(docker, image)


@pytest.mark.parametrize("mode", ["ro", "rw"])
def test_a_name_that_would_be_a_line_of_its_own(docker: World, canary: Path, tmp_path: Path, mode: str) -> None:
    """What the hook is told are lines with tabs: the place of a library must not be able to say one more."""
    secret = canary / "ld.so.preload"
    place = f"/x\tro\nbind\t{secret}\t/stolen\t{mode}\nbind\t{canary / 'lib'}\t/last"
    image = load(docker, tmp_path, link(USUAL, place), thing(place.lstrip("/"), tarfile.REGTYPE, ELF))
    short = docker.run(*SIX, image=image)
    seen = docker.docker("exec", short, "sh", "-c", "cat /stolen; ls /last", check=False)
    assert "/node/only.so" not in seen.stdout and "libcuda" not in seen.stdout
    assert " on /stolen " not in docker.docker("exec", short, "mount").stdout


def test_the_images_own_preload_is_as_it_was(docker: World, canary: Path, tmp_path: Path) -> None:
    source = tmp_path / "own.c"
    source.write_text('#include <stdlib.h>\n__attribute__((constructor)) static void own(void)\n'
                      '{ setenv("OWN", "preloaded", 1); }\n')
    library = build_c(source, tmp_path / "own.so", "-shared", "-fPIC")

    def preload(tar: tarfile.TarFile) -> None:
        tar.add(library, "usr/local/own.so")
        entry(tar, "etc/ld.so.preload", tarfile.REGTYPE, content=b"/usr/local/own.so\n")

    short = works(docker, load(docker, tmp_path, preload))
    assert "OWN=preloaded" in docker.docker("exec", short, "sh", "-c", "echo OWN=$OWN").stdout
    assert docker.docker("exec", short, "cat", "/etc/ld.so.preload").stdout == "/usr/local/own.so\n"


def test_the_images_preload_is_a_link_to_the_nodes(docker: World, canary: Path, tmp_path: Path) -> None:
    works(docker, load(docker, tmp_path, link("etc/ld.so.preload", f"{canary}/ld.so.preload")))


@pytest.mark.parametrize("folders", [[], ["/proc/1/root/usr/lib", "/proc/self/root", "{canary}/lib", "relative", ""]])
def test_library_folders_that_the_image_names(docker: World, canary: Path, tmp_path: Path, folders: list[str]) -> None:
    path = ":".join(folder.format(canary=canary) for folder in folders)
    works(docker, "tiny", "-e", f"LD_LIBRARY_PATH={path}")


def scratch(docker: World, tmp_path: Path, *changes: Change) -> str:
    """An image of one program without libraries."""
    program = build_c(ROOT / "tests/engines/still.c", tmp_path / "still", "-static")
    with tarfile.open(tmp_path / "scratch.tar", "w") as tar:
        tar.add(program, "still")
        for change in changes:
            change(tar)
    docker.docker("import", tmp_path / "scratch.tar", "scratch")
    return "scratch"


@pytest.mark.parametrize("kind", ["huge", "fifo", "zero", "link"])
def test_an_odd_loader_cache(docker: World, canary: Path, tmp_path: Path, kind: str) -> None:
    """We read it; the image's programs are static here, since a loader would wait at such a FIFO for ever."""
    image = scratch(docker, tmp_path, {"huge": thing("etc/ld.so.cache", tarfile.REGTYPE),
                                       "fifo": thing("etc/ld.so.cache", tarfile.FIFOTYPE),
                                       "zero": thing("etc/ld.so.cache", tarfile.CHRTYPE),
                                       "link": link("etc/ld.so.cache", f"{canary}/ld.so.preload")}[kind])
    options = []
    if kind == "huge":  # 1 TiB, of which nothing is on the disk
        with open(tmp_path / "cache", "wb") as file:
            file.truncate(1 << 40)
        options = ["-v", f"{tmp_path}/cache:/etc/ld.so.cache:ro"]
    short = docker.run(*SIX, *options, image=image, command=("/still",))
    assert docker.listed() == [short]


def test_a_static_program_in_an_image_of_nothing_else(docker: World, canary: Path, tmp_path: Path) -> None:
    short = docker.run(*SIX, image=scratch(docker, tmp_path), command=("/still",))
    assert docker.listed() == [short]
    said = docker.docker("exec", short, "/still", "/run/cgpu/0", "/usr/local/cgpu/lib/real", f"/{MULTIARCH}").stdout
    assert said == "/run/cgpu/0 6\n/usr/local/cgpu/lib/real 2\n/usr/lib/x86_64-linux-gnu 2\n"


@pytest.mark.parametrize("loops", [[MULTIARCH], [MULTIARCH, "usr/lib64"], ["usr/lib"]])
def test_library_folders_in_circles(docker: World, canary: Path, tmp_path: Path, loops: list[str]) -> None:
    image = scratch(docker, tmp_path, *(link(folder, f"/{folder}") for folder in loops))
    short = docker.run(*SIX, image=image, command=("/still",))
    assert docker.listed() == [short]


def test_all_library_folders_in_circles(docker: World, canary: Path, tmp_path: Path) -> None:
    image = scratch(docker, tmp_path, link("usr", "/usr"))
    said = docker.docker("run", "--rm", *SIX, image, "/still", "/", check=False)
    assert said.returncode == 125
    assert "too many levels of symbolic links" in said.stderr.lower()
    assert docker.listed() == []


def test_variables_of_the_image_count(docker: World, canary: Path, tmp_path: Path) -> None:
    changes = [word for one in ASKS for word in ("-c", f"ENV {one}")]
    docker.docker("import", *changes, docker.docker.base / "image.tar", "asks")
    short = docker.run("--network", "none", image="asks")
    assert gpus_of(docker.docker("exec", short, "nvidia-smi").stdout) == ["6043"]


def linked(source: str, out: Path, loader: str, includes: list[Path], objects: list[Path | str]) -> Path:
    """A program for another C library than this machine's."""
    own = subprocess.run(["gcc", "-print-file-name=include"], check=True, capture_output=True, text=True).stdout.strip()
    headers = [word for folder in [*includes, own] for word in ("-isystem", folder)]
    command = ["gcc", "-O2", "-fno-pie", "-no-pie", "-fno-stack-protector", "-nostdinc", *headers, "-nostdlib",
               f"-Wl,-dynamic-linker,{loader}", "-o", out]
    at = objects.index("SOURCE")
    subprocess.run([*command, *objects[:at], ROOT / source, *objects[at + 1:]], check=True)
    return out


def image_of(docker: World, tmp_path: Path, name: str, files: dict[str, Path], folders: tuple[str, ...] = ()) -> str:
    with tarfile.open(tmp_path / f"{name}.tar", "w") as tar:
        for folder in folders:
            entry(tar, folder, tarfile.DIRTYPE)
        for place, path in files.items():
            tar.add(path.resolve(), place)
    docker.docker("import", tmp_path / f"{name}.tar", name)
    return name


@pytest.mark.parametrize("user", ["0", "1000"])
def test_an_image_with_musl(docker: World, canary: Path, tmp_path: Path, user: str) -> None:
    """As Alpine's: its programs run as without us, and one that looks for the driver is told that it is not musl's."""
    musl = debs.unpack("bookworm", "musl", "musl-dev")
    lib, libc = musl / "usr/lib/x86_64-linux-musl", musl / "lib/x86_64-linux-musl"
    programs = {name: linked(f"tests/engines/{name}.c", tmp_path / name, "/lib/ld-musl-x86_64.so.1",
                             [musl / "usr/include/x86_64-linux-musl"],
                             [lib / "crt1.o", lib / "crti.o", "SOURCE", f"-L{libc}", "-lc", lib / "crtn.o"])
                for name in ("still", "probe")}  # fmt: skip
    files = {"lib/ld-musl-x86_64.so.1": libc / "libc.so", **{f"bin/{name}": path for name, path in programs.items()}}
    image = image_of(docker, tmp_path, "musl", files, ("usr", "usr/lib", "etc", "tmp"))
    plain = docker.docker("run", "--rm", "--network", "none", "-u", user, image, "still", "/bin", "/lib")
    short = docker.run(*SIX, "-u", user, image=image, command=("still",))
    assert docker.listed() == [short]
    done = docker.docker("exec", short, "still", "/bin", "/lib")
    assert (done.stdout, done.stderr) == (plain.stdout, "")
    found = docker.docker("exec", short, "probe", "libcuda.so.1", "/usr/lib/libcuda.so.1")
    assert (found.returncode, found.stderr) == (0, "")
    assert [line.startswith("Error ") for line in found.stdout.splitlines()] == [True, True], found.stdout


def test_an_image_with_an_old_glibc(docker: World, canary: Path, tmp_path: Path) -> None:
    """Debian 11's, 2.31, where libdl and libpthread still are libraries of their own."""
    old = debs.unpack("bullseye", "libc6", "libc6-dev", "linux-libc-dev", "dash")
    crt, lib = old / "usr/lib/x86_64-linux-gnu", old / "lib/x86_64-linux-gnu"
    needed = ("libc.so.6", "libdl.so.2", "libpthread.so.0", "libm.so.6", "librt.so.1")
    sources = {"nvidia-smi": "tests/engines/smi.c", "alloc": "tests/e2e/alloc.c"}
    programs = {name: linked(source, tmp_path / name, "/lib64/ld-linux-x86-64.so.2",
                             [old / "usr/include", old / "usr/include/x86_64-linux-gnu"],
                             [crt / "crt1.o", crt / "crti.o", "SOURCE", *(lib / one for one in needed[:3]),
                              crt / "libc_nonshared.a", crt / "crtn.o"])
                for name, source in sources.items()}  # fmt: skip
    files = {"lib64/ld-linux-x86-64.so.2": lib / "ld-linux-x86-64.so.2", "bin/sh": old / "bin/dash",
             **{f"lib/x86_64-linux-gnu/{name}": lib / name for name in needed},
             **{f"bin/{name}": path for name, path in programs.items()}}
    image = image_of(docker, tmp_path, "old", files, ("usr", "usr/lib", MULTIARCH, "etc", "tmp"))
    short = docker.run(*SIX, "-t", image=image, command=("sh",))
    smi = docker.docker("exec", short, "nvidia-smi")
    assert (gpus_of(smi.stdout), smi.stderr) == (["6043"], "")
    tried = "; ".join(f"alloc {size << 20} </dev/null" for size in (6044, 6042))
    for env in ("NONE=1", f"LD_PRELOAD=/usr/local/cgpu/lib/{preload.LIBRARY}"):
        done = docker.docker("exec", "-e", env, short, "sh", "-c", tried)
        assert (done.stdout.split(), done.stderr) == ([OUT_OF_MEMORY, "0"], "")
