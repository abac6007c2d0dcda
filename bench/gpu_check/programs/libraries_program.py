"""The CUDA libraries as they are, through ctypes or their own Python; prints one JSON object.

``cudart PATH``: the CUDA runtime. ``cublas PATH``: a product by SGEMM that is right. ``cupy``, ``numba``: a kernel.
"""

import ctypes
import json
import sys

BLOCK = 1 << 20


def check(result, what):
    if result:
        raise SystemExit(f"{what} gave {result}")


def cudart(path):
    rt = ctypes.CDLL(path)
    free, total, block, version = ctypes.c_size_t(), ctypes.c_size_t(), ctypes.c_void_p(), ctypes.c_int()
    check(rt.cudaRuntimeGetVersion(ctypes.byref(version)), "cudaRuntimeGetVersion")
    check(rt.cudaMemGetInfo(ctypes.byref(free), ctypes.byref(total)), "cudaMemGetInfo")
    check(rt.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(BLOCK)), "cudaMalloc")
    check(rt.cudaMemset(block, 7, ctypes.c_size_t(BLOCK)), "cudaMemset")
    data = (ctypes.c_ubyte * BLOCK)()
    check(rt.cudaMemcpy(data, block, ctypes.c_size_t(BLOCK), 2), "cudaMemcpy")
    check(rt.cudaFree(block), "cudaFree")
    over = rt.cudaMalloc(ctypes.byref(block), ctypes.c_size_t(total.value + (2 << 20)))
    return {"version": version.value, "total": total.value, "right": bytes(data) == b"\7" * BLOCK, "over": over}


def cublas(path):
    cuda, blas = ctypes.CDLL("libcuda.so.1"), ctypes.CDLL(path)
    context, handle, version = ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_int()
    check(cuda.cuInit(0), "cuInit")
    check(cuda.cuDevicePrimaryCtxRetain(ctypes.byref(context), 0), "cuDevicePrimaryCtxRetain")
    check(cuda.cuCtxSetCurrent(context), "cuCtxSetCurrent")
    check(blas.cublasCreate_v2(ctypes.byref(handle)), "cublasCreate")
    check(blas.cublasGetVersion_v2(handle, ctypes.byref(version)), "cublasGetVersion")
    n = 256
    ones = (ctypes.c_float * (n * n))(*[1.0] * (n * n))
    matrices = []
    for _ in range(3):
        matrix = ctypes.c_uint64()
        check(cuda.cuMemAlloc_v2(ctypes.byref(matrix), ctypes.c_size_t(4 * n * n)), "cuMemAlloc")
        check(cuda.cuMemcpyHtoD_v2(matrix, ones, ctypes.c_size_t(4 * n * n)), "cuMemcpyHtoD")
        matrices.append(matrix)
    one, zero = ctypes.c_float(1), ctypes.c_float(0)
    a, b, c = matrices
    result = blas.cublasSgemm_v2(handle, 0, 0, n, n, n, ctypes.byref(one), a, n, b, n, ctypes.byref(zero), c, n)
    check(result, "cublasSgemm")
    check(cuda.cuCtxSynchronize(), "cuCtxSynchronize")
    check(cuda.cuMemcpyDtoH_v2(ones, c, ctypes.c_size_t(4 * n * n)), "cuMemcpyDtoH")
    return {"version": version.value, "right": all(abs(value - n) < 1e-3 for value in ones)}


def cupy():
    import cupy as cp

    a = cp.arange(1 << 16, dtype=cp.float32)
    right = float((a * 2)[100]) == 200
    source = 'extern "C" __global__ void twice(float *x) { x[blockIdx.x * blockDim.x + threadIdx.x] *= 2; }'
    kernel = cp.RawKernel(source, "twice")
    kernel((256,), (256,), (a,))
    free, total = cp.cuda.runtime.memGetInfo()
    try:
        cp.cuda.alloc(total + (2 << 20))
        over = "granted"
    except cp.cuda.memory.OutOfMemoryError as error:
        over = str(error)
    return {"version": cp.__version__, "total": total, "right": right and float(a[3]) == 6, "over": over}


def numba():
    import numpy
    from numba import __version__, cuda

    @cuda.jit
    def twice(x):
        i = cuda.grid(1)
        x[i] *= 2

    x = cuda.to_device(numpy.ones(1 << 16, dtype=numpy.float32))
    twice[256, 256](x)
    _, total = cuda.current_context().get_memory_info()
    return {"version": __version__, "total": total, "right": bool((x.copy_to_host() == 2).all())}


if __name__ == "__main__":
    words = {"cudart": cudart, "cublas": cublas, "cupy": cupy, "numba": numba}
    print(json.dumps(words[sys.argv[1]](*sys.argv[2:])), flush=True)
