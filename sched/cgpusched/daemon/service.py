"""The whole daemon: what it is made of, in which order that comes up, and in which order it goes.

One exit stack owns everything, so what came up last goes first; one nursery below it has all the tasks. A task that
fails ends the service: systemd starts it again, and that is better than a daemon that only looks alive.

Which task may touch what: everything below runs on the trio thread and changes state only between two awaits, so no
lock is needed. Other threads: the gate's scheduling thread (C, its own lock), and short-lived workers for what may
block (NVML, /proc, the user database, the first look at the mount).
"""

from __future__ import annotations

import functools
import logging
import os
import signal
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack
from pathlib import Path

import trio

from cgpufs.mount import Mount, Unmounted
from cgpufs.ops import Operations
from cgpufs.tree import Tree
from cgpusched.commands import Destroy
from cgpusched.config import Config
from cgpusched.daemon import devices, dump, logs, rundir
from cgpusched.daemon.access import Access, group_id
from cgpusched.daemon.clients import Clients
from cgpusched.daemon.control import Control, ControlServer
from cgpusched.daemon.lifetime import Lifetimes
from cgpusched.daemon.notify import Notifier, feed_watchdog
from cgpusched.daemon.status import Status
from cgpusched.daemon.system import System
from cgpusched.driver.proxy import install_proxies, install_simulated
from cgpusched.errors import CommandError, UserError
from cgpusched.fields import pairs
from cgpusched.gate import Gate
from cgpusched.state import State

log = logging.getLogger(__name__)

READY_SECONDS = 10.0
SIGNALS = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)


async def run(config: Config, reload: Callable[[], Config]) -> None:
    """Serves until SIGTERM or SIGINT. ``reload`` reads the configuration again, for SIGHUP. Raises UserError."""
    os.umask(0o022)  # what is made here is for every user to reach; modes that matter are set explicitly all the same
    with trio.open_signal_receiver(*SIGNALS) as received, dump.threads_on(signal.SIGUSR1):
        notifier = Notifier()
        try:
            async with AsyncExitStack() as stack:
                # Signals count from the first moment: a start that hangs must be stoppable.
                scope = await _nursery(stack)
                scope.start_soon(_obey, received, reload, scope.cancel_scope, notifier)
                await _start(config, stack, notifier)
                await trio.sleep_forever()
        finally:
            notifier.close()
    log.info("stopped")


async def _nursery(stack: AsyncExitStack) -> trio.Nursery:
    """A nursery whose tasks are cancelled, and have ended, before what is below it in the stack goes."""
    nursery = await stack.enter_async_context(trio.open_nursery())
    stack.callback(nursery.cancel_scope.cancel)
    return nursery


async def _start(config: Config, stack: AsyncExitStack, notifier: Notifier) -> None:
    runtime = config.runtime_dir
    stack.enter_context(rundir.own(runtime))
    limit = rundir.raise_descriptor_limit()
    if stale := rundir.clear_instances(runtime):
        log.warning("removed what a predecessor left %s", pairs(instances=stale))
    found = await devices.discover(runtime, config.simulate, config.driver_dir)
    driver = found.driver
    if found.sim_dir:
        driver = await trio.to_thread.run_sync(install_simulated, driver, config.lib_dir / "sim")
    await trio.to_thread.run_sync(install_proxies, driver, config.lib_dir)

    gate = Gate()
    stack.callback(gate.close)
    gate.start()
    nursery = await _nursery(stack)  # above the gate: what ends there gives its slots back
    settings = config.settings(gpu.index for gpu in found.gpus)
    state = State(found.gpus, settings, config.default_memsize, config.overcommit)
    system = System(state, gate)
    status = Status(system, found, str(config.mount))
    nursery.start_soon(status.sample_forever)

    lives: Lifetimes
    clients = Clients(system, runtime, nursery, on_detach=lambda ident: lives.detached(ident))
    stack.callback(clients.close)
    system.on_change.append(clients.changed)

    def end(ident: str) -> None:
        try:
            system.apply(Destroy(ident))
        except CommandError as error:  # somebody destroyed it, or a process came, a moment ago
            log.debug("not ended %s", pairs(id=ident, reason=error))

    lives = Lifetimes(nursery, clients.count, end)
    system.on_change.append(lambda command, _: lives.forget(command.id) if isinstance(command, Destroy) else None)

    def environment(ident: str) -> dict[str, str]:
        env = {"CGPU_SOCKET": str(clients.socket(ident))}
        return env | ({"CGPU_SIM_DIR": str(found.sim_dir)} if found.sim_dir else {})

    nursery.start_soon(_check_group, config.control.group)
    apply = functools.partial(system.apply, log_refusal=False)
    control = Control(state, apply, Access(config.control), lives, environment, config.lib_dir, status.answer,
                      clients.count)
    await nursery.start(ControlServer(runtime / "control.sock", control.answer).serve)

    mount = await trio.to_thread.run_sync(Mount.create, config.mount)
    stack.callback(mount.unmount)
    await nursery.start(_serve_tree, mount, Operations(Tree(system)))

    await _prove(config.mount, gate)
    nursery.start_soon(feed_watchdog, notifier, lambda: gate.loops)
    log.info("ready %s", pairs(
        version=system.version, gpus=len(found.gpus), simulated=int(found.sim_dir is not None), mount=config.mount,
        runtime=runtime, lib=config.lib_dir, config=config.source, descriptors=limit,
    ))  # fmt: skip
    notifier.send("READY=1", f"STATUS={_headline(found)}")


async def _check_group(group: str | None) -> None:
    """A group that does not exist (yet) shuts its members out: say so once."""
    if group and await trio.to_thread.run_sync(group_id, group, abandon_on_cancel=True) is None:
        log.warning("no such group %s", pairs(key="control.group", group=group))


def _headline(found: devices.Devices) -> str:
    kind = "SIMULATED GPUs" if found.sim_dir else "GPUs"
    return f"sharing {len(found.gpus)} {kind}"


async def _serve_tree(
    mount: Mount, operations: Operations, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    try:
        await mount.serve(operations, task_status=task_status)
    except Unmounted as error:
        raise UserError(f"the tree is gone: {error}") from None


async def _prove(mount: Path, gate: Gate) -> None:
    """Returns when the tree answers and the gate's loop moves; UserError when they don't."""
    with trio.move_on_after(READY_SECONDS):
        version = await trio.to_thread.run_sync((mount / "version").read_text, abandon_on_cancel=True)
        assert version
        first = gate.loops
        while gate.loops == first:
            await trio.sleep(0.01)
        return
    raise UserError(f"not ready after {READY_SECONDS:.0f} s: {mount} does not answer or the gate stands still")


async def _obey(
    received: AsyncIterator[int], reload: Callable[[], Config], scope: trio.CancelScope, notifier: Notifier
) -> None:
    async for number in received:
        if number == signal.SIGUSR1:
            dump.tasks()
        elif number == signal.SIGHUP:
            _reload(reload, notifier)
        else:
            log.info("stopping %s", pairs(signal=signal.Signals(number).name))
            notifier.send("STOPPING=1")
            scope.cancel()
            return


def _reload(reload: Callable[[], Config], notifier: Notifier) -> None:
    """Takes the log level over. All else needs a restart; a bad file changes nothing."""
    notifier.send("RELOADING=1", f"MONOTONIC_USEC={time.monotonic_ns() // 1000}")
    try:
        level = reload().log_level
    except UserError as error:
        log.error("not reloaded %s", pairs(reason=error))
    else:
        logs.set_level(level)
        log.info("reloaded %s", pairs(log_level=level))
    notifier.send("READY=1")

