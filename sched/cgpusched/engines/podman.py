"""podman's drop-in below /etc/containers: our runtime as its default.

A file of our own, so nothing of anybody's is edited. Files whose names come later have the last word.
"""

from __future__ import annotations

import json

from cgpusched.engines.edit import Edit, Remembered

OURS = "cgpu"
JSON_RUNTIMES = ["crun", "runc", "kata", "runsc", "youki", "krun", OURS]
"""podman's own list, and ours: those whose errors it reads as JSON (containers.conf(5), runtime_supports_json)."""


def configure(text: str, binary: str, default: bool = True) -> Edit:
    """The drop-in's whole text. Strings are JSON's, which are TOML's, too."""
    lines = ["# written by cgpuctl setup podman", "[engine]"]
    if default:
        lines.append(f"runtime = {json.dumps(OURS)}")
    lines += [f"runtime_supports_json = {json.dumps(JSON_RUNTIMES)}", "", "[engine.runtimes]",
              f"{OURS} = {json.dumps([binary])}", ""]
    return Edit("\n".join(lines), {}, [])


def restore(text: str, binary: str, before: Remembered) -> Edit:
    """Nothing: the file is ours."""
    return Edit("", {}, [])
