"""Real container engines for tests: the distribution's packages, unpacked into a folder of ours, not installed.

``fetch()`` needs root and the package mirror that the machine is configured for, once; the packages stay in
build/engines. What a machine lacks for engines is stood in for, and named as such: ``clamped()`` is a low-level runtime
that asks for no limits above this machine's own, for machines (like containers) without CAP_SYS_RESOURCE.
"""

from __future__ import annotations

import contextlib
import fcntl
import io
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from node import ROOT, wait_until

PACKAGES = ("docker.io", "docker-cli?", "containerd", "runc", "crun", "podman", "netavark?")
"""With a question mark, if the release has one of that name: Debian 13 has Docker's client in a package of its own, and
its podman does nothing without netavark."""
MULTIARCH = "usr/lib/x86_64-linux-gnu"


def fetch(name: str = "engines", packages: Sequence[str] = PACKAGES) -> Path:
    """The folder in which they are unpacked. Skips the test where they cannot be had, and says why."""
    if os.geteuid():
        pytest.skip(f"{name}: root is needed")
    if not shutil.which("apt-get"):
        pytest.skip(f"{name}: these are Debian packages, and there is no apt-get")
    release = Path("/etc/debian_version").read_text().strip().replace("/", "-")
    folder = ROOT / "build" / name / release
    folder.mkdir(parents=True, exist_ok=True)
    with open(folder / "lock", "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not (folder / "ready").exists():
            try:
                _download(folder, packages)
            except subprocess.SubprocessError as error:
                said = getattr(error, "stderr", None) or b""
                pytest.skip(f"no {name}: {error}: {said.decode(errors='replace').strip()[-300:]}")
            (folder / "ready").touch()
    return folder / "root"


def _download(folder: Path, packages: Sequence[str]) -> None:
    for part in ("lists/partial", "deb/partial", "root"):
        (folder / part).mkdir(parents=True, exist_ok=True)
    options = [f"Dir::State::lists={folder}/lists", f"Dir::Cache::archives={folder}/deb", "APT::Sandbox::User=root",
               f"Dir::Cache::pkgcache={folder}/pkgcache.bin", f"Dir::Cache::srcpkgcache={folder}/srcpkgcache.bin"]
    apt = ["apt-get", "--quiet", "--yes", *(word for option in options for word in ("-o", option))]
    subprocess.run([*apt, "update"], check=True, capture_output=True, timeout=120)
    names = subprocess.run(["apt-cache", *apt[3:], "pkgnames"], check=True, capture_output=True, text=True, timeout=60)
    known = names.stdout.splitlines()
    wanted = [one.rstrip("?") for one in packages if not one.endswith("?") or one[:-1] in known]
    command = [*apt, "install", "--reinstall", "--download-only", "--no-install-recommends", *wanted]
    subprocess.run(command, check=True, capture_output=True, timeout=400)
    for package in (folder / "deb").glob("*.deb"):
        subprocess.run(["dpkg-deb", "-x", package, folder / "root"], check=True, capture_output=True, timeout=120)


def environment(root: Path, *before: Path) -> dict[str, str]:
    """An environment in which the unpacked engines find each other and their libraries. ``before``: first on PATH."""
    unpacked = [root / part for part in ("usr/bin", "usr/sbin", "usr/libexec/podman")]
    folders = [*before, *unpacked, *os.environ["PATH"].split(":")]
    kept = {key: value for key, value in os.environ.items() if not key.startswith(("CGPU_", "DOCKER_", "LD_"))}
    return {**kept, "PATH": ":".join(map(str, folders)), "LD_LIBRARY_PATH": library_path(root),
            "CONTAINERS_HELPER_BINARY_DIR": f"{root}/usr/lib/podman"}


def library_path(root: Path) -> str:
    """Where their libraries are."""
    return f"{root / MULTIARCH}:{root / 'lib/x86_64-linux-gnu'}"


def unmount_below(base: Path) -> None:
    """What an engine mounted and left: dockerd keeps its data folder mounted where mounts are shared."""
    places = [line.split()[1] for line in Path("/proc/self/mounts").read_text().splitlines()]
    for place in sorted((one for one in places if f"{one}/".startswith(f"{base}/")), key=len, reverse=True):
        subprocess.run(["umount", "-l", place], check=False)


CLAMP = '''#!{python} -ISs
"""A low-level runtime for tests without CAP_SYS_RESOURCE: it asks for no more than the machine has."""
import json, os, resource, sys
def clamp(process):
    for limit in process.get("rlimits") or []:
        most = resource.getrlimit(getattr(resource, limit["type"]))[1]
        if most != -1:
            limit["hard"] = min(limit["hard"], most)
            limit["soft"] = min(limit["soft"], limit["hard"])
    for held in (process.get("capabilities") or {{}}).values():
        if "CAP_SYS_RESOURCE" in held:
            held.remove("CAP_SYS_RESOURCE")
    process.pop("oomScoreAdj", None)
def rewrite(path, inside):
    with open(path) as file:
        data = json.load(file)
    clamp(data["process"] if inside else data)
    with open(path, "w") as file:
        json.dump(data, file)
words = sys.argv[1:]
def value(*names):
    for at, word in enumerate(words):
        if word in names:
            return words[at + 1]
        for name in names:
            if word.startswith(name + "="):
                return word[len(name) + 1:]
    return None
if "create" in words or "run" in words:
    rewrite((value("--bundle", "-b") or ".") + "/config.json", True)
elif "exec" in words and value("--process", "-p"):
    rewrite(value("--process", "-p"), False)
os.execv("{runc}", ["runc", *words])
'''


def clamped(path: Path, runc: Path) -> Path:
    """A stand-in for runc at ``path``: runc, with the limits that this machine can give."""
    path.write_text(CLAMP.format(python=sys.executable, runc=runc))
    path.chmod(0o755)
    return path


def has_sys_resource() -> bool:
    """Whether this process may have CAP_SYS_RESOURCE (24 in linux/capability.h)."""
    status = Path("/proc/self/status").read_text()
    bounding = next(line.split()[1] for line in status.splitlines() if line.startswith("CapBnd"))
    return bool(int(bounding, 16) >> 24 & 1)


def image(out: Path, programs: Sequence[Path | str], links: dict[str, str] | None = None) -> Path:
    """A tar of a root file system with these programs of this machine, the libraries they need, and bash as shell."""
    with tarfile.open(out, "w") as tar:
        made: set[str] = set()
        for folder in ("bin", "etc", "proc", "sys", "dev", "tmp", "run", "root", "mnt", "usr/local", MULTIARCH, "lib64",
                       "lib/x86_64-linux-gnu", "var/tmp"):
            _folder(tar, made, folder)
        paths = [Path(shutil.which(str(one)) or one) for one in ("bash", *programs)]
        for path in paths:
            _file(tar, made, f"bin/{path.name}", path.resolve())
            for library in _libraries(path):
                _file(tar, made, library.lstrip("/"), Path(library).resolve())
                if library.endswith("/libc.so.6"):  # every glibc image has these beside it
                    for name in ("libpthread.so.0", "libdl.so.2"):
                        other = Path(library).with_name(name)
                        _file(tar, made, str(other).lstrip("/"), other.resolve())
        for name, target in {"bin/sh": "bash", "sbin": "bin", **(links or {})}.items():
            entry = tarfile.TarInfo(name)
            entry.type, entry.linkname = tarfile.SYMTYPE, target
            tar.addfile(entry)
        for name, text in {"etc/passwd": "root:x:0:0::/root:/bin/sh\nuser:x:1000:1000::/tmp:/bin/sh\n",
                           "etc/group": "root:x:0:\nuser:x:1000:\n"}.items():
            entry = tarfile.TarInfo(name)
            entry.size, entry.mode = len(text), 0o644
            tar.addfile(entry, io.BytesIO(text.encode()))
    return out


def _folder(tar: tarfile.TarFile, made: set[str], name: str) -> None:
    parts = name.split("/")
    for depth in range(1, len(parts) + 1):
        part = "/".join(parts[:depth])
        if part not in made:
            made.add(part)
            entry = tarfile.TarInfo(part)
            entry.type, entry.mode = tarfile.DIRTYPE, 0o1777 if part in ("tmp", "var/tmp") else 0o755
            tar.addfile(entry)


def _file(tar: tarfile.TarFile, made: set[str], name: str, source: Path) -> None:
    if name in made:
        return
    if "/" in name:
        _folder(tar, made, name.rpartition("/")[0])
    made.add(name)
    tar.add(source, name)


def _libraries(path: Path) -> list[str]:
    done = subprocess.run(["ldd", path], capture_output=True, text=True, check=False)
    words = (word for line in done.stdout.splitlines() for word in line.split())
    return [word for word in words if word.startswith("/")]


def end(process: subprocess.Popen[Any], what: str, seconds: float = 20.0) -> None:
    """SIGTERM, and a clear failure where that does not end it."""
    process.send_signal(signal.SIGTERM)
    try:
        process.wait(seconds)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
        raise AssertionError(f"{what} did not end in {seconds:.0f} s") from None


@contextlib.contextmanager
def cgroup_parent(name: str) -> Iterator[str]:
    """The name of a cgroup that engines may make, gone afterwards from every hierarchy."""
    yield f"/{name}"
    for top in [Path("/sys/fs/cgroup"), *Path("/sys/fs/cgroup").iterdir()]:
        if (top / name).is_dir() and (top / "cgroup.procs").exists():
            remove_cgroups(top / name)


def remove_cgroups(folder: Path) -> None:
    """A cgroup and those below it, which must be empty by now or in a moment."""
    for below, _, _ in os.walk(folder, topdown=False):
        deadline = time.monotonic() + 10
        while True:
            try:
                os.rmdir(below)
                break
            except FileNotFoundError:
                break
            except OSError:
                assert time.monotonic() < deadline, f"{below} still has processes"
                time.sleep(0.1)


class Dockerd:
    """The distribution's dockerd with all its folders below ``base``, and the distribution's client for it."""

    def __init__(self, root: Path, base: Path, parent: str, *before: Path) -> None:
        self.base = base
        self.env = environment(root, *before)
        self.socket = base / "docker.sock"
        self.config = base / "daemon.json"
        self.pid_file = base / "docker.pid"
        self.log = base / "dockerd.log"
        self.parent = parent
        self.process: subprocess.Popen[bytes] | None = None
        self.client = root / "usr/bin/docker"

    def start(self) -> None:
        with open(self.log, "ab") as log:
            self.process = subprocess.Popen(
                ["dockerd", f"--config-file={self.config}", f"--data-root={self.base}/data",
                 f"--exec-root={self.base}/exec", f"--host=unix://{self.socket}", f"--pidfile={self.pid_file}",
                 "--iptables=false", "--ip6tables=false", "--bridge=none", f"--cgroup-parent={self.parent}",
                 "--exec-opt=native.cgroupdriver=cgroupfs"],
                env=self.env, stdout=log, stderr=log, stdin=subprocess.DEVNULL)
        wait_until(self._answers, f"dockerd, whose log says:\n{self.log.read_text()[-2000:]}", 60)

    def _answers(self) -> bool:
        assert self.process
        if self.process.poll() is not None:
            pytest.skip(f"dockerd does not run here: {self.log.read_text()[-600:]}")
        return self("version", check=False).returncode == 0

    def __call__(
        self, *arguments: Path | str, check: bool = True, timeout: float = 90
    ) -> subprocess.CompletedProcess[str]:
        done = subprocess.run([self.client, *arguments], env={**self.env, "DOCKER_HOST": f"unix://{self.socket}"},
                              capture_output=True, text=True, check=False, timeout=timeout, stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"docker {' '.join(map(str, arguments))}: {done.stderr}"
        return done

    def shell(self, command: str, check: bool = True) -> subprocess.CompletedProcess[str]:
        """A command line with ``docker`` in it, as a user types it."""
        env = {**self.env, "DOCKER_HOST": f"unix://{self.socket}", "PATH": f"{self.client.parent}:{self.env['PATH']}"}
        done = subprocess.run(command, shell=True, env=env, capture_output=True, text=True, check=False, timeout=90,
                              stdin=subprocess.DEVNULL)
        assert not check or done.returncode == 0, f"{command}: {done.stderr}"
        return done

    def stop(self) -> None:
        if self.process is None:
            return
        left = self("ps", "-aq", check=False).stdout.split()
        if left:
            self("rm", "-f", *left, check=False)
        end(self.process, "dockerd", 40)
        for folder in ("data", "exec"):
            unmount_below(self.base / folder)
        self.process = None
