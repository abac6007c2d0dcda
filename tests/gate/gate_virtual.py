"""A GPU, its clients and the daemon in virtual time, around the real scheduling step (csrc/gate/core.c).

The device is a FIFO. A client is one thread with a habit: a generator of ``("launch", ns)``, ``("sync",)``,
``("sleep", ns)``, ``("until", ns)``. It follows the grant protocol as the real one does: it bounds its work in flight,
lets go at its deadline, when closed, or when idle; acknowledges early, and again when drained. A wake-up costs 10 to 60
us.
"""

import heapq
import random
from collections.abc import Callable, Iterator
from itertools import count, repeat
from typing import Any

from cgpusched._gate import ffi, lib

US, MS, S = 1_000, 1_000_000, 1_000_000_000
NEVER = 2**64 - 1
SLICE, SPAN, GRACE, OVERLAP, WINDOW = 5 * MS, 625 * US, 150 * US, 200 * US, 2
Habit = Iterator[tuple[Any, ...]]
FIELDS = "epoch", "inflight_ns", "kernel_ns", "demand", "opened", "holds", "undrained", "idle", "stale", "away_ns"
NOTHING = dict.fromkeys(FIELDS, 0)


def never_sync(kernel: int) -> Habit:
    """Launches for ever and never waits."""
    return repeat(("launch", kernel))


def sync_each(kernel: int, period: int = 10 * MS, think: int = 5 * US) -> Habit:
    """Synchronises after the first kernel past ``period`` of device time; ``think`` on the host before it goes on."""
    while True:
        done = 0
        while done < period:
            yield "launch", kernel
            done += kernel
        yield ("sync",)
        yield "sleep", think


def bursts(kernel: int, work: int, period: int) -> Habit:
    """Every ``period`` it wants ``work`` of device time, then rests until the next period begins (or begins late)."""
    for n in count(1):
        for _ in range(work // kernel):
            yield "launch", kernel
        yield ("sync",)
        yield "until", n * period


class Core:
    """The scheduling step with Python's types at its edge."""

    def __init__(self, now: int = 0, **tuning: int) -> None:
        self.c = ffi.new("struct core *")
        c_tuning = ffi.new("struct core_tuning *")
        lib.core_tuning_default(c_tuning)
        for name, value in tuning.items():
            setattr(c_tuning, name, value)
        lib.core_init(self.c, c_tuning, now)
        self.actions = ffi.new("struct core_action[]", lib.CORE_ACTIONS)
        self.n = ffi.new("uint32_t *")
        self.events = ffi.new("struct core_event[]", lib.CORE_ENTITIES + 1)

    def step(self, now: int, events: list[tuple[int, int, Any]]) -> int:
        """``events``: (type, entity, report as a dict, or a plan). Gives when it must be called again."""
        for c_event, (kind, entity, payload) in zip(self.events, events, strict=False):
            c_event.type, c_event.entity = kind, entity
            if kind == lib.CORE_REPORT:
                c_event.report = NOTHING | payload
            elif kind == lib.CORE_PLAN:
                c_event.plan = payload
        return int(lib.core_step(self.c, now, self.events, len(events), self.actions, self.n))

    def acted(self) -> list[tuple[int, int, int, int]]:
        return [(a.type, a.entity, a.epoch, a.deadline) for a in self.actions[0:self.n[0]]]


def make_plan(turns: dict[int, int] | list[tuple[int, int, bool]], **options: Any) -> Any:
    """``turns``: entity -> quantum in ns, or (entity, quantum, high) triples."""
    if isinstance(turns, dict):
        turns = [(entity, quantum, False) for entity, quantum in turns.items()]
    plan = ffi.new("struct core_plan *")
    plan.count = len(turns)
    for c_turn, (entity, quantum, high) in zip(plan.turn, turns, strict=False):
        c_turn.entity, c_turn.quantum_ns, c_turn.high = entity, quantum, high
    plan.skip_idle = options.get("skip_idle", True)
    plan.drain = options.get("drain", True)
    plan.native = options.get("native", False)
    plan.high_percent = options.get("high_percent", 90)
    plan.unowned_ns = options.get("unowned_ns", 0)
    return plan


class Client:
    def __init__(self, sim: "Sim", index: int, habit: Habit) -> None:
        self.sim, self.i, self.habit = sim, index, habit
        self.op: tuple[Any, ...] | None = None
        self.demand = False
        self.open = False
        self.accepted = self.refused = 0
        self.opened = self.acked = self.drained = self.idled = 0  # words, as in the slot
        self.inflight = 0
        self.flight: list[tuple[int, int]] = []  # (start, end) of what is on the device or queued
        self.last_end = 0
        self.activity = 0
        self.stopped = self.dead = False
        self.parked: list[Callable[[], None]] = []
        self.pumping: int | None = None
        self.kernel = 0
        self.launched = self.at_open = 0
        self.away = 0
        # the control page
        self.word = 0
        self.granted = False
        self.deadline = 0

    # -- what the daemon sees --
    def report(self, epoch: int) -> dict[str, int]:
        mine = self.opened == epoch
        holds = mine and self.acked != epoch
        return {"epoch": epoch, "inflight_ns": self.inflight, "kernel_ns": self.kernel, "demand": self.demand,
                "opened": mine, "holds": holds, "undrained": mine and self.drained != epoch,
                "idle": mine and not holds and self.idled == epoch,
                "stale": mine and not holds and self.idled != epoch and self.demand, "away_ns": self.away}

    def at(self, when: int, what: Callable[[], None]) -> None:
        def run() -> None:
            if self.dead:
                return
            if self.stopped:
                self.parked.append(run)
            else:
                what()
        self.sim.at(when, run)

    def soon(self, what: Callable[[], None]) -> None:
        self.at(self.sim.now + self.sim.random.randint(10 * US, 60 * US), what)

    def bell(self) -> None:
        self.sim.bell(self.i)

    # -- the program --
    def pump_at(self, when: int) -> None:
        self.pumping = when

        def run() -> None:
            if self.pumping == when:
                self.pumping = None
                self.pump()
        self.at(when, run)

    def try_open(self) -> None:
        if not self.open and self.granted and self.word != self.refused:
            if self.opened != self.word or self.idled == self.word:
                self.acked = self.drained = self.idled = 0
                self.opened = self.word
                self.open = True
                self.at_open = self.launched  # a turn has one kernel at least
                self.sim.note("opened", self.i)

    def pump(self) -> None:
        now = self.sim.now
        while True:
            if self.op is None:
                self.op = next(self.habit, ("end",))
            kind = self.op[0]
            if kind == "launch":
                self.try_open()
                if not self.open:
                    if not self.demand:
                        self.demand = True
                        self.bell()
                    return
                self.demand = False
                ahead = max(self.last_end - now, 0)
                late = self.deadline and now + ahead + max(self.op[1], SPAN) // 2 > self.deadline
                if late and self.launched > self.at_open:
                    self.let_go(idle=False)
                    continue
                # at most WINDOW unfinished spans, a span being at least one kernel
                if ahead and ahead + self.op[1] > WINDOW * max(SPAN, self.op[1]):
                    self.pump_at(self.last_end - (WINDOW - 1) * max(SPAN, self.op[1]))
                    return
                start = max(now, self.sim.free_at)
                self.last_end = self.sim.free_at = start + self.op[1]
                self.sim.ran(self.i, start, self.last_end)
                self.kernel = self.op[1]
                self.activity += 1
                self.launched += 1
            elif kind == "sync":
                if self.last_end > now:
                    self.pump_at(self.last_end + self.sim.random.randint(5 * US, 40 * US))
                    return
                self.watch_idle()
            elif kind in ("sleep", "until"):
                self.watch_idle()
                wake = now + self.op[1] if kind == "sleep" else max(self.op[1], now)
                self.op = None
                if wake > now:
                    self.pump_at(wake)
                    return
                continue
            else:
                self.watch_idle()
                return
            self.op = None

    def watch_idle(self) -> None:
        seen = self.activity

        def look() -> None:
            if self.open and self.activity == seen and self.last_end <= self.sim.now:
                self.let_go(idle=True)
        self.at(max(self.sim.now, self.last_end) + GRACE, look)

    # -- the agent --
    def let_go(self, idle: bool) -> None:
        word, now = self.opened, self.sim.now
        self.open = False
        self.inflight = max(self.last_end - now, 0)
        if idle:
            self.idled = self.acked = self.drained = word
            self.bell()
            return
        self.refused = word

        def ack() -> None:
            if self.opened == word:
                self.acked = word
                self.sim.note("acked", self.i)
                self.bell()

        def drain() -> None:
            if self.opened == word:
                self.acked = self.drained = word
                self.bell()
        if self.sim.nodrain or self.last_end - OVERLAP <= now:
            ack()
        else:
            self.at(self.last_end - OVERLAP, ack)
        if self.last_end <= now:
            drain()
        else:
            self.at(self.last_end + self.sim.random.randint(5 * US, 20 * US), drain)

    def closed(self) -> None:
        if self.open and not self.granted:
            self.let_go(idle=False)


class Sim:
    """Clients are entities 0, 1, ... in the order of ``habits``."""

    def __init__(self, habits: list[Habit], plan: Any, seed: int = 1, **tuning: int) -> None:
        self.random = random.Random(seed)
        self.now = self.free_at = 0
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.serial = count()
        self.core = Core(**tuning)
        self.dirty: set[int] = set()
        self.timer = NEVER
        self.runs: list[tuple[int, int, int]] = []  # (client, start, end) on the device
        self.log: list[tuple[int, str, int]] = []
        self.clients = [Client(self, i, habit) for i, habit in enumerate(habits)]
        self.nodrain = False
        self.daemon([(lib.CORE_JOIN, i, None) for i in range(len(habits))])
        self.plan(plan)
        for client in self.clients:
            client.pump_at(0)

    def at(self, when: int, what: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (max(when, self.now), next(self.serial), what))

    def note(self, what: str, client: int) -> None:
        self.log.append((self.now, what, client))

    def ran(self, client: int, start: int, end: int) -> None:
        if self.runs and self.runs[-1][0] == client and self.runs[-1][2] == start:
            self.runs[-1] = (client, self.runs[-1][1], end)
        else:
            self.runs.append((client, start, end))

    def plan(self, plan: Any) -> None:
        self.nodrain = not plan.drain
        self.daemon([(lib.CORE_PLAN, 0, plan)])

    def bell(self, client: int) -> None:
        self.dirty.add(client)
        self.at(self.now + self.random.randint(5 * US, 40 * US), lambda: self.daemon([]) if self.dirty else None)

    def daemon(self, first: list[Any]) -> None:
        """As run_gpu() in server.c."""
        for _ in range(8):
            events = list(first)
            first = []
            watched = lib.core_watched(self.core.c)
            looked = {i for i in range(len(self.clients)) if watched >> i & 1} | self.dirty
            self.dirty.clear()
            for i in sorted(looked):
                client = self.clients[i]
                epoch = self.core.c.entity[i].epoch
                report = {"epoch": epoch} if client.dead else client.report(epoch)
                events.append((lib.CORE_REPORT, i, report))
            self.timer = self.core.step(self.now, events)
            again = False
            for kind, i, epoch, deadline in self.core.acted():
                client = self.clients[i]
                if kind == lib.CORE_GRANT:
                    client.word, client.granted, client.deadline = epoch, True, deadline
                    self.note("grant", i)
                    if client.demand:
                        client.soon(client.pump)
                elif kind == lib.CORE_CLOSE:
                    client.granted = False
                    self.note("close", i)
                    self.dirty.add(i)
                    again = True
                    if client.open:
                        client.soon(client.closed)
                else:
                    client.deadline = deadline
            if not again:
                break
        if self.timer != NEVER:
            when = self.timer
            self.at(when, lambda: self.daemon([]) if self.timer == when else None)

    def run(self, duration: int) -> None:
        end = self.now + duration
        while self.heap and self.heap[0][0] <= end:
            self.now, _, what = heapq.heappop(self.heap)
            what()
        self.now = end
        self.daemon([])

    def kill(self, client: int) -> None:
        self.clients[client].dead = True
        self.dirty.add(client)
        self.daemon([])

    def stop(self, client: int) -> None:
        self.clients[client].stopped = True

    def cont(self, client: int) -> None:
        self.clients[client].stopped = False
        parked, self.clients[client].parked = self.clients[client].parked, []
        for run in parked:
            self.at(self.now, run)

    # -- what came of it --
    def used(self, start: int, end: int) -> list[int]:
        """Device time of each client between two moments."""
        used = [0] * len(self.clients)
        for client, begin, until in self.runs:
            used[client] += max(min(until, end) - max(begin, start), 0)
        return used

    def longest_gap(self, client: int, start: int, end: int) -> int:
        last, gap = start, 0
        for who, begin, until in self.runs:
            if who == client and until > start and begin < end:
                gap, last = max(gap, begin - last), until
        return max(gap, end - last)
