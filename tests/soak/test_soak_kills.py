"""A process killed after any number of instructions of a free and an allocation: nobody else notices.

The kernel counts the instructions (ptrace). Every 37th place is tried, and every second one inside the ledger; with
CGPU_SOAK_STEPS of 10,000 or more, every fifth, and each.
"""

import os
import signal
import subprocess
from itertools import count
from pathlib import Path

import pytest
from node import Node, descriptors, settled_descriptors, wait_until
from soaked import GIB, MIB, Worker, environment, pages_of

LONG = int(os.environ.get("CGPU_SOAK_STEPS", "0")) >= 10_000
SIZE, HELD = 3 * MIB, 2 * MIB


@pytest.mark.timeout(1200 if LONG else 120)
@pytest.mark.parametrize("every,held", [(5 if LONG else 37, []), (1 if LONG else 2, ["held"])],
                         ids=["any", "inside the ledger"])
def test_killed_at_any_instruction(node: Node, soak: Path, every: int, held: list[str]) -> None:
    node.ctl("create", "soaked", "--mem", "1GiB")
    assert node.daemon
    env = environment(node, "soaked")
    survivor = Worker(soak, env)
    torn = 0
    with pages_of(node) as pages:
        try:
            assert survivor.alloc(HELD) == 0
            before = settled_descriptors(node.daemon.pid)
            for instructions in count(0, every):
                command = [soak, "step", str(instructions), str(SIZE), *held]
                with subprocess.Popen(command, env=env, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
                                      text=True) as victim:
                    assert victim.stdout
                    if victim.stdout.readline() == "untraced\n":
                        pytest.skip("ptrace is not permitted here")
                    node.kill_daemon(signal.SIGSTOP)
                    try:
                        end, _ = victim.communicate("go\n", timeout=60)
                        torn += pages.mutex != 0
                        assert end in ("killed\n", "through\n"), (instructions, end)
                        # nobody has told the living yet: it counts all the same, the dead one's part in it
                        assert survivor.alloc(MIB) == 0 and survivor.free(1) == 0
                        assert pages.mutex == 0 and pages.total >= pages.held, instructions
                        assert pages.held == sum(pages.live().values()), instructions
                    finally:
                        node.kill_daemon(signal.SIGCONT)
                wait_until(lambda: pages.owned() == 1, "the dead one's slot to be given back", every=0.0005)
                # the next operation of a living one finds the mutex and the total as if nothing had happened
                assert survivor.alloc(GIB - HELD) == 0, instructions
                assert pages.total == pages.held == GIB and pages.mutex == 0 and pages.kept() == 1, instructions
                assert survivor.free(1) == 0 and pages.held == survivor.used, instructions
                if end == "through\n":
                    break
            assert instructions > 100 and torn > 0, "some of the deaths were inside the ledger"
            wait_until(lambda: not descriptors(node.daemon.pid) - before, "the descriptors to be as before")
        finally:
            survivor.kill()
    print(f"{instructions} instructions, {torn} deaths with the ledger's mutex held")
