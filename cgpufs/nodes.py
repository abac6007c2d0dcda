"""The tree as a declared table: each file's name, level, mode, how it reads, and what a write to it means.

docs/tree.md is the reference that this table is tested against.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple, Protocol

from cgpufs import parse
from cgpusched.commands import (
    Command,
    SetDefaultMemsize,
    SetHighprio,
    SetMaxInst,
    SetMemsize,
    SetPolicy,
    SetPrioRatio,
    SetWeight,
    Upgrade,
)
from cgpusched.model import (
    MAX_INST_LIMIT,
    PRIO_RATIO_MAX,
    PRIO_RATIO_MIN,
    Gpu,
    GpuSettings,
    Instance,
    Policy,
)


class StateView(Protocol):
    """What the tree reads of ``cgpusched.state.State``; it changes nothing but through ``Backend.apply``."""

    @property
    def gpus(self) -> Mapping[int, Gpu]: ...
    @property
    def settings(self) -> Mapping[int, GpuSettings]: ...
    @property
    def instances(self) -> Mapping[str, Instance]: ...
    @property
    def default_memsize(self) -> int: ...
    def on_gpu(self, gpu: int, /) -> Sequence[Instance]: ...
    def free_weight(self, gpu: int, /) -> int: ...


class Backend(Protocol):
    """What stands behind the tree. Everything here returns at once: the tree answers requests between two awaits."""

    @property
    def state(self) -> StateView: ...
    @property
    def version(self) -> str: ...
    def apply(self, command: Command, /) -> Instance | None:
        """Obeys and logs, or raises CommandError, having logged the refusal and changed nothing."""

    def memory(self, instance: str, gpu: int, /) -> Sequence[tuple[int, int]]:
        """(host pid, bytes) of each process of the instance (a full ID) that uses the GPU."""

    def upgrade_state(self) -> str:
        """One word or line: what ``upgrade`` reads as."""


def _same_pid(pid: int) -> int | None:
    return pid


@dataclass(frozen=True)
class View:
    """Who looks at the tree. The default is the host: everything, writable."""

    read_only: bool = False
    """Refuse every write with EROFS, whatever the flags of the mount or of a bind of it are or become."""
    only: str | None = None
    """The full ID of the one instance that is shown, with the GPUs it has; None shows all."""
    pid: Callable[[int], int | None] = _same_pid
    """A host pid as the viewer's pid namespace counts it; None leaves the process out of ``meminfo``."""

    def sees(self, instance: Instance) -> bool:
        return self.only is None or instance.id == self.only


HOST = View()


class Level(Enum):
    """The three kinds of directory."""

    ROOT = "/"
    GPU = "/N"
    INSTANCE = "/N/<cid12>"


class At(NamedTuple):
    """The directory a node is in, as one request finds it. ``gpu`` and ``instance`` are set below their level."""

    backend: Backend
    view: View
    gpu: int = -1
    instance: Instance | None = None

    @property
    def state(self) -> StateView:
        return self.backend.state

    @property
    def settings(self) -> GpuSettings:
        return self.backend.state.settings[self.gpu]

    @property
    def member(self) -> Instance:
        assert self.instance is not None
        return self.instance


@dataclass(frozen=True)
class Node:
    """One file. ``write`` turns the bytes of one write(2) into a command (UserError: EINVAL); None = read only."""

    name: str
    level: Level
    mode: int
    read: Callable[[At], object]
    """Its value; the file is its ``str()`` and a newline, unless that ends with one or is empty."""
    write: Callable[[At, bytes], Command] | None = None

    def render(self, at: At) -> bytes:
        value = str(self.read(at))
        return (value if not value or value.endswith("\n") else value + "\n").encode("ascii")


def _instances(at: At) -> str:
    """The instances in the grammar of ``create``, one a line, without the verb."""
    return "".join(f"{describe(i)}\n" for i in at.state.instances.values() if at.view.sees(i))


def describe(instance: Instance) -> str:
    """``ID gpu=0,1 memsize=BYTES,BYTES weight=W highprio=H``. Values that differ between GPUs are lists."""

    def listed(values: list[int]) -> str:
        return ",".join(map(str, values if len(set(values)) > 1 else values[:1]))

    shares = list(instance.shares.values())
    return (
        f"{instance.id} gpu={','.join(map(str, instance.shares))}"
        f" memsize={listed([share.memsize for share in shares])}"
        f" weight={listed([share.weight for share in shares])}"
        f" highprio={listed([int(share.highprio) for share in shares])}"
    )


def _meminfo(at: At) -> str:
    used = at.backend.memory(at.member.id, at.gpu)
    # What is allocated stays when memsize is lowered below it: Free reads 0 then, never less.
    free = max(0, at.member.shares[at.gpu].memsize - sum(size for _, size in used))
    seen = [(at.view.pid(pid), size) for pid, size in used]
    return f"Free: {free}\n" + "".join(f"PID: {pid} Mem: {size}\n" for pid, size in seen if pid is not None)


def _upgrade(data: bytes) -> Upgrade:
    parse.upgrade(data)
    return Upgrade()


NODES: tuple[Node, ...] = (
    Node("default_memsize", Level.ROOT, 0o644, lambda at: at.state.default_memsize,
         lambda at, data: SetDefaultMemsize(parse.size(data))),
    Node("inst_ctl", Level.ROOT, 0o600, _instances, lambda at, data: parse.inst_ctl(data)),
    Node("upgrade", Level.ROOT, 0o600, lambda at: at.backend.upgrade_state(), lambda at, data: _upgrade(data)),
    Node("version", Level.ROOT, 0o444, lambda at: at.backend.version),
    Node("free_weight", Level.GPU, 0o444, lambda at: at.state.free_weight(at.gpu)),
    Node("major", Level.GPU, 0o444, lambda at: at.state.gpus[at.gpu].major),
    Node("max_inst", Level.GPU, 0o644, lambda at: at.settings.max_inst,
         lambda at, data: SetMaxInst(at.gpu, parse.integer(data, 1, MAX_INST_LIMIT))),
    Node("policy", Level.GPU, 0o644, lambda at: int(at.settings.policy),
         lambda at, data: SetPolicy(at.gpu, parse.integer(data, 0, max(Policy)))),
    Node("prio_ratio", Level.GPU, 0o644, lambda at: at.settings.prio_ratio,
         lambda at, data: SetPrioRatio(at.gpu, parse.integer(data, PRIO_RATIO_MIN, PRIO_RATIO_MAX))),
    Node("highprio", Level.INSTANCE, 0o644, lambda at: int(at.member.shares[at.gpu].highprio),
         lambda at, data: SetHighprio(at.gpu, at.member.id, parse.integer(data, 0, 1))),
    Node("id", Level.INSTANCE, 0o444, lambda at: at.member.id),
    Node("meminfo", Level.INSTANCE, 0o444, _meminfo),
    Node("memsize", Level.INSTANCE, 0o644, lambda at: at.member.shares[at.gpu].memsize,
         lambda at, data: SetMemsize(at.gpu, at.member.id, parse.size(data))),
    Node("weight", Level.INSTANCE, 0o644, lambda at: at.member.shares[at.gpu].weight,
         lambda at, data: SetWeight(at.gpu, at.member.id, parse.integer(data, 0, MAX_INST_LIMIT))),
)  # fmt: skip

BY_LEVEL: Mapping[Level, tuple[Node, ...]] = {
    level: tuple(node for node in NODES if node.level is level) for level in Level
}
