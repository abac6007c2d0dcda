"""``cgpuctl setup systemd``: cgpud as a service of this node. ``--undo`` takes out the unit and what the daemon left.

The unit that came with the package names /usr/bin/cgpud; written is the one beside this ``cgpuctl``. Changes of the
administrator's belong in a drop-in (``systemctl edit cgpud``): a second setup writes the unit again.
"""

from __future__ import annotations

import argparse
import difflib
import fcntl
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

from cgpusched import config, files, store
from cgpusched.driver.find import packaged
from cgpusched.engines.setup import BINARY, KEPT
from cgpusched.errors import UserError

UNIT = Path("/etc/systemd/system/cgpud.service")
BOOTED = Path("/run/systemd/system")
"""Is there where systemd is PID 1 (sd_booted(3))."""
PROGRAM = "/usr/bin/cgpud"
MARK = "# Written by cgpuctl setup systemd."
CDI = Path("/etc/cdi/cgpu.json")
"""Where docs/containers.md has the CDI specification written; its hook is cgpu-runtime, too."""
_PLAIN = re.compile(r"[A-Za-z0-9/._+@:-]+")


def run(unit: Path = UNIT, *, undo: bool = False, dry_run: bool = False) -> list[str]:
    """Does it, and gives the lines to show. UserError: it could not be done, or not to its end."""
    old = _read(unit)
    if old and not old.startswith(MARK):
        raise UserError(f"{unit} is not ours: cgpuctl setup systemd has not written it")
    new = "" if undo else unit_text(_program())
    if dry_run:
        lines = difflib.unified_diff(old.splitlines(), new.splitlines(), str(unit), f"{unit} (new)", lineterm="")
        return [*(list(lines) or [f"{unit}: nothing to change"]), *(_clean(True, _active(unit)) if undo else [])]
    if shutil.which("systemctl") is None:
        raise UserError("there is no systemctl on this node")
    return _take_out(unit, old) if undo else _put_in(unit, old, new)


def unit_text(program: str) -> str:
    """The packaged unit, for that cgpud."""
    return f"{MARK}\n{packaged('systemd/cgpud.service').read_text('utf-8').replace(PROGRAM, program)}"


def _put_in(unit: Path, old: str, new: str) -> list[str]:
    booted, ran = BOOTED.is_dir(), _active(unit)
    if booted and not ran and _is_held(config.load(None, argparse.Namespace()).runtime_dir):
        raise UserError("a cgpud that systemd did not start runs: end it first")
    lines = [f"{unit}: nothing to change"]
    if new != old:
        try:
            unit.parent.mkdir(parents=True, exist_ok=True)
            files.replace(unit, new.encode(), 0o644, sync=True)
        except OSError as error:
            raise UserError(f"{unit} cannot be written: {error.strerror}") from None
        lines = [f"{unit}: written"]
    if not booted:
        _systemctl("enable", unit.name)
        return [*lines, "cgpud starts with the node; systemd does not run here now"]
    _systemctl("daemon-reload")
    _systemctl("enable", "--now", unit.name)
    if not ran:
        return [*lines, "cgpud runs, and starts with the node"]
    return [*lines, "cgpud ran already, and goes on; systemctl restart cgpud makes it follow a changed unit"]


def _take_out(unit: Path, old: str) -> list[str]:
    lines = [f"{unit}: nothing to change"]
    if old:
        if BOOTED.is_dir():
            _systemctl("disable", "--now", unit.name)
        else:
            _systemctl("disable", unit.name)
        unit.unlink()
        lines = [f"{unit}: removed"]
        if BOOTED.is_dir():
            _systemctl("daemon-reload")
            _systemctl("reset-failed", unit.name, check=False)
    return lines + _clean()


def _clean(dry_run: bool = False, ours: bool = False) -> list[str]:
    """Removes what the daemon made, where nothing can need it any more; says what was removed, and what stays.

    ``dry_run``: only says what would be. ``ours``: what runs and is mounted now is the unit's, which will have ended.
    """
    here, usual = config.load(None, argparse.Namespace()), config.Config()
    runtime, lib = usual.runtime_dir, usual.lib_dir
    if (here.runtime_dir, here.lib_dir) != (runtime, lib):
        return [f"{here.runtime_dir} and {here.lib_dir} stay: the configuration names them"]
    if not ours and _is_held(runtime):
        return [f"{runtime} and {lib} stay: a cgpud that systemd did not start runs"]
    if count := _instances(runtime / "state.json"):
        return [f"{runtime} and {lib} stay: there are instances ({count}); once more when they have gone"]
    engines = sorted(one.stem for one in KEPT.glob("*.json"))
    callers = [*engines, *([str(CDI)] if CDI.exists() else [])]
    gone = [folder for folder in (runtime, lib, *([] if callers else [BINARY.parent, KEPT])) if folder.is_dir()]
    if not ours and (mounts := _mounts(here.mount, gone)):
        return [f"{runtime} and {lib} stay: {mounts[0]} is still mounted; umount it, or once more in a "
                "minute, when the keeper of a cgpud that was killed lets it go"]
    lines = [f"{folder}: {'would be removed' if dry_run else 'removed'}" for folder in gone]
    if not dry_run:
        _remove(gone, None if callers else lib.parent)
    if callers:
        lines.append(f"{BINARY.parent} stays: {', '.join(callers)} calls what is there "
                     f"(cgpuctl setup ENGINE --undo{f'; rm {CDI}' if CDI.exists() else ''})")
    return lines


def _remove(folders: list[Path], above: Path | None) -> None:
    """The folders, and ``above`` if nothing is left in it."""
    try:
        for folder in folders:
            shutil.rmtree(folder)
        if above and above.is_dir() and not os.listdir(above):
            above.rmdir()
    except OSError as error:
        raise UserError(f"{error.filename} cannot be removed: {error.strerror}") from None


def _is_held(runtime: Path) -> bool:
    """Whether a cgpud has that folder."""
    try:
        with open(runtime / "cgpud.lock") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except FileNotFoundError:
        return False
    except BlockingIOError:
        return True
    return False


def _mounts(tree: Path, folders: list[Path]) -> list[str]:
    """What is mounted at ``tree`` or in ``folders``. Looks at none of it: without its daemon it would not answer."""
    lines = Path("/proc/self/mountinfo").read_text("utf-8", "surrogateescape").splitlines()
    places = [Path(re.sub(r"\\([0-7]{3})", lambda code: chr(int(code[1], 8)), line.split()[4])) for line in lines]
    return [str(place) for place in places if place == tree or any(place.is_relative_to(one) for one in folders)]


def _instances(state: Path) -> int:
    try:
        return len(store.load(state.read_bytes()).instances)
    except (FileNotFoundError, store.StoreError):
        return 0


def _program() -> str:
    """The cgpud that belongs to this cgpuctl. UserError: there is none, or its path means something in a unit."""
    folders = [str(Path(sys.argv[0]).absolute().parent), sysconfig.get_path("scripts"), os.environ.get("PATH", "")]
    program = shutil.which("cgpud", path=os.pathsep.join(folders))
    if program is None:
        raise UserError(f"there is no cgpud beside cgpuctl: {folders[0]}")
    if not _PLAIN.fullmatch(program):
        raise UserError(f"{program}: a unit cannot name such a path as it is; install cgpud where there is a plain one")
    return program


def _read(unit: Path) -> str:
    try:
        return unit.read_text("utf-8")
    except FileNotFoundError:
        return ""
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{unit} cannot be read: {error}") from None


def _active(unit: Path) -> bool:
    return BOOTED.is_dir() and bool(shutil.which("systemctl")) and _systemctl(
        "is-active", "--quiet", unit.name, check=False)


def _systemctl(*words: str, check: bool = True) -> bool:
    """Whether it did that. UserError, with ``check``: it did not."""
    done = subprocess.run(["systemctl", *words], stdin=subprocess.DEVNULL, capture_output=True, text=True, check=False)
    if check and done.returncode:
        said = next(iter(done.stderr.strip().splitlines()), f"it ended with {done.returncode}")
        raise UserError(f"systemctl {' '.join(words)}: {said} (journalctl -u cgpud)")
    return done.returncode == 0
