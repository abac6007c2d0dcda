"""key=value: what follows the words of a log line."""

from __future__ import annotations


def quote(value: object) -> str:
    """A value as it stands after ``key=``: quoted where a blank, quote or control character would split the line."""
    text = str(value)
    if text and all(char.isprintable() and char not in ' "\\' for char in text):
        return text
    escaped = text.replace("\\", "\\\\").replace('"', '\\"')
    return '"' + "".join(char if char.isprintable() else repr(char)[1:-1] for char in escaped) + '"'


def pairs(**values: object) -> str:
    """``a=1 b="two words"``, in the order given; None is left out."""
    return " ".join(f"{key}={quote(value)}" for key, value in values.items() if value is not None)
