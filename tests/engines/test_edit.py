"""What setup makes of the engines' files: nothing of anybody's lost, nothing done twice, all of it undone."""

import json
import tomllib
from pathlib import Path
from typing import Any

import pytest

from cgpusched.engines import cdi, containerd, docker, podman, podman_hook
from cgpusched.errors import UserError

BINARY = "/var/lib/cgpud/bin/cgpu-runtime"
OURS = {"path": BINARY}
NVIDIA = {"path": "nvidia-container-runtime", "runtimeArgs": []}

DOCKER = [
    "",
    "{}",
    '{"log-driver": "journald", "registry-mirrors": ["https://ä.example"], "max-concurrent-downloads": 10}',
    json.dumps({"runtimes": {"nvidia": NVIDIA, "kata": {"path": "/k"}}, "default-runtime": "nvidia"}, indent=2),
    json.dumps({"default-runtime": "runc", "live-restore": True}),
]


@pytest.mark.parametrize("text", DOCKER)
def test_docker_gets_the_runtime_under_both_names_and_as_default(text: str) -> None:
    old = json.loads(text or "{}")
    new = json.loads(docker.configure(text, BINARY).text)
    assert new.pop("default-runtime") == "cgpu"
    runtimes = new.pop("runtimes")
    assert (runtimes.pop("cgpu"), runtimes.pop("nvidia")) == (OURS, OURS)
    assert runtimes == {k: v for k, v in old.pop("runtimes", {}).items() if k != "nvidia"}
    old.pop("default-runtime", None)
    assert new == old


@pytest.mark.parametrize("text", DOCKER)
def test_docker_twice_is_once_and_undone_is_as_before(text: str) -> None:
    once = docker.configure(text, BINARY)
    twice = docker.configure(once.text, BINARY)
    assert twice.text == once.text
    assert twice.before == {}
    undone = docker.restore(once.text, BINARY, once.before)
    assert json.loads(undone.text or "{}") == json.loads(text or "{}")


@pytest.mark.parametrize("text", DOCKER)
def test_a_docker_that_runs_is_told_its_default_by_name(text: str) -> None:
    once = docker.configure(text, BINARY)
    assert docker.had_ours_as_default(once.text) and not docker.had_ours_as_default(text)
    undone = docker.restore(once.text, BINARY, once.before)
    named = docker.with_default(undone)
    old = json.loads(text or "{}")
    assert json.loads(named.text) == {"default-runtime": "runc", **old}
    assert bool(named.notes) is ("default-runtime" not in old)


def test_docker_keeps_what_was_changed_after_us() -> None:
    once = docker.configure("{}", BINARY)
    data = json.loads(once.text)
    data["runtimes"]["nvidia"] = NVIDIA
    data["default-runtime"] = "crun"
    undone = json.loads(docker.restore(json.dumps(data), BINARY, once.before).text)
    assert undone == {"runtimes": {"nvidia": NVIDIA}, "default-runtime": "crun"}


def test_docker_keeps_a_default_that_goes_elsewhere() -> None:
    edit = docker.configure('{"default-runtime": "kata"}', BINARY)
    assert json.loads(edit.text)["default-runtime"] == "kata"
    assert edit.notes == ["default-runtime stays 'kata': containers come to us by --runtime=cgpu only"]
    assert "default-runtime" not in json.loads(docker.configure("{}", BINARY, default=False).text)


def test_docker_says_where_nvidia_led() -> None:
    edit = docker.configure('{"runtimes": {"nvidia": {"path": "/opt/other"}}}', BINARY)
    assert edit.notes == ["the runtime `nvidia` was /opt/other: name it in `runtimes` of cgpud's configuration, before "
                          "the others"]


@pytest.mark.parametrize("text", ["{", "[]", '{"runtimes": []}', "null", '"x"'])
def test_what_is_no_configuration_of_dockers_is_refused(text: str) -> None:
    with pytest.raises(UserError):
        docker.configure(text, BINARY)


V2 = """# kept
version = 2
[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    sandbox_image = "registry.k8s.io/pause:3.6" # this, too
    [plugins."io.containerd.grpc.v1.cri".containerd]
      snapshotter = "overlayfs"
      default_runtime_name = "runc"   # and this
      [plugins."io.containerd.grpc.v1.cri".containerd.runtimes.runc]
        runtime_type = "io.containerd.runc.v2"
[metrics]
  address = ""
"""
V3 = V2.replace("version = 2", "version = 3").replace("io.containerd.grpc.v1.cri", "io.containerd.cri.v1.runtime")
# As Debian 12 has it, and as containerd 2 prints its own defaults
DEBIAN = """version = 2

[plugins]
  [plugins."io.containerd.grpc.v1.cri"]
    [plugins."io.containerd.grpc.v1.cri".cni]
      bin_dir = "/usr/lib/cni"
      conf_dir = "/etc/cni/net.d"
  [plugins."io.containerd.internal.v1.opt"]
    path = "/var/lib/containerd/opt"
"""
SECOND = """version = 3
disabled_plugins = []
[plugins]
  [plugins.'io.containerd.cri.v1.runtime']
    enable_cdi = true
    [plugins.'io.containerd.cri.v1.runtime'.containerd]
      default_runtime_name = 'runc'
      [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes]
        [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc]
          runtime_type = 'io.containerd.runc.v2'
          pod_annotations = ['io.katacontainers.*']
          cni_max_conf_num = 0
          sandboxer = 'podsandbox'
          [plugins.'io.containerd.cri.v1.runtime'.containerd.runtimes.runc.options]
            BinaryName = ''
            SystemdCgroup = true
"""
NO_DEFAULT = V2.replace('      default_runtime_name = "runc"   # and this\n', "")
BARE = "version = 2\n[debug]\n  level = \"info\""
CONTAINERD = ["", BARE, V2, V3, NO_DEFAULT, DEBIAN, SECOND,
              "version = 2\nplugins.'io.containerd.grpc.v1.cri'.sandbox_image = 'x'\n"]


def cri(text: str) -> dict[str, Any]:
    plugins = tomllib.loads(text)["plugins"]
    found: dict[str, Any] = next(one["containerd"] for one in plugins.values() if "containerd" in one)
    return found


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("text", CONTAINERD[:7])
def test_containerd_gets_a_handler(text: str, default: bool) -> None:
    edit = containerd.configure(text, BINARY, default)
    new = cri(edit.text)
    assert new["runtimes"]["cgpu"]["options"]["BinaryName"] == BINARY
    assert new["runtimes"]["cgpu"]["runtime_type"] == "io.containerd.runc.v2"
    if default:
        assert new["default_runtime_name"] == "cgpu"
    changed = [line for line in text.splitlines() if line not in edit.text.splitlines()]
    assert changed == [line for line in text.splitlines() if default and "default_runtime_name" in line]


@pytest.mark.parametrize("default", [False, True])
@pytest.mark.parametrize("text", CONTAINERD[:7])
def test_containerd_twice_is_once_and_undone_says_the_same(text: str, default: bool) -> None:
    once = containerd.configure(text, BINARY, default)
    twice = containerd.configure(once.text, BINARY, default)
    assert twice.text == once.text
    assert containerd.restore(once.text, BINARY, once.before | twice.before).text.count("cgpu") == 0
    undone = containerd.restore(once.text, BINARY, once.before).text
    assert tomllib.loads(undone) == (tomllib.loads(text) if text else {})
    assert containerd.restore(text, BINARY, {}).text == text


def test_our_handler_takes_over_what_the_node_needs_of_runcs() -> None:
    made = cri(containerd.configure(SECOND, BINARY).text)["runtimes"]
    assert made["cgpu"] == {**made["runc"], "options": {"BinaryName": BINARY, "SystemdCgroup": True}}
    assert made["cgpu"]["pod_annotations"] == ["io.katacontainers.*"]
    nvidia = SECOND.replace("runtimes.runc", "runtimes.nvidia").replace("BinaryName = ''", "BinaryName = '/nvidia'")
    assert cri(containerd.configure(nvidia, BINARY).text)["runtimes"]["cgpu"]["options"]["SystemdCgroup"] is True
    other = SECOND.replace("io.containerd.runc.v2", "io.containerd.kata.v2")
    assert cri(containerd.configure(other, BINARY).text)["runtimes"]["cgpu"] == {
        "runtime_type": "io.containerd.runc.v2", "options": {"BinaryName": BINARY}}


@pytest.mark.parametrize("name", ["cri", "io.containerd.grpc.v1.cri"])
def test_containerd_without_its_cri_plugin(name: str) -> None:
    edit = containerd.configure(f'version = 2\ndisabled_plugins = ["{name}"]\n', BINARY)
    assert edit.notes == [f"`disabled_plugins` names {name}: without it there are no handlers, and containers come to "
                          f"us only by `ctr run --runc-binary {BINARY}`"]
    assert containerd.configure("version = 2\ndisabled_plugins = []\n", BINARY).notes == []


def test_containerd_where_the_tables_are_written_otherwise_is_left_to_the_administrator() -> None:
    text = 'version = 2\nplugins = {"io.containerd.grpc.v1.cri" = {sandbox_image = "x"}}\n'
    with pytest.raises(UserError, match="put this in by hand:\n# begin"):
        containerd.configure(text, BINARY)


@pytest.mark.parametrize(("text", "why"), [
    ("root = '/x'", "version = 1: only 2 and 3 are known"),
    ("version = 4", "version = 4"),
    ("version = ", "is not TOML"),
    ('version = 2\n[plugins."io.containerd.grpc.v1.cri".containerd.runtimes.cgpu]\n', "a runtime 'cgpu' of its own"),
    ("version = 2\nplugins = 3", "`plugins` is no table"),
])
def test_what_containerd_is_refused_for(text: str, why: str) -> None:
    with pytest.raises(UserError, match=why):
        containerd.configure(text, BINARY)


def test_podman_gets_a_file_of_its_own() -> None:
    edit = podman.configure("whatever was there", BINARY)
    engine = tomllib.loads(edit.text)["engine"]
    assert engine["runtime"] == "cgpu"
    assert engine["runtimes"] == {"cgpu": [BINARY]}
    assert "cgpu" in engine["runtime_supports_json"]
    assert "runtime" not in tomllib.loads(podman.configure("", BINARY, default=False).text)["engine"]
    assert podman.restore(edit.text, BINARY, {}).text == ""


def test_cdi_names_each_gpu_by_index_and_uuid_and_all_of_them() -> None:
    made = cdi.specification([(0, "GPU-0"), (3, "GPU-3")], BINARY, {3: ["/dev/nvidia3", "/dev/nvidiactl"]})
    devices = {one["name"]: one["containerEdits"] for one in made["devices"]}
    assert list(devices) == ["0", "GPU-0", "3", "GPU-3", "all"]
    assert devices["0"] == {"env": ["CGPU_CDI_DEVICE_0=1"]}
    assert devices["all"] == {"env": ["CGPU_CDI_DEVICE_0=1", "CGPU_CDI_DEVICE_3=1"],
                              "deviceNodes": [{"path": "/dev/nvidia3"}, {"path": "/dev/nvidiactl"}]}
    assert made["containerEdits"]["hooks"] == [{"hookName": "createRuntime", "path": BINARY,
                                                "args": ["cgpu-runtime", "hook"]}]
    assert (made["cdiVersion"], made["kind"]) == ("0.5.0", "cgpu.local/gpu")


def test_cdi_names_the_device_files_that_are_there(tmp_path: Path) -> None:
    for name in ("nvidia0", "nvidia2", "nvidiactl", "nvidia-uvm", "null"):
        (tmp_path / name).touch()
    shared = [f"{tmp_path}/nvidiactl", f"{tmp_path}/nvidia-uvm"]
    assert cdi.device_files([0, 1, 2], tmp_path) == {0: [f"{tmp_path}/nvidia0", *shared],
                                                     2: [f"{tmp_path}/nvidia2", *shared]}
    assert cdi.device_files([5], tmp_path) == {}


def test_podmans_hook_is_one_file() -> None:
    edit = podman_hook.configure("", BINARY)
    assert json.loads(edit.text) == {
        "version": "1.0.0", "hook": {"path": BINARY, "args": ["cgpu-runtime", "precreate"]}, "when": {"always": True},
        "stages": ["precreate"],
    }  # fmt: skip
    assert podman_hook.configure(edit.text, BINARY).text == edit.text
    assert podman_hook.restore(edit.text, BINARY, {}).text == ""
