"""The system: a command goes through the state, becomes plans, and reaches the gate; usage comes back.

Everything here runs on the trio thread and awaits nothing, so each call is atomic for the tree, cgpuctl and the
clients' sockets alike. What the gate reports was validated by the gate; what it counts comes from tenants' pages all
the same, so it is shown and never trusted with a decision about another tenant.
"""

import logging
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import replace
from errno import EBUSY, EIO, ENOENT, EOPNOTSUPP
from importlib.metadata import PackageNotFoundError, version
from typing import ParamSpec, Protocol

from cgpusched import policy
from cgpusched.commands import Command, Create, Destroy, SetMemsize, SetShut, Upgrade
from cgpusched.daemon.audit.verdict import Facts, Rules, Sample, Standing, judge, news
from cgpusched.daemon.describe import describe
from cgpusched.daemon.logs import Damper
from cgpusched.daemon.processes import Attachment, Processes
from cgpusched.daemon.tally import GpuTotals, Tally, Totals
from cgpusched.daemon.usage import Counters, GpuUsage, InstanceUsage, Rate
from cgpusched.errors import CommandError
from cgpusched.fields import pairs
from cgpusched.gate import Gate, GpuUse, Region, RegionUse
from cgpusched.model import Instance
from cgpusched.plan import GpuPlan
from cgpusched.state import State
from cgpusched.units import uuid_bytes

__all__ = ["Attachment", "OnChange", "System"]

log = logging.getLogger(__name__)

P = ParamSpec("P")
OnChange = Callable[[Command, Instance | None], None]


class Upgrader(Protocol):
    def ask(self) -> None:
        """CommandError: it cannot be done."""


class System:
    """State and gate together.

    ``on_change`` callbacks run after each command that succeeded, with the instance it was about, if any. An OSError
    from one undoes a Create (callbacks that ran before it see a Destroy); after other commands it is only logged.
    ``upgrade`` replaces this daemon, and says how that stands; None = it cannot be replaced. ``rules``: the audit's.
    ``save(command)`` stores the state as it is now, with the command that made it so; its OSError is the command's.
    ``past``: what was counted before this daemon; it is the system's from here on.

    Instances that ``state`` has already get their regions here (OSError: the gate failed).
    """

    def __init__(
        self, state: State, gate: Gate, upgrade: Upgrader | None = None, rules: Rules | None = None,
        save: Callable[[Command | None], None] = lambda command: None, past: Tally | None = None,
    ) -> None:  # fmt: skip
        self.state = state
        self._save = save
        self._past = past or Tally()
        self.gate = gate
        self.upgrade = upgrade
        self.rules = rules or Rules()
        self.on_change: list[OnChange] = []
        self.version = _version()
        self._regions: dict[str, dict[int, Region]] = {}
        self._plans: dict[int, GpuPlan] = {}
        self._processes = Processes(gate)
        self._other: dict[tuple[str, int], int] = {}  # the hidden memory that the gate was told
        self._rates: dict[tuple[str, int], Rate] = {}
        self._gpu_rates: dict[int, Rate] = {}
        self._watchdog: dict[int, tuple[int, bool]] = {}
        self._standings: dict[tuple[str, int], Standing] = {}
        self._dampers: dict[tuple[str, int], Damper] = {}
        self._audits: dict[int, str] = {}
        for gpu in state.gpus.values():
            gate.add_gpu(gpu.index, uuid_bytes(gpu.uuid), gpu.memory)
        for instance in state.instances.values():
            self._open_regions(instance)
        for index in state.gpus:
            self._push_plan(index)

    # Commands

    def apply(self, command: Command, *, log_refusal: bool = True) -> Instance | None:
        """Carry out ``command`` as a whole, or raise CommandError and leave everything as it was.

        CommandError has EIO where the gate failed, and what the file system said where the state cannot be stored. Both
        outcomes are logged; a refusal unless the caller says it does.

        The state is stored before anybody notices the change: what fails then has changed nothing, and what a crash
        comes upon later is carried out by the successor, from the file.
        """
        fields = describe(command)
        try:
            if isinstance(command, Destroy):
                self._check_unused(command.id)
            before = self.state.snapshot()
            result = self.state.apply(command)
            notes = self.state.notes
            try:
                self._store(command)
            except OSError as error:
                self.state.restore(before)
                raise CommandError(
                    error.errno or EIO, f"{fields['what']}: the state cannot be stored: {error.strerror or error}"
                ) from error
            try:
                self._carry_out(command, result)
            except OSError as error:
                self.state.restore(before)
                self._repair()
                self._tolerate(self._store)
                raise CommandError(EIO, f"{fields['what']}: the gate failed: {error.strerror or error}") from error
            self._tell(command, result)
        except CommandError as error:
            if log_refusal:
                log.warning("refused %s", pairs(**fields, errno=error.name, reason=error))
            raise
        log.info("done %s", pairs(**describe(command, result)))
        for note in notes:
            instance = result.id if result else None
            level = logging.WARNING if note.warning else logging.INFO
            log.log(level, "note %s", pairs(gpu=note.gpu, instance=instance, text=note.text))
        return result

    def _check_unused(self, ident: str) -> None:
        """Programs of a destroyed instance would run on with nobody to give them turns: they must end first."""
        if count := len(self.attached(ident)):
            raise CommandError(EBUSY, f"destroy {ident}: {count} of its processes use the GPU: end them first")

    def _store(self, command: Command | None = None) -> None:
        # An upgrade is no state; what the audit shut is found again.
        if not isinstance(command, Upgrade | SetShut):
            self._save(command)

    def _carry_out(self, command: Command, result: Instance | None) -> None:
        match command:
            case Upgrade():
                if self.upgrade is None:
                    raise CommandError(EOPNOTSUPP, "upgrade: this daemon cannot be replaced while it runs")
                self.upgrade.ask()
            case Create() if result:
                self._open_regions(result)
                self._push_plans(result)
            case Destroy() if result:
                self._push_plans(result)  # no turn for it any more, before its pages go
                self._close_regions(result.id)
            case SetMemsize(gpu, ident, _):
                self._push_memory(ident, gpu)
            case _:
                for gpu in self.state.gpus:
                    self._push_plan(gpu)

    def _tell(self, command: Command, result: Instance | None) -> None:
        for number, callback in enumerate(self.on_change):
            try:
                callback(command, result)
            except OSError as error:
                if not isinstance(command, Create):
                    log.error("callback %s", pairs(**describe(command, result), reason=error))
                    continue
                self._uncreate(Destroy(command.id), result, self.on_change[:number])
                where = f"{error.filename}: " if error.filename else ""
                raise CommandError(EIO, f"create {command.id}: {where}{error.strerror}") from error

    def _uncreate(self, undo: Destroy, instance: Instance | None, told: list[OnChange]) -> None:
        self.state.apply(undo)
        self._repair()
        self._tolerate(self._store)
        for callback in told:
            self._tolerate(callback, undo, instance)

    def _open_regions(self, instance: Instance) -> None:
        made = self._regions[instance.id] = {}
        try:
            for gpu, share in instance.shares.items():
                made[gpu] = self.gate.add_region(gpu, instance.id, share.memsize)
        except OSError:
            self._close_regions(instance.id)
            raise

    def _close_regions(self, ident: str) -> None:
        for gpu, region in self._regions.pop(ident, {}).items():
            self._processes.drop(ident, gpu)
            self._other.pop((ident, gpu), None)
            self._rates.pop((ident, gpu), None)
            self._standings.pop((ident, gpu), None)
            self._dampers.pop((ident, gpu), None)
            self._past.drop(ident, self.state.gpus[gpu].uuid)
            self._tolerate(self.gate.remove_region, region)

    def _push_plans(self, instance: Instance) -> None:
        for gpu in instance.shares:
            self._push_plan(gpu)

    def _push_plan(self, gpu: int) -> None:
        plan = self._plan(gpu)
        if self._plans.get(gpu) != plan:
            self._plans.pop(gpu, None)  # unknown while it is being set
            self.gate.set_plan(gpu, plan)
            self._plans[gpu] = plan

    def _plan(self, gpu: int) -> GpuPlan:
        shares = [(instance.id, instance.shares[gpu]) for instance in self.state.on_gpu(gpu)]
        busy = [i.id for i in self.state.on_gpu(gpu) if (rate := self._rates.get((i.id, gpu))) and rate.busy]
        return policy.plan(self.state.settings[gpu], shares, busy)

    def _push_memory(self, ident: str, gpu: int) -> None:
        limit, other = self.state.instances[ident].shares[gpu].memsize, self._processes.other(ident, gpu)
        self.gate.set_memory(self._regions[ident][gpu], limit, other)
        self._other[ident, gpu] = other

    def _repair(self) -> None:
        """After the gate failed half way: make it agree with the state again, as far as it lets us."""
        for gpu in self.state.gpus:
            self._tolerate(self._push_plan, gpu)
        for ident, made in list(self._regions.items()):
            if ident not in self.state.instances:
                self._close_regions(ident)
                continue
            for gpu in made:
                self._tolerate(self._push_memory, ident, gpu)

    def _tolerate(self, step: Callable[P, None], *args: P.args, **kwargs: P.kwargs) -> None:
        """Where there is nothing left to undo: a failure is logged, and the rest goes on."""
        try:
            step(*args, **kwargs)
        except OSError as error:
            log.error("gate %s", pairs(step=step.__name__, of=args, reason=error))

    # Processes

    def attach_process(self, ident: str, pid: int, agent_fd: int) -> Attachment:
        """Give a process of this instance a slot on each of its GPUs. ``agent_fd`` stays the caller's.

        Raises CommandError: ENOENT without such an instance, else what the gate says (EAGAIN: no slot is free).
        """
        if ident not in self._regions:
            raise CommandError(ENOENT, f"no instance {ident[:140]}")
        return self._processes.attach(ident, pid, agent_fd, self._regions[ident])

    def detach_process(self, attachment: Attachment) -> None:
        """The process ended, or its connection did: its memory and its turn are free at once. May be called twice."""
        self._processes.detach(attachment)
        for gpu in self._regions.get(attachment.id, {}):
            self._push_other(attachment.id, gpu)

    def attached(self, ident: str) -> list[Attachment]:
        """The connected processes of an instance, each once."""
        return self._processes.of(ident, self._regions.get(ident, {}))

    def regions(self, ident: str) -> dict[int, Region]:
        """By GPU, in the order its programs see; empty without such an instance."""
        return dict(self._regions.get(ident, {}))

    # Memory

    def memory(self, ident: str, gpu: int) -> list[tuple[int, int]]:
        """(host pid, bytes) of each process of the instance that uses this GPU, by pid."""
        region = self._regions.get(ident, {}).get(gpu)
        return self._processes.memory(region) if region else []

    def ledger(self, gpu: int) -> dict[int, int]:
        """Bytes by host pid that the hooks know of on this GPU, for a Sample."""
        found: Counter[int] = Counter()
        for made in self._regions.values():
            if gpu in made:
                found.update(self._processes.ledger(made[gpu]))
        return dict(found)

    def connected(self, gpu: int) -> dict[int, str]:
        """The connected processes of all instances on this GPU: host pid to full ID."""
        return self._processes.connected(gpu)

    def rises(self, gpu: int, sample: Sample, strays: Mapping[int, str]) -> bool:
        """Whether observe() with this sample alone would count more memory of some process: then take further ones."""
        return self._processes.rises(gpu, sample, strays)

    def observe(
        self, gpu: int, samples: Sequence[Sample], strays: Mapping[int, str], audit: str = "ok",
        counted: Collection[int] = (),
    ) -> None:  # fmt: skip
        """Take in one look at what NVML says each process uses: what the hooks do not know counts too.

        ``strays``: the processes in it that are not connected and belong to an instance, host pid to full ID. No
        sample: nothing is known, and nothing is held against anybody. ``audit`` is what status shows of this GPU.
        ``counted``: whom count() was about since the first sample; they stay as they are.
        """
        self._audits[gpu] = audit
        self._processes.observe(gpu, samples, strays, counted)
        for ident, made in list(self._regions.items()):
            if gpu in made:
                self._push_other(ident, gpu)
                self._audit(ident, gpu)

    def uncounted(self, gpu: int, sample: Sample, pids: Iterable[int]) -> bool:
        """Whether count() with this sample alone would count more memory of one of them: then take further ones."""
        return self._processes.uncounted(gpu, sample, pids)

    def count(self, gpu: int, samples: Sequence[Sample], pids: Collection[int]) -> None:
        """Take in at once, of these connected processes alone, what all samples agree that they use beside the ledger.

        They say themselves that they have just made the first context of their instance, or one of the first. It tells
        what one takes: from then on its processes charge that much before they make theirs.
        """
        self._processes.count(gpu, samples, pids)
        for ident in {ident for pid, ident in self._processes.connected(gpu).items() if pid in pids}:
            self._push_other(ident, gpu)
            if (size := self._processes.context(ident, gpu)) is not None:
                self._tolerate(self.gate.set_context, self._regions[ident][gpu], size)

    def _audit(self, ident: str, gpu: int) -> None:
        share, processes = self.state.instances[ident].shares[gpu], self._processes
        facts = Facts(
            share.memsize,
            sum(processes.ledger(self._regions[ident][gpu]).values()),
            processes.hidden(ident, gpu),
            processes.strays(ident, gpu),
        )
        old = self._standings.get((ident, gpu), Standing())
        new = self._standings[ident, gpu] = judge(old, facts, self.rules)
        for line in news(old, new, facts):
            if (held := self._dampers.setdefault((ident, gpu), Damper()).note()) is not None:
                level = logging.WARNING if line.warning else logging.INFO
                log.log(level, "%s %s%s", line.words, pairs(gpu=gpu, instance=ident, **line.fields), held)
        if share.shut != (shut := new.over and self.rules.gate):
            try:
                self.apply(SetShut(gpu, ident, shut))
            except CommandError:  # the gate failed, which is logged: the next look tries again
                pass

    def _push_other(self, ident: str, gpu: int) -> None:
        if self._processes.other(ident, gpu) != self._other.get((ident, gpu), 0):
            self._tolerate(self._push_memory, ident, gpu)

    # Usage

    def sample(self, now_ns: int) -> None:
        """Work out everyone's share of device time since the last call; call it about once a second."""
        for gpu in self.state.gpus:
            whole = self.gate.gpu_usage(gpu)
            self._gpu_rates[gpu] = Rate.after(self._gpu_rates.get(gpu), now_ns, whole.busy_ns)
            self._tell_watchdog(gpu, whole)
        for ident, made in self._regions.items():
            for gpu, region in made.items():
                use = self.gate.usage(region)
                self._rates[ident, gpu] = Rate.after(self._rates.get((ident, gpu)), now_ns, use.busy_ns, use.waiting)

    def _tell_watchdog(self, gpu: int, use: GpuUse) -> None:
        """One line when the gate gave up on scheduling this GPU because of somebody's wait, and one when it is back."""
        starved, fallback = self._watchdog.get(gpu, (0, False))
        if use.starved > starved:
            log.error("plain sharing: somebody who was due waited too long %s", pairs(gpu=gpu, times=use.starved))
        if not use.fallback and (fallback or use.starved > starved):
            log.warning("scheduling again %s", pairs(gpu=gpu, times=use.starved))
        self._watchdog[gpu] = use.starved, use.fallback

    def usage(self) -> list[GpuUsage]:
        """What cgpu-smi shows, by GPU in order; shares of device time are those of the last sample()."""
        return [self._gpu_usage(index) for index in self.state.gpus]

    def _gpu_usage(self, index: int) -> GpuUsage:
        gpu, settings, use = self.state.gpus[index], self.state.settings[index], self.gate.gpu_usage(index)
        totals = self._gpu_totals(index, use)
        entitled = self._plan(index).entitled
        rows = tuple(self._instance_usage(i, index, entitled[i.id]) for i in self.state.on_gpu(index))
        rate = self._gpu_rates.get(index)
        return GpuUsage(
            index=index,
            uuid=gpu.uuid,
            name=gpu.name,
            memory=gpu.memory,
            simulated=gpu.simulated,
            policy=int(settings.policy),
            max_inst=settings.max_inst,
            prio_ratio=settings.prio_ratio,
            percent=rate.percent if rate else 0.0,
            native=use.native,
            fallbacks=totals.fallbacks,
            instances=rows,
            starved=totals.starved,
            audit=self._audits.get(index, "off"),
        )

    def _instance_usage(self, instance: Instance, gpu: int, entitled: float) -> InstanceUsage:
        key = instance.id, gpu
        region, share, rate = self._regions[instance.id][gpu], instance.shares[gpu], self._rates.get(key)
        use, memory = self.gate.usage(region), self._processes.memory(region)
        totals = self._totals(instance.id, gpu, use)
        return InstanceUsage(
            gpu=gpu,
            id=instance.id,
            short=instance.short,
            weight=share.weight,
            highprio=share.highprio,
            percent=rate.percent if rate else 0.0,
            entitled=entitled,
            mem_used=sum(used for _, used in memory),
            mem_limit=share.memsize,
            mem_other=self._processes.other(instance.id, gpu),
            processes=tuple(pid for pid, _ in memory),
            waiting=use.waiting,
            holding=use.holding,
            busy_ns=totals.busy_ns,
            turns=totals.turns,
            overdue=totals.overdue,
            counters=Counters(
                totals.launches, totals.ungated, totals.unknown, totals.dirty, totals.mem_refused
            ),
            audit=replace(self._standings.get(key, Standing()), bypasses=totals.bypasses, overs=totals.overs),
            shut=share.shut,
        )

    def _totals(self, ident: str, gpu: int, use: RegionUse) -> Totals:
        """All that was counted, in predecessors' times too."""
        counters = self._processes.counters(self._regions[ident][gpu])
        standing = self._standings.get((ident, gpu), Standing())
        own = Totals(use.busy_ns, use.turns, use.overdue, counters.launches, counters.ungated, counters.unknown,
                     counters.dirty, counters.mem_refused, standing.bypasses, standing.overs)  # fmt: skip
        return self._past.of(ident, self.state.gpus[gpu].uuid).plus(own)

    def _gpu_totals(self, gpu: int, use: GpuUse) -> GpuTotals:
        return self._past.of_gpu(self.state.gpus[gpu].uuid).plus(GpuTotals(use.fallbacks, use.starved))

    def tally(self) -> Tally:
        """All that was counted up to now, for a successor."""
        gpus = self.state.gpus
        return Tally(
            {(ident, gpus[gpu].uuid): self._totals(ident, gpu, self.gate.usage(region))
             for ident, made in self._regions.items() for gpu, region in made.items()},
            # a GPU that is absent for one start may come back
            {**self._past.gpus,
             **{gpu.uuid: self._gpu_totals(gpu.index, self.gate.gpu_usage(gpu.index)) for gpu in gpus.values()}},
        )  # fmt: skip

    def upgrade_state(self) -> str:
        """What the tree's ``upgrade`` reads: ``idle``, ``running``, or ``failed:`` and why this daemon goes on."""
        return str(self.upgrade or "idle")


def _version() -> str:
    try:
        return version("cgpufs")
    except PackageNotFoundError:  # run from the sources without being installed
        return "0.0.0"
