"""SIGUSR1: where every thread and every task stands, on stderr. For a daemon that seems to hang."""

from __future__ import annotations

import faulthandler
import signal
import sys
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from types import CoroutineType
from typing import TextIO

import trio


@contextmanager
def threads_on(number: int = signal.SIGUSR1) -> Iterator[None]:
    """Dumps the threads from the signal handler itself, so also while the trio loop stands still.

    Enter it after trio's signal receiver: the handler that is there by then is called too, and gives the tasks.
    """
    faulthandler.register(number, file=sys.stderr, all_threads=True, chain=True)
    try:
        yield
    finally:
        faulthandler.unregister(number)


def tasks(out: TextIO | None = None) -> None:
    """Writes the tree of trio's tasks, each with its stack. From the trio thread."""
    out = sys.stderr if out is None else out
    root = trio.lowlevel.current_root_task()
    if root is not None:
        _task(root, 0, out)
    out.flush()


def _task(task: trio.lowlevel.Task, depth: int, out: TextIO) -> None:
    indent = "  " * depth
    out.write(f"{indent}task {task.name}\n")
    for frame in _stack(task.coro):
        out.write(f"{indent}  {frame}\n")
    for nursery in task.child_nurseries:
        for child in list(nursery.child_tasks):
            _task(child, depth + 1, out)


def _stack(coro: object) -> list[str]:
    """``file:line function`` of each suspended frame, outermost first."""
    lines = []
    while isinstance(coro, CoroutineType):
        frame = coro.cr_frame
        if frame is not None:
            summary = traceback.FrameSummary(frame.f_code.co_filename, frame.f_lineno, frame.f_code.co_name)
            lines.append(f"{summary.filename}:{summary.lineno} {summary.name}")
        coro = coro.cr_await
    return lines
