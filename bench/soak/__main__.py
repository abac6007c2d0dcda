"""``make soak``: the daemon is killed and upgraded all the time, and nobody notices.

    python bench/soak [--seconds 600] [--changes 200] [--seed N] [--out FILE]

As root. A cgpud of its own on a simulated device, without systemd, with its keeper. Its load (load.py): two busy
programs at 1:2 and a loop of allocations in containers, two readers in containers and two on the host, and a writer
that verifies. Half of the changes are SIGKILLs, half are upgrades (``echo 1 > upgrade``), in random order and at random
moments. Prints a table with measured and must, writes all figures as JSON (default: bench/results/soak.json, after a
short run partial.json there), and ends with status 1 when one misses its must, 2 where there can be no containers.
docs/benchmarks.md says how each is measured.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import random
import signal
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "bench/soak"), str(ROOT / "bench"), str(ROOT / "tests/support")]
import changes  # noqa: E402
import engines  # noqa: E402
import figures  # noqa: E402
import records  # noqa: E402
from device import Device, Timeline  # noqa: E402
from load import ALLOCATING, WEIGHTS, Load  # noqa: E402
from node import Node, build_c, wait_until  # noqa: E402
from pytest import skip  # noqa: E402
from world import TOOLS, Bundles, low_level, node_over  # noqa: E402

from cgpufs.mount import can_resend  # noqa: E402
from cgpusched.driver.find import packaged  # noqa: E402

EACH_SECONDS = 3.0
"""The time of a change: 100 kills and 100 upgrades in 600 s."""
WHOLE_SECONDS = 600.0
SETTLE_SECONDS = 3.0
POLL_US = 20_000
"""How often the timeline looks: a device's queue of 1024 kernels of KERNEL_US lasts for half a second."""


def main() -> int:
    arguments = parse()
    if os.geteuid():
        sys.exit("soak: must run as root: it mounts a file system and makes containers")
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # so that all is ended, too
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="cgpu-soak-") as scratch:
        try:
            run = soak(Path(scratch), arguments.seconds, arguments.changes, random.Random(arguments.seed))
        except skip.Exception as reason:
            sys.stderr.write(f"soak: cannot run here: {reason}\n")
            return 2
    made = figures.records_of(run)
    print(f"\n{records.heading()}")
    for one in made:
        print(records.row(one))
    for line in run.wrong + [text for one in run.found for text in one.first]:
        print(f"wrong: {line}")
    records.write(made, arguments.out)
    print(f"{records.summary(made)}; {time.monotonic() - begin:.0f} s; seed {arguments.seed}")
    print(f"written to {arguments.out}")
    return 1 if any(one.missed for one in made) else 0


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.splitlines()[0])
    seconds = float(os.environ.get("SOAK_SECONDS") or WHOLE_SECONDS)
    parser.add_argument("--seconds", type=float, default=seconds, help="of the load (default: SOAK_SECONDS, or 600)")
    parser.add_argument("--changes", type=int, help=f"of daemons (default: one every {EACH_SECONDS:g} s)")
    parser.add_argument("--seed", type=int, default=random.randrange(1 << 32), help="picks another course")
    parser.add_argument("--out", type=Path, help="the JSON")
    arguments = parser.parse_args()
    arguments.changes = arguments.changes or max(2, round(arguments.seconds / EACH_SECONDS))
    name = "soak.json" if arguments.seconds >= WHOLE_SECONDS else "partial.json"
    arguments.out = arguments.out or ROOT / "bench/results" / name
    return arguments


def soak(scratch: Path, seconds: float, count: int, rng: random.Random) -> figures.Run:
    """The whole run. Leaves nothing behind."""
    root = engines.fetch()
    timeline = build_c(ROOT / "bench/timeline.c", scratch / "timeline", f"-I{ROOT}/csrc/sim", f"-I{ROOT}/csrc/abi")
    sim = packaged("sim/libcuda.so.1").parent
    busy = build_c(ROOT / "bench/load.c", scratch / "bin/load", f"-L{sim}", "-l:libcuda.so.1")
    programs = [*TOOLS, busy, build_c(ROOT / "bench/soak/user.c", scratch / "bin/user", "-Wall", "-Wextra", "-Werror")]
    with contextlib.ExitStack() as stack:
        parent = stack.enter_context(engines.cgroup_parent(f"cgpu-soak-{os.getpid()}"))
        node = stack.enter_context(node_over(root, scratch, "1x24GiB"))
        image = engines.image(scratch / "image.tar", programs)
        bundles = Bundles(node, low_level(root, scratch / "stand-ins"), scratch, image, parent)
        bundles.probe()
        node.write(2, 0, "policy")
        load = Load(node, bundles, scratch / "bin/user")
        stack.callback(load.close)
        load.start()
        daemon = changes.Mortal(node, WEIGHTS)
        stack.callback(daemon.close)
        daemon.wait_for_programs()
        time.sleep(SETTLE_SECONDS)
        run = figures.Run(seconds)
        with Timeline(timeline, device_of(node, daemon), scratch / "timeline.bin", POLL_US) as seen:
            begin = time.monotonic()
            # Without re-sending a kill ends what is under way with an error, as it must there.
            kinds = [changes.UPGRADE, changes.KILL if can_resend() else changes.UPGRADE]
            for at, what in changes.plan([kinds[k % 2] for k in range(count)], seconds, rng):
                time.sleep(max(0.0, begin + at - time.monotonic()))
                look(run, begin, node, load, daemon)
                run.changes.append(daemon.change(what))
                progress(run)
            time.sleep(max(0.0, begin + seconds - time.monotonic()))
            look(run, begin, node, load, daemon)
        run.wrong += [f"the program of container {ident} has ended" for ident in load.ended()]
        run.found = load.end()
        if seen.lost:
            run.wrong.append(f"the timeline missed {seen.lost} kernels")
        run.used = {ident: seen.runs.get(load.pids[ident], []) for ident in WEIGHTS}
        run.wrong += [f"in the daemon's log: {line}" for line in node.log.read_text().splitlines() if is_wrong(line)]
    return run


def device_of(node: Node, daemon: changes.Mortal) -> Device:
    path = node.runtime / "sim" / f"gpu-{str(daemon.gpu()['uuid']).removeprefix('GPU-')}.state"
    wait_until(path.exists, f"{path} to be made")
    return Device(path)


def look(run: figures.Run, begin: float, node: Node, load: Load, daemon: changes.Mortal) -> None:
    """Takes sizes, and what would be forgotten with the daemon."""
    assert node.daemon
    processes = {"daemon": node.daemon.pid, "keeper": changes.keeper_of(node), "program": load.pids["one"],
                 "allocations": load.pids[ALLOCATING]}
    for name, pid in processes.items():
        run.sizes.setdefault(name, []).append((time.monotonic() - begin, changes.size_of(pid)))
    run.ungated = max(run.ungated, daemon.gpu()["fallbacks"])


def progress(run: figures.Run) -> None:
    if len(run.changes) % 10 == 0:
        last = run.changes[-1]
        passed = (last.back_ns - last.end_ns) / figures.MS
        print(f"{len(run.changes)} changes, the last: {last.what}, {passed:.0f} ms", flush=True)


def is_wrong(line: str) -> bool:
    return " error " in line or " critical " in line or "Traceback" in line


if __name__ == "__main__":
    sys.exit(main())
