"""Whose a program is where its cgroup alone says it: containers with the node's PIDs, in each engine's kind of path."""

import errno
import json
import os
from collections.abc import Iterator
from pathlib import Path

import engines
import pytest
from world import ASKS, Bundles, gpus_of, low_level, make_image, node_over

pytestmark = pytest.mark.timeout(300)
ONE, OTHER = "a1" * 32, "b2" * 32
SMALL = ("ALIYUN_COM_GPU_MEM_CONTAINER=3", "ALIYUN_COM_GPU_MEM_DEV=15")
# as a node has it that knows version 2 alone
V2 = ("unshare", "-m", "--propagation", "private", "sh", "-c",
      'umount -R /sys/fs/cgroup; mount -t cgroup2 cgroup2 /sys/fs/cgroup && exec "$@"', "sh")
SHAPES = [("docker/{}", "system.slice/docker-{}.scope"),
          ("kubepods/burstable/pod7cf2/{}", "kubepods.slice/kubepods-pod7cf2.slice/cri-containerd-{}.scope"),
          ("kubepods.slice/crio-{}.scope", "machine.slice/libpod-{}.scope/container")]  # fmt: skip


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bundles]:
    root = engines.fetch()
    base = tmp_path_factory.mktemp("identity")
    with engines.cgroup_parent(f"cgpu-test-{os.getpid()}") as parent, node_over(root, base) as node:
        yield Bundles(node, low_level(root, base / "stand-ins"), base, make_image(base), parent)


@pytest.fixture(params=["as it is", "v2"])
def runc(made: Bundles, request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Bundles]:
    before = V2 if request.param == "v2" else ()
    one = Bundles(made.node, made.runc, tmp_path, made.image, made.parent, *before)
    one.probe()
    yield one
    one.close()


def start(runc: Bundles, ident: str, shape: str, *env: str) -> str:
    """A container with the node's PIDs, with a cgroup namespace, and with all doors of the node; its cgroup."""
    bundle = runc.make(ident, *env)
    spec = json.loads((bundle / "config.json").read_text())
    spec["linux"]["cgroupsPath"] = f"{runc.parent}/{shape.format(ident)}"
    kept = [one for one in spec["linux"]["namespaces"] if one["type"] not in ("pid", "cgroup")]
    spec["linux"]["namespaces"] = [*kept, {"type": "cgroup"}]
    spec["mounts"].append({"destination": "/doors", "type": "bind", "source": str(runc.node.runtime / "inst"),
                           "options": ["bind"]})
    (bundle / "config.json").write_text(json.dumps(spec))
    runc("create", "--bundle", bundle, "--pid-file", bundle / "pid", ident)
    runc("start", ident)
    return Path(f"/proc/{(bundle / 'pid').read_text()}/cgroup").read_text()


@pytest.mark.parametrize("shapes", SHAPES)
def test_who_comes_by_anothers_door_is_refused(runc: Bundles, shapes: tuple[str, str]) -> None:
    for ident, shape, asks in zip((ONE, OTHER), shapes, (ASKS, SMALL), strict=True):
        cgroup, path = start(runc, ident, shape, *asks), f"{runc.parent}/{shape.format(ident)}"
        assert path in cgroup
        assert f"0::{path}\n" in cgroup or not runc.before, "it is in the hierarchy of version 2"
    for ident, door, memory in ((ONE, OTHER, "6043"), (OTHER, ONE, "3021")):
        for way in ("", f"CGPU_SOCKET=/doors/{ident}/gate.sock "):
            own = runc("exec", ident, "sh", "-c", f"{way}nvidia-smi")
            assert (gpus_of(own.stdout), own.stderr) == ([memory], "")
        done = runc("exec", ident, "sh", "-c", f"CGPU_SOCKET=/doors/{door}/gate.sock nvidia-smi", check=False)
        assert f"error=-{errno.EACCES}" in done.stderr
