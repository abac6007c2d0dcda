/* memory.c: synchronous allocation, managed memory, and questions about pointers. */
#include <stdlib.h>
#include "cuda/vmm.h"

CUresult block_alloc(struct CUctx_st *ctx, struct gpu *gpu, uint64_t bytes, enum block_kind kind, bool low,
                     struct block **out)
{
    uint64_t charged = ROUND512(bytes), taken;
    if (charged < bytes || charged > gpu->conf.bytes)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (sim_charge(&gpu->map, charged) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t base = space_alloc(charged, low, &taken);
    struct block *block = base ? block_insert(base, bytes, kind, ctx, gpu) : NULL;
    if (!block) {
        if (base)
            space_free(base, taken, low);
        sim_refund(&gpu->map, charged);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->charged = charged;
    block->space = taken;
    block->low = low;
    *out = block;
    return CUDA_SUCCESS;
}

/* Freed here while another process still has it open: the pages stay until that one is done. */
struct lingering { uint64_t base, space, share; bool low; struct gpu *gpu; struct lingering *next; };
static struct lingering *lingering;

static void free_lingering(void)
{
    for (struct lingering **at = &lingering; *at;) {
        struct lingering *old = *at;
        if (sim_share_held(&old->gpu->map, old->share)) {
            at = &old->next;
            continue;
        }
        *at = old->next;
        space_free(old->base, old->space, old->low);
        free(old);
    }
}

static void drop_shared(struct block *block)
{
    sim_share_drop(&block->gpu->map, block->share);
    if (!block->space)
        return;
    struct lingering *old = malloc(sizeof *old);
    if (old) { /* else that address space is lost, no more */
        *old = (struct lingering){block->base, block->space, block->share, block->low, block->gpu, lingering};
        lingering = old;
    }
    free_lingering();
}

void block_destroy(struct block *block)
{
    if (block->kind == BLOCK_FILE || block->kind == BLOCK_EXTERNAL)
        file_unmap(block);
    if (block->kind == BLOCK_EXTERNAL) {
        block->allocation->mappings--;
        allocation_drop_if_last(block->allocation);
    }
    if (block->share) {
        drop_shared(block);
    } else {
        if (block->space)
            space_free(block->base, block->space, block->low);
        if (block->charged)
            sim_refund(&block->gpu->map, block->charged);
    }
    block_remove(block);
}

bool device_range(uint64_t address, uint64_t bytes)
{
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(address);
    bool inside = block && address + bytes >= address && address + bytes <= block->base + block->size;
    while (block && !inside && block->kind == BLOCK_MAPPING) { /* mappings side by side are one range */
        uint64_t end = block->base + block->size;
        block = block_find(end);
        if (!block || block->base != end || block->kind != BLOCK_MAPPING)
            break;
        inside = address + bytes <= block->base + block->size;
    }
    pthread_mutex_unlock(&api_lock);
    return inside;
}

struct doomed { struct CUctx_st *ctx; struct block **blocks; size_t count, room; };

static void collect(struct block *block, void *arg)
{
    struct doomed *doomed = arg;
    if (block->ctx != doomed->ctx || block->kind == BLOCK_MAPPING)
        return;
    if (doomed->count == doomed->room) {
        size_t room = doomed->room ? 2 * doomed->room : 64;
        struct block **more = realloc(doomed->blocks, room * sizeof *more);
        if (!more)
            return;
        doomed->blocks = more;
        doomed->room = room;
    }
    doomed->blocks[doomed->count++] = block;
}

/* Its device, managed, stream-ordered and pinned host memory. What VMM maps belongs to the process, not to a context.
 * */
void context_drop_memory(struct CUctx_st *ctx)
{
    struct doomed doomed = {.ctx = ctx};
    block_each(collect, &doomed);
    for (size_t i = 0; i < doomed.count; i++)
        if (doomed.blocks[i]->kind == BLOCK_POOL)
            pool_free(doomed.blocks[i], NULL);
        else if (doomed.blocks[i]->kind == BLOCK_GRAPH)
            graph_drop(doomed.blocks[i]);
        else
            block_destroy(doomed.blocks[i]);
    free(doomed.blocks);
}

/* ---- entry points ---- */

API cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes);
API cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes);
API cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                    unsigned int element);
API cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element);
API cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags);
API cuMemFree(CUdeviceptr_v1 pointer);
API cuMemFree_v2(CUdeviceptr pointer);
API cuMemGetInfo(unsigned int *free, unsigned int *total);
API cuMemGetInfo_v2(size_t *free, size_t *total);
API cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *size, CUdeviceptr_v1 pointer);
API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer);

static CUresult allocate(CUdeviceptr *pointer, size_t bytes, enum block_kind kind, bool low)
{
    struct CUctx_st *ctx;
    struct block *block;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!pointer || !bytes)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(capture_forbids());
    pthread_mutex_lock(&api_lock);
    CUresult result = block_alloc(ctx, ctx->gpu, bytes, kind, low, &block);
    if (result == CUDA_SUCCESS)
        *pointer = block->base;
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemAlloc_v2(CUdeviceptr *pointer, size_t bytes)
{
    return allocate(pointer, bytes, BLOCK_DEVICE, false);
}

API cuMemAlloc(CUdeviceptr_v1 *pointer, unsigned int bytes)
{
    CUdeviceptr wide;
    if (!pointer)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(allocate(&wide, bytes, BLOCK_DEVICE, true));
    *pointer = (CUdeviceptr_v1)wide;
    return CUDA_SUCCESS;
}

static CUresult allocate_pitch(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element,
                               bool low)
{
    CHECK_INIT();
    if (!pitch || !width || !height || (element != 4 && element != 8 && element != 16))
        return CUDA_ERROR_INVALID_VALUE;
    size_t row = (size_t)ROUND512(width), bytes;
    if (row < width || __builtin_mul_overflow(row, height, &bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    TRY(allocate(pointer, bytes, BLOCK_DEVICE, low));
    *pitch = row;
    return CUDA_SUCCESS;
}

API cuMemAllocPitch_v2(CUdeviceptr *pointer, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    return allocate_pitch(pointer, pitch, width, height, element, false);
}

API cuMemAllocPitch(CUdeviceptr_v1 *pointer, unsigned int *pitch, unsigned int width, unsigned int height,
                    unsigned int element)
{
    CUdeviceptr wide;
    size_t row;
    if (!pointer || !pitch)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(allocate_pitch(&wide, &row, width, height, element, true));
    *pointer = (CUdeviceptr_v1)wide;
    *pitch = (unsigned int)row;
    return CUDA_SUCCESS;
}

API cuMemAllocManaged(CUdeviceptr *pointer, size_t bytes, unsigned int flags)
{
    CHECK_INIT();
    if (flags != CU_MEM_ATTACH_GLOBAL && flags != CU_MEM_ATTACH_HOST)
        return CUDA_ERROR_INVALID_VALUE;
    return allocate(pointer, bytes, BLOCK_MANAGED, false);
}

static bool freeable(const struct block *block)
{
    return block->kind == BLOCK_DEVICE || block->kind == BLOCK_MANAGED || block->kind == BLOCK_POOL ||
        block->kind == BLOCK_EXTERNAL;
}

/* As the real driver, waits for the GPU first. NULL is fine; what is not the start of an allocation is not. */
API cuMemFree_v2(CUdeviceptr pointer)
{
    struct CUctx_st *ctx;
    CUresult result = CUDA_SUCCESS;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!pointer)
        return CUDA_SUCCESS;
    TRY(capture_forbids());
    queue_wait_all(&ctx->gpu->queue); /* outside the lock: other threads need not wait as well */
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(pointer);
    if (graph_block(pointer)) {
        result = graph_free(block, NULL);
    } else if (!block || block->base != pointer || !freeable(block)) {
        result = CUDA_ERROR_INVALID_VALUE;
    } else {
        if (block->gpu != ctx->gpu)
            queue_wait_all(&block->gpu->queue);
        if (block->kind == BLOCK_POOL)
            result = pool_free(block, NULL);
        else
            block_destroy(block);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemFree(CUdeviceptr_v1 pointer)
{
    return cuMemFree_v2(pointer);
}

API cuMemGetInfo_v2(size_t *free_out, size_t *total)
{
    struct CUctx_st *ctx;
    CHECK_INIT();
    TRY(current_context(&ctx));
    struct sim_map *map = &ctx->gpu->map;
    sim_lock(map);
    sim_reap(map); /* the dead's memory is free */
    uint64_t used = sim_used(map->state), all = map->state->total;
    sim_unlock(map);
    if (free_out)
        *free_out = used < all ? all - used : 0;
    if (total)
        *total = all;
    return CUDA_SUCCESS;
}

static unsigned int narrow(size_t value)
{
    return value > UINT32_MAX ? UINT32_MAX : (unsigned int)value;
}

API cuMemGetInfo(unsigned int *free_out, unsigned int *total)
{
    size_t wide_free, wide_total;
    TRY(cuMemGetInfo_v2(&wide_free, &wide_total));
    if (free_out)
        *free_out = narrow(wide_free);
    if (total)
        *total = narrow(wide_total);
    return CUDA_SUCCESS;
}

API cuMemGetAddressRange_v2(CUdeviceptr *base, size_t *size, CUdeviceptr pointer)
{
    CHECK_INIT();
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(pointer);
    CUresult result = block && block->kind != BLOCK_REGISTERED ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
    if (result == CUDA_SUCCESS) {
        if (base)
            *base = block->base;
        if (size)
            *size = block->size;
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemGetAddressRange(CUdeviceptr_v1 *base, unsigned int *size, CUdeviceptr_v1 pointer)
{
    CUdeviceptr wide;
    size_t length;
    TRY(cuMemGetAddressRange_v2(&wide, &length, pointer));
    if (base)
        *base = (CUdeviceptr_v1)wide;
    if (size)
        *size = narrow(length);
    return CUDA_SUCCESS;
}
