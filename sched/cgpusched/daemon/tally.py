"""What was counted in predecessors' times, so that counters go on over a change of daemon: ``<runtime>/counters.json``.

A counter that somebody has read must not go down: who collects metrics takes that for a reset, and adds all of it once
more. So what is shown is stored before it is shown; besides, once a second where something has changed. What passes
between the last time and a crash is not counted, which is less than a second. The file is of one boot, like the state.
Unknown keys are ignored; one that is no good costs the counts and nothing else.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

from cgpusched import files
from cgpusched.daemon.logs import Damper
from cgpusched.fields import pairs

log = logging.getLogger(__name__)

VERSION = 1
SIZE_MAX = 16 << 20
_MOST = (1 << 63) - 1
"""What a tenant scribbles on its page must not grow without end."""


@dataclass(frozen=True)
class _Sums:
    def plus(self, more: Self) -> Self:
        return type(self)(*(min(_MOST, getattr(self, one.name) + getattr(more, one.name)) for one in fields(self)))

    @classmethod
    def parse(cls, data: Any) -> Self:
        """What is missing is 0: a later version counts more. ValueError: no counters."""
        values = {one.name: data.get(one.name, 0) for one in fields(cls)}
        if not all(type(value) is int and 0 <= value <= _MOST for value in values.values()):
            raise ValueError("counters")
        return cls(**values)


@dataclass(frozen=True)
class Totals(_Sums):
    """One instance on one GPU; what each is, InstanceUsage says."""

    busy_ns: int = 0
    turns: int = 0
    overdue: int = 0
    launches: int = 0
    ungated: int = 0
    unknown: int = 0
    dirty: int = 0
    mem_refused: int = 0
    bypasses: int = 0
    overs: int = 0


@dataclass(frozen=True)
class GpuTotals(_Sums):
    fallbacks: int = 0
    starved: int = 0


@dataclass
class Tally:
    instances: dict[tuple[str, str], Totals] = field(default_factory=dict)
    """By instance and the GPU's UUID."""
    gpus: dict[str, GpuTotals] = field(default_factory=dict)
    """By UUID."""

    def of(self, ident: str, uuid: str) -> Totals:
        return self.instances.get((ident, uuid), Totals())

    def of_gpu(self, uuid: str) -> GpuTotals:
        return self.gpus.get(uuid, GpuTotals())

    def drop(self, ident: str, uuid: str) -> None:
        """The instance ends there; one of the same name begins at 0."""
        self.instances.pop((ident, uuid), None)

    def dump(self, boot: str) -> bytes:
        content = {
            "version": VERSION,
            "boot": boot,
            "instances": [{"id": ident, "gpu": uuid, **asdict(one)} for (ident, uuid), one in self.instances.items()],
            "gpus": {uuid: asdict(one) for uuid, one in self.gpus.items()},
        }
        return json.dumps(content).encode() + b"\n"

    @classmethod
    def load(cls, content: bytes, boot: str) -> Tally:
        """ValueError, LookupError, TypeError or AttributeError: it is none. One of another boot counts nothing."""
        data = json.loads(content)
        if data["version"] != VERSION:
            raise ValueError(f"version {data['version']!r}")
        if data["boot"] != boot:
            return cls()
        return cls({(str(one["id"]), str(one["gpu"])): Totals.parse(one) for one in data["instances"]},
                   {str(uuid): GpuTotals.parse(one) for uuid, one in data["gpus"].items()})


class TallyFile:
    def __init__(self, runtime: Path, boot: str) -> None:
        self.path = runtime / "counters.json"
        self._boot = boot
        self._last = b""
        self._damper = Damper()

    def load(self, known: Mapping[str, object]) -> Tally:
        """What the instances that are ``known`` (by ID) have counted so far, and the GPUs."""
        try:
            with open(self.path, "rb") as file:
                content = file.read(SIZE_MAX)
            tally = Tally.load(content, self._boot)
        except FileNotFoundError:
            return Tally()
        except (OSError, ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
            log.error("counters begin at 0 %s", pairs(path=self.path, reason=f"{type(error).__name__}: {error}"[:200]))
            return Tally()
        tally.instances = {key: one for key, one in tally.instances.items() if key[0] in known}
        return tally

    def save(self, tally: Tally) -> None:
        """Where it has changed. A failure is logged: what is counted is shown all the same."""
        content = tally.dump(self._boot)
        if content == self._last:
            return
        try:
            files.replace(self.path, content, 0o600)
            self._last = content
        except OSError as error:
            if (held := self._damper.note()) is not None:
                log.error("counters not stored %s%s", pairs(path=self.path, reason=error.strerror), held)
