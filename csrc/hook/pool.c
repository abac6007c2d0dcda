/* pool.c: stream-ordered allocations. What lives is charged, at the call that allocates and the call that frees.
 *
 * Weaker than what a pool really takes: memory that was freed but that the pool keeps for reuse (its release threshold) is on
 * the device and not counted (docs/memory.md). To be replaced by charging what pools reserve.
 *
 * An allocation in a stream that captures makes a graph node: no memory is taken now, nothing is charged. graph_memory() marks
 * the place. */
#include "memory.h"
#include "streams.h"

/* Pools that this process made outside the card (host memory), or took over from another process that is charged for them. */
enum { POOL_UNCHARGED = 1 };

/* Allocations and frees that became graph nodes will be charged from here: at instantiation and launch, by what the graph's
 * pool then reserves. Until then they are the driver's alone. */
static struct place graph_memory(void)
{
    return (struct place){-1, NULL};
}

/* `key`: as gate_enter() takes it. */
static struct place place_of_async(void *key)
{
    if (hook_gpus() == 0)
        return (struct place){-1, NULL};
    return stream_captures(key) ? graph_memory() : place_of_stream(key);
}

static CUresult finish(const struct charge *charge, CUresult result, const CUdeviceptr *ptr)
{
    charge_end(charge, result, LEDGER_POINTER, result == CUDA_SUCCESS ? *ptr : 0);
    return result;
}

CU_WRAP(CUresult, cuMemAllocAsync, (CUdeviceptr *ptr, size_t bytes, CUstream stream))
{
    struct charge charge = charge_at(place_of_async(stream_key(stream)), round_up(bytes, SMALL_GRANULE));
    return charge.refused ? CUDA_ERROR_OUT_OF_MEMORY : finish(&charge, REAL(cuMemAllocAsync)(ptr, bytes, stream), ptr);
}

CU_WRAP(CUresult, cuMemAllocAsync_ptsz, (CUdeviceptr *ptr, size_t bytes, CUstream stream))
{
    struct charge charge = charge_at(place_of_async(stream_key_ptsz(stream)), round_up(bytes, SMALL_GRANULE));
    return charge.refused ? CUDA_ERROR_OUT_OF_MEMORY : finish(&charge, REAL(cuMemAllocAsync_ptsz)(ptr, bytes, stream), ptr);
}

/* ---- from a pool that the program names ---- */

/* A pool we have made or seen: its location decides, not the stream's. */
static struct place place_of_pool(CUmemoryPool pool, void *key)
{
    struct place place = place_of_async(key);
    int gpu;
    uint64_t how;
    const void *context;
    if (place.gpu < 0 || !ledger_find(LEDGER_OTHER, (uint64_t)(uintptr_t)pool, &gpu, &how, &context))
        return place;
    return how == POOL_UNCHARGED ? (struct place){-1, NULL} : (struct place){gpu, place.context};
}

CU_WRAP(CUresult, cuMemAllocFromPoolAsync, (CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream))
{
    struct charge charge = charge_at(place_of_pool(pool, stream_key(stream)), round_up(bytes, SMALL_GRANULE));
    return charge.refused ? CUDA_ERROR_OUT_OF_MEMORY
                          : finish(&charge, REAL(cuMemAllocFromPoolAsync)(ptr, bytes, pool, stream), ptr);
}

CU_WRAP(CUresult, cuMemAllocFromPoolAsync_ptsz, (CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream))
{
    struct charge charge =
        charge_at(place_of_pool(pool, stream_key_ptsz(stream)), round_up(bytes, SMALL_GRANULE));
    return charge.refused ? CUDA_ERROR_OUT_OF_MEMORY
                          : finish(&charge, REAL(cuMemAllocFromPoolAsync_ptsz)(ptr, bytes, pool, stream), ptr);
}

CU_WRAP(CUresult, cuMemPoolCreate, (CUmemoryPool *pool, const CUmemPoolProps *props))
{
    CUresult result = REAL(cuMemPoolCreate)(pool, props);
    if (result == CUDA_SUCCESS && hook_gpus()) {
        int gpu = props->location.type == CU_MEM_LOCATION_TYPE_DEVICE ? hook_gpu_of_device(props->location.id) : -1;
        ledger_put(LEDGER_OTHER, (uint64_t)(uintptr_t)*pool, gpu < 0 ? 0 : gpu, gpu < 0 ? POOL_UNCHARGED : 0, NULL);
    }
    return result;
}

CU_WRAP(CUresult, cuMemPoolImportFromShareableHandle,
        (CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type, unsigned long long flags))
{
    CUresult result = REAL(cuMemPoolImportFromShareableHandle)(pool, handle, type, flags);
    if (result == CUDA_SUCCESS && hook_gpus())
        ledger_put(LEDGER_OTHER, (uint64_t)(uintptr_t)*pool, 0, POOL_UNCHARGED, NULL);
    return result;
}

CU_WRAP(CUresult, cuMemPoolDestroy, (CUmemoryPool pool))
{
    int gpu;
    uint64_t how;
    const void *context;
    bool known = ledger_take_from(LEDGER_OTHER, (uint64_t)(uintptr_t)pool, &gpu, &how, &context);
    CUresult result = REAL(cuMemPoolDestroy)(pool);
    if (known && result != CUDA_SUCCESS)
        ledger_put(LEDGER_OTHER, (uint64_t)(uintptr_t)pool, gpu, how, context);
    return result;
}

/* ---- free ---- */

/* An allocation made before the capture cannot be freed in it: the driver refuses, and the charge stays. */
CU_WRAP(CUresult, cuMemFreeAsync, (CUdeviceptr ptr, CUstream stream))
{
    struct release release = release_begin(LEDGER_POINTER, ptr);
    return release_end(&release, REAL(cuMemFreeAsync)(ptr, stream));
}

CU_WRAP(CUresult, cuMemFreeAsync_ptsz, (CUdeviceptr ptr, CUstream stream))
{
    struct release release = release_begin(LEDGER_POINTER, ptr);
    return release_end(&release, REAL(cuMemFreeAsync_ptsz)(ptr, stream));
}
