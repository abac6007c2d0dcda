/* launch.c: every way to start a kernel, and host functions. */
#include <stdlib.h>
#include <string.h>
#include "cuda/sim.h"

CUresult kernel_submit(struct CUstream_st *stream, uint64_t ns)
{
    struct work work = {.kind = SIM_KERNEL, .ns = ns};
    return stream_append(stream, &work);
}

static CUresult launch_captured(struct CUstream_st *stream, const CUDA_KERNEL_NODE_PARAMS *kernel, uint64_t ns,
                                bool *captured)
{
    struct node_params node = {.type = CU_GRAPH_NODE_TYPE_KERNEL, .kernel = *kernel, .ns = ns};
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&api_lock);
    *captured = stream->capture != NULL;
    if (*captured)
        result = capture_add(stream, &node);
    else if (stream_capturing_blocked(stream))
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    pthread_mutex_unlock(&api_lock);
    return result;
}

static CUresult launch(bool ptds, CUfunction handle, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by,
                       unsigned bz,
                       unsigned shared, CUstream stream_handle, void **params, void **extra)
{
    struct CUfunc_st *function;
    struct CUstream_st *stream;
    CHECK_INIT();
    if (__builtin_expect(!object_is(handle, OBJ_FUNCTION), 0))
        return CUDA_ERROR_INVALID_HANDLE;
    function = (struct CUfunc_st *)handle;
    if (!gx || !gy || !gz || !bx || !by || !bz || (uint64_t)bx * by * bz > 1024 || gy > 65535 || gz > 65535)
        return CUDA_ERROR_INVALID_VALUE;
    if (function->duration == DURATION_NULL && !captures_active)
        return CUDA_SUCCESS;
    TRY(stream_get(ptds, stream_handle, &stream));
    uint64_t ns = kernel_ns(function, params, extra);
    if (captures_active) {
        CUDA_KERNEL_NODE_PARAMS kernel = {handle, gx, gy, gz, bx, by, bz, shared, params, extra, NULL, NULL};
        bool captured;
        CUresult result = launch_captured(stream, &kernel, ns, &captured);
        if (captured || result != CUDA_SUCCESS)
            return result;
    }
    return function->pair ? pair_submit(stream, ns) : kernel_submit(stream, ns);
}
API_PAIR(cuLaunchKernel, _ptsz, launch,
         (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
          unsigned int bz,
          unsigned int shared, CUstream stream, void **params, void **extra),
         function, gx, gy, gz, bx, by, bz, shared, stream, params, extra)

static CUresult launch_ex(bool ptds, const CUlaunchConfig *c, CUfunction function, void **params, void **extra)
{
    if (!c || (c->numAttrs && !c->attrs))
        return CUDA_ERROR_INVALID_VALUE;
    return launch(ptds, function, c->gridDimX, c->gridDimY, c->gridDimZ, c->blockDimX, c->blockDimY, c->blockDimZ,
                  c->sharedMemBytes,
                  c->hStream, params, extra);
}
API_PAIR(cuLaunchKernelEx, _ptsz, launch_ex,
         (const CUlaunchConfig *config, CUfunction function, void **params, void **extra), config,
         function, params, extra)

/* All blocks must fit at once: 132 multiprocessors of 2048 threads. */
static CUresult launch_cooperative(bool ptds, CUfunction function, unsigned gx, unsigned gy, unsigned gz, unsigned bx,
                                   unsigned by,
                                   unsigned bz, unsigned shared, CUstream stream, void **params)
{
    uint64_t threads = (uint64_t)bx * by * bz;
    if (threads && (uint64_t)gx * gy * gz > 132 * (2048 / (threads > 2048 ? 2048 : threads) > 32 ? 32 : 2048 / threads))
        return CUDA_ERROR_COOPERATIVE_LAUNCH_TOO_LARGE;
    return launch(ptds, function, gx, gy, gz, bx, by, bz, shared, stream, params, NULL);
}
API_PAIR(cuLaunchCooperativeKernel, _ptsz, launch_cooperative,
         (CUfunction function, unsigned int gx, unsigned int gy, unsigned int gz, unsigned int bx, unsigned int by,
          unsigned int bz,
          unsigned int shared, CUstream stream, void **params),
         function, gx, gy, gz, bx, by, bz, shared, stream, params)

API cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags);

API cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *list, unsigned int count, unsigned int flags)
{
    CHECK_INIT();
    if (!list || !count || count > (unsigned)gpu_count || flags > 3)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned int i = 0; i < count; i++) {
        const CUDA_LAUNCH_PARAMS *p = &list[i];
        if ((uintptr_t)p->hStream <= 2)
            return CUDA_ERROR_INVALID_VALUE;
        TRY(launch(false, p->function, p->gridDimX, p->gridDimY, p->gridDimZ, p->blockDimX, p->blockDimY, p->blockDimZ,
                   p->sharedMemBytes, p->hStream, p->kernelParams, NULL));
    }
    return CUDA_SUCCESS;
}

/* ---- the oldest way ---- */

API cuFuncSetBlockShape(CUfunction handle, int x, int y, int z);
API cuFuncSetSharedSize(CUfunction handle, unsigned int bytes);
API cuParamSetSize(CUfunction handle, unsigned int bytes);
API cuParamSeti(CUfunction handle, int offset, unsigned int value);
API cuParamSetf(CUfunction handle, int offset, float value);
API cuParamSetv(CUfunction handle, int offset, void *value, unsigned int bytes);
API cuLaunch(CUfunction function);
API cuLaunchGrid(CUfunction function, int width, int height);
API cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream);

API cuFuncSetBlockShape(CUfunction handle, int x, int y, int z)
{
    struct CUfunc_st *function;
    CHECK_INIT();
    TRY(function_of(handle, &function));
    return x > 0 && y > 0 && z > 0 && (int64_t)x * y * z <= 1024 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuFuncSetSharedSize(CUfunction handle, unsigned int bytes)
{
    struct CUfunc_st *function;
    (void)bytes;
    CHECK_INIT();
    return function_of(handle, &function);
}

API cuParamSetSize(CUfunction handle, unsigned int bytes)
{
    struct CUfunc_st *function;
    CHECK_INIT();
    TRY(function_of(handle, &function));
    return bytes <= 4096 ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuParamSetv(CUfunction handle, int offset, void *value, unsigned int bytes)
{
    struct CUfunc_st *function;
    CHECK_INIT();
    TRY(function_of(handle, &function));
    if (offset < 0 || !value || bytes > 4096)
        return CUDA_ERROR_INVALID_VALUE;
    if ((size_t)offset + bytes <= sizeof function->params)
        memcpy(function->params + offset, value, bytes);
    return CUDA_SUCCESS;
}

API cuParamSeti(CUfunction handle, int offset, unsigned int value)
{
    return cuParamSetv(handle, offset, &value, sizeof value);
}

API cuParamSetf(CUfunction handle, int offset, float value)
{
    return cuParamSetv(handle, offset, &value, sizeof value);
}

API cuLaunchGridAsync(CUfunction function, int width, int height, CUstream stream)
{
    if (width <= 0 || height <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    return launch(false, function, (unsigned)width, (unsigned)height, 1, 1, 1, 1, 0, stream, NULL, NULL);
}

API cuLaunchGrid(CUfunction function, int width, int height)
{
    return cuLaunchGridAsync(function, width, height, NULL);
}

API cuLaunch(CUfunction function)
{
    return cuLaunchGridAsync(function, 1, 1, NULL);
}

/* ---- host functions: they hold their queue until they return ---- */

struct host_call {
    CUhostFn fn;
    CUstreamCallback callback;
    CUstream stream;
    void *data;
};

static void run_host(void *arg, uint64_t seq, uint64_t done_ns)
{
    struct host_call call = *(struct host_call *)arg;
    (void)seq;
    (void)done_ns;
    free(arg);
    if (call.fn)
        call.fn(call.data);
    else
        call.callback(call.stream, CUDA_SUCCESS, call.data);
}

static CUresult host_call(struct CUstream_st *stream, struct host_call call)
{
    struct host_call *copy = malloc(sizeof *copy);
    struct work gate = {.kind = SIM_GATE, .action = {.run = run_host, .arg = copy, .gate = true, .prompt = true}};
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *copy = call;
    CUresult result = stream_append(stream, &gate);
    if (result != CUDA_SUCCESS)
        free(copy);
    return result;
}

CUresult host_submit(struct CUstream_st *stream, CUhostFn fn, void *data)
{
    return host_call(stream, (struct host_call){.fn = fn, .data = data});
}

static CUresult launch_host(bool ptds, CUstream handle, CUhostFn fn, void *data)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!fn)
        return CUDA_ERROR_INVALID_VALUE;
    if (captures_active) {
        struct node_params node = {.type = CU_GRAPH_NODE_TYPE_HOST, .host = {fn, data}};
        CUresult result = CUDA_SUCCESS;
        pthread_mutex_lock(&api_lock);
        bool capturing = stream->capture != NULL;
        if (capturing)
            result = capture_add(stream, &node);
        else if (stream_capturing_blocked(stream))
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        pthread_mutex_unlock(&api_lock);
        if (capturing || result != CUDA_SUCCESS)
            return result;
    }
    return host_submit(stream, fn, data);
}
API_PAIR(cuLaunchHostFunc, _ptsz, launch_host, (CUstream stream, CUhostFn fn, void *data), stream, fn, data)

static CUresult add_callback(bool ptds, CUstream handle, CUstreamCallback callback, void *data, unsigned int flags)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!callback || flags)
        return CUDA_ERROR_INVALID_VALUE;
    if (stream->capture) {
        pthread_mutex_lock(&api_lock);
        CUresult result = capture_forbids_sync(stream);
        pthread_mutex_unlock(&api_lock);
        TRY(result);
    }
    return host_call(stream, (struct host_call){.callback = callback, .stream = handle, .data = data});
}
API_PAIR(cuStreamAddCallback, _ptsz, add_callback,
         (CUstream stream, CUstreamCallback callback, void *data, unsigned int flags), stream,
         callback, data, flags)
