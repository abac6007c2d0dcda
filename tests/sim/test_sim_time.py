"""Device time: kernels, streams, events, host functions, queues that are full, graphs."""

from __future__ import annotations

from typing import Any


def test_durations_and_stamps(machine: Any) -> None:
    machine.run("""
context(); k = Kernels(); start, end = event(), event()
def span(function, times=1):
    cu.cuEventRecord(start, None); launch(function, times=times); cu.cuEventRecord(end, None)
    cu.cuEventSynchronize(end)
    return elapsed_ms(start, end)
assert 10.0 <= span(k.spin_us100, 100) < 11.0
assert 3.0 <= span(k.spin_ms3) < 4.0
assert 2.0 <= span(k.spin_ns200000, 10) < 3.0
assert 1.0 <= span(k.anything, 100) < 3.0                    # 10 us each by default
ns = c_ulonglong(4_000_000); params = (c_void_p * 1)(ctypes.addressof(ns))
cu.cuEventRecord(start, None); cu.cuLaunchKernel(k.cgpu_sleep_ns, 1, 1, 1, 1, 1, 1, 0, None, params, None)
cu.cuEventRecord(end, None); cu.cuEventSynchronize(end); assert 4.0 <= elapsed_ms(start, end) < 5.0
t = time.monotonic(); launch(k.spin_ms50); sync(); assert 0.050 <= time.monotonic() - t < 0.2
t = time.monotonic(); launch(k.spin_ms200); assert time.monotonic() - t < 0.1; sync()      # asynchronous
assert result(cu.cuLaunchKernel, k.anything, 0, 1, 1, 1, 1, 1, 0, None, None, None) == 1
assert result(cu.cuLaunchKernel, k.anything, 1, 1, 1, 2048, 1, 1, 0, None, None, None) == 1
""")
    machine.run("""
context(); k = Kernels(); start, end = event(), event()
cu.cuEventRecord(start, None); launch(k.anything, times=10); cu.cuEventRecord(end, None); cu.cuEventSynchronize(end)
assert 10.0 <= elapsed_ms(start, end) < 12.0
""", CGPU_SIM_KERNEL_NS="1000000")


def test_null_kernels_touch_nothing(machine: Any) -> None:
    machine.run("context(); launch(Kernels().cgpu_null, times=5000); sync()")
    total, _ = machine.busy()
    assert total == 0


def test_every_way_to_launch(machine: Any) -> None:
    machine.run("""
context(); f = Kernels().spin_us1000; s = stream(1)
class Config(ctypes.Structure):
    _fields_ = [("dims", c_uint * 7), ("stream", c_void_p), ("attrs", c_void_p), ("n", c_uint)]
class Multi(ctypes.Structure):
    _fields_ = [("f", c_void_p), ("dims", c_uint * 7), ("stream", c_void_p), ("params", c_void_p)]
ways = [lambda: cu.cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, s, None, None),
        lambda: cu.cuLaunchKernel_ptsz(f, 1, 1, 1, 1, 1, 1, 0, s, None, None),
        lambda: cu.cuLaunchKernelEx(byref(Config((c_uint * 7)(1, 1, 1, 1, 1, 1, 0), s.value)), f, None, None),
        lambda: cu.cuLaunchKernelEx_ptsz(byref(Config((c_uint * 7)(1, 1, 1, 1, 1, 1, 0), s.value)), f, None, None),
        lambda: cu.cuLaunchCooperativeKernel(f, 1, 1, 1, 1, 1, 1, 0, s, None),
        lambda: cu.cuLaunchCooperativeKernel_ptsz(f, 1, 1, 1, 1, 1, 1, 0, s, None),
        lambda: cu.cuLaunchCooperativeKernelMultiDevice(byref(Multi(f.value, (c_uint * 7)(1, 1, 1, 1, 1, 1, 0),
                                                                    s.value)), 1, 0),
        lambda: cu.cuLaunchGridAsync(f, 1, 1, s)]
for i, way in enumerate(ways):
    t = time.monotonic(); way(); cu.cuStreamSynchronize(s); assert 0.001 <= time.monotonic() - t < 0.1, i
for way in (lambda: cu.cuLaunch(f), lambda: cu.cuLaunchGrid(f, 2, 2)):
    t = time.monotonic(); way(); sync(); assert 0.001 <= time.monotonic() - t < 0.1
assert result(cu.cuLaunchCooperativeKernel, f, 10**6, 1, 1, 1024, 1, 1, 0, s, None) == 720
""")


def test_events(machine: Any) -> None:
    machine.run("""
context(); k = Kernels(); s = stream(1); e, never = event(), event()
assert result(cu.cuEventQuery, e) == 0                       # never recorded
assert result(cu.cuEventElapsedTime, byref(c_float()), e, never) == 400
launch(k.spin_ms50, s); cu.cuEventRecord(e, s)
assert result(cu.cuEventQuery, e) == 600 and result(cu.cuStreamQuery, s) == 600
assert result(cu.cuEventElapsedTime, byref(c_float()), e, e) == 600
cu.cuEventSynchronize(e); assert result(cu.cuEventQuery, e) == 0 == result(cu.cuStreamQuery, s)
quiet = event(2); cu.cuEventRecord(quiet, s); cu.cuStreamSynchronize(s)
assert result(cu.cuEventElapsedTime, byref(c_float()), quiet, e) == 400
cu.cuEventRecord(e, s); cu.cuEventDestroy_v2(e); assert result(cu.cuEventQuery, e) == 400    # destroyed while pending
cu.cuStreamSynchronize(s)
for _ in range(5000):                                        # objects are used again
    e = event(); cu.cuEventRecord(e, s); cu.cuEventDestroy_v2(e)
cu.cuStreamSynchronize(s)
""")


def test_streams_wait_for_each_other(machine: Any) -> None:
    machine.run("""
context(); k = Kernels(); a, b = stream(1), stream(1); e, start, end = event(), event(), event()
cu.cuEventRecord(start, b); launch(k.spin_ms20, a); cu.cuEventRecord(e, a)
cu.cuStreamWaitEvent(b, e, 0); cu.cuEventRecord(end, b); cu.cuStreamSynchronize(b)
assert 20.0 <= elapsed_ms(start, end) < 30.0
cu.cuEventRecord(start, b); launch(k.spin_ms20, a); cu.cuEventRecord(end, b); cu.cuEventSynchronize(end)
assert elapsed_ms(start, end) < 5.0                          # without a wait it does not
sync()
""")


def test_default_streams(machine: Any) -> None:
    machine.run("""
context(); k = Kernels(); blocking, free = stream(0), stream(1)
def ends(first, second, stream_of_second):
    start, end = event(), event()
    cu.cuEventRecord(start, stream_of_second); first(); second(); cu.cuEventRecord(end, stream_of_second)
    cu.cuEventSynchronize(end)
    sync(); return elapsed_ms(start, end)
def copy(on):                                                # takes no engine
    cu.cuMemcpyDtoDAsync_v2(p, p + 64, 64, on)
p = mem_alloc(128)
# legacy waits for blocking streams
assert ends(lambda: launch(k.spin_ms20, blocking), lambda: copy(None), None) >= 20
assert ends(lambda: launch(k.spin_ms20, None), lambda: copy(blocking), blocking) >= 20   # and they for it
assert ends(lambda: launch(k.spin_ms20, None), lambda: copy(free), free) < 10
assert ends(lambda: launch(k.spin_ms20, free), lambda: copy(None), None) < 10
own = c_void_p(2)
assert ends(lambda: launch(k.spin_ms20, None), lambda: copy(own), own) >= 20             # per-thread: a blocking stream
t = time.monotonic(); cu.cuLaunchKernel_ptsz(k.spin_ms50, 1, 1, 1, 1, 1, 1, 0, None, None, None)
cu.cuStreamSynchronize_ptsz(None); assert time.monotonic() - t >= 0.05
""")


def test_priorities(machine: Any) -> None:
    machine.run("""
context(); k = Kernels(); low, high = stream(1, 0), stream(1, -5); e = event(); least, most = c_int(), c_int()
cu.cuCtxGetStreamPriorityRange(byref(least), byref(most)); assert (least.value, most.value) == (0, -5)
launch(k.spin_ms5, low, 20); launch(k.spin_ms5, high); cu.cuEventRecord(e, high); t = time.monotonic()
cu.cuEventSynchronize(e)
assert time.monotonic() - t < 0.05                            # after the kernel that runs, not after all 20
sync()
""")


def test_host_functions_run_in_order_on_a_thread_of_the_driver(machine: Any) -> None:
    machine.run("""
import threading
context(); k = Kernels(); s = stream(1); seen = []; p = mem_alloc(4); pinned = c_void_p()
cu.cuMemHostAlloc(byref(pinned), 4, 0)
@HOST_FN
def note(data):
    seen.append((data, threading.get_native_id(), ctypes.string_at(pinned, 1), result(cu.cuCtxSynchronize)))
    time.sleep(0.01)
for i in range(1, 6):
    launch(k.spin_us100, s); cu.cuMemsetD8Async(p, i, 4, s); cu.cuMemcpyDtoHAsync_v2(pinned, p, 4, s)
    cu.cuLaunchHostFunc(s, note, i)
t = time.monotonic(); cu.cuStreamSynchronize(s)
assert time.monotonic() - t >= 0.04                           # they hold the stream
assert [x[0] for x in seen] == [1, 2, 3, 4, 5] and [x[2][0] for x in seen] == [1, 2, 3, 4, 5]
assert {x[1] for x in seen} != {threading.get_native_id()} and len({x[1] for x in seen}) == 1
assert {x[3] for x in seen} == {800}                          # no calls from there
callback = ctypes.CFUNCTYPE(None, c_void_p, c_int, c_void_p)(lambda stream, status, data: seen.append(status))
cu.cuStreamAddCallback(s, callback, None, 0); cu.cuStreamSynchronize(s); assert seen[-1] == 0
""")


def test_pinned_memory_changes_without_anybody_waiting(machine: Any) -> None:
    machine.run("""
context(); s = stream(1); p = mem_alloc(4096); pinned = c_void_p(); cu.cuMemHostAlloc(byref(pinned), 4096, 0)
cu.cuMemsetD8Async(p, 9, 4096, s); cu.cuMemcpyDtoHAsync_v2(pinned, p, 4096, s)
deadline = time.monotonic() + 10
while ctypes.string_at(pinned, 1) != b"\\x09":
    assert time.monotonic() < deadline
""")


def test_a_full_queue_blocks(machine: Any) -> None:
    machine.run("""
context(); k = Kernels(); s = stream(1); f = k.spin_us500
t = time.monotonic(); launch(f, s, 1000); assert time.monotonic() - t < 0.25       # room for 1024
launch(f, s, 1000); assert time.monotonic() - t >= 0.45                            # the rest had to wait
cu.cuStreamSynchronize(s); assert 1.0 <= time.monotonic() - t < 1.5
""")


def test_graphs(machine: Any) -> None:
    machine.run("""
context(); k = Kernels(); s, other = stream(1), stream(1); start, end, fork, join = event(), event(), event(), event()
p = mem_alloc(64); pinned = c_void_p(); cu.cuMemHostAlloc(byref(pinned), 64, 0); seen = []
g, x, status, n = c_void_p(), c_void_p(), c_int(), c_size_t()
note = HOST_FN(lambda data: seen.append(ctypes.string_at(pinned, 1)[0]))
cu.cuStreamBeginCapture_v2(s, 0)
cu.cuStreamIsCapturing(s, byref(status)); assert status.value == 1
launch(k.spin_ms2, s); launch(k.spin_ms3, s); cu.cuMemsetD8Async(p, 42, 64, s)
cu.cuEventRecord(fork, s); cu.cuStreamWaitEvent(other, fork, 0)
cu.cuStreamIsCapturing(other, byref(status)); assert status.value == 1
cu.cuMemcpyDtoHAsync_v2(pinned, p, 64, other); cu.cuEventRecord(join, other); cu.cuStreamWaitEvent(s, join, 0)
cu.cuLaunchHostFunc(s, note, None)
assert result(cu.cuEventQuery, fork) == 907
cu.cuStreamEndCapture(s, byref(g))
cu.cuStreamIsCapturing(other, byref(status)); assert status.value == 0
cu.cuGraphGetNodes(g, None, byref(n)); assert n.value == 5 and seen == []
cu.cuGraphInstantiateWithFlags(byref(x), g, 0); cu.cuGraphDestroy(g); cu.cuGraphUpload(x, s)
for i in (1, 2):
    ctypes.memset(pinned, 0, 64)
    cu.cuEventRecord(start, s); cu.cuGraphLaunch(x, s); cu.cuEventRecord(end, s); cu.cuEventSynchronize(end)
    assert 5.0 <= elapsed_ms(start, end) < 50 and seen == [42] * i
cu.cuGraphExecDestroy(x); assert result(cu.cuGraphLaunch, x, s) == 1
""")


def test_graphs_by_hand(machine: Any) -> None:
    machine.run("""
context(); k = Kernels(); s = stream(1); g, x = c_void_p(), c_void_p(); a, b, c = c_void_p(), c_void_p(), c_void_p()
class Kernel(ctypes.Structure):
    _fields_ = [("f", c_void_p), ("dims", c_uint * 7), ("params", c_void_p), ("extra", c_void_p), ("kern", c_void_p),
                ("ctx", c_void_p)]
kernel = Kernel(k.spin_ms2.value, (c_uint * 7)(1, 1, 1, 1, 1, 1, 0))
cu.cuGraphCreate(byref(g), 0)
cu.cuGraphAddEmptyNode(byref(a), g, None, 0)
cu.cuGraphAddKernelNode_v2(byref(b), g, byref(a), 1, byref(kernel))
cu.cuGraphAddKernelNode(byref(c), g, byref(b), 1, byref(kernel))
cu.cuGraphInstantiateWithFlags(byref(x), g, 0)
t = time.monotonic(); cu.cuGraphLaunch(x, s); cu.cuStreamSynchronize(s); assert 0.004 <= time.monotonic() - t < 0.1
cu.cuGraphAddDependencies(g, byref(c), byref(a), 1)
assert result(cu.cuGraphInstantiateWithFlags, byref(c_void_p()), g, 0) == 1       # a cycle
assert result(cu.cuGraphAddEmptyNode, byref(a), g, byref(x), 1) == 1
copy = c_void_p(); cu.cuGraphClone(byref(copy), g); cu.cuGraphDestroy(copy)
cu.cuGraphDestroy(g); cu.cuGraphExecDestroy(x)
""")


def test_what_a_capture_forbids(machine: Any) -> None:
    machine.run("""
context(); k = Kernels(); s, blocking = stream(1), stream(0); g = c_void_p(); p = mem_alloc(64)
def during(call, on=s, mode=0):
    cu.cuStreamBeginCapture_v2(on, mode); code = result(call); return code, result(cu.cuStreamEndCapture, on, byref(g))
assert during(lambda: cu.cuStreamSynchronize(s)) == (900, 901)
assert during(lambda: cu.cuStreamQuery(s)) == (900, 901)
assert during(lambda: mem_alloc(64)) == (900, 901)
assert during(lambda: mem_alloc(64), mode=2)[0] == 0                  # relaxed
assert during(lambda: launch(k.spin_us1), blocking) == (906, 901)     # the legacy stream behind a blocking one's back
assert during(lambda: launch(k.spin_us1)) == (0, 0)                   # a non-blocking one does not care
assert during(lambda: cu.cuMemcpyDtoD_v2(p, p + 8, 8), blocking) == (906, 901)
assert during(lambda: cu.cuStreamBeginCapture_v2(s, 0)) == (401, 0)
assert result(cu.cuStreamEndCapture, s, byref(g)) == 401
assert result(cu.cuStreamBeginCapture_v2, None, 0) == 900
e, other = event(), stream(1)
def unjoined():
    cu.cuEventRecord(e, s); cu.cuStreamWaitEvent(other, e, 0); launch(k.spin_us1, other)
assert during(unjoined) == (0, 904)
import threading
cu.cuStreamBeginCapture_v2(s, 1); codes = []
def elsewhere():
    context(); codes.extend([result(mem_alloc, 64), result(cu.cuStreamEndCapture, s, byref(g))])
thread = threading.Thread(target=elsewhere); thread.start(); thread.join()
assert codes == [0, 908]                                              # thread-local: others may allocate, not end it
assert result(cu.cuStreamEndCapture, s, byref(g)) == 0
sync()
""")
