"""Typed commands: all that can change the state. The tree and cgpuctl build these; State.apply() obeys them."""

from dataclasses import dataclass


@dataclass(frozen=True)
class SetPolicy:
    gpu: int
    value: int


@dataclass(frozen=True)
class SetMaxInst:
    gpu: int
    value: int


@dataclass(frozen=True)
class SetPrioRatio:
    gpu: int
    value: int


@dataclass(frozen=True)
class SetDefaultMemsize:
    value: int
    """Bytes; 0 = none set."""


@dataclass(frozen=True)
class SetWeight:
    gpu: int
    id: str
    value: int


@dataclass(frozen=True)
class SetHighprio:
    gpu: int
    id: str
    value: int


@dataclass(frozen=True)
class SetMemsize:
    gpu: int
    id: str
    value: int
    """Bytes."""


@dataclass(frozen=True)
class SetShut:
    """The audit's: no user has a way to give this one."""

    gpu: int
    id: str
    value: bool


@dataclass(frozen=True)
class Create:
    """A new instance. Lists index ``gpus`` in order; the last entry repeats."""

    id: str
    gpus: tuple[int, ...] = (0,)
    memsize: tuple[int, ...] | None = None
    """Bytes for each GPU; None = the default memsize."""
    weight: int | None = None
    """None = min(1, what is free on that GPU)."""
    highprio: bool = False
    ephemeral: bool = False
    owner: int = 0
    native: tuple[int, ...] = ()
    """GPUs that it sees whole, beside those that it shares."""


@dataclass(frozen=True)
class Destroy:
    """Remove an instance. Refused (EBUSY) while processes are attached to it."""

    id: str


@dataclass(frozen=True)
class Upgrade:
    """``echo 1 > upgrade``."""


Command = (
    SetPolicy | SetMaxInst | SetPrioRatio | SetDefaultMemsize | SetWeight | SetHighprio | SetMemsize
    | SetShut | Create | Destroy | Upgrade
)
