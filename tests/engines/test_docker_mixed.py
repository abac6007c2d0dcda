"""Docker, for real: a container that shares one GPU of three and has the others whole."""

import json
from collections.abc import Iterator

import pytest
from world import OUT_OF_MEMORY, World, docker_world, gpus_of

pytestmark = pytest.mark.timeout(300)
CARD, QUOTA = 15109, 6043
MIXED = ("--network", "none", "-e", "ALIYUN_COM_GPU_MEM_CONTAINER=6", "-e", "ALIYUN_COM_GPU_MEM_DEV=15",
         "-e", "ALIYUN_COM_GPU_VISIBLE_DEVICES=2", "-e", "NVIDIA_VISIBLE_DEVICES=0,1,2")  # fmt: skip


@pytest.fixture(scope="module")
def docker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with docker_world(tmp_path_factory.mktemp("mixed"), f"3x{CARD}MiB") as world:
        yield world


def alloc(docker: World, short: str, device: int, mebibytes: int) -> str:
    """What a program with that GPU alone says of an allocation there."""
    command = f"CUDA_VISIBLE_DEVICES={device} alloc {mebibytes << 20} </dev/null"
    return docker.docker("exec", short, "sh", "-c", f"{command}; true").stdout.strip()


def test_native_gpus_are_whole_and_the_shared_one_is_limited(docker: World) -> None:
    short = docker.run(*MIXED)
    assert gpus_of(docker.docker("exec", short, "nvidia-smi").stdout) == [str(CARD), str(CARD), str(QUOTA)]
    for gpu in (0, 1):
        assert alloc(docker, short, gpu, QUOTA + 1000) == "0"
        assert docker.listed(gpu) == []
    assert alloc(docker, short, 2, QUOTA + 1) == OUT_OF_MEMORY
    assert alloc(docker, short, 2, QUOTA - 43) == "0"
    assert docker.listed(2) == [short]
    (listed,) = json.loads(docker.node.ctl("list", "--json").stdout)
    assert listed["native"] == [0, 1] and [one["gpu"] for one in listed["gpus"]] == [2]
    docker.docker("rm", "-f", short)
    docker.gone(short, 2)


def test_another_container_shares_what_is_native_to_the_first(docker: World) -> None:
    """Nothing of a native GPU is reserved: its node's weights and memory are as without the container."""
    first = docker.run(*MIXED)
    free = docker.node.read(0, "free_weight")
    second = docker.run("--network", "none", "-e", "ALIYUN_COM_GPU_MEM_CONTAINER=15", "-e", "ALIYUN_COM_GPU_MEM_DEV=15",
                        "-e", "ALIYUN_COM_GPU_VISIBLE_DEVICES=0")  # fmt: skip
    assert free == "20\n" and docker.listed(0) == [second]
    assert gpus_of(docker.docker("exec", second, "nvidia-smi").stdout) == [str(CARD)]
    assert gpus_of(docker.docker("exec", first, "nvidia-smi").stdout) == [str(CARD), str(CARD), str(QUOTA)]
    docker.docker("rm", "-f", first, second)
    docker.gone(first, 2)
    docker.gone(second, 0)
