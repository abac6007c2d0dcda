"""The state and its one writer: every rule about what may be set to what, each refusal with its errno.

No I/O and no clock. ``State.apply`` either does all of a command or raises CommandError and changes nothing.
"""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from errno import EBUSY, EEXIST, EINVAL, ENOENT, ENOSPC

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
from cgpusched.errors import CommandError, UserError
from cgpusched.model import (
    MAX_INST_LIMIT,
    PRIO_RATIO_MAX,
    PRIO_RATIO_MIN,
    Gpu,
    GpuSettings,
    Instance,
    Policy,
    Share,
)
from cgpusched.units import SIZE_MAX, check_id, format_size, show

GPUS_MAX = 16
"""GPUs of one instance (CGPU_MAX_GPUS of the ABI)."""


@dataclass(frozen=True)
class Note:
    """Something a command did beyond what it named: for the log."""

    gpu: int
    text: str
    warning: bool = False


@dataclass(frozen=True)
class Snapshot:
    """A copy of all that commands can change, to go back to."""

    settings: dict[int, GpuSettings]
    instances: tuple[tuple[Instance, dict[int, Share]], ...]
    """The instances themselves, which stay the same objects, and what they had."""
    default_memsize: int


class State:
    """GPUs, their settings and the instances that share them.

    Read the attributes freely; change them through ``apply`` only. Instances are in order of creation, which is the
    order of their turns.
    """

    def __init__(
        self,
        gpus: Sequence[Gpu],
        settings: GpuSettings | Mapping[int, GpuSettings] | None = None,
        default_memsize: int = 0,
        overcommit: bool = False,
        instances: Iterable[Instance] = (),
    ) -> None:
        """``settings``: what GPUs start with, one for all or by index. ``default_memsize`` in bytes, 0 = none set.

        ``instances``: those that there were (store.py), in order.
        """
        chosen = settings if isinstance(settings, Mapping) else {gpu.index: settings for gpu in gpus}
        self.gpus: dict[int, Gpu] = {gpu.index: gpu for gpu in gpus}
        self.settings: dict[int, GpuSettings] = {i: replace(chosen.get(i) or GpuSettings()) for i in self.gpus}
        self.instances: dict[str, Instance] = {one.id: one for one in instances}
        self.default_memsize = default_memsize
        self.overcommit = overcommit
        self.notes: tuple[Note, ...] = ()
        """What the last successful command did beside what it named."""

    # What there is

    def on_gpu(self, gpu: int) -> list[Instance]:
        """The instances that share this GPU, in the order of their turns."""
        return [instance for instance in self.instances.values() if gpu in instance.shares]

    def find(self, name: str) -> Instance | None:
        """By full ID, or by the 12 characters that the tree shows (two instances never share those)."""
        return self.instances.get(name) or next((one for one in self.instances.values() if one.short == name), None)

    def weight_sum(self, gpu: int) -> int:
        """The sum of the weights on this GPU; never above its max_inst."""
        return sum(instance.shares[gpu].weight for instance in self.on_gpu(gpu))

    def free_weight(self, gpu: int) -> int:
        """max_inst minus the sum of the weights."""
        return self.settings[gpu].max_inst - self.weight_sum(gpu)

    def free_memory(self, gpu: int) -> int:
        """Bytes of the card that no instance was allotted; 0 when it is overcommitted."""
        return max(0, self.gpus[gpu].memory - sum(i.shares[gpu].memsize for i in self.on_gpu(gpu)))

    def snapshot(self) -> Snapshot:
        """A copy that later commands do not touch."""
        return Snapshot(
            {gpu: replace(settings) for gpu, settings in self.settings.items()},
            tuple((i, {gpu: replace(share) for gpu, share in i.shares.items()}) for i in self.instances.values()),
            self.default_memsize,
        )

    def restore(self, snapshot: Snapshot) -> None:
        """Go back to a snapshot (which then belongs to the state)."""
        self.settings = snapshot.settings
        for instance, shares in snapshot.instances:
            instance.shares = shares
        self.instances = {instance.id: instance for instance, _ in snapshot.instances}
        self.default_memsize = snapshot.default_memsize
        self.notes = ()

    # What may change

    def apply(self, command: Command) -> Instance | None:
        """Obey ``command``. Returns the instance that it created, changed or destroyed, if it was about one.

        Raises CommandError, and then nothing has changed.
        """
        notes: list[Note] = []
        result: Instance | None = None
        match command:
            case SetPolicy(gpu, value):
                self._settings(gpu).policy = Policy(_within(f"{gpu}/policy", value, 0, max(Policy)))
            case SetMaxInst(gpu, value):
                self._set_max_inst(gpu, value)
            case SetPrioRatio(gpu, value):
                self._settings(gpu).prio_ratio = _within(f"{gpu}/prio_ratio", value, PRIO_RATIO_MIN, PRIO_RATIO_MAX)
            case SetDefaultMemsize(value):
                self.default_memsize = _within("default_memsize", value, 0, SIZE_MAX)
            case SetWeight(gpu, ident, value):
                result = self._set_weight(gpu, ident, value)
            case SetHighprio(gpu, ident, value):
                result = self._set_highprio(gpu, ident, value, notes)
            case SetMemsize(gpu, ident, value):
                result = self._set_memsize(gpu, ident, value)
            case SetShut(gpu, ident, value):
                result, share, _ = self._share(gpu, ident)
                share.shut = value
            case Create():
                result = self._create(command, notes)
            case Destroy(ident):
                result = self.instances.pop(ident, None)
                if result is None:
                    raise CommandError(ENOENT, f"destroy {show(ident)}: no such instance")
            case Upgrade():
                pass  # about the daemon, not about what it schedules
        self.notes = tuple(notes)
        return result

    def _settings(self, gpu: int) -> GpuSettings:
        if gpu not in self.settings:
            raise CommandError(EINVAL, f"no GPU {gpu}: {self._gpus_allowed()}")
        return self.settings[gpu]

    def _gpus_allowed(self) -> str:
        return "this node has GPU " + ", ".join(map(str, self.gpus)) if self.gpus else "this node has none"

    def _share(self, gpu: int, ident: str) -> tuple[Instance, Share, str]:
        """The instance, what it has of this GPU, and the path of its directory for messages."""
        self._settings(gpu)
        instance = self.instances.get(ident)
        if instance is None or gpu not in instance.shares:
            raise CommandError(ENOENT, f"no instance {show(ident)} on GPU {gpu}")
        return instance, instance.shares[gpu], f"{gpu}/{instance.short}"

    def _set_max_inst(self, gpu: int, value: int) -> None:
        settings = self._settings(gpu)
        _within(f"{gpu}/max_inst", value, 1, MAX_INST_LIMIT)
        count, weights = len(self.on_gpu(gpu)), self.weight_sum(gpu)
        if value < max(count, weights):
            raise CommandError(
                EBUSY,
                f"{gpu}/max_inst: {value} is in use: at least {max(count, weights)} now, "
                f"for {count} instances with weights of {weights} together",
            )
        settings.max_inst = value

    def _set_weight(self, gpu: int, ident: str, value: int) -> Instance:
        instance, share, path = self._share(gpu, ident)
        _within(f"{path}/weight", value, 0, MAX_INST_LIMIT)
        free = self.free_weight(gpu) + share.weight
        if value > free:
            raise CommandError(ENOSPC, f"{path}/weight: {value} is more than is free: 0-{free}, its own included")
        share.weight = value
        return instance

    def _set_highprio(self, gpu: int, ident: str, value: int, notes: list[Note]) -> Instance:
        instance, share, path = self._share(gpu, ident)
        share.highprio = bool(_within(f"{path}/highprio", value, 0, 1))
        if share.highprio:
            self._advise_one(gpu, notes)
        return instance

    def _set_memsize(self, gpu: int, ident: str, value: int) -> Instance:
        instance, share, path = self._share(gpu, ident)
        self._check_memsize(f"{path}/memsize", gpu, value, share.memsize)
        share.memsize = value
        return instance

    def _check_memsize(self, node: str, gpu: int, value: int, own: int = 0) -> None:
        """``own``: what the instance has now; keeping or lowering it is allowed whatever the others have."""
        total = self.gpus[gpu].memory
        if not 1 <= value <= total:
            raise CommandError(
                EINVAL, f"{node}: {format_size(value)} is not allowed: 1-{total} bytes ({format_size(total)}, the card)"
            )
        free = self.free_memory(gpu) + own
        if value > max(free, own) and not self.overcommit:
            raise CommandError(
                ENOSPC,
                f"{node}: {format_size(value)} is more than GPU {gpu} has unallotted: "
                f"at most {free} bytes ({format_size(free)})",
            )

    def _advise_one(self, gpu: int, notes: list[Note]) -> None:
        count = sum(instance.shares[gpu].highprio for instance in self.on_gpu(gpu))
        if count > 1:
            notes.append(Note(gpu, f"{count} high-priority instances share one prio_ratio; one is advised", True))

    # Creation

    def _create(self, command: Create, notes: list[Note]) -> Instance:
        self._check_new_id(command.id)
        node = f"create {command.id}"
        self._check_gpus(node, command.gpus)
        self._check_native(node, command)
        memsizes = self._memsizes(node, command)
        shares = {
            gpu: Share(memsize, self._new_weight(node, gpu, command.weight, notes), command.highprio)
            for gpu, memsize in zip(command.gpus, memsizes, strict=True)
        }
        native = tuple(sorted(command.native))
        instance = Instance(command.id, shares, command.ephemeral, command.owner, native)
        # All is allowed from here on: nothing below may fail.
        self.instances[instance.id] = instance
        for gpu, share in shares.items():
            settings = self.settings[gpu]
            if share.weight > 1 and settings.policy in (Policy.FAIR, Policy.PREEMPTIVE):
                was, reason = settings.policy, f"{command.id} has weight {share.weight}"
                notes.append(Note(gpu, f"policy {was:d} -> {Policy.WEIGHTED:d}: {reason}"))
                settings.policy = Policy.WEIGHTED
            if share.highprio:
                self._advise_one(gpu, notes)
        return instance

    def _check_new_id(self, ident: str) -> None:
        try:
            check_id(ident)
        except UserError as error:
            raise CommandError(EINVAL, f"create: {error}") from None
        if ident in self.instances:
            raise CommandError(EEXIST, f"create {ident}: that instance exists")
        # Also across GPUs: whoever types 12 characters must mean one instance, wherever it is.
        if other := self.find(ident[:12]):
            raise CommandError(
                EEXIST, f"create {ident}: the first 12 characters are those of instance {other.id}; they name it"
            )

    def _check_gpus(self, node: str, gpus: tuple[int, ...]) -> None:
        if not 1 <= len(gpus) <= GPUS_MAX:
            raise CommandError(EINVAL, f"{node}: gpu: {len(gpus)} GPUs are not allowed: 1-{GPUS_MAX}")
        for gpu in gpus:
            if gpu not in self.gpus:
                raise CommandError(EINVAL, f"{node}: gpu={gpu}: no such GPU: {self._gpus_allowed()}")
            if gpus.count(gpu) > 1:
                raise CommandError(EINVAL, f"{node}: gpu={gpu} is named twice: each GPU once")
            count, most = len(self.on_gpu(gpu)), self.settings[gpu].max_inst
            if count >= most:
                raise CommandError(ENOSPC, f"{node}: GPU {gpu} is full: max_inst is {most}, and it has {count}")

    def _check_native(self, node: str, command: Create) -> None:
        every = command.gpus + command.native
        if len(every) > GPUS_MAX:
            raise CommandError(EINVAL, f"{node}: {len(every)} GPUs, shared and native, are not allowed: 1-{GPUS_MAX}")
        for gpu in command.native:
            if gpu not in self.gpus:
                raise CommandError(EINVAL, f"{node}: native={gpu}: no such GPU: {self._gpus_allowed()}")
            if every.count(gpu) > 1:
                raise CommandError(EINVAL, f"{node}: native={gpu} is named twice: each GPU once, shared or native")

    def _memsizes(self, node: str, command: Create) -> list[int]:
        """One size for each GPU of ``command``: the last of a list repeats."""
        count, named = len(command.gpus), command.memsize
        if named is None:
            if self.default_memsize == 0:
                raise CommandError(EINVAL, f"{node}: no memsize, and default_memsize is 0: name one, like memsize=3GiB")
            named = (self.default_memsize,)
            node += ": default_memsize"
        else:
            node += ": memsize"
        if not 1 <= len(named) <= count:
            raise CommandError(EINVAL, f"{node}: {len(named)} sizes for {count} GPUs: 1-{count}, the last repeats")
        sizes = [*named, *[named[-1]] * (count - len(named))]
        for gpu, size in zip(command.gpus, sizes, strict=True):
            self._check_memsize(node, gpu, size)
        return sizes

    def _new_weight(self, node: str, gpu: int, named: int | None, notes: list[Note]) -> int:
        free = self.free_weight(gpu)
        if named is None:
            if free == 0:
                notes.append(Note(gpu, "weight 0, no compute: free_weight was 0", True))
            return min(1, free)
        _within(f"{node}: weight", named, 0, MAX_INST_LIMIT)
        if named > free:
            raise CommandError(ENOSPC, f"{node}: weight={named} is more than is free on GPU {gpu}: 0-{free}")
        return named


def _within(node: str, value: int, low: int, high: int) -> int:
    if not low <= value <= high:
        raise CommandError(EINVAL, f"{node}: {value} is not allowed: {low}-{high}")
    return value
