"""What of the state outlives the daemon, as bytes: pure, from the state and to it.

GPUs are named by UUID, since their numbers may change, and processes by pid and start time, since pids are used again.
Unknown keys are ignored: what only adds needs no new VERSION, and a node can go back to the version before. All the
rest is checked as strictly as if somebody else had written it.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

from cgpusched.commands import Command
from cgpusched.errors import UserError
from cgpusched.model import MAX_INST_LIMIT, PRIO_RATIO_MAX, PRIO_RATIO_MIN, Gpu, GpuSettings, Instance, Policy, Share
from cgpusched.state import GPUS_MAX, State
from cgpusched.units import SIZE_MAX, check_id, uuid_bytes

VERSION = 1
"""Of the format. Raised when an old daemon would misread what a new one wrote."""
_INSTANCES_MAX = 64 * GPUS_MAX
_PID_MAX = 1 << 22


class StoreError(UserError):
    """The bytes are no state of this version."""


@dataclass(frozen=True)
class Process:
    """One process for certain. ``start``: in clock ticks since the system booted (field 22 of /proc/PID/stat)."""

    pid: int
    start: int


@dataclass(frozen=True)
class StoredContainer:
    """One that is registered: who makes it, and its first process once that is known."""

    id: str
    maker: Process | None = None
    first: Process | None = None


@dataclass(frozen=True)
class StoredInstance:
    id: str
    shares: tuple[tuple[str, Share], ...]
    """By the GPU's UUID, in the order the programs see."""
    ephemeral: bool = False
    owner: int = 0
    native: tuple[str, ...] = ()
    """UUIDs of the GPUs that it sees whole."""


@dataclass(frozen=True)
class Stored:
    """All that is kept. ``boot``: which boot of the system it is of; processes of another one mean nothing."""

    boot: str = ""
    settings: Mapping[str, GpuSettings] = field(default_factory=dict)
    """By the GPU's UUID."""
    default_memsize: int | None = None
    """None: not known."""
    instances: tuple[StoredInstance, ...] = ()
    anchors: Mapping[str, tuple[Process, ...]] = field(default_factory=dict)
    """The processes that ephemeral instances wait for."""
    containers: tuple[StoredContainer, ...] = ()
    last: str = ""
    """The last command (sign()): its writer may not have had his answer, and ask again."""


def sign(command: Command | None) -> str:
    """A command as text: equal for equal commands."""
    return "" if command is None else json.dumps([type(command).__name__, asdict(command)], sort_keys=True)


def dump(
    state: State,
    boot: str,
    anchors: Mapping[str, Sequence[Process]],
    containers: Iterable[StoredContainer],
    last: Command | None = None,
) -> bytes:
    """The whole as it goes into the file. What the audit has shut is not in it: the next look finds it again."""
    uuids = {gpu.index: gpu.uuid for gpu in state.gpus.values()}
    content = {
        "version": VERSION,
        "boot": boot,
        "gpus": {uuids[gpu]: {"policy": int(has.policy), "max_inst": has.max_inst, "prio_ratio": has.prio_ratio}
                 for gpu, has in state.settings.items()},
        "default_memsize": state.default_memsize,
        "instances": [
            {"id": one.id, "ephemeral": one.ephemeral, "owner": one.owner,
             "shares": [_share(uuids[gpu], share) for gpu, share in one.shares.items()],
             "native": [uuids[gpu] for gpu in one.native]}
            for one in state.instances.values()
        ],
        "anchors": {id: [[one.pid, one.start] for one in found] for id, found in anchors.items()},
        "containers": [{"id": one.id, "maker": _pair(one.maker), "first": _pair(one.first)} for one in containers],
        "last": sign(last),
    }  # fmt: skip
    return json.dumps(content).encode() + b"\n"


def load(content: bytes) -> Stored:
    """StoreError: cut off, garbled, of a newer version, or not consistent in itself."""
    try:
        data = json.loads(content)
        if not isinstance(data, dict) or not _is_integer(data.get("version"), 1, VERSION):
            raise StoreError(f"its version is not one that this daemon knows: 1-{VERSION}")
        return _stored(data)
    except StoreError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RecursionError, UserError) as error:
        raise StoreError(f"it is damaged: {type(error).__name__}: {str(error)[:100]}") from None


def restore(
    stored: Stored,
    gpus: Sequence[Gpu],
    settings: Mapping[int, GpuSettings],
    default_memsize: int,
    overcommit: bool,
) -> tuple[State, list[str]]:
    """The state again, and a line for each thing that could not stay as it was.

    ``settings`` and ``default_memsize`` are for what is not stored. A GPU that has gone leaves its instances; one that
    has none left goes with it. What a smaller card cannot hold is cut to the card.
    """
    by_uuid = {gpu.uuid: gpu for gpu in gpus}
    chosen = {gpu.index: stored.settings.get(gpu.uuid) or settings[gpu.index] for gpu in gpus}
    instances, lines = [], []
    for one in stored.instances:
        shares = {by_uuid[uuid].index: _cut(share, by_uuid[uuid]) for uuid, share in one.shares if uuid in by_uuid}
        native = tuple(sorted(by_uuid[uuid].index for uuid in one.native if uuid in by_uuid))
        for uuid in (*(uuid for uuid, _ in one.shares), *one.native):
            if uuid not in by_uuid:
                lines.append(f"instance {one.id}: its GPU {uuid} has gone" + ("" if shares else ", and so it ends"))
        if shares:
            instances.append(Instance(one.id, shares, one.ephemeral, one.owner, native))
    memsize = default_memsize if stored.default_memsize is None else stored.default_memsize
    return State(gpus, chosen, memsize, overcommit, instances), lines


def rebuild(
    found: Iterable[StoredInstance], settings: Mapping[str, GpuSettings], processes: Mapping[str, Process]
) -> Stored:
    """From what instances' folders still say, where the file is lost: weights are unknown, and 1 where there is room.

    ``processes``: the first one of each container. All else is ephemeral: it stays if a live program holds it.
    """
    weights: dict[str, int] = {uuid: has.max_inst for uuid, has in settings.items()}
    counts = dict(weights)
    instances = []
    for one in found:
        if any(counts.get(uuid, 0) == 0 for uuid, _ in one.shares):
            continue
        shares = []
        for uuid, share in one.shares:
            weight = min(1, weights[uuid])
            weights[uuid] -= weight
            counts[uuid] -= 1
            shares.append((uuid, Share(share.memsize, weight)))
        instances.append(replace(one, shares=tuple(shares), ephemeral=one.id not in processes))
    return Stored(
        instances=tuple(instances),
        containers=tuple(StoredContainer(id, None, process) for id, process in processes.items()),
    )


def limits(text: str) -> tuple[tuple[tuple[str, Share], ...], tuple[str, ...]]:
    """The lines ``UUID BYTES`` and ``UUID native`` of an instance's file ``limits``. StoreError: it is none."""
    try:
        rows = [line.split(" ") for line in text.splitlines()]
        native = tuple(_uuid(uuid) for uuid, size in rows if size == "native")
        sizes = ((_uuid(uuid), _integer(int(size), 1, SIZE_MAX)) for uuid, size in rows if size != "native")
        shares = tuple((uuid, Share(size)) for uuid, size in sizes)
        _check_gpus(shares, native)
        return shares, native
    except (ValueError, UserError):
        raise StoreError("no limits of an instance") from None


def _cut(share: Share, gpu: Gpu) -> Share:
    return Share(min(share.memsize, gpu.memory), share.weight, share.highprio)


def _share(uuid: str, share: Share) -> dict[str, Any]:
    return {"gpu": uuid, "memsize": share.memsize, "weight": share.weight, "highprio": share.highprio}


def _pair(process: Process | None) -> list[int] | None:
    return None if process is None else [process.pid, process.start]


def _stored(data: dict[str, Any]) -> Stored:
    settings = {_uuid(uuid): _settings(has) for uuid, has in data["gpus"].items()}
    instances = tuple(map(_instance, _list(data["instances"], _INSTANCES_MAX)))
    names = {one.id for one in instances}
    if len(names) != len(instances) or len({id[:12] for id in names}) != len(names):
        raise ValueError("two instances of one name")
    for uuid, has in settings.items():
        weights = [share.weight for one in instances for of, share in one.shares if of == uuid]
        if max(len(weights), sum(weights)) > has.max_inst:
            raise ValueError("more weight than max_inst")
    if not {uuid for one in instances for uuid, _ in one.shares} <= settings.keys():
        raise ValueError("an instance on a GPU that is not listed")
    return Stored(
        _text(data["boot"]), settings, _integer(data["default_memsize"], 0, SIZE_MAX), instances,
        {check_id(id): tuple(map(_process, _list(found, 1 << 16))) for id, found in data["anchors"].items()},
        tuple(map(_container, _list(data["containers"], _INSTANCES_MAX))), _text(data["last"]),
    )  # fmt: skip


def _settings(has: dict[str, Any]) -> GpuSettings:
    return GpuSettings(
        Policy(_integer(has["policy"], 0, max(Policy))),
        _integer(has["max_inst"], 1, MAX_INST_LIMIT),
        _integer(has["prio_ratio"], PRIO_RATIO_MIN, PRIO_RATIO_MAX),
    )


def _instance(one: dict[str, Any]) -> StoredInstance:
    shares = tuple(
        (_uuid(has["gpu"]), Share(_integer(has["memsize"], 1, SIZE_MAX), _integer(has["weight"], 0, MAX_INST_LIMIT),
                                  _boolean(has["highprio"])))
        for has in _list(one["shares"], GPUS_MAX)
    )  # fmt: skip
    native = tuple(map(_uuid, _list(one.get("native", []), GPUS_MAX)))  # a file from before mixed mode has none
    _check_gpus(shares, native)
    owner = _integer(one["owner"], 0, 1 << 32)
    return StoredInstance(check_id(one["id"]), shares, _boolean(one["ephemeral"]), owner, native)


def _check_gpus(shares: Sequence[tuple[str, Share]], native: Sequence[str]) -> None:
    every = [uuid for uuid, _ in shares] + list(native)
    if not shares or len(set(every)) != len(every) or len(every) > GPUS_MAX:
        raise ValueError("GPUs of an instance")


def _container(one: dict[str, Any]) -> StoredContainer:
    maker, first = (None if one[key] is None else _process(one[key]) for key in ("maker", "first"))
    return StoredContainer(check_id(one["id"]), maker, first)


def _process(pair: list[Any]) -> Process:
    pid, start = _list(pair, 2)
    return Process(_integer(pid, 1, _PID_MAX), _integer(start, 0, SIZE_MAX))


def _uuid(text: Any) -> str:
    uuid_bytes(_text(text))
    return str(text)


def _list(value: Any, most: int) -> list[Any]:
    if not isinstance(value, list) or len(value) > most:
        raise TypeError("a list")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError("text")
    return value


def _boolean(value: Any) -> bool:
    if not isinstance(value, bool):
        raise TypeError("true or false")
    return value


def _is_integer(value: Any, low: int, high: int) -> bool:
    return type(value) is int and low <= value <= high


def _integer(value: Any, low: int, high: int) -> int:
    if not _is_integer(value, low, high):
        raise ValueError(f"an integer {low}-{high}")
    return int(value)
