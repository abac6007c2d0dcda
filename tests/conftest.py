"""What every test is held to: nothing of ours stays behind on the machine."""

import os
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import HealthCheck, settings

# A CPU that is somebody else's for a second is no fault of the test's.
settings.register_profile("shared machine", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("shared machine")


def our_mounts(below: Path) -> set[str]:
    """Mount points below this run's scratch folder (another run may have mounts of its own)."""
    with open("/proc/self/mounts") as mounts:
        return {line.split()[1] for line in mounts if line.split()[1].startswith(f"{below}/")}


@pytest.fixture(autouse=True)
def nothing_left_behind(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Fails a test that leaves a mount, a child process or a descriptor open in the test process."""
    below = tmp_path_factory.getbasetemp()
    mounts, fds = our_mounts(below), set(os.listdir("/proc/self/fd"))
    yield
    assert our_mounts(below) <= mounts, "a mount was left behind"
    left = {f"{fd} -> {os.readlink(f'/proc/self/fd/{fd}')}" for fd in set(os.listdir("/proc/self/fd")) - fds
            if os.path.exists(f"/proc/self/fd/{fd}") or os.path.islink(f"/proc/self/fd/{fd}")}
    leaked = {line for line in left if any(word in line for word in ("socket:", "memfd:", "/dev/fuse", "eventfd"))}
    assert not leaked, f"descriptors were left open: {leaked}"
