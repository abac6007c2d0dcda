"""dockerd's daemon.json: our runtime under its own name, under NVIDIA's, and as the default.

The default, since the published ``docker run --gpus all`` names no runtime; NVIDIA's name, since ``--runtime=nvidia``
must not lead past us. NVIDIA's runtime itself comes after ours (``runtimes`` in cgpud's configuration).
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

from cgpusched.engines.edit import Edit, Remembered
from cgpusched.errors import UserError

OURS = "cgpu"
NAMES = (OURS, "nvidia")
PASSED_BY = ("runc", "crun", "nvidia", OURS)
"""Default runtimes in whose place ours can be: it goes on to the same."""


def configure(text: str, binary: str, default: bool = True) -> Edit:
    """The text with our runtime in it, and what that takes the place of. UserError: no configuration of Docker's."""
    data = _parse(text)
    runtimes = data.get("runtimes", {})
    before: Remembered = {}
    notes = []
    for name in NAMES:
        if not _is_ours(runtimes.get(name), binary):
            before[f"runtimes.{name}"] = runtimes.get(name)
    data["runtimes"] = runtimes | {name: {"path": binary} for name in NAMES}
    previous = data.get("default-runtime")
    if default and previous != OURS:
        if previous in (None, *PASSED_BY):
            before["default-runtime"] = previous
            data["default-runtime"] = OURS
        else:
            notes.append(f"default-runtime stays {previous!r}: containers come to us by --runtime={OURS} only")
    notes += _foreign(before.get("runtimes.nvidia"))
    return Edit(_render(data, text), before, notes)


def restore(text: str, binary: str, before: Remembered) -> Edit:
    """The text without our runtime, with what ``before`` says in its place. What was changed since stays."""
    data = _parse(text)
    runtimes = data.get("runtimes", {})
    for name in NAMES:
        if _is_ours(runtimes.get(name), binary):
            _put(runtimes, name, before.get(f"runtimes.{name}"))
    if not runtimes:
        data.pop("runtimes", None)
    if data.get("default-runtime") == OURS:
        _put(data, "default-runtime", before.get("default-runtime"))
    return Edit(_render(data, text) if data else "", {}, [])


def with_default(edit: Edit) -> Edit:
    """For a Docker that runs and had ours as its default: one without that key goes on with the default that it has,
    and version 20.10 ends with a nil pointer if there is no such runtime any more (its Daemon.Reload)."""
    data = _parse(edit.text)
    if "default-runtime" in data:
        return edit
    note = f"default-runtime is {PASSED_BY[0]!r} now, as without that entry: a Docker that runs must be told so"
    return Edit(_render({**data, "default-runtime": PASSED_BY[0]}, edit.text), edit.before, [*edit.notes, note])


def had_ours_as_default(text: str) -> bool:
    return bool(_parse(text).get("default-runtime") == OURS)


def _parse(text: str) -> dict[str, Any]:
    try:
        data = json.loads(text) if text.strip() else {}
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not JSON: {error}") from None
    if not isinstance(data, dict) or not isinstance(data.get("runtimes", {}), dict):
        raise UserError("is no configuration of Docker's: an object is expected, and another in `runtimes`")
    return data


def _render(data: dict[str, Any], old: str) -> str:
    """As ``old`` was, down to its white space, if that says the same."""
    if old.strip() and json.loads(old) == data:
        return old
    text = json.dumps(data, indent=4, ensure_ascii=False)
    if any("\ud800" <= char <= "\udfff" for char in text):  # escaped before; as themselves they can't be written
        text = json.dumps(data, indent=4)
    return text + "\n"


def _put(table: dict[str, Any], key: str, value: Any) -> None:
    if value is None:
        table.pop(key, None)
    else:
        table[key] = value


def _is_ours(runtime: Any, binary: str) -> bool:
    return isinstance(runtime, dict) and runtime.get("path") == binary


def _foreign(runtime: Any) -> Iterator[str]:
    path = runtime.get("path") if isinstance(runtime, dict) else None
    if path and path.rpartition("/")[2] != "nvidia-container-runtime":
        yield f"the runtime `nvidia` was {path}: name it in `runtimes` of cgpud's configuration, before the others"
