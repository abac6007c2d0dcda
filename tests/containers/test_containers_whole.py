"""cgpud and cgpu-runtime together, with a stand-in for the runtime behind them."""

import json
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from node import Node, wait_until
from oci import standing_node

ID = "0123456789abcdef" * 4


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Node]:
    with standing_node(tmp_path, "1x15109MiB") as one:
        yield one


class Runtime:
    """cgpu-runtime as an engine calls it; it becomes the stand-in, which waits."""

    def __init__(self, node: Node, env: list[str], id: str = ID) -> None:
        self.bundle = node.base / "bundle"
        self.bundle.mkdir(exist_ok=True)
        (self.bundle / "config.json").write_text(json.dumps({"process": {"env": env}, "root": {"path": "rootfs"}}))
        self.log = node.base / "runtime.log"
        self.process = subprocess.Popen(
            [node.base / "bin/cgpu-runtime", "--log", self.log, "create", "--bundle", self.bundle, id],
            stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE,
        )  # fmt: skip

    def end(self) -> bytes:
        return self.process.communicate(timeout=20)[1]


ASKS = ["ALIYUN_COM_GPU_MEM_CONTAINER=6", "ALIYUN_COM_GPU_MEM_DEV=15"]


def test_from_create_to_the_end(node: Node) -> None:
    runtime = Runtime(node, ASKS)
    wait_until(lambda: node.path(0, ID[:12]).exists(), "the container to be registered")
    view = node.runtime / "view" / ID
    assert (view / "0" / ID[:12] / "memsize").read_text() == node.read(0, ID[:12], "memsize") == f"{6043 << 20}\n"
    node.write("create bare memsize=1MiB", "inst_ctl")
    assert ID in (view / "inst_ctl").read_text() and "bare" in node.read("inst_ctl")
    assert sorted(os.listdir(view / "0")) == [ID[:12], "free_weight", "major", "max_inst", "policy", "prio_ratio"]
    spec = wait_until(lambda: json.loads((runtime.bundle / "config.json").read_text()).get("mounts"), "the edit")
    for mount in spec:
        kind = stat.S_ISDIR if mount["source"] in map(str, node_folders(node)) else stat.S_ISREG
        assert kind(os.stat(mount["source"]).st_mode), mount
    assert runtime.end() == b""
    wait_until(lambda: not node.path(0, ID[:12]).exists(), "the container to go with its runtime")
    assert os.listdir(node.runtime / "ct") == []


def node_folders(node: Node) -> list[Path]:
    run = node.runtime
    return [node.base / "lib", run / "real", run / "inst" / ID, run / "sim", run / "view" / ID]


def test_a_container_that_asks_for_too_much_does_not_start(node: Node) -> None:
    runtime = Runtime(node, ["ALIYUN_COM_GPU_MEM_CONTAINER=7", "ALIYUN_COM_GPU_MEM_DEV=6"])
    line = runtime.end().decode()
    assert runtime.process.returncode == 1 and "ALIYUN_COM_GPU_MEM_CONTAINER='7': at most the 6" in line
    assert "at most the 6" in json.loads(runtime.log.read_text())["msg"]
    assert os.listdir(node.runtime / "ct") == [] and node.read("inst_ctl") == ""


def test_without_a_daemon_it_does_not_start(node: Node) -> None:
    node.kill_daemon(signal.SIGKILL)
    runtime = Runtime(node, ASKS)
    assert b"cgpud cannot be asked" in runtime.end() and runtime.process.returncode == 1
    plain = Runtime(node, ["PATH=/bin"])
    assert plain.end() == b"" and plain.process.returncode == 0


def test_a_daemon_that_stops_leaves_nothing(node: Node) -> None:
    runtime = Runtime(node, ASKS)
    wait_until(lambda: node.path(0, ID[:12]).exists(), "the container to be registered")
    node.stop()
    assert os.listdir(node.runtime / "ct") == [] and not (node.runtime / "runtime.sock").exists()
    assert not (node.runtime / "view").exists()
    assert "Traceback" not in node.log.read_text()
    runtime.end()
