/* array.c: arrays, laid out plainly, row after row. One whose memory is to be mapped later has none: nothing maps it.
 */
#include <string.h>
#include "cuda/sim.h"

static unsigned format_bytes(CUarray_format format)
{
    switch (format) {
    case CU_AD_FORMAT_UNSIGNED_INT8:
    case CU_AD_FORMAT_SIGNED_INT8:
        return 1;
    case CU_AD_FORMAT_UNSIGNED_INT16:
    case CU_AD_FORMAT_SIGNED_INT16:
    case CU_AD_FORMAT_HALF:
        return 2;
    case CU_AD_FORMAT_UNSIGNED_INT32:
    case CU_AD_FORMAT_SIGNED_INT32:
    case CU_AD_FORMAT_FLOAT:
        return 4;
    default:
        return 0;
    }
}

CUresult array_check(const CUDA_ARRAY3D_DESCRIPTOR *desc)
{
    if (!desc || !format_bytes(desc->Format) || !desc->Width ||
        (desc->NumChannels != 1 && desc->NumChannels != 2 && desc->NumChannels != 4))
        return CUDA_ERROR_INVALID_VALUE;
    return desc->Flags & CUDA_ARRAY3D_SPARSE ? CUDA_ERROR_NOT_SUPPORTED : CUDA_SUCCESS;
}

bool array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *desc, uint64_t *bytes)
{
    *bytes = (uint64_t)format_bytes(desc->Format) * desc->NumChannels;
    return !__builtin_mul_overflow(*bytes, (uint64_t)desc->Width, bytes) &&
        !__builtin_mul_overflow(*bytes, (uint64_t)(desc->Height ? desc->Height : 1), bytes) &&
        !__builtin_mul_overflow(*bytes, (uint64_t)(desc->Depth ? desc->Depth : 1), bytes) && ROUND512(*bytes) >= *bytes;
}

struct CUarray_st *array_new(struct CUctx_st *ctx, const CUDA_ARRAY3D_DESCRIPTOR *desc, uint64_t bytes, void *data)
{
    struct CUarray_st *array = object_new(OBJ_ARRAY, sizeof *array, ctx);
    if (array) {
        array->gpu = ctx->gpu;
        array->desc = *desc;
        array->element = (uint64_t)format_bytes(desc->Format) * desc->NumChannels;
        array->bytes = ROUND512(bytes);
        array->data = data;
    }
    return array;
}

CUresult array_memory(struct CUctx_st *ctx, const CUDA_ARRAY3D_DESCRIPTOR *desc, uint64_t bytes, struct block **block)
{
    *block = NULL;
    if (desc->Flags & CUDA_ARRAY3D_DEFERRED_MAPPING)
        return CUDA_SUCCESS;
    return block_alloc(ctx, ctx->gpu, bytes, BLOCK_GLOBAL, false, block); /* no pointer of the program's */
}

static CUresult create(CUarray *out, const CUDA_ARRAY3D_DESCRIPTOR *desc)
{
    struct CUctx_st *ctx;
    struct block *block;
    uint64_t bytes;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(array_check(desc));
    if (!array_bytes(desc, &bytes))
        return CUDA_ERROR_OUT_OF_MEMORY;
    pthread_mutex_lock(&api_lock);
    CUresult result = array_memory(ctx, desc, bytes, &block);
    if (result == CUDA_SUCCESS) {
        *out = array_new(ctx, desc, bytes, block ? (void *)(uintptr_t)block->base : NULL);
        if (!*out && block)
            block_destroy(block);
        result = *out ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *desc);
API cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *desc);
API cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *desc);
API cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *desc);
API cuArrayDestroy(CUarray array);
API cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *desc, CUarray array);
API cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *desc, CUarray array);
API cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *desc, CUarray array);
API cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *desc, CUarray array);
API cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, CUarray array, CUdevice device);

#define FROM2D(d) {.Width = (d)->Width, .Height = (d)->Height, .Format = (d)->Format, .NumChannels = (d)->NumChannels}
#define FROM3D(d) {.Width = (d)->Width, .Height = (d)->Height, .Depth = (d)->Depth, .Format = (d)->Format, \
                   .NumChannels = (d)->NumChannels, .Flags = (d)->Flags}

API cuArray3DCreate_v2(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *desc)
{
    return create(array, desc);
}

API cuArray3DCreate(CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *desc)
{
    if (!desc)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR wide = FROM3D(desc);
    return create(array, &wide);
}

API cuArrayCreate_v2(CUarray *array, const CUDA_ARRAY_DESCRIPTOR *desc)
{
    if (!desc)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR wide = FROM2D(desc);
    return create(array, &wide);
}

API cuArrayCreate(CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *desc)
{
    if (!desc)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_ARRAY3D_DESCRIPTOR wide = FROM2D(desc);
    return create(array, &wide);
}

API cuArrayDestroy(CUarray array)
{
    CHECK_INIT();
    if (!object_is(array, OBJ_ARRAY) || array->level) /* a level goes with its mipmapped array */
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&api_lock);
    queue_wait_all(&array->gpu->queue);
    struct block *block = array->data ? block_find((uintptr_t)array->data) : NULL;
    if (block)
        block_destroy(block);
    object_free(array);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

#define DESCRIBE(desc, array) \
    do { \
        CHECK_INIT(); \
        if (!object_is(array, OBJ_ARRAY)) \
            return CUDA_ERROR_INVALID_HANDLE; \
        if (!(desc)) \
            return CUDA_ERROR_INVALID_VALUE; \
    } while (0)

API cuArray3DGetDescriptor_v2(CUDA_ARRAY3D_DESCRIPTOR *desc, CUarray array)
{
    DESCRIBE(desc, array);
    *desc = array->desc;
    return CUDA_SUCCESS;
}

API cuArray3DGetDescriptor(CUDA_ARRAY3D_DESCRIPTOR_v1 *desc, CUarray array)
{
    DESCRIBE(desc, array);
    const CUDA_ARRAY3D_DESCRIPTOR *d = &array->desc;
    *desc = (CUDA_ARRAY3D_DESCRIPTOR_v1){(unsigned)d->Width, (unsigned)d->Height, (unsigned)d->Depth, d->Format,
                                         d->NumChannels,
                                         d->Flags};
    return CUDA_SUCCESS;
}

API cuArrayGetDescriptor_v2(CUDA_ARRAY_DESCRIPTOR *desc, CUarray array)
{
    DESCRIBE(desc, array);
    const CUDA_ARRAY3D_DESCRIPTOR *d = &array->desc;
    *desc = (CUDA_ARRAY_DESCRIPTOR){d->Width, d->Height, d->Format, d->NumChannels};
    return CUDA_SUCCESS;
}

API cuArrayGetDescriptor(CUDA_ARRAY_DESCRIPTOR_v1 *desc, CUarray array)
{
    DESCRIBE(desc, array);
    const CUDA_ARRAY3D_DESCRIPTOR *d = &array->desc;
    *desc = (CUDA_ARRAY_DESCRIPTOR_v1){(unsigned)d->Width, (unsigned)d->Height, d->Format, d->NumChannels};
    return CUDA_SUCCESS;
}

/* As documented, only of an array whose memory is mapped later. */
API cuArrayGetMemoryRequirements(CUDA_ARRAY_MEMORY_REQUIREMENTS *requirements, CUarray array, CUdevice device)
{
    DESCRIBE(requirements, array);
    if (!gpu_of(device))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!(array->desc.Flags & CUDA_ARRAY3D_DEFERRED_MAPPING))
        return CUDA_ERROR_INVALID_VALUE;
    *requirements = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = array->bytes, .alignment = 512};
    return CUDA_SUCCESS;
}
