"""The audit as pure functions: what NVML sees of a process that the hooks do not, and what that says of an instance.

NVML and the ledger cannot be read at one moment, so a difference counts only as far as several readings agree on it:
the ledger is read before and after NVML and the larger counts, and a rise must show in two looks in a row and in
further samples of the second. What falls, falls at once: memory may be counted late, and is never invented.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from cgpusched.units import format_size


@dataclass(frozen=True)
class Sample:
    """NVML's reading of one GPU between two of the ledger. Bytes by host pid."""

    before: Mapping[int, int]
    used: Mapping[int, int]
    after: Mapping[int, int]


def difference(samples: Sequence[Sample], pid: int) -> int:
    """Bytes of a process that NVML sees and the hooks do not, as far as all samples agree; 0 where one misses it."""
    return min(
        (max(0, one.used.get(pid, 0) - max(one.before.get(pid, 0), one.after.get(pid, 0))) for one in samples),
        default=0,
    )


@dataclass(frozen=True)
class Hidden:
    """A process's bytes beside the ledger: contexts, modules, and whatever else the hooks never saw."""

    now: int = 0
    """What counts."""
    last: int = 0
    """The difference as the last look found it."""

    def after(self, found: int) -> Hidden:
        """One look later, which found this difference."""
        return Hidden(min(found, self.last), found)


@dataclass(frozen=True)
class Rules:
    """From when on the audit speaks, and whether it acts. Bytes."""

    context: int = 1 << 30
    """What contexts and modules of one connected process explain."""
    tolerance: int = 256 << 20
    """How far an instance's real use may pass its memsize: modules are loaded after memory was taken."""
    gate: bool = False
    """``enforce = "gate"``: whoever is over has its gate shut."""


@dataclass(frozen=True)
class Facts:
    """One instance on one GPU, as it was just found. Bytes, by host pid where there are several."""

    memsize: int
    ledger: int
    """Of all its connected processes."""
    hidden: Mapping[int, int] = field(default_factory=dict)
    """Of its connected processes."""
    strays: Mapping[int, int] = field(default_factory=dict)
    """Of its processes that use the GPU and are not connected."""

    @property
    def total(self) -> int:
        return self.ledger + sum(self.hidden.values()) + sum(self.strays.values())


@dataclass(frozen=True)
class Standing:
    """What the audit holds of an instance on one GPU."""

    unhooked: tuple[int, ...] = ()
    """Host pids of its processes that use the GPU without being connected: the hook was passed by."""
    unexplained: tuple[int, ...] = ()
    """Host pids of connected ones that use more beside the ledger than contexts and modules explain."""
    excess: int = 0
    """Bytes above what it may really use; 0 as long as that is tolerated."""
    allowed: int = 0
    """Bytes it may really use: its memsize, or what is left of its use from before that was lowered."""
    bypasses: int = 0
    """Processes that were found in one of the first two."""
    overs: int = 0
    """Times that it was found over."""

    @property
    def over(self) -> bool:
        return self.excess > 0


def judge(old: Standing, facts: Facts, rules: Rules) -> Standing:
    """The standing after one more look.

    What an instance holds when its memsize is lowered below that stays, and is not held against it; what it gives back
    of it is gone.
    """
    unhooked = tuple(sorted(pid for pid, used in facts.strays.items() if used))
    unexplained = tuple(sorted(pid for pid, used in facts.hidden.items() if used > rules.context))
    total = facts.total
    allowed = max(facts.memsize, min(old.allowed, total))
    excess = total - allowed if total - allowed > rules.tolerance else 0
    found = set(unhooked) - set(old.unhooked) | set(unexplained) - set(old.unexplained)
    return Standing(
        unhooked,
        unexplained,
        excess,
        allowed,
        old.bypasses + len(found),
        old.overs + (excess > 0 and not old.over),
    )


@dataclass(frozen=True)
class News:
    """One line for the log: words and fields."""

    words: str
    fields: dict[str, object]
    warning: bool = True


def news(old: Standing, new: Standing, facts: Facts) -> Iterator[News]:
    """What has changed between two looks."""
    for pid in new.unhooked:
        if pid not in old.unhooked:
            yield News("a process uses the GPU past the hook", {"pid": pid, "used": format_size(facts.strays[pid])})
    for pid in new.unexplained:
        if pid not in old.unexplained:
            yield News("a process uses memory that the hook does not know",
                       {"pid": pid, "used": format_size(facts.hidden[pid])})
    if (old.unhooked or old.unexplained) and not (new.unhooked or new.unexplained):
        yield News("nothing passes the hook any more", {}, warning=False)
    use: dict[str, object] = {"used": format_size(facts.total), "memsize": format_size(facts.memsize)}
    if new.over and not old.over:
        yield News("over its memory", use)
    if old.over and not new.over:
        yield News("no longer over its memory", use, warning=False)
