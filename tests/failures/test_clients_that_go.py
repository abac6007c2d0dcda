"""A program that is killed or stopped at each point where others could depend on it: they go on, nothing of it stays.

Each is first stopped there, so that it certainly is at that point, and killed after that.
"""

import os
import signal
import subprocess
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from node import Node, build_c, wait_until
from observer import Observer

GIB = 1 << 30
KERNEL_NS = 300_000
LONG_NS = 400_000_000


def state_of(pid: int) -> str:
    return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]


def stop(pid: int) -> None:
    os.kill(pid, signal.SIGSTOP)
    wait_until(lambda: state_of(pid) == "T", "it to be stopped", every=0.001)


@pytest.fixture
def pair(node: Node, steps: Any) -> Iterator[tuple[Any, Any, Observer]]:
    """A victim and a neighbour in instances of their own, and what can be seen of the victim."""
    for ident in ("victim", "other"):
        node.ctl("create", ident, "--mem", "1GiB")
    victim, other = steps("victim"), steps("other")
    for one in (victim, other):
        one.tell("0 launch 1000")
        wait_until(lambda: one.launches() == 1, "the first launch")  # noqa: B023
    observer = Observer(node.runtime / "inst/victim/gate.sock")
    yield victim, other, observer
    observer.close()


def caught(victim: Any, observer: Observer, *wanted: str) -> None:
    """Stops it until that comes upon it in one of the states that are wanted."""
    for _ in range(2000):
        wait_until(lambda: observer.state_of(victim.process.pid) in wanted, f"{wanted}", every=0.0002)
        stop(victim.process.pid)
        if observer.state_of(victim.process.pid) in wanted:
            return
        os.kill(victim.process.pid, signal.SIGCONT)
    raise AssertionError(f"never stopped {wanted}")


def others_go_on(node: Node, pair: tuple[Any, Any, Observer], how: str) -> None:
    victim, other, observer = pair
    if how == "killed":
        victim.process.kill()
        victim.process.wait()
        wait_until(lambda: observer.slot_of(victim.process.pid) is None, "its slot to be taken back")
    before = other.launches()
    wait_until(lambda: other.launches() > before + 500, "the neighbour to go on")
    if how == "stopped":
        done = victim.launches()
        os.kill(victim.process.pid, signal.SIGCONT)
        wait_until(lambda: victim.launches() > done + 20, "it to be one of them again")
        before = other.launches()
        wait_until(lambda: other.launches() > before + 20, "the neighbour beside it")
        assert victim.process.poll() is None
    assert other.process.poll() is None
    assert "Traceback" not in node.log.read_text()


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_while_holding(node: Node, pair: Any, how: str) -> None:
    victim, other, observer = pair
    for one in (victim, other):
        one.tell(f"0 busy {KERNEL_NS}")
    caught(victim, observer, "holding")
    others_go_on(node, pair, how)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_while_draining(node: Node, pair: Any, how: str) -> None:
    """It was told to let go, or has by itself, and its kernels are still on the device."""
    victim, other, observer = pair
    other.tell(f"0 busy {KERNEL_NS}")
    victim.tell(f"0 busy {LONG_NS // 20}")
    caught(victim, observer, "closing", "draining")
    others_go_on(node, pair, how)


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_while_submitting(node: Node, pair: Any, how: str) -> None:
    """Inside the driver's launch: its agent cannot let go before that returns."""
    victim, other, observer = pair
    victim.hang.touch()
    victim.tell(f"0 busy {KERNEL_NS}")
    wait_until(Path(f"{victim.hang}.in").exists, "it to be inside the launch")
    other.tell(f"0 busy {KERNEL_NS}")
    stop(victim.process.pid)
    assert observer.state_of(victim.process.pid) in ("holding", "closing")
    victim.hang.unlink()
    others_go_on(node, pair, how)


def test_hanging_while_submitting(node: Node, pair: Any) -> None:
    """The driver does not come back, and the program lives: the others go on, and so does it one day."""
    victim, other, _ = pair
    victim.hang.touch()
    victim.tell(f"0 busy {KERNEL_NS}")
    wait_until(Path(f"{victim.hang}.in").exists, "it to be inside the launch")
    other.tell(f"0 busy {KERNEL_NS}")
    before = other.launches()
    wait_until(lambda: other.launches() > before + 500, "the neighbour to go on")
    done = victim.launches()
    victim.hang.unlink()
    wait_until(lambda: victim.launches() > done + 20, "it to be one of them again")


# While allocating, inside the instance's ledger


@pytest.fixture(scope="module")
def holder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A process of the instance that is inside the ledger: it takes the mutex and says so."""
    return build_c(Path(__file__).with_name("holder.c"), tmp_path_factory.mktemp("bin") / "holder")


@pytest.fixture
def inside_the_ledger(node: Node, holder: Path) -> Iterator[Callable[[], "subprocess.Popen[bytes]"]]:
    made: list[subprocess.Popen[bytes]] = []

    def begin() -> "subprocess.Popen[bytes]":
        made.append(subprocess.Popen([holder, node.runtime / "inst/one/gate.sock"], stdin=subprocess.PIPE,
                                     stdout=subprocess.PIPE))
        assert made[-1].stdout and made[-1].stdout.readline() == b"held\n"
        return made[-1]

    yield begin
    for one in made:
        one.kill()
        one.communicate()


def allocates(alloc: Path, env: dict[str, str], size: int = 64 << 20) -> bytes:
    """What comes of it; within a minute, whatever stands in its way."""
    return subprocess.run([alloc, str(size)], env=env, stdin=subprocess.DEVNULL, capture_output=True, timeout=60,
                          check=False).stdout  # fmt: skip


@pytest.mark.parametrize("how", ["killed", "stopped"])
def test_while_allocating(node: Node, inside: Any, alloc: Path, inside_the_ledger: Any, how: str) -> None:
    """Siblings repair what a dead one left. One that is stopped there makes them wait a bounded time; other instances
    and the tree notice nothing of either."""
    for ident in ("one", "other"):
        node.ctl("create", ident, "--mem", "1GiB")
    assert allocates(alloc, inside("one")) == b"0\n"
    sitting = inside_the_ledger()
    if how == "killed":
        sitting.kill()
        sitting.wait()
    else:
        stop(sitting.pid)
        assert allocates(alloc, inside("other")) == b"0\n"
        assert node.read(0, "one", "meminfo").startswith("Free: ")
        assert allocates(alloc, inside("one")) in (b"0\n", b"2\n"), "it ends, refused at worst"
        os.kill(sitting.pid, signal.SIGCONT)
        sitting.communicate(b"on\n")
    assert allocates(alloc, inside("one"), GIB) == b"0\n", "all of it is there to be had"
    assert allocates(alloc, inside("one"), GIB + (2 << 20)) == b"2\n"
    wait_until(lambda: node.read(0, "one", "meminfo") == f"Free: {GIB}\n", "all memory to come back")


def test_the_wait_for_the_ledger_knows_no_wall_clock(
    clock: Callable[[int], None], node: Node, inside: Any, alloc: Path, inside_the_ledger: Any
) -> None:
    """A clock that is set back while a sibling sits on it would make that wait longer by as much."""
    node.ctl("create", "one", "--mem", "1GiB")
    sitting = inside_the_ledger()
    stop(sitting.pid)
    clock(365 * 86400)  # what is a moment ahead by this clock is a year ahead by the kernel's
    assert allocates(alloc, inside("one")) in (b"0\n", b"2\n")
    os.kill(sitting.pid, signal.SIGCONT)
    sitting.communicate(b"on\n")
    assert allocates(alloc, inside("one")) == b"0\n"
