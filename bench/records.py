"""What a figure is, what it must be, and how both are shown and kept."""

import json
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from musts import Must, must

DEVICE = "simulated"
FIELDS = ("name", "params", "value", "unit", "baseline", "runs", "min", "max", "device")


@dataclass
class Record:
    """One figure. ``value`` is the median of ``runs`` runs; ``baseline`` what the bare device gave in the same run."""

    name: str
    params: dict[str, object]
    value: float
    unit: str
    baseline: float | None
    runs: int
    min: float
    max: float
    device: str = DEVICE
    must: Must | None = field(default=None, compare=False)

    @property
    def missed(self) -> bool:
        return self.must is not None and not self.must.holds(self.value)

    def plain(self) -> dict[str, object]:
        """As it stands in the JSON."""
        return {key: value for key, value in asdict(self).items() if key in FIELDS}


def make_record(name: str, params: dict[str, object], values: Sequence[float], unit: str,
                baseline: float | None = None) -> Record:
    """The record of these runs; its must comes from the table in musts.py."""
    value = round(statistics.median(values), 4)
    base = None if baseline is None else round(baseline, 4)
    return Record(name, params, value, unit, base, len(values), round(min(values), 4), round(max(values), 4),
                  must=must(name, params, base))


def row(one: Record) -> str:
    """Its line of the table: name, parameters, measured, must, bare."""
    params = " ".join(f"{key}={compact(value)}" for key, value in one.params.items())
    base = "-" if one.baseline is None else f"{one.baseline:g}"
    spread = f", {one.min:g} to {one.max:g}" if one.runs > 1 else ""
    return (f"{one.name:<22} {params:<58} {one.value:>9g} {one.unit:<8} {one.must or '':<9}"
            f" {'MISSED' if one.missed else '':<6} bare {base}{spread}").rstrip()


def heading() -> str:
    return f"{'figure':<22} {'of':<58} {'measured':>9} {'':<8} {'must':<9}"


def compact(value: object) -> str:
    return ":".join(map(str, value)) if isinstance(value, list) else str(value)


def percentile(values: Iterable[float], percent: float) -> float:
    """The smallest value that at least ``percent`` percent are not above."""
    ordered = sorted(values)
    return ordered[max(0, -(-len(ordered) * percent // 100).__int__() - 1)]


def write(records: Iterable[Record], path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("[\n" + ",\n".join(" " + json.dumps(one.plain()) for one in records) + "\n]\n")


def summary(records: Sequence[Record]) -> str:
    held = [one for one in records if one.must]
    missed = [one for one in held if one.missed]
    return f"{len(records)} figures on the {DEVICE} device; {len(held)} have a must, {len(missed)} of them missed"
