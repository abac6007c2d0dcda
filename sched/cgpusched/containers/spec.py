"""The edit of an OCI runtime configuration (config.json): what a container that shares a GPU gets beside its own.

Pure: a dict goes in, another comes out. Whatever is not ours stays as it was, known to us or not, in its order. Applied
twice it changes nothing more. The text comes from an engine, and in part from an image: each wrong type is a UserError.
"""

from __future__ import annotations

import json
import posixpath
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

from cgpusched.containers.variables import NVIDIA
from cgpusched.errors import UserError
from cgpusched.units import show

SPEC_MAX = 16 << 20
"""Bytes of a config.json. Docker's with its seccomp profile has 50 KiB."""
FOLDERS_MAX = 32
"""Library folders that an environment may name to us."""
_LIBRARY_PATH = "LD_LIBRARY_PATH"

Spec = dict[str, Any]


@dataclass(frozen=True)
class Mount:
    """A bind of the node's ``source``, absolute, on the container's ``target``."""

    source: str
    target: str
    writable: bool = False
    executable: bool = False
    """Needed where programs load libraries from it."""

    def oci(self) -> Spec:
        options = ["bind", "rprivate", "rw" if self.writable else "ro", "nosuid", "nodev"]
        return {
            "destination": self.target,
            "type": "bind",
            "source": self.source,
            "options": options if self.executable else [*options, "noexec"],
        }


@dataclass(frozen=True)
class Edit:
    """What to make of a configuration."""

    mounts: tuple[Mount, ...]
    """In this order, after all others, so that nothing of the container's own covers them."""
    visible: str
    """NVIDIA_VISIBLE_DEVICES."""
    hook: str
    """Path of cgpu-runtime on the node: runs before the container's program, after NVIDIA's hooks."""
    tree: str
    """Where the node has the whole tree: a bind of it by the user's hand shows ``view`` instead."""
    view: str


# Text


def read(data: bytes) -> Spec:
    """Parses a config.json. Numbers of any size, lone surrogates and unknown keys survive until write()."""
    try:
        spec = json.loads(data.decode("utf-8"), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise UserError(f"config.json is not valid JSON: {error}") from None
    return _object(spec, "it")


def write(spec: Spec) -> bytes:
    """The text of a config.json. All that is not ASCII is escaped, which means the same to every reader."""
    try:
        return json.dumps(spec, allow_nan=False, separators=(",", ":")).encode("ascii")
    except (ValueError, RecursionError) as error:
        raise UserError(f"config.json cannot be written again: {error}") from None


def _no_number(word: str) -> None:
    raise ValueError(f"{word} is no number")


def _object(value: Any, name: str) -> Spec:
    if not isinstance(value, dict):
        raise UserError(f"config.json: {name} is {_kind(value)}: an object is allowed")
    return value


def _list(value: Any, name: str) -> list[Any]:
    if not isinstance(value, list):
        raise UserError(f"config.json: {name} is {_kind(value)}: a list is allowed")
    return value


def _text(value: Any, name: str) -> str:
    if not isinstance(value, str):
        raise UserError(f"config.json: {name} is {_kind(value)}: a string is allowed")
    return value


def _kind(value: Any) -> str:
    names = {dict: "an object", list: "a list", str: "a string", bool: "a boolean", type(None): "null"}
    return names.get(type(value), "a number")


def _child(spec: Spec, *path: str) -> Any:
    """What is at that place; None: nothing, or null, as Go writes an empty list."""
    for depth, name in enumerate(path):
        value = spec.get(name)
        if value is None or depth == len(path) - 1:
            return value
        spec = _object(value, ".".join(path[: depth + 1]))
    return spec


# What it says


def environment(spec: Spec) -> list[str]:
    """``process.env``; empty where there is none."""
    entries = _child(spec, "process", "env")
    return [] if entries is None else [_text(entry, "process.env's entry") for entry in _list(entries, "process.env")]


def root(spec: Spec, bundle: str) -> str:
    """The folder that will be the container's root, absolute, and fit for a line (wire.lines)."""
    path = _text(_child(spec, "root", "path"), "root.path")
    path = posixpath.normpath(posixpath.join(bundle, path))
    if not path.isprintable():
        raise UserError(f"config.json: root.path {show(path)}: a path without control characters is allowed")
    return path


def library_folders(spec: Spec) -> list[str]:
    """Further folders in which its programs look for libraries: absolute ones of LD_LIBRARY_PATH."""
    return all_library_folders(spec)[:FOLDERS_MAX]


def all_library_folders(spec: Spec) -> list[str]:
    """The same, however many."""
    found: dict[str, None] = {}
    for entry in environment(spec):
        name, _, value = entry.partition("=")
        if name == _LIBRARY_PATH:
            folders = (folder for folder in value.split(":") if folder.startswith("/") and folder.isprintable())
            found = dict.fromkeys(map(_place, folders))
    return list(found)


def missing(spec: Spec, mounts: Iterable[Mount]) -> list[Mount]:
    """Which of these binds it does not have. Who came by another way than cgpu-runtime may have none."""
    there = set()
    for mount in _mounts(spec):
        source = mount.get("source")
        there.add((source if isinstance(source, str) else "", _destination(mount)))
    return [mount for mount in mounts if (mount.source, mount.target) not in there]


def views_by_hand(spec: Spec, tree: str, view: str) -> list[Mount]:
    """The own view for each bind of the node's tree, and of a folder above it, that is left: to be mounted over it."""
    change = Edit((), "", "", tree, view)
    changed = ((mount, _own_view(mount, change)) for mount in _mounts(spec))
    return [*(Mount(new["source"], _destination(old)) for old, new in changed if new is not old),
            *_views_below(_mounts(spec), tree, view)]


def destinations(spec: Spec) -> list[str]:
    """Where something is mounted."""
    return [_destination(mount) for mount in _mounts(spec)]


def shared(spec: Spec) -> list[str]:
    """The destinations below which a mount would appear on the node, too."""
    return [_destination(mount) for mount in _mounts(spec) if {"shared", "rshared"} & set(_options(mount))]


def is_below(path: str, folders: Iterable[str]) -> bool:
    """Whether it is one of the folders, or in one."""
    return any(path == folder or path.startswith(folder.rstrip("/") + "/") for folder in folders)


def check_propagation(spec: Spec, targets: Iterable[str]) -> None:
    """UserError: what is mounted there would be mounted on the node."""
    folders = shared(spec)
    for target in targets:
        if is_below(target, folders):
            raise UserError(f"a mount with shared propagation at or above {show(target)}: what a container gets there "
                            "of ours would appear on the node: private or slave propagation is allowed")


def _mounts(spec: Spec) -> list[Spec]:
    mounts = spec.get("mounts")
    return [] if mounts is None else [_object(mount, "mounts' entry") for mount in _list(mounts, "mounts")]


def _destination(mount: Spec) -> str:
    return _place(_text(mount.get("destination"), "a mount's destination"))


def _place(path: str) -> str:
    """One spelling for a path. Of a leading "//" POSIX lets normpath() keep both."""
    return posixpath.normpath("/" + path.lstrip("/"))


# The edit


def edit(spec: Spec, change: Edit) -> Spec:
    """A configuration with the change made; ``spec`` itself is left as it is. UserError: not one that we can edit."""
    spec = dict(spec)
    spec["process"] = {**_object(spec.get("process"), "process"), "env": _environment(spec, change.visible)}
    spec["mounts"] = _with_mounts(spec, change)
    hooks = _child(spec, "hooks")
    spec["hooks"] = {**_object({} if hooks is None else hooks, "hooks"), "createRuntime": _with_hook(spec, change.hook)}
    return spec


def hooked(spec: Spec, hook: str, visible: str | None = None) -> Spec:
    """A configuration with our hook, and with NVIDIA_VISIBLE_DEVICES if that is known: what needs no ID.

    The hook makes up for the rest. ``spec`` itself is left as it is. UserError: not one that we can edit.
    """
    process = _object(spec.get("process"), "process")
    env = environment(spec) if visible is None else _environment(spec, visible)
    hooks = _child(spec, "hooks")
    return {**spec, "process": {**process, "env": env},
            "hooks": {**_object({} if hooks is None else hooks, "hooks"), "createRuntime": _with_hook(spec, hook)}}


def _environment(spec: Spec, visible: str) -> list[str]:
    """With every NVIDIA_VISIBLE_DEVICES replaced: of several, readers disagree about which one counts."""
    entry, mark = f"{NVIDIA}={visible}", f"{NVIDIA}="
    entries = environment(spec)
    if not any(old.startswith(mark) for old in entries):
        return [*entries, entry]
    return [entry if old.startswith(mark) else old for old in entries]


def _with_mounts(spec: Spec, change: Edit) -> list[Spec]:
    taken = {mount.target for mount in change.mounts}
    kept = [_own_view(mount, change) for mount in _mounts(spec) if _destination(mount) not in taken]
    views = [mount for mount in _views_below(kept, change.tree, change.view) if mount.target not in taken]
    targets = {mount.target for mount in views}
    kept = [mount for mount in kept if _destination(mount) not in targets]
    check_propagation({"mounts": kept}, [*taken, *targets])
    return [*kept, *(mount.oci() for mount in (*views, *change.mounts))]


def _own_view(mount: Spec, change: Edit) -> Spec:
    """A bind of the node's tree, or of something in it, made one of the container's own view."""
    place = _bound(mount)
    if place is None or not is_below(place, [change.tree]):
        return mount
    kept = [option for option in _options(mount) if option not in ("rw", "ro")]
    return {**mount, "source": change.view + place[len(change.tree) :], "options": [*kept, "ro"]}


def _views_below(mounts: list[Spec], tree: str, view: str) -> list[Mount]:
    """The own view where a bind of a folder above the node's tree would show that, unless something else is there."""
    other = {_destination(mount) for mount in mounts if mount.get("source") != view}
    found: dict[str, None] = {}
    for mount in mounts:
        place = _bound(mount)
        alone = "bind" in _options(mount) and "rbind" not in _options(mount)  # then the tree is not there
        if not alone and place is not None and place != tree and is_below(tree, [place]):
            found[_place(_destination(mount) + "/" + tree[len(place.rstrip("/")) :])] = None
    return [Mount(view, target) for target in found if target not in other]


def _bound(mount: Spec) -> str | None:
    """What it is a bind of, by one spelling; None: it is no bind."""
    source = mount.get("source")
    if not isinstance(source, str) or not {"bind", "rbind"} & {mount.get("type"), *_options(mount)}:
        return None
    place = _place(source)
    return place[len("/var") :] if is_below(place, ["/var/run"]) else place  # the same folder by its old name


def _options(mount: Spec) -> list[str]:
    options = mount.get("options")
    return [] if options is None else _strings(options)


def _strings(options: Any) -> list[str]:
    return [_text(option, "a mount's option") for option in _list(options, "a mount's options")]


def _with_hook(spec: Spec, path: str) -> list[Any]:
    hooks = _child(spec, "hooks", "createRuntime")
    hooks = [] if hooks is None else _list(hooks, "hooks.createRuntime")
    if any(_object(hook, "hooks.createRuntime's entry").get("path") == path for hook in hooks):
        return hooks
    return [*hooks, {"path": path, "args": ["cgpu-runtime", "hook"]}]
