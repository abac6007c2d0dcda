"""A program that uses several GPUs: a line of JSON on what it sees, then what it is told, a line at a time.

``alloc DEVICE MIB``; ``launch DEVICE``: a kernel on a stream of its own, and waits for it, in a thread of its own;
``table DEVICE``: how many processes nvidia-smi's private table lists. Answers ``[COMMAND, DEVICE, RESULT]`` when it is
done.
"""

import ctypes
import json
import sys
import threading

cuda = ctypes.CDLL("libcuda.so.1")
PTX = b".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry spin_us1000()\n{\n ret;\n}\n"
SMI = bytes.fromhex("c4fe3e6cc98f6c4ea327ee696e12f7c4")
lock = threading.Lock()


class Device:
    def __init__(self, index: int) -> None:
        self.index = index
        self.context, self.function, self.stream = (ctypes.c_void_p() for _ in range(3))
        module, total, free, seen = ctypes.c_void_p(), ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_size_t()
        for result in (
            cuda.cuDevicePrimaryCtxRetain(ctypes.byref(self.context), index),
            cuda.cuCtxSetCurrent(self.context),
            cuda.cuModuleLoadData(ctypes.byref(module), PTX),
            cuda.cuModuleGetFunction(ctypes.byref(self.function), module, b"spin_us1000"),
            cuda.cuStreamCreate(ctypes.byref(self.stream), 1),
            cuda.cuDeviceTotalMem_v2(ctypes.byref(total), index),
            cuda.cuMemGetInfo_v2(ctypes.byref(free), ctypes.byref(seen)),
        ):
            assert result == 0, result
        self.totals = (total.value >> 20, seen.value >> 20)

    def alloc(self, mebibytes: int) -> int:
        cuda.cuCtxSetCurrent(self.context)
        return int(cuda.cuMemAlloc_v2(ctypes.byref(ctypes.c_uint64()), ctypes.c_size_t(mebibytes << 20)))

    def launch(self) -> int:
        cuda.cuCtxSetCurrent(self.context)
        result = cuda.cuLaunchKernel(self.function, 1, 1, 1, 1, 1, 1, 0, self.stream, None, None)
        return int(result or cuda.cuStreamSynchronize(self.stream))

    def table(self) -> int:
        """By index: the functions at places 81 and 213 of the table."""
        nvml, found = ctypes.CDLL("libnvidia-ml.so.1"), ctypes.POINTER(ctypes.c_void_p)()
        assert nvml.nvmlInit_v2() == 0
        assert nvml.nvmlInternalGetExportTable(ctypes.byref(found), SMI) == 0
        handle, count, room = ctypes.c_void_p(), ctypes.c_uint(8), ctypes.create_string_buffer(8 * 4128)
        by_index = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_uint, ctypes.c_void_p, ctypes.c_ulonglong)(found[81])
        lists = ctypes.CFUNCTYPE(ctypes.c_int, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p)(found[213])
        assert by_index(self.index, ctypes.addressof(handle), 0x22) == 0
        assert lists(handle, ctypes.addressof(count), ctypes.addressof(room)) == 0
        return count.value


def say(what: object) -> None:
    with lock:
        print(json.dumps(what), flush=True)


def main() -> None:
    count = ctypes.c_int()
    assert cuda.cuInit(0) == 0 and cuda.cuDeviceGetCount(ctypes.byref(count)) == 0
    devices = [Device(index) for index in range(count.value)]
    say([device.totals for device in devices])
    for line in sys.stdin:
        command, number, *more = line.split()

        def work(command: str = command, number: str = number, more: list[str] = more) -> None:
            say([command, int(number), getattr(devices[int(number)], command)(*map(int, more))])

        threading.Thread(target=work, daemon=True).start()


main()
