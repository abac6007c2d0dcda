/* copy.c: copies, fills, and memory in a stream's order. Compiled twice (driver.h). */
#include <string.h>
#include "driver.h"

/* A kind is taken at its word; the default one asks the addresses. */
cudaError_t cudaMemcpy(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind)
{
    CUresult result = rt_enter();
    if (result != CUDA_SUCCESS || !bytes)
        return rt_done(result);
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return rt_done(DRIVE(cuMemcpyHtoD, (CUdeviceptr)dst, src, bytes));
    case cudaMemcpyDeviceToHost:
        return rt_done(DRIVE(cuMemcpyDtoH, dst, (CUdeviceptr)src, bytes));
    case cudaMemcpyDeviceToDevice:
        return rt_done(DRIVE(cuMemcpyDtoD, (CUdeviceptr)dst, (CUdeviceptr)src, bytes));
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        return rt_done(DRIVE(cuMemcpy, (CUdeviceptr)dst, (CUdeviceptr)src, bytes));
    }
    return rt_done((CUresult)cudaErrorInvalidMemcpyDirection);
}

cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t bytes, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    CUresult result = rt_enter();
    if (result != CUDA_SUCCESS || !bytes)
        return rt_done(result);
    switch (kind) {
    case cudaMemcpyHostToDevice:
        return rt_done(DRIVE(cuMemcpyHtoDAsync, (CUdeviceptr)dst, src, bytes, stream));
    case cudaMemcpyDeviceToHost:
        return rt_done(DRIVE(cuMemcpyDtoHAsync, dst, (CUdeviceptr)src, bytes, stream));
    case cudaMemcpyDeviceToDevice:
        return rt_done(DRIVE(cuMemcpyDtoDAsync, (CUdeviceptr)dst, (CUdeviceptr)src, bytes, stream));
    case cudaMemcpyHostToHost:
    case cudaMemcpyDefault:
        return rt_done(DRIVE(cuMemcpyAsync, (CUdeviceptr)dst, (CUdeviceptr)src, bytes, stream));
    }
    return rt_done((CUresult)cudaErrorInvalidMemcpyDirection);
}

static CUDA_MEMCPY2D box(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind)
{
    bool from_host = kind == cudaMemcpyHostToDevice || kind == cudaMemcpyHostToHost;
    bool to_host = kind == cudaMemcpyDeviceToHost || kind == cudaMemcpyHostToHost;
    CUDA_MEMCPY2D copy = {.srcPitch = src_pitch, .dstPitch = dst_pitch, .WidthInBytes = width, .Height = height};
    copy.srcMemoryType = kind == cudaMemcpyDefault ? CU_MEMORYTYPE_UNIFIED
                         : from_host               ? CU_MEMORYTYPE_HOST
                                                   : CU_MEMORYTYPE_DEVICE;
    copy.dstMemoryType = kind == cudaMemcpyDefault ? CU_MEMORYTYPE_UNIFIED
                         : to_host                 ? CU_MEMORYTYPE_HOST
                                                   : CU_MEMORYTYPE_DEVICE;
    copy.srcHost = src;
    copy.srcDevice = (CUdeviceptr)src;
    copy.dstHost = dst;
    copy.dstDevice = (CUdeviceptr)dst;
    return copy;
}

cudaError_t cudaMemcpy2D(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width, size_t height,
                         enum cudaMemcpyKind kind)
{
    CUDA_MEMCPY2D copy = box(dst, dst_pitch, src, src_pitch, width, height, kind);
    PASS(cuMemcpy2DUnaligned, &copy);
}

cudaError_t cudaMemcpy2DAsync(void *dst, size_t dst_pitch, const void *src, size_t src_pitch, size_t width,
                              size_t height, enum cudaMemcpyKind kind, cudaStream_t stream)
{
    CUDA_MEMCPY2D copy = box(dst, dst_pitch, src, src_pitch, width, height, kind);
    PASS(cuMemcpy2DAsync, &copy, stream);
}

cudaError_t cudaMemcpyToSymbol(const void *symbol, const void *src, size_t bytes, size_t offset,
                               enum cudaMemcpyKind kind)
{
    CUdeviceptr address;
    CUresult result = rt_symbol(symbol, &address, NULL);
    return result ? rt_done(result) : cudaMemcpy((void *)(address + offset), src, bytes, kind);
}

cudaError_t cudaMemcpyFromSymbol(void *dst, const void *symbol, size_t bytes, size_t offset, enum cudaMemcpyKind kind)
{
    CUdeviceptr address;
    CUresult result = rt_symbol(symbol, &address, NULL);
    return result ? rt_done(result) : cudaMemcpy(dst, (void *)(address + offset), bytes, kind);
}

cudaError_t cudaMemcpyToSymbolAsync(const void *symbol, const void *src, size_t bytes, size_t offset,
                                    enum cudaMemcpyKind kind, cudaStream_t stream)
{
    CUdeviceptr address;
    CUresult result = rt_symbol(symbol, &address, NULL);
    return result ? rt_done(result) : cudaMemcpyAsync((void *)(address + offset), src, bytes, kind, stream);
}

cudaError_t cudaMemcpyFromSymbolAsync(void *dst, const void *symbol, size_t bytes, size_t offset,
                                      enum cudaMemcpyKind kind, cudaStream_t stream)
{
    CUdeviceptr address;
    CUresult result = rt_symbol(symbol, &address, NULL);
    return result ? rt_done(result) : cudaMemcpyAsync(dst, (void *)(address + offset), bytes, kind, stream);
}

cudaError_t cudaMemset(void *pointer, int value, size_t bytes)
{
    PASS(cuMemsetD8, (CUdeviceptr)pointer, (unsigned char)value, bytes);
}

cudaError_t cudaMemsetAsync(void *pointer, int value, size_t bytes, cudaStream_t stream)
{
    PASS(cuMemsetD8Async, (CUdeviceptr)pointer, (unsigned char)value, bytes, stream);
}

cudaError_t cudaMemset2D(void *pointer, size_t pitch, int value, size_t width, size_t height)
{
    PASS(cuMemsetD2D8, (CUdeviceptr)pointer, pitch, (unsigned char)value, width, height);
}

cudaError_t cudaMemset2DAsync(void *pointer, size_t pitch, int value, size_t width, size_t height, cudaStream_t stream)
{
    PASS(cuMemsetD2D8Async, (CUdeviceptr)pointer, pitch, (unsigned char)value, width, height, stream);
}

cudaError_t cudaMemPrefetchAsync(const void *pointer, size_t bytes, struct cudaMemLocation place, unsigned int flags,
                                 cudaStream_t stream)
{
    CUmemLocation at;
    memcpy(&at, &place, sizeof at);
    PASS(cuMemPrefetchAsync, (CUdeviceptr)pointer, bytes, at, flags, stream);
}

cudaError_t cudaMallocAsync(void **pointer, size_t bytes, cudaStream_t stream)
{
    PASS(cuMemAllocAsync, (CUdeviceptr *)pointer, bytes, stream);
}

cudaError_t cudaMallocFromPoolAsync(void **pointer, size_t bytes, cudaMemPool_t pool, cudaStream_t stream)
{
    PASS(cuMemAllocFromPoolAsync, (CUdeviceptr *)pointer, bytes, pool, stream);
}

cudaError_t cudaFreeAsync(void *pointer, cudaStream_t stream)
{
    PASS(cuMemFreeAsync, (CUdeviceptr)pointer, stream);
}

/* Between devices: by their primary contexts. The blocking form has no per-thread variant. */
#ifndef CUDA_API_PER_THREAD_DEFAULT_STREAM
cudaError_t cudaMemcpyPeer(void *dst, int dst_device, const void *src, int src_device, size_t bytes)
{
    CUcontext to, from;
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS)
        result = rt_primary(dst_device, &to);
    if (result == CUDA_SUCCESS)
        result = rt_primary(src_device, &from);
    return rt_done(result ? result : DRIVE(cuMemcpyPeer, (CUdeviceptr)dst, to, (CUdeviceptr)src, from, bytes));
}

cudaError_t cudaMemcpyPeerAsync(void *dst, int dst_device, const void *src, int src_device, size_t bytes,
                                cudaStream_t stream)
{
    CUcontext to, from;
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS)
        result = rt_primary(dst_device, &to);
    if (result == CUDA_SUCCESS)
        result = rt_primary(src_device, &from);
    return rt_done(result ? result
                          : DRIVE(cuMemcpyPeerAsync, (CUdeviceptr)dst, to, (CUdeviceptr)src, from, bytes, stream));
}
#endif
