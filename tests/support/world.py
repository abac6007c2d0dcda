"""A node with a real engine on it: the simulated device, a tiny image, and what host and containers see of each other.

Stand-ins, where a machine lacks the real thing: a program of the name that Docker's --gpus asks for (NVIDIA's toolkit
has it) that does nothing, and a runc that asks for no limits above this machine's (``engines.clamped``).
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import subprocess
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import engines
import pytest
from node import ROOT, Node, build_c, running_node, wait_until

from cgpusched.engines import setup

ASKS = ("ALIYUN_COM_GPU_MEM_CONTAINER=6", "ALIYUN_COM_GPU_MEM_DEV=15")
"""6,043 of the 15,109 MiB of a T4."""
SIX = ("--network", "none", *(word for one in ASKS for word in ("-e", one)))
TOOLS = ("true", "sleep", "cat", "ls", "env", "id", "mount", "touch", "mkdir", "rm", "grep", "umount", "head")
OUT_OF_MEMORY = "2"  # CUDA_ERROR_OUT_OF_MEMORY, as alloc.c says it
T4 = "1x15109MiB"


def gpus_of(text: str) -> list[str]:
    """The totals that smi.c shows, in MiB."""
    return [line.split()[2] for line in text.splitlines() if len(line.split()) == 3]


def instances(node: Node, gpu: int = 0) -> list[str]:
    """The instances that the tree shows."""
    return sorted(one.name for one in node.path(gpu).iterdir() if one.is_dir())


def make_image(base: Path) -> Path:
    """The image's tar: a shell, some tools, and programs that use the GPU."""
    sources = {"busy": "demo/busy.c", "alloc": "tests/e2e/alloc.c", "nvidia-smi": "tests/engines/smi.c"}
    programs = [build_c(ROOT / source, base / "bin" / name) for name, source in sources.items()]
    return engines.image(base / "image.tar", [*TOOLS, *programs])


def low_level(root: Path, folder: Path) -> Path:
    """runc, or what stands in for it here."""
    runc = root / "usr/sbin/runc"
    return runc if engines.has_sys_resource() else engines.clamped(folder / "clamped-runc", runc)


Chain = Callable[[Path, Path], Sequence[Path]]
"""From a folder for programs and the runtime that makes containers to ``runtimes`` of cgpud's configuration."""


@contextlib.contextmanager
def node_over(root: Path, base: Path, gpus: str = T4, chain: Chain | None = None) -> Iterator[Node]:
    """A node whose cgpu-runtime goes on with runc, or with what ``chain`` says."""
    folder = base / "stand-ins"
    folder.mkdir(exist_ok=True)
    runc = low_level(root, folder)
    runtimes = [runc] if chain is None else chain(folder, runc)
    (base / "node").mkdir()
    (base / "node/config.toml").write_text(f"runtimes = {json.dumps(list(map(str, runtimes)))}\n")
    with running_node(base / "node", gpus) as node:
        yield node


@dataclasses.dataclass
class World:
    docker: engines.Dockerd
    node: Node

    def run(self, *options: str, image: str = "tiny", command: tuple[str, ...] = ("sleep", "1000")) -> str:
        """Starts a container; its 12-character ID."""
        return self.docker("run", "-d", *options, image, *command).stdout.strip()[:12]

    def refused(self, *options: str, image: str = "tiny") -> str:
        """What Docker says of a container that does not start; nothing of it may be left registered."""
        before = self.listed()
        done = self.docker("run", "--rm", "--network", "none", *options, image, "true", check=False)
        assert done.returncode == 125, done
        assert self.listed() == before
        return done.stderr

    def listed(self, gpu: int = 0) -> list[str]:
        return instances(self.node, gpu)

    def gone(self, short: str, gpu: int = 0) -> None:
        wait_until(lambda: short not in self.listed(gpu), f"{short} to be registered no more")

    def clean(self) -> None:
        """Removes all containers."""
        left = self.docker("ps", "-aq").stdout.split()
        if left:
            self.docker("rm", "-f", *left)
        wait_until(lambda: self.listed() == [], "all containers to be registered no more")


@contextlib.contextmanager
def docker_world(base: Path, gpus: str = T4, chain: Chain | None = None) -> Iterator[World]:
    """Docker with our runtime as its default, and the image ``tiny``."""
    root = engines.fetch()
    stand_ins = base / "stand-ins"
    stand_ins.mkdir()
    hook = stand_ins / "nvidia-container-runtime-hook"
    hook.write_text("#!/bin/sh\nexit 0\n")
    hook.chmod(0o755)
    image = make_image(base)
    with (engines.cgroup_parent(f"cgpu-test-{os.getpid()}") as parent,
          node_over(root, base, gpus, chain) as node):
        docker = engines.Dockerd(root, base, parent, stand_ins)
        docker.config.write_text(json.dumps({"runtimes": {"plain": {"path": str(low_level(root, stand_ins))}}}))
        setup.run(setup.Wish("docker", docker.config, binary=node.binary, kept=base / "kept", pid_file=docker.pid_file))
        try:
            docker.start()
            docker("import", "-c", 'CMD ["bash"]', image, "tiny")
            probe = docker("run", "--rm", "--network", "none", "--runtime", "plain", "tiny", "true", check=False)
            if probe.returncode:
                pytest.skip(f"Docker makes no container here, without us either: {probe.stderr.strip()[-400:]}")
            yield World(docker, node)
        finally:
            docker.stop()


class Bundles:
    """Containers by a low-level runtime alone, called as engines call it; their folders are below ``base``."""

    def __init__(self, node: Node, runc: Path, base: Path, image: Path, parent: str, *before: str) -> None:
        """``runc``: makes the first configuration. ``before``: a command that the runtime's is put behind."""
        self.node = node
        self.runc = runc
        self.base = base
        self.image = image
        self.parent = parent
        self.before = before
        self.program: Path = node.binary
        self._made: list[str] = []

    def make(self, ident: str, *env: str, command: Sequence[str] = ("sleep", "1000"), image: Path | None = None,
             hooks: dict[str, Any] | None = None) -> Path:
        """A bundle for container ``ident``."""
        bundle = self.base / f"bundle-{ident}"
        (bundle / "rootfs").mkdir(parents=True)
        subprocess.run(["tar", "-xf", image or self.image, "-C", bundle / "rootfs"], check=True)
        subprocess.run([self.runc, "spec", "--bundle", bundle], check=True)
        config = bundle / "config.json"
        spec = json.loads(config.read_text())
        spec["process"] |= {"terminal": False, "args": list(command)}
        spec["process"]["env"] += env
        spec["root"]["readonly"] = False
        spec["hooks"] = hooks or {}
        spec["linux"]["cgroupsPath"] = f"{self.parent}/{ident}"
        config.write_text(json.dumps(spec))
        self._made.append(ident)
        return bundle

    def popen(self, *words: Path | str, **options: Any) -> subprocess.Popen[str]:
        command = [*self.before, str(self.program), "--root", str(self.base / "state"), *map(str, words)]
        return subprocess.Popen(command, text=True, cwd=self.base, **options)

    def __call__(self, *words: Path | str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """The runtime with its output in files: a container that it leaves behind would hold a pipe open."""
        with open(self.base / "out", "w+") as out, open(self.base / "err", "w+") as err:
            process = self.popen(*words, stdin=subprocess.DEVNULL, stdout=out, stderr=err)
            try:
                code = process.wait(60)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                raise
        said = [(self.base / name).read_text() for name in ("out", "err")]
        done = subprocess.CompletedProcess(words, code, *said)
        assert not check or code == 0, f"{' '.join(map(str, words))}: {code}: {done.stdout}{done.stderr}"
        return done

    def create(self, ident: str, *env: str, check: bool = True, **options: Any) -> subprocess.CompletedProcess[str]:
        bundle = self.make(ident, *env, **options)
        return self("create", "--bundle", bundle, "--pid-file", bundle / "pid", ident, check=check)

    def run(self, ident: str, *env: str, command: Sequence[str], check: bool = True,
            **options: Any) -> subprocess.CompletedProcess[str]:
        """Runs a program in a container to its end."""
        return self("run", "--bundle", self.make(ident, *env, command=command, **options), ident, check=check)

    def end(self, ident: str) -> None:
        self("delete", "--force", ident)

    def probe(self) -> None:
        """Skips the test where the low-level runtime alone makes no container."""
        ours, self.program = self.program, self.runc
        done = self.run("probe", command=("true",), check=False)
        self("delete", "--force", "probe", check=False)
        self.program = ours
        if done.returncode:
            pytest.skip(f"{self.runc.name} makes no container here, without us either: {done.stderr.strip()[-400:]}")

    def close(self) -> None:
        """Ends its containers; the daemon has none of them afterwards."""
        for ident in self._made:
            self("delete", "--force", ident, check=False)
        wait_until(lambda: not self.registered(), "all containers to be registered no more")

    def registered(self) -> list[str]:
        """The instances that the daemon has."""
        return instances(self.node)
