/* misc.c: limits and preferences, which are kept and change nothing; the profiler, which is not there. */
#include "cuda/sim.h"

API cuCtxSetLimit(CUlimit limit, size_t value);
API cuCtxGetLimit(size_t *value, CUlimit limit);
API cuCtxSetCacheConfig(CUfunc_cache config);
API cuCtxGetCacheConfig(CUfunc_cache *config);
API cuCtxSetSharedMemConfig(CUsharedconfig config);
API cuCtxGetSharedMemConfig(CUsharedconfig *config);
API cuCtxGetStreamPriorityRange(int *least, int *greatest);
API cuCtxResetPersistingL2Cache(void);
API cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope);
API cuProfilerInitialize(const char *config, const char *output, int mode);
API cuProfilerStart(void);
API cuProfilerStop(void);

#define CONTEXT() \
    struct CUctx_st *ctx; \
    CHECK_INIT(); \
    TRY(current_context(&ctx))

API cuCtxSetLimit(CUlimit limit, size_t value)
{
    CONTEXT();
    if ((unsigned)limit >= CU_LIMIT_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (limit >= CU_LIMIT_SHMEM_SIZE)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    ctx->limits[limit] = value;
    return CUDA_SUCCESS;
}

API cuCtxGetLimit(size_t *value, CUlimit limit)
{
    CONTEXT();
    if (!value || (unsigned)limit >= CU_LIMIT_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (limit >= CU_LIMIT_SHMEM_SIZE)
        return CUDA_ERROR_UNSUPPORTED_LIMIT;
    *value = ctx->limits[limit];
    return CUDA_SUCCESS;
}

API cuCtxSetCacheConfig(CUfunc_cache config)
{
    CONTEXT();
    ctx->cache_config = (int)config;
    return CUDA_SUCCESS;
}

API cuCtxGetCacheConfig(CUfunc_cache *config)
{
    CONTEXT();
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    *config = (CUfunc_cache)ctx->cache_config;
    return CUDA_SUCCESS;
}

API cuCtxSetSharedMemConfig(CUsharedconfig config)
{
    CONTEXT();
    ctx->shared_config = (int)config;
    return CUDA_SUCCESS;
}

API cuCtxGetSharedMemConfig(CUsharedconfig *config)
{
    CONTEXT();
    if (!config)
        return CUDA_ERROR_INVALID_VALUE;
    *config = (CUsharedconfig)ctx->shared_config;
    return CUDA_SUCCESS;
}

API cuCtxGetStreamPriorityRange(int *least, int *greatest)
{
    CONTEXT();
    (void)ctx;
    if (least)
        *least = 0;
    if (greatest)
        *greatest = -5;
    return CUDA_SUCCESS;
}

API cuCtxResetPersistingL2Cache(void)
{
    CONTEXT();
    (void)ctx;
    return CUDA_SUCCESS;
}

API cuFlushGPUDirectRDMAWrites(CUflushGPUDirectRDMAWritesTarget target, CUflushGPUDirectRDMAWritesScope scope)
{
    CONTEXT();
    (void)ctx;
    return target == 0 && (scope == 100 || scope == 200) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuProfilerInitialize(const char *config, const char *output, int mode)
{
    (void)config;
    (void)output;
    (void)mode;
    CHECK_INIT();
    return CUDA_ERROR_NOT_SUPPORTED;
}

API cuProfilerStart(void)
{
    CONTEXT();
    (void)ctx;
    return CUDA_SUCCESS;
}

API cuProfilerStop(void)
{
    CONTEXT();
    (void)ctx;
    return CUDA_SUCCESS;
}
