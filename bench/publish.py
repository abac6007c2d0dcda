"""Puts the figures of a whole run, and a soak's, into docs/benchmarks.md, between their marks, and the plots beside it.

    python bench/publish.py [--json bench/results/latest.json] [--soak bench/results/soak.json] [--docs docs]
"""

import argparse
import json
import shutil
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / "bench"))
from musts import must  # noqa: E402
from records import compact  # noqa: E402

BEGIN, END = "<!-- figures: bench/publish.py writes what follows -->\n", "<!-- end of figures -->\n"
SOAK_BEGIN, SOAK_END = "<!-- soak: bench/publish.py writes what follows -->\n", "<!-- end of soak -->\n"
PLOTS = {"shares.svg": "Shares of three programs while policies and a weight are written",
         "ratio_error.svg": "Error of the ratio 1:2 by kernel length"}


def table(records: list[dict[str, Any]]) -> str:
    """The records as a Markdown table, misses in bold."""
    lines = ["| figure | of | measured | must | bare |", "|---|---|---|---|---|"]
    missed = 0
    for one in records:
        bound = must(one["name"], one["params"], one["baseline"])
        measured = f"{one['value']:g} {one['unit']}"
        if bound and not bound.holds(one["value"]):
            missed += 1
            measured = f"**{measured}, missed**"
        if one["runs"] > 1:
            measured += f" ({one['min']:g} to {one['max']:g})"
        params = ", ".join(f"{key} {compact(value)}" for key, value in one["params"].items())
        base = "" if one["baseline"] is None else f"{one['baseline']:g}"
        lines.append(f"| `{one['name']}` | {params} | {measured} | {bound or ''} | {base} |")
    devices = ", ".join(sorted({one["device"] for one in records}))
    return f"{len(records)} figures, device: {devices}; {missed} miss their must.\n\n" + "\n".join(lines) + "\n"


def publish(document: str, records: list[dict[str, Any]], plots: Iterable[str] = (),
            marks: tuple[str, str] = (BEGIN, END)) -> str:
    """The document with the plots and the table between its marks."""
    begin, end = marks
    head, found, rest = document.partition(begin)
    _, ended, tail = rest.partition(end)
    if not found or not ended:
        raise ValueError("the document lacks the marks of the figures")
    images = "".join(f"![{PLOTS[name]}]({name})\n\n" for name in plots)
    return f"{head}{begin}\n{images}{table(records)}\n{end}{tail}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--json", type=Path, default=ROOT / "bench/results/latest.json")
    parser.add_argument("--soak", type=Path, default=ROOT / "bench/results/soak.json")
    parser.add_argument("--docs", type=Path, default=ROOT / "docs")
    arguments = parser.parse_args()
    page = arguments.docs / "benchmarks.md"
    plots = [name for name in PLOTS if (arguments.json.parent / name).exists()]
    text = publish(page.read_text(), json.loads(arguments.json.read_text()), plots)
    page.write_text(publish(text, json.loads(arguments.soak.read_text()), marks=(SOAK_BEGIN, SOAK_END)))
    for name in plots:
        shutil.copy(arguments.json.parent / name, arguments.docs / name)


if __name__ == "__main__":
    main()
