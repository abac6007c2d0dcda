"""podman's hooks instead of a runtime: a file that has it show every container's configuration to ``cgpu-runtime``.

For where podman's runtime must stay what it is. The file is ours, so nothing of anybody's is edited. oci-hooks(5) has
no condition on a container's environment: what does not concern us goes back as it came.
"""

from __future__ import annotations

import json

from cgpusched.engines.edit import Edit, Remembered


def configure(text: str, binary: str, default: bool = True) -> Edit:
    """The hook's whole file."""
    hook = {"version": "1.0.0", "hook": {"path": binary, "args": ["cgpu-runtime", "precreate"]},
            "when": {"always": True}, "stages": ["precreate"]}
    return Edit(json.dumps(hook, indent=2) + "\n", {}, [])


def restore(text: str, binary: str, before: Remembered) -> Edit:
    """Nothing: the file is ours."""
    return Edit("", {}, [])
