"""Descriptors that outlive this process: the mounts and what they were opened with, and the sockets that others ask at.

A successor gets them as systemd hands over descriptors (``LISTEN_FDS``), from its descriptor store or from the program
that this process was before an exec (upgrade.py); or from the keeper (keeper.py), where no service manager has a store.
Whichever it was, take() gives them, and keep() sees to it that the next one gets them.

A name is ``KIND.TAG``. The tag says what it was opened for (a mount's device, a socket's inode), so that nothing is
taken for what it is not.
"""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from pathlib import Path
from typing import Protocol

import trio

from cgpusched.daemon.notify import Notifier
from cgpusched.daemon.survival import keeper
from cgpusched.fields import pairs
from cgpusched.sockets import address, send_now

log = logging.getLogger(__name__)

PATIENCE_SECONDS = 60.0
"""How long the keeper waits for a daemon."""
ANSWER_SECONDS = 2.0
AGAIN_SECONDS = 1.0
"""Between two keepers."""
_FIRST = 3  # SD_LISTEN_FDS_START


class Store(Protocol):
    """Holds what it is given until another process asks for it. Never raises: what fails is logged."""

    def put(self, name: str, fd: int) -> None: ...
    def drop(self, name: str) -> None: ...
    def end(self) -> None:
        """Nothing that it holds is needed any more."""


def handed_over(environ: Mapping[str, str]) -> list[tuple[int, str]]:
    """The descriptors that sd_listen_fds_with_names(3) would give, and their names."""
    count, names = environ.get("LISTEN_FDS", ""), environ.get("LISTEN_FDNAMES", "").split(":")
    if environ.get("LISTEN_PID") != str(os.getpid()) or not count.isdecimal():
        return []
    return list(zip(range(_FIRST, _FIRST + int(count)), names, strict=False))


def inherited(environ: MutableMapping[str, str]) -> dict[str, int]:
    """What was handed over, by name; not passed on. A name that is there twice is the later one."""
    found: dict[str, int] = {}
    for number, name in handed_over(environ):
        os.set_inheritable(number, False)
        if name in found:
            os.close(found[name])
        found[name] = number
    for name in ("LISTEN_PID", "LISTEN_FDS", "LISTEN_FDNAMES", "LISTEN_PIDFDID"):
        environ.pop(name, None)
    return found


CONFIG = ("config", "toml")
"""Kind and tag of what the configuration said that a daemon serves by."""


def last_config(environ: Mapping[str, str]) -> bytes | None:
    """That of the predecessor that handed its descriptors over; None if there was none. They stay where they are."""
    found = [number for number, name in handed_over(environ) if name == ".".join(CONFIG)]
    return _content(found[-1]) if found else None


class Kept:
    """What is kept, and in which store. All from the trio thread."""

    def __init__(self, found: Mapping[str, int], store: Store) -> None:
        """``found``: what a predecessor left; owned from here on."""
        self._found = dict(found)
        self._store = store
        self._held: dict[str, int] = {}
        self._bytes: dict[str, int] = {}
        """What take_bytes() read, by name."""
        self._taken: set[str] = set()
        """Names that the store still has, until keep() has said whether it goes on with them."""
        self.succeeds = bool(found)
        """Whether a predecessor left anything."""
        self.final = not found
        """Whether what is kept goes with this daemon. Else the next one goes on with it: also if this start fails."""
        self._ending = False

    def take(self, kind: str, tag: str) -> int | None:
        """A descriptor that a predecessor left, the caller's from here on. Others of that kind are given up."""
        chosen = None
        for name in [name for name in self._found if name.partition(".")[0] == kind]:
            fd = self._found.pop(name)
            if name == f"{kind}.{tag}":
                chosen = fd
                self._taken.add(name)
            else:
                os.close(fd)
                self._store.drop(name)
        return chosen

    def take_bytes(self, kind: str, tag: str) -> bytes:
        """What keep_bytes() kept; nothing if there is none."""
        fd = self.take(kind, tag)
        if fd is None:
            return b""
        self._bytes[f"{kind}.{tag}"] = fd
        return _content(fd)

    def keep(self, kind: str, tag: str, fd: int) -> None:
        """Has a copy of ``fd`` outlive us, in the place of what was kept of that kind."""
        for name in [name for name in self._held if name.partition(".")[0] == kind]:
            self._drop(name)
        for name in [name for name in self._taken if name.partition(".")[0] == kind]:
            self._taken.remove(name)
            if name != f"{kind}.{tag}":
                self._store.drop(name)
        name = f"{kind}.{tag}"
        self._held[name] = os.dup(fd)
        self._store.put(name, fd)

    def keep_bytes(self, kind: str, tag: str, content: bytes) -> None:
        """What was taken is kept as it is: systemd's store takes a second file of one name beside the first."""
        fd = self._bytes.pop(f"{kind}.{tag}", None)
        if fd is not None and _content(fd) != content:
            os.close(fd)
            self._store.drop(f"{kind}.{tag}")
            fd = None
        if fd is None:
            fd = os.memfd_create(kind, os.MFD_CLOEXEC)
            os.pwrite(fd, content, 0)
        try:
            self.keep(kind, tag, fd)
        finally:
            os.close(fd)

    def listener(self, kind: str, path: Path, bind: Callable[[], socket.socket]) -> socket.socket:
        """The listening socket at ``path``, with all who wait in its queue; a new one by ``bind`` if none was left."""
        fd = self.take(kind, _inode(path))
        sock = bind() if fd is None else socket.socket(fileno=fd)
        sock.setblocking(False)
        self.keep(kind, _inode(path), sock.fileno())
        return sock

    def ready(self) -> None:
        """This start came to its end: from now on the next daemon goes on with what is kept."""
        self.abandon()
        if not self._ending:
            self.final = False

    def end(self, final: bool) -> None:
        """This daemon stops, for good or to be started again. That holds, also if it becomes ready a moment later."""
        self._ending = True
        self.final = final

    def abandon(self) -> None:
        """Gives up all that a predecessor left and nobody took."""
        for name, fd in self._found.items():
            os.close(fd)
            self._store.drop(name)
        self._found.clear()

    @property
    def names(self) -> list[str]:
        """What a predecessor left and nobody took."""
        return list(self._found)

    def held(self) -> dict[str, int]:
        """What is kept, by name; still owned here."""
        return dict(self._held)

    def put_again(self) -> None:
        """For a store that has forgotten all."""
        for name, fd in self._held.items():
            self._store.put(name, fd)

    def close(self) -> None:
        """The copies; with ``final`` also what the store holds."""
        for fd in [*self._found.values(), *self._held.values(), *self._bytes.values()]:
            os.close(fd)
        if self.final:
            for name in [*self._found, *self._held]:
                self._store.drop(name)
            self._store.end()
        for owned in (self._found, self._held, self._bytes):
            owned.clear()

    def _drop(self, name: str) -> None:
        os.close(self._held.pop(name))
        self._store.drop(name)


def _content(fd: int) -> bytes:
    return os.pread(fd, os.fstat(fd).st_size, 0)


def _inode(path: Path) -> str:
    try:
        return str(path.lstat().st_ino)
    except OSError:
        return ""


class ManagerStore:
    """systemd's: FDSTORE=1. A manager that has none ignores what it is told."""

    def __init__(self, notifier: Notifier) -> None:
        self._notifier = notifier

    def put(self, name: str, fd: int) -> None:
        self._notifier.send("FDSTORE=1", f"FDNAME={name}", fd=fd)

    def drop(self, name: str) -> None:
        self._notifier.send("FDSTOREREMOVE=1", f"FDNAME={name}")

    def end(self) -> None:
        pass


class KeeperStore:
    """The keeper's process, found or started by connect()."""

    def __init__(self, runtime: Path) -> None:
        self._runtime = runtime
        self._sock: socket.socket | None = None

    @property
    def connected(self) -> bool:
        return self._sock is not None

    def connect(self) -> dict[str, int]:
        """Asks the one that is there for what it holds, or starts one. Blocks for ANSWER_SECONDS at most, or so."""
        found = self._ask()
        if found is None:
            self._start()
        return found or {}

    def _ask(self) -> dict[str, int] | None:
        sock = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        found: dict[str, int] = {}
        try:
            sock.settimeout(ANSWER_SECONDS)
            with address(self._runtime / keeper.NAME) as name:
                sock.connect(name)
            sock.send(b"give")
            while True:
                data, fds, _, _ = socket.recv_fds(sock, keeper.MESSAGE_MAX, 4)
                verb, _, name = data.decode("ascii", "replace").partition(" ")
                for fd in fds:
                    os.set_inheritable(fd, False)
                if verb == "have" and len(fds) == 1:
                    found[name] = fds[0]
                elif verb == "done":
                    self._sock = sock
                    return found
                else:
                    _close(fds)
                    raise ConnectionError("it ended")
        except OSError as error:
            if not isinstance(error, FileNotFoundError | ConnectionRefusedError):
                log.warning("keeper does not answer %s", pairs(reason=error))
            _close(found.values())
            sock.close()
            return None

    def _start(self) -> None:
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        command = [sys.executable, "-I", "-S", keeper.__file__, str(self._runtime), str(PATIENCE_SECONDS)]
        try:
            with theirs:
                subprocess.run(command, stdin=theirs.fileno(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                               cwd="/", start_new_session=True, timeout=30, check=True)  # fmt: skip
        except (OSError, subprocess.SubprocessError) as error:
            log.error("no keeper %s", pairs(reason=error, means="the mounts end with this process"))
            ours.close()
        else:
            self._sock = ours

    async def run_forever(self, kept: Kept) -> None:
        """Starts another one when the keeper has ended, and gives it all that is kept."""
        while True:
            if self._sock is not None:
                await trio.lowlevel.wait_readable(self._sock)
                log.warning("keeper has ended %s", pairs(starting="another"))
                self._sock.close()
                self._sock = None
            await trio.sleep(AGAIN_SECONDS)
            await trio.to_thread.run_sync(self._start)
            kept.put_again()

    def put(self, name: str, fd: int) -> None:
        self._send(f"keep {name}", fd)

    def drop(self, name: str) -> None:
        self._send(f"drop {name}")

    def end(self) -> None:
        self._send("end")

    def close(self) -> None:
        if self._sock is not None:
            self._sock.close()
            self._sock = None

    def _send(self, text: str, fd: int = -1) -> None:
        if self._sock is None:
            return
        try:
            send_now(self._sock.fileno(), text.encode(), [fd] if fd >= 0 else [])
        except OSError as error:
            log.warning("keeper was not told %s", pairs(text=text, reason=error.strerror))


def _close(fds: Iterable[int]) -> None:
    for fd in fds:
        os.close(fd)
