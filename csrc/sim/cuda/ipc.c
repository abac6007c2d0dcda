/* ipc.c: memory of cuMemAlloc in several processes. A handle names a descriptor of the process that made it, so that
 * one must live, and be visible to the one that opens it, as it must with the real driver. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <unistd.h>
#include "cuda/vmm.h"

#define IPC_MAGIC 0x63706973u
#define LAZY_ENABLE_PEER_ACCESS 1u /* CUDA knows no other flag, and wants this one */

API cuIpcGetMemHandle(CUipcMemHandle *handle, CUdeviceptr pointer);
API cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags);
API cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags);
API cuIpcCloseMemHandle(CUdeviceptr pointer);

struct ipc_handle ipc_handle_of(struct gpu *gpu, enum ipc_kind kind, int file)
{
    const struct sim_map *map = &gpu->map;
    struct ipc_handle handle = {.magic = IPC_MAGIC, .kind = kind, .slot = (uint32_t)map->slot,
                                .generation = map->state->proc[map->slot].generation, .file = file};
    memcpy(handle.uuid, gpu->conf.uuid, sizeof handle.uuid);
    return handle;
}

CUresult ipc_open(const struct ipc_handle *handle, enum ipc_kind kind, struct CUctx_st **ctx, int *file)
{
    char path[64];
    TRY(current_context(ctx));
    if (handle->magic != IPC_MAGIC || handle->kind != kind || handle->slot >= SIM_PROCS)
        return CUDA_ERROR_INVALID_HANDLE;
    struct sim_map *map = &(*ctx)->gpu->map;
    if (memcmp((*ctx)->gpu->conf.uuid, handle->uuid, sizeof handle->uuid) != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    sim_lock(map);
    const struct sim_proc *proc = &map->state->proc[handle->slot];
    int pid = proc->generation == handle->generation ? sim_pid(map, (int)handle->slot) : 0;
    sim_unlock(map);
    if (pid == getpid())
        return CUDA_ERROR_INVALID_CONTEXT;
    if (pid <= 0)
        return CUDA_ERROR_INVALID_HANDLE;
    snprintf(path, sizeof path, "/proc/%d/fd/%d", pid, handle->file);
    *file = open(path, O_RDWR | O_CLOEXEC);
    return *file >= 0 ? CUDA_SUCCESS : errno == ENOENT ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_MAP_FAILED;
}

static CUresult export_block(struct block *block, struct ipc_handle *handle)
{
    uint64_t offset;
    if (!block || block->kind != BLOCK_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    int file = space_file(block->base, block->space, &offset);
    if (file < 0 || (!block->share && sim_share(&block->gpu->map, block->charged, &block->share) != 0))
        return CUDA_ERROR_OUT_OF_MEMORY;
    *handle = ipc_handle_of(block->gpu, IPC_MEMORY, file);
    handle->offset = offset;
    handle->size = block->size;
    handle->share = block->share;
    return CUDA_SUCCESS;
}

/* Any address in the allocation will do; the handle is that of all of it. */
API cuIpcGetMemHandle(CUipcMemHandle *out, CUdeviceptr pointer)
{
    struct ipc_handle handle;
    CHECK_INIT();
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = export_block(block_find(pointer), &handle);
    if (result == CUDA_SUCCESS)
        memcpy(out, &handle, sizeof handle);
    pthread_mutex_unlock(&api_lock);
    return result;
}

struct search { uint64_t share; struct gpu *gpu; struct block *found; };

static void same(struct block *block, void *arg)
{
    struct search *search = arg;
    if (block->kind == BLOCK_FILE && block->share == search->share && block->gpu == search->gpu && block->refs)
        search->found = block;
}

static CUresult open_block(struct CUctx_st *ctx, const struct ipc_handle *handle, int file, CUdeviceptr *pointer)
{
    struct search search = {handle->share, ctx->gpu, NULL};
    block_each(same, &search);
    if (search.found) { /* opened before: the same address */
        search.found->refs++;
        *pointer = search.found->base;
        return CUDA_SUCCESS;
    }
    struct block *block;
    if (sim_share_hold(&ctx->gpu->map, handle->share, 0) != 0)
        return CUDA_ERROR_INVALID_HANDLE; /* freed since */
    CUresult result = file_map(ctx, ctx->gpu, file, handle->offset, handle->size, &block);
    if (result != CUDA_SUCCESS) {
        sim_share_drop(&ctx->gpu->map, handle->share);
        return result;
    }
    block->share = handle->share;
    *pointer = block->base;
    return CUDA_SUCCESS;
}

API cuIpcOpenMemHandle_v2(CUdeviceptr *pointer, CUipcMemHandle given, unsigned int flags)
{
    struct ipc_handle handle;
    struct CUctx_st *ctx;
    int file;
    CHECK_INIT();
    if (!pointer || flags != LAZY_ENABLE_PEER_ACCESS)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&handle, &given, sizeof handle);
    TRY(ipc_open(&handle, IPC_MEMORY, &ctx, &file));
    pthread_mutex_lock(&api_lock);
    CUresult result = open_block(ctx, &handle, file, pointer);
    pthread_mutex_unlock(&api_lock);
    close(file);
    return result;
}

API cuIpcOpenMemHandle(CUdeviceptr *pointer, CUipcMemHandle handle, unsigned int flags)
{
    return cuIpcOpenMemHandle_v2(pointer, handle, flags);
}

API cuIpcCloseMemHandle(CUdeviceptr pointer)
{
    CHECK_INIT();
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(pointer);
    bool opened = block && block->kind == BLOCK_FILE && block->share && !block->pool && block->base == pointer;
    if (opened && --block->refs == 0) {
        queue_wait_all(&block->gpu->queue);
        block_destroy(block);
    }
    pthread_mutex_unlock(&api_lock);
    return opened ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
