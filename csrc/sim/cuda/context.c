/* context.c: contexts, the primary ones among them, and each thread's stack of them. */
#include <string.h>
#include "cuda/sim.h"

#define STACK (int)(sizeof sim_thread.stack / sizeof *sim_thread.stack)

static uint64_t context_ids;

CUresult current_context(struct CUctx_st **ctx)
{
    struct thread_state *thread = &sim_thread;
    struct CUctx_st *top = thread->depth ? thread->stack[thread->depth - 1] : NULL;
    if (!top)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!object_is(top, OBJ_CONTEXT) || !top->active)
        return CUDA_ERROR_CONTEXT_IS_DESTROYED;
    *ctx = top;
    return CUDA_SUCCESS;
}

static CUresult push(struct CUctx_st *ctx)
{
    if (sim_thread.depth == STACK)
        return CUDA_ERROR_INVALID_VALUE;
    sim_thread.stack[sim_thread.depth++] = ctx;
    return CUDA_SUCCESS;
}

static bool valid(const struct CUctx_st *ctx)
{
    return object_is(ctx, OBJ_CONTEXT) && ctx->active;
}

/* ---- life; all under api_lock ---- */

static CUresult activate(struct CUctx_st *ctx)
{
    TRY(gpu_join(ctx->gpu));
    uint64_t overhead = ctx->green ? 0 : sim_env_u64("CGPU_SIM_CONTEXT_BYTES", ctx->gpu->conf.context_bytes);
    struct block *block;
    if (overhead)
        TRY(block_alloc(ctx, ctx->gpu, overhead, BLOCK_GLOBAL, false, &block));
    ctx->legacy = object_new(OBJ_STREAM, sizeof *ctx->legacy, ctx);
    if (!ctx->legacy) {
        context_drop_memory(ctx);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    ctx->legacy->gpu = ctx->gpu;
    ctx->legacy->legacy = true;
    ctx->limits[CU_LIMIT_STACK_SIZE] = 1024;
    ctx->limits[CU_LIMIT_PRINTF_FIFO_SIZE] = 7340032;
    ctx->limits[CU_LIMIT_MALLOC_HEAP_SIZE] = 8388608;
    ctx->limits[CU_LIMIT_DEV_RUNTIME_SYNC_DEPTH] = 2;
    ctx->limits[CU_LIMIT_DEV_RUNTIME_PENDING_LAUNCH_COUNT] = 2048;
    ctx->limits[CU_LIMIT_MAX_L2_FETCH_GRANULARITY] = 128;
    ctx->id = ++context_ids;
    ctx->active = true;
    return CUDA_SUCCESS;
}

static CUresult context_new(struct gpu *gpu, unsigned flags, unsigned version, struct CUgreenCtx_st *green,
                            struct CUctx_st **out)
{
    struct CUctx_st *ctx = object_new(OBJ_CONTEXT, sizeof *ctx, NULL);
    if (!ctx)
        return CUDA_ERROR_OUT_OF_MEMORY;
    ctx->gpu = gpu;
    ctx->flags = flags;
    ctx->version = version;
    ctx->green = green;
    CUresult result = activate(ctx);
    if (result != CUDA_SUCCESS) {
        object_free(ctx);
        return result;
    }
    *out = ctx;
    return CUDA_SUCCESS;
}

/* Waits for its work (that of the whole process on this GPU), then frees all it owns. */
static void deactivate(struct CUctx_st *ctx)
{
    queue_wait_all(&ctx->gpu->queue);
    if (ctx->primary)
        greens_end(ctx->gpu);
    context_drop_objects(ctx);
    context_drop_memory(ctx);
    pool_trim_locked(ctx->gpu, true);
    graph_trim_locked(ctx->gpu);
    ctx->active = false;
}

void context_drop_objects(struct CUctx_st *ctx)
{
    while (ctx->children) {
        struct object *object = ctx->children;
        switch (object->type) {
        case OBJ_STREAM:
            stream_release((struct CUstream_st *)object);
            break;
        case OBJ_EVENT:
            event_release((struct CUevent_st *)object);
            break;
        case OBJ_MODULE:
            module_release((struct CUmod_st *)object);
            break;
        default:
            object_free(object);
            break;
        }
    }
    ctx->legacy = NULL;
    ctx->blocking = 0;
    memset(ctx->legacy_saw, 0, sizeof ctx->legacy_saw);
}

/* ---- green ones: see green.c ---- */

CUresult context_new_green(struct CUgreenCtx_st *green, struct gpu *gpu, struct CUctx_st **out)
{
    return context_new(gpu, gpu->primary_flags, 3020, green, out);
}

void context_drop_green(struct CUctx_st *ctx)
{
    for (struct object *object = ctx->children, *next; object; object = next) {
        struct CUstream_st *stream = (struct CUstream_st *)object;
        next = object->next;
        if (stream->legacy || stream->per_thread || stream->hidden) {
            stream_release(stream);
            continue;
        }
        if (stream->capture)
            capture_drop(stream);
        stream->detached = true;
        object_move(stream, ctx->gpu->primary);
    }
    ctx->legacy = NULL;
    ctx->active = false;
}

void context_end_green(struct CUctx_st *ctx)
{
    if (ctx->active)
        context_drop_green(ctx);
    object_free(ctx);
}

/* ---- creation and destruction ---- */

static CUresult create(CUcontext *out, unsigned flags, CUdevice device, unsigned version)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    if (!out || (flags & ~CU_CTX_FLAGS_MASK))
        return CUDA_ERROR_INVALID_VALUE;
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    if (sim_thread.depth == STACK)
        return CUDA_ERROR_INVALID_VALUE;
    struct CUctx_st *ctx;
    pthread_mutex_lock(&api_lock);
    CUresult result = context_new(gpu, flags, version, NULL, &ctx);
    pthread_mutex_unlock(&api_lock);
    TRY(result);
    *out = ctx;
    return push(ctx);
}

API cuCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice device);
API cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice device);
API cuCtxCreate_v3(CUcontext *ctx, void *affinity, int count, unsigned int flags, CUdevice device);
API cuCtxCreate_v4(CUcontext *ctx, CUctxCreateParams *params, unsigned int flags, CUdevice device);
API cuCtxDestroy(CUcontext ctx);
API cuCtxDestroy_v2(CUcontext ctx);
API cuCtxAttach(CUcontext *ctx, unsigned int flags);
API cuCtxDetach(CUcontext ctx);

API cuCtxCreate(CUcontext *ctx, unsigned int flags, CUdevice device)
{
    return create(ctx, flags, device, 3010);
}

API cuCtxCreate_v2(CUcontext *ctx, unsigned int flags, CUdevice device)
{
    return create(ctx, flags, device, 3020);
}

API cuCtxCreate_v3(CUcontext *ctx, void *affinity, int count, unsigned int flags, CUdevice device)
{
    return affinity || count ? CUDA_ERROR_UNSUPPORTED_EXEC_AFFINITY : create(ctx, flags, device, 3020);
}

API cuCtxCreate_v4(CUcontext *ctx, CUctxCreateParams *params, unsigned int flags, CUdevice device)
{
    if (params && (params->execAffinityParams || params->cigParams))
        return CUDA_ERROR_NOT_SUPPORTED;
    return create(ctx, flags, device, 3020);
}

API cuCtxDestroy_v2(CUcontext ctx)
{
    CHECK_INIT();
    if (!valid(ctx) || ctx->primary || ctx->green)
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&api_lock);
    deactivate(ctx);
    object_free(ctx);
    pthread_mutex_unlock(&api_lock);
    if (sim_thread.depth && sim_thread.stack[sim_thread.depth - 1] == ctx)
        sim_thread.depth--;
    return CUDA_SUCCESS;
}

API cuCtxDestroy(CUcontext ctx)
{
    return cuCtxDestroy_v2(ctx);
}

API cuCtxAttach(CUcontext *out, unsigned int flags)
{
    struct CUctx_st *ctx;
    CHECK_INIT();
    if (!out || flags)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(current_context(&ctx));
    ctx->retained++;
    *out = ctx;
    return CUDA_SUCCESS;
}

API cuCtxDetach(CUcontext ctx)
{
    CHECK_INIT();
    if (!valid(ctx))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (ctx->retained) {
        ctx->retained--;
        return CUDA_SUCCESS;
    }
    return cuCtxDestroy_v2(ctx);
}

/* ---- primary contexts ---- */

API cuDevicePrimaryCtxRetain(CUcontext *ctx, CUdevice device);
API cuDevicePrimaryCtxRelease(CUdevice device);
API cuDevicePrimaryCtxRelease_v2(CUdevice device);
API cuDevicePrimaryCtxReset(CUdevice device);
API cuDevicePrimaryCtxReset_v2(CUdevice device);
API cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags);
API cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags);
API cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active);

CUresult primary_retain(struct gpu *gpu, struct CUctx_st **out)
{
    CUresult result = CUDA_SUCCESS;
    if (!gpu->primary) {
        result = context_new(gpu, gpu->primary_flags, 3020, NULL, &gpu->primary);
        if (result == CUDA_SUCCESS)
            gpu->primary->primary = true;
    } else if (!gpu->primary->active) { /* the same handle again */
        gpu->primary->flags = gpu->primary_flags;
        result = activate(gpu->primary);
    }
    if (result == CUDA_SUCCESS) {
        gpu->primary->retained++;
        *out = gpu->primary;
    }
    return result;
}

void primary_release(struct gpu *gpu)
{
    if (--gpu->primary->retained == 0)
        deactivate(gpu->primary);
}

API cuDevicePrimaryCtxRetain(CUcontext *out, CUdevice device)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    CUresult result = primary_retain(gpu, out);
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuDevicePrimaryCtxRelease_v2(CUdevice device)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    CUresult result = CUDA_SUCCESS;
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    if (!gpu->primary || !gpu->primary->active || !gpu->primary->retained)
        result = CUDA_ERROR_INVALID_CONTEXT;
    else
        primary_release(gpu);
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuDevicePrimaryCtxRelease(CUdevice device)
{
    return cuDevicePrimaryCtxRelease_v2(device);
}

/* Everything in it is destroyed; its users keep their counts, and it is made anew when next needed. */
API cuDevicePrimaryCtxReset_v2(CUdevice device)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    CUresult result = CUDA_SUCCESS;
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    if (gpu->primary && gpu->primary->active) {
        unsigned retained = gpu->primary->retained;
        deactivate(gpu->primary);
        if (retained)
            result = activate(gpu->primary);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuDevicePrimaryCtxReset(CUdevice device)
{
    return cuDevicePrimaryCtxReset_v2(device);
}

API cuDevicePrimaryCtxSetFlags_v2(CUdevice device, unsigned int flags)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    if (flags & ~CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    gpu->primary_flags = flags;
    if (gpu->primary && gpu->primary->active)
        gpu->primary->flags = flags;
    return CUDA_SUCCESS;
}

API cuDevicePrimaryCtxSetFlags(CUdevice device, unsigned int flags)
{
    return cuDevicePrimaryCtxSetFlags_v2(device, flags);
}

API cuDevicePrimaryCtxGetState(CUdevice device, unsigned int *flags, int *active)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    if (!flags || !active)
        return CUDA_ERROR_INVALID_VALUE;
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    *active = gpu->primary && gpu->primary->active;
    *flags = gpu->primary_flags;
    return CUDA_SUCCESS;
}

/* ---- the current one ---- */

API cuCtxPushCurrent(CUcontext ctx);
API cuCtxPushCurrent_v2(CUcontext ctx);
API cuCtxPopCurrent(CUcontext *ctx);
API cuCtxPopCurrent_v2(CUcontext *ctx);
API cuCtxSetCurrent(CUcontext ctx);
API cuCtxGetCurrent(CUcontext *ctx);
API cuCtxGetDevice(CUdevice *device);
API cuCtxGetDevice_v2(CUdevice *device, CUcontext ctx);
API cuCtxGetId(CUcontext ctx, unsigned long long *id);
API cuCtxGetFlags(unsigned int *flags);
API cuCtxSetFlags(unsigned int flags);
API cuCtxGetApiVersion(CUcontext ctx, unsigned int *version);
API cuCtxSynchronize(void);
API cuCtxSynchronize_v2(CUcontext ctx);

API cuCtxPushCurrent_v2(CUcontext ctx)
{
    CHECK_INIT();
    return valid(ctx) ? push(ctx) : CUDA_ERROR_INVALID_CONTEXT;
}

API cuCtxPushCurrent(CUcontext ctx)
{
    return cuCtxPushCurrent_v2(ctx);
}

API cuCtxPopCurrent_v2(CUcontext *ctx)
{
    CHECK_INIT();
    if (!sim_thread.depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    sim_thread.depth--;
    if (ctx)
        *ctx = sim_thread.stack[sim_thread.depth];
    return CUDA_SUCCESS;
}

API cuCtxPopCurrent(CUcontext *ctx)
{
    return cuCtxPopCurrent_v2(ctx);
}

API cuCtxSetCurrent(CUcontext ctx)
{
    CHECK_INIT();
    if (!ctx) {
        if (sim_thread.depth)
            sim_thread.depth--;
        return CUDA_SUCCESS;
    }
    if (!valid(ctx))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!sim_thread.depth)
        return push(ctx);
    sim_thread.stack[sim_thread.depth - 1] = ctx;
    return CUDA_SUCCESS;
}

API cuCtxGetCurrent(CUcontext *ctx)
{
    CHECK_INIT();
    if (!ctx)
        return CUDA_ERROR_INVALID_VALUE;
    *ctx = sim_thread.depth ? sim_thread.stack[sim_thread.depth - 1] : NULL;
    return CUDA_SUCCESS;
}

/* The given context, or the current one. */
static CUresult given_or_current(CUcontext given, struct CUctx_st **ctx)
{
    CHECK_INIT();
    if (!given)
        return current_context(ctx);
    if (!valid(given))
        return CUDA_ERROR_INVALID_CONTEXT;
    *ctx = given;
    return CUDA_SUCCESS;
}

API cuCtxGetDevice_v2(CUdevice *device, CUcontext given)
{
    struct CUctx_st *ctx;
    TRY(given_or_current(given, &ctx));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = ctx->gpu->ordinal;
    return CUDA_SUCCESS;
}

API cuCtxGetDevice(CUdevice *device)
{
    return cuCtxGetDevice_v2(device, NULL);
}

API cuCtxGetId(CUcontext given, unsigned long long *id)
{
    struct CUctx_st *ctx;
    TRY(given_or_current(given, &ctx));
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = ctx->id;
    return CUDA_SUCCESS;
}

API cuCtxGetFlags(unsigned int *flags)
{
    struct CUctx_st *ctx;
    TRY(given_or_current(NULL, &ctx));
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = ctx->flags;
    return CUDA_SUCCESS;
}

API cuCtxSetFlags(unsigned int flags)
{
    struct CUctx_st *ctx;
    TRY(given_or_current(NULL, &ctx));
    if (flags & ~CU_CTX_FLAGS_MASK)
        return CUDA_ERROR_INVALID_VALUE;
    ctx->flags = flags;
    return CUDA_SUCCESS;
}

API cuCtxGetApiVersion(CUcontext given, unsigned int *version)
{
    struct CUctx_st *ctx;
    TRY(given_or_current(given, &ctx));
    if (!version)
        return CUDA_ERROR_INVALID_VALUE;
    *version = ctx->version;
    return CUDA_SUCCESS;
}

API cuCtxSynchronize_v2(CUcontext given)
{
    struct CUctx_st *ctx;
    TRY(given_or_current(given, &ctx));
    if (ctx->captures) {
        pthread_mutex_lock(&api_lock);
        CUresult result = capture_forbids_sync(ctx->legacy);
        pthread_mutex_unlock(&api_lock);
        TRY(result);
    }
    queue_wait_all(&ctx->gpu->queue);
    pool_trim_all(ctx->gpu);
    return CUDA_SUCCESS;
}

API cuCtxSynchronize(void)
{
    return cuCtxSynchronize_v2(NULL);
}
