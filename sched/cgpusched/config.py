"""cgpud's configuration: /etc/cgpu/config.toml, then flags over it, into one frozen value (docs/configuration.md).

Every key has one parser, used for the file and for its flag alike. A key nobody knows, a value of the wrong type or
out of range is a UserError that names the file, the key, the value and what is allowed: cgpud does not start on half
a configuration.
"""

import argparse
import os
import re
import tomllib
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from cgpusched.errors import UserError
from cgpusched.model import (
    MAX_INST_DEFAULT,
    MAX_INST_LIMIT,
    POLICY_DEFAULT,
    PRIO_RATIO_DEFAULT,
    PRIO_RATIO_MAX,
    PRIO_RATIO_MIN,
    GpuSettings,
    Policy,
)
from cgpusched.sockets import SUN_PATH
from cgpusched.units import SIZE_ALLOWED, SIZE_MAX, parse_integer, parse_size, show

DEFAULT_PATH = Path("/etc/cgpu/config.toml")
LOG_LEVELS = ("debug", "info", "warning", "error")
ENFORCE = ("log", "gate")
PRELOAD = ("auto", "always", "never")
AUDIT_SECONDS_MAX = 3600.0
SIMULATE_ALLOWED = "COUNTxSIZE, like 2x24GiB or 4x23028MiB (1-16 GPUs), auto or off"
SIMULATED_GPUS_MAX = 16
RUNTIMES_MAX = 16
"""What cgpu-runtime takes (NEXT_MAX of csrc/runtime)."""

Parser = Callable[[Any], Any]


class ConfigError(UserError):
    """A wrong configuration or flag: starting again does not help, and systemd is told so."""

    exit_code = 2


@dataclass(frozen=True)
class Boot:
    """What a GPU starts with; None = what the whole node has, or the built-in value."""

    policy: int | None = None
    max_inst: int | None = None
    prio_ratio: int | None = None


@dataclass(frozen=True)
class ControlConfig:
    """Who beside root may use cgpuctl, and what they may ask for; None = as much as there is."""

    group: str = ""
    """Name or number of the group; empty = nobody."""
    max_memsize: int | None = None
    """Bytes on each GPU."""
    max_weight: int | None = None
    highprio: bool = False
    max_instances: int | None = None
    """Instances that one user may have at a time."""


@dataclass(frozen=True)
class Config:
    """All of it. Paths are absolute, sizes bytes."""

    mount: Path = Path("/run/cgpu")
    runtime_dir: Path = Path("/run/cgpud")
    lib_dir: Path = Path("/var/lib/cgpud/lib")
    bin_dir: Path | None = None
    """Where cgpu-runtime is put, which the engines' own configurations name; None = ``bin`` beside lib_dir."""
    runtimes: tuple[str, ...] = ("nvidia-container-runtime", "runc", "crun")
    """OCI runtimes, by name or path: cgpu-runtime goes on with the first that there is."""
    preload: str = "auto"
    """Whether containers get our library in ld.so.preload."""
    driver_dir: Path | None = None
    """Folder of the real libraries; None = where the loader finds them."""
    simulate: tuple[int, ...] | None = None
    """Bytes of each GPU to simulate; empty = never simulate; None = one of 24 GiB where there is no driver."""
    log_level: str = "info"
    default_memsize: int = 0
    overcommit: bool = False
    """Whether memsizes together may exceed the card."""
    audit_interval: float = 1.0
    """Seconds between two looks at what NVML says that each process uses; 0 = none is taken."""
    audit_context: int = 1 << 30
    """Bytes that contexts and modules of one process explain."""
    audit_tolerance: int = 256 << 20
    """Bytes by which an instance may really use more than its memsize."""
    enforce: str = "log"
    """What comes of more: a line in the log, or a shut gate as well."""
    ignore_disable: bool = False
    """Whether a container that asks for memory is held to it though its environment has CGPU_DISABLE."""
    boot: Boot = Boot()
    gpu: Mapping[int, Boot] = field(default_factory=dict)
    control: ControlConfig = ControlConfig()
    source: str = "defaults"
    """Where it was read from, for messages."""
    text: bytes = b""
    """What stood there."""
    refused: str = ""
    """Why what stands there by now is not taken: this is what stood there before (load())."""

    @property
    def binary(self) -> Path:
        """cgpu-runtime."""
        return (self.bin_dir or self.lib_dir.parent / "bin") / "cgpu-runtime"

    def check_gpus(self, gpus: Collection[int]) -> None:
        """ConfigError: a [gpu.N] of a GPU that the node has not."""
        for index in self.gpu:
            if index not in gpus:
                has = ", ".join(map(str, gpus))
                raise ConfigError(f"{self.source}: gpu.{index}: no such GPU; this node has {has}")

    def settings(self, gpus: Iterable[int]) -> dict[int, GpuSettings]:
        """What each of the node's GPUs starts with."""
        return {index: self._settings(self.gpu.get(index, Boot())) for index in gpus}

    def _settings(self, own: Boot) -> GpuSettings:
        def pick(own: int | None, node: int | None, built_in: int) -> int:
            return next(value for value in (own, node, built_in) if value is not None)

        return GpuSettings(
            Policy(pick(own.policy, self.boot.policy, POLICY_DEFAULT)),
            pick(own.max_inst, self.boot.max_inst, MAX_INST_DEFAULT),
            pick(own.prio_ratio, self.boot.prio_ratio, PRIO_RATIO_DEFAULT),
        )


# Values. Each parser takes what TOML gives (or a flag's text) and raises ValueError with what is allowed.


def _path(value: Any) -> Path:
    if not isinstance(value, str) or not value.startswith("/") or "\0" in value or ".." in value.split("/"):
        raise ValueError("an absolute path without ..")
    return Path(value)


def _integer(low: int, high: int) -> Parser:
    def parse(value: Any) -> int:
        try:
            number = parse_integer(value, low, high) if isinstance(value, str) else value
        except UserError:
            number = None
        if type(number) is not int or not low <= number <= high:  # a TOML boolean is an int to Python
            raise ValueError(f"an integer {low}-{high}")
        return number

    return parse


def _size(low: int) -> Parser:
    def parse(value: Any) -> int:
        try:
            size = parse_size(value) if isinstance(value, str) else value
        except UserError:
            size = None
        if type(size) is not int or not low <= size <= SIZE_MAX:
            raise ValueError(SIZE_ALLOWED + ("" if low == 0 else ", not 0"))
        return size

    return parse


def _seconds(value: Any) -> float:
    try:
        seconds = float(value) if type(value) in (int, float, str) else -1.0
    except (ValueError, OverflowError):  # the latter: an integer of hundreds of digits
        seconds = -1.0
    if seconds != 0 and not 0.1 <= seconds <= AUDIT_SECONDS_MAX:
        raise ValueError(f"seconds, 0.1-{AUDIT_SECONDS_MAX:.0f}, or 0")
    return seconds


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise ValueError("true or false")
    return value


def _choice(*words: str) -> Parser:
    def parse(value: Any) -> str:
        if value not in words:
            raise ValueError(", ".join(words))
        return str(value)

    return parse


def _group(value: Any) -> str:
    if type(value) is int and 0 <= value < 1 << 32:
        return str(value)
    if not isinstance(value, str) or (value and not re.fullmatch(r"[A-Za-z0-9_][A-Za-z0-9_.-]{0,31}\$?", value)):
        raise ValueError("the name or number of a group, or nothing")
    return value


def _runtimes(value: Any) -> tuple[str, ...]:
    words = value if isinstance(value, list) else []
    if not 1 <= len(words) <= RUNTIMES_MAX or not all(_is_runtime(word) for word in words):
        raise ValueError(f"a list of 1-{RUNTIMES_MAX} names or absolute paths of OCI runtimes")
    return tuple(words)


def _is_runtime(word: Any) -> bool:
    return isinstance(word, str) and bool(word) and word.isprintable() and ("/" not in word or word.startswith("/"))


def _simulate(value: Any) -> tuple[int, ...] | None:
    if value == "auto":
        return None
    if value == "off":
        return ()
    try:
        return tuple(parse_simulate(value))
    except UserError:
        raise ValueError(SIMULATE_ALLOWED) from None


def parse_simulate(text: object) -> list[int]:
    """Bytes of each simulated GPU: ``2x24GiB`` is two of 24 GiB. UserError says what is allowed."""
    count, cross, size = text.partition("x") if isinstance(text, str) else ("", "", "")
    try:
        number, each = parse_integer(count, 1, SIMULATED_GPUS_MAX), parse_size(size)
        if not cross or each < 1 << 20:
            raise ConfigError("at least 1 MiB")
    except UserError:
        raise ConfigError(f"{show(text)} is no simulated node: {SIMULATE_ALLOWED}") from None
    return [each] * number


_BOOT: dict[str, Parser] = {
    "policy": _integer(0, max(Policy)),
    "max_inst": _integer(1, MAX_INST_LIMIT),
    "prio_ratio": _integer(PRIO_RATIO_MIN, PRIO_RATIO_MAX),
}
_NODE: dict[str, Parser] = {
    "mount": _path,
    "runtime_dir": _path,
    "lib_dir": _path,
    "bin_dir": _path,
    "runtimes": _runtimes,
    "preload": _choice(*PRELOAD),
    "driver_dir": _path,
    "simulate": _simulate,
    "log_level": _choice(*LOG_LEVELS),
    "default_memsize": _size(0),
    "overcommit": _boolean,
    "audit_interval": _seconds,
    "audit_context": _size(0),
    "audit_tolerance": _size(0),
    "enforce": _choice(*ENFORCE),
    "ignore_disable": _boolean,
}
_CONTROL: dict[str, Parser] = {
    "group": _group,
    "max_memsize": _size(1),
    "max_weight": _integer(0, MAX_INST_LIMIT),
    "highprio": _boolean,
    "max_instances": _integer(0, 10_000),
}

# Where the values come together


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that override the file. Values stay text: load() checks them as it checks the file's."""

    def flag(name: str, metavar: str, text: str) -> None:
        parser.add_argument(name, metavar=metavar, help=text, default=None)

    flag("--config", "FILE", f"configuration (default {DEFAULT_PATH}, which may be missing)")
    flag("--mount", "DIR", "where the tree is mounted (default /run/cgpu)")
    flag("--runtime-dir", "DIR", "where the sockets are (default /run/cgpud)")
    flag("--lib-dir", "DIR", "where the proxy libraries are written (default /var/lib/cgpud/lib)")
    flag("--bin-dir", "DIR", "where cgpu-runtime is put, for container engines")
    flag("--driver-dir", "DIR", "where the real libcuda.so.1 and libnvidia-ml.so.1 are")
    flag("--simulate", "SPEC", f"simulate GPUs: {SIMULATE_ALLOWED}")
    flag("--log-level", "LEVEL", ", ".join(LOG_LEVELS))
    flag("--policy", "N", f"policy that GPUs start with, 0-{max(Policy):d}")
    flag("--max-inst", "N", f"slices of a GPU at start, 1-{MAX_INST_LIMIT}")
    flag("--prio-ratio", "PERCENT", f"cap of high priority at start, {PRIO_RATIO_MIN}-{PRIO_RATIO_MAX}")
    flag("--default-memsize", "SIZE", "memory of an instance that names none; 0 = it must name one")
    flag("--audit-interval", "SECONDS", "time between two looks at what NVML says that each process uses; 0 = none")
    flag("--enforce", "WHAT", "what comes of an instance that uses more than its memory: log, or gate")
    flag("--group", "NAME", "group whose members may use cgpuctl")
    parser.add_argument(
        "--overcommit",
        action=argparse.BooleanOptionalAction,
        default=None,
        help="let memsizes together exceed the card",
    )


def load(path: Path | None, namespace: argparse.Namespace, before: bytes | None = None) -> Config:
    """The file at ``path`` (None = --config, else the default one if it is there), with the flags over it.

    ``before``: what stood there before (``Config.text``), to take where what stands there now is wrong.
    Raises UserError: an unreadable file, bad TOML, an unknown key, a bad value.
    """
    try:
        return _load(path, namespace, None)
    except UserError as error:
        if before is None:
            raise
        try:
            return replace(_load(path, namespace, before), refused=str(error))
        except UserError:  # a flag is wrong, or this version does not take what another took
            raise error from None


def _load(path: Path | None, namespace: argparse.Namespace, text: bytes | None) -> Config:
    named = path or (Path(namespace.config) if getattr(namespace, "config", None) else None)
    source = named or DEFAULT_PATH
    if text is None:
        text = _read(source, required=named is not None)
    config = replace(_from_table(_parse(text, source), str(source)), text=text)
    flags = {key: value for key, value in vars(namespace).items() if value is not None}
    config = replace(config, **_take(flags, _NODE, "", flags_only=True))
    boot = _take(flags, _BOOT, "", flags_only=True)
    config = replace(
        config,
        boot=replace(config.boot, **boot),
        gpu={gpu: replace(own, **boot) for gpu, own in config.gpu.items()},  # a flag is for this start, and all GPUs
        control=replace(config.control, **_take(flags, {"group": _group}, "", flags_only=True)),
    )
    _check_places(config)
    return config


def _read(path: Path, required: bool) -> bytes:
    try:
        return path.read_bytes()
    except FileNotFoundError:
        if required:
            raise ConfigError(f"{path}: no such file") from None
        return b""
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None


def _parse(text: bytes, path: Path) -> dict[str, Any]:
    try:
        return tomllib.loads(text.decode())
    except (ValueError, RecursionError) as error:  # beside what TOML forbids: integers and nesting that Python does
        raise ConfigError(f"{path}: not TOML: {error}") from None


def _from_table(table: dict[str, Any], source: str) -> Config:
    top = {key: value for key, value in table.items() if key not in ("gpu", "control")}
    values = _take(top, _NODE | _BOOT, source)
    boot = {key: values.pop(key) for key in _BOOT if key in values}
    control = _take(_table(table.get("control", {}), "control", source), _CONTROL, source, "control.")
    gpus: dict[int, Boot] = {}
    for key, own in _table(table.get("gpu", {}), "gpu", source).items():
        try:
            index = parse_integer(key, 0, 1023)
        except UserError:
            raise ConfigError(f"{source}: gpu.{show(key)[1:-1]}: a GPU's index is allowed, like [gpu.0]") from None
        gpus[index] = Boot(**_take(_table(own, f"gpu.{key}", source), _BOOT, source, f"gpu.{key}."))
    return Config(**values, boot=Boot(**boot), gpu=gpus, control=ControlConfig(**control), source=source)


def _table(value: Any, name: str, source: str) -> dict[str, Any]:
    if not isinstance(value, dict):
        raise ConfigError(f"{source}: {name} = {show(value)}: a table is allowed, like [{name}]")
    return value


def _take(
    table: Mapping[str, Any], parsers: Mapping[str, Parser], source: str, prefix: str = "", flags_only: bool = False
) -> dict[str, Any]:
    """The values of a table, checked. ``flags_only``: it is a namespace, where other keys are somebody else's."""
    values: dict[str, Any] = {}
    for key, value in table.items():
        if key not in parsers:
            if flags_only:
                continue
            raise ConfigError(f"{source}: unknown key {prefix}{show(key)[1:-1]}: {', '.join(parsers)} are allowed here")
        try:
            values[key] = parsers[key](value)
        except ValueError as error:
            where = f"--{key.replace('_', '-')}" if flags_only else f"{source}: {prefix}{key} ="
            raise ConfigError(f"{where} {show(value)}: {error} is allowed") from None
    return values


def _check_places(config: Config) -> None:
    """What lies below the tree would be hidden by the mount, and programs must be able to name their socket."""
    room = SUN_PATH - len("/inst/.123456789012/gate.sock")
    if len(os.fsencode(config.runtime_dir)) > room:
        raise ConfigError(f"{config.source}: runtime_dir = {config.runtime_dir}: at most {room} bytes are allowed, or "
                          "programs could not name the sockets in it")
    places = (("runtime_dir", config.runtime_dir), ("lib_dir", config.lib_dir), ("bin_dir", config.binary.parent))
    for name, place in places:
        if place == config.mount or config.mount in place.parents:
            raise ConfigError(f"{config.source}: {name} = {place}: the mount at {config.mount} would hide it")
