"""containerd, for real: by ctr, which names our runtime, and by CRI, which ``cgpuctl setup`` has configured."""

import os
import tomllib
from collections.abc import Iterator
from pathlib import Path

import cri
import engines
import pytest
from containerd import IMAGE, Containerd
from node import Node, wait_until
from world import ASKS, OUT_OF_MEMORY, gpus_of, instances, make_image, node_over

from cgpusched.engines import containerd, setup

pytestmark = pytest.mark.timeout(300)
TRIED = "; ".join(f"alloc {size << 20} </dev/null" for size in (6044, 6042))
# Beside the node's own containerd, and without CAP_SYS_RESOURCE
CONFIG = """version = 2
root = "{base}/data"
state = "{base}/state"
[grpc]
  address = "{base}/containerd.sock"
[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "{image}"
    restrict_oom_score_adj = true
    [plugins."io.containerd.grpc.v1.cri".containerd]
      snapshotter = "native"
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"
        [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc.options]
          BinaryName = "{runc}"
          Root = "{base}/runc"
  [plugins."io.containerd.internal.v1.opt"]
    path = "{base}/opt"
"""


class World:
    def __init__(self, containerd: Containerd, node: Node) -> None:
        self.containerd = containerd
        self.node = node

    def setup(self, **wish: bool) -> list[str]:
        """What ``cgpuctl setup containerd`` does, and the restart that it asks for."""
        base = self.containerd.base
        lines = setup.run(setup.Wish("containerd", self.containerd.config, binary=self.node.binary, kept=base / "kept",
                                     **wish))
        self.containerd.restart()
        return lines

    def listed(self) -> list[str]:
        return instances(self.node)

    def has_its_share(self, container: str) -> None:
        assert self.listed() == [container[:12]]
        code, said = self.containerd.execute(container, "nvidia-smi")
        assert (code, gpus_of(said)) == (0, ["6043"])
        assert self.containerd.execute(container, "sh", "-c", TRIED)[1].split() == [OUT_OF_MEMORY, "0"]
        assert container[:12] in self.containerd.execute(container, "ls", "/run/cgpu/0")[1].split()


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    root = engines.fetch()
    base = tmp_path_factory.mktemp("containerd")
    image = make_image(base)
    with engines.cgroup_parent(f"cgpu-test-{os.getpid()}") as parent, node_over(root, base) as node:
        one = Containerd(root, base, parent)
        runc = Path((base / "node/config.toml").read_text().split('"')[1])
        one.config.write_text(CONFIG.format(base=base, image=IMAGE, runc=runc))
        try:
            one.start()
            one.load(image)
            try:
                one.remove(one.pod("probe"))
            except cri.Refused:
                pytest.skip(f"containerd makes no pod here, without us either: {one.log.read_text()[-600:]}")
            yield World(one, node)
        finally:
            one.stop()


@pytest.fixture
def world(made: World) -> Iterator[World]:
    yield made
    for pod in list(made.containerd.pods):
        made.containerd.remove(pod)
    wait_until(lambda: made.listed() == [], "all containers to be registered no more")


def test_a_container_of_ctrs_with_our_runtime(world: World) -> None:
    ctr = world.containerd
    asks = [word for one in ASKS for word in ("--env", one)]
    ctr("run", "--detach", *ctr.own("by-ctr"), "--runc-binary", world.node.binary, *asks, IMAGE, "by-ctr", "sleep",
        "1000")
    assert world.listed() == ["by-ctr"]
    executed = ctr("tasks", "exec", "--exec-id", "smi", "by-ctr", "sh", "-c", f"nvidia-smi; {TRIED}; ls /run/cgpu/0")
    assert gpus_of(executed.stdout) == ["6043"]
    assert "by-ctr" in executed.stdout.split()
    assert [word for word in executed.stdout.split() if word in (OUT_OF_MEMORY, "0")][-2:] == [OUT_OF_MEMORY, "0"]
    ctr("tasks", "kill", "--signal", "KILL", "by-ctr")
    wait_until(lambda: world.listed() == [], "it to be registered no more")
    wait_until(lambda: ctr("tasks", "rm", "by-ctr", check=False).returncode == 0, "its task to end")
    ctr("containers", "rm", "by-ctr")


def test_its_own_defaults_with_our_handler(world: World) -> None:
    """What it makes of the file, by its own word."""
    ctr, binary = world.containerd, "/var/lib/cgpud/bin/cgpu-runtime"
    file = ctr.base / "defaults.toml"
    file.write_text(containerd.configure(ctr.program("config", "default"), binary, default=True).text)
    config = tomllib.loads(ctr.program("--config", file, "config", "dump"))
    (found,) = [one["containerd"] for one in config["plugins"].values() if "runtimes" in one.get("containerd", {})]
    ours, runcs = found["runtimes"]["cgpu"], found["runtimes"]["runc"]
    assert found["default_runtime_name"] == "cgpu"
    assert ours == {**runcs, "options": {**runcs["options"], "BinaryName": binary}}


def test_a_wrong_wish_is_told_by_ctr(world: World) -> None:
    ctr = world.containerd
    done = ctr("run", "--rm", *ctr.own("wrong"), "--runc-binary", world.node.binary, "--env",
               "ALIYUN_COM_GPU_MEM_CONTAINER=6", IMAGE, "wrong", "true", check=False)
    assert done.returncode != 0
    assert "ALIYUN_COM_GPU_MEM_DEV is not set" in done.stderr
    assert world.listed() == []


def test_a_pod_with_our_handler(world: World) -> None:
    with pytest.raises(cri.Refused):  # before it is set up
        world.containerd.pod("early", "cgpu")
    assert f"{world.containerd.config}: written" in world.setup()
    pod = world.containerd.pod("with", "cgpu")
    plain = world.containerd.container(pod)
    world.containerd.begin(plain)
    assert world.listed() == [], "neither the sandbox nor a container that does not ask is registered"
    container = world.containerd.container(world.containerd.pod("asking", "cgpu"), ASKS)
    world.containerd.begin(container)
    world.has_its_share(container)
    world.containerd.restart()
    world.has_its_share(container)


def test_a_wrong_wish_is_what_the_kubelet_is_told(world: World) -> None:
    world.setup()
    container = world.containerd.container(world.containerd.pod("wrong", "cgpu"), ["ALIYUN_COM_GPU_MEM_CONTAINER=6"])
    with pytest.raises(cri.Refused):
        world.containerd.begin(container)
    assert "ALIYUN_COM_GPU_MEM_DEV is not set" in world.containerd.reason(container)
    assert world.listed() == []


def test_as_the_default_no_handler_need_be_named(world: World) -> None:
    world.setup(undo=True)
    before = world.containerd.config.read_text()
    world.setup(default=True)
    container = world.containerd.container(world.containerd.pod("default"), ASKS)
    world.containerd.begin(container)
    world.has_its_share(container)
    world.setup(undo=True)
    world.has_its_share(container)
    later = world.containerd.container(world.containerd.pod("later"), ASKS)
    world.containerd.begin(later)
    assert world.listed() == [container[:12]], "after the undo it is the plain runtime again"
    assert world.containerd.config.read_text() == before
