/* device.c: what there is to ask and to set about a device. */
#include <string.h>
#include "driver.h"

cudaError_t cudaGetDeviceCount(int *count)
{
    PASS_OPEN(cuDeviceGetCount, count);
}

cudaError_t cudaDeviceGetAttribute(int *value, enum cudaDeviceAttr attribute, int device)
{
    PASS_OPEN(cuDeviceGetAttribute, value, (CUdevice_attribute)attribute, device);
}

/* Fields that are attributes; those of type size_t are wide. */
#define FIELD(field, attribute) \
    {offsetof(struct cudaDeviceProp, field), sizeof(((struct cudaDeviceProp *)0)->field), \
     CU_DEVICE_ATTRIBUTE_##attribute}
static const struct { size_t offset, size; CUdevice_attribute attribute; } fields[] = {
    FIELD(sharedMemPerBlock, MAX_SHARED_MEMORY_PER_BLOCK), FIELD(regsPerBlock, MAX_REGISTERS_PER_BLOCK),
    FIELD(warpSize, WARP_SIZE), FIELD(memPitch, MAX_PITCH), FIELD(maxThreadsPerBlock, MAX_THREADS_PER_BLOCK),
    FIELD(maxThreadsDim[0], MAX_BLOCK_DIM_X), FIELD(maxThreadsDim[1], MAX_BLOCK_DIM_Y),
    FIELD(maxThreadsDim[2], MAX_BLOCK_DIM_Z), FIELD(maxGridSize[0], MAX_GRID_DIM_X),
    FIELD(maxGridSize[1], MAX_GRID_DIM_Y), FIELD(maxGridSize[2], MAX_GRID_DIM_Z),
    FIELD(totalConstMem, TOTAL_CONSTANT_MEMORY), FIELD(major, COMPUTE_CAPABILITY_MAJOR),
    FIELD(minor, COMPUTE_CAPABILITY_MINOR), FIELD(textureAlignment, TEXTURE_ALIGNMENT),
    FIELD(texturePitchAlignment, TEXTURE_PITCH_ALIGNMENT), FIELD(multiProcessorCount, MULTIPROCESSOR_COUNT),
    FIELD(integrated, INTEGRATED), FIELD(canMapHostMemory, CAN_MAP_HOST_MEMORY),
    FIELD(surfaceAlignment, SURFACE_ALIGNMENT), FIELD(concurrentKernels, CONCURRENT_KERNELS),
    FIELD(ECCEnabled, ECC_ENABLED), FIELD(pciBusID, PCI_BUS_ID), FIELD(pciDeviceID, PCI_DEVICE_ID),
    FIELD(pciDomainID, PCI_DOMAIN_ID), FIELD(tccDriver, TCC_DRIVER), FIELD(asyncEngineCount, ASYNC_ENGINE_COUNT),
    FIELD(unifiedAddressing, UNIFIED_ADDRESSING), FIELD(memoryBusWidth, GLOBAL_MEMORY_BUS_WIDTH),
    FIELD(l2CacheSize, L2_CACHE_SIZE), FIELD(persistingL2CacheMaxSize, MAX_PERSISTING_L2_CACHE_SIZE),
    FIELD(maxThreadsPerMultiProcessor, MAX_THREADS_PER_MULTIPROCESSOR),
    FIELD(streamPrioritiesSupported, STREAM_PRIORITIES_SUPPORTED),
    FIELD(globalL1CacheSupported, GLOBAL_L1_CACHE_SUPPORTED), FIELD(localL1CacheSupported, LOCAL_L1_CACHE_SUPPORTED),
    FIELD(sharedMemPerMultiprocessor, MAX_SHARED_MEMORY_PER_MULTIPROCESSOR),
    FIELD(regsPerMultiprocessor, MAX_REGISTERS_PER_MULTIPROCESSOR), FIELD(managedMemory, MANAGED_MEMORY),
    FIELD(isMultiGpuBoard, MULTI_GPU_BOARD), FIELD(multiGpuBoardGroupID, MULTI_GPU_BOARD_GROUP_ID),
    FIELD(hostNativeAtomicSupported, HOST_NATIVE_ATOMIC_SUPPORTED),
    FIELD(pageableMemoryAccess, PAGEABLE_MEMORY_ACCESS), FIELD(concurrentManagedAccess, CONCURRENT_MANAGED_ACCESS),
    FIELD(computePreemptionSupported, COMPUTE_PREEMPTION_SUPPORTED),
    FIELD(canUseHostPointerForRegisteredMem, CAN_USE_HOST_POINTER_FOR_REGISTERED_MEM),
    FIELD(cooperativeLaunch, COOPERATIVE_LAUNCH),
    FIELD(sharedMemPerBlockOptin, MAX_SHARED_MEMORY_PER_BLOCK_OPTIN),
    FIELD(pageableMemoryAccessUsesHostPageTables, PAGEABLE_MEMORY_ACCESS_USES_HOST_PAGE_TABLES),
    FIELD(directManagedMemAccessFromHost, DIRECT_MANAGED_MEM_ACCESS_FROM_HOST),
    FIELD(maxBlocksPerMultiProcessor, MAX_BLOCKS_PER_MULTIPROCESSOR),
    FIELD(accessPolicyMaxWindowSize, MAX_ACCESS_POLICY_WINDOW_SIZE),
    FIELD(reservedSharedMemPerBlock, RESERVED_SHARED_MEMORY_PER_BLOCK),
    FIELD(hostRegisterSupported, HOST_REGISTER_SUPPORTED), FIELD(memoryPoolsSupported, MEMORY_POOLS_SUPPORTED),
    FIELD(gpuDirectRDMASupported, GPU_DIRECT_RDMA_SUPPORTED),
    FIELD(memoryPoolSupportedHandleTypes, MEMPOOL_SUPPORTED_HANDLE_TYPES),
    FIELD(ipcEventSupported, IPC_EVENT_SUPPORTED), FIELD(clusterLaunch, CLUSTER_LAUNCH),
    FIELD(unifiedFunctionPointers, UNIFIED_FUNCTION_POINTERS), FIELD(deviceNumaConfig, NUMA_CONFIG),
    FIELD(deviceNumaId, NUMA_ID), FIELD(mpsEnabled, MPS_ENABLED), FIELD(hostNumaId, HOST_NUMA_ID),
};

cudaError_t cudaGetDeviceProperties(struct cudaDeviceProp *properties, int device)
{
    CUresult result = rt_open();
    if (!properties)
        return rt_done(CUDA_ERROR_INVALID_VALUE);
    memset(properties, 0, sizeof *properties);
    if (result == CUDA_SUCCESS)
        result = DRIVE(cuDeviceGetName, properties->name, sizeof properties->name, device);
    if (result == CUDA_SUCCESS)
        result = DRIVE(cuDeviceGetUuid, (CUuuid *)&properties->uuid, device);
    if (result == CUDA_SUCCESS)
        result = DRIVE(cuDeviceTotalMem, &properties->totalGlobalMem, device);
    for (size_t i = 0; result == CUDA_SUCCESS && i < sizeof fields / sizeof *fields; i++) {
        int value = 0;
        if (DRIVE(cuDeviceGetAttribute, &value, fields[i].attribute, device) != CUDA_SUCCESS)
            continue; /* newer than the driver */
        if (fields[i].size == sizeof(size_t))
            *(size_t *)((char *)properties + fields[i].offset) = (size_t)value;
        else
            *(int *)((char *)properties + fields[i].offset) = value;
    }
    return rt_done(result);
}

cudaError_t cudaDeviceGetPCIBusId(char *id, int length, int device)
{
    PASS_OPEN(cuDeviceGetPCIBusId, id, length, device);
}

cudaError_t cudaDeviceGetByPCIBusId(int *device, const char *id)
{
    PASS_OPEN(cuDeviceGetByPCIBusId, device, id);
}

cudaError_t cudaDeviceGetP2PAttribute(int *value, enum cudaDeviceP2PAttr attribute, int from, int to)
{
    PASS_OPEN(cuDeviceGetP2PAttribute, value, (CUdevice_P2PAttribute)attribute, from, to);
}

cudaError_t cudaDeviceCanAccessPeer(int *can, int device, int peer)
{
    PASS_OPEN(cuDeviceCanAccessPeer, can, device, peer);
}

cudaError_t cudaDeviceEnablePeerAccess(int peer, unsigned int flags)
{
    CUcontext ctx;
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS)
        result = rt_primary(peer, &ctx);
    return rt_done(result ? result : DRIVE(cuCtxEnablePeerAccess, ctx, flags));
}

cudaError_t cudaDeviceDisablePeerAccess(int peer)
{
    CUcontext ctx;
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS)
        result = rt_primary(peer, &ctx);
    return rt_done(result ? result : DRIVE(cuCtxDisablePeerAccess, ctx));
}

cudaError_t cudaDeviceSynchronize(void)
{
    CUresult result = rt_enter();
    return rt_done(result ? result : rt_drivers[0].cuCtxSynchronize_());
}

cudaError_t cudaDeviceSetLimit(enum cudaLimit limit, size_t value)
{
    PASS(cuCtxSetLimit, (CUlimit)limit, value);
}

cudaError_t cudaDeviceGetLimit(size_t *value, enum cudaLimit limit)
{
    PASS(cuCtxGetLimit, value, (CUlimit)limit);
}

cudaError_t cudaDeviceGetCacheConfig(enum cudaFuncCache *config)
{
    PASS(cuCtxGetCacheConfig, (CUfunc_cache *)config);
}

cudaError_t cudaDeviceSetCacheConfig(enum cudaFuncCache config)
{
    PASS(cuCtxSetCacheConfig, (CUfunc_cache)config);
}

cudaError_t cudaDeviceGetStreamPriorityRange(int *least, int *greatest)
{
    PASS(cuCtxGetStreamPriorityRange, least, greatest);
}

cudaError_t cudaDeviceGetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void *value)
{
    PASS(cuDeviceGetGraphMemAttribute, device, (CUgraphMem_attribute)attribute, value);
}

cudaError_t cudaDeviceSetGraphMemAttribute(int device, enum cudaGraphMemAttributeType attribute, void *value)
{
    PASS(cuDeviceSetGraphMemAttribute, device, (CUgraphMem_attribute)attribute, value);
}

cudaError_t cudaDeviceGraphMemTrim(int device)
{
    PASS(cuDeviceGraphMemTrim, device);
}

/* Declared in cuda_profiler_api.h, which comes in another package. */
cudaError_t cudaProfilerStart(void);
cudaError_t cudaProfilerStop(void);

cudaError_t cudaProfilerStart(void)
{
    CUresult result = rt_enter();
    return rt_done(result ? result : rt_drivers[0].cuProfilerStart_());
}

cudaError_t cudaProfilerStop(void)
{
    CUresult result = rt_enter();
    return rt_done(result ? result : rt_drivers[0].cuProfilerStop_());
}
