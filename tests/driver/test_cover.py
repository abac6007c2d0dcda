"""What is covered with the proxies, on a node and in a container's root, and the mounts that do it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from driver_tools import Compile, run

from cgpusched.driver import cover, proxy
from cgpusched.driver.cover import Bind, plan, resolve
from cgpusched.driver.names import Driver

CUDA = "int cuInit(unsigned f) { return 0; } int cuAnswer(void) { return 11; }"
NVML = "int nvmlInit_v2(void) { return 0; }"
LIB64 = "usr/lib/x86_64-linux-gnu"


@pytest.fixture
def driver(compile_library: Compile) -> Driver:
    return Driver(compile_library("libcuda.so.550.163.01", CUDA, "-Wl,-soname,libcuda.so.1"),
                  compile_library("libnvidia-ml.so.550.163.01", NVML, "-Wl,-soname,libnvidia-ml.so.1"))


@pytest.fixture
def lib(driver: Driver, hook: Path, tmp_path: Path) -> Path:
    proxy.install_proxies(driver, tmp_path / "lib", hook)
    return tmp_path / "lib"


class Root:
    """A container's root, or a node's, without anything in it yet."""

    def __init__(self, path: Path, driver: Driver, lib: Path) -> None:
        self.path, self.driver, self.lib = path, driver, lib
        path.mkdir()

    def put(self, *names: str, content: bytes | None = None) -> None:
        for name in names:
            file = self.path / name
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_bytes(self.driver.cuda.read_bytes() if content is None else content)

    def link(self, name: str, to: str) -> None:
        (self.path / name).parent.mkdir(parents=True, exist_ok=True)
        (self.path / name).symlink_to(to)

    def covered(self, *more: str) -> dict[str, str]:
        """target -> the proxy over it."""
        binds = plan(self.lib, self.driver, Path("/usr/local/cgpu/lib"), self.path, tuple(map(Path, more)))
        real = Path("/usr/local/cgpu/lib/real")
        assert binds[:2] == [Bind(self.driver.cuda, real / "libcuda.so.1"),
                             Bind(self.driver.nvml, real / "libnvidia-ml.so.1")]
        assert all(bind.source.parent == self.lib for bind in binds[2:])
        found = {str(bind.target): bind.source.name for bind in binds[2:]}
        assert len(found) == len(binds) - 2, "no file twice"
        return found


@pytest.fixture
def root(tmp_path: Path, driver: Driver, lib: Path) -> Root:
    return Root(tmp_path / "root", driver, lib)


# ---- what to cover ----

def test_a_driver_as_debian_lays_it_out(root: Root) -> None:
    """Links are covered through the file they lead to, absolute ones within the root, and each file once."""
    current = f"{LIB64}/nvidia/current"
    root.put(f"{current}/libcuda.so.550.163.01", f"{current}/libnvidia-ml.so.550.163.01")
    root.link(f"{current}/libcuda.so.1", "libcuda.so.550.163.01")
    root.link("etc/alternatives/glx--libcuda.so.1", f"/{current}/libcuda.so.1")
    root.link(f"{LIB64}/libcuda.so.1", "/etc/alternatives/glx--libcuda.so.1")
    root.link(f"{LIB64}/libcuda.so", "libcuda.so.1")
    root.link("lib", "usr/lib")
    assert root.covered() == {f"/{current}/libcuda.so.550.163.01": "libcuda.so.1",
                              f"/{current}/libnvidia-ml.so.550.163.01": "libnvidia-ml.so.1"}


@pytest.mark.parametrize("folder", ["usr/lib64", "usr/lib/wsl/lib", "run/opengl-driver/lib", "usr/local/nvidia/lib64",
                                    "usr/local/cuda-12.4/compat", "usr/local/cuda/compat/lib.real",
                                    f"{LIB64}/nvidia/tesla-470", "usr/lib/nvidia-390"])
@pytest.mark.parametrize("name", ["libcuda.so", "libcuda.so.1", "libcuda.so.1.1", "libcuda.so.550.163.01",
                                  "libnvidia-ml.so.1"])
def test_names_and_folders(root: Root, folder: str, name: str) -> None:
    others = "libcudart.so.12", "libcudadebugger.so.1", "libcuda.so.bak"
    root.put(f"{folder}/{name}", *(f"{folder}/{other}" for other in others))
    which = "libnvidia-ml.so.1" if name.startswith("libnvidia") else "libcuda.so.1"
    assert root.covered() == {f"/{folder}/{name}": which}


def test_the_loaders_cache(root: Root) -> None:
    """As ldconfig writes it for folders of its own."""
    root.put("opt/vendor one/libcuda.so.1", "opt/ml/libnvidia-ml.so.1", "opt/else/libcuda.so.1")
    (root.path / "etc").mkdir()
    (root.path / "etc/ld.so.conf").write_text("/opt/vendor one\n/opt/ml\n")
    # -r would want a root to chroot into: write real paths, then name them as seen from inside, at the same length
    conf, cache = root.path / "conf", root.path / "etc/ld.so.cache"
    conf.write_text(f"{root.path}/opt/vendor one\n{root.path}/opt/ml\n")
    subprocess.run(["/sbin/ldconfig", "-X", "-f", conf, "-C", cache], check=True, timeout=60)
    content = cache.read_bytes()
    assert str(root.path).encode() in content
    cache.write_bytes(content.replace(str(root.path).encode(), b"/" * len(str(root.path))))
    assert root.covered() == {"/opt/vendor one/libcuda.so.1": "libcuda.so.1",
                              "/opt/ml/libnvidia-ml.so.1": "libnvidia-ml.so.1"}
    cache.write_bytes(os.urandom(4096) + b"/" * 4096)
    assert root.covered() == {}


def test_folders_of_the_library_path(root: Root) -> None:
    root.put("home/me/driver/libcuda.so.1")
    assert root.covered() == {}
    assert root.covered("/home/me/driver", "/home/me/nothing") == {"/home/me/driver/libcuda.so.1": "libcuda.so.1"}


def test_the_drivers_own_folder(tmp_path: Path, driver: Driver, lib: Path) -> None:
    """On the node it is the one the proxies were made from, wherever that is."""
    covered = {bind.target for bind in plan(lib, driver)}
    assert {driver.cuda, driver.nvml, lib / "real/libcuda.so.1", lib / "real/libnvidia-ml.so.1"} <= covered
    assert lib / "libcuda.so.1" not in covered


def test_what_no_loader_would_take_stays(root: Root) -> None:
    library = root.driver.cuda.read_bytes()
    root.put(f"{LIB64}/stubs/libcuda.so")
    root.put(f"{LIB64}/libcuda.so.1", content=library[:4] + b"\x01" + library[5:])  # 32-bit
    root.put("usr/lib64/libcuda.so.1", content=library[:18] + b"\xb7\x00" + library[20:])  # aarch64
    root.put("usr/lib/libcuda.so", content=b"INPUT(-lcuda)\n")
    root.put("usr/local/nvidia/lib/libcuda.so.1", content=b"")
    (root.path / "usr/lib/wsl/lib/libcuda.so.1").mkdir(parents=True)
    root.link("usr/lib/libcuda.so.1", "nowhere")
    os.mkfifo(root.path / "usr/lib64/libcuda.so")
    assert root.covered() == {}


def test_what_is_covered_already_stays(root: Root) -> None:
    """A mount of the proxy shows the proxy's own inode."""
    (root.path / LIB64).mkdir(parents=True)
    (root.path / LIB64 / "libcuda.so.550.163.01").hardlink_to(root.lib / "libcuda.so.1")
    assert root.covered() == {}


# ---- links of a hostile root ----

@pytest.mark.parametrize(("links", "path", "expected"), [
    ({}, "/a/b", "/a/b"),
    ({"a": "b"}, "/a/x", "/b/x"),
    ({"a": "/b", "b": "c"}, "/a", "/c"),
    ({"a": "../../../../etc"}, "/a/passwd", "/etc/passwd"),
    ({"d/a": "../../e/./f//"}, "/d/a/g", "/e/f/g"),
    ({"a": "/"}, "/a/b", "/b"),
    ({"a": "a"}, "/a", None),
    ({"a": "b", "b": "a/c"}, "/a/x", None),
    ({}, "/../../x", "/x"),
])  # fmt: skip
def test_resolve(tmp_path: Path, links: dict[str, str], path: str, expected: str | None) -> None:
    for name, to in links.items():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).symlink_to(to)
    assert resolve(tmp_path, Path(path)) == (None if expected is None else Path(expected))


def test_resolve_agrees_with_the_kernel(tmp_path: Path) -> None:
    assert resolve(Path("/"), Path("/proc/self/../../lib/./x")) == Path("/lib/x").resolve()
    (tmp_path / "link").symlink_to("/usr/bin/../lib")
    assert resolve(Path("/"), tmp_path / "link/file") == (tmp_path / "link/file").resolve()


def test_no_link_leads_out_of_the_root(root: Root, tmp_path: Path) -> None:
    """The same file outside is neither covered nor looked at."""
    outside = tmp_path / "outside"
    outside.mkdir()
    shutil.copy(root.driver.cuda, outside / "libcuda.so.1")
    root.link("usr/lib64", str(outside))
    root.link("usr/lib/x86_64-linux-gnu", f"../../..{outside}")
    root.link("usr/local/nvidia/lib64/libcuda.so.1", str(outside / "libcuda.so.1"))
    root.link("usr/local/cuda-12", f"../../../..{outside}")
    root.link("etc/ld.so.cache", "/proc/self/environ")
    assert root.covered() == {}


# ---- the mounts ----

ENTER = """
import os, sys
from pathlib import Path
from cgpusched.driver import cover
lib = Path(sys.argv[1])
before = os.getcwd(), os.getuid(), os.readlink("/proc/self/ns/mnt")
driver = cover.installed(lib)
cover.enter(cover.plan(lib, driver), lib, lib)
assert (os.getcwd(), os.getuid()) == before[:2] and os.readlink("/proc/self/ns/mnt") != before[2]
assert cover.installed(lib) is None, "covered: an inner `cgpuctl run` has nothing to do"
os.execv(sys.argv[2], sys.argv[2:])
"""


def test_every_path_leads_to_the_proxy_and_through_it_to_the_driver(
        lib: Path, driver: Driver, compile_program: Compile) -> None:
    """By path, without any variable; and nothing of it is seen outside."""
    program = compile_program("by_path", """
        #define _GNU_SOURCE
        #include <dlfcn.h>
        #include <stdio.h>
        int main(int n, char **paths) {
            for (int i = 1; i < n; i++) {
                void *h = dlopen(paths[i], RTLD_NOW);
                if (!h) return puts(dlerror());
                printf("%d%d ", dlopen("libcgpu-hook.so.1", RTLD_NOW | RTLD_NOLOAD) != NULL,
                       ((int (*)(void))dlsym(h, "cuAnswer"))());
            }
        }""")
    link = driver.cuda.parent / "libcuda.so.1"
    link.symlink_to(driver.cuda.name)
    before = Path("/proc/self/mountinfo").read_text()
    bare = ["env", "-i", program, driver.cuda, link]
    assert run(*bare) == "011 011 "  # no hook, the driver's answer
    assert run(sys.executable, "-c", ENTER, lib, "/usr/bin/env", "-i", program, driver.cuda, link) == "111 111 "
    assert Path("/proc/self/mountinfo").read_text() == before
    assert (lib / "real/libcuda.so.1").is_symlink()


def test_mounts_of_the_node_arrive_and_none_goes_back(lib: Path, tmp_path: Path) -> None:
    """In a namespace whose root is shared, as systemd's is; the test's own may be private."""
    script = f"""
        set -e
        mkdir {tmp_path}/late {tmp_path}/own
        mkfifo {tmp_path}/ready {tmp_path}/go
        {sys.executable} -c '{ENTER}' {lib} /bin/sh -c '
            echo > {tmp_path}/ready; read x < {tmp_path}/go
            test -e {tmp_path}/late/file && echo arrived > {tmp_path}/arrived
            mount -t tmpfs own {tmp_path}/own && touch {tmp_path}/own/file && echo mounted >> {tmp_path}/arrived
            echo > {tmp_path}/ready; read x < {tmp_path}/go' &
        read x < {tmp_path}/ready
        mount -t tmpfs late {tmp_path}/late
        touch {tmp_path}/late/file
        echo > {tmp_path}/go
        read x < {tmp_path}/ready
        grep -c ' {lib}/real' /proc/self/mountinfo || true
        cat {tmp_path}/arrived
        ls {tmp_path}/own
        umount {tmp_path}/late
        echo > {tmp_path}/go
        wait $!"""
    assert run("unshare", "--mount", "--propagation", "shared", "sh", "-c", script) == "0\narrived\nmounted\n"


def test_without_the_privilege(lib: Path) -> None:
    """It says so, and the namespace is the old one."""
    code = ENTER.replace("cover.enter(cover.plan(lib, driver), lib, lib)", """
try:
    cover.enter(cover.plan(lib, driver), lib, lib)
except PermissionError as error:
    print(error.strerror, os.readlink("/proc/self/ns/mnt") == before[2])
    sys.exit()""")
    without = "setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin"
    out = run(*without, sys.executable, "-c", code, lib, "/bin/true")
    assert out == "Operation not permitted True\n"


def test_the_daemon_does_not_start_inside(lib: Path, driver: Driver, hook: Path) -> None:
    code = """if 1:
        import sys
        from pathlib import Path
        from cgpusched.driver import cover, proxy
        from cgpusched.driver.names import Driver
        from cgpusched.errors import UserError
        lib, hook = map(Path, sys.argv[1:])
        driver = cover.installed(lib)
        cover.enter(cover.plan(lib, driver), lib, lib)
        copy = lib.parent / "copy.so"
        copy.write_bytes((lib / "real/libcuda.so.1").read_bytes())
        try:
            proxy.install_proxies(Driver(copy, copy), lib, hook)
        except UserError as error:
            print(error)"""
    assert "start cgpud outside of it" in run(sys.executable, "-c", code, lib, hook)


def test_no_links_no_driver(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError):
        cover.installed(tmp_path)
