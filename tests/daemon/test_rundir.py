"""The runtime folder's lock and what a predecessor left in it."""

import os
import socket
import stat
from pathlib import Path

import pytest

from cgpusched.daemon import rundir
from cgpusched.errors import UserError


def test_the_second_is_refused_and_told_who_is_first(tmp_path: Path) -> None:
    runtime = tmp_path / "a" / "run"
    with rundir.own(runtime):
        assert stat.S_IMODE(runtime.stat().st_mode) == 0o755
        with pytest.raises(rundir.AlreadyRunning, match=rf"another cgpud \(pid {os.getpid()}\) already serves") as info:
            with rundir.own(runtime):
                pass
        assert info.value.exit_code == 3
    with rundir.own(runtime):
        pass


def test_a_folder_that_cannot_be_used(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UserError, match="cannot use the runtime folder"):
        with rundir.own(tmp_path / "file"):
            pass
    (tmp_path / "cgpud.lock").symlink_to("/etc/passwd")
    with pytest.raises(UserError, match="cannot use the runtime folder"):
        with rundir.own(tmp_path):
            pass


def test_left_overs_go_and_links_are_not_followed(tmp_path: Path) -> None:
    keep = tmp_path / "keep"
    (keep / "deep").mkdir(parents=True)
    inst = tmp_path / "run" / "inst"
    (inst / "one").mkdir(parents=True)
    (inst / "one" / "limits").write_text("x")
    (inst / "two").symlink_to(keep)
    (inst / "file").write_text("x")
    assert rundir.clear_instances(tmp_path / "run") == 3
    assert list(inst.iterdir()) == [] and (keep / "deep").is_dir()
    assert stat.S_IMODE(inst.stat().st_mode) == 0o711


def test_an_instances_folder_that_leads_elsewhere_is_refused(tmp_path: Path) -> None:
    (tmp_path / "inst").symlink_to("/tmp")
    with pytest.raises(UserError, match="is in the way"):
        rundir.clear_instances(tmp_path)


def test_only_sockets_are_unlinked(tmp_path: Path) -> None:
    path = tmp_path / "sock"
    rundir.unlink_socket(path)
    with socket.socket(socket.AF_UNIX) as sock:
        sock.bind(str(path))
    rundir.unlink_socket(path)
    assert not path.exists()
    path.write_text("")
    with pytest.raises(FileExistsError):
        rundir.unlink_socket(path)
