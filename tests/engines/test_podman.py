"""podman, for real: with our runtime, with CDI devices, with our precreate hook, and with all of them at once."""

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import engines
import pytest
from node import BIN, Node, wait_until
from podman import Podman
from world import ASKS, OUT_OF_MEMORY, gpus_of, instances, make_image, node_over

pytestmark = pytest.mark.timeout(300)
ASK = tuple(word for one in ASKS for word in ("-e", one))
PLACES = ("/usr/local/cgpu/lib", "/usr/local/cgpu/lib/real", "/usr/local/cgpu/sock", "/run/cgpu")


class World:
    """podman on a node, in the ways that ``by`` names."""

    def __init__(self, podman: Podman, node: Node, runc: Path, by: tuple[str, ...]) -> None:
        self.podman = podman
        self.node = node
        self.by = by
        self.device = ["--device", "cgpu.local/gpu=0"] if "cdi" in by else []
        # our runtime becomes podman's; beside the other ways that stays what it is here
        self.podman.options = [] if "runtime" in by else ["--runtime", str(runc)]

    def setup(self, *undo: str) -> None:
        """What an administrator types. Where podman looks for it, since we are in its mount namespace."""
        commands = {"runtime": ["setup", "podman", *undo], "hook": ["setup", "podman", "--hook", *undo],
                    "cdi": ["cdi", "generate", "--output", "/etc/cdi/cgpu.json"]}
        for way in self.by:
            self.podman.inside(BIN / "cgpuctl", *commands[way], "--runtime", self.node.binary, env=self.node.env)

    def undo(self) -> None:
        self.setup("--undo")
        self.podman.inside("rm", "-f", "/etc/cdi/cgpu.json")

    def start(self, *options: str, image: str = "tiny", command: tuple[str, ...] = ("sleep", "1000")) -> str:
        return self.podman.start(*ASK, *self.device, *options, image=image, command=command)

    def refused(self, *options: str, command: tuple[str, ...] = ("true",)) -> str:
        done = self.podman("run", "--rm", "--network", "none", "--cgroup-parent", self.podman.parent, *self.device,
                           *options, "tiny", *command, check=False)
        assert done.returncode in (125, 126, 127), done
        return done.stderr

    def listed(self) -> list[str]:
        return instances(self.node)


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Podman, Node, Path]]:
    root = engines.fetch()
    image = make_image(tmp_path_factory.mktemp("image"))
    # pytest's own folders are for root alone, and a user namespace's root is none
    with tempfile.TemporaryDirectory(prefix="cgpu-test-") as name:
        base = Path(name)
        base.chmod(0o711)
        with engines.cgroup_parent(f"cgpu-test-{os.getpid()}") as parent, node_over(root, base) as node:
            podman = Podman(root, base, parent)
            try:
                podman("import", "-c", 'CMD ["bash"]', image, "tiny")
                runc = Path((base / "node/config.toml").read_text().split('"')[1])
                podman.probe(runc)
                yield podman, node, runc
            finally:
                podman.close()


@pytest.fixture(params=["runtime", "cdi", "hook", "runtime+cdi+hook"])
def world(made: tuple[Podman, Node, Path], request: pytest.FixtureRequest) -> Iterator[World]:
    one = World(*made, tuple(request.param.split("+")))
    one.setup()
    yield one
    # of a user namespace that is on its way out, a mount may be busy for a moment
    wait_until(lambda: one.podman("rm", "--all", "--force", "-t", "0", check=False).returncode == 0, "its end")
    wait_until(lambda: one.listed() == [], "all containers to be registered no more")
    one.undo()


def test_a_container_has_its_share_and_everything_once(world: World) -> None:
    short = world.start()
    assert world.listed() == [short]
    assert gpus_of(world.podman("exec", short, "nvidia-smi").stdout) == ["6043"]
    tried = "; ".join(f"alloc {size << 20} </dev/null" for size in (6044, 6042))
    assert world.podman("exec", short, "sh", "-c", tried).stdout.split() == [OUT_OF_MEMORY, "0"]
    mounts = [line.split()[2] for line in world.podman("exec", short, "mount").stdout.splitlines()]
    assert [mounts.count(place) for place in PLACES] == [1] * len(PLACES)
    assert world.podman("exec", short, "ls", "/run/cgpu/0").stdout.split().count(short) == 1
    written = world.podman("exec", short, "sh", "-c", "echo 2 >/run/cgpu/0/policy", check=False)
    assert "Read-only file system" in written.stderr


@pytest.mark.parametrize("how", ["restart -t 0", "stop -t 0|start", "kill|start"])
def test_the_same_container_again(world: World, how: str) -> None:
    short = world.start()
    for verb in how.split("|"):
        world.podman(*verb.split(), short)
    wait_until(lambda: world.listed() == [short], "the container to be registered again")
    assert gpus_of(world.podman("exec", short, "nvidia-smi").stdout) == ["6043"]


def test_what_is_removed_or_ends_is_registered_no_more(world: World) -> None:
    removed, ended = world.start(), world.start(command=("sleep", "0"))
    wait_until(lambda: ended not in world.listed(), "the one that ended to be gone")
    world.podman("rm", "-f", "-t", "0", removed)
    wait_until(lambda: world.listed() == [], "the other to be gone, too")


def test_in_a_user_namespace(world: World) -> None:
    short = world.start("--uidmap", "0:100000:65536", "--gidmap", "0:100000:65536")
    assert world.podman("exec", short, "cat", "/proc/self/uid_map").stdout.split() == ["0", "100000", "65536"]
    assert gpus_of(world.podman("exec", short, "nvidia-smi").stdout) == ["6043"]
    tried = "; ".join(f"alloc {size << 20} </dev/null" for size in (6044, 6042))
    assert world.podman("exec", short, "sh", "-c", tried).stdout.split() == [OUT_OF_MEMORY, "0"]
    assert world.podman("exec", short, "cat", f"/run/cgpu/0/{short}/memsize").stdout == f"{6043 << 20}\n"


def test_who_asks_wrongly_or_for_too_much_is_told_why(world: World) -> None:
    asks = ("-e", "ALIYUN_COM_GPU_MEM_CONTAINER=7", "-e", "ALIYUN_COM_GPU_MEM_DEV=6")
    assert "at most the 6 of ALIYUN_COM_GPU_MEM_DEV" in world.refused(*asks)
    world.start()
    world.start()
    assert "memsize" in world.refused(*ASK)
    assert len(world.listed()) == 2


def test_a_container_that_cannot_be_made_leaves_nothing(world: World) -> None:
    world.refused(*ASK, command=("/no/such/program",))
    wait_until(lambda: world.listed() == [], "it to be registered no more")


def test_a_container_that_asks_for_nothing_is_as_it_was(world: World) -> None:
    mounts = world.podman("exec", world.podman.start(), "mount").stdout.splitlines()
    assert not [line for line in mounts if "cgpu" in line.split()[2] or "libcuda" in line]
    assert world.listed() == []


def test_the_hosts_tree_bound_by_hand_shows_the_own_directory(world: World) -> None:
    other, tree = world.start(), world.node.tree
    short = world.start("-v", f"{tree}:/x", "-v", f"{tree.parent}:/y")
    for place in ("/x", f"/y/{tree.name}"):
        listing = world.podman("exec", short, "ls", f"{place}/0").stdout.split()
        assert short in listing
        assert other not in listing
        written = world.podman("exec", short, "sh", "-c", f"echo 2 >{place}/0/policy", check=False)
        assert "Read-only file system" in written.stderr


def test_without_a_daemon_it_does_not_start(world: World) -> None:
    world.node.stop()
    try:
        said = world.refused(*ASK)
        # of its own kind of hook podman tells no more than the name
        assert ("cgpu-runtime precreate" if "hook" in world.by else "cgpud cannot be asked") in said
    finally:
        world.node.start()
