"""A start: it goes before others on the CPUs, and takes nothing away from containers that run."""

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from node import wait_until

HASTE = """
import ctypes, os, threading, sys
from cgpusched.daemon.survival.haste import Haste
group = open("/proc/self/autogroup").read().split()[-1] if os.path.exists("/proc/self/autogroup") else None
def nices():
    found = {}
    for task in os.listdir("/proc/self/task"):
        name = open(f"/proc/self/task/{task}/comm").read().strip()
        found[name if name == "cgpu-gate" else "main" if int(task) == os.getpid() else "other"] = \\
            os.getpriority(os.PRIO_PROCESS, int(task))
    return found
def named(name):
    ctypes.CDLL(None).prctl(15, name, 0, 0, 0)
    ready.wait()
    end.wait()
haste, ready, end = Haste(), threading.Barrier(3), threading.Event()
haste.begin()
threads = [threading.Thread(target=named, args=(name,)) for name in (b"cgpu-gate", b"worker")]
for thread in threads: thread.start()
ready.wait()
before = nices()
if group is not None:
    assert open("/proc/self/autogroup").read().split()[-1] == "-10"
haste.end()
print(before, nices())
if group is not None:
    assert open("/proc/self/autogroup").read().split()[-1] == "0"
end.set()
"""


def test_only_the_start_goes_before_others() -> None:
    done = subprocess.run([sys.executable, "-c", HASTE], capture_output=True, text=True, timeout=60, check=False,
                          start_new_session=True)  # fmt: skip
    usual = os.getpriority(os.PRIO_PROCESS, 0)
    if done.stdout.startswith(f"{{'main': {usual}"):
        pytest.skip("this machine lets nobody raise a priority")
    assert done.returncode == 0, done.stderr
    assert done.stdout == ("{'main': -10, 'cgpu-gate': -10, 'other': -10} "
                           f"{{'main': {usual}, 'cgpu-gate': -10, 'other': {usual}}}\n")  # fmt: skip


def test_a_daemon_that_serves_is_as_others(node: Any) -> None:
    assert node.daemon is not None
    wait_until(lambda: os.getpriority(os.PRIO_PROCESS, node.daemon.pid) == os.getpriority(os.PRIO_PROCESS, 0),
               "its priority to be the usual one")  # fmt: skip


def test_what_is_mounted_in_containers_stays(node: Any) -> None:
    """A new daemon leaves alone what they have mounts on: a file that is replaced takes those along, everywhere."""
    places = [node.runtime / "real" / name for name in ("libcuda.so.1", "libnvidia-ml.so.1")]
    script = 'for place; do mount --bind /etc/hostname "$place" || exit; done; echo ready; exec cat'
    with subprocess.Popen(["unshare", "--mount", "sh", "-c", script, "sh", *places], stdin=subprocess.PIPE,
                          stdout=subprocess.PIPE, text=True) as container:  # fmt: skip
        try:
            assert container.stdout is not None and container.stdout.readline() == "ready\n"
            node.restart()
            node.upgrade()
            seen = Path(f"/proc/{container.pid}/mountinfo").read_text().split()
            assert [place for place in places if str(place) not in seen] == []
        finally:
            container.kill()
