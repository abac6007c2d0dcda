"""Every way by which a program may reach the driver, on a whole node: the quota holds and launches pass the gate.

What test_proxy_loading.py checks of the proxy alone is checked here with the hook that is shipped, the daemon and the
simulated driver, by what a way past them would gain: memory beyond the quota, launches that nobody counts.
"""

import contextlib
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from driver_tools import SRC
from node import BIN, Node, build_c, running_node, wait_until

HELD, LOOSE = "2 0 0\n", "0 0 0\n"  # CUDA_ERROR_OUT_OF_MEMORY past the quota; or not


@pytest.fixture(scope="module")
def node(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Node]:
    with running_node(tmp_path_factory.mktemp("node")) as one:
        yield one


@pytest.fixture(scope="module")
def sim(node: Node) -> Path:
    """The driver's own file."""
    return node.base / "lib/sim/libcuda.so.1"


@pytest.fixture(scope="module")
def programs(node: Node, sim: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("routes")
    source = SRC / "route.c"
    build_c(source, out / "opens")
    linked = ["-DLINKED", f"-L{out}", "-Wl,--no-as-needed", "-lcuda"]
    (out / "libcuda.so").symlink_to(sim)
    (out / "folder").symlink_to(sim.parent)
    (out / "driver").symlink_to(sim)
    build_c(source, out / "linked", *linked)
    # DT_RPATH comes before LD_LIBRARY_PATH, DT_RUNPATH after it
    build_c(source, out / "rpath", *linked, "-Wl,--disable-new-dtags", f"-Wl,-rpath,{sim.parent}")
    build_c(source, out / "runpath", *linked, "-Wl,--enable-new-dtags", f"-Wl,-rpath,{sim.parent}")
    # as cgo links go-nvml
    lazily = "-Wl,-z,lazy,--export-dynamic,--unresolved-symbols=ignore-in-object-files"
    build_c(source, out / "lazy", "-DLINKED", lazily)
    build_c(source, out / "plugin.so", "-DPLUGIN", "-shared", "-fPIC", *linked)
    return out


def gated(node: Node, ident: str, *command: object, cover: str = "auto") -> str:
    """What the program printed. Its instance refused the memory, and let the launches through its gate."""
    with instance(node, ident):
        done = node.ctl("run", "--id", ident, "--cover", cover, "--", *map(str, command))
        wait_for_counters(node, ident)
        return done.stdout


def wait_for_counters(node: Node, ident: str) -> None:
    """The last of them come when the daemon has seen the process end."""
    both = "launches", "mem_refused"
    wait_until(lambda: all(counters(node, ident)[name] for name in both), f"the counters of {ident}")
    assert counters(node, ident)["ungated"] == 0


def counters(node: Node, ident: str) -> dict[str, int]:
    found: dict[str, dict[str, int]] = {one["id"]: one["counters"] for one in node.status()["gpus"][0]["instances"]}
    return found[ident]


@contextlib.contextmanager
def instance(node: Node, ident: str) -> Iterator[None]:
    node.ctl("create", ident, "--mem", "1GiB", "--weight", "1")
    try:
        yield
    finally:
        wait_until(lambda: node.ctl("destroy", ident, check=False).returncode == 0, f"the end of {ident}")


ROUTES = {
    "dlopen": ("opens", "dlopen", "libcuda.so.1"),
    "dlvsym": ("opens", "dlvsym", "libcuda.so.1"),
    "rtld-default": ("opens", "rtld-default", "libcuda.so.1"),
    "rtld-deepbind": ("opens", "deepbind", "libcuda.so.1"),
    "dlmopen": ("opens", "dlmopen", "libcuda.so.1"),
    "get-proc-address": ("opens", "get-proc-address", "libcuda.so.1"),
    "get-proc-address-v2": ("opens", "get-proc-address-v2", "libcuda.so.1"),
    "linked": ("linked", "linked", "-"),
    "linked-rtld-next": ("linked", "linked-rtld-next", "-"),
    "linked-rtld-default": ("linked", "linked-rtld-default", "-"),
    "runpath": ("runpath", "linked", "-"),
    "lazily-bound-plt": ("lazy", "lazy-plt", "libcuda.so.1"),
    "plugin-linked-deepbind": ("opens", "linked", "-", "plugin.so"),
    "plugin-rtld-next": ("opens", "linked-rtld-next", "-", "plugin.so"),
    "plugin-opens-deepbind": ("opens", "deepbind", "libcuda.so.1", "plugin.so"),
}
COVERED = {
    "absolute-path": ("opens", "dlopen", "{sim}"),
    "absolute-path-dlmopen": ("opens", "dlmopen", "{sim}"),
    "absolute-path-deepbind": ("opens", "deepbind", "{sim}"),
    "path-with-dots": ("opens", "dlopen", "{sim.parent}/../sim/libcuda.so.1"),
    "symlinked-file": ("opens", "dlopen", "{out}/driver"),
    "symlinked-folder": ("opens", "dlopen", "{out}/folder/libcuda.so.1"),
    "path-get-proc-address-v2": ("opens", "get-proc-address-v2", "{sim}"),
    "rpath": ("rpath", "linked", "-"),
    "plugin-by-path": ("opens", "dlopen", "{sim}", "plugin.so"),
}


def command(route: tuple[str, ...], programs: Path, sim: Path) -> list[str]:
    program, way, library, *plugin = route
    library = library.format(sim=sim, out=programs)
    return [str(programs / program), way, library, *(str(programs / one) for one in plugin)]


@pytest.mark.parametrize("name", [*ROUTES, *COVERED])
def test_the_quota_holds_and_launches_pass_the_gate(name: str, node: Node, sim: Path, programs: Path) -> None:
    assert gated(node, name, *command((ROUTES | COVERED)[name], programs, sim)) == HELD


@pytest.mark.parametrize("name", ROUTES)
def test_without_covering(name: str, node: Node, sim: Path, programs: Path) -> None:
    """What LD_LIBRARY_PATH alone is good for, for users who may not mount."""
    assert gated(node, name, *command(ROUTES[name], programs, sim), cover="never") == HELD


@pytest.mark.parametrize("name", COVERED)
def test_what_it_is_not_good_for(name: str, node: Node, sim: Path, programs: Path) -> None:
    """The documented limit; and that these tests would see a way past."""
    with instance(node, name):
        done = node.ctl("run", "--id", name, "--cover", "never", "--", *command(COVERED[name], programs, sim))
        assert done.stdout == LOOSE
        assert not any(counters(node, name).values())


@pytest.mark.parametrize("cleared", [["-u", "LD_LIBRARY_PATH"], ["LD_LIBRARY_PATH=/nowhere"]])
def test_a_program_that_clears_the_library_path(cleared: list[str], node: Node, sim: Path, programs: Path) -> None:
    """The hook is found from where the proxy is, too."""
    for name in ("absolute-path", "rpath", "runpath"):
        assert gated(node, name, "env", *cleared, *command((ROUTES | COVERED)[name], programs, sim)) == HELD


@pytest.mark.parametrize("name", ["dlopen", "absolute-path"])
def test_a_program_whose_environment_is_emptied(name: str, node: Node, sim: Path, programs: Path) -> None:
    """The mount namespace tells which instance it is in. (The simulated device wants to be told where it is.)"""
    program, way, _ = command((ROUTES | COVERED)[name], programs, sim)
    emptied = ("env", "-i", f"CGPU_SIM_DIR={node.runtime / 'sim'}")
    assert gated(node, name, *emptied, program, way, sim) == HELD
    with instance(node, name):
        done = node.ctl("run", "--id", name, "--cover", "never", "--", *emptied, program, way, str(sim))
        assert done.stdout == LOOSE, "the documented limit"


@pytest.mark.parametrize(("cover", "code", "out"), [("always", 125, ""), ("auto", 0, "ran\n"), ("never", 0, "ran\n")])
def test_without_the_privilege(cover: str, code: int, out: str, node: Node) -> None:
    for level in ("warning", "info"):
        done = subprocess.run(
            ["setpriv", "--bounding-set=-sys_admin", "--inh-caps=-sys_admin", BIN / "cgpuctl", "run", "--mem", "1GiB",
             "--cover", cover, "--", "echo", "ran"],
            env=node.env | {"CGPU_LOG_LEVEL": level}, capture_output=True, text=True, timeout=60)  # fmt: skip
        assert (done.returncode, done.stdout) == (code, out)
        said = "cgpuctl: run: the driver's own files stay uncovered: unshare: Operation not permitted\n"
        assert done.stderr == (said if cover == "always" or cover == "auto" and level == "info" else "")


def test_what_cmd_keeps(node: Node, tmp_path: Path) -> None:
    """Its working folder, files, user, environment: all but the mount namespace."""
    show = 'pwd; cat; id -u; echo "$MINE"; readlink /proc/self/ns/mnt; echo $$'
    with subprocess.Popen([BIN / "cgpuctl", "run", "--mem", "1GiB", "--", "sh", "-c", show], cwd=tmp_path,
                          env=node.env | {"MINE": "kept"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        out, _ = process.communicate(b"given\n", 60)
    *kept, namespace, pid = out.decode().splitlines()
    assert kept == [str(tmp_path), "given", str(os.getuid()), "kept"] and int(pid) == process.pid
    assert namespace != os.readlink("/proc/self/ns/mnt")


def test_a_run_inside_of_a_run(node: Node, sim: Path, programs: Path) -> None:
    """The inner one finds the driver covered, and joins an instance of its own."""
    inner = [BIN / "cgpuctl", "run", "--id", "inner", "--", *command(COVERED["absolute-path"], programs, sim)]
    with instance(node, "inner"):
        assert node.ctl("run", "--mem", "1GiB", "--", *inner).stdout == HELD
        wait_for_counters(node, "inner")
