"""Memory: the quota, the context's own part of it, and what a death gives back."""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

from daemon import Failed, Site, until
from machine import HERE, Skip
from results import Recorder

MIB, GIB = 1 << 20, 1 << 30
OUT_OF_MEMORY = 2


def quota_of(site: Site) -> int:
    """A quarter of the card, at most 8 GiB, in steps of 64 MiB."""
    return min(8 * GIB, site.machine.memory // 4) // (64 * MIB) * (64 * MIB)


def fill(site: Site, ident: str) -> dict[str, int]:
    words = site.run(ident, site.machine.programs["memory"], "fill").split()
    return dict(zip(("total", "free", "device_total", "over", "granted"), map(int, words), strict=True))


def demand(condition: bool, text: str) -> None:
    if not condition:
        raise Failed(text)


def quota(site: Site, record: Recorder) -> None:
    """A program is told the quota, gets no more than that, and nearly all of it; two processes share it."""
    size = quota_of(site)
    ident = site.create(size)
    told = fill(site, ident)
    demand(told["total"] == size, f"cuMemGetInfo says {told['total']} in all, the quota is {size}")
    demand(told["device_total"] == size, f"cuDeviceTotalMem says {told['device_total']}, the quota is {size}")
    demand(told["over"] == OUT_OF_MEMORY, f"an allocation of more than the quota gave {told['over']}")
    demand(told["granted"] <= size, f"{told['granted']} bytes were granted, the quota is {size}")
    record.figure("quota_granted", told["granted"] / MIB, "MiB", {"quota_mib": size // MIB}, least=(size - GIB) / MIB)
    until(lambda: site.usage(ident)["mem_used"] == 0, "the first one's memory to come back")
    holder = site.start(ident, site.machine.programs["memory"], "hold", size // 2)
    assert holder.stdout
    demand(holder.stdout.readline().strip() == "0", "half of the quota was refused")
    beside = fill(site, ident)
    demand(beside["granted"] <= size - size // 2, f"{beside['granted']} bytes were granted beside half of {size}")
    record.figure("quota_granted_beside", beside["granted"] / MIB, "MiB", {"held_mib": size // 2 // MIB})
    holder.communicate()


def nvml_processes(site: Site) -> dict[int, int | None]:
    """Bytes that the real NVML has for each process on GPU 0; None where it does not say."""
    shown = site.json(None, sys.executable, HERE / "programs/nvml_program.py",
                      PYTHONPATH=":".join(site.machine.python_path))
    return dict(shown["processes"])


def context(site: Site, record: Recorder) -> None:
    """What a context takes by itself counts against the quota."""
    ident = site.create(quota_of(site))
    holder = site.start(ident, site.machine.programs["memory"], "hold", 0)
    assert holder.stdout
    demand(holder.stdout.readline().strip() == "0", "a context was refused")
    seen = nvml_processes(site).get(holder.pid, -1)
    if seen == -1:
        raise Skip(f"NVML does not list pid {holder.pid} (another PID namespace?)")
    if not seen:
        raise Skip("NVML says nothing of what a process uses")
    deadline, counted = time.monotonic() + 10, 0
    while time.monotonic() < deadline and counted < 0.9 * seen:
        counted = site.usage(ident)["mem_used"]
        time.sleep(0.1)
    real = seen / MIB
    record.figure("context_counted", counted / MIB, "MiB", {}, real, least=0.9 * real, most=1.1 * real)
    holder.communicate()


def killed(site: Site, record: Recorder) -> None:
    """The memory of a process that is killed is there for the next one, at once."""
    size = quota_of(site)
    ident = site.create(size)
    took = []
    for _ in range(3):
        holder = site.start(ident, site.machine.programs["memory"], "hold", size // 2)
        assert holder.stdout
        demand(holder.stdout.readline().strip() == "0", "half of the quota was refused")
        demand(site.usage(ident)["mem_used"] >= size // 2, "what it holds is not counted")
        holder.kill()
        begin = time.monotonic()
        until(lambda: site.usage(ident)["mem_used"] == 0, "a killed process's memory to come back")
        took.append(1000 * (time.monotonic() - begin))
    record.figure("kill_to_free", took, "ms", {"held_mib": size // 2 // MIB})
    demand(fill(site, ident)["granted"] > size // 2, "what the killed process held is not to be had")


def resized(site: Site, record: Recorder) -> None:
    """memsize written while a program runs holds from the next call on."""
    if site.machine.fuse:
        raise Skip(f"there is no tree: {site.machine.fuse}")
    size = quota_of(site)
    ident = site.create(size)
    file = Path(site.machine.tree) / "0" / ident[:12] / "memsize"
    holder = site.start(ident, site.machine.programs["memory"], "hold", 64 * MIB)
    assert holder.stdout
    holder.stdout.readline()
    for new in (size // 2, size):
        file.write_text(f"{new}\n")
        told = fill(site, ident)
        demand(told["total"] == new, f"memsize is {new}, a program is told {told['total']}")
        demand(told["granted"] <= new - 64 * MIB, f"{told['granted']} bytes were granted beside 64 MiB of {new}")
    holder.communicate()


def nvml(site: Site, record: Recorder) -> None:
    """pynvml shows the quota, and the instance's own processes only."""
    size = quota_of(site)
    ident = site.create(size)
    own = site.start(ident, site.machine.programs["memory"], "hold", 256 * MIB)
    other = site.start(site.create(size), site.machine.programs["memory"], "hold", 128 * MIB)
    for program in (own, other):
        assert program.stdout
        demand(program.stdout.readline().strip() == "0", "an allocation within the quota was refused")
    shown = site.json(ident, sys.executable, HERE / "programs/nvml_program.py",
                      PYTHONPATH=":".join(site.machine.python_path))
    demand(shown["total"] == size, f"NVML says {shown['total']} in all, the quota is {size}")
    demand(256 * MIB <= shown["used"] <= size, f"NVML says {shown['used']} in use")
    pids = [pid for pid, _ in shown["processes"]]
    demand(other.pid not in pids, "NVML shows another instance's process")
    record.note(f"pynvml: {json.dumps(shown)}")


def nvidia_smi(site: Site, record: Recorder) -> None:
    """The real nvidia-smi shows the quota."""
    if not site.machine.nvidia_smi:
        raise Skip("no nvidia-smi on PATH")
    size = quota_of(site)
    ident = site.create(size)
    own = site.start(ident, site.machine.programs["memory"], "hold", 256 * MIB)
    assert own.stdout
    own.stdout.readline()
    query = "--query-gpu=memory.total,memory.used,memory.free", "--format=csv,noheader,nounits"
    total, used, free = map(int, site.run(ident, site.machine.nvidia_smi, *query, seconds=30).split("\n")[0].split(","))
    record.figure("nvidia_smi_total", total, "MiB", {"quota_mib": size // MIB})
    demand(total == size // MIB, f"nvidia-smi says {total} MiB in all, the quota is {size // MIB}")
    demand(256 <= used <= total and used + free <= total + 1, f"nvidia-smi says {used} MiB used and {free} free")
    plain = site.run(ident, site.machine.nvidia_smi, seconds=30)
    demand(f"{total}MiB" in plain.replace(" ", ""), "the plain nvidia-smi does not show the quota")
    record.note("nvidia-smi: " + next((line.strip() for line in plain.splitlines() if "MiB /" in line), "?"))
    own.communicate()
