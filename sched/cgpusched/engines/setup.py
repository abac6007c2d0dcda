"""``cgpuctl setup``: the engine's file read, changed, kept a copy of, written, and the engine told. Idempotent."""

from __future__ import annotations

import difflib
import json
import os
import shutil
import signal
import subprocess
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

from cgpusched import files
from cgpusched.driver.find import packaged
from cgpusched.engines import containerd, docker, podman, podman_hook
from cgpusched.engines.edit import Edit, Remembered
from cgpusched.errors import UserError

BINARY = Path("/var/lib/cgpud/bin/cgpu-runtime")
KEPT = Path("/var/lib/cgpud/setup")
"""What our entries took the place of, for ``--undo``: a JSON file an engine."""
BACKUP = ".before-cgpu"
DOCKER_PID = Path("/run/docker.pid")
HOOK = Path("/usr/local/bin/nvidia-container-runtime-hook")
HOOK_TEXT = """#!/bin/sh
# Written by cgpuctl setup docker. Docker refuses --gpus unless a program of this name is on its path when it starts;
# where NVIDIA's container toolkit is not installed there is nothing for it to do.
exit 0
"""


@dataclass(frozen=True)
class Engine:
    edit: ModuleType
    config: Path
    default: bool
    """Ours becomes the default runtime unless the administrator says otherwise."""
    reload: Callable[[Path | None], str]
    """Tells the engine; says what was done, or what is left to do."""


@dataclass(frozen=True)
class Wish:
    """What the administrator asked for; None = what fits the engine."""

    engine: str
    """A key of ENGINES."""
    config: Path | None = None
    default: bool | None = None
    binary: Path = BINARY
    kept: Path = KEPT
    pid_file: Path | None = None
    undo: bool = False
    dry_run: bool = False
    gpus_hook: bool = False
    hook: Path = HOOK


def run(wish: Wish) -> list[str]:
    """Does it, and gives the lines to show. UserError: nothing was changed."""
    engine = ENGINES[wish.engine]
    path = wish.config or engine.config
    old = _read(path)
    memory = wish.kept / f"{wish.engine}.json"
    before = _remembered(memory, path)
    default = engine.default if wish.default is None else wish.default
    try:
        edit: Edit = (engine.edit.restore(old, str(wish.binary), before) if wish.undo
                      else engine.edit.configure(old, str(wish.binary), default))
        if wish.undo and wish.engine == "docker" and docker.had_ours_as_default(old) and _docker_pid(wish.pid_file):
            edit = docker.with_default(edit)
    except UserError as error:
        raise UserError(f"{path} {error}") from None
    lines = list(edit.notes)
    if wish.dry_run:
        return [*lines, *_difference(path, old, edit.text)]
    if not wish.undo:
        install_runtime(wish.binary)
    if edit.text == old:
        lines.append(f"{path}: nothing to change")
    else:
        if not wish.undo:
            _remember(memory, path, before | edit.before)
            _back_up(path, old)
        _write(path, edit.text)
        lines += [f"{path}: {'written' if edit.text else 'removed'}", engine.reload(wish.pid_file)]
    if wish.undo:
        memory.unlink(missing_ok=True)
    if wish.engine == "docker":
        lines += _gpus_hook(wish)
    return lines


def install_runtime(binary: Path) -> None:
    """Puts the runtime where the engines' files name it. A copy, so that an upgrade of the package changes no running
    call of it and a removed package no configuration."""
    content = packaged("bin/cgpu-runtime").read_bytes()
    if not binary.exists() or binary.read_bytes() != content or binary.stat().st_mode & 0o7777 != 0o755:
        files.own_folder(binary.parent, 0o755)
        files.replace(binary, content, 0o755, sync=True)


def _read(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path} cannot be read: {error}") from None


def _write(path: Path, text: str) -> None:
    """Through a link, as administrators keep such files elsewhere; with the mode it has."""
    path = Path(os.path.realpath(path))
    try:
        if not text:
            path.unlink(missing_ok=True)
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        files.replace(path, text.encode(), path.stat().st_mode & 0o7777 if path.exists() else 0o644, sync=True)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None


def _back_up(path: Path, text: str) -> None:
    """The file as it was before us, once: a second run must not put our own in its place."""
    copy = path.with_name(path.name + BACKUP)
    if text and not copy.exists():
        files.replace(copy, text.encode(), path.stat().st_mode & 0o7777, sync=True)


def _remember(memory: Path, path: Path, before: Remembered) -> None:
    files.own_folder(memory.parent, 0o755)
    files.replace(memory, json.dumps({"path": str(path), "before": before}, indent=1).encode(), 0o644, sync=True)


def _remembered(memory: Path, path: Path) -> Remembered:
    try:
        kept = json.loads(memory.read_text())
        before = kept["before"] if kept["path"] == str(path) else {}
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, LookupError, TypeError) as error:
        raise UserError(f"{memory} cannot be used: {error}; without it only our own entries can be undone") from None
    return before if isinstance(before, dict) else {}


def _difference(path: Path, old: str, new: str) -> list[str]:
    lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(path), f"{path} (new)", lineterm="")
    return list(lines) or [f"{path}: nothing to change"]


def _gpus_hook(wish: Wish) -> list[str]:
    ours = wish.hook.exists() and wish.hook.read_text(errors="replace") == HOOK_TEXT
    if wish.undo:
        if ours:
            wish.hook.unlink()
        return [f"{wish.hook}: removed"] if ours else []
    if ours or shutil.which(wish.hook.name):
        return []
    if not wish.gpus_hook:
        return [f"Docker refuses --gpus: there is no {wish.hook.name}. Install NVIDIA's container toolkit, or have one "
                "made that does nothing (--gpus-hook); then restart Docker once"]
    files.replace(wish.hook, HOOK_TEXT.encode(), 0o755)
    return [f"{wish.hook}: written; restart Docker once, for it looks for it only then (live-restore keeps containers)"]


def _docker_pid(pid_file: Path | None) -> int | None:
    """Docker's process, if it runs."""
    try:
        pid = int((pid_file or DOCKER_PID).read_text())
        return pid if Path(f"/proc/{pid}/comm").read_text().strip() == "dockerd" else None
    except (OSError, ValueError):
        return None


def _reload_docker(pid_file: Path | None) -> str:
    path = pid_file or DOCKER_PID
    try:
        pid = int(path.read_text())
        pidfd = os.pidfd_open(pid)
    except (OSError, ValueError):
        return "Docker does not run: it reads the file when it starts"
    try:
        if _docker_pid(pid_file) != pid:
            return f"{path} does not lead to Docker: reload it (systemctl reload docker)"
        signal.pidfd_send_signal(pidfd, signal.SIGHUP)
    except OSError as error:
        return f"Docker could not be told: {error.strerror}"
    finally:
        os.close(pidfd)
    return "Docker was told to read it again; containers go on"


def _reload_containerd(pid_file: Path | None) -> str:
    """It reads its file at its start only; containers have a process of their own between, and go on."""
    systemctl = shutil.which("systemctl")
    if systemctl and subprocess.run([systemctl, "is-active", "containerd"], capture_output=True,
                                    check=False).returncode == 0:
        done = subprocess.run([systemctl, "restart", "containerd"], capture_output=True, text=True, check=False)
        if done.returncode == 0:
            return "containerd was restarted; containers go on"
        return f"containerd could not be restarted: {done.stderr.strip()}"
    return "restart containerd: it reads the file at its start only (containers go on)"


def _reload_podman(pid_file: Path | None) -> str:
    return "podman reads it at its next call"


ENGINES = {
    "docker": Engine(docker, Path("/etc/docker/daemon.json"), True, _reload_docker),
    "containerd": Engine(containerd, Path("/etc/containerd/config.toml"), False, _reload_containerd),
    "podman": Engine(podman, Path("/etc/containers/containers.conf.d/50-cgpu.conf"), True, _reload_podman),
    # the one folder that podman looks into unless containers.conf names others
    "podman-hook": Engine(podman_hook, Path("/usr/share/containers/oci/hooks.d/50-cgpu.json"), True, _reload_podman),
}
