/* pointer.c: attributes of pointers, and advice about managed memory, which is taken and changes nothing. */
#include <string.h>
#include "cuda/vmm.h"

API cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer);
API cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer);
API cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr pointer);
API cuMemAdvise(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUdevice device);
API cuMemAdvise_v2(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUmemLocation location);
API cuMemRangeGetAttribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr pointer, size_t bytes);

#define PUT(type, value) \
    do { \
        *(type *)data = (type)(value); \
        return CUDA_SUCCESS; \
    } while (0)

static CUresult attribute_of(const struct block *block, CUpointer_attribute attribute, void *data)
{
    bool host = block->kind == BLOCK_HOST || block->kind == BLOCK_REGISTERED;
    switch (attribute) {
    case CU_POINTER_ATTRIBUTE_CONTEXT:
        PUT(CUcontext, block->ctx);
    case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        PUT(unsigned int, host ? CU_MEMORYTYPE_HOST : CU_MEMORYTYPE_DEVICE);
    case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        PUT(unsigned int, block->kind == BLOCK_MANAGED);
    case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
        PUT(int, block->gpu->ordinal);
    case CU_POINTER_ATTRIBUTE_BUFFER_ID:
    case CU_POINTER_ATTRIBUTE_MEMORY_BLOCK_ID:
        PUT(unsigned long long, block->id);
    case CU_POINTER_ATTRIBUTE_RANGE_START_ADDR:
    case CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR:
        PUT(CUdeviceptr, block->base);
    case CU_POINTER_ATTRIBUTE_RANGE_SIZE:
    case CU_POINTER_ATTRIBUTE_MAPPING_SIZE:
        PUT(size_t, block->size);
    case CU_POINTER_ATTRIBUTE_MAPPED:
        PUT(unsigned int, 1);
    case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        PUT(unsigned int, 0);
    case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        PUT(unsigned int, block->kind == BLOCK_DEVICE);
    case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
    case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
        PUT(unsigned int, 0);
    case CU_POINTER_ATTRIBUTE_ALLOWED_HANDLE_TYPES:
        PUT(unsigned long long, block->kind == BLOCK_MAPPING ? block->allocation->prop.requestedHandleTypes : 0);
    case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        PUT(unsigned int, block->kind == BLOCK_MAPPING ? block->access : CU_MEM_ACCESS_FLAGS_PROT_READWRITE);
    case CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE:
        PUT(CUmemoryPool, block->pool);
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
}

static CUresult get(void *data, CUpointer_attribute attribute, CUdeviceptr pointer, const struct block *block)
{
    if (attribute == CU_POINTER_ATTRIBUTE_DEVICE_POINTER)
        PUT(CUdeviceptr, pointer);
    if (attribute == CU_POINTER_ATTRIBUTE_HOST_POINTER) {
        if (block->kind == BLOCK_DEVICE || block->kind == BLOCK_POOL || block->kind == BLOCK_MAPPING ||
            block->kind == BLOCK_GLOBAL || block->kind == BLOCK_FILE || block->kind == BLOCK_GRAPH ||
            block->kind == BLOCK_EXTERNAL)
            return CUDA_ERROR_INVALID_VALUE;
        PUT(void *, (uintptr_t)pointer);
    }
    return attribute_of(block, attribute, data);
}

API cuPointerGetAttribute(void *data, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    CHECK_INIT();
    if (!data)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(pointer);
    CUresult result = block ? get(data, attribute, pointer, block) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* Unknown pointers are no error here: their attributes are null. */
API cuPointerGetAttributes(unsigned int count, CUpointer_attribute *attributes, void **data, CUdeviceptr pointer)
{
    CHECK_INIT();
    if (!count || !attributes || !data)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(pointer);
    for (unsigned int i = 0; i < count; i++) {
        if (block && get(data[i], attributes[i], pointer, block) == CUDA_SUCCESS)
            continue;
        switch (attributes[i]) {
        case CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL:
            *(int *)data[i] = -2;
            break;
        case CU_POINTER_ATTRIBUTE_MEMORY_TYPE:
        case CU_POINTER_ATTRIBUTE_IS_MANAGED:
        case CU_POINTER_ATTRIBUTE_SYNC_MEMOPS:
        case CU_POINTER_ATTRIBUTE_MAPPED:
        case CU_POINTER_ATTRIBUTE_ACCESS_FLAGS:
        case CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE:
        case CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE:
        case CU_POINTER_ATTRIBUTE_IS_HW_DECOMPRESS_CAPABLE:
            *(unsigned int *)data[i] = 0;
            break;
        default:
            *(unsigned long long *)data[i] = 0;
        }
    }
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuPointerSetAttribute(const void *value, CUpointer_attribute attribute, CUdeviceptr pointer)
{
    CHECK_INIT();
    if (!value || attribute != CU_POINTER_ATTRIBUTE_SYNC_MEMOPS)
        return CUDA_ERROR_INVALID_VALUE;
    return device_range(pointer, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuMemAdvise(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUdevice device)
{
    CHECK_INIT();
    (void)device;
    if (advice < 1 || advice > 6)
        return CUDA_ERROR_INVALID_VALUE;
    return device_range(pointer, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuMemAdvise_v2(CUdeviceptr pointer, size_t bytes, CUmem_advise advice, CUmemLocation location)
{
    return cuMemAdvise(pointer, bytes, advice, location.id);
}

API cuMemRangeGetAttribute(void *data, size_t size, CUmem_range_attribute attribute, CUdeviceptr pointer, size_t bytes)
{
    CHECK_INIT();
    if (!data || attribute < 1 || attribute > 8)
        return CUDA_ERROR_INVALID_VALUE;
    if (!device_range(pointer, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    memset(data, attribute == 1 ? 0 : 0xfe, size); /* not read-mostly; no location: -2, the invalid device */
    for (size_t i = 0; attribute != 1 && i + 4 <= size; i += 4)
        *(int *)((char *)data + i) = CU_DEVICE_INVALID;
    return CUDA_SUCCESS;
}

static CUresult prefetch(bool ptds, CUdeviceptr pointer, size_t bytes, CUdevice device, CUstream handle)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (device != CU_DEVICE_CPU && !gpu_of(device))
        return CUDA_ERROR_INVALID_DEVICE;
    return device_range(pointer, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API_PAIR(cuMemPrefetchAsync, _ptsz, prefetch, (CUdeviceptr pointer, size_t bytes, CUdevice device, CUstream stream),
         pointer, bytes,
         device, stream)

static CUresult prefetch_v2(bool ptds, CUdeviceptr pointer, size_t bytes, CUmemLocation location, unsigned int flags,
                            CUstream stream)
{
    (void)flags;
    return prefetch(ptds, pointer, bytes, location.type == CU_MEM_LOCATION_TYPE_DEVICE ? location.id : CU_DEVICE_CPU,
                    stream);
}
API_PAIR(cuMemPrefetchAsync_v2, _ptsz, prefetch_v2,
         (CUdeviceptr pointer, size_t bytes, CUmemLocation location, unsigned int flags, CUstream stream), pointer,
             bytes, location,
         flags, stream)
