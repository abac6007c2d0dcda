"""The tables of docs/tree.md, as data."""

import ast
import re
from pathlib import Path

_TEXT = (Path(__file__).parents[2] / "docs" / "tree.md").read_text(encoding="utf-8")


def table(*columns: str) -> list[dict[str, str]]:
    """The rows of the one table that has exactly these columns; cells without their backquotes."""
    header = "| " + " | ".join(columns) + " |\n"
    assert _TEXT.count("\n" + header) == 1, f"docs/tree.md has {_TEXT.count(header)} tables {header!r}"
    rows = []
    for line in _TEXT[_TEXT.index("\n" + header) + 1 + len(header) :].splitlines()[1:]:
        if not line.startswith("|"):
            break
        cells = [cell.strip() for cell in re.split(r" \| ", line.strip("|"))]
        assert len(cells) == len(columns), line
        rows.append(
            dict(zip(columns, (cell.strip("`") if cell.count("`") == 2 else cell for cell in cells), strict=True))
        )
    assert rows
    return rows


def listings() -> dict[str, list[str]]:
    return {
        row["directory"]: re.findall(r"`([^`]+)`", row["entries"] if "`" in row["entries"] else f"`{row['entries']}`")
        for row in table("directory", "entries")
    }


def nodes() -> list[dict[str, str]]:
    return table("node", "mode", "format", "meaning", "write")


def paths(node: str) -> list[str]:
    """Where a node of the table is found in the example tree."""
    if node.startswith("N/"):
        return [node.replace("N", n) for n in ("0", "1")]
    if node.startswith("<cid12>/"):
        return [node.replace("<cid12>", d) for d in ("0/c0ffee00c0ff", "0/bare-1", "1/bare-1")]
    return [node]


def writable() -> list[str]:
    return [paths(row["node"])[0] for row in nodes() if row["write"] != "–"]


def malformed() -> list[tuple[str, bytes]]:
    return [
        (row["what"], ast.literal_eval(row["write (Python bytes)"]) * int(row["times"]))
        for row in table("what", "write (Python bytes)", "times")
    ]


def taken() -> list[tuple[str, str, str]]:
    return [(row["node"], row["write"], row["then reads"]) for row in table("node", "write", "then reads")]


def refused() -> list[tuple[str, str, str]]:
    return [(row["node"], row["write"], row["error"]) for row in table("node", "write", "error", "because")]


def refused_commands() -> list[tuple[str, str]]:
    return [(row["write"], row["error"]) for row in table("write", "error", "because")]
