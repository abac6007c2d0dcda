/* graph_memory.c: what the allocation nodes of graphs take.
 *
 * A node's address is fixed when the node is made; device memory is taken when the graph is first launched or uploaded,
 * from what the GPU keeps for graphs ("reserved"), which grows when that is too little and shrinks only when it is
 * trimmed. A launch needs the most that its nodes have at one time. What it frees itself, later launches in the same
 * stream may use at once (they run after it), launches in others when it is done. */
#include "cuda/graph.h"

API cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value);
API cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value);
API cuDeviceGraphMemTrim(CUdevice device);

/* ---- addresses; under api_lock, as everything here but the entry points ---- */

CUresult graph_address(struct CUctx_st *ctx, uint64_t bytes, CUdeviceptr *pointer)
{
    uint64_t space, size = ROUND512(bytes);
    if (size < bytes || size > ctx->gpu->conf.bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t base = space_alloc(size, false, &space);
    struct block *block = base ? block_insert(base, bytes, BLOCK_GRAPH, ctx, ctx->gpu) : NULL;
    if (!block) {
        if (base)
            space_free(base, space, false);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->space = space;
    *pointer = base;
    return CUDA_SUCCESS;
}

struct block *graph_block(CUdeviceptr pointer)
{
    struct block *block = block_find(pointer);
    return block && block->base == pointer && block->kind == BLOCK_GRAPH ? block : NULL;
}

static void remove_block(struct block *block)
{
    space_free(block->base, block->space, false);
    block_remove(block);
}

/* Its node is gone: an allocation outlives that until it is freed. */
void graph_forget(CUdeviceptr pointer)
{
    struct block *block = graph_block(pointer);
    if (block && block->live)
        block->orphan = true;
    else if (block)
        remove_block(block);
}

/* Its context is. */
void graph_drop(struct block *block)
{
    if (block->live)
        block->gpu->graphs.unfreed -= ROUND512(block->size);
    remove_block(block);
}

/* ---- how much is in use ---- */

static uint64_t used(struct gpu *gpu)
{
    struct graph_pool *pool = &gpu->graphs;
    uint64_t sum = pool->unfreed;
    for (uint32_t c = 0; c < SIM_CHANNELS; c++) {
        if (pool->hold[c] && !queue_behind(&gpu->queue, c, pool->hold_seq[c] + 1))
            pool->hold[c] = 0;
        sum += pool->hold[c];
    }
    return sum;
}

static CUresult reserve(struct gpu *gpu, uint64_t total)
{
    struct graph_pool *pool = &gpu->graphs;
    if (total > pool->reserved) {
        if (sim_charge(&gpu->map, total - pool->reserved) != 0)
            return CUDA_ERROR_OUT_OF_MEMORY;
        pool->reserved = total;
    }
    if (pool->reserved > pool->reserved_high)
        pool->reserved_high = pool->reserved;
    return CUDA_SUCCESS;
}

static void hold(struct gpu *gpu, uint32_t channel, uint64_t bytes)
{
    gpu->graphs.hold[channel] = bytes;
    gpu->graphs.hold_seq[channel] = UINT64_MAX - 1; /* until the end of the launch is queued */
}

/* From here on what the stream has held is free when its work so far is done. */
static CUresult hold_until_now(struct CUstream_st *stream)
{
    struct work mark = {.kind = SIM_MARK, .seq = &stream->gpu->graphs.hold_seq[stream->channel]};
    return stream_append(stream, &mark);
}

void graph_trim_locked(struct gpu *gpu)
{
    struct graph_pool *pool = &gpu->graphs;
    if (!pool->reserved)
        return;
    uint64_t keep = used(gpu);
    if (pool->reserved > keep) {
        sim_refund(&gpu->map, pool->reserved - keep);
        pool->reserved = keep;
    }
}

/* ---- launches ---- */

static int64_t change(const struct step *step, bool back, bool *valid)
{
    bool alloc = step->params.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    if (!alloc && step->params.type != CU_GRAPH_NODE_TYPE_MEM_FREE)
        return 0;
    struct block *block = graph_block(step->params.dptr);
    if (!block || block->live == (alloc != back)) {
        *valid = false;
        return 0;
    }
    block->live = !block->live;
    return block->live ? (int64_t)ROUND512(block->size) : -(int64_t)ROUND512(block->size);
}

static void free_last_launch(const struct CUgraphExec_st *exec)
{
    for (size_t i = 0; i < exec->count; i++) {
        struct block *block = exec->steps[i].params.type == CU_GRAPH_NODE_TYPE_MEM_ALLOC
                                  ? graph_block(exec->steps[i].params.dptr) : NULL;
        if (block && block->live) {
            block->live = false;
            block->gpu->graphs.unfreed -= ROUND512(block->size);
        }
    }
}

static void undo(const struct CUgraphExec_st *exec, size_t done)
{
    bool valid = true;
    while (done-- > 0)
        change(&exec->steps[done], true, &valid);
}

/* `keep`: a launch, else only what it would take. */
static CUresult take(struct CUgraphExec_st *exec, struct CUstream_st *stream, bool keep)
{
    struct graph_pool *pool = &stream->gpu->graphs;
    int64_t now = 0, most = 0;
    bool valid = true;
    size_t done = 0;
    if (exec->flags & CUDA_GRAPH_INSTANTIATE_FLAG_AUTO_FREE_ON_LAUNCH)
        free_last_launch(exec);
    for (; done < exec->count; done++) {
        now += change(&exec->steps[done], false, &valid);
        if (!valid)
            break;
        most = now > most ? now : most;
    }
    queue_idle(&stream->gpu->queue); /* what is done by now holds nothing */
    uint64_t others = used(stream->gpu) - pool->hold[stream->channel], mine = pool->hold[stream->channel];
    mine = (uint64_t)most > mine ? (uint64_t)most : mine; /* one after the other, in one stream */
    CUresult result = valid ? reserve(stream->gpu, others + mine) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS || !keep) {
        undo(exec, done);
        return result;
    }
    pool->unfreed += (uint64_t)now;
    hold(stream->gpu, stream->channel, mine - (uint64_t)now);
    uint64_t total = used(stream->gpu);
    if (total > pool->used_high)
        pool->used_high = total;
    return CUDA_SUCCESS;
}

CUresult graph_memory_take(struct CUgraphExec_st *exec, struct CUstream_st *stream)
{
    pthread_mutex_lock(&api_lock);
    CUresult result = take(exec, stream, true);
    pthread_mutex_unlock(&api_lock);
    return result;
}

CUresult graph_memory_queued(struct CUstream_st *stream)
{
    return hold_until_now(stream);
}

CUresult graph_memory_upload(struct CUgraphExec_st *exec, struct CUstream_st *stream)
{
    pthread_mutex_lock(&api_lock);
    CUresult result = take(exec, stream, false);
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* cuMemFree (no stream: everything is done) and cuMemFreeAsync of what a launch has allocated. */
CUresult graph_free(struct block *block, struct CUstream_st *stream)
{
    struct graph_pool *pool = &block->gpu->graphs;
    if (!block->live)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream && stream->gpu == block->gpu) {
        used(block->gpu); /* what is done is not held any longer than that */
        hold(block->gpu, stream->channel, pool->hold[stream->channel] + ROUND512(block->size));
        TRY(hold_until_now(stream));
    }
    block->live = false;
    pool->unfreed -= ROUND512(block->size);
    if (block->orphan)
        remove_block(block);
    return CUDA_SUCCESS;
}

/* ---- entry points ---- */

#define DEVICE(value, device) \
    CHECK_INIT(); \
    struct gpu *gpu = gpu_of(device); \
    if (!gpu) \
        return CUDA_ERROR_INVALID_DEVICE; \
    if (!(value) || (unsigned)attribute > CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH) \
        return CUDA_ERROR_INVALID_VALUE

API cuDeviceGetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
    DEVICE(value, device);
    pthread_mutex_lock(&api_lock);
    struct graph_pool *pool = &gpu->graphs;
    if (gpu->map.slot >= 0)
        queue_idle(&gpu->queue);
    uint64_t values[] = {pool->reserved ? used(gpu) : 0, pool->used_high, pool->reserved, pool->reserved_high};
    *(uint64_t *)value = values[attribute];
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuDeviceSetGraphMemAttribute(CUdevice device, CUgraphMem_attribute attribute, void *value)
{
    DEVICE(value, device);
    struct graph_pool *pool = &gpu->graphs;
    bool high = attribute == CU_GRAPH_MEM_ATTR_USED_MEM_HIGH || attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH;
    if (!high || *(uint64_t *)value)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    if (attribute == CU_GRAPH_MEM_ATTR_RESERVED_MEM_HIGH)
        pool->reserved_high = pool->reserved;
    else
        pool->used_high = pool->reserved ? used(gpu) : 0;
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuDeviceGraphMemTrim(CUdevice device)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    if (gpu->map.slot >= 0)
        queue_idle(&gpu->queue);
    graph_trim_locked(gpu);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}
