/* function.c: how long a function takes, its attributes, and occupancy. */
#include <string.h>
#include "cuda/sim.h"

#define THREADS_OF_SM 2048

static bool parse_duration(const char *name, uint64_t *ns)
{
    static const struct { const char *unit; uint64_t factor; } units[] = {{"_ns", 1}, {"_us", 1000}, {"_ms", 1000000}};
    for (int i = 0; i < 3; i++) {
        for (const char *at = name; (at = strstr(at, units[i].unit)); at++) {
            const char *digit = at + 3;
            uint64_t value = 0;
            if (*digit < '0' || *digit > '9')
                continue;
            while (*digit >= '0' && *digit <= '9' && value < 1000000000000u)
                value = value * 10 + (uint64_t)(*digit++ - '0');
            *ns = value * units[i].factor;
            return true;
        }
    }
    return false;
}

void function_defaults(struct CUfunc_st *function)
{
    if (strstr(function->name, "cgpu_null"))
        function->duration = DURATION_NULL;
    else if (strstr(function->name, "cgpu_sleep_ns"))
        function->duration = DURATION_ARGUMENT;
    else if (!parse_duration(function->name, &function->ns))
        function->ns = sim_env_u64("CGPU_SIM_KERNEL_NS", 10000);
    function->pair = strstr(function->name, "cgpu_pair") != NULL;
    int *a = function->attributes;
    a[CU_FUNC_ATTRIBUTE_MAX_THREADS_PER_BLOCK] = 1024;
    a[CU_FUNC_ATTRIBUTE_NUM_REGS] = 32;
    a[CU_FUNC_ATTRIBUTE_PTX_VERSION] = a[CU_FUNC_ATTRIBUTE_BINARY_VERSION] = 90;
    a[CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES] = 49152;
    a[CU_FUNC_ATTRIBUTE_PREFERRED_SHARED_MEMORY_CARVEOUT] = -1;
}

CUresult function_of(CUfunction handle, struct CUfunc_st **function)
{
    if (!object_is(handle, OBJ_FUNCTION))
        return CUDA_ERROR_INVALID_HANDLE;
    *function = (struct CUfunc_st *)handle;
    return CUDA_SUCCESS;
}

/* The first argument, however the arguments are handed over; 0 when there is none. */
static uint64_t first_argument(const struct CUfunc_st *function, void **params, void **extra)
{
    uint64_t value = 0;
    const void *at = function->params;
    if (params && params[0])
        at = params[0];
    for (; !params && extra && *extra != CU_LAUNCH_PARAM_END; extra += 2)
        if (*extra == CU_LAUNCH_PARAM_BUFFER_POINTER)
            at = extra[1];
    memcpy(&value, at, sizeof value);
    return value;
}

uint64_t kernel_ns(const struct CUfunc_st *function, void **params, void **extra)
{
    return function->duration == DURATION_ARGUMENT ? first_argument(function, params, extra) : function->ns;
}

/* ---- entry points ---- */

API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle);
API cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value);
API cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config);
API cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig config);
API cuFuncGetModule(CUmodule *module, CUfunction handle);
API cuFuncGetName(const char **name, CUfunction handle);
API cuFuncIsLoaded(int *state, CUfunction handle);
API cuFuncLoad(CUfunction handle);
API cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size);
API cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device);
API cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device);
API cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device);
API cuKernelGetName(const char **name, CUkernel kernel);
API cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size);

#define FUNCTION(handle) \
    struct CUfunc_st *function; \
    CHECK_INIT(); \
    TRY(function_of(handle, &function))

API cuFuncGetAttribute(int *value, CUfunction_attribute attribute, CUfunction handle)
{
    FUNCTION(handle);
    if (!value || (unsigned)attribute >= CU_FUNC_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    *value = function->attributes[attribute];
    return CUDA_SUCCESS;
}

API cuFuncSetAttribute(CUfunction handle, CUfunction_attribute attribute, int value)
{
    FUNCTION(handle);
    if (attribute < CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES || attribute >= CU_FUNC_ATTRIBUTE_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    function->attributes[attribute] = value;
    return CUDA_SUCCESS;
}

API cuFuncSetCacheConfig(CUfunction handle, CUfunc_cache config)
{
    FUNCTION(handle);
    (void)function;
    return (unsigned)config <= 3 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuFuncSetSharedMemConfig(CUfunction handle, CUsharedconfig config)
{
    FUNCTION(handle);
    (void)function;
    return (unsigned)config <= 2 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuFuncGetModule(CUmodule *module, CUfunction handle)
{
    FUNCTION(handle);
    if (!module)
        return CUDA_ERROR_INVALID_VALUE;
    *module = function->module;
    return CUDA_SUCCESS;
}

API cuFuncGetName(const char **name, CUfunction handle)
{
    FUNCTION(handle);
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    *name = function->name;
    return CUDA_SUCCESS;
}

API cuFuncIsLoaded(int *state, CUfunction handle)
{
    FUNCTION(handle);
    (void)function;
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    *state = 1;
    return CUDA_SUCCESS;
}

API cuFuncLoad(CUfunction handle)
{
    FUNCTION(handle);
    (void)function;
    return CUDA_SUCCESS;
}

/* Parameters are not looked at: as if there were none. */
API cuFuncGetParamInfo(CUfunction handle, size_t index, size_t *offset, size_t *size)
{
    FUNCTION(handle);
    (void)function;
    (void)index;
    (void)offset;
    (void)size;
    return CUDA_ERROR_INVALID_VALUE;
}

API cuKernelGetAttribute(int *value, CUfunction_attribute attribute, CUkernel kernel, CUdevice device)
{
    CHECK_INIT();
    return gpu_of(device) ? cuFuncGetAttribute(value, attribute, (CUfunction)kernel) : CUDA_ERROR_INVALID_DEVICE;
}

API cuKernelSetAttribute(CUfunction_attribute attribute, int value, CUkernel kernel, CUdevice device)
{
    CHECK_INIT();
    return gpu_of(device) ? cuFuncSetAttribute((CUfunction)kernel, attribute, value) : CUDA_ERROR_INVALID_DEVICE;
}

API cuKernelSetCacheConfig(CUkernel kernel, CUfunc_cache config, CUdevice device)
{
    CHECK_INIT();
    return gpu_of(device) ? cuFuncSetCacheConfig((CUfunction)kernel, config) : CUDA_ERROR_INVALID_DEVICE;
}

API cuKernelGetName(const char **name, CUkernel kernel)
{
    return cuFuncGetName(name, (CUfunction)kernel);
}

API cuKernelGetParamInfo(CUkernel kernel, size_t index, size_t *offset, size_t *size)
{
    return cuFuncGetParamInfo((CUfunction)kernel, index, offset, size);
}

/* ---- occupancy: limited by threads alone ---- */

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle, int threads, size_t shared);
API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction handle, int threads, size_t shared,
                                                         unsigned int flags);
API cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction handle, CUoccupancyB2DSize shared_of,
                                     size_t shared, int limit);
API cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction handle, CUoccupancyB2DSize shared_of,
                                              size_t shared,
                                              int limit, unsigned int flags);
API cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction handle, int blocks, int threads);

API cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(int *blocks, CUfunction handle, int threads, size_t shared,
                                                         unsigned int flags)
{
    FUNCTION(handle);
    (void)function;
    (void)shared;
    if (!blocks || threads <= 0 || flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    int fit = threads > 1024 ? 0 : THREADS_OF_SM / threads;
    *blocks = fit > 32 ? 32 : fit;
    return CUDA_SUCCESS;
}

API cuOccupancyMaxActiveBlocksPerMultiprocessor(int *blocks, CUfunction handle, int threads, size_t shared)
{
    return cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags(blocks, handle, threads, shared, 0);
}

API cuOccupancyMaxPotentialBlockSizeWithFlags(int *grid, int *block, CUfunction handle, CUoccupancyB2DSize shared_of,
                                              size_t shared,
                                              int limit, unsigned int flags)
{
    FUNCTION(handle);
    (void)function;
    (void)shared_of;
    (void)shared;
    if (!grid || !block || flags > 1)
        return CUDA_ERROR_INVALID_VALUE;
    *block = limit > 0 && limit < 1024 ? limit : 1024;
    *grid = 132 * (THREADS_OF_SM / *block > 32 ? 32 : THREADS_OF_SM / *block);
    return CUDA_SUCCESS;
}

API cuOccupancyMaxPotentialBlockSize(int *grid, int *block, CUfunction handle, CUoccupancyB2DSize shared_of,
                                     size_t shared, int limit)
{
    return cuOccupancyMaxPotentialBlockSizeWithFlags(grid, block, handle, shared_of, shared, limit, 0);
}

API cuOccupancyAvailableDynamicSMemPerBlock(size_t *bytes, CUfunction handle, int blocks, int threads)
{
    FUNCTION(handle);
    (void)function;
    if (!bytes || blocks <= 0 || threads <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    *bytes = (size_t)(233472 / blocks);
    return CUDA_SUCCESS;
}
