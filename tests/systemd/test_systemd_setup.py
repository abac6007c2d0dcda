"""``cgpuctl setup systemd`` on a booted systemd, and its ``--undo``."""

import fcntl
import subprocess
from pathlib import Path

import pytest
from node import BIN
from nspawn import Machine, machine
from nspawn_host import CONFIG

from cgpusched import config
from cgpusched.engines import systemd
from cgpusched.errors import UserError

pytestmark = pytest.mark.timeout(180)
UNIT = str(systemd.UNIT)


def files(guest: Machine) -> set[str]:
    """All that may be ours: in /etc, in /var, and what has our name in /run."""
    found = guest("sh", "-c", "find /etc /var -xdev; find /run -xdev -not -path '/run/systemd/*' -name '*cgpu*'")
    return set(found.stdout.splitlines())


def lines(guest: Machine, *words: str) -> list[str]:
    return guest("cgpuctl", "setup", "systemd", *words).stdout.splitlines()


def test_set_up_twice_and_undone(tmp_path: Path) -> None:
    with machine(tmp_path) as guest:
        guest.path(CONFIG).parent.mkdir()
        guest.path(CONFIG).write_text('simulate = "1x24GiB"\n')
        before = files(guest)
        shown = lines(guest, "--dry-run")
        assert "+WantedBy=multi-user.target" in shown and files(guest) == before

        assert lines(guest) == [f"{UNIT}: written", "cgpud runs, and starts with the node"]
        assert guest("systemctl", "is-enabled", "cgpud").stdout == "enabled\n"
        assert guest("systemctl", "show", "--value", "--property=NeedDaemonReload", "cgpud").stdout == "no\n"
        assert lines(guest)[0] == f"{UNIT}: nothing to change"

        guest("cgpuctl", "create", "kept", "--mem", "1GiB")
        assert lines(guest, "--undo") == [
            f"{UNIT}: removed",
            "/run/cgpud and /var/lib/cgpud/lib stay: there are instances (1); once more when they have gone"]
        assert guest("systemctl", "show", "--value", "--property=LoadState", "cgpud").stdout == "not-found\n"
        assert not guest.path("/run/cgpu").exists()

        lines(guest)
        assert "kept" in guest("cgpuctl", "list").stdout
        guest("cgpuctl", "destroy", "kept")
        guest.path("/var/lib/cgpud/setup").mkdir()
        guest.path("/var/lib/cgpud/setup/docker.json").write_text("{}")
        would = lines(guest, "--undo", "--dry-run")
        assert [f"{folder}: would be removed" for folder in ("/run/cgpud", "/var/lib/cgpud/lib")] == would[-3:-1]
        assert f"-{systemd.MARK}" in would and guest("systemctl", "is-active", "cgpud").stdout == "active\n"
        assert "/var/lib/cgpud/bin stays: docker" in lines(guest, "--undo")[-1]
        assert guest.path("/var/lib/cgpud/bin/cgpu-runtime").exists()
        guest.path("/var/lib/cgpud/setup/docker.json").unlink()
        assert lines(guest, "--undo") == [
            f"{UNIT}: nothing to change", "/var/lib/cgpud/bin: removed", "/var/lib/cgpud/setup: removed"]
        assert files(guest) == before
        assert lines(guest, "--undo") == [f"{UNIT}: nothing to change"]
        assert guest("systemctl", "--failed", "--plain", "--no-legend").stdout == ""


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A systemctl that notes how it is called, on a node where systemd does not run; what it noted."""
    noted = tmp_path / "noted"
    (tmp_path / "systemctl").write_text(f'#!/bin/sh\necho "$@" >>{noted}\n')
    (tmp_path / "systemctl").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{BIN}:/usr/bin:/bin")
    monkeypatch.setattr("sys.argv", [str(BIN / "cgpuctl")])
    monkeypatch.setattr(systemd, "BOOTED", tmp_path / "none")
    return noted


def test_before_the_node_boots_systemd(offline: Path, tmp_path: Path) -> None:
    """As in an image that is being built."""
    unit = tmp_path / "etc/cgpud.service"
    assert systemd.run(unit)[0] == f"{unit}: written"
    assert f"ExecStart={BIN}/cgpud\n" in unit.read_text() and systemd.PROGRAM not in unit.read_text()
    assert offline.read_text() == "enable cgpud.service\n"


def test_a_unit_of_somebody_elses_stays(offline: Path, tmp_path: Path) -> None:
    unit = tmp_path / "cgpud.service"
    unit.write_text("[Service]\n")
    for undo in (False, True):
        with pytest.raises(UserError, match="is not ours"):
            systemd.run(unit, undo=undo)
    assert unit.read_text() == "[Service]\n" and not offline.exists()


def test_what_systemctl_refuses_is_said(offline: Path, tmp_path: Path) -> None:
    (tmp_path / "systemctl").write_text("#!/bin/sh\necho Access denied >&2\nexit 4\n")
    with pytest.raises(UserError, match="systemctl enable cgpud.service: Access denied"):
        systemd.run(tmp_path / "cgpud.service")


def test_a_path_that_means_something_in_a_unit_is_refused(
    offline: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    odd = tmp_path / "50% more"
    odd.mkdir()
    (odd / "cgpud").symlink_to(BIN / "cgpud")
    monkeypatch.setattr("sys.argv", [str(odd / "cgpuctl")])
    with pytest.raises(UserError, match="a unit cannot name such a path"):
        systemd.run(tmp_path / "cgpud.service")
    assert not (tmp_path / "cgpud.service").exists()


@pytest.fixture
def left(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> config.Config:
    """Folders as a daemon left them, and all else in a place of its own."""
    found = config.Config(mount=tmp_path / "tree", runtime_dir=tmp_path / "run", lib_dir=tmp_path / "var/lib")
    for folder in (found.mount, found.runtime_dir / "view", found.lib_dir, tmp_path / "var/bin", tmp_path / "cdi"):
        folder.mkdir(parents=True)
    (found.runtime_dir / "cgpud.lock").touch()
    monkeypatch.setattr(config, "Config", lambda: found)
    monkeypatch.setattr(config, "load", lambda *_: found)
    monkeypatch.setattr(systemd, "BINARY", tmp_path / "var/bin/cgpu-runtime")
    monkeypatch.setattr(systemd, "KEPT", tmp_path / "var/setup")
    monkeypatch.setattr(systemd, "CDI", tmp_path / "cdi/cgpu.json")
    return found


@pytest.mark.parametrize("where", ["run/view", "tree"])
def test_what_is_still_mounted_is_not_walked_into(
    offline: Path, left: config.Config, tmp_path: Path, where: str
) -> None:
    place = tmp_path / where
    done = subprocess.run(["mount", "-t", "tmpfs", "cgpu-test", place], capture_output=True, text=True, check=False)
    if done.returncode:
        pytest.skip(f"nothing can be mounted here: {done.stderr.strip()}")
    try:
        (place / "kept").touch()
        said = systemd.run(tmp_path / "cgpud.service", undo=True)[-1]
        assert f"stay: {place} is still mounted" in said and (place / "kept").exists() and left.lib_dir.exists()
    finally:
        subprocess.run(["umount", place], check=True)
    systemd.run(tmp_path / "cgpud.service", undo=True)
    assert not left.runtime_dir.exists() and not left.lib_dir.parent.exists()


def test_undo_says_beforehand_what_would_go(offline: Path, left: config.Config, tmp_path: Path) -> None:
    folders = (left.runtime_dir, left.lib_dir, tmp_path / "var/bin")
    assert systemd.run(tmp_path / "cgpud.service", undo=True, dry_run=True)[1:] == [
        f"{folder}: would be removed" for folder in folders]
    assert all(folder.is_dir() for folder in folders)


def test_a_cdi_specification_calls_the_runtime(offline: Path, left: config.Config, tmp_path: Path) -> None:
    systemd.CDI.touch()
    said = systemd.run(tmp_path / "cgpud.service", undo=True)[-1]
    assert f"stays: {systemd.CDI} calls what is there" in said and systemd.BINARY.parent.is_dir()
    assert not left.lib_dir.exists()


def test_a_cgpud_that_systemd_did_not_start_is_to_end_first(
    offline: Path, left: config.Config, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(systemd, "BOOTED", tmp_path)
    (tmp_path / "systemctl").write_text('#!/bin/sh\n[ "$1" != is-active ]\n')
    unit = tmp_path / "cgpud.service"
    with open(left.runtime_dir / "cgpud.lock") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(UserError, match="systemd did not start runs: end it first"):
            systemd.run(unit)
        assert not unit.exists()
    assert systemd.run(unit) == [f"{unit}: written", "cgpud runs, and starts with the node"]


@pytest.mark.parametrize("option", ["--config=/x", "--runtime=/x", "--pid-file=/x", "--no-default", "--gpus-hook",
                                    "--hook"])
def test_options_of_engines_are_refused(option: str) -> None:
    done = subprocess.run([BIN / "cgpuctl", "setup", "systemd", option, "--dry-run"], capture_output=True, text=True,
                          check=False, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done
