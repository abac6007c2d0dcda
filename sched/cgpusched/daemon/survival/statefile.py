"""The file that the state outlives the daemon in: ``<runtime>/state.json``, root's alone.

It changes as a whole, before the command that changed the state is answered. It lies below /run and is of one boot.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Iterable, Mapping
from pathlib import Path

from cgpusched import files, store
from cgpusched.daemon.containers.identity import named_in
from cgpusched.daemon.procs import boot_id, process_of
from cgpusched.errors import UserError
from cgpusched.fields import pairs
from cgpusched.model import GpuSettings
from cgpusched.units import check_id

log = logging.getLogger(__name__)

SIZE_MAX = 16 << 20
BAD_KEPT = 3
"""Files set aside that are kept; older ones go."""


class StateFile:
    def __init__(self, runtime: Path) -> None:
        self.path = runtime / "state.json"
        self.boot = boot_id()
        self._instances = runtime / "inst"
        self._marks = runtime / "ct"

    def save(self, content: bytes) -> None:
        """Readers see the old file or the new one. OSError: the old one stays."""
        files.replace(self.path, content, 0o600)

    def load(self, settings: Mapping[str, GpuSettings]) -> store.Stored:
        """What is stored; nothing where there is no file, or one of another boot. UserError: it cannot be read.

        One that is no good is set aside, and what instances' folders say is taken instead. ``settings``: what the GPUs
        (by UUID) have then.
        """
        try:
            with open(self.path, "rb") as file:
                content = file.read(SIZE_MAX + 1)
        except FileNotFoundError:
            return store.Stored()
        except OSError as error:
            raise UserError(f"cannot read {self.path}: {error.strerror}") from None
        try:
            if len(content) > SIZE_MAX:
                raise store.StoreError(f"it is larger than {SIZE_MAX} bytes")
            stored = store.load(content)
        except store.StoreError as error:
            self._set_aside(str(error))
            return store.rebuild(self._folders(), settings, self._containers())
        if stored.boot != self.boot:
            log.info("state of another boot ignored %s", pairs(path=self.path))
            return store.Stored()
        return stored

    def _set_aside(self, reason: str) -> None:
        stamp = f"{time.strftime('%Y%m%dT%H%M%S')}-{time.time_ns() % 10**9:09}"
        aside = self.path.with_name(f"{self.path.name}.bad-{stamp}")
        log.error("state set aside %s", pairs(path=self.path, to=aside.name, reason=reason))
        try:
            self.path.rename(aside)
            for old in sorted(aside.parent.glob(f"{self.path.name}.bad-*"))[:-BAD_KEPT]:
                old.unlink()
        except OSError as error:
            raise UserError(f"cannot set {self.path} aside: {error.strerror}") from None

    def _containers(self) -> dict[str, store.Process]:
        """The oldest process of each container that is marked as registered and has a cgroup of its name."""
        marks = {path.name for path in self._marks.iterdir()} if self._marks.is_dir() else set()
        found: dict[str, store.Process] = {}
        for name in os.listdir("/proc") if marks else ():
            try:
                named = named_in(Path(f"/proc/{name}/cgroup").read_text("utf-8", "replace"), marks)
            except OSError:
                continue
            if named and name.isdigit() and (process := process_of(int(name))):
                found[named] = min(found.get(named, process), process, key=lambda one: (one.start, one.pid))
        return found

    def _folders(self) -> Iterable[store.StoredInstance]:
        """The instances that have a folder with readable limits, oldest first. Its socket's owner is theirs."""
        found = []
        for folder in self._instances.iterdir() if self._instances.is_dir() else ():
            if folder.is_symlink():
                continue
            try:
                check_id(folder.name)
                shares, native = store.limits((folder / "limits").read_text("ascii"))
                owner = (folder / "gate.sock").lstat().st_uid
                instance = store.StoredInstance(folder.name, shares, owner=owner, native=native)
                found.append((folder.stat().st_ctime_ns, instance))
            except (OSError, ValueError, UserError):
                continue
        return [one for _, one in sorted(found, key=lambda item: (item[0], item[1].id))]
