"""Stand-ins for NVIDIA's container toolkit and driver: they change containers as the real ones do, by files of ours.

``nvidia-container-runtime`` is a runtime in front of the next one. In the mode *legacy* it adds a prestart hook that
mounts the driver into the container's root, from outside, and has ldconfig make the links and the cache; in the mode
*cdi* it adds mounts to the configuration, and the links are made by a createContainer hook. Either way only for a
container whose NVIDIA_VISIBLE_DEVICES names GPUs, and what that was is noted.
"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from engines import MULTIARCH

VERSION = "550.54.15"
DRIVER = "int fake_driver = 1;\n"
NAMES = ("libcuda.so", "libnvidia-ml.so")

RUNTIME = '''#!{python} -ISs
import json, os, sys
words = sys.argv[1:]
if "create" in words or "run" in words:
    at = next(k for k, word in enumerate(words) if word in ("--bundle", "-b"))
    path = words[at + 1] + "/config.json"
    with open(path) as file:
        spec = json.load(file)
    env = dict(entry.split("=", 1) for entry in spec["process"]["env"])
    visible = env.get("NVIDIA_VISIBLE_DEVICES")
    with open("{folder}/visible", "w") as file:
        file.write(str(visible))
    if visible not in (None, "", "void"):
        hooks = spec.get("hooks") or {{}}
        spec["hooks"] = hooks
        if "{mode}" == "legacy":
            hook = {{"path": "{folder}/nvidia-container-runtime-hook", "args": ["nvidia-container-runtime-hook",
                    "prestart"]}}
            hooks["prestart"] = hooks.get("prestart", []) + [hook]
        else:
            for name in {names}:
                place = "/{multiarch}/" + name + ".{version}"
                spec["mounts"].append({{"source": "{folder}/" + name + ".{version}", "destination": place,
                                        "type": "bind", "options": ["ro", "nosuid", "nodev", "bind"]}})
            hook = {{"path": "{folder}/nvidia-cdi-hook", "args": ["nvidia-cdi-hook", "create-symlinks"]}}
            hooks["createContainer"] = hooks.get("createContainer", []) + [hook]
        with open(path, "w") as file:
            json.dump(spec, file)
os.execv("{following}", ["{following}", *words])
'''

PRESTART = '''#!{python} -ISs
import json, subprocess, sys
state = json.load(sys.stdin)
with open(state["bundle"] + "/config.json") as file:
    root = json.load(file)["root"]["path"]
root = root if root.startswith("/") else state["bundle"] + "/" + root
lines = ["set -e", "mkdir -p " + root + "/{multiarch}"]
for name in {names}:
    file = "/{multiarch}/" + name + ".{version}"
    lines += [": >>" + root + file, "mount --bind {folder}/" + name + ".{version} " + root + file]
lines.append("/sbin/ldconfig -r " + root + " /{multiarch}")
subprocess.run(["nsenter", "-t", str(state["pid"]), "-m", "sh", "-c", chr(10).join(lines)], check=True)
'''

LINKS = '''#!{python} -ISs
import json, os, sys
state = json.load(sys.stdin)
with open(state["bundle"] + "/config.json") as file:
    root = json.load(file)["root"]["path"]
root = root if root.startswith("/") else state["bundle"] + "/" + root
for name in {names}:
    link = root + "/{multiarch}/" + name + ".1"
    if not os.path.lexists(link):
        os.symlink(name + ".{version}", link)
'''


def make(folder: Path, mode: str, following: Path) -> Path:
    """The runtime, going on with ``following``; ``visible`` beside it has what NVIDIA_VISIBLE_DEVICES was."""
    folder.mkdir(exist_ok=True)
    source = folder / "driver.c"
    source.write_text(DRIVER)
    for name in NAMES:
        subprocess.run(["gcc", "-shared", "-fPIC", f"-Wl,-soname,{name}.1", "-o", folder / f"{name}.{VERSION}", source],
                       check=True)
    programs = {"nvidia-container-runtime": RUNTIME, "nvidia-container-runtime-hook": PRESTART,
                "nvidia-cdi-hook": LINKS}
    for name, text in programs.items():
        path = folder / name
        path.write_text(text.format(python=sys.executable, folder=folder, mode=mode, following=following,
                                    names=NAMES, version=VERSION, multiarch=MULTIARCH))
        path.chmod(0o755)
    return folder / "nvidia-container-runtime"
