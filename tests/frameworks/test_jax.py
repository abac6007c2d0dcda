"""JAX's device discovery on the simulated driver, in an instance of 1 GiB. Its compiler needs cuDNN, which brings
NVIDIA's cudart and does not start there."""

from __future__ import annotations

import os
import shutil
from typing import Any

import pytest

GIB = 1 << 30
# JAX asks for a device node first, which a simulated device does not have: one that is there for this program alone
WITH_NODE = """
set -e
mkdir -p "$1/dev"
mount --rbind /dev "$1/dev"
mount -t tmpfs none /dev
for name in null zero full random urandom; do
    touch /dev/$name
    mount --bind "$1/dev/$name" /dev/$name
done
mkdir /dev/shm && mount --rbind "$1/dev/shm" /dev/shm
touch /dev/nvidiactl
shift
exec "$@"
"""


@pytest.mark.timeout(600)
def test_device_discovery(full: Any, tmp_path_factory: pytest.TempPathFactory) -> None:
    if os.geteuid() or not shutil.which("unshare"):
        pytest.skip("needs root and unshare, for a /dev of its own")
    folder = tmp_path_factory.mktemp("dev")
    said = full.python("jax_program.py", before=("unshare", "--mount", "sh", "-c", WITH_NODE, "sh", folder))
    assert said["others"] == "0" and said["platform"] == "gpu" and said["kind"] == "cgpufs simulated GPU"
    assert GIB // 2 < int(said["limit"]) <= GIB
