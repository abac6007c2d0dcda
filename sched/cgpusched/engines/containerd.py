"""containerd's config.toml: our runtime as a handler of its CRI plugin, and as the default where that is asked for.

There is no TOML writer in the standard library, and one would lose the comments: our tables go into a block of their
own at the end of the file, and the one line that may have to change inside an existing table is changed there. What
comes out is parsed, and must say what was meant and nothing else.
"""

from __future__ import annotations

import copy
import re
import tomllib
from typing import Any

from cgpusched.engines.edit import Edit, Remembered
from cgpusched.errors import UserError

OURS = "cgpu"
PLUGINS = {2: "io.containerd.grpc.v1.cri", 3: "io.containerd.cri.v1.runtime"}
"""The CRI plugin's name by version of the configuration (containerd's docs/PLUGINS.md, docs/cri/config.md)."""
BEGIN, END = "# begin: written by cgpuctl setup containerd", "# end: written by cgpuctl setup containerd"
DEFAULT = "default_runtime_name"
TYPE = "io.containerd.runc.v2"
MODELS = ("runc", "nvidia", "crun")
"""Handlers whose settings ours takes over, the first that there is: it goes on to the same runtimes, so what the node
needs of them (SystemdCgroup above all) it needs too."""
DISABLED = ("cri", *(f"io.containerd.{name}" for name in ("grpc.v1.cri", "cri.v1.runtime")))


def configure(text: str, binary: str, default: bool = False) -> Edit:
    """The text with our runtime in it, and what that takes the place of. UserError: not a version we know."""
    plain, _ = _without_block(text)
    plain = plain or "version = 2\n"
    data = _parse(plain)
    version = data.get("version", 1)
    if type(version) is not int or version not in PLUGINS:
        raise UserError(f"version = {version!r}: only {' and '.join(map(str, PLUGINS))} are known (containerd config "
                        "migrate writes a newer one)")
    plugin = PLUGINS[version]
    table = f'plugins."{plugin}".containerd'
    if OURS in _at(data, plugin).get("runtimes", {}):
        raise UserError(f"has a runtime {OURS!r} of its own, which was not written by us: remove it first")
    before: Remembered = {}
    handler = _handler(_at(data, plugin).get("runtimes", {}), binary)
    block = [BEGIN]
    if default:
        previous = _at(data, plugin).get(DEFAULT)
        if not isinstance(previous, str | None):
            raise UserError(f"`{DEFAULT}` is no text")
        if previous != OURS:
            before[DEFAULT] = previous
        changed = _set_default(plain, plugin, OURS)
        if changed is None:
            block += [f"[{table}]", f'  {DEFAULT} = "{OURS}"']
        else:
            plain = changed
    for name, values in ((OURS, {k: v for k, v in handler.items() if k != "options"}),
                         (f"{OURS}.options", handler["options"])):
        block += [f"[{table}.runtimes.{name}]", *(f"  {key} = {_value(value)}" for key, value in values.items())]
    block += [END, ""]
    new = plain + ("" if plain.endswith("\n") else "\n") + "\n".join(block)
    wanted = copy.deepcopy(data)
    cri = wanted.setdefault("plugins", {}).setdefault(plugin, {}).setdefault("containerd", {})
    cri.setdefault("runtimes", {})[OURS] = handler
    if default:
        cri[DEFAULT] = OURS
    _check(new, wanted, "\n".join(block))
    return Edit(new, before, _disabled(data, binary))


def restore(text: str, binary: str, before: Remembered) -> Edit:
    """The text without our block, and with the default that was there."""
    plain, found = _without_block(text)
    if not found:
        return Edit(text, {}, [])
    version = _parse(plain).get("version", 1)
    plugin = PLUGINS[version] if type(version) is int and version in PLUGINS else PLUGINS[2]
    if _at(_parse(plain), plugin).get(DEFAULT) == OURS:
        plain = _set_default(plain, plugin, before.get(DEFAULT)) or plain
    return Edit("" if plain == "version = 2\n" else plain, {}, [])


def _parse(text: str) -> dict[str, Any]:
    try:
        return tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise UserError(f"is not TOML: {error}") from None


def _at(data: dict[str, Any], plugin: str) -> dict[str, Any]:
    for key in ("plugins", plugin, "containerd"):
        data = data.get(key, {})
        if not isinstance(data, dict):
            raise UserError(f"`{key}` is no table")
    return data


def _handler(runtimes: Any, binary: str) -> dict[str, Any]:
    """Our handler's table, with what the first of MODELS has."""
    models = [runtimes[name] for name in MODELS if name in runtimes] if isinstance(runtimes, dict) else []
    model = next((one for one in models if isinstance(one, dict) and one.get("runtime_type", TYPE) == TYPE), {})
    options = model.get("options", {})
    kept = {key: value for key, value in model.items() if key != "options" and _can_be_written(value)}
    more = {key: value for key, value in options.items() if _can_be_written(value)} if isinstance(options, dict) else {}
    return {**kept, "runtime_type": TYPE, "options": {**more, "BinaryName": binary}}


def _without_block(text: str) -> tuple[str, bool]:
    block = re.compile(f"^{re.escape(BEGIN)}$.*?^{re.escape(END)}$\n?", re.DOTALL | re.MULTILINE)
    plain, count = block.subn("", text)
    return plain, bool(count)


def _set_default(text: str, plugin: str, value: str | None) -> str | None:
    """The text with that default (None: with none) in the plugin's table; None where the file has no such table."""
    keys = ["plugins", f"[\"']{re.escape(plugin)}[\"']", "containerd"]
    header = re.compile(r"^[ \t]*\[[ \t]*" + r"[ \t]*\.[ \t]*".join(keys) + r"[ \t]*\][^\n]*\n?", re.MULTILINE)
    start = header.search(text)
    if start is None:
        return None
    following = re.compile(r"^[ \t]*\[", re.MULTILINE).search(text, start.end())
    end = following.start() if following else len(text)
    inside = text[start.end():end]
    line = re.compile(rf"^([ \t]*){DEFAULT}[ \t]*=[^\n]*\n?", re.MULTILINE)
    old = line.search(inside)
    indent = old.group(1) if old else "  "
    entry = "" if value is None else f"{indent}{DEFAULT} = {_string(value)}\n"
    inside = inside[:old.start()] + entry + inside[old.end():] if old else entry + inside
    head = start.group(0)
    return text[:start.start()] + head + ("" if head.endswith("\n") else "\n") + inside + text[end:]


def _disabled(data: dict[str, Any], binary: str) -> list[str]:
    """What to say of the CRI plugin where it is off, as Docker's packages of containerd have it."""
    plugins = data.get("disabled_plugins")
    off = [name for name in DISABLED if name in plugins] if isinstance(plugins, list) else []
    return [f"`disabled_plugins` names {off[0]}: without it there are no handlers, and containers come to us only by "
            f"`ctr run --runc-binary {binary}`"] if off else []


def _can_be_written(value: Any) -> bool:
    if isinstance(value, list):
        return all(isinstance(one, str) for one in value)
    return isinstance(value, str | bool | int)


def _value(value: str | bool | int | list[str]) -> str:
    if isinstance(value, list):
        return f"[{', '.join(map(_string, value))}]"
    return _string(value) if isinstance(value, str) else str(value).lower()


def _string(value: str) -> str:
    escaped = value.replace("\\", "\\\\").replace('"', '\\"')
    return f'"{escaped}"'


def _check(text: str, wanted: dict[str, Any], block: str) -> None:
    try:
        good = tomllib.loads(text) == wanted
    except tomllib.TOMLDecodeError:
        good = False
    if not good:
        raise UserError(f"is written in a way that cannot be added to; put this in by hand:\n{block}")
