"""A command through the system: state, plans, regions, memory limits and the log; and back when the gate fails."""

import copy
import logging
from dataclasses import dataclass, field
from errno import EAGAIN, EBUSY, EEXIST, EIO, ENOENT, ENOMEM, EOPNOTSUPP

import pytest

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
from cgpusched.daemon.audit.verdict import Rules, Sample
from cgpusched.daemon.system import System
from cgpusched.daemon.tally import GpuTotals, Tally
from cgpusched.daemon.usage import Counters
from cgpusched.errors import CommandError
from cgpusched.model import Gpu, GpuSettings, Instance, Policy
from cgpusched.plan import UNIT_SLICE_NS, GpuPlan
from cgpusched.state import State

GIB = 1 << 30
SECOND = 1_000_000_000


@dataclass(eq=False)
class FakeRegion:
    gpu: int
    id: str
    limit: int
    other: int = 0
    context: int | None = None
    ctl_fd: int = -1
    report_fd: int = -1
    bell_fd: int = -1
    slots: "dict[int, FakeSlot]" = field(default_factory=dict)
    use: "FakeUse" = field(default_factory=lambda: FakeUse())


@dataclass
class FakeSlot:
    slot: int
    mem_used: int = 0
    mem_peak: int = 0
    mem_refused: int = 0
    launches: int = 0
    ungated: int = 0
    unknown: int = 0
    dirty: int = 0


@dataclass
class FakeUse:
    busy_ns: int = 0
    turns: int = 0
    waiting: bool = False
    holding: bool = False
    overdue: int = 0


@dataclass
class FakeGpuUse:
    busy_ns: int = 0
    native: bool = False
    starved: int = 0
    fallback: bool = False
    fallbacks: int = 0


class FakeGate:
    """Keeps what it is told. ``fail`` names calls that fail from now on, once each: (call, GPU or None)."""

    def __init__(self) -> None:
        self.gpus: dict[int, bytes] = {}
        self.regions: dict[tuple[int, str], FakeRegion] = {}
        self.plans: dict[int, GpuPlan] = {}
        self.pushed: list[int] = []
        self.fail: list[tuple[str, int | None]] = []
        self.gpu_uses: dict[int, FakeGpuUse] = {}
        self.capacity = 4

    def _call(self, name: str, gpu: int) -> None:
        for wanted in ((name, gpu), (name, None)):
            if wanted in self.fail:
                self.fail.remove(wanted)
                raise OSError(ENOMEM, "told to fail")

    def add_gpu(self, index: int, uuid: bytes, memory: int) -> None:
        assert len(uuid) == 16
        self.gpus[index] = uuid
        self.gpu_uses[index] = FakeGpuUse()

    def add_region(self, gpu: int, ident: str, mem_limit: int) -> FakeRegion:
        self._call("add_region", gpu)
        assert (gpu, ident) not in self.regions
        made = self.regions[gpu, ident] = FakeRegion(gpu, ident, mem_limit)
        return made

    def remove_region(self, region: FakeRegion) -> None:
        assert self.regions.pop((region.gpu, region.id)) is region
        assert all(turn.id != region.id for turn in self.plans[region.gpu].turns) or self.plans[region.gpu].turns == ()

    def set_plan(self, gpu: int, plan: GpuPlan) -> None:
        self._call("set_plan", gpu)
        assert all((gpu, turn.id) in self.regions for turn in plan.turns)
        self.plans[gpu] = plan
        self.pushed.append(gpu)

    def set_memory(self, region: FakeRegion, limit: int, other: int) -> None:
        self._call("set_memory", region.gpu)
        region.limit, region.other = limit, other

    def set_context(self, region: FakeRegion, size: int) -> None:
        self._call("set_context", region.gpu)
        region.context = size

    def attach(self, region: FakeRegion, agent_fd: int) -> tuple[int, int]:
        self._call("attach", region.gpu)
        free = next((slot for slot in range(self.capacity) if slot not in region.slots), None)
        if free is None:
            raise OSError(EAGAIN, "no slot is free")
        region.slots[free] = FakeSlot(free)
        return free, 100 + free

    def detach(self, region: FakeRegion, slot: int) -> None:
        assert self.regions[region.gpu, region.id] is region
        del region.slots[slot]

    def processes(self, region: FakeRegion) -> list[FakeSlot]:
        return list(region.slots.values())

    def usage(self, region: FakeRegion) -> FakeUse:
        return region.use

    def gpu_usage(self, gpu: int) -> FakeGpuUse:
        return self.gpu_uses[gpu]


class Node:
    """Two GPUs of 24 GiB, a fake gate, and the system over them."""

    def __init__(self, settings: GpuSettings | None = None) -> None:
        cards = [Gpu(i, f"GPU-00000000-0000-0000-0000-{i:012x}", "Test", 24 * GIB, simulated=True) for i in (0, 1)]
        self.state = State(cards, settings)
        self.gate = FakeGate()
        self.system = System(self.state, self.gate)

    def create(self, ident: str, *gpus: int, memsize: int = GIB, **options: object) -> Instance:
        made = self.system.apply(Create(ident, gpus or (0,), (memsize,), **options))  # type: ignore[arg-type]
        assert made is not None
        return made

    def region(self, ident: str, gpu: int = 0) -> FakeRegion:
        return self.gate.regions[gpu, ident]

    def everything(self) -> tuple[object, ...]:
        state = self.state
        regions = {key: (region.limit, region.other) for key, region in self.gate.regions.items()}
        kept = (state.settings, state.instances, list(state.instances), state.default_memsize)
        return copy.deepcopy((*kept, regions, self.gate.plans))

    def refused(self, command: Command, code: int) -> str:
        before = self.everything()
        with pytest.raises(CommandError) as error:
            self.system.apply(command)
        assert error.value.errno == code, str(error.value)
        assert self.everything() == before
        return str(error.value)


@pytest.fixture
def node() -> Node:
    return Node()


@pytest.fixture
def lines(caplog: pytest.LogCaptureFixture) -> pytest.LogCaptureFixture:
    caplog.set_level(logging.INFO)
    return caplog


def last(lines: pytest.LogCaptureFixture) -> tuple[str, str]:
    record = lines.records[-1]
    return record.levelname, record.getMessage()


# Commands


def test_gpus_and_their_plans_are_there_from_the_start() -> None:
    node = Node(GpuSettings(Policy.FIXED, max_inst=4))
    assert node.gate.gpus == {0: bytes(16), 1: bytes(15) + b"\1"}
    assert node.gate.plans[1] == GpuPlan((), 4 * UNIT_SLICE_NS, skip_idle=False)


def test_create_makes_regions_and_plans(node: Node) -> None:
    node.create("a", 1, 0, memsize=2 * GIB, weight=2)
    assert list(node.system.regions("a")) == [1, 0]
    assert [(region.limit, region.other) for region in node.gate.regions.values()] == [(2 * GIB, 0)] * 2
    assert [turn.id for turn in node.gate.plans[1].turns] == ["a"]
    assert node.gate.plans[0].turns[0].quantum_ns == 2 * UNIT_SLICE_NS


def test_destroy_takes_them_away(node: Node) -> None:
    node.create("a", 0, 1)
    node.create("b", 0)
    node.system.apply(Destroy("a"))
    assert list(node.gate.regions) == [(0, "b")]
    assert [turn.id for turn in node.gate.plans[0].turns] == ["b"]
    assert node.gate.plans[1].turns == ()
    assert node.system.regions("a") == {}
    assert node.system.memory("a", 0) == []


def test_only_plans_that_changed_are_pushed(node: Node) -> None:
    node.create("a", 0)
    node.gate.pushed.clear()
    for command in (SetPolicy(0, 1), SetMemsize(0, "a", 2 * GIB), SetDefaultMemsize(5), SetHighprio(0, "a", 0)):
        node.system.apply(command)
    assert node.gate.pushed == []
    node.system.apply(SetPolicy(0, 4))
    node.system.apply(SetPrioRatio(0, 50))
    node.system.apply(SetHighprio(0, "a", 1))
    node.system.apply(SetMaxInst(0, 5))  # means nothing to policy 4
    assert node.gate.pushed == [0, 0, 0]
    node.system.apply(SetWeight(0, "a", 0))
    assert node.gate.pushed == [0, 0, 0, 0]
    assert node.gate.plans[0].turns[0].quantum_ns == 0


def test_memsize_reaches_the_gate(node: Node) -> None:
    node.create("a", 0, 1)
    node.system.apply(SetMemsize(1, "a", 3 * GIB))
    assert [node.region("a", gpu).limit for gpu in (0, 1)] == [GIB, 3 * GIB]


def test_a_refusal_reaches_nobody(node: Node) -> None:
    node.create("a")
    node.refused(Create("a", (1,), (GIB,)), EEXIST)
    node.refused(Destroy("b"), ENOENT)


def test_log_of_what_was_done(node: Node, lines: pytest.LogCaptureFixture) -> None:
    node.system.apply(SetPolicy(1, 3))
    assert last(lines) == ("INFO", "done what=policy gpu=1 value=3")
    node.system.apply(Create("a", (0, 1), (GIB, 2 * GIB), owner=1000))
    assert last(lines) == (
        "INFO",
        f"done what=create instance=a gpu=0,1 memsize={GIB},{2 * GIB} weight=1,1 highprio=0 ephemeral=0 owner=1000",
    )
    node.system.apply(SetWeight(0, "a", 2))
    assert last(lines) == ("INFO", "done what=weight gpu=0 instance=a value=2")
    node.system.apply(Destroy("a"))
    assert last(lines) == ("INFO", "done what=destroy instance=a")


def test_log_of_refusals(node: Node, lines: pytest.LogCaptureFixture) -> None:
    node.create("a")
    node.refused(SetWeight(0, "a", 26), 22)
    level, text = last(lines)
    assert level == "WARNING"
    assert text.startswith("refused what=weight gpu=0 instance=a value=26 errno=EINVAL reason=")
    assert "0/a/weight: 26 is not allowed: 0-25" in text
    node.refused(Create("x\n" * 5000, (0,) * 5000, (1,) * 5000), 22)
    assert len(last(lines)[1]) < 1000
    assert "\n" not in last(lines)[1]


def test_log_of_what_came_with_it(node: Node, lines: pytest.LogCaptureFixture) -> None:
    node.create("a", weight=20)
    assert last(lines) == ("INFO", 'note gpu=0 instance=a text="policy 1 -> 2: a has weight 20"')
    node.create("b")
    assert last(lines) == ("WARNING", 'note gpu=0 instance=b text="weight 0, no compute: free_weight was 0"')


def test_destroy_is_refused_while_processes_use_the_gpu(node: Node) -> None:
    node.create("a")
    attachment = node.system.attach_process("a", 70, 7)
    node.refused(Destroy("a"), 16)
    node.system.detach_process(attachment)
    node.system.apply(Destroy("a"))
    assert "a" not in node.system.state.instances


def test_every_command_has_its_line(node: Node, lines: pytest.LogCaptureFixture) -> None:
    node.create("a")
    commands: list[Command] = [
        SetPolicy(0, 2), SetMaxInst(0, 9), SetPrioRatio(0, 50), SetDefaultMemsize(7), SetWeight(0, "a", 3),
        SetHighprio(0, "a", 1), SetMemsize(0, "a", 8), SetShut(0, "a", True), Destroy("a"),
    ]  # fmt: skip
    lines.clear()
    for command in commands:
        node.system.apply(command)
    told = [record.getMessage().split()[1] for record in lines.records]
    assert told == [
        f"what={word}"
        for word in ("policy", "max_inst", "prio_ratio", "default_memsize", "weight", "highprio", "memsize", "shut",
                     "destroy")
    ]


class Replacement:
    running = False

    def ask(self) -> None:
        if self.running:
            raise CommandError(EBUSY, "under way")
        self.running = True

    def __str__(self) -> str:
        return "running" if self.running else "idle"


def test_upgrade(node: Node) -> None:
    assert node.system.upgrade_state() == "idle"
    assert "cannot be replaced" in node.refused(Upgrade(), EOPNOTSUPP)
    upgrade = Replacement()
    node.system.upgrade = upgrade
    node.system.apply(Upgrade())
    assert node.system.upgrade_state() == "running"
    assert node.refused(Upgrade(), EBUSY) == "under way"


def test_version_has_three_numbers(node: Node) -> None:
    assert [part.isdigit() for part in node.system.version.split(".")] == [True] * 3


# When the gate fails


@pytest.mark.parametrize("call", [("add_region", 0), ("add_region", 1), ("set_plan", 0), ("set_plan", 1)])
def test_a_failed_create_leaves_nothing(node: Node, call: tuple[str, int]) -> None:
    node.create("old", 0, 1)
    node.gate.fail = [call]
    assert "told to fail" in node.refused(Create("new", (0, 1), (GIB,), weight=2), EIO)
    assert node.gate.fail == []
    assert node.system.regions("new") == {}
    node.create("new", 0, 1, weight=2)  # and nothing stands in the way of the next try


@pytest.mark.parametrize(
    ("command", "call"),
    [
        (SetPolicy(0, 2), ("set_plan", 0)),
        (SetMaxInst(0, 9), ("set_plan", 0)),
        (SetWeight(1, "old", 5), ("set_plan", 1)),
        (SetHighprio(0, "old", 1), ("set_plan", 0)),
        (SetMemsize(1, "old", 2 * GIB), ("set_memory", 1)),
        (Destroy("old"), ("set_plan", 0)),
        (Destroy("old"), ("set_plan", 1)),
    ],
)
def test_a_failed_change_is_taken_back(command: Command, call: tuple[str, int]) -> None:
    node = Node(GpuSettings(Policy.FIXED))
    old = node.create("old", 0, 1)
    node.gate.fail = [call]
    node.refused(command, EIO)
    assert node.state.instances["old"] is old
    node.system.apply(command)


def test_a_gate_that_fails_again_during_repair_is_logged_and_caught_up_with(
    node: Node, lines: pytest.LogCaptureFixture
) -> None:
    node.create("a")
    node.gate.fail = [("set_plan", 0), ("set_plan", 0)]
    with pytest.raises(CommandError):
        node.system.apply(SetPolicy(0, 3))
    assert node.state.settings[0].policy == Policy.PREEMPTIVE
    assert [record.levelname for record in lines.records][-2:] == ["ERROR", "WARNING"]
    node.gate.pushed.clear()
    node.system.apply(SetDefaultMemsize(1))
    assert node.gate.pushed == [0], "what the gate has is unknown, so the next command sends it again"


def test_callbacks_hear_of_what_succeeded(node: Node) -> None:
    heard: list[tuple[Command, str | None]] = []
    node.system.on_change.append(lambda command, instance: heard.append((command, instance.id if instance else None)))
    made = Create("a", (0,), (GIB,))
    node.system.apply(made)
    node.system.apply(SetMemsize(0, "a", 5))
    node.system.apply(SetPolicy(0, 2))
    node.refused(Destroy("b"), ENOENT)
    node.system.apply(Destroy("a"))
    assert heard == [(made, "a"), (SetMemsize(0, "a", 5), "a"), (SetPolicy(0, 2), None), (Destroy("a"), "a")]


def test_a_failed_callback_undoes_a_create_and_nothing_else(node: Node, lines: pytest.LogCaptureFixture) -> None:
    heard: list[Command] = []
    fails = True

    def failing(command: Command, instance: Instance | None) -> None:
        if fails:
            raise OSError(ENOMEM, "no socket")

    node.system.on_change += [lambda command, instance: heard.append(command), failing]
    made = Create("a", (0, 1), (GIB,))
    assert "no socket" in node.refused(made, EIO)
    assert heard == [made, Destroy("a")]
    assert (node.gate.regions, node.state.instances) == ({}, {})
    fails = False
    node.create("a")
    fails = True
    node.system.apply(SetMemsize(0, "a", 5))
    assert node.region("a").limit == 5
    assert [record.levelname for record in lines.records][-2:] == ["ERROR", "INFO"]


# Processes and their memory


def test_attach_gives_a_slot_on_each_gpu(node: Node) -> None:
    node.create("a", 1, 0)
    first, second = (node.system.attach_process("a", pid, 7) for pid in (70, 71))
    assert [(t.gpu, t.slot, t.generation) for t in first.tickets] == [(1, 0, 100), (0, 0, 100)]
    assert [(t.gpu, t.slot) for t in second.tickets] == [(1, 1), (0, 1)]
    assert first.tickets[0].region is node.region("a", 1)
    assert [attachment.pid for attachment in node.system.attached("a")] == [70, 71]


def test_attach_to_nothing(node: Node) -> None:
    with pytest.raises(CommandError) as error:
        node.system.attach_process("a", 70, 7)
    assert error.value.errno == ENOENT


def test_attach_is_all_or_nothing(node: Node) -> None:
    node.create("a", 0, 1)
    node.gate.fail = [("attach", 1)]
    with pytest.raises(CommandError) as error:
        node.system.attach_process("a", 70, 7)
    assert error.value.errno == ENOMEM
    assert [region.slots for region in node.gate.regions.values()] == [{}, {}]
    node.gate.capacity = 0
    with pytest.raises(CommandError, match="no slot is free") as error:
        node.system.attach_process("a", 70, 7)
    assert error.value.errno == EAGAIN
    assert node.system.attached("a") == []


def test_memory_is_by_process_and_only_of_those_that_use_the_gpu(node: Node) -> None:
    node.create("a", 0, 1)
    for pid in (71, 70, 72):
        node.system.attach_process("a", pid, 7)
    slots = node.region("a", 0).slots
    slots[0].mem_used = 300
    slots[1].launches = 1
    node.region("a", 1).slots[2].mem_used = 5
    assert node.system.memory("a", 0) == [(70, 0), (71, 300)]
    assert node.system.memory("a", 1) == [(72, 5)]
    assert node.system.ledger(0) == {71: 300, 70: 0}


def test_slots_that_nobody_was_given_are_not_shown(node: Node) -> None:
    node.create("a")
    node.region("a").slots[3] = FakeSlot(3, mem_used=1 << 50)
    assert node.system.memory("a", 0) == []


def test_detach(node: Node) -> None:
    node.create("a", 0, 1)
    kept, gone = (node.system.attach_process("a", pid, 7) for pid in (70, 71))
    for slot in node.region("a", 0).slots.values():
        slot.mem_used = 10
    node.system.detach_process(gone)
    assert node.system.memory("a", 0) == [(70, 10)]
    assert [list(region.slots) for region in node.gate.regions.values()] == [[0], [0]]
    again = node.system.attach_process("a", 72, 7)
    node.system.detach_process(gone)  # twice: it must not take the slot's next owner with it
    assert {a.pid for a in node.system.attached("a")} == {70, 72}
    assert again.tickets[0].slot == gone.tickets[0].slot
    node.system.detach_process(kept)


def test_detach_after_destroy(node: Node) -> None:
    node.create("a")
    attachment = node.system.attach_process("a", 70, 7)
    node.system.detach_process(attachment)
    node.system.apply(Destroy("a"))
    node.create("a")
    other = node.system.attach_process("a", 71, 7)
    node.system.detach_process(attachment)
    assert node.system.attached("a") == [other]


def look(node: Node, used: dict[int, int], strays: dict[int, str] | None = None, gpu: int = 0) -> None:
    """One look of the audit with steady memory."""
    ledger = node.system.ledger(gpu)
    node.system.observe(gpu, [Sample(ledger, used, ledger)], strays or {})


def test_hidden_memory_counts_once_it_was_seen_twice(node: Node) -> None:
    node.create("a")
    attachment = node.system.attach_process("a", 70, 7)
    region = node.region("a")
    region.slots[0].mem_used = 100
    look(node, {70: 350, 999: 7})
    assert (region.other, node.system.memory("a", 0)) == (0, [(70, 100)])
    look(node, {70: 340})
    assert (region.other, node.system.memory("a", 0)) == (240, [(70, 340)])
    look(node, {70: 360})
    assert region.other == 240
    node.system.apply(SetMemsize(0, "a", 2 * GIB))
    assert (region.limit, region.other) == (2 * GIB, 240)
    node.system.detach_process(attachment)
    assert region.other == 0


def count(node: Node, used: dict[int, int], *pids: int) -> None:
    """These processes say that they have made a context."""
    ledger = node.system.ledger(0)
    node.system.count(0, [Sample(ledger, used, ledger)], pids)


def test_a_context_that_its_process_tells_of_counts_at_once_and_nobody_elses(node: Node) -> None:
    node.create("a")
    for pid in (70, 71):
        node.system.attach_process("a", pid, 7)
    region = node.region("a")
    region.slots[0].mem_used = 100
    count(node, {70: 400, 71: 50}, 70)
    assert (region.other, node.system.memory("a", 0)) == (300, [(70, 400)])
    look(node, {70: 400, 71: 50})
    assert region.other == 300, "the other one's is seen for the first time"
    count(node, {70: 390}, 70)
    assert region.other == 290, "what falls falls"
    count(node, {99: 5}, 99)
    assert region.other == 290, "who is not connected has nothing to tell"


def test_a_look_that_began_before_does_not_take_it_back(node: Node) -> None:
    node.create("a")
    node.system.attach_process("a", 70, 7)
    before = Sample({}, {}, {})
    count(node, {70: 300}, 70)
    node.system.observe(0, [before], {}, counted={70})
    assert node.region("a").other == 300
    node.system.observe(0, [before], {})
    assert node.region("a").other == 0


def test_the_least_first_context_is_what_the_others_are_charged(node: Node) -> None:
    node.create("a")
    node.create("b")
    for pid in (70, 71, 72):
        node.system.attach_process("a", pid, 7)
    region = node.region("a")
    count(node, {}, 70)
    assert region.context is None, "NVML does not list it yet"
    count(node, {70: 500}, 70)
    assert region.context == 500
    count(node, {70: 500, 71: 300, 72: 400}, 71, 72)
    assert region.context == 300
    assert node.region("b").context is None, "an instance is believed about itself alone"


def test_what_a_process_had_before_is_no_part_of_its_context(node: Node) -> None:
    node.create("a")
    node.system.attach_process("a", 70, 7)
    for _ in range(2):
        look(node, {70: 800})
    count(node, {70: 800}, 70)
    assert node.region("a").context is None, "a regular look was faster"
    count(node, {70: 1100}, 70)
    assert (node.region("a").context, node.region("a").other) == (300, 1100)


def test_an_allocation_between_the_readings_is_not_hidden_memory(node: Node) -> None:
    node.create("a")
    node.system.attach_process("a", 70, 7)
    for _ in range(3):
        node.system.observe(0, [Sample({70: 500}, {70: 500}, {70: 0})], {})  # freed after NVML was read
        node.system.observe(0, [Sample({70: 0}, {70: 500}, {70: 500})], {})  # or allocated before it was
    assert node.region("a").other == 0


def test_a_process_with_a_context_alone_uses_the_gpu(node: Node) -> None:
    node.create("a", 0, 1)
    node.system.attach_process("a", 70, 7)
    for _ in range(2):
        look(node, {70: 300})
    assert (node.system.memory("a", 0), node.system.memory("a", 1)) == ([(70, 300)], [])
    look(node, {})
    assert node.system.memory("a", 0) == []
    assert node.region("a").other == 0


def test_a_process_that_connects_again_keeps_its_hidden_memory(node: Node) -> None:
    node.create("a")
    old = node.system.attach_process("a", 70, 7)
    for _ in range(2):
        look(node, {70: 300})
    new = node.system.attach_process("a", 70, 7)
    node.system.detach_process(old)
    assert node.region("a").other == 300
    node.system.detach_process(new)  # also when it was gone for a moment in between
    assert node.region("a").other == 0
    node.system.attach_process("a", 70, 7)
    look(node, {70: 300})
    assert node.region("a").other == 300


def test_a_process_of_two_connections_has_both_in_the_ledger(node: Node) -> None:
    node.create("a")
    node.create("b")
    for ident in "ab":
        node.system.attach_process(ident, 70, 7)
        node.region(ident).slots[0].mem_used = 100
    assert node.system.ledger(0) == {70: 200}


# The audit


def test_a_process_past_the_hook_is_the_instances(node: Node, lines: pytest.LogCaptureFixture) -> None:
    node.create("a", memsize=1000)
    node.create("b")
    lines.clear()
    for _ in range(3):
        look(node, {70: 300, 71: 9}, {70: "a"})
    assert node.region("a").other == 300 and node.region("b").other == 0
    assert node.system.memory("a", 0) == [(70, 300)] and node.system.memory("b", 0) == []
    row = node.system.usage()[0].instances[0]
    assert (row.mem_used, row.mem_other, row.processes) == (300, 300, (70,))
    assert (row.audit.unhooked, row.audit.bypasses, row.shut) == ((70,), 1, False)
    assert last(lines) == ("WARNING", "a process uses the GPU past the hook gpu=0 instance=a pid=70 used=300")
    look(node, {71: 9})
    assert (node.region("a").other, node.system.memory("a", 0)) == (0, [])
    assert last(lines) == ("INFO", "nothing passes the hook any more gpu=0 instance=a")
    assert len(lines.messages) == 2


def test_a_process_that_connects_is_no_longer_past_the_hook(node: Node) -> None:
    node.create("a")
    for _ in range(2):
        look(node, {70: 300}, {70: "a"})
    node.system.attach_process("a", 70, 7)
    node.region("a").slots[0].mem_used = 100
    assert node.region("a").other == 300
    look(node, {70: 300}, {70: "a"})  # whose it is was asked before it connected
    assert node.region("a").other == 200
    assert node.system.usage()[0].instances[0].audit.unhooked == ()


def test_the_audit_only_logs_unless_told_otherwise(node: Node, lines: pytest.LogCaptureFixture) -> None:
    node.create("a")
    for _ in range(2):
        look(node, {70: 3 * GIB}, {70: "a"})
    row = node.system.usage()[0].instances[0]
    assert (row.audit.over, row.audit.excess, row.audit.overs, row.shut) == (True, 2 * GIB, 1, False)
    assert last(lines) == ("WARNING", "over its memory gpu=0 instance=a used=3GiB memsize=1GiB")
    assert node.gate.plans[0].turns[0].quantum_ns == UNIT_SLICE_NS


@pytest.fixture
def strict() -> Node:
    node = Node()
    node.system.rules = Rules(tolerance=100, gate=True)
    return node


def test_who_is_over_has_its_gate_shut_until_it_is_under(strict: Node, lines: pytest.LogCaptureFixture) -> None:
    strict.create("a", 0, 1, memsize=1000, weight=3)
    strict.create("b")
    before = strict.gate.plans[0]
    look(strict, {70: 1101}, {70: "a"})
    assert strict.gate.plans[0] == before
    look(strict, {70: 1101}, {70: "a"})
    assert [(turn.id, turn.quantum_ns > 0, turn.shut) for turn in strict.gate.plans[0].turns] == [
        ("a", False, True), ("b", True, False)]
    assert [turn.shut for turn in strict.gate.plans[1].turns] == [False], "its other GPU is no concern"
    row = strict.system.usage()[0].instances[0]
    assert (row.shut, row.weight, row.entitled) == (True, 3, 0.0)
    assert last(lines) == ("INFO", "done what=shut gpu=0 instance=a value=1")
    look(strict, {70: 1100}, {70: "a"})
    assert strict.gate.plans[0] == before
    assert last(lines) == ("INFO", "done what=shut gpu=0 instance=a value=0")


def test_figures_that_are_gone_open_the_gate(strict: Node) -> None:
    strict.create("a", memsize=1000)
    for _ in range(2):
        look(strict, {70: 5000}, {70: "a"})
    assert strict.gate.plans[0].turns[0].shut
    strict.system.observe(0, [], {}, audit="GPU is lost")
    assert not strict.gate.plans[0].turns[0].shut
    assert strict.region("a").other == 0
    assert [gpu.audit for gpu in strict.system.usage()] == ["GPU is lost", "off"]


def test_a_gate_that_cannot_be_shut_is_tried_again(strict: Node) -> None:
    strict.create("a", memsize=1000)
    look(strict, {70: 5000}, {70: "a"})
    strict.gate.fail = [("set_plan", 0)]
    look(strict, {70: 5000}, {70: "a"})
    assert not strict.gate.plans[0].turns[0].shut
    look(strict, {70: 5000}, {70: "a"})
    assert strict.gate.plans[0].turns[0].shut


def test_memory_from_before_memsize_was_lowered_shuts_no_gate(strict: Node) -> None:
    strict.create("a", memsize=1000)
    strict.system.attach_process("a", 70, 7)
    slot = strict.region("a").slots[0]
    slot.mem_used = 700
    for _ in range(2):
        look(strict, {70: 1000})
    strict.system.apply(SetMemsize(0, "a", 100))
    for used in (1000, 1100, 1100):
        look(strict, {70: used})
    assert not strict.state.instances["a"].shares[0].shut
    slot.mem_used = 0
    look(strict, {70: 300})
    for _ in range(2):
        look(strict, {70: 401})  # what it gave back it may not take again
    assert strict.state.instances["a"].shares[0].shut


def test_what_a_tenant_provokes_does_not_fill_the_log(node: Node, lines: pytest.LogCaptureFixture) -> None:
    node.create("a")
    lines.clear()
    for pid in range(100, 400, 2):
        for _ in range(2):
            look(node, {pid: 5}, {pid: "a"})
    assert len(lines.messages) == 10
    assert node.system.usage()[0].instances[0].audit.bypasses == 150


def test_an_instance_that_is_made_again_begins_anew(strict: Node) -> None:
    strict.create("a", memsize=1000)
    for _ in range(2):
        look(strict, {70: 5000}, {70: "a"})
    strict.system.apply(Destroy("a"))
    strict.create("a", memsize=1000)
    assert strict.region("a").other == 0 and strict.system.memory("a", 0) == []
    assert strict.system.usage()[0].instances[0].audit.bypasses == 0
    assert not strict.gate.plans[0].turns[0].shut


# Usage


def test_shares_of_device_time(node: Node) -> None:
    node.create("a", weight=1)
    node.create("b", weight=2)
    node.region("a").use.busy_ns = 0
    node.system.sample(SECOND)
    assert node.system.usage()[0].instances[0].percent == 0.0
    node.region("a").use = FakeUse(busy_ns=SECOND // 4, turns=50)
    node.region("b").use = FakeUse(busy_ns=SECOND // 2, turns=50, waiting=True, overdue=1)
    node.gate.gpu_uses[0].busy_ns = SECOND * 3 // 4
    node.system.sample(2 * SECOND)
    first, second = node.system.usage()
    assert (first.index, first.policy, first.percent, second.percent, second.instances) == (0, 2, 75.0, 0.0, ())
    a, b = first.instances
    assert (a.id, a.percent, round(a.entitled, 2), a.turns, a.waiting) == ("a", 25.0, 33.33, 50, False)
    assert (b.id, b.percent, round(b.entitled, 2), b.overdue, b.waiting) == ("b", 50.0, 66.67, 1, True)


def test_only_the_busy_count_where_the_policy_says_so(node: Node) -> None:
    for ident in "abc":
        node.create(ident)
    node.system.sample(SECOND)
    assert [row.entitled for row in node.system.usage()[0].instances] == [100, 100, 100]
    node.region("a").use.busy_ns = 1
    node.region("b").use.waiting = True
    node.system.sample(2 * SECOND)
    assert [round(row.entitled) for row in node.system.usage()[0].instances] == [50, 50, 33]
    node.region("b").use.waiting = False
    node.system.sample(3 * SECOND)
    assert [round(row.entitled) for row in node.system.usage()[0].instances] == [100, 100, 100]


def test_figures_stay_between_0_and_100(node: Node) -> None:
    node.create("a")
    region = node.region("a")
    for now, busy in ((1, 0), (2, 10), (2, 20), (3, 5), (4, 1 << 62)):
        region.use.busy_ns = busy
        node.system.sample(now)
        assert 0 <= node.system.usage()[0].instances[0].percent <= 100


def test_usage_before_the_first_sample(node: Node) -> None:
    node.create("a", 1, memsize=5 * GIB, highprio=True)
    node.system.attach_process("a", 70, 7)
    node.region("a", 1).slots[0].mem_used = 9
    assert node.system.usage()[1].percent == 0.0
    row = node.system.usage()[1].instances[0]
    assert (row.percent, row.entitled, row.mem_used, row.mem_limit, row.processes) == (0.0, 0.0, 9, 5 * GIB, (70,))
    assert (row.short, row.highprio, row.weight) == ("a", True, 1)


def test_counters_outlive_the_process(node: Node) -> None:
    node.create("a")
    first, _ = (node.system.attach_process("a", pid, 7) for pid in (70, 71))
    for slot in node.region("a").slots.values():
        slot.launches, slot.ungated, slot.mem_refused, slot.unknown, slot.dirty = 10, 1, 2, 3, 4
    node.region("a").slots[1].launches = 1000
    node.system.detach_process(first)
    assert node.system.usage()[0].instances[0].counters == Counters(1010, ungated=2, mem_refused=4, unknown=6, dirty=8)


def test_the_watchdog_is_told_of_in_one_line_each_way(node: Node, lines: pytest.LogCaptureFixture) -> None:
    use = node.gate.gpu_uses[0]
    node.system.sample(1)
    assert not lines.messages
    use.starved, use.fallback = 1, True
    node.system.sample(2)
    node.system.sample(3)
    assert len(lines.messages) == 1 and "plain sharing" in lines.messages[0] and "gpu=0 times=1" in lines.messages[0]
    use.fallback = False
    node.system.sample(4)
    node.system.sample(5)
    assert len(lines.messages) == 2 and "scheduling again" in lines.messages[1]
    assert node.system.usage()[0].starved == 1


def test_what_was_counted_on_a_gpu_that_is_absent_is_kept(node: Node) -> None:
    """Until it is there again, in the same boot."""
    past = Tally(gpus={"GPU-absent": GpuTotals(3, 4), node.state.gpus[1].uuid: GpuTotals(1, 2)})
    kept = System(node.state, node.gate, past=past).tally().gpus
    assert kept["GPU-absent"] == GpuTotals(3, 4) and kept[node.state.gpus[1].uuid] == GpuTotals(1, 2)
    assert set(kept) == {"GPU-absent", *(gpu.uuid for gpu in node.state.gpus.values())}
