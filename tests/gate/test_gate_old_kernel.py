"""The scheduling thread without epoll_pwait2(2), which came with Linux 5.11: the server's tests once more."""

import subprocess
import sys
from pathlib import Path

import without

EPOLL_PWAIT2 = 441
TESTS = Path(__file__).with_name("test_gate_server.py")
NAMES = (
    "test_heartbeat_and_an_idle_thread",  # it sleeps, and until the right moment
    "test_contention_sets_a_deadline_then_closes",  # bells and deadlines wake it
    "test_a_stopped_holder_is_passed_over",
    "test_an_instance_over_two_gpus_has_its_turns_on_both_at_once",
    "test_no_descriptor_is_left_behind",
)


def test_the_server_waits_by_ppoll() -> None:
    command = [sys.executable, without.__file__, str(EPOLL_PWAIT2), sys.executable, "-m", "pytest", "-q",
               "-p", "no:cacheprovider", *(f"{TESTS}::{name}" for name in NAMES)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=100, cwd=TESTS.parents[2])
    assert done.returncode == 0 and f"{len(NAMES)} passed" in done.stdout, done.stdout + done.stderr
