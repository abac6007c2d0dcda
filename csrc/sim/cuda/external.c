/* external.c: external memory. What comes from outside is here what another process exported: the descriptor of an
 * allocation of cuMemCreate. A graphics API there is none. */
#include <unistd.h>
#include "cuda/vmm.h"

#define OPAQUE_FD 1
#define DEDICATED 1u

typedef struct {
    int type;
    union { int fd; struct { void *handle; const void *name; } win32; const void *nvSciBufObject; } handle;
    unsigned long long size;
    unsigned int flags, reserved[16];
} CUDA_EXTERNAL_MEMORY_HANDLE_DESC;
_Static_assert(sizeof(CUDA_EXTERNAL_MEMORY_HANDLE_DESC) == 104, "CUDA's");

struct CUextMemory_st {
    struct object object;
    struct allocation *allocation;   /* one of its handles */
    uint64_t size;
};

API cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc);
API cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, CUexternalMemory memory,
                                    const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc);
API cuDestroyExternalMemory(CUexternalMemory memory);

static void drop_handle(struct allocation *allocation)
{
    allocation->handles--;
    allocation_drop_if_last(allocation);
}

static CUresult import(const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc, CUexternalMemory *out)
{
    struct allocation *allocation;
    TRY(allocation_import(desc->handle.fd, &allocation));
    bool good = !allocation->multicast && desc->size <= allocation->size;
    struct CUextMemory_st *memory = good ? object_new(OBJ_EXTERNAL, sizeof *memory, NULL) : NULL;
    if (!memory) {
        drop_handle(allocation);
        return good ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_VALUE;
    }
    memory->allocation = allocation;
    memory->size = desc->size;
    close(desc->handle.fd); /* as documented: from here on it is the driver's */
    *out = memory;
    return CUDA_SUCCESS;
}

API cuImportExternalMemory(CUexternalMemory *memory, const CUDA_EXTERNAL_MEMORY_HANDLE_DESC *desc)
{
    CHECK_INIT();
    if (!memory || !desc || !desc->size || (desc->flags & ~DEDICATED))
        return CUDA_ERROR_INVALID_VALUE;
    if (desc->type != OPAQUE_FD)
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&api_lock);
    CUresult result = import(desc, memory);
    pthread_mutex_unlock(&api_lock);
    return result;
}

static CUresult map_buffer(struct CUctx_st *ctx, struct CUextMemory_st *memory, uint64_t offset, uint64_t size,
                           CUdeviceptr *pointer)
{
    struct allocation *allocation = memory->allocation;
    struct block *block;
    struct gpu *gpu = allocation->gpu ? allocation->gpu : ctx->gpu;
    TRY(file_map(ctx, gpu, allocation->file, allocation->at + offset, size, &block));
    block->kind = BLOCK_EXTERNAL;
    block->allocation = allocation;
    allocation->mappings++;
    *pointer = block->base;
    return CUDA_SUCCESS;
}

/* The buffer is freed with cuMemFree, and holds the memory until then. */
API cuExternalMemoryGetMappedBuffer(CUdeviceptr *pointer, CUexternalMemory memory,
                                    const CUDA_EXTERNAL_MEMORY_BUFFER_DESC *desc)
{
    struct CUctx_st *ctx;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!object_is(memory, OBJ_EXTERNAL))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!pointer || !desc || desc->flags || !desc->size || desc->offset > memory->size ||
        desc->size > memory->size - desc->offset)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = map_buffer(ctx, memory, desc->offset, desc->size, pointer);
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuDestroyExternalMemory(CUexternalMemory memory)
{
    CHECK_INIT();
    if (!object_is(memory, OBJ_EXTERNAL))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&api_lock);
    drop_handle(memory->allocation);
    object_free(memory);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}
