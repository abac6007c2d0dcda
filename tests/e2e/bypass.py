"""A program that passes the hook by: it loads a driver library by path, and obeys one word a line on stdin.

``bypass.py LIBRARY``; ``alloc BYTES``, ``free``, ``exit``.
"""

import ctypes
import json
import os
import sys

cuda = ctypes.CDLL(sys.argv[1])
pointers: list[ctypes.c_uint64] = []


def check(result: int) -> None:
    if result:
        raise SystemExit(f"the driver says {result}")


def alloc(size: int) -> None:
    pointer = ctypes.c_uint64()
    check(cuda.cuMemAlloc_v2(ctypes.byref(pointer), ctypes.c_size_t(size)))
    pointers.append(pointer)


def free() -> None:
    check(cuda.cuMemFree_v2(pointers.pop()))


context = ctypes.c_void_p()
check(cuda.cuInit(0))
check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0))
check(cuda.cuCtxSetCurrent(context))
print(json.dumps({"pid": os.getpid()}), flush=True)
for line in sys.stdin:
    word, *arguments = line.split()
    if word == "exit":
        break
    {"alloc": alloc, "free": free}[word](*map(int, arguments))
    print("{}", flush=True)
