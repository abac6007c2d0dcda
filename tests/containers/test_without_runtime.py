"""Containers that come by a hook alone (podman's precreate, CDI): what is edited before, and what is left to mount."""

import copy
from typing import Any

import pytest

from cgpusched.containers import spec, wire
from cgpusched.containers.spec import Mount
from cgpusched.errors import UserError

HOOK = {"path": "/bin/cgpu-runtime", "args": ["cgpu-runtime", "hook"]}
OTHER = {"path": "/other"}


def config(**more: Any) -> spec.Spec:
    return {"process": {"env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=all"], "cwd": "/"}, "x": [1], **more}


def test_the_hook_comes_last_and_once() -> None:
    before = config(hooks={"createRuntime": [OTHER], "poststop": [OTHER]})
    kept = copy.deepcopy(before)
    once = spec.hooked(before, HOOK["path"], "0,1")
    assert before == kept
    assert once["hooks"] == {"createRuntime": [OTHER, HOOK], "poststop": [OTHER]}
    assert once["process"] == {"env": ["PATH=/bin", "NVIDIA_VISIBLE_DEVICES=0,1"], "cwd": "/"}
    assert spec.hooked(once, HOOK["path"], "0,1") == once


def test_where_the_gpus_are_not_known_their_variable_stays() -> None:
    assert spec.hooked(config(), HOOK["path"])["process"] == config()["process"]


@pytest.mark.parametrize("bad", [{}, {"process": 1}, {"process": {}, "hooks": []},
                                 {"process": {}, "hooks": {"createRuntime": {}}}, {"process": {"env": "A=1"}}])
def test_what_is_no_configuration_is_refused(bad: spec.Spec) -> None:
    with pytest.raises(UserError):
        spec.hooked(bad, HOOK["path"])


def test_the_nodes_tree_bound_by_hand_gets_the_own_view_over_it() -> None:
    mounts = [{"destination": "/a", "source": "/run/cgpu", "type": "bind"},
              {"destination": "/b/", "source": "/var/run/cgpu/0", "options": ["rbind", "rw"]},
              {"destination": "/c", "source": "/run/cgpux", "type": "bind"},
              {"destination": "/d", "source": "tmpfs", "type": "tmpfs"},
              {"destination": "/e", "source": "/run", "type": "bind"},
              {"destination": "/f", "source": "/run", "type": "bind", "options": ["bind"]}]  # no mounts below
    assert spec.views_by_hand(config(mounts=mounts), "/run/cgpu", "/view/id") == [
        Mount("/view/id", "/a"), Mount("/view/id/0", "/b"), Mount("/view/id", "/e/cgpu")]
    assert spec.views_by_hand(config(), "/run/cgpu", "/view/id") == []


def test_a_precreate_has_no_payload() -> None:
    head = wire.HEAD.pack(wire.MAGIC, wire.VERSION, wire.Kind.PRECREATE, 0)
    assert wire.parse(head) == wire.Question(wire.Kind.PRECREATE)
    with pytest.raises(wire.ProtocolError, match="a precreate with 1 bytes"):
        wire.parse(head + b"x")


def test_a_line_for_the_hook_is_one_line() -> None:
    assert wire.lines(("root", "/a b"), ("bind", "/ä", "/x", "ro")) == "root\t/a b\nbind\t/ä\t/x\tro\n"
    for field in ("/a\tb", "/a\nbind", "/a\0", "/\udcff", "/a\x7f", "/a\u2028"):
        with pytest.raises(UserError, match="a path without control characters is allowed"):
            wire.lines(("root", "/"), ("bind", "/x", field, "ro"))
    with pytest.raises(UserError, match="65536 are allowed"):
        wire.lines(*(("bind", "/x", "/" + "y" * 1000, "ro") for _ in range(70)))
