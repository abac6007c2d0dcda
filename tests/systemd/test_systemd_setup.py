"""``cgpuctl setup systemd`` on a booted systemd, and its ``--undo``."""

import subprocess
from pathlib import Path

import pytest
from node import BIN
from nspawn import Machine, machine
from nspawn_host import CONFIG

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


@pytest.mark.parametrize("option", ["--config=/x", "--runtime=/x", "--pid-file=/x", "--no-default", "--gpus-hook",
                                    "--hook"])
def test_options_of_engines_are_refused(option: str) -> None:
    done = subprocess.run([BIN / "cgpuctl", "setup", "systemd", option, "--dry-run"], capture_output=True, text=True,
                          check=False, timeout=60)
    assert done.returncode == 1 and done.stderr.count("\n") == 1, done
