"""What the hook mounts, in a process's own mount namespace, on a root that tries to lead it elsewhere."""

import json
import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from oci import Bench, StandIn


class Container:
    """A process in a mount namespace of its own with a root folder on a tmpfs there, as before pivot_root."""

    def __init__(self, base: Path) -> None:
        self.rootfs = base / "rootfs"
        self.rootfs.mkdir()
        script = f"mount -t tmpfs root {self.rootfs} && echo ready && exec cat"
        self.process = subprocess.Popen(["unshare", "-m", "sh", "-c", script], stdin=subprocess.PIPE,
                                        stdout=subprocess.PIPE, text=True)
        assert self.process.stdout
        assert self.process.stdout.readline() == "ready\n"

    def inside(self, path: str) -> Path:
        return Path(f"/proc/{self.process.pid}/root{self.rootfs}{path}")

    def run(self, command: str) -> "subprocess.CompletedProcess[str]":
        return subprocess.run(["nsenter", "-t", str(self.process.pid), "-m", "sh", "-c", command], capture_output=True,
                              text=True, check=False)

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def container(tmp_path: Path) -> Iterator[Container]:
    one = Container(tmp_path)
    yield one
    one.end()


@pytest.fixture
def source(tmp_path: Path) -> Path:
    path = tmp_path / "source"
    path.write_text("ours")
    return path


def hook(bench: Bench, daemon: StandIn, container: Container, *lines: str) -> "subprocess.CompletedProcess[str]":
    daemon.status = 1
    daemon.text = "\n".join([f"root\t{container.rootfs}", *lines]) + "\n"
    return bench("hook", stdin=json.dumps({"id": "c1", "pid": container.process.pid}))


def test_files_and_folders_appear_and_cannot_be_written(
    bench: Bench, daemon: StandIn, container: Container, source: Path
) -> None:
    container.run(f"mkdir -p {container.rootfs}/usr/lib64; echo theirs >{container.rootfs}/usr/lib64/libcuda.so.1")
    done = hook(bench, daemon, container, f"bind\t{source}\t/usr/lib64/libcuda.so.1\tro",
                f"bind\t{source.parent}\t/usr/local/cgpu/lib\tro", f"bind\t{source}\t/new/deep/file\trw")
    assert done.stderr == ""
    assert done.returncode == 0
    assert container.inside("/usr/lib64/libcuda.so.1").read_text() == "ours"
    assert container.inside("/usr/local/cgpu/lib/source").read_text() == "ours"
    refused = container.run(f"echo x >{container.rootfs}/usr/lib64/libcuda.so.1")
    assert "Read-only file system" in refused.stderr
    assert container.run(f"echo x >>{container.rootfs}/new/deep/file").returncode == 0
    mounts = container.run("cat /proc/self/mountinfo").stdout.splitlines()
    flags = next(line.split()[5] for line in mounts if line.split()[4] == f"{container.rootfs}/usr/local/cgpu/lib")
    assert {"ro", "nosuid", "nodev"} <= set(flags.split(","))
    with open("/proc/self/mounts") as own:
        assert str(container.rootfs) not in own.read()


@pytest.mark.parametrize("link", ["ln -s {outside} {root}/etc", "ln -s /../../../../../../../..{outside} {root}/etc"])
def test_no_link_of_the_image_leads_out(
    bench: Bench, daemon: StandIn, container: Container, source: Path, tmp_path: Path, link: str
) -> None:
    outside = tmp_path / "outside"
    outside.mkdir()
    (outside / "file").write_text("the node's")
    container.run(link.format(outside=outside, root=container.rootfs))
    done = hook(bench, daemon, container, f"bind\t{source}\t/etc/file\tro")
    assert (outside / "file").read_text() == "the node's"
    assert os.listdir(outside) == ["file"]
    assert container.run(f"cat {outside}/file").stdout == "the node's"
    assert done.returncode == 1
    assert "/etc/file in the container: No such file or directory" in done.stderr


def test_a_link_inside_is_followed_inside(
    bench: Bench, daemon: StandIn, container: Container, source: Path
) -> None:
    container.run(f"cd {container.rootfs} && mkdir -p usr/lib && echo real >usr/lib/real && ln -s /usr/lib lib && "
                  "ln -s real usr/lib/link")
    assert hook(bench, daemon, container, f"bind\t{source}\t/lib/link\tro").returncode == 0
    assert container.inside("/usr/lib/real").read_text() == "ours"


@pytest.mark.parametrize(("made", "kind"), [("mkdir -p {root}/place", "file"), ("touch {root}/place", "dir"),
                                            ("mkfifo {root}/place", "dir")])
def test_a_place_of_the_wrong_kind_is_refused(
    bench: Bench, daemon: StandIn, container: Container, source: Path, made: str, kind: str
) -> None:
    container.run(made.format(root=container.rootfs))
    what = source if kind == "file" else source.parent
    done = hook(bench, daemon, container, f"bind\t{what}\t/place\tro")
    assert done.returncode == 1
    assert "/place in the container" in done.stderr


def test_what_it_does_not_know_is_refused(bench: Bench, daemon: StandIn, container: Container) -> None:
    done = hook(bench, daemon, container, "forget\tit")
    assert done.returncode == 1
    assert "cgpud answers what this version does not know: forget" in done.stderr


def test_a_process_that_is_gone(bench: Bench, daemon: StandIn, container: Container, source: Path) -> None:
    daemon.status, daemon.text = 1, f"root\t{container.rootfs}\n"
    done = bench("hook", stdin='{"pid": 2147483647}')
    assert done.returncode == 1
    assert "the mount namespace of process 2147483647: No such file" in done.stderr
