"""The processes that are connected, where each sits on each GPU, and what they hold and counted."""

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from errno import EIO

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


@dataclass(frozen=True)
class Hidden:
    """Bytes that NVML sees and the hooks cannot (contexts, modules)."""

    now: int = 0
    last: int = 0
    """The difference as it was observed last, before it was smoothed."""


class Processes:
    """Which process has which slot. Regions are the system's; it says which there are."""

    def __init__(self, gate: Gate) -> None:
        self.gate = gate
        self._slots: dict[Place, dict[int, Attachment]] = {}
        self._hidden: dict[tuple[int, int], Hidden] = {}  # by (gpu, pid)
        self._past: dict[Place, Counters] = {}

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
            self._forget_hidden(ticket.gpu, attachment.pid)
            try:
                self.gate.detach(ticket.region, ticket.slot)
            except OSError as error:
                log.error("detach %s", pairs(gpu=ticket.gpu, instance=attachment.id, pid=attachment.pid, reason=error))

    def drop(self, ident: str, gpu: int) -> None:
        """The region goes, and all that was known of it."""
        slots = self._slots.pop((ident, gpu), {})
        self._past.pop((ident, gpu), None)
        for attachment in slots.values():
            self._forget_hidden(gpu, attachment.pid)

    def _forget_hidden(self, gpu: int, pid: int) -> None:
        # A process that connected again has its new slot before the old connection's end is seen.
        still = (a for (_, where), slots in self._slots.items() if where == gpu for a in slots.values())
        if all(other.pid != pid for other in still):
            self._hidden.pop((gpu, pid), None)

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
            if use.mem_peak or use.mem_used or use.launches or (region.gpu, pid) in self._hidden:
                found[pid] = found.get(pid, 0) + use.mem_used
        return found

    def memory(self, region: Region) -> list[tuple[int, int]]:
        """(host pid, bytes) by pid: the ledger's bytes and what is hidden from it."""
        hidden, gpu = self._hidden, region.gpu
        return sorted((pid, used + hidden.get((gpu, pid), Hidden()).now) for pid, used in self.ledger(region).items())

    def other(self, ident: str, gpu: int) -> int:
        """Hidden bytes of the whole instance on this GPU."""
        pids = {attachment.pid for attachment in self._slots.get((ident, gpu), {}).values()}
        return sum(self._hidden.get((gpu, pid), Hidden()).now for pid in pids)

    def observe(self, region: Region, before: Mapping[int, int], used: Mapping[int, int]) -> None:
        """See System.observe()."""
        after = self.ledger(region)
        for pid in {a.pid for a in self._slots.get((region.id, region.gpu), {}).values()}:
            key = region.gpu, pid
            if pid not in used:
                self._hidden.pop(key, None)
                continue
            difference = max(0, used[pid] - max(before.get(pid, 0), after.get(pid, 0)))
            self._hidden[key] = Hidden(min(difference, self._hidden.get(key, Hidden()).last), difference)

    def counters(self, region: Region) -> Counters:
        """What its processes counted, those that ended included."""
        total = self._past.get((region.id, region.gpu), Counters())
        for use in self.gate.processes(region):
            total = total.plus(use)
        return total
