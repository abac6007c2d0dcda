/* pool.c: stream-ordered allocation. A pool keeps what is freed, charged to the device ("reserved"), until a
 * synchronisation finds more than the release threshold reserved, or it is trimmed.
 *
 * A freed block may be used again at once in the same channel, whose order protects it, and elsewhere once the free is
 * done in device time. Used memory falls when the free is asked for. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cuda/pool.h"

static struct CUmemPoolHandle_st *pools; /* under api_lock */

struct CUmemPoolHandle_st *pool_new(struct gpu *gpu)
{
    struct CUmemPoolHandle_st *pool = object_new(OBJ_POOL, sizeof *pool, NULL);
    if (!pool)
        return NULL;
    pool->gpu = gpu;
    pool->file = -1;
    pool->flags[0] = pool->flags[1] = pool->flags[2] = 1;
    pool->next = pools;
    pools = pool;
    return pool;
}

struct CUmemPoolHandle_st *pool_default(struct gpu *gpu)
{
    if (!gpu->default_pool) {
        gpu->default_pool = pool_new(gpu);
        gpu->pool = gpu->default_pool;
    }
    return gpu->default_pool;
}

bool pool_known_file(uint64_t inode)
{
    for (struct CUmemPoolHandle_st *pool = pools; pool; pool = pool->next)
        if (pool->file >= 0 && !pool->imported && pool->inode == inode)
            return true;
    return false;
}

static bool usable(const struct CUmemPoolHandle_st *pool, struct cached *cached, const struct CUstream_st *stream)
{
    if (cached->seq != UINT64_MAX && !queue_behind(&pool->gpu->queue, cached->channel, cached->seq + 1))
        cached->seq = UINT64_MAX;
    return cached->seq == UINT64_MAX || (stream && cached->channel == stream->channel);
}

static void trim(struct CUmemPoolHandle_st *pool, uint64_t keep)
{
    struct cached **at = &pool->cached;
    while (*at && (pool->reserved > keep || pool->imported)) {
        struct cached *cached = *at;
        if (!usable(pool, cached, NULL)) {
            at = &cached->next;
            continue;
        }
        *at = cached->next;
        if (cached->share)
            sim_share_drop(&pool->gpu->map, cached->share);
        else
            sim_refund(&pool->gpu->map, cached->charged);
        if (pool->file >= 0)
            pool_file_release(pool, cached);
        else
            space_free(cached->base, cached->space, false);
        pool->reserved -= cached->charged;
        free(cached);
    }
}

/* Its descriptor goes with the last of what a destroyed pool has. */
static void pool_end(struct CUmemPoolHandle_st *pool)
{
    if (!pool->destroyed || pool->blocks || pool->cached || pool->file < 0)
        return;
    close(pool->file);
    pool->file = -1;
}

void pool_trim_locked(struct gpu *gpu, bool all)
{
    for (struct CUmemPoolHandle_st *pool = pools; pool; pool = pool->next)
        if (pool->gpu == gpu) {
            trim(pool, all || pool->destroyed ? 0 : pool->threshold);
            pool_end(pool);
        }
}

void pool_trim_all(struct gpu *gpu)
{
    if (!load_relaxed(&pools))
        return;
    pthread_mutex_lock(&api_lock);
    pool_trim_locked(gpu, false);
    pthread_mutex_unlock(&api_lock);
}

static struct block *take_cached(struct CUmemPoolHandle_st *pool, struct CUctx_st *ctx, uint64_t bytes,
                                 struct CUstream_st *stream)
{
    for (struct cached **at = &pool->cached; *at; at = &(*at)->next) {
        struct cached *cached = *at;
        if (cached->charged < ROUND512(bytes) || cached->charged > 2 * ROUND512(bytes) || !usable(pool, cached, stream))
            continue;
        struct block *block = block_insert(cached->base, bytes, BLOCK_POOL, ctx, pool->gpu);
        if (!block)
            return NULL;
        block->charged = cached->charged;
        block->space = cached->space;
        block->offset = cached->offset;
        block->share = cached->share;
        *at = cached->next;
        free(cached);
        return block;
    }
    return NULL;
}

static CUresult new_block(struct CUmemPoolHandle_st *pool, struct CUctx_st *ctx, uint64_t bytes, struct block **block)
{
    if (pool->file >= 0)
        return pool_file_block(pool, ctx, bytes, block);
    return block_alloc(ctx, pool->gpu, bytes, BLOCK_POOL, false, block);
}

CUresult pool_alloc(struct CUmemPoolHandle_st *pool, struct CUctx_st *ctx, uint64_t bytes, struct CUstream_st *stream,
                    CUdeviceptr *out)
{
    struct block *block = take_cached(pool, ctx, bytes, stream);
    if (!block) {
        if (pool->max && pool->reserved + ROUND512(bytes) > pool->max)
            return CUDA_ERROR_OUT_OF_MEMORY;
        CUresult result = new_block(pool, ctx, bytes, &block);
        if (result == CUDA_ERROR_OUT_OF_MEMORY && pool->cached) { /* what is kept for nothing else first */
            trim(pool, 0);
            result = new_block(pool, ctx, bytes, &block);
        }
        TRY(result);
        pool->reserved += block->charged;
    }
    block->pool = pool;
    pool->blocks++;
    pool->used += block->charged;
    if (pool->used > pool->used_high)
        pool->used_high = pool->used;
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    *out = block->base;
    return CUDA_SUCCESS;
}

CUresult pool_free(struct block *block, struct CUstream_st *stream)
{
    struct CUmemPoolHandle_st *pool = block->pool;
    struct cached *cached = malloc(sizeof *cached);
    if (!cached)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *cached = (struct cached){.base = block->base, .charged = block->charged, .space = block->space,
                              .offset = block->offset, .share = block->share, .seq = UINT64_MAX};
    if (stream) {
        struct work mark = {.kind = SIM_MARK, .seq = &cached->seq};
        cached->channel = stream->channel;
        CUresult result = stream_append(stream, &mark);
        if (result != CUDA_SUCCESS) {
            free(cached);
            return result;
        }
    }
    pool->used -= block->charged;
    pool->blocks--;
    cached->next = pool->cached;
    pool->cached = cached;
    block_remove(block); /* its space and charge are the pool's now */
    if (!stream || pool->destroyed)
        trim(pool, pool->destroyed ? 0 : pool->threshold);
    pool_end(pool);
    return CUDA_SUCCESS;
}

/* ---- allocation ---- */

static CUresult alloc_now(struct CUmemPoolHandle_st *pool, struct CUstream_st *stream, uint64_t bytes,
                          CUdeviceptr *out)
{
    if (!pool)
        pool = pool_default(stream->gpu) ? stream->gpu->pool : NULL;
    return pool ? pool_alloc(pool, stream->object.ctx, bytes, stream, out) : CUDA_ERROR_OUT_OF_MEMORY;
}

/* The pool does not matter then: graphs have their own. */
static CUresult alloc_captured(struct CUstream_st *stream, uint64_t bytes, CUdeviceptr *out)
{
    struct node_params node = {.type = CU_GRAPH_NODE_TYPE_MEM_ALLOC, .bytes = bytes};
    TRY(graph_address(stream->object.ctx, bytes, &node.dptr));
    CUresult result = capture_add(stream, &node);
    if (result == CUDA_SUCCESS)
        *out = node.dptr;
    else
        graph_forget(node.dptr);
    return result;
}

static CUresult alloc_from(bool ptds, CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream handle)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!out || (pool && (!object_is(pool, OBJ_POOL) || pool->imported)))
        return CUDA_ERROR_INVALID_VALUE;
    if (!bytes) {
        *out = 0;
        return CUDA_SUCCESS;
    }
    pthread_mutex_lock(&api_lock);
    CUresult result = stream->capture ? alloc_captured(stream, bytes, out) : alloc_now(pool, stream, bytes, out);
    pthread_mutex_unlock(&api_lock);
    return result;
}
API_PAIR(cuMemAllocFromPoolAsync, _ptsz, alloc_from,
         (CUdeviceptr *out, size_t bytes, CUmemoryPool pool, CUstream stream), out, bytes,
         pool, stream)

static CUresult alloc(bool ptds, CUdeviceptr *out, size_t bytes, CUstream stream)
{
    return alloc_from(ptds, out, bytes, NULL, stream);
}
API_PAIR(cuMemAllocAsync, _ptsz, alloc, (CUdeviceptr *out, size_t bytes, CUstream stream), out, bytes, stream)

static CUresult free_async(bool ptds, CUdeviceptr pointer, CUstream handle)
{
    struct CUstream_st *stream;
    CUresult result;
    TRY(stream_get(ptds, handle, &stream));
    if (!pointer)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(pointer);
    if (stream->capture) { /* what a graph allocates, and nothing else */
        struct node_params node = {.type = CU_GRAPH_NODE_TYPE_MEM_FREE, .dptr = pointer};
        result = graph_block(pointer) ? capture_add(stream, &node) : CUDA_ERROR_INVALID_VALUE;
    } else if (graph_block(pointer)) {
        result = graph_free(block, stream);
    } else if (!block || block->base != pointer || (block->kind != BLOCK_POOL && block->kind != BLOCK_DEVICE)) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else if (block->kind == BLOCK_DEVICE) { /* allowed for memory of cuMemAlloc too */
        queue_wait_all(&block->gpu->queue);
        block_destroy(block);
        result = CUDA_SUCCESS;
    } else {
        result = pool_free(block, stream);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}
API_PAIR(cuMemFreeAsync, _ptsz, free_async, (CUdeviceptr pointer, CUstream stream), pointer, stream)

/* ---- pools ---- */

API cuMemPoolCreate(CUmemoryPool *pool, const CUmemPoolProps *props);
API cuMemPoolDestroy(CUmemoryPool pool);
API cuMemPoolTrimTo(CUmemoryPool pool, size_t keep);
API cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value);
API cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value);
API cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count);
API cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location);
API cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device);
API cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device);
API cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool);
API cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
API cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type);
API cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool);

API cuMemPoolCreate(CUmemoryPool *out, const CUmemPoolProps *props)
{
    CHECK_INIT();
    if (!out || !props || props->allocType != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (props->location.type != CU_MEM_LOCATION_TYPE_DEVICE ||
        (props->handleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR))
        return CUDA_ERROR_NOT_SUPPORTED;
    struct gpu *gpu = gpu_of(props->location.id);
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    CUresult result = gpu_join(gpu);
    struct CUmemPoolHandle_st *pool = result == CUDA_SUCCESS ? pool_new(gpu) : NULL;
    if (!pool) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        pool->max = props->maxSize;
        if (props->handleTypes)
            result = pool_make_file(pool);
        *out = pool;
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* Blocks in use stay valid; the pool ends with the last of them. */
API cuMemPoolDestroy(CUmemoryPool pool)
{
    CHECK_INIT();
    if (!object_is(pool, OBJ_POOL))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = pool == pool->gpu->default_pool ? CUDA_ERROR_NOT_PERMITTED : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        if (pool->gpu->pool == pool)
            pool->gpu->pool = pool->gpu->default_pool;
        queue_wait_all(&pool->gpu->queue);
        trim(pool, 0);
        pool->destroyed = true;
        pool_end(pool);
        object_hide(pool);           /* not recycled: a few hundred bytes, and its blocks point at it */
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemPoolTrimTo(CUmemoryPool pool, size_t keep)
{
    CHECK_INIT();
    if (!object_is(pool, OBJ_POOL))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    queue_idle(&pool->gpu->queue);
    trim(pool, keep);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuMemPoolGetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CHECK_INIT();
    if (!object_is(pool, OBJ_POOL) || !value || attribute < 1 || attribute > 8)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    uint64_t values[] = {pool->threshold, pool->reserved, pool->reserved_high, pool->used, pool->used_high};
    if (attribute < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        *(int *)value = pool->flags[attribute - 1];
    else
        *(uint64_t *)value = values[attribute - CU_MEMPOOL_ATTR_RELEASE_THRESHOLD];
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuMemPoolSetAttribute(CUmemoryPool pool, CUmemPool_attribute attribute, void *value)
{
    CUresult result = CUDA_SUCCESS;
    CHECK_INIT();
    if (!object_is(pool, OBJ_POOL) || !value || attribute < 1 || attribute > 8)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    if (attribute < CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        pool->flags[attribute - 1] = *(int *)value;
    else if (attribute == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        pool->threshold = *(uint64_t *)value;
    else if (attribute == CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH && *(uint64_t *)value == 0)
        pool->reserved_high = pool->reserved;
    else if (attribute == CU_MEMPOOL_ATTR_USED_MEM_HIGH && *(uint64_t *)value == 0)
        pool->used_high = pool->used;
    else
        result = CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemPoolSetAccess(CUmemoryPool pool, const CUmemAccessDesc *map, size_t count)
{
    CHECK_INIT();
    if (!object_is(pool, OBJ_POOL) || (!map && count))
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++)
        if (map[i].location.type != CU_MEM_LOCATION_TYPE_DEVICE || gpu_of(map[i].location.id) != pool->gpu)
            return CUDA_ERROR_INVALID_DEVICE; /* no peers */
    return CUDA_SUCCESS;
}

API cuMemPoolGetAccess(CUmemAccess_flags *flags, CUmemoryPool pool, CUmemLocation *location)
{
    CHECK_INIT();
    if (!flags || !location || !object_is(pool, OBJ_POOL))
        return CUDA_ERROR_INVALID_VALUE;
    bool own = location->type == CU_MEM_LOCATION_TYPE_DEVICE && gpu_of(location->id) == pool->gpu;
    *flags = own ? CU_MEM_ACCESS_FLAGS_PROT_READWRITE : CU_MEM_ACCESS_FLAGS_PROT_NONE;
    return CUDA_SUCCESS;
}

static CUresult pool_of(CUmemoryPool *pool, CUdevice device, bool current)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    if (!pool)
        return CUDA_ERROR_INVALID_VALUE;
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    CUresult result = gpu_join(gpu);
    *pool = result == CUDA_SUCCESS ? pool_default(gpu) : NULL;
    if (*pool && current)
        *pool = gpu->pool;
    pthread_mutex_unlock(&api_lock);
    return *pool ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API cuDeviceGetDefaultMemPool(CUmemoryPool *pool, CUdevice device)
{
    return pool_of(pool, device, false);
}

API cuDeviceGetMemPool(CUmemoryPool *pool, CUdevice device)
{
    return pool_of(pool, device, true);
}

API cuDeviceSetMemPool(CUdevice device, CUmemoryPool pool)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    if (!object_is(pool, OBJ_POOL) || pool->gpu != gpu || pool->imported)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    pool_default(gpu);
    gpu->pool = pool;
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

static CUresult check_location(const CUmemLocation *location, CUmemAllocationType type)
{
    if (!location)
        return CUDA_ERROR_INVALID_VALUE;
    bool plain = location->type == CU_MEM_LOCATION_TYPE_DEVICE && type == CU_MEM_ALLOCATION_TYPE_PINNED;
    return plain ? CUDA_SUCCESS : CUDA_ERROR_NOT_SUPPORTED;
}

API cuMemGetDefaultMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    TRY(check_location(location, type));
    return pool_of(pool, location->id, false);
}

API cuMemGetMemPool(CUmemoryPool *pool, CUmemLocation *location, CUmemAllocationType type)
{
    TRY(check_location(location, type));
    return pool_of(pool, location->id, true);
}

API cuMemSetMemPool(CUmemLocation *location, CUmemAllocationType type, CUmemoryPool pool)
{
    TRY(check_location(location, type));
    return cuDeviceSetMemPool(location->id, pool);
}
