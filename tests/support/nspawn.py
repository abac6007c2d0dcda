"""A machine of its own that boots a real systemd: systemd-nspawn over this machine's own /usr, in a cgroup of its own.

Its root is put together in a mount namespace that goes with it: /usr is this machine's, with the distribution's systemd
laid over it where this machine lacks it; everything else is new. Only systemd's targets, its journal and what a test
installs are there to be started: no unit of this machine is. The guest has cgroup v2 alone, a network of its own, and
processes that this machine sees; ``/dev/fuse`` and a shared folder, at the same path on both sides, are bound into it.
"""

from __future__ import annotations

import contextlib
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import engines
import pytest
from node import BIN, ROOT, wait_until

PACKAGES = ("systemd", "systemd-container")
UNITS = ("*.target", "systemd-journald*", "systemd-poweroff.service", "systemd-halt.service", "systemd-exit.service")
BUILD = """
set -eu
for group in {groups}; do mkdir "$group"; echo $$ >"$group/cgroup.procs" 2>/dev/null || true; done
mount -t tmpfs none /run
mount -t tmpfs none {root}
cd {root}
mkdir -p usr etc/systemd/system proc sys dev run tmp var/lib root mnt
for name in bin sbin lib lib64; do ln -s usr/$name $name; done
{usr}
mount -t tmpfs none /mnt
mkdir -p /mnt/empty /mnt/units/sockets.target.wants
(cd usr/lib/systemd/system && cp -a {units} /mnt/units/)
for socket in systemd-journald.socket systemd-journald-dev-log.socket; do
    ln -s ../$socket /mnt/units/sockets.target.wants/
done
mount --bind /mnt/units usr/lib/systemd/system
for name in usr/lib/systemd/*-generators; do mount --bind /mnt/empty $name; done
cp -a /etc/ld.so.cache /etc/ld.so.conf* etc/
echo root:x:0:0::/root:/bin/sh >etc/passwd
echo root:x:0: >etc/group
: >etc/machine-id
exec {nspawn}
"""


def _systemd() -> tuple[Path | None, Path]:
    """Where systemd was unpacked (None: this machine's own is taken), and systemd-nspawn."""
    here = shutil.which("systemd-nspawn")
    if here and Path("/usr/lib/systemd/systemd").exists():
        return None, Path(here)
    root = engines.fetch("systemd", PACKAGES)
    return root, root / "usr/bin/systemd-nspawn"


def _cgroups(name: str) -> list[Path]:
    """A folder to make in each hierarchy of this machine."""
    tops = [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").glob("*/")]
    mounted = {line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()
               if line.split()[2] in ("cgroup", "cgroup2")}
    return [top / name for top in tops if str(top) in mounted]


class Machine:
    """One guest. ``shared``: the folder that it shares with this machine; it sees the checkout read-only."""

    def __init__(self, base: Path) -> None:
        self.base = base
        self.shared = base / "shared"
        self.log = base / "console.log"
        self.leader = 0
        """Its PID 1, as this machine counts."""
        self._process: subprocess.Popen[bytes] | None = None
        self._groups = _cgroups(f"cgpu-test-{os.getpid()}")

    def start(self) -> None:
        """Boots it. Skips the test where that cannot be done here, and says why."""
        if os.geteuid() or not Path("/dev/fuse").exists():
            pytest.skip("a machine of its own needs root and /dev/fuse")
        if not self._groups:
            pytest.skip("a machine of its own needs a cgroup, and no hierarchy is mounted here")
        unpacked, nspawn = _systemd()
        root = self.base / "root"
        for folder in (root, self.shared):
            folder.mkdir(exist_ok=True)
        seen = {ROOT, Path(sys.base_prefix).resolve(), Path(sys.prefix)}
        command = [nspawn, "--quiet", "--boot", "--directory", root, "--machine", f"cgpu-test-{os.getpid()}",
                   "--register=no", "--keep-unit", "--console=pipe", "--link-journal=no", "--private-network",
                   # device cgroups are programs in BPF; runc makes itself a keyring
                   "--system-call-filter=bpf add_key keyctl", "--bind=/dev/fuse", f"--bind={self.shared}",
                   *(f"--bind-ro={path}" for path in sorted(seen) if not path.is_relative_to("/usr")),
                   "systemd.unit=multi-user.target"]
        script = BUILD.format(groups=_words(self._groups), root=shlex.quote(str(root)), usr=_usr(unpacked),
                              units=" ".join(UNITS), nspawn=_words(command))
        env = {"PATH": os.environ["PATH"], "SYSTEMD_NSPAWN_UNIFIED_HIERARCHY": "1"}
        if unpacked is not None:
            places = (f"{engines.MULTIARCH}/systemd", engines.MULTIARCH, "lib/x86_64-linux-gnu")
            env["LD_LIBRARY_PATH"] = ":".join(str(unpacked / place) for place in places)
        apart = ["setpriv", "--pdeathsig=TERM", "unshare", "--mount", "--propagation=private"]
        with open(self.log, "ab") as log:
            self._process = subprocess.Popen([*apart, "sh", "-c", script], env=env, stdin=subprocess.DEVNULL,
                                             stdout=log, stderr=log)
        wait_until(self._booted, f"the guest to boot; it said:\n{self.console()}", 60)

    def console(self) -> str:
        return self.log.read_text(errors="replace")[-2000:]

    def _booted(self) -> bool:
        assert self._process
        if self._process.poll() is not None:
            pytest.skip(f"systemd-nspawn boots nothing here: {self.console()}")
        pid = self._process.pid
        try:
            self.leader = next(int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
                               if Path(f"/proc/{child}/comm").read_text() == "systemd\n")
        except (OSError, StopIteration):  # it is still being put together
            return False
        return self("systemctl", "is-system-running", check=False).stdout.strip() in ("running", "degraded")

    @property
    def enter(self) -> list[str]:
        """Before a command: it runs inside. Its cgroup stays this machine's."""
        return ["nsenter", "--target", str(self.leader), "--mount", "--uts", "--ipc", "--net", "--pid", "--cgroup",
                "--root", "--wdns=/", "env", "-i", f"PATH={BIN}:/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin"]

    def __call__(self, *words: object, check: bool = True, timeout: float = 60,
                 env: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
        """Runs a command inside to its end."""
        settings = [f"{key}={value}" for key, value in (env or {}).items()]
        done = subprocess.run([*self.enter, *settings, *map(str, words)], capture_output=True, text=True, check=False,
                              timeout=timeout, stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"{words}: {done.returncode}: {done.stdout}{done.stderr}"
        return done

    def path(self, path: Path | str) -> Path:
        """A file of the guest's, as this machine reaches it."""
        return Path(f"/proc/{self.leader}/root{path}")

    def stop(self) -> None:
        """Shuts it down; no cgroup stays behind."""
        if self._process is not None:
            if self._process.poll() is None:
                self._process.terminate()
                try:
                    self._process.wait(30)
                except subprocess.TimeoutExpired:
                    self._process.kill()
                    self._process.wait()
            self._process = None
        for group in self._groups:
            if group.exists():
                engines.remove_cgroups(group)


def _usr(unpacked: Path | None) -> str:
    """Commands that make the guest's /usr."""
    if unpacked is None:
        return "mount --bind /usr usr\nmount -o remount,bind,ro usr"
    lines = [f"mount -t overlay -o ro,lowerdir={unpacked}/usr:/usr overlay usr"]
    for name in ("bin", "sbin", "lib", "lib64"):  # Debian 12 still packs some of it there, and /lib is in /usr
        if (unpacked / name).is_dir():
            layers = [one for one in (unpacked / name, unpacked / "usr" / name, Path("/usr") / name) if one.is_dir()]
            lines.append(f"mount -t overlay -o ro,lowerdir={':'.join(map(str, layers))} overlay usr/{name}")
    return "\n".join(lines)


def _words(words: Sequence[object]) -> str:
    return shlex.join(map(str, words))


@contextlib.contextmanager
def machine(base: Path) -> Iterator[Machine]:
    one = Machine(base)
    try:
        one.start()
        yield one
    finally:
        one.stop()
