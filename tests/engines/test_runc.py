"""cgpu-runtime in front of runc and crun alone, called as containerd, podman and a shell do it."""

import contextlib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path

import engines
import pytest
from node import Node, wait_until
from world import ASKS, OUT_OF_MEMORY, Bundles, gpus_of, instances, low_level, make_image, node_over

pytestmark = pytest.mark.timeout(300)
HYBRID = Path("/sys/fs/cgroup/unified")
# crun 1.8 knows cgroup v1 and v2, but not both at once
WITHOUT_UNIFIED = ("unshare", "-m", "--propagation", "private", "sh", "-c", f'umount {HYBRID}; exec "$@"', "sh")

LOOK = f"nvidia-smi; ls /run/cgpu/0; alloc {6044 << 20} </dev/null; true"


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundles]:
    root = engines.fetch()
    base = tmp_path_factory.mktemp("runc")
    image = make_image(base)
    with engines.cgroup_parent(f"cgpu-test-{os.getpid()}") as parent, node_over(root, base) as node:
        one = Bundles(node, low_level(root, base / "stand-ins"), base, image, parent)
        one.probe()
        yield one


def bundles(made: Bundles, base: Path, *before: str) -> contextlib.closing[Bundles]:
    return contextlib.closing(Bundles(made.node, made.runc, base, made.image, made.parent, *before))


@pytest.fixture
def runc(made: Bundles, tmp_path: Path) -> Iterator[Bundles]:
    """No container before and after."""
    with bundles(made, tmp_path) as one:
        yield one


def marks(node: Node) -> list[str]:
    return sorted(os.listdir(node.runtime / "ct"))


def test_run_from_begin_to_end(runc: Bundles) -> None:
    done = runc.run("once", *ASKS, command=("sh", "-c", LOOK))
    assert gpus_of(done.stdout) == ["6043"]
    assert "once" in done.stdout.split()
    assert done.stdout.split()[-1] == OUT_OF_MEMORY
    wait_until(lambda: instances(runc.node) == [], "it to be registered no more")
    assert marks(runc.node) == []


def test_create_start_exec_kill_delete(runc: Bundles) -> None:
    runc.create("steps", *ASKS)
    assert instances(runc.node) == ["steps"] == marks(runc.node)
    assert json.loads(runc("state", "steps").stdout)["status"] == "created"
    runc("start", "steps")
    assert gpus_of(runc("exec", "steps", "nvidia-smi").stdout) == ["6043"]
    runc("kill", "steps", "KILL")
    wait_until(lambda: json.loads(runc("state", "steps").stdout)["status"] == "stopped", "it to stop")
    runc("delete", "steps")
    assert instances(runc.node) == [] == marks(runc.node), "delete answers when that is so"


def test_what_is_not_create_or_delete_is_the_runtimes_own(runc: Bundles) -> None:
    for words in (["--version"], ["features"], ["--help"], ["state", "nobody"]):
        ours, own = runc(*words, check=False), subprocess.run([runc.runc, "--root", str(runc.base / "state"), *words],
                                                              capture_output=True, text=True, check=False)
        assert (ours.returncode, ours.stdout) == (own.returncode, own.stdout)


def test_the_same_id_twice(runc: Bundles) -> None:
    runc.create("twice", *ASKS)
    runc("start", "twice")
    done = runc("create", "--bundle", runc.base / "bundle-twice", "twice", check=False)
    assert done.returncode == 1
    assert "container twice is registered already, and runs" in done.stderr
    assert gpus_of(runc("exec", "twice", "nvidia-smi").stdout) == ["6043"], "the first goes on"
    runc.end("twice")
    runc("create", "--bundle", runc.base / "bundle-twice", "twice")
    assert instances(runc.node) == ["twice"]


def test_a_bundle_that_was_edited_before_is_edited_no_further(runc: Bundles) -> None:
    bundle = runc.make("again", *ASKS, command=("sh", "-c", "mount; nvidia-smi"))
    first = runc("run", "--bundle", bundle, "again").stdout
    edited = (bundle / "config.json").read_text()
    second = runc("run", "--bundle", bundle, "again").stdout
    assert (bundle / "config.json").read_text() == edited
    assert second.count("/usr/local/cgpu/lib ") == first.count("/usr/local/cgpu/lib ") == 1
    assert gpus_of(second) == ["6043"]


@pytest.mark.parametrize("fault", ["program", "hook", "mount"])
def test_a_create_that_fails_leaves_nothing(runc: Bundles, fault: str) -> None:
    bundle = runc.make(fault, *ASKS, command=("/no/such/program",) if fault == "program" else ("true",))
    spec = json.loads((bundle / "config.json").read_text())
    if fault == "hook":
        spec["hooks"] = {"createContainer": [{"path": shutil.which("false")}]}
    elif fault == "mount":
        spec["mounts"].append({"destination": "/x", "type": "bind", "source": "/no/such/folder", "options": ["bind"]})
    (bundle / "config.json").write_text(json.dumps(spec))
    assert runc("run", "--bundle", bundle, fault, check=False).returncode != 0
    wait_until(lambda: instances(runc.node) == [], "it to be registered no more")
    assert marks(runc.node) == []


@pytest.mark.parametrize("stage", ["prestart", "createContainer"])
def test_a_runtime_that_is_killed_leaves_nothing(runc: Bundles, stage: str) -> None:
    """Before our hook (prestart), when the runtime stands for the container, and after it."""
    note, door = runc.base / "note", runc.base / "door"
    os.mkfifo(door)
    hook = {"path": "/bin/sh", "args": ["sh", "-c", f"touch {note}; read -r line <{door}"]}
    bundle = runc.make("killed", *ASKS, hooks={stage: [hook]})
    process = runc.popen("create", "--bundle", bundle, "killed", stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL)
    try:
        wait_until(note.exists, "the hook")
        assert instances(runc.node) == ["killed"]
    finally:
        process.kill()
        process.wait()
        with open(os.open(door, os.O_RDWR), "wb", buffering=0) as opened:
            opened.write(b"go on\n")
    wait_until(lambda: instances(runc.node) == [], "it to be registered no more")
    assert marks(runc.node) == []


@pytest.mark.parametrize("verb", ["create", "hook"])
def test_a_runtime_that_is_killed_while_the_daemon_is_silent_leaves_nothing(runc: Bundles, verb: str) -> None:
    """It has asked; the answer comes when nobody waits for it."""
    ident, door = f"killed-{verb}", runc.base / "door"
    os.mkfifo(door)
    waits = {"path": "/bin/sh", "args": ["sh", "-c", f"read -r line <{door}"]}
    bundle = runc.make(ident, *ASKS, hooks={"prestart": [waits]} if verb == "hook" else None)
    if verb == "create":
        runc.node.kill_daemon(signal.SIGSTOP)
    process = runc.popen("create", "--bundle", bundle, ident, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                         stderr=subprocess.DEVNULL, start_new_session=True)
    try:
        if verb == "hook":
            wait_until(lambda: instances(runc.node) == [ident], "it to be registered")
            with open(door, "w") as opened:  # once it is read, the container's mounts are made, which need the daemon
                runc.node.kill_daemon(signal.SIGSTOP)
                opened.write("go on\n")
        wait_until(lambda: waits_for_the_daemon(process.pid), "a program of ours to ask")
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        runc.node.kill_daemon(signal.SIGCONT)
    runc("delete", "--force", ident, check=False)
    wait_until(lambda: instances(runc.node) == [] == marks(runc.node), "it to be registered no more")


def waits_for_the_daemon(pid: int) -> bool:
    """Whether the process, or one of its children, is cgpu-runtime, and sleeps with a connection."""
    try:
        if os.path.basename(os.readlink(f"/proc/{pid}/exe")) == "cgpu-runtime":
            sleeps = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "S"
            return sleeps and any("socket:" in os.readlink(fd) for fd in Path(f"/proc/{pid}/fd").iterdir())
        children = [word for each in Path(f"/proc/{pid}/task").glob("*/children") for word in each.read_text().split()]
        return any(waits_for_the_daemon(int(child)) for child in children)
    except OSError:
        return False


def test_who_asks_wrongly_is_refused_in_the_log_too(runc: Bundles) -> None:
    bundle, log = runc.make("wrong", "ALIYUN_COM_GPU_MEM_CONTAINER=6"), runc.base / "log.json"
    done = runc("--log", log, "--log-format", "json", "create", "--bundle", bundle, "wrong", check=False)
    assert done.returncode == 1
    assert "ALIYUN_COM_GPU_MEM_DEV is not set" in done.stderr
    assert "ALIYUN_COM_GPU_MEM_DEV is not set" in json.loads(log.read_text().splitlines()[-1])["msg"]
    assert runc("state", "wrong", check=False).returncode != 0


def test_two_ids_that_begin_alike(runc: Bundles) -> None:
    runc.create("0123456789ab-one", *ASKS)
    done = runc.create("0123456789ab-two", *ASKS, check=False)
    assert done.returncode == 1
    assert "0123456789ab" in done.stderr
    assert instances(runc.node) == ["0123456789ab"]


@pytest.fixture
def crun(made: Bundles, tmp_path: Path) -> Iterator[Bundles]:
    """The node's cgpu-runtime goes on with crun instead."""
    root = engines.fetch()
    program = tmp_path / "bin/cgpu-runtime"
    program.parent.mkdir()
    shutil.copy(made.node.binary, program)
    configuration = made.node.binary.with_name("cgpu-runtime.conf").read_text().splitlines()
    lines = [line for line in configuration if not line.startswith("runtime ")]
    program.with_name("cgpu-runtime.conf").write_text("\n".join([*lines, f"runtime {root / 'usr/bin/crun'}", ""]))
    before = WITHOUT_UNIFIED if HYBRID.is_dir() else ()
    libraries = ("env", f"LD_LIBRARY_PATH={root / engines.MULTIARCH}")
    with bundles(made, tmp_path, *before, *libraries) as one:
        one.program = program
        probe = one.run("probe", command=("true",), check=False)
        if probe.returncode:
            pytest.skip(f"crun makes no container here: {probe.stderr.strip()}")
        yield one


def test_crun_makes_them_as_well(crun: Bundles) -> None:
    done = crun.run("once", *ASKS, command=("sh", "-c", LOOK))
    assert gpus_of(done.stdout) == ["6043"]
    assert "once" in done.stdout.split()
    assert done.stdout.split()[-1] == OUT_OF_MEMORY
    crun.create("steps", *ASKS)
    crun("start", "steps")
    assert gpus_of(crun("exec", "steps", "nvidia-smi").stdout) == ["6043"]
    crun("delete", "--force", "steps")
    wait_until(lambda: instances(crun.node) == [], "both to be registered no more")
    assert crun.run("wrong", *ASKS, command=("/no/such/program",), check=False).returncode != 0
    wait_until(lambda: instances(crun.node) == [], "what failed to be registered no more")
