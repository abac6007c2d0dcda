"""What a GPU's memory holds that no call asked for: contexts and modules, as sim.conf says."""

from __future__ import annotations

from typing import Any

UUID = "GPU-aaaaaaaa-1111-2222-3333-444444444444"
LINE = f"{UUID} {1 << 30} context={300 << 20} module={4 << 20} Big one"
SEEN = """
n = nv()
def seen():
    '''What NVML says of this process, in MiB; cuMemGetInfo must agree.'''
    free, total = c_size_t(), c_size_t()
    cu.cuMemGetInfo_v2(byref(free), byref(total))
    own = n.processes()[os.getpid()]
    assert own == n.memory()[0] == total.value - free.value
    return own / MIB
"""


def test_contexts_and_modules(machine: Any) -> None:
    machine.configure(LINE)
    machine.run(SEEN + """
name = ctypes.create_string_buffer(64)
first = context(); cu.cuDeviceGetName(name, 64, 0); assert name.value == b"Big one"
assert seen() == 300
p = mem_alloc(MIB); assert seen() == 301
a, b = Kernels(), Kernels(); assert seen() == 309
cu.cuModuleUnload(a.module); assert seen() == 305
second = c_void_p(); cu.cuCtxCreate_v2(byref(second), 0, 0); assert seen() == 605
Kernels(); assert seen() == 609
assert result(cu.cuCtxCreate_v2, byref(c_void_p()), 0, 0) == 0 and seen() == 909
assert result(cu.cuCtxCreate_v2, byref(c_void_p()), 0, 0) == 2 and seen() == 909     # no fourth
cu.cuCtxDestroy_v2(second); cu.cuCtxSetCurrent(first); assert seen() == 605
cu.cuDevicePrimaryCtxReset_v2(0)
assert seen() == 600                                              # still retained: made anew, empty
cu.cuDevicePrimaryCtxRelease_v2(0)
assert n.processes()[os.getpid()] == 300 * MIB
""")


def test_a_library_is_in_the_context_that_uses_it_first(machine: Any) -> None:
    machine.configure(LINE)
    machine.run(SEEN + """
cu.cuInit(0); library, kernel = c_void_p(), c_void_p()
cu.cuLibraryLoadData(byref(library), c_char_p(b"an image"), None, None, 0, None, None, 0)
cu.cuLibraryGetKernel(byref(kernel), library, c_char_p(b"spin_us1"))
context(); assert seen() == 300
cu.cuLibraryGetKernel(byref(kernel), library, c_char_p(b"spin_us1")); assert seen() == 304
cu.cuLibraryGetKernel(byref(kernel), library, c_char_p(b"spin_us2")); assert seen() == 304
cu.cuDevicePrimaryCtxReset_v2(0); assert seen() == 300
cu.cuLibraryGetKernel(byref(kernel), library, c_char_p(b"spin_us1")); assert seen() == 304
cu.cuLibraryUnload(library); assert seen() == 300
""")


def test_a_process_may_say_otherwise(machine: Any) -> None:
    machine.configure(LINE)
    machine.run(SEEN + "context(); Kernels(); assert seen() == 6", CGPU_SIM_CONTEXT_BYTES=str(5 << 20),
                CGPU_SIM_MODULE_BYTES=str(1 << 20))


def test_no_figures_and_bad_ones(machine: Any) -> None:
    machine.configure(f"{UUID} {1 << 30} context=big")
    machine.run("assert result(cu.cuInit, 0) == 100")
    machine.configure(f"{UUID} {1 << 30} context")              # a name
    machine.run(SEEN + "context(); Kernels(); assert seen() == 0")
    machine.configure(f"{UUID} {1 << 30} module={1 << 20}")     # and the default name
    machine.run(SEEN + "context(); Kernels(); assert seen() == 1")


def test_a_killed_process_s_context_is_gone(machine: Any) -> None:
    machine.configure(LINE)
    child = machine.start("context(); Kernels(); print('ready', flush=True); input()")
    assert child.stdout.readline() == "ready\n"
    child.kill()
    child.wait()
    machine.run(SEEN + "context(); assert seen() == 300")
