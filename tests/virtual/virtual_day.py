"""Scenarios for day.c, and what came of them. Plans are made by the product's own policies."""

import subprocess
from dataclasses import dataclass
from pathlib import Path

from cgpusched.model import GpuSettings, Policy, Share
from cgpusched.plan import GpuPlan
from cgpusched.policy import plan as make_plan

ROOT = Path(__file__).resolve().parents[2]
US, MS, S = 1_000, 1_000_000, 1_000_000_000


def build(folder: Path) -> Path:
    """Compiles day.c with the gate's own sources."""
    out = folder / "day"
    sources = sorted((ROOT / "csrc/gate").glob("*.c"))
    subprocess.run(["gcc", "-std=gnu11", "-O2", "-Wall", "-Wextra", "-Wshadow", f"-I{ROOT}/csrc/gate",
                    f"-I{ROOT}/csrc/abi", "-o", out, Path(__file__).with_name("day.c"), *sources, "-lpthread"],
                   check=True)
    return out


@dataclass
class Habit:
    """What a container runs: kernels of ``kernel`` ns. It synchronises after ``chunk`` ns of them (0 = never), and
    begins a chunk every ``period`` ns (0 = at once)."""

    kernel: int
    chunk: int = 0
    period: int = 0

    @property
    def busy(self) -> bool:
        return self.period == 0


@dataclass
class Container:
    habit: Habit
    weight: int = 1
    highprio: bool = False


@dataclass
class Got:
    """One container between two marks, ns."""

    used: int
    gap: int
    late: int


@dataclass
class Epoch:
    """A stretch of time in which nothing was changed, and what everybody got in it."""

    duration: int
    plan: GpuPlan
    containers: dict[int, Container]
    stopped: set[int]
    got: dict[int, Got]
    turns: int
    steps: int

    def share(self, i: int) -> float:
        return self.got[i].used / self.duration


class Scenario:
    """Writes the acts, in order of time, and afterwards reads the marks."""

    def __init__(self, policy: Policy = Policy.PREEMPTIVE, max_inst: int = 25, prio_ratio: int = 90) -> None:
        self.now = 0
        self.settings = GpuSettings(policy=policy, max_inst=max_inst, prio_ratio=prio_ratio)
        self.containers: dict[int, Container] = {}
        self.acts: list[str] = []
        self.epochs: list[tuple[int, GpuPlan, dict[int, Container], set[int]]] = []
        self.stopped: set[int] = set()
        self.overlaps = 0

    def act(self, text: str) -> None:
        self.acts.append(f"{self.now} {text}")

    def plan(self) -> GpuPlan:
        shares = [(str(i), Share(1, one.weight, one.highprio)) for i, one in self.containers.items()]
        return make_plan(self.settings, shares, {str(i) for i in self.containers})

    def push(self) -> None:
        """The daemon gets the plan that follows from what is."""
        plan = self.plan()
        turns = " ".join(f"{turn.id} {turn.quantum_ns} {int(turn.high)}" for turn in plan.turns)
        self.act(f"plan {int(plan.skip_idle)} {int(plan.drain)} {plan.high_percent} {plan.unowned_ns} "
                 f"{len(plan.turns)} {turns}")

    def join(self, container: Container) -> int:
        i = next(k for k in range(64) if k not in self.containers)
        self.containers[i] = container
        habit = container.habit
        self.act(f"join {i} {habit.kernel} {habit.chunk} {habit.period}")
        self.push()
        return i

    def leave(self, i: int, killed: bool = False) -> None:
        self.act(f"{'kill' if killed else 'leave'} {i}")
        del self.containers[i]
        self.act(f"gone {i}")
        self.push()

    def stop(self, i: int, ns: int) -> None:
        self.act(f"stop {i} {ns}")
        self.stopped.add(i)

    def wait(self, ns: int) -> None:
        self.now += ns

    def mark(self) -> None:
        """The beginning of an epoch."""
        self.stopped = set()
        self.act("mark")

    def epoch(self) -> None:
        """The end of an epoch that began at the last ``mark``."""
        self.act("mark")
        self.epochs.append((self.now, self.plan(), {i: Container(one.habit, one.weight, one.highprio)
                                                    for i, one in self.containers.items()}, self.stopped))

    def run(self, day: Path, timeout: float = 100) -> list[Epoch]:
        self.act("end")
        done = subprocess.run([day], input="\n".join(self.acts) + "\n", capture_output=True, text=True, check=True,
                              timeout=timeout)
        marks = [[int(word) for word in line.split()] for line in done.stdout.splitlines()]
        assert len(marks) == 2 * len(self.epochs)
        self.overlaps = marks[-1][2] if marks else 0
        made = []
        for begin, end, (_, plan, containers, stopped) in zip(marks[::2], marks[1::2], self.epochs, strict=True):
            before, after = figures(begin), figures(end)
            got = {i: Got(used - before[i][0], gap, late - before[i][2]) for i, (used, gap, late) in after.items()}
            made.append(Epoch(end[0] - begin[0], plan, containers, stopped, got, end[3] - begin[3], end[4] - begin[4]))
        return made


def figures(mark: list[int]) -> dict[int, tuple[int, int, int]]:
    rest = mark[5:]
    return {rest[k]: (rest[k + 1], rest[k + 2], rest[k + 3]) for k in range(0, len(rest), 4)}
