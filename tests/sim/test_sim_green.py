"""Green contexts: parts of the multiprocessors, and a context, streams and events on one."""

from __future__ import annotations

from typing import Any

GREEN = """
INVALID_VALUE, NO_CONTEXT, BAD_HANDLE, DESTROYED = 1, 201, 400, 709
CAPTURING, BAD_TYPE, BAD_CONFIGURATION = 900, 914, 915

class Resource(ctypes.Structure):
    _fields_ = [("type", c_uint), ("padding", c_char * 92), ("sms", c_uint), ("least", c_uint), ("step", c_uint),
                ("rest", c_char * 36)]

def whole(device=0):
    resource = Resource()
    cu.cuDeviceGetDevResource(device, byref(resource), 1)
    return resource

def split(count, least, flags=0, of=None):
    groups, remainder, n = (Resource * count)(), Resource(), c_uint(count)
    cu.cuDevSmResourceSplitByCount(groups, byref(n), byref(of or whole()), byref(remainder), flags, least)
    return list(groups)[:n.value], remainder

def green(resource, device=0):
    desc, handle = c_void_p(), c_void_p()
    cu.cuDevResourceGenerateDesc(byref(desc), byref(resource), 1)
    cu.cuGreenCtxCreate(byref(handle), desc, device, 1)
    return handle

def of_green(handle):
    ctx = c_void_p()
    cu.cuCtxFromGreenCtx(byref(ctx), handle)
    return ctx

def green_stream(handle):
    made = c_void_p()
    cu.cuGreenCtxStreamCreate(byref(made), handle, 1, 0)
    return made

def active():
    flags, on = c_uint(), c_int()
    cu.cuDevicePrimaryCtxGetState(0, byref(flags), byref(on))
    return on.value
"""


def test_multiprocessors_are_split_in_steps(machine: Any) -> None:
    machine.run(GREEN + """
cu.cuInit(0)
assert (whole().sms, whole().least, whole().step) == (132, 8, 8)
groups, rest = split(3, 33)
assert ([one.sms for one in groups], rest.sms) == ([40, 40, 40], 12)
groups, rest = split(99, 16)
assert ([one.sms for one in groups], rest.sms) == ([16] * 8, 4)
assert [one.sms for one in split(99, 3, flags=1)[0]] == [4] * 33
n = c_uint()
cu.cuDevSmResourceSplitByCount(None, byref(n), byref(whole()), None, 0, 0)
assert n.value == 16
assert result(cu.cuDeviceGetDevResource, 0, byref(Resource()), 7) == BAD_TYPE
assert result(cu.cuDeviceGetDevResource, 9, byref(Resource()), 1) == 101
split_again = result(cu.cuDevSmResourceSplitByCount, None, byref(n), byref(groups[0]), None, 0, 8)
assert split_again == BAD_CONFIGURATION, "not before it is a context's"
assert result(cu.cuDevSmResourceSplitByCount, None, byref(n), byref(whole()), None, 0, 133) == BAD_CONFIGURATION
desc = c_void_p()
assert result(cu.cuDevResourceGenerateDesc, byref(desc), byref(Resource()), 1) == BAD_TYPE
two = (Resource * 2)(groups[0], groups[2])
assert result(cu.cuDevResourceGenerateDesc, byref(desc), two, 2) == BAD_CONFIGURATION
""")


def test_it_keeps_the_primary_context_which_its_memory_is_of(machine: Any) -> None:
    machine.run(GREEN + """
cu.cuInit(0)
(part, *_), _ = split(2, 64)
one, two = green(part), green(part)
assert active()
resource = Resource()
cu.cuGreenCtxGetDevResource(one, byref(resource), 1)
assert resource.sms == 64
cu.cuCtxGetDevResource(of_green(one), byref(resource), 1)
assert resource.sms == 64 and len(split(9, 8, of=resource)[0]) == 8
cu.cuCtxSetCurrent(of_green(one))
device = c_int(7)
cu.cuCtxGetDevice(byref(device))
assert device.value == 0
memory, made = mem_alloc(MIB), event()
assert result(cu.cuCtxDestroy_v2, of_green(one)) == NO_CONTEXT
ids = [c_ulonglong(), c_ulonglong()]
for handle, number in zip((one, two), ids):
    cu.cuGreenCtxGetId(handle, byref(number))
assert ids[0].value != ids[1].value
cu.cuGreenCtxDestroy(one)
assert result(cu.cuMemAlloc_v2, byref(c_ulonglong()), MIB) == DESTROYED
assert result(cu.cuCtxFromGreenCtx, byref(c_void_p()), one) == NO_CONTEXT
cu.cuCtxSetCurrent(of_green(two))
assert used() == MIB
cu.cuEventRecord(made, None)
cu.cuMemFree_v2(memory)
mem_alloc(MIB)
cu.cuGreenCtxDestroy(two)
assert not active() and nv().memory()[0] == 0, "the last one gave the primary context back, and it all"
""")


def test_streams_run_in_order_and_beside_each_other(machine: Any) -> None:
    machine.run(GREEN + """
primary = context()
kernels = Kernels()
(part, *_), _ = split(2, 64)
one = green(part)
assert result(cu.cuGreenCtxStreamCreate, byref(c_void_p()), one, 0, 0) == INVALID_VALUE
first, second = green_stream(one), green_stream(one)
of, ctx, plain = c_void_p(), c_void_p(), stream()
cu.cuStreamGetGreenCtx(first, byref(of))
cu.cuStreamGetCtx(first, byref(ctx))
assert of.value == one.value and ctx.value == of_green(one).value
cu.cuStreamGetCtx_v2(first, byref(ctx), byref(of))
assert of.value == one.value and ctx.value == primary.value
cu.cuStreamGetGreenCtx(plain, byref(of))
assert of.value is None
start, end = event(), event()
cu.cuEventRecord(start, first)
launch(kernels.spin_us2000, first, 2)
cu.cuEventRecord(end, first)
cu.cuEventSynchronize(end)
assert elapsed_ms(start, end) >= 4
""")


def test_an_event_of_all_its_streams(machine: Any) -> None:
    machine.run(GREEN + """
context()
kernels = Kernels()
(part, *_), _ = split(2, 64)
one, two = green(part), green(part)
first, second, other = green_stream(one), green_stream(one), green_stream(two)
made, after = event(), event()
launch(kernels.spin_us20000, first)
launch(kernels.spin_us20000, second)
cu.cuGreenCtxRecordEvent(one, made)
cu.cuGreenCtxWaitEvent(two, made)
launch(kernels.spin_us1, other)
cu.cuEventRecord(after, other)
assert result(cu.cuEventQuery, made) == 600
cu.cuEventSynchronize(after)
for each in (first, second):
    assert result(cu.cuStreamQuery, each) == 0, "what waits for the event waited for both"
assert result(cu.cuEventQuery, made) == 0
cu.cuStreamBeginCapture_v2(first, 2)
assert result(cu.cuGreenCtxRecordEvent, one, made) == CAPTURING
""")


def test_its_streams_are_detached_when_it_ends(machine: Any) -> None:
    machine.run(GREEN + """
context()
kernels = Kernels()
(part, *_), _ = split(2, 64)
one = green(part)
first, second = green_stream(one), green_stream(one)
launch(kernels.spin_us1, first)
cu.cuGreenCtxDestroy(one)
assert result(cu.cuStreamSynchronize, first) == DESTROYED
cu.cuStreamDestroy_v2(first)
assert result(cu.cuStreamDestroy_v2, first) == BAD_HANDLE
three = green(part)
cu.cuDevicePrimaryCtxReset_v2(0)
assert result(cu.cuCtxFromGreenCtx, byref(c_void_p()), three) == NO_CONTEXT
cu.cuGreenCtxDestroy(three)
cu.cuDevicePrimaryCtxRelease_v2(0)
assert not active()
""")
