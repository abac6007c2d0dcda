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
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack
from dataclasses import dataclass
from pathlib import Path

import trio

from cgpufs.mount import Mount, Unmounted, device_at
from cgpufs.ops import Operations
from cgpufs.session import Session
from cgpufs.tree import Tree
from cgpufs.views import Views
from cgpusched import store
from cgpusched.commands import Command, Destroy
from cgpusched.config import Config, ConfigError
from cgpusched.daemon import devices, dump, logs, procs, rundir
from cgpusched.daemon.audit.auditor import Auditor
from cgpusched.daemon.audit.nvml import Nvml
from cgpusched.daemon.audit.owners import Known, OwnerOf, first_of
from cgpusched.daemon.audit.verdict import Rules
from cgpusched.daemon.containers.book import Containers
from cgpusched.daemon.containers.places import Places
from cgpusched.daemon.containers.runtime import RuntimeServer
from cgpusched.daemon.lifetime import Lifetimes
from cgpusched.daemon.notify import Notifier, feed_watchdog
from cgpusched.daemon.server.access import Access, group_id
from cgpusched.daemon.server.clients import Clients
from cgpusched.daemon.server.control import Control, ControlServer
from cgpusched.daemon.status import Status
from cgpusched.daemon.survival import upgrade
from cgpusched.daemon.survival.kept import CONFIG, KeeperStore, Kept, ManagerStore, inherited
from cgpusched.daemon.survival.resent import Resent
from cgpusched.daemon.survival.statefile import StateFile
from cgpusched.daemon.system import System
from cgpusched.daemon.tally import TallyFile
from cgpusched.driver.proxy import install_proxies, install_simulated
from cgpusched.errors import CommandError, UserError
from cgpusched.fields import pairs
from cgpusched.gate import Gate
from cgpusched.state import State

log = logging.getLogger(__name__)

READY_SECONDS = 10.0
DRAIN_SECONDS = 1.0
"""How long those who are connected have to end what they began, before an upgrade."""


async def run(config: Config, reload: Callable[[], Config], ready: Callable[[], None] = lambda: None) -> None:
    """Serves until SIGTERM or SIGINT. Raises UserError.

    ``reload`` reads the configuration again, for SIGHUP. ``ready`` is called when all is served.
    """
    os.umask(0o022)  # what is made here is for every user to reach; modes that matter are set explicitly all the same
    with trio.open_signal_receiver(*upgrade.SIGNALS) as received, dump.threads_on(signal.SIGUSR1):
        upgrade.unblock()
        notifier = Notifier()
        try:
            async with AsyncExitStack() as stack:
                kept, lock = await _take_over(config.runtime_dir, stack, notifier)
                _check_namespace(notifier, kept)
                # Signals count from here on: a start that hangs must be stoppable.
                scope = await _nursery(stack)
                scope.start_soon(_obey, received, reload, scope.cancel_scope, notifier, kept)
                await _start(config, stack, notifier, kept, lock)
                ready()
                await trio.sleep_forever()
        finally:
            notifier.close()
    log.info("stopped")


async def _nursery(stack: AsyncExitStack) -> trio.Nursery:
    """A nursery whose tasks are cancelled, and have ended, before what is below it in the stack goes."""
    nursery = await stack.enter_async_context(trio.open_nursery())
    stack.callback(nursery.cancel_scope.cancel)
    return nursery


async def _take_over(runtime: Path, stack: AsyncExitStack, notifier: Notifier) -> tuple[Kept, int]:
    """The runtime folder's lock, and what a predecessor left to us; in a crash loop that is let go."""
    found = inherited(os.environ)
    lock = stack.enter_context(rundir.own(runtime, found.pop(upgrade.LOCK, None)))
    if notifier.connected:
        kept = Kept(found, ManagerStore(notifier))
        stack.callback(kept.close)
    else:
        keeper = KeeperStore(runtime)
        stack.callback(keeper.close)
        for name, fd in (await trio.to_thread.run_sync(keeper.connect)).items():
            if name in found:
                os.close(fd)
            else:
                found[name] = fd
        kept = Kept(found, keeper)
        stack.callback(kept.close)
        nursery = await _nursery(stack)
        nursery.start_soon(keeper.run_forever, kept)
    if not rundir.begin(runtime) and kept.names:
        log.error("crash loop: mounts are given up %s", pairs(
            starts=rundir.LOOP_STARTS, seconds=f"{rundir.LOOP_SECONDS:.0f}", kept=",".join(kept.names)))  # fmt: skip
        kept.abandon()
        kept.final = True
    return kept, lock


def _check_namespace(notifier: Notifier, kept: Kept) -> None:
    """ConfigError: systemd gave us a mount namespace of our own, and nobody else would see the tree that we mount."""
    if not notifier.connected or not procs.has_own_mounts():
        return
    reason = ("the unit has an option that gives cgpud a mount namespace of its own, like ProtectSystem or PrivateTmp "
              "(docs/systemd.md): what is mounted there is not seen on the node")  # fmt: skip
    if not kept.names:
        raise ConfigError(reason)
    log.error("mounts of a predecessor are served, others cannot be made %s", pairs(reason=reason))


async def _start(config: Config, stack: AsyncExitStack, notifier: Notifier, kept: Kept, lock: int) -> None:
    runtime = config.runtime_dir
    limit = rundir.raise_descriptor_limit()
    found = await devices.discover(runtime, config.simulate, config.driver_dir)
    driver = found.driver
    if found.sim_dir:
        driver = await trio.to_thread.run_sync(install_simulated, driver, config.lib_dir / "sim")
    await trio.to_thread.run_sync(install_proxies, driver, config.lib_dir)

    gate = Gate()
    stack.callback(gate.close)
    gate.start()
    nursery = await _nursery(stack)  # above the gate: what ends there gives its slots back
    file = StateFile(runtime)
    _check_gpus(config, found, kept)
    stored, state = _restore(config, found, file)
    if stale := rundir.clear_instances(runtime, state.instances.keys()):
        log.warning("removed what a predecessor left %s", pairs(instances=stale))

    def save(command: Command | None) -> None:
        file.save(store.dump(state, file.boot, lives.stored(), containers.stored(), command))

    def save_processes() -> None:
        save(None)

    rules = Rules(config.audit_context, config.audit_tolerance, config.enforce == "gate")
    upgrader = upgrade.Upgrade()
    counted = TallyFile(runtime, file.boot)
    system = System(state, gate, upgrader, rules, save, counted.load(state.instances))
    status = Status(system, found, str(config.mount), keep=counted.save)
    nursery.start_soon(status.sample_forever)
    stack.callback(status.keep)  # before the nursery ends, and with it what the clients count

    lives: Lifetimes
    containers: Containers

    def detached(ident: str) -> None:
        lives.detached(ident)
        containers.detached(ident)

    def foreign(pid: int, ident: str) -> bool:
        return containers.owners().is_foreign(pid, ident)

    def container(ident: str) -> bool:
        return containers.has(ident)

    def owners() -> OwnerOf:
        sockets = {str(clients.socket(one.id)): (one.id, one.owner) for one in state.instances.values()}
        connected = {pid: ident for gpu in state.gpus for pid, ident in system.connected(gpu).items()}
        known, inside = Known(lives.pids() | connected, sockets), containers.owners()
        return first_of(inside.owner_of, known.owner_of)

    auditor = Auditor(system, Nvml(driver.nvml, found.sim_dir).used, owners, config.audit_interval)
    # In a PID namespace of its own this daemon cannot know how a real driver counts.
    counts = found.sim_dir is not None or procs.in_first_namespace()
    clients = Clients(
        system, runtime, nursery, on_detach=detached, foreign=foreign, container=container,
        take_in=auditor.count if config.audit_interval else None,
        alike=lambda pid: counts and procs.is_beside_us(pid),
    )  # fmt: skip
    stack.callback(clients.close)
    system.on_change.append(clients.changed)

    def end(ident: str) -> None:
        try:
            system.apply(Destroy(ident))
        except CommandError as error:  # somebody destroyed it, or a process came, a moment ago
            log.debug("not ended %s", pairs(id=ident, reason=error))

    def save_anchors() -> None:
        try:
            save(None)
        except OSError as error:  # after a crash a scan finds them, unless they hide their environment
            log.error("state not stored %s", pairs(path=file.path, reason=error.strerror))

    lives = Lifetimes(nursery, clients.count, end, save=save_anchors)
    system.on_change.append(lambda command, _: lives.forget(command.id) if isinstance(command, Destroy) else None)
    system.on_change.append(lambda command, _: status.keep() if isinstance(command, Destroy) else None)

    places = Places(runtime, config.lib_dir, driver, config.mount, config.binary, config.runtimes, found.sim_dir,
                    config.preload)
    await trio.to_thread.run_sync(places.prepare, state.instances.keys())
    apply = functools.partial(system.apply, log_refusal=False)
    containers = Containers(system, places, nursery, apply, save_processes, config.ignore_disable)
    stack.callback(containers.close)
    system.on_change.append(containers.changed)
    _resume(stored, state, clients, lives, containers)
    save_anchors()

    def environment(ident: str) -> dict[str, str]:
        env = {"CGPU_SOCKET": str(clients.socket(ident))}
        return env | ({"CGPU_SIM_DIR": str(found.sim_dir)} if found.sim_dir else {})

    if config.audit_interval:
        nursery.start_soon(auditor.run_forever)

    nursery.start_soon(_check_group, config.control.group)
    control = Control(state, apply, Access(config.control), lives, environment, config.lib_dir, status.answer,
                      clients.count)
    asked = ControlServer(runtime / "control.sock", control.answer, kept=kept)
    control_task = await _Stoppable.start(nursery, asked.serve)

    view = await _mounted(stack, kept, "view", places.view, read_only=True)
    view_task = await _Stoppable.start(nursery, functools.partial(
        _serve_views, view.mount, Views(system, containers.viewers), view.adopted))  # fmt: skip
    engines = RuntimeServer(places.socket, containers.answer, kept=kept)
    engines_task = await _Stoppable.start(nursery, engines.serve)

    tree = await _mounted(stack, kept, "tree", config.mount)
    backend = Resent(system, stored.last if tree.adopted else "")
    backend.begin()
    tree_task = await _Stoppable.start(nursery, functools.partial(
        _serve_tree, tree.mount, Operations(Tree(backend)), tree.adopted))  # fmt: skip

    async def drain() -> None:
        asked.accepting.cancel()
        engines.accepting.cancel()
        with trio.move_on_after(DRAIN_SECONDS):
            await control_task.ended.wait()
            await engines_task.ended.wait()
        await tree_task.stop()
        await view_task.stop()
        status.keep()

    await _prove(config.mount, gate)
    kept.take_bytes(*CONFIG)
    kept.keep_bytes(*CONFIG, config.text)
    kept.ready()
    rundir.ready(runtime)
    nursery.start_soon(upgrader.run_forever, drain, lambda: {**kept.held(), upgrade.LOCK: lock})
    nursery.start_soon(feed_watchdog, notifier, lambda: gate.loops)
    log.info("ready %s", pairs(
        version=system.version, gpus=len(found.gpus), simulated=int(found.sim_dir is not None), mount=config.mount,
        runtime=runtime, lib=config.lib_dir, config=config.source, descriptors=limit,
    ))  # fmt: skip
    notifier.send("READY=1", f"STATUS={_headline(found, config)}")


def _check_gpus(config: Config, found: devices.Devices, kept: Kept) -> None:
    """ConfigError: the configuration names a GPU that is not there. After a predecessor it may have been lost."""
    try:
        config.check_gpus([gpu.index for gpu in found.gpus])
    except ConfigError as error:
        if not kept.succeeds:
            raise
        log.error("a GPU's configuration is left out %s", pairs(reason=error))


def _restore(config: Config, found: devices.Devices, file: StateFile) -> tuple[store.Stored, State]:
    """What a predecessor left, and the state with it; the configuration's boot values are for what it did not set."""
    settings = config.settings(gpu.index for gpu in found.gpus)
    stored = file.load({gpu.uuid: settings[gpu.index] for gpu in found.gpus})
    state, lines = store.restore(stored, found.gpus, settings, config.default_memsize, config.overcommit)
    for line in lines:
        log.warning("not as it was: %s", line)
    return stored, state


def _resume(
    stored: store.Stored, state: State, clients: Clients, lives: Lifetimes, containers: Containers
) -> None:
    """Instances of a predecessor's time go on. UserError: one cannot."""
    if not state.instances:
        return
    for one in state.instances.values():
        if one.ephemeral:
            lives.resume(one.id, str(clients.socket(one.id)), one.owner, stored.anchors.get(one.id, ()))
    containers.resume(stored.containers)
    try:
        clients.resume()
    except OSError as error:
        raise UserError(f"cannot go on with an instance: {error.filename or ''}: {error.strerror}") from None
    log.info("instances resumed %s", pairs(instances=len(state.instances), containers=len(stored.containers)))


async def _check_group(group: str | None) -> None:
    """A group that does not exist (yet) shuts its members out: say so once."""
    if group and await trio.to_thread.run_sync(group_id, group, abandon_on_cancel=True) is None:
        log.warning("no such group %s", pairs(key="control.group", group=group))


def _headline(found: devices.Devices, config: Config) -> str:
    kind = "SIMULATED GPUs" if found.sim_dir else "GPUs"
    refused = f"the configuration is refused, and what it said before holds: {config.refused}"
    return f"sharing {len(found.gpus)} {kind}" + (f"; {refused}" if config.refused else "")


class _Stoppable:
    """A task that can be stopped, and waited for, alone."""

    def __init__(self) -> None:
        self.ended = trio.Event()
        self._scope = trio.CancelScope()

    @classmethod
    async def start(cls, nursery: trio.Nursery, serve: Callable[..., Awaitable[None]]) -> _Stoppable:
        """Returns when ``serve`` reports started."""
        task = cls()
        await nursery.start(task._run, serve)
        return task

    async def _run(self, serve: Callable[..., Awaitable[None]], task_status: trio.TaskStatus[None]) -> None:
        try:
            with self._scope:
                await serve(task_status=task_status)
        finally:
            self.ended.set()

    async def stop(self) -> None:
        self._scope.cancel()
        await self.ended.wait()


@dataclass(frozen=True)
class _Mounted:
    mount: Mount
    adopted: bool
    """A predecessor's: what it read and did not answer is to be sent again."""


async def _mounted(stack: AsyncExitStack, kept: Kept, kind: str, path: Path, *, read_only: bool = False) -> _Mounted:
    """The mount that a predecessor left, or a new one; a successor gets it unless it ends with this daemon."""
    mount, adopted = _adopted(kept, kind, path), True
    if mount is None:
        mount = await trio.to_thread.run_sync(functools.partial(Mount.create, path, read_only=read_only))
        adopted = False
    else:
        log.info("mount taken over %s", pairs(path=path))

    def leave() -> None:
        if kept.final:
            mount.unmount()
        else:
            mount.close()

    stack.callback(leave)
    kept.keep(kind, _tag(mount.device), mount.fileno())
    kept.keep_bytes(f"{kind}-init", _tag(mount.device), mount.init_message)
    return _Mounted(mount, adopted)


def _adopted(kept: Kept, kind: str, path: Path) -> Mount | None:
    tag = _tag(device_at(path) or "")
    fd, init = kept.take(kind, tag), kept.take_bytes(f"{kind}-init", tag)
    if fd is None:
        return None
    try:
        return Mount.adopt(fd, init, path)
    except UserError as error:
        log.warning("mount not taken over %s", pairs(path=path, reason=error))
        return None


def _tag(device: str) -> str:
    """A device's numbers as the name of a kept descriptor may have them."""
    return device.replace(":", "-")


async def _serve_tree(
    mount: Mount, operations: Operations, resend: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    try:
        await mount.serve(operations, resend=resend, task_status=task_status)
    except Unmounted as error:
        raise UserError(f"the tree is gone: {error}") from None


async def _serve_views(
    mount: Mount, views: Views, resend: bool, task_status: trio.TaskStatus[None] = trio.TASK_STATUS_IGNORED
) -> None:
    try:
        await Session(views).serve(mount, resend=resend, task_status=task_status)
    except Unmounted as error:
        raise UserError(f"the containers' views are gone: {error}") from None


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
    received: AsyncIterator[int], reload: Callable[[], Config], scope: trio.CancelScope, notifier: Notifier, kept: Kept
) -> None:
    async for number in received:
        if number == signal.SIGUSR1:
            dump.tasks()
        elif number == signal.SIGHUP:
            _reload(reload, notifier)
        else:
            log.info("stopping %s", pairs(signal=signal.Signals(number).name))
            notifier.send("STOPPING=1")
            kept.end(await upgrade.is_stopped_for_good())
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

