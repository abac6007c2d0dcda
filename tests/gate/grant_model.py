"""The grant protocol (head of csrc/abi/cgpu_abi.h) as a state machine, and an explorer that tries every interleaving.

Instance A is one process: launchers and an agent. Beside it the daemon and a rival B. Each label is one step: one
access to what others write, as client.h, waiting.c, agent.c, core.c and pages.c make them; what a lock keeps others
from goes with it. Memory is x86-64's: a thread's stores go through a queue of its own, which a read-modify-write, a
fence and a system call empty; ``membarrier`` empties the launchers', one after the other. aarch64 orders less: what
fails here fails there, not the reverse.

Left out is time: no deadline, no end of a wait, no heartbeat. So a wake-up that is lost, and that only a timeout would
make good for, shows as a state from which the end cannot be reached.
"""

from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

CLOSED, HELD, CLOSING, DRAINING = range(4)  # enum gate_state
NONE = 1  # CGPU_ACCEPT_NONE

FAULTS = (
    "no fence in accept", "no second look in accept", "no look after accept", "no fence in close",
    "no second look after close", "no membarrier", "no wait for marks", "acknowledges before it has drained",
    "rings before it says so", "sleeps without comparing", "sleeps at an open gate", "grants without a wake-up",
    "closes without a ring", "asks without a bell",
)  # fmt: skip
"""What may be taken out of the protocol: each must be seen to matter."""


@dataclass(frozen=True)
class Scene:
    """How much there is to explore. ``launches``: of each launcher; ``rivals``: turns that B wants."""

    launches: tuple[int, ...] = (1, 1)
    rivals: int = 1
    idles: int = 0
    """Times that the agent may find its process idle."""
    granted: bool = False
    """A has the device at first."""
    asks: bool = True
    """Launchers wait for a grant; else they give up at a closed gate."""
    early: bool = False
    """The agent acknowledges before the work has drained, and the daemon hands on at that (overlap)."""
    fault: str = ""


class Violation(AssertionError):
    """A property does not hold; the steps that lead there."""


Step = Callable[["Thread"], "str | tuple[str, ...] | None"]
"""What comes next, one of several, or None: it cannot be made now."""
Queue = tuple[tuple[str, int], ...]


class Thread:
    """What one step sees: memory through its thread's queue of stores, and the thread's own variables."""

    def __init__(self, scene: Scene, name: str, memory: dict[str, Any], queues: dict[str, Queue]) -> None:
        self.scene, self.name, self.memory, self.queues = scene, name, memory, queues
        self.loaded: set[str] = set()

    def get(self, name: str) -> int:
        for stored, value in reversed(self.queues.get(self.name, ())):
            if stored == name:
                return value
        self.loaded.add(name)
        return int(self.memory[name])

    def put(self, **values: int) -> None:
        """Stores by way of the queue. Each word has one writer at a time, so what changes nothing is no store."""
        for name, value in values.items():
            if self.get(name) != value:
                self.queues[self.name] = (*self.queues.get(self.name, ()), (name, value))

    @property
    def settled(self) -> bool:
        """A read-modify-write, a fence or a system call has emptied the queue."""
        self.settle(self.name)
        return True

    def settle(self, name: str) -> None:
        self.memory.update(self.queues.pop(name, ()))

    def now(self, **values: int) -> None:
        """Stores in a read-modify-write or a system call."""
        self.settle(self.name)
        self.memory.update(values)

    def own(self, name: str) -> int:
        return int(self.memory[f"{self.name}.{name}"])

    def keep(self, **values: int) -> None:
        self.memory.update({f"{self.name}.{name}": value for name, value in values.items()})

    def faulty(self, fault: str) -> bool:
        assert fault in FAULTS
        return self.scene.fault == fault

    def lock(self, then: str) -> str | None:
        if self.memory["lock"]:
            return None
        self.now(lock=1)
        return then

    def unlock(self, then: str) -> str:
        self.now(lock=0)
        return then


# ---- a launching thread: gate_enter(), gate_try_open(), gate_wait() ----

def launcher() -> dict[str, Step]:
    def mark(t: Thread) -> tuple[str, ...]:
        t.put(**{f"mark{t.name}": 1})
        return "word first", "accept first"  # C leaves open which one it loads first

    def first(name: str, then: str) -> Step:
        def load(t: Thread) -> str:
            t.keep(x=t.get(name))
            return then
        return load

    def second(name: str) -> Step:
        def load(t: Thread) -> str:
            is_open = t.get(name) == t.own("x")
            t.keep(x=0)
            if is_open:
                return "submit"
            t.put(**{f"mark{t.name}": 0})
            return "look"
        return load

    def submit(t: Thread) -> tuple[str, ...] | str:
        if t.get("b_grant"):
            raise Violation("A submits while B has the device")
        t.memory["inflight"] = 1
        t.put(**{f"mark{t.name}": 0})
        t.keep(left=t.own("left") - 1)
        return mark(t) if t.own("left") else "done"

    def look(t: Thread) -> str:
        t.keep(word=t.get("grant"))
        return "try"

    def try_open(t: Thread) -> tuple[str, ...] | str | None:
        if t.memory["lock"]:
            return None
        word = t.get("grant")
        if t.get("state") == CLOSING or not word & 1:
            return wait(t)
        if word == t.get("accept"):
            return go(t)
        t.now(lock=1)
        t.keep(x=word)
        t.put(drained=0, idle=0, acked=0)
        t.put(opened=word)
        return "second look"

    def second_look(t: Thread) -> str:
        word = t.own("x")
        if not t.faulty("no fence in accept"):
            t.settle(t.name)
        if t.get("grant") == word or t.faulty("no second look in accept"):
            t.put(state=HELD, word=word, accept=word)
            return "unlock and look"
        t.keep(x=0)
        if t.get("state") == CLOSED:
            t.put(acked=word, drained=word)
            return "unlock and ring"
        t.put(word=word)
        return "unlock and wait"

    def third_look(t: Thread) -> tuple[str, ...] | str:
        t.now(lock=0)
        return go(t) if t.get("grant") == t.own("x") or t.faulty("no look after accept") else "kick"

    def kick(t: Thread) -> tuple[str, ...] | str:
        t.now(ring=1)
        return go(t)

    def go(t: Thread) -> tuple[str, ...] | str:
        t.keep(word=0, x=0)
        return "no more demand" if t.own("asked") else mark(t)

    def no_more_demand(t: Thread) -> tuple[str, ...]:
        t.keep(asked=0)
        t.now(demand=t.memory["demand"] - 1)
        return mark(t)

    def wait(t: Thread) -> str:
        if not t.scene.asks:
            return "done"
        return "rest" if t.own("asked") else "ask"

    def unlock(then: Callable[[Thread], str]) -> Step:
        def step(t: Thread) -> str:
            t.now(lock=0)
            return then(t)
        return step

    def ring(t: Thread) -> str:
        t.now(bell=1)
        return wait(t)

    def ask(t: Thread) -> str:
        t.keep(asked=1)
        t.now(demand=t.memory["demand"] + 1)
        return "is it leaving" if t.memory["demand"] == 1 else "rest"

    def is_leaving(t: Thread) -> str:
        return "rest" if t.get("state") in (CLOSING, DRAINING) or t.faulty("asks without a bell") else "ask by bell"

    def rest(t: Thread) -> str | None:
        """A word that was granted: only a release under way can have kept it out."""
        if t.own("word") & 1 and not t.faulty("sleeps at an open gate"):
            return None if t.get("state") == CLOSING else "look"
        t.settle(t.name)
        if t.get("grant") != t.own("word") and not t.faulty("sleeps without comparing"):
            return "look"
        t.now(**{f"asleep{t.name}": 1})
        return "asleep"

    return {
        "mark": mark, "word first": first("grant", "then accept"), "then accept": second("accept"),
        "accept first": first("accept", "then word"), "then word": second("grant"), "submit": submit, "look": look,
        "try": try_open, "second look": second_look, "unlock and look": third_look, "kick": kick,
        "no more demand": no_more_demand, "unlock and wait": unlock(wait), "unlock and ring": unlock(lambda t: "ring"),
        "ring": ring, "ask": ask, "is it leaving": is_leaving, "ask by bell": lambda t: t.now(bell=1) or "rest",
        "rest": rest, "asleep": lambda t: None if t.memory[f"asleep{t.name}"] else "look",
    }  # fmt: skip


# ---- the agent: step() and what it calls ----

def agent(launchers: int) -> dict[str, Step]:
    def sleep(t: Thread) -> tuple[str, ...] | str | None:
        if t.memory["ring"]:
            t.now(ring=0)
            return "look"
        if not t.own("idles") or t.get("state") != HELD:
            return None
        t.keep(idles=t.own("idles") - 1, idle=1)
        t.memory["inflight"] = 0  # it saw that
        return "let go"

    def look(t: Thread) -> str:
        return {HELD: "is it revoked", DRAINING: "drain"}.get(t.get("state"), "sleep")

    def is_revoked(t: Thread) -> str:
        return "let go" if t.get("grant") != t.get("word") else "sleep"

    def let_go(t: Thread) -> str | None:
        if t.memory["lock"]:
            return None
        if t.get("state") != HELD:
            t.keep(idle=0)
            return "look"
        t.now(lock=1)
        t.put(accept=NONE, state=CLOSING)
        return "let go: unlock"

    def barrier(of: int) -> Step:
        def empty(t: Thread) -> str:
            if not t.faulty("no membarrier"):
                t.settle(str(of))
            return f"barrier {of + 1}" if of + 1 < launchers else "marks 0"
        return empty

    def marks(of: int) -> Step:
        def clear(t: Thread) -> str | None:
            if t.get(f"mark{of}") and not t.faulty("no wait for marks"):
                return None
            return f"marks {of + 1}" if of + 1 < launchers else "no marks"
        return clear

    def no_marks(t: Thread) -> str | None:
        if t.memory["lock"]:
            return None
        t.now(lock=1)
        t.put(state=DRAINING)
        return "no marks: unlock"

    def drain(t: Thread) -> tuple[str, ...] | str:
        if t.scene.early and t.get("acked") != t.get("word"):
            return "early", "drained"
        return "drained"

    def early(t: Thread) -> str | None:
        if t.memory["lock"]:
            return None
        if t.get("state") != DRAINING:
            return "look"
        t.now(lock=1)
        t.put(acked=t.get("word"))
        return "unlock and ring"

    def drained(t: Thread) -> str | None:
        """The device has finished what it had, which is just now or was before."""
        if t.memory["lock"]:
            return None
        if t.get("state") != DRAINING:  # a launcher accepted the next word meanwhile
            t.keep(idle=0)
            return "look"
        t.now(lock=1)
        word = t.get("word")
        if not t.faulty("acknowledges before it has drained"):
            t.memory["inflight"] = 0
        if t.own("idle"):
            t.put(idle=word)
        t.keep(idle=0)
        t.put(acked=word)
        if t.faulty("rings before it says so"):
            return "ring too soon"
        t.put(drained=word, state=CLOSED)
        return "unlock and ring"

    def ring_too_soon(t: Thread) -> str:
        t.now(bell=1)
        t.put(drained=t.get("word"), state=CLOSED)
        return "late: unlock"

    steps: dict[str, Step] = {
        "sleep": sleep, "look": look, "is it revoked": is_revoked, "let go": let_go,
        "let go: unlock": lambda t: t.now(lock=0) or "barrier 0", "no marks": no_marks,
        "no marks: unlock": lambda t: t.now(lock=0) or "drain", "drain": drain, "early": early, "drained": drained,
        "unlock and ring": lambda t: t.now(lock=0) or "ring", "ring": lambda t: t.now(bell=1) or "look",
        "ring too soon": ring_too_soon, "late: unlock": lambda t: t.now(lock=0) or "look",
    }  # fmt: skip
    for of in range(launchers):
        steps |= {f"barrier {of}": barrier(of), f"marks {of}": marks(of)}
    return steps


# ---- the daemon: attend(), run_one(), pages_look(), pages_grant(), pages_close() ----

SHUT, OPEN, SHUTTING = range(3)


def daemon() -> dict[str, Step]:
    def sleep(t: Thread) -> str | None:
        if not t.memory["bell"]:
            return None
        t.now(bell=0)
        return "see demand"

    def see_demand(t: Thread) -> str:
        t.keep(demand=t.get("demand") > 0)
        return "decide" if t.own("phase") == SHUT else "see drained"

    def see(name: str, then: str) -> Step:
        def step(t: Thread) -> str:
            t.keep(**{name: t.get(name) == t.own("word")})
            return then
        return step

    def decide(t: Thread) -> str:
        word, phase = t.own("word"), t.own("phase")
        then = "sleep"
        if phase != SHUT:
            mine = t.get("opened") == word
            gone = not mine or t.own("acked") and (t.own("drained") or t.scene.early)
            if phase == SHUTTING and gone:
                phase = SHUT
            elif phase == OPEN and t.get("b_wants"):
                then = "close"
                if t.faulty("no second look after close") and mine and gone:
                    t.put(grant=word & ~1)
                    phase = SHUT
        if phase == SHUT:
            then = "grant B" if t.get("b_wants") else "grant A" if t.own("demand") else "sleep"
        t.keep(phase=phase, demand=0, acked=0, drained=0)
        return then

    def close(t: Thread) -> str:
        t.put(grant=t.own("word") & ~1)
        t.keep(phase=SHUTTING)
        return "close: look"

    def close_look(t: Thread) -> str:
        if not t.faulty("no fence in close"):
            t.settle(t.name)
        return "close: look again" if t.get("opened") == t.own("word") else "see demand"

    def close_look_again(t: Thread) -> str:
        holds = t.get("acked") != t.own("word")
        return "close: ring" if holds and not t.faulty("closes without a ring") else "see demand"

    def grant_b(t: Thread) -> str:
        t.memory["b_wants"] = 0
        t.put(b_grant=1)
        return "B runs"

    def b_runs(t: Thread) -> str | None:
        if not t.memory["b_done"]:
            return None
        t.now(b_done=0, b_grant=0)
        return "see demand"

    def grant_a(t: Thread) -> str:
        word = (t.own("word") | 1) + 2
        t.keep(word=word, phase=OPEN)
        t.put(grant=word)
        return "wake"

    def wake(t: Thread) -> str:
        t.settle(t.name)
        if not t.faulty("grants without a wake-up"):
            t.now(**{name: 0 for name in t.memory if name.startswith("asleep")})
        return "sleep"

    return {
        "sleep": sleep, "see demand": see_demand, "see drained": see("drained", "see acked"),
        "see acked": see("acked", "decide"), "decide": decide, "close": close, "close: look": close_look,
        "close: look again": close_look_again, "close: ring": lambda t: t.now(ring=1) or "see demand",
        "grant B": grant_b, "B runs": b_runs, "grant A": grant_a, "wake": wake,
    }  # fmt: skip


def rival() -> dict[str, Step]:
    def want(t: Thread) -> str:
        t.keep(left=t.own("left") - 1)
        t.now(b_wants=1, bell=1)
        return "work"

    def work(t: Thread) -> str | None:
        if not t.get("b_grant"):
            return None
        if t.memory["inflight"] and not t.scene.early:
            raise Violation("B has the device while work of A is on it")
        return "end"

    def end(t: Thread) -> str:
        t.now(b_done=1)
        return "away" if t.own("left") else "done"

    return {"want": want, "work": work, "end": end, "away": lambda t: None if t.get("b_grant") else "want"}


State = tuple[tuple[Any, ...], tuple[tuple[str, Queue], ...]]


class Model:
    """The whole of a scene. ``explore()`` visits every state that can be reached."""

    def __init__(self, scene: Scene) -> None:
        self.scene = scene
        launchers = [str(i) for i in range(len(scene.launches))]
        self.programs = {**{name: launcher() for name in launchers}, "agent": agent(len(launchers)),
                         "daemon": daemon(), "B": rival()}  # fmt: skip
        memory: dict[str, Any] = dict.fromkeys(
            ("opened", "acked", "drained", "idle", "demand", "lock", "bell", "ring", "inflight", "b_wants", "b_grant",
             "b_done"), 0)  # fmt: skip
        word = 3 if scene.granted else 2
        memory |= {"grant": word, "accept": NONE, "state": CLOSED, "word": 0}
        for name, left in zip(launchers, scene.launches, strict=True):
            memory |= {f"mark{name}": 0, f"asleep{name}": 0, f"{name}.at": "mark", f"{name}.left": left, f"{name}.x": 0,
                       f"{name}.word": 0, f"{name}.asked": 0}  # fmt: skip
        memory |= {"agent.at": "sleep", "agent.idles": scene.idles, "agent.idle": 0, "daemon.at": "sleep",
                   "daemon.phase": OPEN if scene.granted else SHUT, "daemon.word": word, "daemon.demand": 0,
                   "daemon.drained": 0, "daemon.acked": 0, "B.at": "want", "B.left": scene.rivals}  # fmt: skip
        self.names = tuple(memory)
        self.first: State = (tuple(memory.values()), ())
        self.ended = {f"{name}.at" for name in (*launchers, "B")}

    def is_done(self, state: State) -> bool:
        memory = dict(zip(self.names, state[0], strict=True))
        return all(memory[at] == "done" for at in self.ended)

    def after(self, state: State) -> Iterator[tuple[str, State]]:
        """What can happen next, and where it leads. Raises Violation."""
        now, waiting = dict(zip(self.names, state[0], strict=True)), dict(state[1])
        for name, program in self.programs.items():
            at = now[f"{name}.at"]
            if at == "done":
                continue
            try:
                yield from self._steps(name, program[at], now, waiting, "")
            except Violation as violation:
                raise Violation(f"{violation} ({name}: {at})") from None

    def _steps(
        self, name: str, step: Step, now: dict[str, Any], waiting: dict[str, Queue], seen: str
    ) -> Iterator[tuple[str, State]]:  # fmt: skip
        """One step of a thread, with and without what others have stored and may or may not be seen yet.

        When a store leaves its queue matters to nobody but whoever loads that word: it is decided there.
        """
        thread = Thread(self.scene, name, now.copy(), waiting.copy())
        then = step(thread)
        for label in (then,) if isinstance(then, str) else then or ():
            thread.memory[f"{name}.at"] = label
            yield f"{name}: {now[f'{name}.at']}{seen}", self._state(thread.memory, thread.queues)
        for other, queue in waiting.items():
            if other == name:
                continue
            for place, (stored, value) in enumerate(queue):
                if stored in thread.loaded:
                    memory = now | dict(queue[: place + 1])
                    queues = waiting | {other: queue[place + 1 :]}
                    yield from self._steps(name, step, memory, queues, f"{seen}, sees {stored}={value}")
                    break

    def _state(self, memory: dict[str, Any], queues: dict[str, Queue]) -> State:
        return tuple(memory.values()), tuple(sorted((name, queue) for name, queue in queues.items() if queue))

    def explore(self) -> int:
        """How many states there are. Violation: of a property, or a state from which the end cannot be reached."""
        came: dict[State, tuple[State, str] | None] = {self.first: None}
        before: dict[State, list[State]] = {}
        waiting = deque([self.first])
        while waiting:
            state = waiting.popleft()
            try:
                for what, then in self.after(state):
                    before.setdefault(then, []).append(state)
                    if then not in came:
                        came[then] = state, what
                        waiting.append(then)
            except Violation as violation:
                raise Violation(f"{violation}:\n{self._way(came, state)}") from None
        good = {state for state in came if self.is_done(state)}
        waiting = deque(good)
        while waiting:
            for state in before.get(waiting.popleft(), ()):
                if state not in good:
                    good.add(state)
                    waiting.append(state)
        if lost := next((state for state in came if state not in good), None):
            raise Violation(f"it never ends:\n{self._way(came, lost)}")
        return len(came)

    @staticmethod
    def _way(came: dict[State, tuple[State, str] | None], state: State) -> str:
        steps = []
        while (step := came[state]) is not None:
            state, what = step
            steps.append(what)
        return "\n".join(reversed(steps))
