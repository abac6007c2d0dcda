"""Programs and libraries as they are, behind the proxies."""

from __future__ import annotations

from check_memory import GIB, OUT_OF_MEMORY, demand, quota_of
from check_time import framework
from daemon import Site
from machine import HERE, Skip
from results import Recorder

TORCH = HERE / "programs/torch_program.py"
LIBRARIES = HERE / "programs/libraries_program.py"
FOREVER_NS = 1 << 62


def graphs(site: Site, record: Recorder) -> None:
    """A capture that lasts longer than a turn, and the graph's replay: alone, and beside a program that never rests."""
    memory, load = site.machine.programs["memory"], site.machine.programs["load"]
    ident = site.create(quota_of(site))
    want = 0 if site.machine.simulated else 20 * 100  # the simulated kernels count nothing
    alone = int(site.run(ident, memory, "graph", 100))
    with site.neighbour(site.create(quota_of(site)), load, "spin", 200, FOREVER_NS, FOREVER_NS):
        beside = int(site.run(ident, memory, "graph", 100))
    demand((alone, beside) == (want, want), f"{alone} and, beside another, {beside} of {want} kernels of a graph ran")


def library(site: Site, record: Recorder, name: str) -> None:
    if site.machine.simulated:
        raise Skip("simulated: kernels of real libraries do not run there")
    if name not in site.machine.libraries:
        raise Skip(f"no lib{name} on this machine")
    python = next(iter(site.machine.pythons.values()), "python3")
    size = quota_of(site)
    shown = site.json(site.create(size), python, LIBRARIES, name, site.machine.libraries[name], libraries=True)
    record.note(f"{name} {shown['version']}: {site.machine.libraries[name]}")
    demand(shown["right"], f"{name}: wrong results")
    if name == "cudart":
        demand(shown["total"] == size, f"cudaMemGetInfo says {shown['total']}, the quota is {size}")
        demand(shown["over"] == OUT_OF_MEMORY, f"cudaMalloc of more than the quota gave {shown['over']}")


def cudart(site: Site, record: Recorder) -> None:
    """The CUDA runtime."""
    library(site, record, "cudart")


def cublas(site: Site, record: Recorder) -> None:
    """cuBLAS."""
    library(site, record, "cublas")


def module(site: Site, record: Recorder, name: str) -> None:
    python, size = framework(site, name), quota_of(site)
    shown = site.json(site.create(size), python, LIBRARIES, name)
    record.note(f"{name} {shown['version']}: {python}")
    demand(shown["right"], f"{name}: wrong results")
    demand(shown["total"] == size, f"{name} is told {shown['total']}, the quota is {size}")
    demand(shown.get("over") != "granted", f"{name} was granted more than the quota")


def cupy(site: Site, record: Recorder) -> None:
    """CuPy: an array, a kernel compiled by NVRTC, its OutOfMemoryError."""
    module(site, record, "cupy")


def numba(site: Site, record: Recorder) -> None:
    """numba-cuda: a kernel compiled by NVVM."""
    module(site, record, "numba")


def torch(site: Site, record: Recorder) -> None:
    """PyTorch: results, what it is told, streams, events, graphs."""
    python, size = framework(site, "torch"), quota_of(site)
    ident = site.create(size)
    shown = site.json(ident, python, TORCH, "basic")
    record.note(f"torch {shown['torch']}: {python}")
    demand(shown["right"], "torch: wrong results")
    demand(shown["total"] == size and shown["properties_total"] == size,
           f"torch is told {shown['total']} and {shown['properties_total']}, the quota is {size}")
    demand(site.json(ident, python, TORCH, "graph")["right"], "torch: a graph's replay gave wrong results")
    with site.neighbour(site.create(size), site.machine.programs["load"], "spin", 200, FOREVER_NS, FOREVER_NS):
        demand(site.json(ident, python, TORCH, "graph")["right"], "torch: a graph's replay beside another was wrong")


def torch_oom(site: Site, record: Recorder) -> None:
    """PyTorch's OutOfMemoryError names the quota, with each of its three allocators."""
    python, size = framework(site, "torch"), quota_of(site)
    ident = site.create(size)
    for config in ("backend:native", "backend:cudaMallocAsync", "expandable_segments:True"):
        shown = site.json(ident, python, TORCH, "oom", PYTORCH_CUDA_ALLOC_CONF=config)
        record.note(f"{config}: {shown['message'].splitlines()[0]}")
        demand(f"{size / GIB:.2f} GiB" in shown["message"], f"{config}: the message does not name the quota")
        demand(shown["granted"] <= size, f"{config}: {shown['granted']} bytes were granted, the quota is {size}")
        demand(shown["works_after"], f"{config}: nothing works after it")
        record.figure("torch_granted", shown["granted"] / (1 << 20), "MiB", {"allocator": config})
