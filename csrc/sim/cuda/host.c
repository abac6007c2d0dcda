/* host.c: page-locked host memory: ordinary memory here, that the map knows. */
#define _GNU_SOURCE
#include <sys/mman.h>
#include "cuda/sim.h"

API cuMemAllocHost(void **pointer, unsigned int bytes);
API cuMemAllocHost_v2(void **pointer, size_t bytes);
API cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags);
API cuMemFreeHost(void *pointer);
API cuMemHostRegister(void *pointer, size_t bytes, unsigned int flags);
API cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags);
API cuMemHostUnregister(void *pointer);
API cuMemHostGetDevicePointer(CUdeviceptr_v1 *device, void *pointer, unsigned int flags);
API cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *pointer, unsigned int flags);
API cuMemHostGetFlags(unsigned int *flags, void *pointer);

API cuMemHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
    struct CUctx_st *ctx;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!pointer || !bytes || flags > 7)
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t taken;
    pthread_mutex_lock(&api_lock);
    uint64_t base = space_alloc(bytes, false, &taken);
    struct block *block = base ? block_insert(base, bytes, BLOCK_HOST, ctx, ctx->gpu) : NULL;
    if (block) {
        block->space = taken;
        block->flags = flags | CU_MEMHOSTALLOC_DEVICEMAP;
        *pointer = (void *)(uintptr_t)base;
    } else if (base) {
        space_free(base, taken, false);
    }
    pthread_mutex_unlock(&api_lock);
    return block ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API cuMemAllocHost_v2(void **pointer, size_t bytes)
{
    return cuMemHostAlloc(pointer, bytes, 0);
}

API cuMemAllocHost(void **pointer, unsigned int bytes)
{
    return cuMemHostAlloc(pointer, bytes, 0);
}

static CUresult drop(void *pointer, enum block_kind kind, CUresult otherwise)
{
    CUresult result = otherwise;
    CHECK_INIT();
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find((uintptr_t)pointer);
    if (block && block->base == (uintptr_t)pointer && block->kind == kind) {
        queue_wait_all(&block->gpu->queue);
        block_destroy(block);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemFreeHost(void *pointer)
{
    return pointer ? drop(pointer, BLOCK_HOST, CUDA_ERROR_INVALID_VALUE) : CUDA_SUCCESS;
}

API cuMemHostRegister_v2(void *pointer, size_t bytes, unsigned int flags)
{
    struct CUctx_st *ctx;
    CUresult result = CUDA_SUCCESS;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!pointer || !bytes || flags > 15)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    if (block_find((uintptr_t)pointer) || block_find((uintptr_t)pointer + bytes - 1)) {
        result = CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED;
    } else {
        struct block *block = block_insert((uintptr_t)pointer, bytes, BLOCK_REGISTERED, ctx, ctx->gpu);
        if (block)
            block->flags = flags | CU_MEMHOSTREGISTER_DEVICEMAP;
        else
            result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemHostRegister(void *pointer, size_t bytes, unsigned int flags)
{
    return cuMemHostRegister_v2(pointer, bytes, flags);
}

API cuMemHostUnregister(void *pointer)
{
    return pointer ? drop(pointer, BLOCK_REGISTERED, CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult host_block(void *pointer, struct block *copy)
{
    CHECK_INIT();
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find((uintptr_t)pointer);
    bool found = block && (block->kind == BLOCK_HOST || block->kind == BLOCK_REGISTERED);
    if (found)
        *copy = *block;
    pthread_mutex_unlock(&api_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuMemHostGetDevicePointer_v2(CUdeviceptr *device, void *pointer, unsigned int flags)
{
    struct block block;
    if (!device || flags)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(host_block(pointer, &block));
    *device = (uintptr_t)pointer;
    return CUDA_SUCCESS;
}

API cuMemHostGetDevicePointer(CUdeviceptr_v1 *device, void *pointer, unsigned int flags)
{
    CUdeviceptr wide;
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(cuMemHostGetDevicePointer_v2(&wide, pointer, flags));
    if (wide > UINT32_MAX)
        return CUDA_ERROR_INVALID_VALUE; /* not to be had in 32 bits */
    *device = (CUdeviceptr_v1)wide;
    return CUDA_SUCCESS;
}

API cuMemHostGetFlags(unsigned int *flags, void *pointer)
{
    struct block block;
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(host_block(pointer, &block));
    *flags = block.flags;
    return CUDA_SUCCESS;
}
