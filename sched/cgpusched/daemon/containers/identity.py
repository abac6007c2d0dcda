"""Which container a process belongs to, by what the kernel says of it: its cgroup, else its PID namespace.

The cgroup first: with ``--pid host`` or ``--pid container:X`` the namespace is somebody else's. Engines put the
container's ID into the cgroup's path, in one of these forms (as seen from the daemon's cgroup namespace):

    /docker/ID                           cgroupfs driver; with --cgroup-parent /foo/ID
    /system.slice/docker-ID.scope        systemd driver; likewise libpod-, crio-, cri-containerd-, runc-
    /libpod_parent/libpod-ID  /k8s.io/ID  /../../docker/ID
    /PARENT.slice:cri-containerd:ID      systemd's form, given to the cgroupfs driver

and that of the program beside it, which is none of the container's, as libpod-conmon-ID.scope.

A container can make cgroups only below its own: of several IDs the outermost counts. What cannot be known is not held
against anybody: which socket a process came by is its identity, and this is the check on it.

Pids are the daemon's, which runs in the node's PID namespace. Reading /proc takes about 20 us a file.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

PROC = Path("/proc")
_NS_GET_PARENT = 0xB702
_DEPTH_MAX = 33  # the kernel nests 32 PID namespaces
_HEX = re.compile(r"[0-9a-f]{64}")
_SCOPE = re.compile(r"(?:docker|libpod|crio|cri-containerd|nerdctl|runc|crun)-(.+?)(?:\.scope)?")
_BESIDE = re.compile(r"(?:libpod|crio)-conmon-")
TRANSLATION_SECONDS = 1.0
"""How long a translated pid is kept: a process's does not change, but its number may become another's."""

Key = tuple[int, int]
"""Device and inode of a namespace: its identity while it exists."""


def named_in(cgroup: str, known: Collection[str]) -> str | None:
    """The outermost of the ``known`` IDs that a /proc/PID/cgroup names."""
    for line in cgroup.splitlines():
        path = line.split(":", 2)[-1]
        for part in path.split("/"):
            for name in _names(part):
                if name in known:
                    return name
    return None


def _names(part: str) -> Iterator[str]:
    if _BESIDE.match(part):
        return
    yield part
    if scope := _SCOPE.fullmatch(part):
        yield scope[1]
    yield from _HEX.findall(part)


@dataclass(frozen=True)
class Space:
    """A PID namespace. ``depth``: how many pids a process in it has, as the daemon sees it; 1 is the daemon's own."""

    key: Key
    depth: int

    def pid(self, host: int, proc: Path = PROC) -> int | None:
        """A process as this namespace counts it; None if it is not in it (or in one below), or has ended."""
        try:
            numbers = _numbers(proc / str(host))
            if len(numbers) < self.depth or not _is_within(proc / str(host) / "ns/pid", self.key):
                return None
        except OSError:
            return None
        return numbers[self.depth - 1]


def space_of(pid: int, proc: Path = PROC) -> tuple[Space, int]:
    """The namespace of a process, and a descriptor that keeps it from being another's later. OSError: it has ended."""
    folder = proc / str(pid)
    fd = os.open(folder / "ns/pid", os.O_RDONLY | os.O_CLOEXEC)
    try:
        found = os.fstat(fd)
        return Space((found.st_dev, found.st_ino), len(_numbers(folder))), fd
    except BaseException:
        os.close(fd)
        raise


def _numbers(folder: Path) -> list[int]:
    """Its pid in each PID namespace it is in, outermost first. OSError: no such process."""
    for line in (folder / "status").read_bytes().splitlines():
        if line.startswith(b"NSpid:"):
            return [int(number) for number in line.split()[1:]]
    raise ProcessLookupError(errno.ESRCH, "no NSpid", str(folder))


def _is_within(link: Path, key: Key) -> bool:
    """Whether the namespace at ``link`` is that one or lies below it. OSError: no such process."""
    found = os.stat(link)
    if (found.st_dev, found.st_ino) == key:
        return True
    fd = os.open(link, os.O_RDONLY | os.O_CLOEXEC)
    try:
        for _ in range(_DEPTH_MAX):
            try:
                above = fcntl.ioctl(fd, _NS_GET_PARENT)
            except PermissionError:  # above it is none that we could see
                return False
            os.close(fd)
            fd = above
            found = os.fstat(fd)
            if (found.st_dev, found.st_ino) == key:
                return True
        return False
    finally:
        os.close(fd)


@dataclass(frozen=True)
class Owners:
    """The containers as of one moment, and which of them a process belongs to. May be used in a thread."""

    spaces: Mapping[str, Space | None] = field(default_factory=dict)
    """By full ID. None: its first process is not known yet."""

    def owner_of(self, pid: int, proc: Path = PROC) -> str | None:
        """A container's full ID; None where none can be told."""
        if (named := self._named(pid, proc)) is not None:
            return named
        inside = [id for id, space in self._private() if space.pid(pid, proc) is not None]
        return inside[0] if len(inside) == 1 else None

    def is_foreign(self, pid: int, id: str, proc: Path = PROC) -> bool:
        """Whether the process is known not to belong to container ``id``."""
        if (named := self._named(pid, proc)) is not None:
            return named != id
        space = dict(self._private()).get(id)
        return space is not None and (proc / str(pid)).exists() and space.pid(pid, proc) is None

    def _named(self, pid: int, proc: Path) -> str | None:
        with suppress(OSError):
            return named_in((proc / str(pid) / "cgroup").read_text("utf-8", "replace"), self.spaces)
        return None

    def _private(self) -> Iterator[tuple[str, Space]]:
        """The containers that have a namespace which is not the node's."""
        return ((id, space) for id, space in self.spaces.items() if space is not None and space.depth > 1)


class Translator:
    """Host pids as one container counts them, remembered for a moment: every stat of a meminfo asks for all of them."""

    def __init__(self, space: Space | None, clock: Callable[[], float], proc: Path = PROC) -> None:
        self._space = space
        self._clock = clock
        self._proc = proc
        self._known: dict[int, int | None] = {}
        self._until = 0.0

    def __call__(self, host: int) -> int | None:
        """None: it is not in the container's namespace, or that is not known yet."""
        if self._space is None:
            return None
        if self._clock() >= self._until:
            self._known.clear()
            self._until = self._clock() + TRANSLATION_SECONDS
        if host not in self._known:
            self._known[host] = self._space.pid(host, self._proc)
        return self._known[host]
