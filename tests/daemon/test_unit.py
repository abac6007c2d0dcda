"""The systemd unit: what systemd itself says of it, and what must not be in it. tests/systemd runs it."""

import shutil
import subprocess
from configparser import ConfigParser
from pathlib import Path

import pytest

from cgpusched.engines import systemd

EXPOSURE = 45
"""In tenths, as systemd-analyze counts: 4.4 is what the mount leaves open (docs/systemd.md)."""
UNIT = Path(__file__).resolve().parents[2] / "systemd" / "cgpud.service"
# Each gives the unit a mount namespace, and the tree that cgpud mounts stays inside it.
HIDES_THE_MOUNT = {
    "privatedevices", "privateipc", "privatemounts", "privatenetwork", "privatepids", "privatetmp", "privateusers",
    "mountapivfs", "bindreadonlypaths", "procsubset", "protectcontrolgroups", "protecthome",
    "protectkernellogs", "protectkernelmodules", "protectkerneltunables", "protectproc", "protectsystem", "mountflags",
    "readonlypaths", "readwritepaths", "inaccessiblepaths", "bindpaths", "temporaryfilesystem", "rootdirectory",
    "dynamicuser", "execpaths", "noexecpaths",
}  # fmt: skip


def read() -> ConfigParser:
    unit = ConfigParser(interpolation=None, strict=False)
    unit.read(UNIT)
    return unit


def test_ready_watchdog_and_restart() -> None:
    unit = read()
    service = unit["Service"]
    assert service["Type"] == "notify" and service["NotifyAccess"] == "main"
    assert service["Restart"] == "always" and unit["Unit"]["StartLimitIntervalSec"] == "0"
    assert int(service["WatchdogSec"]) > 0 and int(service["FileDescriptorStoreMax"]) >= 25 * 16 * 2 + 16
    assert int(service["LimitNOFILE"]) >= 25 * 512 * (2 + 16)
    assert {"docker.service", "containerd.service", "kubelet.service"} <= set(unit["Unit"]["Before"].split())


def test_nothing_hides_the_mount() -> None:
    assert not HIDES_THE_MOUNT & set(read()["Service"])


needs_analyze = pytest.mark.skipif(shutil.which("systemd-analyze") is None, reason="systemd-analyze is not installed")


@pytest.fixture
def unit(tmp_path: Path) -> Path:
    """The unit with a command that exists here: verify looks for it."""
    copy = tmp_path / "cgpud.service"
    copy.write_text(systemd.unit_text(shutil.which("true") or "/bin/true"))
    return copy


@needs_analyze
def test_systemd_understands_every_line(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(unit)], capture_output=True, text=True,
                          timeout=60, check=False)  # fmt: skip
    assert (done.returncode, done.stderr) == (0, "")


@needs_analyze
def test_hardening_is_rated_ok(unit: Path) -> None:
    done = subprocess.run(["systemd-analyze", "security", "--offline=true", f"--threshold={EXPOSURE}", "--no-pager",
                           str(unit)], capture_output=True, text=True, timeout=60, check=False)  # fmt: skip
    assert done.returncode == 0, done.stdout
