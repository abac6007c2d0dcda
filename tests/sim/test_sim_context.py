"""Devices, contexts and the stacks of them, modules and functions, fork."""

from __future__ import annotations

from typing import Any

A, B = "GPU-aaaaaaaa-1111-2222-3333-444444444444", "GPU-aabbbbbb-1111-2222-3333-444444444444"


def two(machine: Any) -> None:
    machine.configure("# a comment", f"{A} 1073741824 Big one", f"{B} 536870912 Small one")


def test_devices(machine: Any) -> None:
    two(machine)
    machine.run("""
cu.cuInit(0)
n, value, size = c_int(), c_int(), c_size_t()
name, uuid = ctypes.create_string_buffer(64), ctypes.create_string_buffer(16)
cu.cuDeviceGetCount(byref(n)); assert n.value == 2
cu.cuDeviceGetName(name, 64, 1); assert name.value == b"Small one"
cu.cuDeviceTotalMem_v2(byref(size), 1); assert size.value == 512 * MIB
cu.cuDeviceGetUuid_v2(uuid, 1); assert uuid.raw.hex() == "aabbbbbb111122223333444444444444"
cu.cuDeviceGetAttribute(byref(value), 75, 0); assert value.value == 9
cu.cuDeviceGetPCIBusId(name, 64, 1); assert name.value == b"0000:02:00.0"
cu.cuDeviceGetByPCIBusId(byref(value), c_char_p(b"0000:02:00.0")); assert value.value == 1
assert result(cu.cuDeviceGet, byref(n), 2) == 101
assert result(cu.cuDeviceGetAttribute, byref(n), 9999, 0) == 1
""")


def test_total_memory_of_the_old_variant_is_clamped(machine: Any) -> None:
    machine.run("cu.cuInit(0); n = c_uint(); cu.cuDeviceTotalMem(byref(n), 0); assert n.value == 2**32 - 1")


def test_bad_configuration_is_no_device(machine: Any) -> None:
    machine.configure(f"{A} much Bad")
    machine.run("assert result(cu.cuInit, 0) == 100")


def test_visible_devices(machine: Any) -> None:
    two(machine)
    ask = """
code, names = result(cu.cuInit, 0), []
n = c_int()
if not code:
    cu.cuDeviceGetCount(byref(n))
for i in range(n.value):
    name = ctypes.create_string_buffer(64)
    cu.cuDeviceGetName(name, 64, i)
    names.append(name.value.decode().split()[0])
print(code, *names)
"""
    expected = {"0": "0 Big", "1": "0 Small", "1,0": "0 Small Big", "0,7,1": "0 Big", "": "100", "-1": "100",
                "0,0": "100", A: "0 Big", "GPU-aab": "0 Small", "GPU-aa": "100", "GPU-zz": "100",
                f"{B},{A}": "0 Small Big"}
    for value, answer in expected.items():
        assert machine.run(ask, CUDA_VISIBLE_DEVICES=value).strip() == answer, value
    assert machine.run(ask).strip() == "0 Big Small"


def test_context_stack(machine: Any) -> None:
    machine.run("""
cu.cuInit(0)
a, b, now = c_void_p(), c_void_p(), c_void_p()
assert result(cu.cuMemAlloc_v2, byref(c_ulonglong()), 1) == 201
cu.cuCtxCreate_v2(byref(a), 0, 0)
cu.cuCtxCreate_v4(byref(b), None, 0, 0)
cu.cuCtxGetCurrent(byref(now)); assert now.value == b.value
cu.cuCtxPopCurrent_v2(byref(now)); assert now.value == b.value
cu.cuCtxGetCurrent(byref(now)); assert now.value == a.value
cu.cuCtxSetCurrent(b); cu.cuCtxGetCurrent(byref(now)); assert now.value == b.value
cu.cuCtxPopCurrent_v2(None)
assert result(cu.cuCtxPopCurrent_v2, None) == 201
cu.cuCtxPushCurrent_v2(a); cu.cuCtxDestroy_v2(a)
cu.cuCtxGetCurrent(byref(now)); assert now.value is None          # destroying pops
assert result(cu.cuCtxSetCurrent, a) == 201
cu.cuCtxPushCurrent_v2(b); cu.cuCtxPushCurrent_v2(b); cu.cuCtxDestroy_v2(b)
assert result(cu.cuMemAlloc_v2, byref(c_ulonglong()), 1) == 709   # current, but destroyed
import threading
codes = []
thread = threading.Thread(target=lambda: codes.append(result(cu.cuCtxSynchronize)))
thread.start(); thread.join(); assert codes == [201]              # a stack a thread
""")


def test_primary_context(machine: Any) -> None:
    machine.run("""
ctx, again, flags, active = context(), c_void_p(), c_uint(), c_int()
cu.cuDevicePrimaryCtxRetain(byref(again), 0); assert again.value == ctx.value
assert result(cu.cuCtxDestroy_v2, ctx) == 201
mem_alloc(MIB); free, total = c_size_t(), c_size_t()
cu.cuDevicePrimaryCtxRelease_v2(0)
cu.cuDevicePrimaryCtxGetState(0, byref(flags), byref(active)); assert active.value == 1
cu.cuDevicePrimaryCtxRelease_v2(0)
cu.cuDevicePrimaryCtxGetState(0, byref(flags), byref(active)); assert active.value == 0
assert result(cu.cuDevicePrimaryCtxRelease_v2, 0) == 201
assert result(cu.cuCtxSynchronize) == 709
cu.cuDevicePrimaryCtxRetain(byref(again), 0); assert again.value == ctx.value
cu.cuCtxSetCurrent(again)
cu.cuMemGetInfo_v2(byref(free), byref(total)); assert free.value == total.value   # what it owned is gone
mem_alloc(MIB); cu.cuDevicePrimaryCtxReset_v2(0)
cu.cuMemGetInfo_v2(byref(free), byref(total)); assert free.value == total.value
""")


def test_modules(machine: Any) -> None:
    ptx = (".version 8.0\n.target sm_90\n// .entry not_this\n.global .align 4 .b8 table[256];\n.global .u64 counter;\n"
           ".visible .entry one(.param .u64 p)\n{\n .reg .b32 r; ret;\n}\n.func helper() { ret; }\n"
           ".entry two_us7() { ret; }\n")
    machine.run(f"PTX = {ptx!r}.encode()" + """
context()
m, f, n, p, size = c_void_p(), c_void_p(), c_uint(), c_ulonglong(), c_size_t()
cu.cuModuleLoadData(byref(m), c_char_p(PTX))
for name in (b"one", b"two_us7"):
    cu.cuModuleGetFunction(byref(f), m, c_char_p(name))
for name in (b"not_this", b"helper", b"three"):
    assert result(cu.cuModuleGetFunction, byref(f), m, c_char_p(name)) == 500
cu.cuModuleGetFunctionCount(byref(n), m); assert n.value == 2
cu.cuModuleGetGlobal_v2(byref(p), byref(size), m, c_char_p(b"table")); assert size.value == 256
cu.cuMemcpyHtoD_v2(p.value, c_char_p(b"x" * 256), 256)
cu.cuModuleGetGlobal_v2(byref(p), byref(size), m, c_char_p(b"counter")); assert size.value == 8
assert result(cu.cuModuleGetGlobal_v2, byref(p), byref(size), m, c_char_p(b"none")) == 500
cu.cuModuleUnload(m)
assert result(cu.cuModuleGetFunction, byref(f), m, c_char_p(b"one")) == 400
assert result(cu.cuModuleUnload, m) == 400
lib, k, name = c_void_p(), c_void_p(), c_char_p()
cu.cuLibraryLoadData(byref(lib), c_char_p(PTX), None, None, 0, None, None, 0)
cu.cuLibraryGetKernel(byref(k), lib, c_char_p(b"two_us7"))
cu.cuKernelGetFunction(byref(f), k); cu.cuFuncGetName(byref(name), f); assert name.value == b"two_us7"
cu.cuFuncGetAttribute(byref(n), 0, f); assert n.value == 1024
cu.cuOccupancyMaxActiveBlocksPerMultiprocessor(byref(n), f, 256, 0); assert n.value == 8
launch(f); sync(); launch(k); sync()
assert result(cu.cuModuleLoad, byref(m), c_char_p(b"/no/such/file")) == 301
cu.cuLibraryUnload(lib)
""")


def test_fork_after_init_is_refused_and_does_not_hang(machine: Any) -> None:
    machine.run("""
import threading
context(); k = Kernels(); stop = False
def busy():
    context()
    while not stop:
        launch(k.spin_us10); cu.cuMemFree_v2(mem_alloc(4096)); sync()
threads = [threading.Thread(target=busy) for _ in range(3)]
[t.start() for t in threads]
for _ in range(20):                      # whatever lock a thread holds right now
    child = os.fork()
    if not child:
        codes = {result(cu.cuInit, 0), result(cu.cuCtxSynchronize), result(cu.cuMemAlloc_v2, byref(c_ulonglong()), 1),
                 result(cu.cuDeviceGetCount, byref(c_int()))}
        os._exit(0 if codes == {3} else 1)
    assert os.waitpid(child, 0)[1] == 0
stop = True
[t.join() for t in threads]
assert nv().memory()[0] == 0
""")


def test_fork_before_init(machine: Any) -> None:
    machine.run("""
child = os.fork()
context(); launch(Kernels().spin_us10); sync()
if not child:
    os._exit(0)
assert os.waitpid(child, 0)[1] == 0
""")
