"""Figures and findings: how they are kept, judged and shown."""

from __future__ import annotations

import json
import statistics
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

PASSED, FAILED, SKIPPED = "passed", "failed", "skipped"


@dataclass
class Figure:
    """One measured value with the device's name; ``bare``: what the same thing gave without cgpufs in the same run."""

    name: str
    params: dict[str, object]
    value: float
    unit: str
    bare: float | None
    runs: int
    device: str
    most: float | None = None
    least: float | None = None

    @property
    def missed(self) -> bool:
        over = self.most is not None and self.value > self.most
        return over or (self.least is not None and self.value < self.least)

    def __str__(self) -> str:
        params = " ".join(f"{key}={value}" for key, value in self.params.items())
        bound = f" (must be <= {self.most:g})" if self.most is not None else ""
        bound += f" (must be >= {self.least:g})" if self.least is not None else ""
        bare = f", bare {self.bare:g}" if self.bare is not None else ""
        return f"{self.name} {params}: {self.value:g} {self.unit}{bare}{bound}{' MISSED' if self.missed else ''}"


@dataclass
class Finding:
    """How a check ended."""

    name: str
    status: str
    reason: str = ""
    seconds: float = 0.0
    notes: list[str] = field(default_factory=list)
    figures: list[Figure] = field(default_factory=list)


class Recorder:
    """Where a check puts what it finds: each at once in a file, so that a check that hangs loses nothing it had."""

    def __init__(self, path: Path, device: str, simulated: bool) -> None:
        self._path, self._device, self._simulated = path, device, simulated
        self.missed: list[str] = []

    def _write(self, kind: str, value: object) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps({kind: value}) + "\n")

    def note(self, text: str) -> None:
        self._write("note", text)

    def figure(self, name: str, values: float | Sequence[float], unit: str, params: dict[str, object] | None = None,
               bare: float | None = None, most: float | None = None, least: float | None = None) -> float:
        """Keeps the median; the bounds hold for real devices only. Gives the median."""
        runs = [values] if isinstance(values, int | float) else list(values)
        value = round(statistics.median(runs), 4)
        if self._simulated:
            most = least = None
        one = Figure(name, params or {}, value, unit, None if bare is None else round(bare, 4), len(runs), self._device,
                     most, least)
        self._write("figure", asdict(one))
        if one.missed:
            self.missed.append(str(one))
        return value

    def end(self, status: str, reason: str) -> None:
        self._write("end", [status, reason])


def read(path: Path, name: str, otherwise: str) -> Finding:
    """What a check wrote. ``otherwise``: why it failed, where it did not come to its end."""
    finding = Finding(name, FAILED, otherwise)
    for line in path.read_text().splitlines() if path.exists() else []:
        try:
            ((kind, value),) = json.loads(line).items()
        except ValueError:  # it was killed while it wrote
            continue
        if kind == "figure":
            finding.figures.append(Figure(**value))
        elif kind == "note":
            finding.notes.append(value)
        else:
            finding.status, finding.reason = value
    return finding


def table(findings: Sequence[Finding], device: str) -> str:
    lines = [f"gpu-check on {device}", ""]
    for one in findings:
        lines.append(f"{one.name:<16} {one.status:<8} {one.seconds:>5.1f} s  {one.reason}".rstrip())
        lines += [f"{'':<16}   {figure}" for figure in one.figures]
        lines += [f"{'':<16}   {note}" for note in one.notes]
    counts = {status: sum(one.status == status for one in findings) for status in (PASSED, FAILED, SKIPPED)}
    lines += ["", ", ".join(f"{number} {status}" for status, number in counts.items())]
    return "\n".join(lines)
