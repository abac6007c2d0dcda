"""The unit in a booted systemd: what a kill, a restart, a hang, a reload, a stop and a crash loop do to containers."""

from __future__ import annotations

import contextlib
import subprocess
from collections.abc import Iterator

import pytest
from node import wait_until
from nspawn_host import STORED, Container, Host, SystemdBundles, compute_on, go_on, read_on

pytestmark = pytest.mark.timeout(300)
Pair = tuple[Container, Container]


@contextlib.contextmanager
def unnoticed(host: Host, pair: Pair) -> Iterator[None]:
    """What happens meanwhile leaves the containers' views and programs, the mounts and the descriptor store alone."""
    assert host.stored() == STORED
    mounts, own = host.mounts(), [each.mount() for each in pair]
    pid = host.pid
    yield
    host.wait_for_another(pid)
    go_on(*pair)
    assert host.mounts() == mounts and [each.mount() for each in pair] == own
    assert host.stored() == STORED
    host.shares_are_one_to_two(*pair)


@pytest.mark.parametrize("how", [("kill", "--signal=KILL"), ("restart",), ("kill", "--signal=TERM")], ids=" ".join)
def test_containers_do_not_notice(host: Host, pair: Pair, how: tuple[str, ...]) -> None:
    with unnoticed(host, pair):
        host.systemctl(*how, "cgpud")


def test_the_store_does_not_grow(host: Host) -> None:
    mounts = host.mounts()
    for _ in range(2):
        pid = host.pid
        host.systemctl("kill", "--signal=KILL", "cgpud")
        host.wait_for_another(pid)
        host.systemctl("restart", "cgpud")
    assert (host.stored(), host.mounts()) == (STORED, mounts)


def stopped_while_starting(host: Host) -> tuple[str, list[str]]:
    """The unit's state and the mounts while a daemon stands still that was on its way."""
    host.systemctl("stop", "cgpud")
    host.systemctl("start", "--no-block", "cgpud")
    pid = int(wait_until(lambda: host.pid, "a process", every=0))
    host.signal("STOP", pid)
    try:
        return host.show("ActiveState"), host.mounts()
    finally:
        host.signal("CONT", pid)


def test_ready_is_said_when_the_tree_answers_and_not_before(host: Host) -> None:
    wait_until(lambda: stopped_while_starting(host) == ("activating", []), "a daemon that is stopped soon enough", 60)
    host.systemctl("start", "cgpud")
    assert host.machine("cat", "/run/cgpu/version").stdout
    assert host.machine("cgpuctl", "list").returncode == 0
    assert "SIMULATED" in host.show("StatusText")


HOLD = """
import ctypes, os, sys, time
pid, libc = sys.argv[1], ctypes.CDLL(None, use_errno=True)
libc.ptrace.argtypes = [ctypes.c_long] * 4
(thread,) = [one for one in os.listdir(f"/proc/{pid}/task") if "gate" in open(f"/proc/{pid}/task/{one}/comm").read()]
for request in (0x4206, 0x4207):  # PTRACE_SEIZE, PTRACE_INTERRUPT
    if libc.ptrace(request, int(thread), 0, 0):
        sys.exit(os.strerror(ctypes.get_errno()))
print("held", flush=True)
while True:  # a thread that ended is its tracer's to reap, and its process ends no sooner
    status = os.waitpid(int(thread), 0x40000000)[1]  # __WALL
    if os.WIFEXITED(status) or os.WIFSIGNALED(status):
        break
"""


@contextlib.contextmanager
def held(host: Host) -> Iterator[None]:
    """The gate's scheduling thread stands still, and nothing else of the daemon."""
    with subprocess.Popen([*host.machine.enter, "python3", "-c", HOLD, str(host.pid)], stdin=subprocess.DEVNULL,
                          stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as tracer:
        assert tracer.stdout and tracer.stderr
        if tracer.stdout.readline() != "held\n":
            pytest.skip(f"a thread cannot be traced here: {tracer.stderr.read()}")
        try:
            yield
        finally:
            tracer.kill()


def test_the_watchdog_ends_a_daemon_that_stands_still(host: Host, pair: Pair) -> None:
    """The whole of it, and its scheduling loop alone."""
    with host.drop_in("WatchdogSec=4"):
        host.systemctl("restart", "cgpud")
        with unnoticed(host, pair):
            pid = host.pid
            host.signal("STOP", pid)
            host.wait_for_another(pid)
        host.logged("Watchdog timeout", 60)
        assert "watchdog not fed" not in host.journal(60)
        with unnoticed(host, pair):
            pid = host.pid
            with held(host):
                host.wait_for_another(pid)
        host.logged("watchdog not fed", 60)
        assert host.journal(60).count("Watchdog timeout") == 2
    host.systemctl("restart", "cgpud")


def test_reload_reads_the_configuration_again(host: Host) -> None:
    pid = host.pid
    with host.config('log_level = "debug"'):
        host.systemctl("reload", "cgpud")
        host.logged("reloaded log_level=debug")
    host.systemctl("reload", "cgpud")
    host.logged("reloaded log_level=info", 3)
    assert (host.pid, host.active()) == (pid, True)


def test_reload_of_a_wrong_configuration_fails_and_changes_nothing(host: Host) -> None:
    pid = host.pid
    with host.config('log_level = "loud"'):
        done = host.machine("systemctl", "reload", "cgpud", check=False)
    assert done.returncode != 0
    host.logged("log_level")
    assert (host.pid, host.active()) == (pid, True)
    assert host.machine("cat", "/run/cgpu/version").stdout


def test_stop_unmounts_and_start_goes_on(host: Host, pair: Pair, containers: SystemdBundles) -> None:
    host.systemctl("stop", "cgpud")
    assert host.mounts() == [] and host.stored() == 0
    left = host.machine("sh", "-c", "ls -d /run/cgpu; ls /run/cgpud; ls /run/cgpud/view", check=False).stdout.split()
    assert not {"/run/cgpu", "control.sock", "runtime.sock", "keeper.sock"} & set(left)
    read_on(*pair)
    assert all(each.failed() for each in pair), "reads fail, and do not hang"
    compute_on(*pair)
    host.systemctl("start", "cgpud")
    assert host.stored() == STORED
    host.shares_are_one_to_two(*pair)
    containers.end(pair[0].ident)
    go_on(containers.start("c"))


def test_starts_that_fail_do_not_empty_the_store(host: Host, pair: Pair) -> None:
    """More of them, and faster, than systemd's own limit (5 within 10 s) lets pass."""
    with unnoticed(host, pair):
        with host.drop_in("ExecStartPre=/bin/false"):
            before = int(host.show("NRestarts"))
            host.systemctl("kill", "--signal=KILL", "cgpud")
            wait_until(lambda: int(host.show("NRestarts")) > before + 7, "it to be tried often enough", 60)
            assert host.stored() == STORED
        host.wait_for_another(0)


def test_a_crash_loop_of_cgpud_ends_in_errors(host: Host, pair: Pair) -> None:
    """It gives up the mounts after five starts; then nobody waits for it."""
    pid, state = host.pid, host.machine.path("/run/cgpud/state.json")
    host.systemctl("kill", "--signal=STOP", "cgpud")
    content = state.read_bytes()
    state.unlink()
    state.mkdir()  # is in the way of every start
    try:
        host.systemctl("kill", "--signal=KILL", "cgpud")
        wait_until(lambda: all(each.failed() for each in pair), "reads that fail", 60)
        host.logged("crash loop", 400)
        assert host.stored() == 0
        assert "not connected" in host.machine("cat", "/run/cgpu/version", check=False).stderr
    finally:
        state.rmdir()
        state.write_bytes(content)
    host.wait_for_another(pid)
    assert host.stored() == STORED and len(host.mounts()) == 2
    compute_on(*pair)
    host.shares_are_one_to_two(*pair)


@pytest.mark.parametrize("wrong", ["max_inst = 0", "[gpu.7]"])
def test_a_restart_with_a_wrong_configuration_goes_on_by_the_last_one(host: Host, pair: Pair, wrong: str) -> None:
    with unnoticed(host, pair), host.config(wrong):
        host.systemctl("restart", "cgpud")
        host.logged(wrong.strip("[]"))
        if wrong != "[gpu.7]":
            assert "is refused, and what it said before holds" in host.show("StatusText")
    host.systemctl("restart", "cgpud")
    assert "refused" not in host.show("StatusText")


def test_a_first_start_with_a_wrong_configuration_is_not_tried_again(host: Host) -> None:
    host.systemctl("stop", "cgpud")
    with host.config("max_inst = 0"):
        assert host.machine("systemctl", "start", "cgpud", check=False).returncode != 0
        tried = host.show("NRestarts")
        assert host.show("ActiveState") == "failed" and host.show("ExecMainStatus") == "2"
        host.logged("max_inst")
    host.systemctl("start", "cgpud")
    assert host.show("NRestarts") in ("0", tried) and host.stored() == STORED
    assert host.machine("cat", "/run/cgpu/version").stdout


@pytest.mark.parametrize("option", ["ProtectSystem=yes", "PrivateTmp=yes"])
def test_an_option_that_hides_the_mount_is_refused(host: Host, option: str) -> None:
    host.systemctl("stop", "cgpud")
    with host.drop_in(option):
        assert host.machine("systemctl", "start", "cgpud", check=False).returncode != 0
        assert host.show("ExecMainStatus") == "2" and host.mounts() == []
        host.logged("mount namespace of its own")
    host.systemctl("start", "cgpud")
    assert len(host.mounts()) == 2


def test_systemd_understands_and_rates_the_unit_that_runs(host: Host) -> None:
    """tests/daemon/test_unit.py asks this machine's systemd-analyze, where it has one."""
    done = host.machine("systemd-analyze", "verify", "--man=no", "/etc/systemd/system/cgpud.service")
    assert done.stderr == ""
    rated = host.machine("systemd-analyze", "security", "--threshold=45", "--no-pager", "cgpud", check=False)
    assert rated.returncode == 0, rated.stdout


def test_order(host: Host) -> None:
    """Engines start after it, and end before it."""
    for name in ("docker", "containerd", "kubelet"):
        unit = host.machine.path(f"/run/systemd/system/{name}.service")
        unit.write_text("[Service]\nType=oneshot\nExecStart=/bin/true\n")
    host.systemctl("daemon-reload")
    for name in ("docker", "containerd", "kubelet"):
        assert "cgpud.service" in host.show("After", name).split()
    assert "nvidia-persistenced.service" in host.show("After").split()


@pytest.mark.parametrize("driver", ["systemd", "cgroupfs"])
@pytest.mark.parametrize("pid_host", [False, True], ids=["own pids", "the host's pids"])
def test_a_client_is_known_by_its_cgroup(host: Host, containers: SystemdBundles, driver: str, pid_host: bool) -> None:
    """cgroup v2 alone. With the host's PID namespace nothing else tells whose a process is."""
    containers.driver = driver
    one = containers.start("d", pid_host=pid_host)
    containers.driver = "cgroupfs"
    containers.start("e", command="sleep 1000")
    containers.driver = driver
    go_on(one)
    path = host.machine("cat", f"/proc/{(one.folder.parents[1] / 'pid').read_text()}/cgroup").stdout
    name = f"/system.slice/docker-{one.ident}.scope" if driver == "systemd" else f"/cgpu-test/{one.ident}"
    assert f"0::{name}" in path.splitlines()
    assert {"d" * 12, "e" * 12} <= set(host.machine("ls", "/run/cgpu/0").stdout.split())
    assert "e" * 12 not in containers("exec", one.ident, "ls", "/run/cgpu/0").stdout.split()
    assert containers("exec", one.ident, "nvidia-smi").stdout.split()[2] == "9830"
    wait_until(lambda: host.instances()[one.ident]["processes"], "its program to be seen")
    assert not host.instances()["e" * 64]["processes"]
