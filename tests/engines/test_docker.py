"""Docker, for real, with our runtime as its default: what a user types, and what the host and the container then see.

The device is the simulated one; tests/support/world.py says what else stands in for the real thing.
"""

import dataclasses
import os
import shlex
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path

import engines
import pytest
from node import wait_until
from world import OUT_OF_MEMORY, SIX, World, docker_world, gpus_of

from cgpusched.engines import setup

UUID = "GPU-12345678-1234-1234-1234-123456789abc"
IMAGE = "nvcr.io/nvidia/tensorflow:19.10-py3"
FIRST = ("docker run -d -t --gpus all --shm-size=1g --ulimit memlock=-1 --ulimit stack=67108864 --name gpu_test1 "
         f"-v /mnt:/mnt -e ALIYUN_COM_GPU_MEM_CONTAINER=6 -e ALIYUN_COM_GPU_MEM_DEV=15 {IMAGE}")
SECOND = ("docker run -d -t --gpus all --shm-size=1g --ulimit memlock=-1 --ulimit stack=67108864 --name gpu_test2 "
          f"-v /mnt:/mnt -e ALIYUN_COM_GPU_MEM_CONTAINER=8 -e ALIYUN_COM_GPU_MEM_DEV=15 {IMAGE}")
FOUR = ("docker run -d -t --runtime=nvidia --shm-size=1g --ulimit memlock=-1 --ulimit stack=67108864 "
        "--name gpu_test0123 -v /mnt:/mnt -e ALIYUN_COM_GPU_MEM_CONTAINER=3,4,5,6 -e ALIYUN_COM_GPU_MEM_DEV=23 "
        f"-e NVIDIA_VISIBLE_DEVICES=0,1,2,3 {IMAGE}")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def t4(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    with docker_world(tmp_path_factory.mktemp("t4")) as world:
        world.docker("tag", "tiny", IMAGE)
        yield world


@pytest.fixture
def docker(t4: World) -> Iterator[World]:
    """The T4's node, with no container before and after."""
    yield t4
    t4.clean()
    t4.node.write(1, 0, "policy")


def test_the_published_commands_give_two_containers_their_share_of_one_card(docker: World) -> None:
    first, second = (docker.docker.shell(line).stdout.strip() for line in (FIRST, SECOND))
    assert docker.listed() == sorted([first[:12], second[:12]])
    exec_smi = docker.docker.shell("docker exec -i gpu_test1 nvidia-smi").stdout
    assert gpus_of(exec_smi) == ["6043"]
    assert gpus_of(docker.docker.shell("docker exec -i gpu_test2 nvidia-smi").stdout) == ["8058"]
    assert docker.node.read(0, first[:12], "memsize") == f"{6043 << 20}\n"
    assert docker.node.read(0, first[:12], "id") == f"{first}\n"
    docker.docker.shell("docker stop -t 0 $(docker ps -a | awk '{ print $1}' | tail -n +2)")
    docker.gone(first[:12])
    docker.gone(second[:12])


def test_the_published_command_for_four_gpus(tmp_path: Path) -> None:
    with docker_world(tmp_path, "4x23028MiB") as four:
        four.docker("tag", "tiny", IMAGE)
        short = four.docker.shell(FOUR).stdout.strip()[:12]
        assert gpus_of(four.docker("exec", "gpu_test0123", "nvidia-smi").stdout) == ["3003", "4004", "5006", "6007"]
        assert [four.listed(gpu) for gpu in range(4)] == [[short]] * 4


def test_memory_is_limited_and_shown_with_the_hosts_pids_outside_and_own_pids_inside(docker: World) -> None:
    short = docker.run(*SIX)
    program = ["exec", short, "busy", "1000", "100", "1024"]
    with subprocess.Popen([docker.docker.client, *program], stdout=subprocess.DEVNULL,
                          env={**docker.docker.env, "DOCKER_HOST": f"unix://{docker.docker.socket}"}) as busy:
        meminfo = wait_until(lambda: "PID" in docker.node.read(0, short, "meminfo")
                             and docker.node.read(0, short, "meminfo"), "the program to allocate")
        outside = int(meminfo.splitlines()[1].split()[1])
        assert Path(f"/proc/{outside}/comm").read_text() == "busy\n"
        inside = docker.docker("exec", short, "sh", "-c", f"cat /run/cgpu/0/{short}/meminfo").stdout
        status = Path(f"/proc/{outside}/status").read_text()
        own = next(line.split()[-1] for line in status.splitlines() if "NSpid" in line)
        assert inside == meminfo.replace(f"PID: {outside} ", f"PID: {own} ")
        assert own in docker.docker("exec", short, "nvidia-smi").stdout.split()
        docker.docker("exec", short, "sh", "-c", f"kill -9 {own}")
        busy.wait()
    wait_until(lambda: "PID" not in docker.node.read(0, short, "meminfo"), "its memory to be free")
    sizes = (6044, 6042)
    done = docker.docker("exec", short, "sh", "-c", "; ".join(f"alloc {size << 20} </dev/null" for size in sizes))
    assert done.stdout.split() == [OUT_OF_MEMORY, "0"]


def test_inside_there_is_the_own_directory_only_and_nothing_can_be_written(docker: World) -> None:
    first, second = docker.run(*SIX), docker.run(*SIX, "--privileged" if engines.has_sys_resource() else "--init=false")
    listing = docker.docker("exec", first, "ls", "/run/cgpu", "/run/cgpu/0").stdout
    assert first in listing
    assert second not in listing
    assert docker.docker("exec", first, "cat", "/run/cgpu/0/policy").stdout == "1\n"
    for short in (first, second):
        for node in ("policy", f"{short}/weight", "../default_memsize"):
            done = docker.docker("exec", short, "sh", "-c", f"echo 2 >/run/cgpu/0/{node}", check=False)
            assert done.returncode != 0
            assert "Read-only file system" in done.stderr
    assert docker.node.read(0, "policy") == "1\n"


def test_two_containers_share_as_their_weights_say_and_follow_an_echo(docker: World) -> None:
    ids = [docker.run(*SIX, "-e", f"ALIYUN_COM_GPU_SCHD_WEIGHT={weight}", command=("busy", "1000", "200", "64"))
           for weight in (1, 2)]
    assert docker.node.read(0, "policy") == "2\n", "a weight above 1 switches policy 1 to 2"
    full = {short: docker.node.read(0, short, "id").strip() for short in ids}

    def share(want: float) -> Callable[[], bool]:
        def close() -> bool:
            before = docker.node.busy_ns()
            subprocess.run(["sleep", "1"], check=True)
            after = docker.node.busy_ns()
            spent = [after[full[short]] - before[full[short]] for short in ids]
            return sum(spent) > 0 and abs(spent[1] / sum(spent) - want) < 0.04

        return close

    wait_until(share(2 / 3), "the second to have two thirds", 30)
    docker.node.write(1, 0, ids[1], "weight")
    wait_until(share(1 / 2), "the two to have a half each", 30)


def test_a_container_that_asks_for_nothing_is_as_it_was_and_needs_no_daemon(docker: World, tmp_path: Path) -> None:
    docker.node.kill_daemon(signal.SIGSTOP)
    try:
        out = docker.docker("run", "--rm", "--network", "none", "tiny", "sh", "-c", "mount; env; ls /usr/local").stdout
    finally:
        docker.node.kill_daemon(signal.SIGCONT)
    assert "cgpu" not in out
    assert docker.listed() == []


def test_disabled_and_zero_are_plain_containers(docker: World) -> None:
    for options in (["-e", "CGPU_DISABLE=true"], ["-e", "ALIYUN_COM_GPU_MEM_CONTAINER=0"]):
        short = docker.run(*SIX, *options)
        assert docker.listed() == []
        assert "cgpu" not in docker.docker("exec", short, "mount").stdout


@pytest.mark.parametrize(("variables", "why"), [
    (["MEM_CONTAINER=abc", "MEM_DEV=15"], 'ALIYUN_COM_GPU_MEM_CONTAINER="abc"'),
    (["MEM_CONTAINER=-1", "MEM_DEV=15"], 'ALIYUN_COM_GPU_MEM_CONTAINER="-1"'),
    (["MEM_CONTAINER=7", "MEM_DEV=6"], 'ALIYUN_COM_GPU_MEM_CONTAINER="7"'),
    (["MEM_CONTAINER=6"], "ALIYUN_COM_GPU_MEM_DEV is not set"),
    (["MEM_CONTAINER=6", "MEM_DEV=15", "SCHD_WEIGHT=0"], 'ALIYUN_COM_GPU_SCHD_WEIGHT="0"'),
    (["MEM_CONTAINER=6", "MEM_DEV=15", "SCHD_WEIGHT=99"], 'ALIYUN_COM_GPU_SCHD_WEIGHT="99"'),
    (["MEM_CONTAINER=6", "MEM_DEV=15", "VISIBLE_DEVICES=7"], 'ALIYUN_COM_GPU_VISIBLE_DEVICES="7"'),
    (["MEM_CONTAINER=6,6", "MEM_DEV=15"], 'ALIYUN_COM_GPU_MEM_CONTAINER="6,6"'),
    (["MEM_CONTAINER=6", "MEM_DEV=15", f"VISIBLE_DEVICES={UUID}"], f'ALIYUN_COM_GPU_VISIBLE_DEVICES="{UUID}"'),
    (["MEM_CONTAINER=6", "MEM_DEV=15", "SCHD_WEIGHT=20"], "weight=20 is more than is free"),
    (["MEM_CONTAINER=10", "MEM_DEV=15"], "more than GPU 0 has unallotted"),
    (["MEM_CONTAINER=1", "MEM_DEV=15"], "GPU 0 is full: max_inst is 1"),
])
def test_who_asks_wrongly_does_not_start_and_is_told_why(docker: World, variables: list[str], why: str) -> None:
    docker.run(*SIX)
    if "full" in why:
        docker.node.write(1, 0, "max_inst")
    said = docker.refused(*(word for one in variables for word in ("-e", f"ALIYUN_COM_GPU_{one}")))
    assert why.replace('"', '\\"') in said or why in said or why.replace('"', "'") in said, said
    assert len([line for line in said.splitlines() if "cgpu: " in line]) == 1
    docker.node.write(20, 0, "max_inst")


def test_what_is_not_left_is_refused(docker: World) -> None:
    docker.run(*SIX)
    docker.run(*SIX)
    assert "memsize" in docker.refused(*SIX[2:])


def test_without_a_daemon_only_those_who_ask_are_refused(docker: World) -> None:
    docker.node.kill_daemon(signal.SIGTERM)
    assert docker.node.daemon
    docker.node.daemon.wait()
    said = docker.docker("run", "--rm", *SIX, "tiny", "true", check=False).stderr
    assert "cgpud cannot be asked" in said
    assert docker.docker("run", "--rm", "--network", "none", "tiny", "true").returncode == 0
    docker.node.start()
    docker.run(*SIX)


@pytest.mark.parametrize("how", ["restart -t 0", "stop -t 0|start", "kill|start"])
def test_the_same_container_again(docker: World, how: str) -> None:
    short = docker.run(*SIX, "--name", "again")
    for verb in how.split("|"):
        docker.docker(*shlex.split(verb), "again")
    wait_until(lambda: docker.listed() == [short], "the container to be registered again")
    assert gpus_of(docker.docker("exec", short, "nvidia-smi").stdout) == ["6043"]


def test_what_is_removed_or_dies_is_registered_no_more(docker: World) -> None:
    removed = docker.run(*SIX)
    docker.docker("rm", "-f", removed)
    docker.gone(removed)
    killed = docker.run(*SIX)
    pid = int(docker.docker("inspect", "-f", "{{.State.Pid}}", killed).stdout)
    os.kill(pid, signal.SIGKILL)
    docker.gone(killed)
    ended = docker.run(*SIX, command=("sleep", "0"))
    docker.gone(ended)


def test_a_shim_that_is_killed_leaves_nothing(docker: World) -> None:
    short = docker.run(*SIX)
    pid = int(docker.docker("inspect", "-f", "{{.State.Pid}}", short).stdout)
    shim = int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])
    assert "shim" in Path(f"/proc/{shim}/comm").read_text()
    own = {os.readlink(fd) for fd in Path(f"/proc/{shim}/fd").iterdir()}
    doors = [line.split()[-1] for line in Path("/proc/net/unix").read_text().splitlines()[1:]
             if f"socket:[{line.split()[6]}]" in own and line.split()[-1].startswith("/run/containerd/")]
    os.kill(shim, signal.SIGKILL)
    docker.gone(short)
    for door in doors:  # it leaves its socket when it is killed
        Path(door).unlink(missing_ok=True)


def test_setup_changes_a_docker_that_runs(docker: World) -> None:
    """By SIGHUP: what runs goes on, and what is started later comes to us, or no more."""
    base, registered = docker.docker.base, docker.run(*SIX)
    other = docker.run(*SIX, "-e", "ALIYUN_COM_GPU_MEM_CONTAINER=1")
    wish = setup.Wish("docker", docker.docker.config, binary=docker.node.binary, kept=base / "kept",
                      pid_file=docker.docker.pid_file)

    def default() -> str:
        return docker.docker("info", "-f", "{{.DefaultRuntime}}").stdout.strip()

    assert default() == "cgpu"
    lines = setup.run(dataclasses.replace(wish, undo=True))
    assert "Docker was told to read it again; containers go on" in lines
    assert any("default-runtime is 'runc' now" in line for line in lines)
    wait_until(lambda: default() == "runc", "Docker to read it again")
    plain = docker.run(*SIX, "--runtime", "plain")
    assert docker.listed() == sorted([registered, other])
    stopped = docker.docker("stop", "-t", "0", other).stdout.strip()
    assert "cgpu" in docker.docker("start", stopped, check=False).stderr, "it was made with a runtime of that name"
    setup.run(wish)
    wait_until(lambda: default() == "cgpu", "Docker to read it again")
    later = docker.run(*SIX)
    docker.docker("start", stopped)
    assert docker.listed() == sorted([registered, later, other])
    running = docker.docker("ps", "-q").stdout.split()
    assert sorted(running) == sorted([registered, plain, later, other])
    assert gpus_of(docker.docker("exec", registered, "nvidia-smi").stdout) == ["6043"]


def test_a_container_that_cannot_be_made_leaves_nothing(docker: World) -> None:
    done = docker.docker("run", "--rm", *SIX, "tiny", "/no/such/program", check=False)
    assert done.returncode == 127
    wait_until(lambda: docker.listed() == [], "it to be registered no more")


@pytest.mark.parametrize("options", [
    ["--read-only"], ["-u", "1000"], ["--cap-drop", "ALL", "--security-opt", "no-new-privileges"], ["--pid", "host"],
    ["--cgroupns", "private"], ["--tmpfs", "/run"], ["--runtime", "cgpu"], ["--runtime", "nvidia"],
    ["-e", "LD_LIBRARY_PATH=/nowhere"], ["--ipc", "host"],
])
def test_it_works_however_the_container_is_run(docker: World, options: list[str]) -> None:
    short = docker.run(*SIX, *options)
    assert gpus_of(docker.docker("exec", short, "nvidia-smi").stdout) == ["6043"]
    done = docker.docker("exec", short, "sh", "-c", f"alloc {6044 << 20} </dev/null; alloc {1 << 20} </dev/null")
    assert done.stdout.split() == [OUT_OF_MEMORY, "0"]
    if "--tmpfs" not in options:
        assert docker.docker("exec", short, "cat", f"/run/cgpu/0/{short}/memsize").stdout == f"{6043 << 20}\n"


def test_a_committed_image_works_again(docker: World) -> None:
    short = docker.run(*SIX)
    docker.docker("exec", short, "touch", "/root/made")
    docker.docker("commit", short, "committed")
    again = docker.run(*SIX, image="committed")
    assert gpus_of(docker.docker("exec", again, "nvidia-smi").stdout) == ["6043"]
    # the variables are the image's now
    plain = docker.run("--network", "none", "-e", "CGPU_DISABLE=1", image="committed")
    assert docker.listed() == sorted([short, again])
    assert docker.docker("exec", plain, "nvidia-smi", check=False).returncode != 0


@pytest.mark.parametrize("above", [0, 1, 2, None])
def test_the_hosts_tree_bound_by_hand_shows_the_own_directory(docker: World, above: int | None) -> None:
    """It itself, or a folder above it: ``-v /run:/x``, ``-v /:/x``."""
    tree = docker.node.tree
    source = tree.parents[-1 if above is None else above - 1] if above != 0 else tree
    place = Path("/x") / tree.relative_to(source)
    other = docker.run(*SIX)
    short = docker.run(*SIX, "-v", f"{source}:/x")
    listing = docker.docker("exec", short, "ls", f"{place}/0").stdout
    assert short in listing
    assert other not in listing
    tries = f"echo 2 >{place}/0/policy; umount {place}; ls {place}/0"
    written = docker.docker("exec", short, "sh", "-c", tries, check=False)
    assert "Read-only file system" in written.stderr
    assert other not in written.stdout
    assert docker.node.read(0, "policy") == "1\n"
