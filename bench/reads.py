"""What reading a control file costs: open, read and close, in turn with those of lxcfs's /proc/meminfo.

The file is the ``meminfo`` of a container with one process: in the administrator's tree, and as the container sees it.
"""

import contextlib
import json
import shlex
import statistics
import subprocess
import sys
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path

import engines
import pytest  # tests/support says by it why something cannot be had
from node import build_c, wait_until
from programs import ROOT, Bench

CONTAINER = "c0ffee00c0ff"
CLIENTS = (1, 8)
READERS = 16
SECONDS = 1.0
ASKING = ROOT / "tests/containers/asking.py"


def reads(bench: Bench) -> None:
    """us of open, read and close by one and by eight processes, and what readers without end in a container change."""
    base = bench.scratch / "reads"
    base.mkdir(parents=True)
    program = build_c(ROOT / "bench/file_reads.c", base / "file_reads")
    try:
        lxcfs = engines.fetch("lxcfs", ("lxcfs",))
        with bench.cell(), container(bench, base) as view, beside(lxcfs, base, view) as enter:
            tree = bench.node.path(0, CONTAINER, "meminfo")
            seen = base / "seen/0" / CONTAINER / "meminfo"
            measure(bench, {"tree": tree, "view": seen}, base / "lxcfs/proc/meminfo", [*enter, program])
            under_load(bench, tree, seen, [*enter, program])
    except pytest.skip.Exception as reason:
        print(f"reads: skipped: {reason}", file=sys.stderr)


def measure(bench: Bench, ours: dict[str, Path], lxcfs: Path, read: Sequence[object]) -> None:
    rounds = 3 if bench.quick else 9
    for clients in CLIENTS:
        took: dict[str, list[tuple[float, float]]] = {}
        for _ in range(rounds):
            for name, path in {"lxcfs": lxcfs, **ours}.items():
                took.setdefault(name, []).append(percentiles(bench, *read, path, clients, SECONDS))
        for name in ours:
            for at, percent in enumerate((50, 99)):
                bench.record("read_us", {"of": name, "clients": clients, "percentile": percent},
                             [one[at] for one in took[name]], "us", statistics.median(one[at] for one in took["lxcfs"]))


def under_load(bench: Bench, tree: Path, seen: Path, read: Sequence[object]) -> None:
    """An administrator's reads while processes of a container read all the time."""
    alone, loaded = [], []
    for _ in range(3 if bench.quick else 5):
        alone.append(percentiles(bench, *read, tree, 1, SECONDS))
        readers = bench.bare(*read, seen, READERS, 4 * SECONDS)
        loaded.append(percentiles(bench, *read, tree, 1, SECONDS))
        bench.output(readers)
    for at, percent in enumerate((50, 99)):
        bench.record("read_beside_us", {"readers": READERS, "percentile": percent}, [one[at] for one in loaded], "us",
                     statistics.median(one[at] for one in alone))


def percentiles(bench: Bench, *command: object) -> tuple[float, float]:
    """us at most in 50 and in 99 of 100 cases."""
    _, half, most, _ = map(int, bench.output(bench.bare(*command)).split())
    return half / 1000, most / 1000


@contextlib.contextmanager
def container(bench: Bench, base: Path) -> Iterator[Path]:
    """Has a container registered, in a PID namespace and with a process that holds memory; gives its view."""
    bundle = base / "bundle"
    bundle.mkdir()
    env = ["ALIYUN_COM_GPU_MEM_CONTAINER=6", "ALIYUN_COM_GPU_MEM_DEV=15"]
    (bundle / "config.json").write_text(json.dumps({"process": {"env": env}, "root": {"path": "rootfs"}}))
    hold = shlex.join([str(bench.many), "1", str(1 << 20), "hold"])
    runtime = bench.node.runtime
    with subprocess.Popen(["unshare", "--pid", "--fork", "--kill-child", "sh", "-c", f"read go; exec {hold}"],
                          env=bench.env_in(CONTAINER), stdin=subprocess.PIPE, stdout=subprocess.PIPE) as outside:
        assert outside.stdin and outside.stdout
        children = Path(f"/proc/{outside.pid}/task/{outside.pid}/children")
        inside = int(wait_until(children.read_text, "the container's first process"))
        state = {"ociVersion": "1.0.2", "id": CONTAINER, "status": "creating", "pid": inside, "bundle": str(bundle)}
        try:
            with ask(runtime, "create", CONTAINER, bundle), ask(runtime, "hook", json.dumps(state)):
                pass
            outside.stdin.write(b"go\n")
            outside.stdin.flush()
            assert outside.stdout.readline(), "the container's process has no memory"
            yield runtime / "view" / CONTAINER
        finally:
            outside.kill()
    wait_until(lambda: CONTAINER not in bench.node.read("inst_ctl"), "the container to be gone")


@contextlib.contextmanager
def ask(runtime: Path, *words: object) -> Iterator[None]:
    """Asks as cgpu-runtime does; who asked lives until the end."""
    command = [sys.executable, "-S", str(ASKING), str(runtime / "runtime.sock"), *map(str, words)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdin and process.stdout
        said = json.loads(process.stdout.readline())
        if said["status"] != 1:
            raise RuntimeError(f"{words[0]}: {said['text']}")
        yield
        process.stdin.close()


@contextlib.contextmanager
def beside(root: Path, base: Path, view: Path) -> Iterator[list[str]]:
    """lxcfs at ``base``/lxcfs and the view at ``base``/seen, in a mount namespace with a /run of its own.

    Gives the words to run a command in there with. Skips where lxcfs does not run.
    """
    for name in ("lxcfs", "seen"):
        (base / name).mkdir()
    script = (f"mount --bind {shlex.quote(str(view))} {base}/seen && mount -t tmpfs none /run &&"
              f" exec {root}/usr/bin/lxcfs --foreground --pidfile=/run/lxcfs.pid {base}/lxcfs")
    env = engines.environment(root)
    env["LD_LIBRARY_PATH"] += f":{root / engines.MULTIARCH / 'lxcfs'}"
    with open(base / "lxcfs.log", "wb") as file, subprocess.Popen(
            ["unshare", "--mount", "--propagation", "private", "sh", "-c", script], env=env, stdout=file,
            stderr=file) as process:  # fmt: skip
        enter = ["nsenter", "--target", str(process.pid), "--mount", "--"]
        try:
            wait_until(partial(answers, process, enter, base), "lxcfs to answer")
            yield enter
        finally:
            engines.end(process, "lxcfs")


def answers(process: "subprocess.Popen[bytes]", enter: Sequence[str], base: Path) -> bool:
    if process.poll() is not None:
        pytest.skip(f"lxcfs does not run here: {(base / 'lxcfs.log').read_text()[-600:]}")
    done = subprocess.run([*enter, "cat", f"{base}/lxcfs/proc/meminfo"], capture_output=True, check=False, timeout=20)
    return done.stdout.startswith(b"MemTotal:")
