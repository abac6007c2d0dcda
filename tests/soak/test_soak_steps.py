"""Random lives and deaths of many processes of one instance: exact after every step, and nothing left at the end.

CGPU_SOAK_STEPS says how many steps (default 1000; ``make soak-memory`` takes 10,000), CGPU_SOAK_SEED which course.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
from pathlib import Path

import pytest
from node import Node, descriptors, settled_descriptors, wait_until
from soaked import GIB, MIB, Pages, Worker, charged, environment, pages_of

STEPS = int(os.environ.get("CGPU_SOAK_STEPS", "1000"))
SEED = int(os.environ.get("CGPU_SOAK_SEED", "1"))
WORKERS = 6
OUT_OF_MEMORY = 2
STATUS = {"exit": 0, "return": 0, "abort": -signal.SIGABRT, "segv": -signal.SIGSEGV, "kill": -signal.SIGKILL, "exec": 0}
FORKED = {"exit": 0, "abort": signal.SIGABRT, "segv": signal.SIGSEGV, "kill": signal.SIGKILL, "exec": 0, "linger": 0}
LIMITS = [64 * MIB, 256 * MIB, GIB]


class Soak:
    """The model: what every live process holds, and so what the instance has left."""

    def __init__(self, node: Node, program: Path, pages: Pages, chance: random.Random) -> None:
        self.node, self.program, self.pages, self.chance = node, program, pages, chance
        self.env = environment(node, "soaked")
        self.workers: list[Worker] = []
        self.limit = GIB

    @property
    def calm(self) -> list[Worker]:
        return [one for one in self.workers if not one.churning]

    @property
    def used(self) -> int:
        return sum(one.used for one in self.workers)

    def one(self, calm: bool = True) -> Worker:
        """Any of them, a new one where there is none."""
        found = self.calm if calm else self.workers
        return self.chance.choice(found) if found else self.start()

    def start(self) -> Worker:
        self.workers.append(Worker(self.program, self.env))
        return self.workers[-1]

    def size(self) -> int:
        most = self.chance.choice([4096, 1 << 20, 16 << 20, self.limit])
        return self.chance.randint(1, most)

    # Steps

    def alloc(self) -> None:
        worker, size = self.one(), self.size()
        self.settle()
        fits = self.used + self.pages.other + charged(size) <= self.limit
        result = worker.alloc(size)
        assert result in (0, OUT_OF_MEMORY)
        if len(self.calm) == len(self.workers):
            assert (result == 0) == fits, f"{size} beside {self.used} of {self.limit}: {result}"

    def free(self) -> None:
        worker = self.one()
        if worker.blocks:
            assert worker.free(self.chance.randrange(len(worker.blocks))) == 0

    def more(self) -> None:
        if len(self.workers) < WORKERS:
            self.start()

    def kill(self) -> None:
        """At any instruction: one that churns spends most of them inside the ledger."""
        worker = self.one(calm=False)
        worker.kill()
        self.workers.remove(worker)

    def end(self) -> None:
        worker, how = self.one(), self.chance.choice(list(STATUS))
        worker.tell("end", how, self.size())
        assert worker.gone() == STATUS[how]
        self.workers.remove(worker)

    def once(self) -> None:
        """A whole life, of which nobody waits for the right moment."""
        how, size = self.chance.choice(list(STATUS)), self.size()
        done = subprocess.run([self.program, "once", how, str(size)], env=self.env, capture_output=True, timeout=60,
                              check=False)
        assert done.returncode == STATUS[how] and done.stdout.strip() in (b"0", b"2"), done

    def fork(self) -> None:
        worker, how = self.one(calm=False), self.chance.choice(list(FORKED))
        assert int(worker.ask("fork", how, self.size())) & 0x7F == FORKED[how]

    def exec(self) -> None:
        worker = self.one(calm=False)
        assert worker.ask("exec") == "ready"
        worker.blocks, worker.churning = [], False

    def churn(self) -> None:
        worker = self.one()
        assert worker.ask("churn", self.size(), self.chance.randint(1, 3)) != ""
        worker.churning = True

    def quiet(self) -> None:
        for worker in self.workers:
            if worker.churning:
                assert worker.ask("calm") == "0"
                worker.churning = False
                break

    def resize(self) -> None:
        """Up and down while they run, also below what is used: nobody loses what he has."""
        self.limit = self.chance.choice(LIMITS)
        self.node.write(self.limit, 0, "soaked", "memsize")
        assert self.pages.limit == self.limit

    # Checks

    def settle(self) -> None:
        """Until the daemon has taken note of every death; then what the living hold is exactly the model."""
        living = {one.pid for one in self.workers}
        wait_until(lambda: set(self.pages.live()) == living, f"only {living} to be there", every=0.001)
        # One that has executed another program has two slots, until the daemon has seen the end of the first.
        wait_until(lambda: self.pages.owned() == len(living), "one slot for each", every=0.001)
        held = self.pages.live()
        assert {one.pid: held[one.pid] for one in self.calm} == {one.pid: one.used for one in self.calm}

    def told(self) -> None:
        """What programs and the host are told, when nobody churns."""
        if not self.workers or len(self.calm) < len(self.workers):
            return
        others = [self.pages.other]  # what the audit adds for a process that is not connected yet, or just went
        free, total = map(int, self.one().ask("info").split())
        others.append(self.pages.other)
        assert total == self.limit
        assert free in [max(0, self.limit - self.used - other) for other in others]
        assert self.pages.total == self.pages.held == self.used and self.pages.mutex == 0
        if self.pages.other == 0:
            first, *lines = self.node.read(0, "soaked", "meminfo").splitlines()
            assert first == f"Free: {max(0, self.limit - self.used)}"
            holding = sorted(line for line in lines if not line.endswith(" Mem: 0"))
            assert holding == sorted(f"PID: {one.pid} Mem: {one.used}" for one in self.workers if one.used)

    def run(self, steps: int) -> None:
        weights = {self.alloc: 8, self.free: 5, self.more: 3, self.kill: 2, self.end: 1, self.once: 1, self.fork: 1,
                   self.exec: 1, self.churn: 2, self.quiet: 2, self.resize: 1}
        course = self.chance.choices(list(weights), list(weights.values()), k=steps)
        for number, step in enumerate(course):
            try:
                step()
                self.settle()
                self.told()
            except BaseException as error:
                error.add_note(f"step {number} ({step.__name__}) of seed {SEED}")
                raise

    def clear(self) -> None:
        while self.workers:
            self.workers.pop().kill()


@pytest.mark.timeout(max(120, STEPS // 10))
def test_nothing_is_left_after_random_steps(node: Node, soak: Path) -> None:
    node.ctl("create", "soaked", "--mem", "1GiB")
    assert node.daemon
    daemon = node.daemon.pid
    env = environment(node, "soaked")
    subprocess.run([soak, "once", "exit", "1"], env=env, check=True, capture_output=True)
    with pages_of(node) as pages:
        wait_until(lambda: pages.owned() == 0, "the first process to be gone")
        before, threads = settled_descriptors(daemon), len(os.listdir(f"/proc/{daemon}/task"))
        course = Soak(node, soak, pages, random.Random(SEED))
        try:
            course.run(STEPS)
        finally:
            course.clear()
        node.write(GIB, 0, "soaked", "memsize")
        wait_until(lambda: pages.owned() == 0, "all slots to be given back")
        wait_until(lambda: node.read(0, "soaked", "meminfo") == f"Free: {GIB}\n", "all memory to come back")
        done = subprocess.run([soak, "once", "exit", str(GIB)], env=env, capture_output=True, timeout=60, check=False)
        assert done.stdout == b"0\n", "all of the quota is to be had"
        wait_until(lambda: pages.owned() == 0, "the last process to be gone")
        with Worker(soak, env).process as last:
            assert pages.kept() == 1 and pages.held == 0 and pages.mutex == 0, "nobody's slot but the last one's"
            last.communicate()
        wait_until(lambda: not descriptors(daemon) - before, f"the descriptors to be {before} again")
        assert len(os.listdir(f"/proc/{daemon}/task")) <= threads + 2, "workers come and go, but they do not pile up"
    log = node.log.read_text()
    assert "Traceback" not in log and " error " not in log
