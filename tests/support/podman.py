"""The distribution's podman in a mount namespace of its own.

/etc, /run, /usr/share and /var/lib are copies or empty there, so that its configuration lies where a node has it, and
nothing of the machine is touched.
"""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Sequence
from pathlib import Path

import engines
import pytest

ENTER = """
for folder in /dev/shm /run /usr/share /var/lib; do mount -t tmpfs -o mode=755 tmpfs $folder || exit; done
mount --bind {base}/etc /etc || exit
cp -r {root}/usr/share/containers /usr/share/ && cp -r {root}/etc/containers /etc/ && echo ready && exec cat
"""


class Podman:
    """Call it with podman's arguments. ``options``: podman's own, before the command's name."""

    def __init__(self, root: Path, base: Path, parent: str) -> None:
        self.base = base
        self.parent = parent
        self.env = engines.environment(root)
        self.options: list[str] = []
        conmon = base / "conmon"  # podman does not hand the libraries' path on
        conmon.write_text(f'#!/bin/sh\nLD_LIBRARY_PATH={engines.library_path(root)} exec {root}/usr/bin/conmon "$@"\n')
        conmon.chmod(0o755)
        self._fixed = ["--root", f"{base}/storage", "--runroot", f"{base}/runroot", "--tmpdir", f"{base}/tmp",
                       "--cgroup-manager", "cgroupfs", "--events-backend", "file", "--conmon", f"{conmon}"]
        shutil.copytree("/etc", base / "etc", symlinks=True, ignore=shutil.ignore_patterns("containers", "cdi"))
        script = ENTER.format(base=base, root=root)
        self._inside = subprocess.Popen(["unshare", "-m", "--propagation", "private", "sh", "-c", script], text=True,
                                        stdin=subprocess.PIPE, stdout=subprocess.PIPE)
        assert self._inside.stdout
        if self._inside.stdout.readline() != "ready\n":
            self._end()
            pytest.skip("podman cannot have a mount namespace of its own here")

    def inside(
        self, *command: Path | str, env: dict[str, str] | None = None, check: bool = True
    ) -> subprocess.CompletedProcess[str]:
        """Runs a program where podman's configuration is."""
        entered = ["nsenter", "-t", str(self._inside.pid), "-m", "--", *map(str, command)]
        done = subprocess.run(entered, env=env or self.env, capture_output=True, text=True, check=False, timeout=90,
                              stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"{' '.join(map(str, command))}: {done.stdout}{done.stderr}"
        return done

    def __call__(self, *arguments: Path | str, check: bool = True) -> subprocess.CompletedProcess[str]:
        return self.inside("podman", *self._fixed, *self.options, *arguments, check=check)

    def start(self, *options: str, image: str = "tiny", command: Sequence[str] = ("sleep", "1000")) -> str:
        """Starts a container; its 12-character ID."""
        done = self("run", "-d", "--cgroup-parent", self.parent, "--network", "none", *options, image, *command)
        return done.stdout.strip()[:12]

    def probe(self, runc: Path) -> None:
        """Skips the test where podman with the low-level runtime alone makes no container."""
        words = ["run", "-d", "--cgroup-parent", self.parent, "--network", "none", "tiny", "sleep", "1"]
        done = self("--runtime", runc, *words, check=False)
        self("rm", "--all", "--force", "-t", "0", check=False)
        if done.returncode:
            pytest.skip(f"podman makes no container here, without us either: {done.stderr.strip()[-400:]}")

    def close(self) -> None:
        self("rm", "--all", "--force", "-t", "0", check=False)
        self._end()

    def _end(self) -> None:
        self._inside.communicate()
