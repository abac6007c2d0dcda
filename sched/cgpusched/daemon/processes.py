"""The processes of instances: where each connected one sits on each GPU, and what all of them hold and counted."""

import logging
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from errno import EIO

from cgpusched.daemon.audit.verdict import Hidden, Sample, difference
from cgpusched.daemon.usage import Counters
from cgpusched.errors import CommandError
from cgpusched.fields import pairs
from cgpusched.gate import Gate, Region

log = logging.getLogger(__name__)

Place = tuple[str, int]
"""(instance ID, GPU): one region."""


@dataclass(frozen=True)
class Ticket:
    """A process's place on one GPU: what its cgpu_welcome_gpu says."""

    gpu: int
    region: Region
    slot: int
    generation: int


@dataclass(frozen=True, eq=False)
class Attachment:
    """One connected process of an instance. ``pid`` as the host counts. Tickets are in the order its programs see."""

    id: str
    pid: int
    tickets: tuple[Ticket, ...]


class Processes:
    """Which process has which slot, and which use a GPU without one (strays). Regions are the system's."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._slots: dict[Place, dict[int, Attachment]] = {}
        self._hidden: dict[int, dict[int, Hidden]] = {}  # by GPU and pid; what of it counts is of who is there now
        self._strays: dict[int, dict[int, str]] = {}  # by GPU: pid to instance
        self._past: dict[Place, Counters] = {}
        self._contexts: dict[Place, int] = {}  # the least that a process's first one took

    def attach(self, ident: str, pid: int, agent_fd: int, regions: Mapping[int, Region]) -> Attachment:
        """A slot in each region, or none: CommandError with the gate's errno."""
        tickets: list[Ticket] = []
        try:
            for gpu, region in regions.items():
                tickets.append(Ticket(gpu, region, *self.gate.attach(region, agent_fd)))
        except OSError as error:
            for ticket in tickets:
                self.gate.detach(ticket.region, ticket.slot)
            raise CommandError(error.errno or EIO, f"no place for process {pid} of {ident}: {error}") from error
        attachment = Attachment(ident, pid, tuple(tickets))
        for ticket in tickets:
            self._slots.setdefault((ident, ticket.gpu), {})[ticket.slot] = attachment
        return attachment

    def detach(self, attachment: Attachment) -> None:
        """Give its slots back. Nothing to do for slots that went with their instance, or were given back before."""
        for ticket in attachment.tickets:
            place = attachment.id, ticket.gpu
            slots = self._slots.get(place, {})
            if slots.get(ticket.slot) is not attachment:
                continue
            for use in self.gate.processes(ticket.region):
                if use.slot == ticket.slot:
                    self._past[place] = self._past.get(place, Counters()).plus(use)
            del slots[ticket.slot]
            try:
                self.gate.detach(ticket.region, ticket.slot)
            except OSError as error:
                log.error("detach %s", pairs(gpu=ticket.gpu, instance=attachment.id, pid=attachment.pid, reason=error))

    def drop(self, ident: str, gpu: int) -> None:
        """The region goes, and all that was known of it."""
        self._slots.pop((ident, gpu), None)
        self._past.pop((ident, gpu), None)
        self._contexts.pop((ident, gpu), None)
        strays = self._strays.get(gpu, {})
        self._strays[gpu] = {pid: owner for pid, owner in strays.items() if owner != ident}

    def connected(self, gpu: int) -> dict[int, str]:
        """The connected processes that have a slot on this GPU: host pid to instance."""
        return {a.pid: ident for (ident, on), slots in self._slots.items() if on == gpu for a in slots.values()}

    def _pids(self, ident: str, gpu: int) -> set[int]:
        return {attachment.pid for attachment in self._slots.get((ident, gpu), {}).values()}

    def of(self, ident: str, gpus: Iterable[int]) -> list[Attachment]:
        """The connected processes of an instance, each once."""
        found = {id(a): a for gpu in gpus for a in self._slots.get((ident, gpu), {}).values()}
        return list(found.values())

    def ledger(self, region: Region) -> dict[int, int]:
        """Bytes by host pid, as the hooks count, of the processes that use this region's GPU."""
        slots = self._slots.get((region.id, region.gpu), {})
        found: dict[int, int] = {}
        for use in self.gate.processes(region):
            attachment = slots.get(use.slot)
            if attachment is None:
                continue
            pid = attachment.pid
            # A process of two GPUs has a slot on both from its start; what it never touched it does not use.
            if use.mem_peak or use.mem_used or use.launches or pid in self._hidden.get(region.gpu, {}):
                found[pid] = found.get(pid, 0) + use.mem_used
        return found

    def memory(self, region: Region) -> list[tuple[int, int]]:
        """(host pid, bytes) by pid: the ledger's bytes and what is hidden from it."""
        found = self.ledger(region)
        for pid, used in (self.hidden(region.id, region.gpu) | self.strays(region.id, region.gpu)).items():
            if used:
                found[pid] = found.get(pid, 0) + used
        return sorted(found.items())

    def hidden(self, ident: str, gpu: int) -> dict[int, int]:
        """Bytes beside the ledger, by host pid, of the instance's connected processes."""
        return self._counted(gpu, self._pids(ident, gpu))

    def strays(self, ident: str, gpu: int) -> dict[int, int]:
        """Bytes by host pid of its processes that use this GPU and are not connected."""
        pids = {pid for pid, owner in self._strays.get(gpu, {}).items() if owner == ident}
        return self._counted(gpu, pids - self._pids(ident, gpu))

    def _counted(self, gpu: int, pids: Iterable[int]) -> dict[int, int]:
        hidden = self._hidden.get(gpu, {})
        return {pid: hidden[pid].now for pid in pids if pid in hidden}

    def other(self, ident: str, gpu: int) -> int:
        """Bytes of the whole instance on this GPU that its ledger does not have."""
        return sum(self.hidden(ident, gpu).values()) + sum(self.strays(ident, gpu).values())

    def rises(self, gpu: int, sample: Sample, strays: Iterable[int]) -> bool:
        """Whether observe() with this sample alone would count more of some process than is counted now."""
        old = self._hidden.get(gpu, {})
        return any(
            (hidden := old.get(pid, Hidden())).after(difference([sample], pid)).now > hidden.now
            for pid in {*self.connected(gpu), *strays}
        )

    def observe(
        self, gpu: int, samples: Sequence[Sample], strays: Mapping[int, str], counted: Collection[int] = ()
    ) -> None:
        """See System.observe()."""
        connected, old = self.connected(gpu), self._hidden.get(gpu, {})
        self._strays[gpu] = {pid: ident for pid, ident in strays.items() if pid not in connected}
        looked = {pid: old.get(pid, Hidden()) for pid in {*connected, *strays}}
        looked |= {pid: one.after(difference(samples, pid)) for pid, one in looked.items() if pid not in counted}
        self._hidden[gpu] = {pid: hidden for pid, hidden in looked.items() if hidden != Hidden()}

    def uncounted(self, gpu: int, sample: Sample, pids: Iterable[int]) -> bool:
        """Whether count() with this sample alone would count more of one of them."""
        hidden = self._hidden.get(gpu, {})
        return any(difference([sample], pid) > hidden.get(pid, Hidden()).now for pid in pids)

    def count(self, gpu: int, samples: Sequence[Sample], pids: Collection[int]) -> None:
        """See System.count()."""
        hidden = self._hidden.setdefault(gpu, {})
        for (ident, on), slots in self._slots.items():
            for one in slots.values():
                if on != gpu or one.pid not in pids:
                    continue
                found, before = difference(samples, one.pid), hidden.pop(one.pid, Hidden()).now
                if found:
                    hidden[one.pid] = Hidden(found, found)
                if all(one.pid in sample.used for sample in samples) and (found > before or not found):
                    size = max(0, found - before)  # it may have had others, under another daemon
                    self._contexts[ident, gpu] = min(size, self._contexts.get((ident, gpu), size))

    def context(self, ident: str, gpu: int) -> int | None:
        """Bytes that a process of the instance takes at least with its first context there; None: none was measured."""
        return self._contexts.get((ident, gpu))

    def counters(self, region: Region) -> Counters:
        """What its processes counted, those that ended included."""
        total = self._past.get((region.id, region.gpu), Counters())
        for use in self.gate.processes(region):
            total = total.plus(use)
        return total
