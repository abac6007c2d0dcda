"""Which container a process belongs to: cgroup texts as engines make them, and real PID namespaces."""

import os
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cgpusched.daemon.containers.identity import Owners, Space, Translator, named_in, space_of

A, B, C = "a1" * 32, "b2" * 32, "c3" * 32
KNOWN = {A, B, "plain-name"}

V1 = """12:pids:{0}
11:memory:{0}
1:name=systemd:{0}
0::/
"""


@pytest.mark.parametrize(("text", "found"), [
    (f"0::/docker/{A}", A),
    (V1.format(f"/docker/{A}"), A),
    (f"0::/system.slice/docker-{A}.scope", A),
    (f"0::/foo/bar/{A}", A),
    (f"0::/libpod_parent/libpod-{A}", A),
    (f"0::/machine.slice/libpod-{A}.scope/container", A),
    (f"0::/k8s.io/{A}", A),
    (f"0::/kubepods.slice/kubepods-besteffort.slice/kubepods-besteffort-pod1.slice/cri-containerd-{A}.scope", A),
    (f"0::/kubepods/besteffort/pod7cf2/{A}", A),
    (f"0::/kubepods.slice/crio-{A}.scope", A),
    (f"0::/../../docker/{A}", A),
    # systemd's driver on version 1: one line a hierarchy, the named one among them
    (V1.format(f"/system.slice/docker-{A}.scope"), A),
    (V1.format(f"/kubepods.slice/kubepods-burstable.slice/kubepods-burstable-pod1.slice/docker-{A}.scope"), A),
    (V1.format(f"/machine.slice/libpod-{A}.scope"), A),
    (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/libpod-{A}.scope/container", A),
    (f"0::/user.slice/user-1000.slice/user@1000.service/user.slice/docker-{A}.scope", A),  # rootless
    (f"0::/kubepods-besteffort-pod1.slice:cri-containerd:{A}", A),  # systemd's form given to the cgroupfs driver
    (f"0::/system.slice/containerd.service/kubepods-pod1.slice:cri-containerd:{A}", A),
    (f"0::/kubelet.slice/kubelet-kubepods.slice/kubelet-kubepods-pod1.slice/cri-containerd-{A}.scope", A),  # kind
    (f"0::/docker/{C}/kubelet.slice/kubelet-kubepods.slice/cri-containerd-{A}.scope", A),
    (f"0::/docker/{A}/init.scope", A), (f"0::/system.slice/docker-{A}.scope/system.slice/sshd.service", A),
    (f"0::/ecs/4e2b/{A}", A), (f"0::/docker/buildkit/{A}", A), (f"0::/actions_job/{A}", A),
    (f"0::/lxc.payload.node/docker/{A}", A), (f"0::/default/nerdctl-{A}.scope", A),
    (f"0::/kubepods/pod1/crio-{A}/supervisor", A), (f"0::/user.slice/crun-{A}.scope", A),
    # what engines have beside a container, not in it
    (f"0::/machine.slice/libpod-conmon-{A}.scope", None), (f"0::/kubepods.slice/crio-conmon-{A}.scope", None),
    (f"0::/conmon/{A[:12]}", None), ("0::/kubepods.slice/kubepods-pod1.slice", None),
    (f"0::/docker/{A}/docker/{B}", A),  # made inside A: the outermost counts
    (f"0::/docker/{C}/docker/{B}", B),  # C shares no GPU
    ("0::/default/plain-name", "plain-name"),
    ("0::/system.slice/runc-plain-name.scope", "plain-name"),
    ("4:cpu:/a:b/plain-name", "plain-name"),
    (f"0::/docker/{C}", None),
    (f"0::/docker/{A[:12]}", None),
    ("0::/system.slice/cgpud.service", None),
    ("0::/user.slice/plain-name-not", None),
    ("0::/", None), ("", None), ("nonsense", None), ("::::\n\n/", None),
])  # fmt: skip
def test_cgroups(text: str, found: str | None) -> None:
    assert named_in(text, KNOWN) == found


def fake_proc(base: Path, cgroup: str, pids: str = "99", space: str = "pid:[1]") -> Path:
    folder = base / "99"
    (folder / "ns").mkdir(parents=True)
    (folder / "cgroup").write_text(cgroup)
    (folder / "status").write_text(f"Name:\tx\nNSpid:\t{pids}\n")
    (folder / "ns" / "pid").write_text(space)
    return base


def test_the_cgroup_goes_before_the_namespace(tmp_path: Path) -> None:
    """``--pid container:A``: its namespace is A's, its cgroup its own."""
    proc = fake_proc(tmp_path, f"0::/docker/{B}", "99\t5")
    found = os.stat(proc / "99/ns/pid")
    shared = Space((found.st_dev, found.st_ino), 2)
    both = Owners({A: shared, B: shared})
    assert both.owner_of(99, proc) == B
    assert both.is_foreign(99, A, proc) and not both.is_foreign(99, B, proc)
    (proc / "99/cgroup").write_text("0::/")
    assert both.owner_of(99, proc) is None, "two containers have that namespace"
    assert not both.is_foreign(99, A, proc) and not both.is_foreign(99, B, proc)
    assert Owners({A: shared}).owner_of(99, proc) == A


def test_what_cannot_be_known_is_not_held_against_it(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, "0::/")
    host = Space((0, 0), 1)
    for owners in (Owners({A: None}), Owners({A: host}), Owners({})):
        assert owners.owner_of(99, proc) is None
        assert not owners.is_foreign(99, A, proc)
    assert not Owners({A: Space((0, 0), 2)}).is_foreign(98, A, proc), "it has ended"


class Nested:
    """A process in PID namespaces of its own, so many deep."""

    def __init__(self, depth: int) -> None:
        command = ["unshare", "--pid", "--fork", "--mount-proc", "--kill-child"] * depth + ["cat"]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.write(b"up\n")
        self.process.stdin.flush()
        self.process.stdout.readline()
        self.pids = [self.process.pid]  # each of them the parent of the next; the last is cat
        while children := Path(f"/proc/{self.pids[-1]}/task/{self.pids[-1]}/children").read_text().split():
            self.pids.append(int(children[0]))

    def end(self) -> None:
        self.process.communicate()


@pytest.fixture
def nested() -> Iterator[Nested]:
    if os.geteuid() != 0:
        pytest.skip("namespaces need root")
    one = Nested(2)
    yield one
    one.end()


def space(pid: int) -> Space:
    found, fd = space_of(pid)
    os.close(fd)
    return found


def test_pids_as_the_namespace_counts_them(nested: Nested) -> None:
    _, middle, inner = nested.pids
    outer, deeper, own = space(middle), space(inner), space(os.getpid())
    assert outer.depth == 2 and outer.pid(middle) == 1
    assert outer.pid(inner) == 2, "below it, in a namespace made there"
    assert deeper.depth == 3 and deeper.pid(inner) == 1
    assert deeper.pid(middle) is None and outer.pid(os.getpid()) is None
    assert own.depth == 1 and own.pid(inner) == inner, "--pid host"


def test_owners_by_namespace(nested: Nested) -> None:
    _, middle, inner = nested.pids
    owners = Owners({A: space(middle)})
    assert owners.owner_of(middle) == owners.owner_of(inner) == A
    assert owners.owner_of(os.getpid()) is None
    assert owners.is_foreign(os.getpid(), A) and not owners.is_foreign(inner, A)


def test_a_process_that_ends() -> None:
    gone = subprocess.Popen(["true"])
    gone.wait()
    with pytest.raises(OSError):
        space_of(gone.pid)
    assert space(os.getpid()).pid(gone.pid) is None


def test_translations_are_kept_for_a_moment(tmp_path: Path) -> None:
    proc = fake_proc(tmp_path, "0::/", "99\t5")
    found = os.stat(proc / "99/ns/pid")
    now = [100.0]
    translate = Translator(Space((found.st_dev, found.st_ino), 2), lambda: now[0], proc)
    assert translate(99) == 5 and translate(98) is None
    (proc / "99/status").write_text("NSpid:\t99\t6\n")
    now[0] += 0.9
    assert translate(99) == 5
    now[0] += 0.2
    assert translate(99) == 6
    assert Translator(None, lambda: 0.0)(99) is None, "its first process is not known yet"
