"""What /proc says of a process's PID namespace."""

import os
import shutil
import subprocess
from pathlib import Path

import pytest
from node import wait_until

from cgpusched.daemon.procs import in_first_namespace, is_beside_us


def test_who_counts_processes_as_we_do(tmp_path: Path) -> None:
    unshare = [str(shutil.which("unshare")), "--pid", "--fork", "--kill-child"]
    if unshare[0] == "None" or subprocess.run([*unshare, "true"], capture_output=True, check=False).returncode:
        pytest.skip("cannot make a PID namespace here")
    with subprocess.Popen([*unshare, "cat"], stdin=subprocess.PIPE) as outer:
        children = Path(f"/proc/{outer.pid}/task/{outer.pid}/children")
        (inner,) = wait_until(lambda: children.read_text().split(), "the child")
        assert is_beside_us(os.getpid()) and is_beside_us(outer.pid)
        assert not is_beside_us(int(inner))
        outer.communicate()
    assert not is_beside_us(outer.pid), "it has ended"


@pytest.mark.parametrize(("link", "first"), [("pid:[4026531836]", True), ("pid:[4026532001]", False)])
def test_the_first_namespace(link: str, first: bool, tmp_path: Path) -> None:
    (tmp_path / "self/ns").mkdir(parents=True)
    (tmp_path / "self/ns/pid").symlink_to(link)
    assert in_first_namespace(tmp_path) is first
