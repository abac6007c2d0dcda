/* launch.c: launching kernels. The driver takes a kernel's handle for a function. Compiled twice (driver.h). */
#include "driver.h"

_Static_assert(sizeof(cudaLaunchAttribute) == sizeof(CUlaunchAttribute), "attributes are described alike");

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#define __cudaLaunchKernel __cudaLaunchKernel_ptsz
#endif

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t stream);

static CUresult launch(CUfunction function, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
    return DRIVE(cuLaunchKernel, function, grid.x, grid.y, grid.z, block.x, block.y, block.z, (unsigned int)shared,
                 stream, args, NULL);
}

cudaError_t __cudaLaunchKernel(cudaKernel_t kernel, dim3 grid, dim3 block, void **args, size_t shared,
                               cudaStream_t stream)
{
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS && !kernel)
        result = (CUresult)cudaErrorInvalidDeviceFunction;
    return rt_done(result ? result : launch((CUfunction)kernel, grid, block, args, shared, stream));
}

cudaError_t cudaLaunchKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared, cudaStream_t stream)
{
    CUfunction function;
    CUresult result = rt_kernel(host, &function);
    return rt_done(result ? result : launch(function, grid, block, args, shared, stream));
}

cudaError_t cudaLaunchCooperativeKernel(const void *host, dim3 grid, dim3 block, void **args, size_t shared,
                                        cudaStream_t stream)
{
    CUfunction function;
    CUresult result = rt_kernel(host, &function);
    if (result == CUDA_SUCCESS)
        result = DRIVE(cuLaunchCooperativeKernel, function, grid.x, grid.y, grid.z, block.x, block.y, block.z,
                       (unsigned int)shared, stream, args);
    return rt_done(result);
}

cudaError_t cudaLaunchKernelExC(const cudaLaunchConfig_t *config, const void *host, void **args)
{
    CUfunction function;
    CUresult result = config ? rt_kernel(host, &function) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return rt_done(result);
    CUlaunchConfig same = {
        .gridDimX = config->gridDim.x, .gridDimY = config->gridDim.y, .gridDimZ = config->gridDim.z,
        .blockDimX = config->blockDim.x, .blockDimY = config->blockDim.y, .blockDimZ = config->blockDim.z,
        .sharedMemBytes = (unsigned int)config->dynamicSmemBytes, .hStream = config->stream,
        .attrs = (CUlaunchAttribute *)config->attrs, .numAttrs = config->numAttrs,
    };
    return rt_done(DRIVE(cuLaunchKernelEx, &same, function, args, NULL));
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *name, void **function, unsigned int version,
                                             unsigned long long flags, enum cudaDriverEntryPointQueryResult *status)
{
    CUresult result = rt_open();
    if (result != CUDA_SUCCESS)
        return rt_done(result);
    if (flags == cudaEnableDefault && OWN_STREAM)
        flags = cudaEnablePerThreadDefaultStream;
    return rt_done(rt_drivers[0].find(name, function, (int)version, flags, (CUdriverProcAddressQueryResult *)status));
}

cudaError_t cudaGetDriverEntryPoint(const char *name, void **function, unsigned long long flags,
                                    enum cudaDriverEntryPointQueryResult *status)
{
    return cudaGetDriverEntryPointByVersion(name, function, CUDART_VERSION, flags, status);
}
