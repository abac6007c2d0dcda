"""What there is: GPUs, their settings, and the instances that share them. Plain data and what follows from it."""

from dataclasses import dataclass, field
from enum import IntEnum

POLICY_DEFAULT = 1
MAX_INST_DEFAULT = 20
MAX_INST_LIMIT = 25
PRIO_RATIO_DEFAULT = 90
PRIO_RATIO_MIN, PRIO_RATIO_MAX = 20, 99


class Policy(IntEnum):
    """The six policies of the tree's ``policy`` node; docs/tree.md has what each does."""

    FAIR = 0
    PREEMPTIVE = 1
    WEIGHTED = 2
    FIXED = 3
    SOFT = 4
    NATIVE = 5


@dataclass(frozen=True)
class Gpu:
    """One card. ``memory`` is its total in bytes, ``major`` its device's major number (0 on the simulated device)."""

    index: int
    uuid: str
    """As NVML prints it: ``GPU-8-4-4-4-12`` hexadecimal digits."""
    name: str
    memory: int
    major: int = 0
    simulated: bool = False


@dataclass
class GpuSettings:
    """What an administrator has set for one GPU."""

    policy: Policy = Policy(POLICY_DEFAULT)
    max_inst: int = MAX_INST_DEFAULT
    prio_ratio: int = PRIO_RATIO_DEFAULT


@dataclass
class Share:
    """What one instance has of one GPU. ``memsize`` in bytes; ``weight`` 0 pauses its compute."""

    memsize: int
    weight: int = 1
    highprio: bool = False
    shut: bool = False
    """The audit found it over its memory and stopped its compute; it keeps its weight meanwhile."""


@dataclass
class Instance:
    """One container or bare instance over its GPUs."""

    id: str
    shares: dict[int, Share] = field(default_factory=dict)
    """By host GPU index, in the order that its programs see them; with native ones among them that is the host's."""
    ephemeral: bool = False
    """Made by ``cgpuctl run``: removed with its last process."""
    owner: int = 0
    """uid that may join and destroy it, beside root."""
    native: tuple[int, ...] = ()
    """Host indices, ascending, of GPUs that its programs see whole (mixed mode): nothing is gated or limited there."""

    def __post_init__(self) -> None:
        if self.native:
            self.shares = dict(sorted(self.shares.items()))

    @property
    def seen(self) -> tuple[int, ...]:
        """Host indices of all GPUs that its programs see, in their order."""
        return tuple(sorted((*self.shares, *self.native))) if self.native else tuple(self.shares)

    @property
    def short(self) -> str:
        """The directory name in the tree: the first 12 characters of the ID."""
        return self.id[:12]
