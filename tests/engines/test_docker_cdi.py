"""Docker from version 25 on, for real: ``--device cgpu.local/gpu=0`` by the specification that ``cgpuctl cdi`` writes.

Where the distribution's Docker is older, it is Debian 13's, with this release's runc.
"""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import debs
import engines
import pytest
from node import BIN, wait_until
from world import OUT_OF_MEMORY, SIX, World, gpus_of, low_level, make_image, node_over

from cgpusched.engines import setup

pytestmark = pytest.mark.timeout(300)
DEVICE = ("--device", "cgpu.local/gpu=0")
PLACES = ("/usr/local/cgpu/lib", "/usr/local/cgpu/lib/real", "/usr/local/cgpu/sock", "/run/cgpu")


def docker_with_cdi() -> Path:
    """Where a Docker is unpacked that knows CDI."""
    root = engines.fetch()
    command = ["dockerd", "--version"]
    said = subprocess.run(command, env=engines.environment(root), capture_output=True, text=True, check=True).stdout
    if int(said.split()[2].split(".")[0]) >= 25:
        return root
    return debs.unpack("trixie", "docker.io", "docker-cli", "containerd")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root, base = docker_with_cdi(), tmp_path_factory.mktemp("cdi")
    stand_ins = base / "stand-ins"
    stand_ins.mkdir()
    runc = low_level(engines.fetch(), stand_ins)
    (stand_ins / "runc").symlink_to(runc)
    image = make_image(base)
    with (engines.cgroup_parent(f"cgpu-test-{os.getpid()}") as parent, node_over(engines.fetch(), base) as node):
        command = [BIN / "cgpuctl", "cdi", "generate", "--output", base / "cdi/cgpu.json", "--runtime", node.binary]
        subprocess.run(command, env=node.env, check=True)
        docker = engines.Dockerd(root, base, parent, stand_ins)
        docker.config.write_text(json.dumps({
            "features": {"cdi": True}, "cdi-spec-dirs": [str(base / "cdi")], "default-runtime": "plain",
            "runtimes": {"plain": {"path": str(runc)}},
        }))  # fmt: skip
        setup.run(setup.Wish("docker", docker.config, binary=node.binary, kept=base / "kept", pid_file=docker.pid_file))
        try:
            docker.start()
            docker("import", "-c", 'CMD ["bash"]', image, "tiny")
            probe = docker("run", "--rm", "--network", "none", "tiny", "true", check=False)
            if probe.returncode:
                pytest.skip(f"Docker makes no container here, without us either: {probe.stderr.strip()[-400:]}")
            yield World(docker, node)
        finally:
            docker.stop()


@pytest.fixture
def docker(made: World) -> Iterator[World]:
    yield made
    made.clean()


@pytest.mark.parametrize("runtime", ["plain", "cgpu"])
def test_a_device_gives_a_share_and_everything_once(docker: World, runtime: str) -> None:
    short = docker.run(*SIX, *DEVICE, "--runtime", runtime)
    assert docker.listed() == [short]
    assert gpus_of(docker.docker("exec", short, "nvidia-smi").stdout) == ["6043"]
    tried = "; ".join(f"alloc {size << 20} </dev/null" for size in (6044, 6042))
    assert docker.docker("exec", short, "sh", "-c", tried).stdout.split() == [OUT_OF_MEMORY, "0"]
    mounts = [line.split()[2] for line in docker.docker("exec", short, "mount").stdout.splitlines()]
    assert [mounts.count(place) for place in PLACES] == [1] * len(PLACES)
    written = docker.docker("exec", short, "sh", "-c", "echo 2 >/run/cgpu/0/policy", check=False)
    assert "Read-only file system" in written.stderr
    docker.docker("restart", "-t", "0", short)
    wait_until(lambda: docker.listed() == [short], "the container to be registered again")
    assert gpus_of(docker.docker("exec", short, "nvidia-smi").stdout) == ["6043"]
    docker.docker("kill", short)
    docker.gone(short)


def test_without_the_device_the_plain_runtime_leaves_it_alone(docker: World) -> None:
    short = docker.run(*SIX)
    assert docker.listed() == []
    assert "cgpu" not in docker.docker("exec", short, "mount").stdout


def test_who_asks_wrongly_is_told_why(docker: World) -> None:
    said = docker.refused(*DEVICE, "-e", "ALIYUN_COM_GPU_MEM_CONTAINER=7", "-e", "ALIYUN_COM_GPU_MEM_DEV=6")
    assert "at most the 6 of ALIYUN_COM_GPU_MEM_DEV" in said
    assert "unresolvable CDI devices cgpu.local/gpu=7" in docker.refused("--device", "cgpu.local/gpu=7")
