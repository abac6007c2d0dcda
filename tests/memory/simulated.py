"""A child of test_simulated_memory.py: random calls through the wrappers to the simulated driver.

    simulated.py LIBRARY FOLDER SEED STEPS

At every moment what is charged must cover what its NVML says that this process has, beyond what it had before its first
allocation, and not pass the quota; with all given back, it must be 0."""

from __future__ import annotations

import ctypes
import os
import random
import sys
from ctypes import byref, c_int, c_size_t, c_uint, c_uint64, c_ushort, c_void_p
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1] / "support")]
from conftest import GIB, MIB, OOM, ROOT, Hook  # noqa: E402

SIM = ROOT / "sched/cgpusched/lib/sim"
DEVICE, THRESHOLD = 1, 4


class MemProp(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", c_int), ("id", c_int), ("meta", c_void_p),
                ("flags", c_uint64)]


class PoolProps(ctypes.Structure):
    _fields_ = [("type", c_int), ("handles", c_int), ("location", c_int), ("id", c_int), ("security", c_void_p),
                ("most", c_size_t), ("usage", c_ushort), ("rest", ctypes.c_ubyte * 54)]


class AllocNode(ctypes.Structure):
    _fields_ = [("props", PoolProps), ("access", c_void_p), ("count", c_size_t), ("bytes", c_size_t), ("ptr", c_uint64)]


class Array(ctypes.Structure):
    _fields_ = [("width", c_size_t), ("height", c_size_t), ("depth", c_size_t), ("format", c_int), ("channels", c_uint),
                ("flags", c_uint)]


class Process(ctypes.Structure):
    _fields_ = [("pid", c_uint), ("used", c_uint64), ("instance", c_uint), ("compute", c_uint)]


class Program:
    """What is alive, by kind, and the random calls that make and end it."""

    def __init__(self, library: Path, folder: Path, seed: int, limit: int) -> None:
        self.hook = Hook(library, folder)
        self.hook.cards(1)
        self.hook.offer(0, limit=limit)
        self.hook.lib.stub_joins(1)
        self.real = ctypes.CDLL(str(SIM / "libcuda.so.1"))
        self.nvml = ctypes.CDLL(str(SIM / "libnvidia-ml.so.1"))
        assert self.nvml.nvmlInit_v2() == 0
        self.hook.lib.stub_bind_library(c_void_p(self.real._handle))
        assert self.hook.lib.hook_join(False)
        self.ok(self.hook.call("cuInit", 0))
        self.context = c_void_p()
        self.ok(self.hook.call("cuDevicePrimaryCtxRetain", byref(self.context), 0))
        self.ok(self.real.cuCtxSetCurrent(self.context))
        self.streams = [c_void_p(None)]
        for _ in range(2):
            stream = c_void_p()
            self.ok(self.real.cuStreamCreate(byref(stream), 1))
            self.streams.append(stream)
        self.device = c_void_p()
        assert self.nvml.nvmlDeviceGetHandleByIndex_v2(0, byref(self.device)) == 0
        self.limit, self.dice = limit, random.Random(seed)
        self.plain: list[int] = []
        self.pooled: list[int] = []
        self.handles: list[list[Any]] = []  # handle or None, address or None, bytes
        self.arrays: list[c_void_p] = []
        self.graphs: list[c_void_p] = []
        self.refused = 0
        self.before = self.card()
        self.pools = [c_void_p()]
        self.ok(self.real.cuDeviceGetDefaultMemPool(byref(self.pools[0]), 0))

    @staticmethod
    def ok(result: int) -> None:
        assert result == 0, result

    def call(self, name: str, *args: Any) -> bool:
        """False: refused for want of memory."""
        result = self.hook.call(name, *args)
        assert result in (0, OOM), (name, result)
        self.refused += result == OOM
        return result == 0

    def card(self) -> int:
        infos, count = (Process * 64)(), c_uint(64)
        self.ok(self.nvml.nvmlDeviceGetComputeRunningProcesses_v3(self.device, byref(count), infos))
        return sum(infos[i].used for i in range(count.value) if infos[i].pid == os.getpid())

    def size(self) -> int:
        return self.dice.choice([1, 4096, 300 * 1024, MIB, 3 * MIB, 20 * MIB, 60 * MIB])

    def pick(self, of: list[Any]) -> Any:
        return of.pop(self.dice.randrange(len(of)))

    # -- one step each --

    def alloc(self) -> None:
        ptr = c_uint64()
        if self.call("cuMemAlloc_v2", byref(ptr), c_size_t(self.size())):
            self.plain.append(ptr.value)

    def managed(self) -> None:
        ptr = c_uint64()
        if self.call("cuMemAllocManaged", byref(ptr), c_size_t(self.size()), c_uint(1)):
            self.plain.append(ptr.value)

    def pitch(self) -> None:
        ptr, pitch = c_uint64(), c_size_t()
        if self.call("cuMemAllocPitch_v2", byref(ptr), byref(pitch), c_size_t(1000),
                     c_size_t(self.dice.randrange(1, 9000)), c_uint(4)):
            self.plain.append(ptr.value)

    def free(self) -> None:
        if self.plain:
            self.ok(self.hook.call("cuMemFree_v2", c_uint64(self.pick(self.plain))))

    def alloc_async(self) -> None:
        ptr, pool = c_uint64(), self.dice.choice([*self.pools, None])
        more = () if pool is None else (pool,)
        name = "cuMemAllocFromPoolAsync" if more else "cuMemAllocAsync"
        if self.call(name, byref(ptr), c_size_t(self.size()), *more, self.dice.choice(self.streams)):
            self.pooled.append(ptr.value)

    def free_async(self) -> None:
        if self.pooled and self.dice.random() < 0.8:
            self.ok(self.hook.call("cuMemFreeAsync", c_uint64(self.pick(self.pooled)), self.dice.choice(self.streams)))
        elif self.pooled:
            self.ok(self.hook.call("cuMemFree_v2", c_uint64(self.pick(self.pooled))))

    def make_pool(self) -> None:
        pool = c_void_p()
        if len(self.pools) < 4:
            props = PoolProps(type=1, location=DEVICE)
            self.ok(self.hook.call("cuMemPoolCreate", byref(pool), byref(props)))
            self.pools.append(pool)

    def end_pool(self) -> None:
        if len(self.pools) > 1:
            self.ok(self.hook.call("cuMemPoolDestroy", self.pools.pop()))

    def trim(self) -> None:
        self.ok(self.hook.call("cuMemPoolTrimTo", self.dice.choice(self.pools), c_size_t(0)))

    def threshold(self) -> None:
        value = c_uint64(self.dice.choice([0, 8 * MIB, (1 << 64) - 1]))
        self.ok(self.hook.call("cuMemPoolSetAttribute", self.dice.choice(self.pools), THRESHOLD, byref(value)))

    def sync(self) -> None:
        self.ok(self.real.cuCtxSynchronize())
        self.hook.lib.pools_settle_unsettled(True)  # what sync.c does then

    def create(self) -> None:
        handle, size = c_uint64(), 2 * MIB * self.dice.randrange(1, 20)
        prop = MemProp(type=1, location=DEVICE)
        if self.call("cuMemCreate", byref(handle), c_size_t(size), byref(prop), c_uint64(0)):
            self.handles.append([handle.value, None, size])

    def map(self) -> None:
        unmapped = [one for one in self.handles if one[0] and not one[1]]
        if not unmapped:
            return
        one, at = self.dice.choice(unmapped), c_uint64()
        self.ok(self.real.cuMemAddressReserve(byref(at), c_size_t(one[2]), c_size_t(0), c_uint64(0), c_uint64(0)))
        self.ok(self.hook.call("cuMemMap", at, c_size_t(one[2]), c_size_t(0), c_uint64(one[0]), c_uint64(0)))
        one[1] = at.value

    def unmap(self) -> None:
        mapped = [one for one in self.handles if one[1]]
        if mapped:
            one = self.dice.choice(mapped)
            self.ok(self.hook.call("cuMemUnmap", c_uint64(one[1]), c_size_t(one[2])))
            self.ok(self.real.cuMemAddressFree(c_uint64(one[1]), c_size_t(one[2])))
            one[1] = None
            if not one[0]:
                self.handles.remove(one)

    def release(self) -> None:
        held = [one for one in self.handles if one[0]]
        if held:
            one = self.dice.choice(held)
            self.ok(self.hook.call("cuMemRelease", c_uint64(one[0])))
            one[0] = None
            if not one[1]:
                self.handles.remove(one)

    def retain(self) -> None:
        """One more reference to what only its mapping holds."""
        mapped = [one for one in self.handles if one[1] and not one[0]]
        if mapped:
            one, handle = self.dice.choice(mapped), c_uint64()
            self.ok(self.hook.call("cuMemRetainAllocationHandle", byref(handle), c_void_p(one[1])))
            one[0] = handle.value

    def array(self) -> None:
        array, d = c_void_p(), Array(self.dice.randrange(1, 3000), self.dice.randrange(1, 800), 0, 0x20, 4, 0)
        if self.call("cuArray3DCreate_v2", byref(array), byref(d)):
            self.arrays.append(array)

    def end_array(self) -> None:
        if self.arrays:
            self.ok(self.hook.call("cuArrayDestroy", self.pick(self.arrays)))

    def graph(self) -> None:
        graph, exec_ = c_void_p(), c_void_p()
        if len(self.graphs) == 6:
            return
        self.ok(self.real.cuGraphCreate(byref(graph), 0))
        after: list[c_void_p] = []
        for _ in range(self.dice.randrange(1, 4)):
            node, freed = c_void_p(), c_void_p()
            params = AllocNode(props=PoolProps(type=1, location=DEVICE), bytes=self.size())
            self.ok(self.hook.call("cuGraphAddMemAllocNode", byref(node), graph, (c_void_p * len(after))(*after),
                                   c_size_t(len(after)), byref(params)))
            self.ok(self.real.cuGraphAddMemFreeNode(byref(freed), graph, (c_void_p * 1)(node), c_size_t(1),
                                                    c_uint64(params.ptr)))
            after = [freed] if self.dice.random() < 0.5 else [node]
        self.ok(self.hook.call("cuGraphInstantiateWithFlags", byref(exec_), graph, c_uint64(0)))
        self.graphs.append(exec_)

    def launch(self) -> None:
        if self.graphs:
            real = ctypes.cast(self.real.cuGraphLaunch, c_void_p)
            stream = self.dice.choice(self.streams[1:])
            result = self.hook.lib.stub_launch_by(real, self.dice.choice(self.graphs), stream)
            assert result in (0, OOM), result

    def end_graph(self) -> None:
        if self.graphs:
            self.ok(self.hook.call("cuGraphExecDestroy", self.pick(self.graphs)))

    def trim_graphs(self) -> None:
        self.ok(self.hook.call("cuDeviceGraphMemTrim", 0))

    # -- all --

    def check(self, step: str) -> None:
        charged, card = self.hook.used(), self.card() - self.before
        assert card <= charged, f"{step}: the card has {card}, charged are {charged}"
        assert charged <= self.limit or "launch" in step, f"{step}: {charged} are charged of {self.limit}"

    def run(self, steps: int) -> None:
        makes = [self.alloc, self.managed, self.pitch, self.alloc_async, self.alloc_async, self.create, self.map,
                 self.array, self.graph, self.launch, self.make_pool, self.retain]
        ends = [self.free, self.free, self.free_async, self.free_async, self.release, self.unmap, self.end_array,
                self.end_graph, self.trim_graphs, self.trim, self.threshold, self.sync, self.end_pool]
        for n in range(steps):
            step = self.dice.choice(makes if self.dice.random() < 0.55 else ends)
            step()
            self.check(f"step {n} {step.__name__}")

    def end(self) -> None:
        for kind, step in ((self.plain, self.free), (self.arrays, self.end_array), (self.graphs, self.end_graph)):
            while kind:
                step()
        while self.pooled:
            self.free_async()
        while self.handles:
            self.release()
            self.unmap()
        self.sync()
        while len(self.pools) > 1:
            self.end_pool()
        self.sync()
        self.trim()
        self.trim_graphs()
        assert (self.hook.used(), self.card()) == (0, self.before)


if __name__ == "__main__":
    program = Program(Path(sys.argv[1]), Path(sys.argv[2]), int(sys.argv[3]), GIB // 4)
    program.run(int(sys.argv[4]))
    program.end()
    assert program.refused > 0  # the quota was reached on the way
