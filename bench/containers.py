"""What a container's start costs more through cgpu-runtime, with the distribution's Docker."""

import statistics
import sys
import time
from functools import partial

import engines
import pytest  # tests/support says by it why something cannot be had
from node import wait_until
from programs import Bench
from world import SIX, World, docker_world

RUNS = 10


def docker(bench: Bench) -> None:
    """ms that `docker run --rm IMAGE true` takes longer than by runc alone, where it asks for a share and where not."""
    base = bench.scratch / "docker"
    base.mkdir(parents=True)
    try:
        runc = engines.fetch() / "usr/sbin/runc"
        with docker_world(base, chain=lambda folder, low_level: [runc]) as world:
            measure(bench, world)
    except pytest.skip.Exception as reason:
        print(f"docker: skipped: {reason}", file=sys.stderr)


def measure(bench: Bench, world: World) -> None:
    ways = {None: ("--network", "none", "--runtime", "runc"), False: ("--network", "none"), True: SIX}
    spent: dict[bool | None, list[float]] = {way: [] for way in ways}
    for way in ways:  # the first reads programs from the disk
        milliseconds(world, *ways[way])
    with bench.cell():
        for _ in range(RUNS):
            for way, options in ways.items():
                spent[way].append(milliseconds(world, *options))
                wait_until(partial(nothing_registered, world), "the container to be gone", every=0.01)
    for way in (True, False):
        added = [one - plain for one, plain in zip(spent[way], spent[None], strict=True)]
        bench.record("docker_added_ms", {"asks": way}, added, "ms", statistics.median(spent[None]))


def milliseconds(world: World, *options: str) -> float:
    begin = time.monotonic()
    world.docker("run", "--rm", *options, "tiny", "true")
    return (time.monotonic() - begin) * 1000


def nothing_registered(world: World) -> bool:
    return world.listed() == []
