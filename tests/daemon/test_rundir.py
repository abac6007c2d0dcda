"""The runtime folder's lock and what a predecessor left in it."""

import os
import socket
import stat
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest

from cgpusched import files
from cgpusched.daemon import devices, rundir
from cgpusched.driver.find import Driver, packaged
from cgpusched.driver.proxy import install_proxies
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


@pytest.mark.skipif(os.getuid() != 0, reason="only root can give files away")
def test_a_folder_of_somebody_else_is_refused(tmp_path: Path) -> None:
    os.chown(tmp_path, 4711, 4711)
    with pytest.raises(UserError, match="belongs to uid 4711, who could replace what cgpud writes there"):
        with rundir.own(tmp_path):
            pass
    with pytest.raises(UserError, match="belongs to uid 4711"):
        install_proxies(Driver(packaged("sim/libcuda.so.1"), packaged("sim/libnvidia-ml.so.1")), tmp_path)
    os.chown(tmp_path, 0, 0)
    (tmp_path / "inst").mkdir()
    os.chown(tmp_path / "inst", 4711, 4711)
    with pytest.raises(UserError, match="belongs to uid 4711"):
        rundir.clear_instances(tmp_path)


@pytest.mark.parametrize("umask", [0, 0o077, 0o777])
def test_modes_do_not_depend_on_the_umask(tmp_path: Path, umask: int) -> None:
    runtime = tmp_path / "run"
    before = os.umask(umask)
    try:
        with rundir.own(runtime):
            rundir.clear_instances(runtime)
            devices.write_simulation(runtime, devices.simulated_gpus([1 << 30]))
    finally:
        os.umask(before)
    modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in (runtime, *runtime.rglob("*"))}
    assert modes.pop("cgpud.lock") & 0o133 == 0
    assert modes == {"run": 0o755, "inst": 0o711, "sim": 0o1777, "sim.conf": 0o644}


def test_a_full_runtime_folder_is_one_line(full: Path) -> None:
    with pytest.raises(UserError, match="cannot use the runtime folder .*: No space left on device"):
        with rundir.own(full):
            pass
    with pytest.raises(UserError, match="cannot write the simulated device's .*: No space left on device"):
        devices.write_simulation(full, devices.simulated_gpus([1 << 30]))


@pytest.fixture
def full(tmp_path: Path) -> Iterator[Path]:
    """A file system of one page, and that is taken."""
    done = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=4k", "full", tmp_path], capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs to mount")
    (tmp_path / "sim").mkdir()
    (tmp_path / "fill").write_bytes(bytes(4096))
    yield tmp_path
    subprocess.run(["umount", tmp_path], check=True)


def test_a_planted_link_is_not_followed(tmp_path: Path) -> None:
    """Everybody may make names in the simulated device's folder, also the one that we are going to use."""
    precious = tmp_path / "precious"
    precious.write_text("mine")
    gpus = devices.simulated_gpus([1 << 30])
    devices.write_simulation(tmp_path, gpus)
    (tmp_path / "sim" / f".sim.conf.{os.getpid()}").symlink_to(precious)
    devices.write_simulation(tmp_path, gpus)
    assert precious.read_text() == "mine" and stat.S_IMODE(precious.stat().st_mode) != 0o1777
    assert [path.name for path in (tmp_path / "sim").iterdir()] == ["sim.conf"]


@pytest.mark.parametrize("what", ["sim", "sim/sim.conf"])
def test_something_in_the_simulated_devices_place_is_one_line(tmp_path: Path, what: str) -> None:
    if what == "sim":
        (tmp_path / "sim").write_text("mine")
    else:
        (tmp_path / what).mkdir(parents=True)
    with pytest.raises(UserError, match="cannot write the simulated device's"):
        devices.write_simulation(tmp_path, devices.simulated_gpus([1 << 30]))


def test_replace_leaves_the_old_file_when_it_fails(full: Path) -> None:
    old = full / "old"
    old.write_text("")
    with pytest.raises(OSError, match="No space left"):
        files.replace(old, b"x" * 5000, 0o644)
    assert old.read_text() == "" and {path.name for path in full.iterdir()} == {"old", "fill", "sim"}


def test_libraries_that_could_not_be_loaded_are_not_installed(tmp_path: Path) -> None:
    command = ["mount", "-t", "tmpfs", "-o", "noexec", "noexec", tmp_path]
    done = subprocess.run(command, capture_output=True, check=False)
    if done.returncode:
        pytest.skip("needs to mount")
    try:
        with pytest.raises(UserError, match="mounted noexec"):
            install_proxies(Driver(packaged("sim/libcuda.so.1"), packaged("sim/libnvidia-ml.so.1")), tmp_path / "lib")
    finally:
        subprocess.run(["umount", tmp_path], check=True)
