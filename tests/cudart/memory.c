/* memory.c: memory of the device and of the host, and what there is to ask about it. */
#include <string.h>
#include "driver.h"

_Static_assert(sizeof(struct cudaMemPoolProps) == sizeof(CUmemPoolProps), "pools are described alike");
_Static_assert(sizeof(struct cudaMemAccessDesc) == sizeof(CUmemAccessDesc), "access is described alike");
_Static_assert(sizeof(struct cudaMemLocation) == sizeof(CUmemLocation), "places are described alike");
_Static_assert(sizeof(struct cudaMemPoolPtrExportData) == sizeof(CUmemPoolPtrExportData), "exported alike");

cudaError_t cudaMemGetInfo(size_t *free, size_t *total)
{
    PASS(cuMemGetInfo, free, total);
}

/* Nothing asked for is nothing, without an error. */
static cudaError_t nothing(void **pointer)
{
    if (pointer)
        *pointer = NULL;
    return rt_done(pointer ? rt_enter() : CUDA_ERROR_INVALID_VALUE);
}

cudaError_t cudaMalloc(void **pointer, size_t bytes)
{
    if (!pointer || !bytes)
        return nothing(pointer);
    PASS(cuMemAlloc, (CUdeviceptr *)pointer, bytes);
}

cudaError_t cudaMallocManaged(void **pointer, size_t bytes, unsigned int flags)
{
    PASS(cuMemAllocManaged, (CUdeviceptr *)pointer, bytes, flags);
}

cudaError_t cudaMallocPitch(void **pointer, size_t *pitch, size_t width, size_t height)
{
    PASS(cuMemAllocPitch, (CUdeviceptr *)pointer, pitch, width, height, 4);
}

cudaError_t cudaFree(void *pointer)
{
    if (!pointer)
        return rt_done(rt_enter());
    PASS(cuMemFree, (CUdeviceptr)pointer);
}

cudaError_t cudaMallocHost(void **pointer, size_t bytes)
{
    return cudaHostAlloc(pointer, bytes, 0);
}

cudaError_t cudaHostAlloc(void **pointer, size_t bytes, unsigned int flags)
{
    if (!pointer || !bytes)
        return nothing(pointer);
    PASS(cuMemHostAlloc, pointer, bytes, flags);
}

cudaError_t cudaFreeHost(void *pointer)
{
    if (!pointer)
        return rt_done(rt_enter());
    PASS(cuMemFreeHost, pointer);
}

cudaError_t cudaHostRegister(void *pointer, size_t bytes, unsigned int flags)
{
    PASS(cuMemHostRegister, pointer, bytes, flags);
}

cudaError_t cudaHostUnregister(void *pointer)
{
    PASS(cuMemHostUnregister, pointer);
}

cudaError_t cudaHostGetDevicePointer(void **device, void *host, unsigned int flags)
{
    PASS(cuMemHostGetDevicePointer, (CUdeviceptr *)device, host, flags);
}

cudaError_t cudaHostGetFlags(unsigned int *flags, void *host)
{
    PASS(cuMemHostGetFlags, flags, host);
}

cudaError_t cudaMemAdvise(const void *pointer, size_t bytes, enum cudaMemoryAdvise advice, struct cudaMemLocation place)
{
    CUmemLocation at;
    memcpy(&at, &place, sizeof at);
    PASS(cuMemAdvise, (CUdeviceptr)pointer, bytes, (CUmem_advise)advice, at);
}

/* An address the driver does not know is the host's own, and no error. */
cudaError_t cudaPointerGetAttributes(struct cudaPointerAttributes *attributes, const void *pointer)
{
    CUmemorytype type = 0;
    CUdeviceptr device = 0;
    void *host = NULL;
    int managed = 0, ordinal = -2;
    CUpointer_attribute asked[] = {
        CU_POINTER_ATTRIBUTE_MEMORY_TYPE, CU_POINTER_ATTRIBUTE_DEVICE_POINTER, CU_POINTER_ATTRIBUTE_HOST_POINTER,
        CU_POINTER_ATTRIBUTE_IS_MANAGED, CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL,
    };
    void *answers[] = {&type, &device, &host, &managed, &ordinal};
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS)
        result = attributes ? DRIVE(cuPointerGetAttributes, 5, asked, answers, (CUdeviceptr)pointer)
                            : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return rt_done(result);
    memset(attributes, 0, sizeof *attributes);
    if (!type) {
        attributes->type = cudaMemoryTypeUnregistered;
        attributes->device = -2;
        attributes->hostPointer = (void *)pointer;
        return cudaSuccess;
    }
    attributes->type = managed                       ? cudaMemoryTypeManaged
                       : type == CU_MEMORYTYPE_HOST ? cudaMemoryTypeHost
                                                     : cudaMemoryTypeDevice;
    attributes->device = ordinal;
    attributes->devicePointer = (void *)device;
    attributes->hostPointer = host;
    return cudaSuccess;
}

/* ---- between processes ---- */

cudaError_t cudaIpcGetMemHandle(cudaIpcMemHandle_t *handle, void *pointer)
{
    PASS(cuIpcGetMemHandle, (CUipcMemHandle *)handle, (CUdeviceptr)pointer);
}

cudaError_t cudaIpcOpenMemHandle(void **pointer, cudaIpcMemHandle_t handle, unsigned int flags)
{
    CUipcMemHandle same;
    memcpy(&same, &handle, sizeof same);
    PASS(cuIpcOpenMemHandle, (CUdeviceptr *)pointer, same, flags);
}

cudaError_t cudaIpcCloseMemHandle(void *pointer)
{
    PASS(cuIpcCloseMemHandle, (CUdeviceptr)pointer);
}

cudaError_t cudaIpcGetEventHandle(cudaIpcEventHandle_t *handle, cudaEvent_t event)
{
    PASS(cuIpcGetEventHandle, (CUipcEventHandle *)handle, event);
}

cudaError_t cudaIpcOpenEventHandle(cudaEvent_t *event, cudaIpcEventHandle_t handle)
{
    CUipcEventHandle same;
    memcpy(&same, &handle, sizeof same);
    PASS(cuIpcOpenEventHandle, event, same);
}

/* ---- pools ---- */

cudaError_t cudaDeviceGetDefaultMemPool(cudaMemPool_t *pool, int device)
{
    PASS_OPEN(cuDeviceGetDefaultMemPool, pool, device);
}

cudaError_t cudaDeviceGetMemPool(cudaMemPool_t *pool, int device)
{
    PASS_OPEN(cuDeviceGetMemPool, pool, device);
}

cudaError_t cudaDeviceSetMemPool(int device, cudaMemPool_t pool)
{
    PASS_OPEN(cuDeviceSetMemPool, device, pool);
}

cudaError_t cudaMemPoolCreate(cudaMemPool_t *pool, const struct cudaMemPoolProps *properties)
{
    PASS(cuMemPoolCreate, pool, (const CUmemPoolProps *)properties);
}

cudaError_t cudaMemPoolDestroy(cudaMemPool_t pool)
{
    PASS(cuMemPoolDestroy, pool);
}

cudaError_t cudaMemPoolTrimTo(cudaMemPool_t pool, size_t keep)
{
    PASS(cuMemPoolTrimTo, pool, keep);
}

cudaError_t cudaMemPoolSetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
    PASS(cuMemPoolSetAttribute, pool, (CUmemPool_attribute)attribute, value);
}

cudaError_t cudaMemPoolGetAttribute(cudaMemPool_t pool, enum cudaMemPoolAttr attribute, void *value)
{
    PASS(cuMemPoolGetAttribute, pool, (CUmemPool_attribute)attribute, value);
}

cudaError_t cudaMemPoolSetAccess(cudaMemPool_t pool, const struct cudaMemAccessDesc *list, size_t count)
{
    PASS(cuMemPoolSetAccess, pool, (const CUmemAccessDesc *)list, count);
}

cudaError_t cudaMemPoolGetAccess(enum cudaMemAccessFlags *flags, cudaMemPool_t pool, struct cudaMemLocation *place)
{
    PASS(cuMemPoolGetAccess, (CUmemAccess_flags *)flags, pool, (CUmemLocation *)place);
}

cudaError_t cudaMemPoolExportToShareableHandle(void *handle, cudaMemPool_t pool, enum cudaMemAllocationHandleType type,
                                               unsigned int flags)
{
    PASS(cuMemPoolExportToShareableHandle, handle, pool, (CUmemAllocationHandleType)type, flags);
}

cudaError_t cudaMemPoolImportFromShareableHandle(cudaMemPool_t *pool, void *handle,
                                                 enum cudaMemAllocationHandleType type, unsigned int flags)
{
    PASS(cuMemPoolImportFromShareableHandle, pool, handle, (CUmemAllocationHandleType)type, flags);
}

cudaError_t cudaMemPoolExportPointer(struct cudaMemPoolPtrExportData *data, void *pointer)
{
    PASS(cuMemPoolExportPointer, (CUmemPoolPtrExportData *)data, (CUdeviceptr)pointer);
}

cudaError_t cudaMemPoolImportPointer(void **pointer, cudaMemPool_t pool, struct cudaMemPoolPtrExportData *data)
{
    PASS(cuMemPoolImportPointer, (CUdeviceptr *)pointer, pool, (CUmemPoolPtrExportData *)data);
}
