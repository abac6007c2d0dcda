"""``echo 1 > upgrade``: this process becomes the installed program, and nobody notices.

The new program is asked first whether it would start at all (``--check``); if not, this one goes on, and the tree's
``upgrade`` says why. Then what is asked is answered, what asks next waits in the kernel, and the program is executed in
this same process, with the descriptors that are kept and the lock. Clients of the gate hold on to what they
were granted until they have joined again.

Signals stay blocked from before the exec until the new program has its handlers: one that came in between would end
it. Those that another thread of ours takes meanwhile are handed on by name.
"""

from __future__ import annotations

import fcntl
import logging
import os
import signal
import subprocess
import sys
from collections.abc import Awaitable, Callable, Mapping
from errno import EBUSY
from pathlib import Path
from typing import NoReturn

import trio

from cgpusched.errors import CommandError, UserError
from cgpusched.fields import pairs

log = logging.getLogger(__name__)

SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)
CHECK_SECONDS = 60.0
LOCK = "lock"
"""The runtime folder's lock, among the descriptors handed on."""
_FIRST = 3
_CAUGHT = "CGPU_CAUGHT_SIGNALS"


class Upgrade:
    """``ask`` is System's; ``run_forever`` does what was asked for."""

    def __init__(self, command: list[str] | None = None) -> None:
        """``command``: what this process was started with."""
        self._command = command or started_with()
        self._asked = trio.Event()
        self.failure = ""
        """Why the last one did not come about."""
        self.running = False

    def __str__(self) -> str:
        """What the tree's ``upgrade`` reads as."""
        if self.running:
            return "running"
        return f"failed: {self.failure}" if self.failure else "idle"

    def ask(self) -> None:
        """CommandError (EBUSY): one is under way."""
        if self.running:
            raise CommandError(EBUSY, "upgrade: one is under way")
        self.running = True
        self.failure = ""
        self._asked.set()

    async def run_forever(self, drain: Callable[[], Awaitable[None]], held: Callable[[], Mapping[str, int]]) -> None:
        """``drain`` ends the serving; ``held``: the descriptors to hand on, by name."""
        while True:
            await self._asked.wait()
            self._asked = trio.Event()
            log.info("upgrade begins %s", pairs(program=self._command[0]))
            try:
                await self._check()
            except UserError as error:
                self.running, self.failure = False, str(error)
                log.error("not upgraded %s", pairs(reason=error))
                continue
            await drain()
            log.info("upgrade executes %s", pairs(program=self._command[0]))
            execute(self._command, held())

    async def _check(self) -> None:
        """UserError: the program would not start."""
        try:
            with trio.move_on_after(CHECK_SECONDS) as waited:
                done = await trio.run_process([*self._command, "--check"], check=False, stdin=subprocess.DEVNULL,
                                              capture_stdout=True, capture_stderr=True)  # fmt: skip
        except OSError as error:
            raise UserError(f"{self._command[0]}: {error.strerror}") from None
        if waited.cancelled_caught:
            raise UserError(f"{self._command[0]} --check did not end within {CHECK_SECONDS:.0f} s")
        if done.returncode != 0:
            lines = done.stderr.decode("utf-8", "replace").split("\n")
            said = next((line for line in reversed(lines) if line.strip()), f"it ended with {done.returncode}")
            raise UserError("".join(c if c.isprintable() and c.isascii() else "?" for c in said.strip()[:200]))


def started_with() -> list[str]:
    """What starts this program again. A script is named itself: its first line may say another interpreter by then."""
    script = sys.orig_argv[1] if len(sys.orig_argv) > 1 else ""
    if script and not script.startswith("-") and os.access(script, os.X_OK):
        return [os.path.abspath(script), *sys.orig_argv[2:]]
    return [sys.executable, *sys.orig_argv[1:]]


def execute(command: list[str], fds: Mapping[str, int]) -> NoReturn:
    """Becomes ``command``, which finds ``fds`` as systemd would hand them over. Never returns: it ends if it cannot."""
    caught: list[int] = []
    try:
        # trio's own handlers write to a descriptor that is about to become another, and run whenever a thread that does
        # not block them took one.
        for one in SIGNALS:
            signal.signal(one, lambda taken, _: caught.append(taken))
        signal.set_wakeup_fd(-1)
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        free = _FIRST + len(fds)
        sources = [fcntl.fcntl(fd, fcntl.F_DUPFD_CLOEXEC, free) for fd in fds.values()]
        for name in os.listdir("/proc/self/fd"):
            if int(name) >= _FIRST:
                _close_on_exec(int(name))
        for number, source in enumerate(sources, _FIRST):
            os.dup2(source, number, inheritable=True)
        env = dict(os.environ, LISTEN_PID=str(os.getpid()), LISTEN_FDS=str(len(fds)), LISTEN_FDNAMES=":".join(fds))
        sys.stdout.flush()
        sys.stderr.flush()
        env[_CAUGHT] = ",".join(map(str, caught))
        os.execve(command[0], command, env)
    except BaseException:
        log.critical("the new program cannot be executed", exc_info=True)
    os._exit(1)


def _close_on_exec(fd: int) -> None:
    """What C libraries opened without it."""
    try:
        os.set_inheritable(fd, False)
    except OSError:  # the folder's own
        pass


def unblock() -> None:
    """For a program that another has become: its handlers are there now, and get what that one caught."""
    signal.pthread_sigmask(signal.SIG_UNBLOCK, SIGNALS)
    for number in filter(None, os.environ.pop(_CAUGHT, "").split(",")):
        os.kill(os.getpid(), int(number))


async def is_stopped_for_good(
    booted: Path = Path("/run/systemd/system"), cgroup: Path = Path("/proc/self/cgroup")
) -> bool:
    """Whether systemd, which ends us just now, will not start us again: its job for our unit is to stop it.

    Also where there is no systemd. Where it does not answer the next start is expected: what is kept would be lost, and
    systemd lets it go by itself if there is none.
    """
    if not booted.is_dir() or "NOTIFY_SOCKET" not in os.environ or not (unit := _unit(cgroup)):
        return True
    try:
        with trio.move_on_after(2):
            done = await trio.run_process(["systemctl", "list-jobs", "--no-legend", "--plain", unit], check=False,
                                          capture_stdout=True, stdin=subprocess.DEVNULL)  # fmt: skip
            return any(line.split()[1:3] == [unit, "stop"] for line in done.stdout.decode().splitlines())
    except OSError as error:
        log.warning("systemctl failed %s", pairs(reason=error))
    return False


def _unit(cgroup: Path) -> str:
    """The name of the unit that this process is of; empty if of none."""
    for line in cgroup.read_text().splitlines():
        for part in reversed(line.split(":", 2)[-1].split("/")):
            if part.endswith(".service"):
                return part
    return ""
