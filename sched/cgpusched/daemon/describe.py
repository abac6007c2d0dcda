"""Commands as key=value fields, for the log."""

from cgpusched.commands import (
    Command,
    Create,
    Destroy,
    SetDefaultMemsize,
    SetHighprio,
    SetMaxInst,
    SetMemsize,
    SetPolicy,
    SetPrioRatio,
    SetShut,
    SetWeight,
    Upgrade,
)
from cgpusched.model import Instance

ID_SHOWN = 140
"""A refused ID may be of any length; a valid one has at most 128 characters."""


def describe(command: Command, made: Instance | None = None) -> dict[str, object]:
    """``what`` and its arguments, in the order a log line shows them; ``made``: what Create came to."""
    match command:
        case SetPolicy(gpu, value):
            return {"what": "policy", "gpu": gpu, "value": value}
        case SetMaxInst(gpu, value):
            return {"what": "max_inst", "gpu": gpu, "value": value}
        case SetPrioRatio(gpu, value):
            return {"what": "prio_ratio", "gpu": gpu, "value": value}
        case SetDefaultMemsize(value):
            return {"what": "default_memsize", "value": value}
        case SetWeight(gpu, ident, value):
            return {"what": "weight", "gpu": gpu, "instance": ident[:ID_SHOWN], "value": value}
        case SetHighprio(gpu, ident, value):
            return {"what": "highprio", "gpu": gpu, "instance": ident[:ID_SHOWN], "value": value}
        case SetMemsize(gpu, ident, value):
            return {"what": "memsize", "gpu": gpu, "instance": ident[:ID_SHOWN], "value": value}
        case SetShut(gpu, ident, value):
            return {"what": "shut", "gpu": gpu, "instance": ident[:ID_SHOWN], "value": int(value)}
        case Create():
            return _create(command, made)
        case Destroy(ident):
            return {"what": "destroy", "instance": ident[:ID_SHOWN]}
        case Upgrade():
            return {"what": "upgrade"}


def _create(command: Create, made: Instance | None) -> dict[str, object]:
    shares = list(made.shares.values()) if made else []
    memsize = [share.memsize for share in shares] or command.memsize
    weight = [share.weight for share in shares] or ([] if command.weight is None else [command.weight])
    return {
        "what": "create",
        "instance": command.id[:ID_SHOWN],
        "gpu": _list(list(made.shares) if made else command.gpus[:16]),
        "memsize": _list(memsize[:16]) if memsize else None,
        "weight": _list(weight) if weight else None,
        "highprio": int(command.highprio),
        "ephemeral": int(command.ephemeral),
        "owner": command.owner,
        "native": _list(command.native[:16]) if command.native else None,
    }


def _list(values: "tuple[int, ...] | list[int]") -> str:
    return ",".join(map(str, values))
