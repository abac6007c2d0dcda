"""A program that serves a tree over an in-memory backend, for tests: ``tree_server.py PATH [--adopt FD --init FILE]``.

Prints JSON lines: ``{"ready": ...}`` when the tree answers, then an answer to each line it reads: ``gap`` (the longest
the event loop stood still since asked last, in seconds), ``log`` (lines logged since asked last), ``flip`` (change
values without pause from inside the daemon), ``hog`` (be busy), ``rss`` (bytes), ``commands`` (what was obeyed). It
ends with its input.
"""

import argparse
import json
import logging
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import trio

from cgpufs import mount as mount_module
from cgpufs.mount import Mount
from cgpufs.nodes import View
from cgpufs.ops import Operations
from cgpufs.tree import Tree
from cgpusched.commands import Command, Create
from cgpusched.errors import CommandError
from cgpusched.model import Gpu, Instance
from cgpusched.state import State

GIB = 1 << 30
CONTAINER = "c0ffee00" * 8
BARE = "bare-1"
PIDS = [(19772, 200278016), (4194304, 1)]


class MemoryBackend:
    """State without a gate: what docs/tree.md says its examples hold for."""

    version = "1.2.3"

    def __init__(self) -> None:
        self.state = State([Gpu(i, f"GPU-{i:08d}-0000-0000-0000-000000000000", "Test", 24 * GIB) for i in (0, 1)])
        self.state.apply(Create(CONTAINER, (0,), (3 * GIB,), 2))
        self.state.apply(Create(BARE, (0, 1), (GIB, 2 * GIB)))
        self.processes: dict[tuple[str, int], list[tuple[int, int]]] = {(CONTAINER, 0): PIDS}
        self.commands: list[Command] = []

    def apply(self, command: Command) -> Instance | None:
        try:
            result = self.state.apply(command)
        except CommandError as error:
            logging.getLogger("backend").warning("refused errno=%s reason=%s", error.name, error)
            raise
        self.commands.append(command)
        return result

    def memory(self, instance: str, gpu: int) -> Sequence[tuple[int, int]]:
        return self.processes.get((instance, gpu), [])

    def upgrade_state(self) -> str:
        return "idle"


class Lines(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(self.format(record))


async def beat(gap: list[float]) -> None:
    last = trio.current_time()
    while True:
        await trio.sleep(0.005)
        now = trio.current_time()
        gap[0], last = max(gap[0], now - last), now


async def flip(backend: MemoryBackend) -> None:
    """meminfo alternates between two texts of different lengths, whole."""
    while True:
        for size in (11, 2222222222):
            backend.processes[CONTAINER, 0] = [(size, size)] * (1 if size == 11 else 3)
            await trio.sleep(0.0005)


async def hog() -> None:
    """Keeps the loop busy, so that much time passes between epoll's word that a request waits and its being read."""
    while True:
        time.sleep(0.005)
        await trio.lowlevel.checkpoint()


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


async def answer(line: str, backend: MemoryBackend, logs: Lines, gap: list[float], nursery: trio.Nursery) -> object:
    match line:
        case "gap":
            value, gap[0] = gap[0], 0.0
            return value
        case "log":
            lines, logs.lines = logs.lines, []
            return lines
        case "flip":
            nursery.start_soon(flip, backend)
            return True
        case "hog":
            nursery.start_soon(hog)
            return True
        case "rss":
            return resident()
        case "commands":
            return [repr(command) for command in backend.commands]
    raise ValueError(line)


async def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("path")
    parser.add_argument("--adopt", type=int)
    parser.add_argument("--init", type=Path)
    parser.add_argument("--view-only")
    parser.add_argument("--old-kernel", action="store_true", help="as before Linux 6.9, which cannot repeat requests")
    parser.add_argument("--leave", action="store_true", help="end without unmounting")
    args = parser.parse_args()
    if args.old_kernel:
        mount_module.can_resend = lambda: False
    logs = Lines()
    logging.basicConfig(level=logging.INFO, handlers=[logs])
    backend = MemoryBackend()
    view = View(read_only=True, only=args.view_only, pid=lambda pid: 7) if args.view_only else View()
    if args.adopt is None:
        mount = Mount.create(args.path)
    else:
        mount = Mount.adopt(args.adopt, args.init.read_bytes(), args.path)
    gap = [0.0]
    try:
        async with trio.open_nursery() as nursery:
            await nursery.start(
                lambda task_status: mount.serve(
                    Operations(Tree(backend, view)), resend=args.adopt is not None, task_status=task_status
                )
            )
            nursery.start_soon(beat, gap)
            print(json.dumps({"ready": True}), flush=True)
            rest = b""
            async for chunk in trio.lowlevel.FdStream(0):
                *lines, rest = (rest + chunk).split(b"\n")
                for line in lines:
                    print(json.dumps(await answer(line.decode(), backend, logs, gap, nursery)), flush=True)
            nursery.cancel_scope.cancel()
    finally:
        if args.leave:
            mount.close()
        else:
            mount.unmount()


if __name__ == "__main__":
    trio.run(main)
    sys.exit(0)
