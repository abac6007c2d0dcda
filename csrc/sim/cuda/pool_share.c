/* pool_share.c: pools whose allocations other processes may map. Such a pool is a sparse file, its allocations are
 * stretches of that, and what is exported of one is where it lies. An importing process has a pool that allocates nothing, and
 * frees what it imported; the bytes stay the exporting process's as long as it lives. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "cuda/pool.h"

#define FILE_SIZE     (16ull << 40) /* address space only */
#define POINTER_MAGIC 0x72746e696f706d73ull

API cuMemPoolExportToShareableHandle(void *handle, CUmemoryPool pool, CUmemAllocationHandleType type,
                                     unsigned long long flags);
API cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type,
                                       unsigned long long flags);
API cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr pointer);
API cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data);

struct pointer { uint64_t magic, inode, offset, size, share, unused[3]; };
_Static_assert(sizeof(struct pointer) == sizeof(CUmemPoolPtrExportData), "as large as CUDA's");

CUresult pool_make_file(struct CUmemPoolHandle_st *pool)
{
    struct label label = {.kind = LABEL_POOL};
    memcpy(label.uuid, pool->gpu->conf.uuid, sizeof label.uuid);
    pool->file = shared_file_new(FILE_SIZE, &label);
    pool->inode = shared_file_inode(pool->file);
    return pool->file >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static bool take_place(struct CUmemPoolHandle_st *pool, uint64_t size, uint64_t *offset)
{
    for (struct place **at = &pool->places; *at; at = &(*at)->next) {
        struct place *place = *at;
        if (place->size != size)
            continue;
        *offset = place->offset;
        *at = place->next;
        free(place);
        return true;
    }
    if (pool->file_end + size > FILE_SIZE)
        return false;
    *offset = pool->file_end;
    pool->file_end += size;
    return true;
}

static void give_place(struct CUmemPoolHandle_st *pool, uint64_t size, uint64_t offset)
{
    struct place *place = malloc(sizeof *place);
    if (!place)
        return; /* that part of the file is lost, no more */
    *place = (struct place){offset, size, pool->places};
    pool->places = place;
}

CUresult pool_file_block(struct CUmemPoolHandle_st *pool, struct CUctx_st *ctx, uint64_t bytes, struct block **out)
{
    uint64_t charged = ROUND512(bytes), space = (charged + 4095) & ~4095ull, offset;
    struct block *block;
    if (charged < bytes || charged > pool->gpu->conf.bytes || sim_charge(&pool->gpu->map, charged) != 0)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bool placed = take_place(pool, space, &offset);
    if (!placed || file_map(ctx, pool->gpu, pool->file, offset, bytes, &block) != CUDA_SUCCESS) {
        if (placed)
            give_place(pool, space, offset);
        sim_refund(&pool->gpu->map, charged);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->kind = BLOCK_POOL;
    block->charged = charged;
    block->space = space;
    block->offset = offset;
    *out = block;
    return CUDA_SUCCESS;
}

/* What another process still has open is left as it is, and its place never given out again. */
void pool_file_release(struct CUmemPoolHandle_st *pool, const struct cached *cached)
{
    munmap((void *)(uintptr_t)cached->base, cached->space);
    if (pool->imported || (cached->share && sim_share_held(&pool->gpu->map, cached->share)))
        return;
    fallocate(pool->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)cached->offset, (off_t)cached->space);
    give_place(pool, cached->space, cached->offset);
}

/* ---- the pool ---- */

API cuMemPoolExportToShareableHandle(void *out, CUmemoryPool pool, CUmemAllocationHandleType type,
                                     unsigned long long flags)
{
    CHECK_INIT();
    if (!out || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR || !object_is(pool, OBJ_POOL) ||
        pool->file < 0 || pool->imported)
        return CUDA_ERROR_INVALID_VALUE;
    int descriptor = fcntl(pool->file, F_DUPFD_CLOEXEC, 3);
    if (descriptor < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    *(int *)out = descriptor;
    return CUDA_SUCCESS;
}

static CUresult import_pool(int descriptor, struct gpu *gpu, CUmemoryPool *out)
{
    TRY(gpu_join(gpu));
    struct CUmemPoolHandle_st *pool = pool_new(gpu);
    if (!pool)
        return CUDA_ERROR_OUT_OF_MEMORY;
    pool->imported = true;
    pool->file = fcntl(descriptor, F_DUPFD_CLOEXEC, 3);
    pool->inode = shared_file_inode(descriptor);
    *out = pool;
    return pool->file >= 0 ? CUDA_SUCCESS : CUDA_ERROR_OPERATING_SYSTEM;
}

/* Not in the process that made it: there the two would free each other's allocations. */
API cuMemPoolImportFromShareableHandle(CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type,
                                       unsigned long long flags)
{
    struct label label;
    CHECK_INIT();
    int descriptor = (int)(intptr_t)handle;
    if (!pool || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ||
        !shared_file_label(descriptor, LABEL_POOL, &label))
        return CUDA_ERROR_INVALID_VALUE;
    struct gpu *gpu = gpu_of_uuid(label.uuid);
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    bool own = pool_known_file(shared_file_inode(descriptor));
    CUresult result = own ? CUDA_ERROR_INVALID_VALUE : import_pool(descriptor, gpu, pool);
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* ---- allocations ---- */

API cuMemPoolExportPointer(CUmemPoolPtrExportData *data, CUdeviceptr pointer)
{
    CHECK_INIT();
    if (!data)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(pointer);
    bool good = block && block->base == pointer && block->kind == BLOCK_POOL && block->pool->file >= 0 &&
                !block->pool->imported;
    CUresult result = good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    if (good && !block->share && sim_share(&block->gpu->map, block->charged, &block->share) != 0)
        result = CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        struct pointer where = {.magic = POINTER_MAGIC, .inode = block->pool->inode, .offset = block->offset,
                                .size = block->size, .share = block->share};
        memcpy(data, &where, sizeof where);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

struct search { uint64_t share; const struct CUmemPoolHandle_st *pool; bool found; };

static void same(struct block *block, void *arg)
{
    struct search *search = arg;
    search->found |= block->share == search->share && block->pool == search->pool;
}

static CUresult import_pointer(struct CUmemPoolHandle_st *pool, struct CUctx_st *ctx, const struct pointer *where,
                               CUdeviceptr *pointer)
{
    struct search search = {where->share, pool, false};
    struct block *block;
    block_each(same, &search);
    for (struct cached *cached = pool->cached; cached; cached = cached->next)
        search.found |= cached->share == where->share; /* freed, and not gone yet */
    if (search.found || sim_share_hold(&pool->gpu->map, where->share, 0) != 0)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = file_map(ctx, pool->gpu, pool->file, where->offset, where->size, &block);
    if (result != CUDA_SUCCESS) {
        sim_share_drop(&pool->gpu->map, where->share);
        return result;
    }
    block->kind = BLOCK_POOL;
    block->pool = pool;
    pool->blocks++;
    block->space = (where->size + 4095) & ~4095ull;
    block->offset = where->offset;
    block->share = where->share;
    *pointer = block->base;
    return CUDA_SUCCESS;
}

/* Once at a time: what is imported is freed by cuMemFree or cuMemFreeAsync, and may then be imported again. */
API cuMemPoolImportPointer(CUdeviceptr *pointer, CUmemoryPool pool, CUmemPoolPtrExportData *data)
{
    struct pointer where;
    struct CUctx_st *ctx;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!pointer || !data || !object_is(pool, OBJ_POOL) || !pool->imported)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&where, data, sizeof where);
    if (where.magic != POINTER_MAGIC || where.inode != pool->inode || where.offset % 4096 || where.offset > FILE_SIZE ||
        where.size > FILE_SIZE - where.offset)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    queue_idle(&pool->gpu->queue);
    pool_trim_locked(pool->gpu, false);
    CUresult result = import_pointer(pool, ctx, &where, pointer);
    pthread_mutex_unlock(&api_lock);
    return result;
}
