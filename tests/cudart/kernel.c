/* kernel.c: what there is to ask and to set about a kernel, what <<<>>> pushes, and libraries loaded by hand. */
#include <string.h>
#include "driver.h"

#define NESTED 32 /* arguments of a <<<>>> may launch */

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream);
cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream);
cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host);

static __thread struct { dim3 grid, block; size_t shared; cudaStream_t stream; } pushed[NESTED];
static __thread int depth;

unsigned int __cudaPushCallConfiguration(dim3 grid, dim3 block, size_t shared, cudaStream_t stream)
{
    if (depth == NESTED)
        return 1; /* the launch is left out */
    pushed[depth].grid = grid;
    pushed[depth].block = block;
    pushed[depth].shared = shared;
    pushed[depth++].stream = stream;
    return 0;
}

cudaError_t __cudaPopCallConfiguration(dim3 *grid, dim3 *block, size_t *shared, void *stream)
{
    if (!depth)
        return rt_done((CUresult)cudaErrorMissingConfiguration);
    depth--;
    *grid = pushed[depth].grid;
    *block = pushed[depth].block;
    *shared = pushed[depth].shared;
    *(cudaStream_t *)stream = pushed[depth].stream;
    return cudaSuccess;
}

cudaError_t __cudaGetKernel(cudaKernel_t *kernel, const void *host)
{
    return rt_done(kernel ? rt_kernel(host, (CUfunction *)kernel) : CUDA_ERROR_INVALID_VALUE);
}

cudaError_t cudaGetKernel(cudaKernel_t *kernel, const void *host)
{
    return __cudaGetKernel(kernel, host);
}

/* The current context's function: what is asked about kernels is a function's. What is a function already stays so. */
static CUresult function_of(const void *host, CUfunction *function)
{
    CUfunction loaded;
    TRY(rt_kernel(host, function));
    CUresult result = DRIVE(cuKernelGetFunction, &loaded, (CUkernel)*function);
    if (result != CUDA_SUCCESS)
        return (const void *)*function == host ? CUDA_SUCCESS : result;
    *function = loaded;
    return CUDA_SUCCESS;
}

cudaError_t cudaGetFuncBySymbol(cudaFunction_t *function, const void *host)
{
    return rt_done(function ? function_of(host, function) : CUDA_ERROR_INVALID_VALUE);
}

cudaError_t cudaFuncGetAttributes(struct cudaFuncAttributes *attributes, const void *host)
{
    CUfunction function;
    CUresult result = attributes ? function_of(host, &function) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return rt_done(result);
    memset(attributes, 0, sizeof *attributes);
    int shared = 0, constant = 0, local = 0;
    struct { CUfunction_attribute attribute; int *value; } asked[] = {
        {CU_FUNC_ATTRIBUTE_SHARED_SIZE_BYTES, &shared}, {CU_FUNC_ATTRIBUTE_CONST_SIZE_BYTES, &constant},
        {CU_FUNC_ATTRIBUTE_LOCAL_SIZE_BYTES, &local},
        {CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK, &attributes->maxThreadsPerBlock},
        {CU_FUNC_ATTRIBUTE_NUM_REGS, &attributes->numRegs}, {CU_FUNC_ATTRIBUTE_PTX_VERSION, &attributes->ptxVersion},
        {CU_FUNC_ATTRIBUTE_BINARY_VERSION, &attributes->binaryVersion},
        {CU_FUNC_ATTRIBUTE_CACHE_MODE_CA, &attributes->cacheModeCA},
        {CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES, &attributes->maxDynamicSharedSizeBytes},
        {CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT, &attributes->preferredShmemCarveout},
    };
    for (size_t i = 0; i < sizeof asked / sizeof *asked && result == CUDA_SUCCESS; i++)
        result = DRIVE(cuFuncGetAttribute, asked[i].value, asked[i].attribute, function);
    attributes->sharedSizeBytes = (size_t)shared;
    attributes->constSizeBytes = (size_t)constant;
    attributes->localSizeBytes = (size_t)local;
    return rt_done(result);
}

cudaError_t cudaFuncSetAttribute(const void *host, enum cudaFuncAttribute attribute, int value)
{
    CUfunction function;
    CUresult result = function_of(host, &function);
    return rt_done(result ? result : DRIVE(cuFuncSetAttribute, function, (CUfunction_attribute)attribute, value));
}

cudaError_t cudaFuncSetCacheConfig(const void *host, enum cudaFuncCache config)
{
    CUfunction function;
    CUresult result = function_of(host, &function);
    return rt_done(result ? result : DRIVE(cuFuncSetCacheConfig, function, (CUfunc_cache)config));
}

cudaError_t cudaFuncGetName(const char **name, const void *host)
{
    CUfunction function;
    CUresult result = function_of(host, &function);
    return rt_done(result ? result : DRIVE(cuFuncGetName, name, function));
}

cudaError_t cudaKernelSetAttributeForDevice(cudaKernel_t kernel, enum cudaFuncAttribute attribute, int value,
                                            int device)
{
    PASS(cuKernelSetAttribute, (CUfunction_attribute)attribute, value, (CUkernel)kernel, device);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, const void *host, int block_size,
                                                                   size_t shared, unsigned int flags)
{
    CUfunction function;
    CUresult result = function_of(host, &function);
    if (result == CUDA_SUCCESS)
        result = DRIVE(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, blocks, function, block_size, shared,
                       flags);
    return rt_done(result);
}

cudaError_t cudaOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, const void *host, int block_size, size_t shared)
{
    return cudaOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, host, block_size, shared, 0);
}

cudaError_t cudaOccupancyAvailableDynamicSMemPerBlock(size_t *shared, const void *host, int blocks, int block_size)
{
    CUfunction function;
    CUresult result = function_of(host, &function);
    return rt_done(result ? result
                          : DRIVE(cuOccupancyAvailableDynamicSMemPerBlock, shared, function, blocks, block_size));
}

/* ---- libraries ---- */

cudaError_t cudaLibraryLoadData(cudaLibrary_t *library, const void *code, enum cudaJitOption *options, void **values,
                                unsigned int count, enum cudaLibraryOption *library_options, void **library_values,
                                unsigned int library_count)
{
    PASS(cuLibraryLoadData, (CUlibrary *)library, code, (CUjit_option *)options, values, count,
         (CUlibraryOption *)library_options, library_values, library_count);
}

cudaError_t cudaLibraryLoadFromFile(cudaLibrary_t *library, const char *file, enum cudaJitOption *options,
                                    void **values, unsigned int count, enum cudaLibraryOption *library_options,
                                    void **library_values, unsigned int library_count)
{
    PASS(cuLibraryLoadFromFile, (CUlibrary *)library, file, (CUjit_option *)options, values, count,
         (CUlibraryOption *)library_options, library_values, library_count);
}

cudaError_t cudaLibraryUnload(cudaLibrary_t library)
{
    PASS(cuLibraryUnload, (CUlibrary)library);
}

cudaError_t cudaLibraryGetKernel(cudaKernel_t *kernel, cudaLibrary_t library, const char *name)
{
    PASS(cuLibraryGetKernel, (CUkernel *)kernel, (CUlibrary)library, name);
}

cudaError_t cudaLibraryGetGlobal(void **pointer, size_t *bytes, cudaLibrary_t library, const char *name)
{
    PASS(cuLibraryGetGlobal, (CUdeviceptr *)pointer, bytes, (CUlibrary)library, name);
}

cudaError_t cudaLibraryGetManaged(void **pointer, size_t *bytes, cudaLibrary_t library, const char *name)
{
    PASS(cuLibraryGetManaged, (CUdeviceptr *)pointer, bytes, (CUlibrary)library, name);
}

cudaError_t cudaLibraryGetKernelCount(unsigned int *count, cudaLibrary_t library)
{
    PASS(cuLibraryGetKernelCount, count, (CUlibrary)library);
}

cudaError_t cudaLibraryEnumerateKernels(cudaKernel_t *kernels, unsigned int room, cudaLibrary_t library)
{
    PASS(cuLibraryEnumerateKernels, (CUkernel *)kernels, room, (CUlibrary)library);
}
