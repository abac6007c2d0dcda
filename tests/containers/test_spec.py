"""The edit of an OCI configuration: what it adds, what it leaves, and what it makes of hostile ones."""

import copy
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from cgpusched.containers import spec
from cgpusched.containers.spec import Edit, Mount
from cgpusched.errors import UserError

HOOK = "/var/lib/cgpud/bin/cgpu-runtime"
LIB = Mount("/var/lib/cgpud/lib", "/usr/local/cgpu/lib", executable=True)
SIM = Mount("/run/cgpud/sim", "/usr/local/cgpu/sim", writable=True)
VIEW = Mount("/run/cgpud/view/abc", "/run/cgpu")
EDIT = Edit((LIB, SIM, VIEW), "0,1", HOOK, "/run/cgpu", "/run/cgpud/view/abc")

DOCKER: dict[str, Any] = {
    "ociVersion": "1.0.2-dev",
    "process": {"user": {"uid": 0}, "args": ["sh"], "env": ["PATH=/bin", "ALIYUN_COM_GPU_MEM_DEV=15"], "cwd": "/"},
    "root": {"path": "/var/lib/docker/overlay2/x/merged"},
    "mounts": [{"destination": "/proc", "type": "proc", "source": "proc", "options": ["nosuid"]},
               {"destination": "/mnt", "type": "bind", "source": "/mnt", "options": ["rbind", "rprivate"]}],
    "hooks": {"prestart": [{"path": "/usr/bin/nvidia-container-runtime-hook", "args": ["x", "prestart"]}]},
    "linux": {"seccomp": {"syscalls": [{"names": ["personality"], "args": [
        {"index": 0, "value": 18446744073709551615, "op": "SCMP_CMP_EQ"}]}]}, "resources": {"memory": {"limit": -1}}},
    "x-unknown": {"keep": [1, None, True, 0.1, 1e30, "\u00fc\U0001f680\ud800\u0000"]},
}


def edited(change: Edit = EDIT, **more: Any) -> dict[str, Any]:
    return spec.edit({**copy.deepcopy(DOCKER), **more}, change)


def test_what_it_adds() -> None:
    made = edited()
    assert made["process"]["env"] == [*DOCKER["process"]["env"], "NVIDIA_VISIBLE_DEVICES=0,1"]
    assert made["mounts"] == [
        *DOCKER["mounts"],
        {"destination": "/usr/local/cgpu/lib", "type": "bind", "source": "/var/lib/cgpud/lib",
         "options": ["bind", "rprivate", "ro", "nosuid", "nodev"]},
        {"destination": "/usr/local/cgpu/sim", "type": "bind", "source": "/run/cgpud/sim",
         "options": ["bind", "rprivate", "rw", "nosuid", "nodev", "noexec"]},
        {"destination": "/run/cgpu", "type": "bind", "source": "/run/cgpud/view/abc",
         "options": ["bind", "rprivate", "ro", "nosuid", "nodev", "noexec"]},
    ]  # fmt: skip
    assert made["hooks"] == {**DOCKER["hooks"], "createRuntime": [{"path": HOOK, "args": ["cgpu-runtime", "hook"]}]}


def test_nothing_else_is_touched() -> None:
    before = copy.deepcopy(DOCKER)
    made = spec.edit(before, EDIT)
    assert before == DOCKER, "the input is the caller's"
    assert list(made) == list(DOCKER) and list(made["process"]) == list(DOCKER["process"])
    for key in ("ociVersion", "root", "linux", "x-unknown"):
        assert made[key] == DOCKER[key]
    assert {**made["process"], "env": None} == {**DOCKER["process"], "env": None}


def test_twice_is_once() -> None:
    once = edited()
    assert spec.edit(once, EDIT) == once
    assert spec.missing(once, EDIT.mounts) == []


def test_text_survives() -> None:
    text = json.dumps(DOCKER)
    assert json.loads(spec.write(spec.read(text.encode()))) == DOCKER
    assert b"18446744073709551615" in spec.write(spec.read(text.encode()))
    assert spec.write(spec.read('{"a":"\u00fc"}'.encode())) == b'{"a":"\\u00fc"}'
    assert spec.write(spec.read(b'{"n":123456789012345678901234567890,"f":0.1,"s":"\\ud800"}')) == (
        b'{"n":123456789012345678901234567890,"f":0.1,"s":"\\ud800"}')  # fmt: skip


def test_every_visible_devices_is_replaced_where_it_stands() -> None:
    name = "NVIDIA_VISIBLE_DEVICES"
    process = {"env": ["A=1", f"{name}=all", "B=2", f"{name}=9", f"{name}X=1"]}
    assert edited(process=process)["process"]["env"] == ["A=1", f"{name}=0,1", "B=2", f"{name}=0,1", f"{name}X=1"]


@pytest.mark.parametrize("destination", ["/run/cgpu", "/run/cgpu/", "//run//cgpu", "/run/x/../cgpu", "run/cgpu"])
def test_a_mount_where_ours_goes_is_replaced(destination: str) -> None:
    theirs = {"destination": destination, "type": "bind", "source": "/home/them", "options": ["rbind", "rw"]}
    after = {"destination": "/data", "type": "tmpfs", "source": "tmpfs"}
    made = edited(mounts=[theirs, after])
    assert made["mounts"][0] == after and len(made["mounts"]) == 4
    assert made["mounts"][-1]["source"] == "/run/cgpud/view/abc", "ours are last: nothing covers them"


@pytest.mark.parametrize(("source", "becomes"), [
    ("/run/cgpu", "/run/cgpud/view/abc"),
    ("/run/cgpu/", "/run/cgpud/view/abc"),
    ("/var/run/cgpu", "/run/cgpud/view/abc"),
    ("/run/../run/cgpu/0", "/run/cgpud/view/abc/0"),
])  # fmt: skip
def test_a_bind_of_the_nodes_tree_becomes_the_own_view(source: str, becomes: str) -> None:
    theirs = {"destination": "/mnt/gpus", "type": "bind", "source": source, "options": ["rbind", "rw", "rprivate"],
              "x": 1}
    assert edited(mounts=[theirs])["mounts"][0] == {**theirs, "source": becomes, "options": ["rbind", "rprivate", "ro"]}


@pytest.mark.parametrize("mount", [
    {"destination": "/mnt", "type": "bind", "source": "/run/cgpud-else", "options": ["rbind"]},
    {"destination": "/mnt", "type": "bind", "source": "/run/other", "options": ["rbind"]},
    {"destination": "/mnt", "type": "tmpfs", "source": "/run/cgpu"},
    {"destination": "/mnt"},
])  # fmt: skip
def test_other_mounts_stay(mount: dict[str, Any]) -> None:
    assert edited(mounts=[mount])["mounts"][0] == mount


@pytest.mark.parametrize(("source", "below"), [
    ("/run", "/mnt/cgpu"), ("/run/", "/mnt/cgpu"), ("/", "/mnt/run/cgpu"), ("/var/run", "/mnt/cgpu"),
    ("/run/../run", "/mnt/cgpu"), ("//", "/mnt/run/cgpu"),
])  # fmt: skip
def test_in_a_bind_of_a_folder_above_the_tree_the_own_view_lies_over_it(source: str, below: str) -> None:
    theirs = {"destination": "/mnt/", "type": "bind", "source": source, "options": ["rbind", "rw"]}
    made = edited(mounts=[theirs])
    assert made["mounts"][0] == theirs
    view = made["mounts"][1]
    assert (view["destination"], view["source"]) == (below, "/run/cgpud/view/abc")
    assert "ro" in view["options"]
    assert edited(**{key: made[key] for key in ("mounts", "hooks")})["mounts"] == made["mounts"], "twice is once"


def test_a_bind_above_the_tree_that_shows_none_of_it() -> None:
    above = {"destination": "/mnt", "type": "bind", "source": "/run", "options": ["rbind"]}
    other = {"destination": "/mnt/cgpu", "type": "bind", "source": "/data", "options": ["rbind"]}
    assert edited(mounts=[above, other])["mounts"][:2] == [above, other]
    here = {**above, "destination": "/run"}
    made = edited(mounts=[here])["mounts"]
    assert [mount["destination"] for mount in made].count("/run/cgpu") == 1
    assert made[0] == here


@pytest.mark.parametrize(("destination", "source", "refused"), [
    ("/run", "/run", True), ("/usr/local", "/x", True), ("/", "/x", True), ("/mnt", "/", True),
    ("/mnt", "/data", False), ("/run/cgpu", "/x", False), ("/mnt", "/run/cgpu", False),
])  # fmt: skip
def test_what_would_appear_on_the_node_is_refused(destination: str, source: str, refused: bool) -> None:
    for propagation in ("shared", "rshared", "rslave"):
        mounts = [{"destination": destination, "type": "bind", "source": source, "options": ["rbind", propagation]}]
        if refused and propagation != "rslave":
            with pytest.raises(UserError, match="with shared propagation at or above"):
                edited(mounts=mounts)
        else:
            edited(mounts=mounts)


def test_a_bind_by_its_options_alone() -> None:
    theirs = {"destination": "/m", "source": "/run/cgpu", "options": ["bind", "rw"]}
    assert edited(mounts=[theirs])["mounts"][0]["source"] == "/run/cgpud/view/abc"


def test_our_hook_comes_after_others_and_once() -> None:
    other = {"path": "/usr/bin/other", "timeout": 3}
    made = edited(hooks={"createRuntime": [other], "poststop": []})
    assert [hook["path"] for hook in made["hooks"]["createRuntime"]] == ["/usr/bin/other", HOOK]
    assert made["hooks"]["poststop"] == []
    already = {"createRuntime": [{"path": HOOK, "args": ["cgpu-runtime", "hook"], "timeout": 9}]}
    assert edited(hooks=already)["hooks"] == already


@pytest.mark.parametrize("empty", [
    {}, {"mounts": None, "hooks": None}, {"mounts": [], "hooks": {"createRuntime": None}},
])  # fmt: skip
def test_a_bare_configuration(empty: dict[str, Any]) -> None:
    made = spec.edit({"process": {}, **empty}, EDIT)
    assert made["process"]["env"] == ["NVIDIA_VISIBLE_DEVICES=0,1"]
    assert len(made["mounts"]) == 3 and len(made["hooks"]["createRuntime"]) == 1


def test_missing() -> None:
    other = [{**LIB.oci(), "source": "/elsewhere"}, SIM.oci()]
    assert spec.missing({"mounts": other}, EDIT.mounts) == [LIB, VIEW]
    assert spec.missing({}, EDIT.mounts) == list(EDIT.mounts)


@pytest.mark.parametrize(("path", "found"), [("/a/b", "/a/b"), ("rootfs", "/bundle/rootfs"), ("./x/", "/bundle/x")])
def test_root(path: str, found: str) -> None:
    assert spec.root({"root": {"path": path}}, "/bundle") == found


def test_library_folders() -> None:
    env = ["LD_LIBRARY_PATH=/old", "LD_LIBRARY_PATH=/usr/local/cuda/compat:rel::/a/:/a:/b\tc:$ORIGIN:/d//e"]
    assert spec.library_folders({"process": {"env": env}}) == ["/usr/local/cuda/compat", "/a", "/d/e"]
    many = "LD_LIBRARY_PATH=" + ":".join(f"/{n}" for n in range(1000))
    assert len(spec.library_folders({"process": {"env": [many]}})) == spec.FOLDERS_MAX
    assert spec.library_folders({}) == []


# Hostile ones


@pytest.mark.parametrize("text", [
    b"", b"{", b"[]", b"null", b"1", b'"x"', b"\xff{}", b'{"a": NaN}', b'{"a": Infinity}', b"[" * 100000,
    b'{"a":' * 50000, b'{"a": ' + b"9" * 5000 + b"}", '{"a":1}'.encode("utf-16"),
])  # fmt: skip
def test_text_that_is_no_configuration(text: bytes) -> None:
    with pytest.raises(UserError, match=r"^config\.json"):
        spec.read(text)


def test_a_number_that_json_cannot_say() -> None:
    with pytest.raises(UserError, match="cannot be written again"):
        spec.write(spec.read(b'{"a": 1e999}'))


@pytest.mark.parametrize(("change", "words"), [
    ({"process": None}, "process is null"),
    ({"process": []}, "process is a list"),
    ({"process": {"env": "A=1"}}, "process.env is a string"),
    ({"process": {"env": ["A=1", 2]}}, "process.env's entry is a number"),
    ({"process": {"env": {"A": "1"}}}, "process.env is an object"),
    ({"mounts": {}}, "mounts is an object"),
    ({"mounts": ["/proc"]}, "mounts' entry is a string"),
    ({"mounts": [{}]}, "destination is null"),
    ({"mounts": [{"destination": 1}]}, "destination is a number"),
    ({"mounts": [{"destination": "/x", "source": "/run/cgpu", "options": "bind"}]}, "options is a string"),
    ({"mounts": [{"destination": "/x", "source": "/run/cgpu", "options": [[]]}]}, "option is a list"),
    ({"hooks": []}, "hooks is a list"),
    ({"hooks": [1]}, "hooks is a list"),
    ({"hooks": {"createRuntime": {"path": "x"}}}, "createRuntime is an object"),
    ({"hooks": {"createRuntime": [True]}}, "entry is a boolean"),
])  # fmt: skip
def test_wrong_types_are_one_clear_line(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UserError, match=r"^config\.json: ") as caught:
        edited(**change)
    assert words in str(caught.value) and "\n" not in str(caught.value)


@pytest.mark.parametrize("root", [{}, {"root": None}, {"root": {}}, {"root": {"path": 3}}, {"root": "x"}])
def test_no_root(root: dict[str, Any]) -> None:
    with pytest.raises(UserError, match="root"):
        spec.root(root, "/bundle")


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.sampled_from(
        ["env", "destination", "source", "options", "type", "path", "args", "createRuntime", "x"]), inner, max_size=4),
    max_leaves=20)  # fmt: skip


@given(st.dictionaries(st.sampled_from(["process", "mounts", "hooks", "root", "linux", "y"]), JSON))
def test_whatever_comes_is_edited_or_refused(config: dict[str, Any]) -> None:
    before = copy.deepcopy(config)
    try:
        spec.library_folders(config)
        made = spec.edit(config, EDIT)
    except UserError:
        made = None
    assert config == before
    if made is not None:
        assert {key: made.get(key) for key in config if key not in ("process", "mounts", "hooks")} == {
            key: value for key, value in config.items() if key not in ("process", "mounts", "hooks")}  # fmt: skip
        assert spec.read(spec.write(made)) == made
        assert spec.edit(made, EDIT) == made
