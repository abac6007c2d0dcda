"""Several GPUs in virtual time: programs whose kernels on one GPU wait for those on another (as NCCL's do).

A *pair* is a kernel on each of a program's GPUs that ends, its length after all of them have begun, on all of them at
once; until then it keeps its device. The scheduling is the real
one: csrc/gate/core.c for each GPU, csrc/gate/gang.c over them.
"""

import heapq
import random
from collections import deque
from collections.abc import Callable, Sequence
from itertools import count
from typing import Any

from gate_virtual import NEVER, US, Core

from cgpusched._gate import ffi, lib

SPAN, GRACE = 625 * US, 150 * US


class Kernel:
    def __init__(self, program: "Program", gpu: int, length: int, parts: int) -> None:
        self.program, self.gpu, self.length = program, gpu, length
        self.missing = parts
        self.begun: list[Device] = []


class Device:
    """Each program's kernels run in order. Those of several programs at once share it as the driver would: the time in
    which they do is counted, for a gate that does its work lets it happen at hand-overs only."""

    def __init__(self, node: "Node", gpu: int) -> None:
        self.node, self.gpu = node, gpu
        self.queues: dict[int, deque[Kernel]] = {}
        self.began: dict[int, int] = {}
        self.busy: dict[int, int] = {}
        self.shared = 0
        self.since = 0
        self.held: list[tuple[int, int]] = []
        """(when it ended, how long it kept the device beyond its length) of each kernel."""

    def submit(self, kernel: Kernel) -> None:
        number = kernel.program.number
        self.queues.setdefault(number, deque()).append(kernel)
        if number not in self.began:
            self.begin(number)

    def begin(self, number: int) -> None:
        self.count()
        kernel = self.queues[number][0]
        self.began[number] = self.node.now
        kernel.begun.append(self)
        kernel.missing -= 1
        if kernel.missing == 0:
            for device in kernel.begun:
                self.node.at(self.node.now + kernel.length, lambda device=device: device.end(number))

    def end(self, number: int) -> None:
        self.count()
        kernel = self.queues[number].popleft()
        took = self.node.now - self.began.pop(number)
        self.busy[number] = self.busy.get(number, 0) + kernel.length
        self.held.append((self.node.now, took - kernel.length))
        kernel.program.done(self.gpu)
        if self.queues[number] and number not in self.began:
            self.begin(number)

    def count(self) -> None:
        if len(self.began) > 1:
            self.shared += self.node.now - self.since
        self.since = self.node.now


class Gate:
    """One process on one GPU, as csrc/client has it."""

    def __init__(self, program: "Program", gpu: int) -> None:
        self.program, self.gpu = program, gpu
        self.word = self.deadline = 0
        self.granted = self.open = self.demand = False
        self.opened = self.acked = self.drained = self.idled = self.refused = 0
        self.flight = self.launched = self.at_open = self.activity = 0

    def report(self, epoch: int) -> dict[str, int]:
        mine = self.opened == epoch
        holds = mine and self.acked != epoch
        return {"epoch": epoch, "demand": self.demand, "opened": mine, "holds": holds, "kernel_ns": self.program.kernel,
                "undrained": mine and self.drained != epoch, "idle": mine and not holds and self.idled == epoch,
                "stale": mine and not holds and self.idled != epoch and self.demand}

    def may_launch(self) -> bool:
        node = self.program.node
        if not self.open and self.granted and self.word != self.refused:
            if self.opened != self.word or self.idled == self.word:
                self.acked = self.drained = self.idled = 0
                self.opened, self.open, self.at_open = self.word, True, self.launched
                if self.deadline:  # the agent keeps the time
                    word = self.word
                    node.at(self.deadline, lambda: self.let_go() if self.open and self.opened == word
                            and self.deadline and node.now >= self.deadline else None)
        if not self.open:
            if not self.demand:
                self.demand = True
                node.bell(self)
            return False
        self.demand = False
        ahead = self.flight * self.program.kernel
        if self.deadline and self.launched > self.at_open and (
                node.now + ahead + max(self.program.kernel, SPAN) // 2 > self.deadline):
            self.let_go()
            return self.may_launch()
        return True

    def let_go(self, idle: bool = False) -> None:
        self.open = False
        if idle:
            self.idled = self.opened
        else:
            self.refused = self.opened
        if self.flight == 0:
            self.acked = self.drained = self.opened
        else:  # when its work is predicted to end, whether it has or not
            word = self.opened
            self.program.node.at(self.program.node.now + self.flight * self.program.kernel, lambda: self.ack(word))
        self.program.node.bell(self)

    def ack(self, word: int) -> None:
        if self.opened == word and not self.open:
            self.acked = word
            self.program.node.bell(self)

    def kernel_done(self) -> None:
        self.flight -= 1
        if self.flight == 0 and not self.open and self.opened:
            word = self.opened

            def drained() -> None:
                if self.opened == word and not self.open and self.flight == 0:
                    self.acked = self.drained = word
                    self.program.node.bell(self)
            self.program.node.soon(drained)


class Program:
    """Launches on its GPUs in turn, one thread; a pair is a kernel on each that waits for the others.

    ``order``: in which it launches a pair's kernels; ``pairs`` false: single kernels that wait for nobody.
    """

    def __init__(self, node: "Node", number: int, gpus: Sequence[int], kernel: int, pairs: bool = True,
                 depth: int = 4, start: int = 0) -> None:
        self.node, self.number, self.gpus = node, number, gpus
        self.kernel, self.pairs, self.depth = kernel, pairs, depth
        self.gates = {gpu: Gate(self, gpu) for gpu in gpus}
        self.at = 0
        self.current: Kernel | None = None
        self.full = False
        self.stopped = False
        node.at(start, self.pump)

    def pump(self) -> None:
        while not self.stopped:
            gpu = self.gpus[self.at % len(self.gpus)]
            gate = self.gates[gpu]
            if gate.flight >= self.depth:
                self.full = True
                return
            if not gate.may_launch():
                return
            if not self.pairs or self.at % len(self.gpus) == 0:
                self.current = Kernel(self, gpu, self.kernel, len(self.gpus) if self.pairs else 1)
            assert self.current
            gate.flight += 1
            gate.launched += 1
            self.at += 1
            self.node.devices[gpu].submit(self.current)

    def done(self, gpu: int) -> None:
        self.gates[gpu].kernel_done()
        if self.full:
            self.full = False
            self.node.soon(self.pump)


class Node:
    """GPUs with a core each, and the gangs over them. ``spans``: the GPUs of each instance."""

    def __init__(self, gpus: int, spans: Sequence[Sequence[int]], plans: dict[int, Any], seed: int = 1,
                 aligned: bool = True) -> None:
        self.now = 0
        self.random = random.Random(seed)
        self.heap: list[tuple[int, int, Callable[[], None]]] = []
        self.serial = count()
        self.devices = [Device(self, gpu) for gpu in range(gpus)]
        self.cores = [Core() for _ in range(gpus)]
        self.dirty: set[tuple[int, int]] = set()
        self.timers = [NEVER] * gpus
        self.gang_timer = NEVER
        self.steps = 0
        self.programs: dict[int, Program] = {}
        self.gangs = []
        for number, span in enumerate(spans):
            gang = ffi.new("struct gang *")
            gang.count = len(span)
            for k, gpu in enumerate(span):
                gang.core[k], gang.entity[k] = self.cores[gpu].c, number
            if len(span) > 1 and aligned:
                self.gangs.append(gang)
        self.pointers = ffi.new("struct gang *[]", self.gangs) if self.gangs else ffi.NULL
        for gpu in range(gpus):
            joins = [(lib.CORE_JOIN, n, None) for n, span in enumerate(spans) if gpu in span]
            self.step(gpu, [*joins, (lib.CORE_PLAN, 0, plans[gpu])])

    def at(self, when: int, what: Callable[[], None]) -> None:
        heapq.heappush(self.heap, (max(when, self.now), next(self.serial), what))

    def soon(self, what: Callable[[], None]) -> None:
        self.at(self.now + self.random.randint(10 * US, 60 * US), what)

    def bell(self, gate: Gate) -> None:
        self.dirty.add((gate.gpu, gate.program.number))
        self.at(self.now + self.random.randint(5 * US, 40 * US), self.look)

    def look(self) -> None:
        for gpu in {gpu for gpu, _ in self.dirty}:
            self.step(gpu, [])

    def step(self, gpu: int, first: list[Any]) -> None:
        """As server_run_gpu()."""
        self.run_one(gpu, first)
        if not self.gangs:
            return
        for _ in range(32):
            self.gang_timer = int(lib.gang_step(self.pointers, len(self.gangs), self.now))
            stirred = [n for n, core in enumerate(self.cores) if core.c.stirred]
            if not stirred:
                break
            for n in stirred:
                self.run_one(n, [])
        else:
            raise AssertionError("the gangs do not settle")
        self.check()
        if (when := self.gang_timer) != NEVER:
            self.at(when, lambda: self.step(gpu, []) if self.gang_timer == when else None)

    def check(self) -> None:
        """Nobody has a turn on one of its GPUs while another has a gang's turn there: grants are for one."""
        for core in self.cores:
            open_ = [i for i in range(8) if core.c.entity[i].phase == lib.CORE_OPEN]
            assert len(open_) <= 1
            if core.c.reserved >= 0:
                assert open_ in ([], [core.c.reserved])

    def run_one(self, gpu: int, first: list[Any]) -> None:
        core = self.cores[gpu]
        self.steps += 1
        for _ in range(8):
            events = list(first)
            first = []
            core.c.stirred = 0
            watched = lib.core_watched(core.c)
            looked = {i for i in range(len(self.programs)) if watched >> i & 1}
            looked |= {n for g, n in self.dirty if g == gpu}
            self.dirty -= {(gpu, n) for n in looked}
            for n in sorted(looked):
                gate = self.programs[n].gates.get(gpu) if n in self.programs else None
                epoch = core.c.entity[n].epoch
                events.append((lib.CORE_REPORT, n, gate.report(epoch) if gate else {"epoch": epoch}))
            self.timers[gpu] = core.step(self.now, events)
            again = False
            for kind, n, epoch, deadline in core.acted():
                gate = self.programs[n].gates[gpu]
                if kind == lib.CORE_GRANT:
                    gate.word, gate.granted, gate.deadline = epoch, True, deadline
                    if gate.demand:
                        self.soon(gate.program.pump)
                elif kind == lib.CORE_CLOSE:
                    gate.granted = False
                    self.dirty.add((gpu, n))
                    again = True
                    if gate.open:
                        self.soon(lambda gate=gate, epoch=epoch: gate.let_go()
                                  if gate.open and gate.opened == epoch else None)
                else:
                    gate.deadline = deadline
                    if gate.open and deadline:
                        word = gate.word
                        self.at(deadline, lambda gate=gate, word=word: gate.let_go()
                                if gate.open and gate.opened == word and gate.deadline and self.now >= gate.deadline
                                else None)
            if not again:
                break
        if (when := self.timers[gpu]) != NEVER:
            self.at(when, lambda: self.step(gpu, []) if self.timers[gpu] == when else None)

    def add(self, number: int, gpus: Sequence[int], kernel: int, **options: Any) -> Program:
        self.programs[number] = Program(self, number, gpus, kernel, **options)
        return self.programs[number]

    def run(self, duration: int) -> None:
        end = self.now + duration
        while self.heap and self.heap[0][0] <= end:
            self.now, _, what = heapq.heappop(self.heap)
            what()
        self.now = end
