"""What changing a configuration file comes to."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Remembered = dict[str, Any]
"""What our entries took the place of, by key; None = nothing was there. Plain JSON."""


@dataclass(frozen=True)
class Edit:
    text: str
    """The file's new text; empty = the file is not needed."""
    before: Remembered
    notes: list[str]
    """What the administrator should know."""
