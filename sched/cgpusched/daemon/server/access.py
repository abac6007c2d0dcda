"""Who may do what over the control socket: root all, members of a group within limits, others only look."""

from __future__ import annotations

import errno
from collections.abc import Callable
from dataclasses import dataclass
from grp import getgrnam

from cgpusched.commands import Create
from cgpusched.config import ControlConfig
from cgpusched.daemon.server.peers import Peer
from cgpusched.errors import CommandError
from cgpusched.model import Instance
from cgpusched.state import State
from cgpusched.units import format_size, show


def group_id(name: str) -> int | None:
    """The gid of a group by name, or of its decimal number; None when there is no such group. May block (NSS)."""
    if name.isascii() and name.isdigit():
        return int(name)
    try:
        return getgrnam(name).gr_gid
    except KeyError:
        return None


@dataclass(frozen=True)
class Access:
    """The rules: ``[control]`` of the configuration."""

    config: ControlConfig = ControlConfig()
    lookup: Callable[[str], int | None] = group_id

    def check_member(self, peer: Peer, what: str) -> None:
        """Raises CommandError (EPERM) with the one line that says who may. May block: it asks the user database."""
        group = self.config.group
        if peer.uid == 0:
            return
        if not group:
            raise CommandError(errno.EPERM, f"{what}: only root may (no group is configured: [control] group)")
        if self.lookup(group) not in peer.groups:
            raise CommandError(errno.EPERM, f"{what}: only root and members of group {group} may, and uid {peer.uid} "
                                            "is not in it (a new member must log in again)")

    def check_create(self, peer: Peer, command: Create, state: State) -> None:
        """The limits of a member's new instance."""
        if peer.uid == 0:
            return
        limits = self.config
        if command.owner != peer.uid:
            raise CommandError(errno.EPERM, f"create {show(command.id)}: only root may make one for another user")

        def refuse(asked: str, most: str) -> CommandError:
            return CommandError(errno.EPERM, f"create {show(command.id)}: {asked} is more than members of group "
                                             f"{limits.group} may have: {most}")

        memsize = max(command.memsize or (state.default_memsize,))
        if limits.max_memsize is not None and memsize > limits.max_memsize:
            raise refuse(f"memsize {format_size(memsize)}", format_size(limits.max_memsize))
        weight = 1 if command.weight is None else command.weight
        if limits.max_weight is not None and weight > limits.max_weight:
            raise refuse(f"weight {weight}", str(limits.max_weight))
        if command.highprio and not limits.highprio:
            raise refuse("high priority", "none ([control] highprio)")
        own = sum(instance.owner == peer.uid for instance in state.instances.values())
        if limits.max_instances is not None and own >= limits.max_instances:
            raise refuse(f"an instance beside the {own} that uid {peer.uid} has", str(limits.max_instances))

    def check_owner(self, peer: Peer, instance: Instance, what: str) -> None:
        """Only root and its owner may join or destroy an instance."""
        if peer.uid not in (0, instance.owner):
            owner = "root" if instance.owner == 0 else f"uid {instance.owner}"
            raise CommandError(errno.EPERM, f"{what}: instance {instance.id} belongs to {owner}")
