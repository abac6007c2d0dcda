/* mipmap.c: mipmapped arrays: one piece of memory, with an array for each level in it. */
#include "cuda/sim.h"

#define LEVELS 32

struct CUmipmappedArray_st {
    struct object object;
    struct gpu *gpu;
    uint64_t bytes;
    bool deferred;
    void *data;
    unsigned levels;
    struct CUarray_st *level[LEVELS];
};

API cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int levels);
API cuMipmappedArrayDestroy(CUmipmappedArray array);
API cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray array, unsigned int level);
API cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, CUmipmappedArray array,
                                          CUdevice device);

/* Depth counts layers, or faces, where every level has all of them. */
static bool layered(const CUDA_ARRAY3D_DESCRIPTOR *desc)
{
    return desc->Flags & (CUDA_ARRAY3D_LAYERED | CUDA_ARRAY3D_CUBEMAP);
}

static size_t halved(size_t size, unsigned level)
{
    return size && !(size >> level) ? 1 : size >> level;
}

static CUDA_ARRAY3D_DESCRIPTOR level_of(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned level)
{
    CUDA_ARRAY3D_DESCRIPTOR one = *desc;
    one.Width = halved(desc->Width, level);
    one.Height = halved(desc->Height, level);
    one.Depth = layered(desc) ? desc->Depth : halved(desc->Depth, level);
    return one;
}

/* Until everything is one element; more are not an error, but not there either. */
static unsigned levels_of(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned wanted)
{
    size_t most = desc->Width > desc->Height ? desc->Width : desc->Height;
    most = !layered(desc) && desc->Depth > most ? desc->Depth : most;
    unsigned levels = 1;
    while (levels < wanted && levels < LEVELS && most >> levels)
        levels++;
    return levels;
}

static bool place_levels(const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned levels, uint64_t offset[LEVELS + 1])
{
    offset[0] = 0;
    for (unsigned i = 0; i < levels; i++) {
        CUDA_ARRAY3D_DESCRIPTOR one = level_of(desc, i);
        uint64_t bytes;
        if (!array_bytes(&one, &bytes) || __builtin_add_overflow(offset[i], ROUND512(bytes), &offset[i + 1]))
            return false;
    }
    return true;
}

static void release(struct CUmipmappedArray_st *array)
{
    struct block *block = array->data ? block_find((uintptr_t)array->data) : NULL;
    if (block)
        block_destroy(block);
    for (unsigned i = 0; i < array->levels; i++)
        if (array->level[i])
            object_free(array->level[i]);
    object_free(array);
}

static CUresult create(struct CUctx_st *ctx, const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned levels,
                       const uint64_t offset[LEVELS + 1], CUmipmappedArray *out)
{
    struct block *block;
    TRY(array_memory(ctx, desc, offset[levels], &block));
    struct CUmipmappedArray_st *array = object_new(OBJ_MIPMAP, sizeof *array, ctx);
    if (!array) {
        if (block)
            block_destroy(block);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    array->gpu = ctx->gpu;
    array->bytes = offset[levels];
    array->deferred = desc->Flags & CUDA_ARRAY3D_DEFERRED_MAPPING;
    array->data = block ? (void *)(uintptr_t)block->base : NULL;
    array->levels = levels;
    for (unsigned i = 0; i < levels; i++) {
        CUDA_ARRAY3D_DESCRIPTOR one = level_of(desc, i);
        void *data = block ? (void *)(uintptr_t)(block->base + offset[i]) : NULL;
        array->level[i] = array_new(ctx, &one, offset[i + 1] - offset[i], data);
        if (!array->level[i]) {
            release(array);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        array->level[i]->level = true;
    }
    *out = array;
    return CUDA_SUCCESS;
}

API cuMipmappedArrayCreate(CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *desc, unsigned int wanted)
{
    struct CUctx_st *ctx;
    uint64_t offset[LEVELS + 1];
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!array)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(array_check(desc));
    unsigned levels = levels_of(desc, wanted);
    if (!place_levels(desc, levels, offset))
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&api_lock);
    CUresult result = create(ctx, desc, levels, offset, array);
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMipmappedArrayDestroy(CUmipmappedArray array)
{
    CHECK_INIT();
    if (!object_is(array, OBJ_MIPMAP))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&api_lock);
    queue_wait_all(&array->gpu->queue);
    release(array);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuMipmappedArrayGetLevel(CUarray *out, CUmipmappedArray array, unsigned int level)
{
    CHECK_INIT();
    if (!object_is(array, OBJ_MIPMAP))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || level >= array->levels)
        return CUDA_ERROR_INVALID_VALUE;
    *out = array->level[level];
    return CUDA_SUCCESS;
}

API cuMipmappedArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, CUmipmappedArray array,
                                          CUdevice device)
{
    CHECK_INIT();
    if (!object_is(array, OBJ_MIPMAP))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!gpu_of(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!requirements || !array->deferred)
        return CUDA_ERROR_INVALID_VALUE;
    *requirements = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = array->bytes, .alignment = 512};
    return CUDA_SUCCESS;
}
