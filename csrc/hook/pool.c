/* pool.c: stream-ordered allocations. A pool is charged as a whole, for what it reserves on the card (pools.c); the ledger's
 * entry of a block says only whose it is.
 *
 * An allocation in a stream that captures makes a graph node: no memory is taken now (graph_memory.c). */
#include "memory.h"
#include "streams.h"

typedef CUresult alloc_call(CUdeviceptr *, size_t, CUmemoryPool, CUstream);
typedef CUresult free_call(CUdeviceptr, CUstream);

/* Where the driver does not tell about pools, and beyond the number of pools that are remembered: a charge for each block. */
static CUresult alloc_plain(CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream, void *key, alloc_call *call)
{
    struct charge charge = charge_at(place_of_stream(key), round_up(bytes, SMALL_GRANULE));
    if (charge.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = call(ptr, bytes, pool, stream);
    charge_end(&charge, result, LEDGER_POINTER, result == CUDA_SUCCESS ? *ptr : 0);
    return result;
}

static CUresult alloc_pooled(CUdeviceptr *ptr, size_t bytes, CUmemoryPool handle, CUstream stream, struct pool *pool, int gpu,
                             alloc_call *call, free_call *undo)
{
    struct pool_claim claim;
    for (int attempt = 0;; attempt++) {
        CUdeviceptr got = 0; /* the program's pointer stays as it is until the charge stands */
        if (pool_claim(&claim, pool, round_up(bytes, SMALL_GRANULE))) {
            CUresult result = call(ptr ? &got : NULL, bytes, handle, stream);
            if (pool_claimed(&claim, result, got)) {
                if (result == CUDA_SUCCESS)
                    *ptr = got;
                return result;
            }
            if (undo)
                undo(got, stream);
            pool_unclaim(&claim);
        }
        bool room = memory_make_room(gpu); /* what was just undone goes back with it */
        if (attempt || !room) {
            ledger_refused(gpu);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
}

/* `key`: as gate_enter() takes it. handle NULL: from the current pool of the stream's device. */
static CUresult alloc(CUdeviceptr *ptr, size_t bytes, CUmemoryPool handle, CUstream stream, void *key, alloc_call *call,
                      free_call *undo)
{
    bool charged = true;
    if (hook_gpus() == 0)
        return call(ptr, bytes, handle, stream);
    if (stream_captures(key)) {
        graph_memory_captured();
        return call(ptr, bytes, handle, stream);
    }
    int gpu = place_of_stream(key).gpu;
    struct pool *pool = NULL;
    if (handle)
        pool = pool_of_handle(handle, gpu, &charged);
    else if (gpu >= 0)
        pool = pool_current(gpu);
    if (!charged || (gpu < 0 && !pool) || bytes == 0)
        return call(ptr, bytes, handle, stream);
    return pool ? alloc_pooled(ptr, bytes, handle, stream, pool, pool_gpu(pool), call, undo)
                : alloc_plain(ptr, bytes, handle, stream, key, call);
}

/* ---- the calls ---- */

CU_WRAP(CUresult, cuMemFreeAsync, (CUdeviceptr ptr, CUstream stream))
{
    struct release release = ledger_releasing(LEDGER_POINTER, ptr);
    CUresult result = REAL(cuMemFreeAsync)(ptr, stream);
    ledger_released(release, LEDGER_POINTER, ptr, result == CUDA_SUCCESS);
    return result;
}

/* An allocation made before a capture cannot be freed in it: the driver refuses, and the charge stays. */
CU_WRAP(CUresult, cuMemFreeAsync_ptsz, (CUdeviceptr ptr, CUstream stream))
{
    struct release release = ledger_releasing(LEDGER_POINTER, ptr);
    CUresult result = REAL(cuMemFreeAsync_ptsz)(ptr, stream);
    ledger_released(release, LEDGER_POINTER, ptr, result == CUDA_SUCCESS);
    return result;
}

#define ALLOC_WRAPS(suffix, key) \
    static CUresult call_current##suffix(CUdeviceptr *, size_t, CUmemoryPool, CUstream); \
    static CUresult call_named##suffix(CUdeviceptr *, size_t, CUmemoryPool, CUstream); \
    CU_WRAP(CUresult, cuMemAllocAsync##suffix, (CUdeviceptr *ptr, size_t bytes, CUstream stream)) \
    { \
        return alloc(ptr, bytes, NULL, stream, key(stream), call_current##suffix, REAL(cuMemFreeAsync##suffix)); \
    } \
    CU_WRAP(CUresult, cuMemAllocFromPoolAsync##suffix, (CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream)) \
    { \
        return alloc(ptr, bytes, pool, stream, key(stream), call_named##suffix, REAL(cuMemFreeAsync##suffix)); \
    } \
    static CUresult call_current##suffix(CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream) \
    { \
        (void)pool; \
        return REAL(cuMemAllocAsync##suffix)(ptr, bytes, stream); \
    } \
    static CUresult call_named##suffix(CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream) \
    { \
        return REAL(cuMemAllocFromPoolAsync##suffix)(ptr, bytes, pool, stream); \
    }

ALLOC_WRAPS(, stream_key)
ALLOC_WRAPS(_ptsz, stream_key_ptsz)

/* ---- pools ---- */

CU_WRAP(CUresult, cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *props))
{
    CUresult result = REAL(cuMemPoolCreate)(pool, props);
    if (result == CUDA_SUCCESS && hook_gpus())
        pool_made(*pool, &props->location);
    return result;
}

CU_WRAP(CUresult, cuMemPoolImportFromShareableHandle,
        (CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type, unsigned long long flags))
{
    CUresult result = REAL(cuMemPoolImportFromShareableHandle)(pool, handle, type, flags);
    if (result == CUDA_SUCCESS && hook_gpus())
        pool_made(*pool, NULL);
    return result;
}

CU_WRAP(CUresult, cuMemPoolDestroy, (CUmemoryPool pool))
{
    struct pool *ours = hook_gpus() ? pool_destroying(pool) : NULL;
    CUresult result = REAL(cuMemPoolDestroy)(pool);
    if (result == CUDA_SUCCESS && hook_gpus())
        pool_destroyed(pool);
    else if (ours)
        pool_not_destroyed(ours);
    return result;
}

CU_WRAP(CUresult, cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep))
{
    CUresult result = REAL(cuMemPoolTrimTo)(pool, keep);
    if (result == CUDA_SUCCESS && hook_gpus())
        pool_settle_handle(pool);
    return result;
}

CU_WRAP(CUresult, cuMemPoolSetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void *value))
{
    CUresult result = REAL(cuMemPoolSetAttribute)(pool, attribute, value);
    if (result == CUDA_SUCCESS && attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD && hook_gpus())
        pool_threshold(pool, *(uint64_t *)value);
    return result;
}

CU_WRAP(CUresult, cuDeviceSetMemPool, (CUdevice device, CUmemoryPool pool))
{
    CUresult result = REAL(cuDeviceSetMemPool)(device, pool);
    pool_current_changed();
    return result;
}

CU_WRAP(CUresult, cuMemSetMemPool, (CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool))
{
    CUresult result = REAL(cuMemSetMemPool)(location, type, pool);
    pool_current_changed();
    return result;
}

/* The only ways to the handle of a pool that the program did not make: where it is must be seen here. */
CU_WRAP(CUresult, cuMemGetDefaultMemPool, (CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type))
{
    CUresult result = REAL(cuMemGetDefaultMemPool)(pool, location, type);
    if (result == CUDA_SUCCESS && hook_gpus())
        pool_note(*pool, location);
    return result;
}

CU_WRAP(CUresult, cuMemGetMemPool, (CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type))
{
    CUresult result = REAL(cuMemGetMemPool)(pool, location, type);
    if (result == CUDA_SUCCESS && hook_gpus() && location->type != CU_MEM_LOCATION_TYPE_DEVICE)
        pool_note(*pool, location); /* a GPU's current one has been seen when it was made current */
    return result;
}
