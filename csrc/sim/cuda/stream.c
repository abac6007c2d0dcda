/* stream.c: streams, and what the legacy default stream means for the others.
 *
 * Channel 0 is the legacy stream's; blocking streams share channels 1 to 15, the others 16 to 31, so that streams of
 * one kind may wait for each other falsely when there are many (as on the real thing's hardware queues), never those of
 * different kinds. */
#include "cuda/sim.h"

static uint64_t stream_ids;

static uint32_t pick_channel(const struct queue *queue, bool blocking)
{
    uint32_t first = blocking ? 1 : 16, best = first;
    for (uint32_t c = first; c < first + (blocking ? 15 : 16); c++)
        if (queue->streams[c] < queue->streams[best])
            best = c;
    return best;
}

CUresult stream_new(struct CUctx_st *ctx, unsigned flags, int priority, struct CUstream_st **out)
{
    struct queue *queue = &ctx->gpu->queue;
    struct CUstream_st *stream = object_new(OBJ_STREAM, sizeof *stream, ctx);
    if (!stream)
        return CUDA_ERROR_OUT_OF_MEMORY;
    bool blocking = !(flags & CU_STREAM_NON_BLOCKING);
    stream->gpu = ctx->gpu;
    stream->channel = pick_channel(queue, blocking);
    stream->flags = flags;
    stream->priority = priority < -5 ? -5 : priority > 0 ? 0 : priority;
    stream->id = ++stream_ids + 2;
    queue->streams[stream->channel]++;
    if (blocking)
        store_relaxed(&ctx->blocking, ctx->blocking | 1u << stream->channel);
    store_relaxed(&queue_channel(queue, stream->channel)->priority, stream->priority);
    *out = stream;
    return CUDA_SUCCESS;
}

void stream_release(struct CUstream_st *stream)
{
    if (stream->capture)
        capture_drop(stream);
    if (!stream->legacy)
        stream->gpu->queue.streams[stream->channel]--;
    object_free(stream);
}

/* ---- each thread's own default stream ---- */

static pthread_key_t thread_exit;
static pthread_once_t thread_exit_once = PTHREAD_ONCE_INIT;

static void on_thread_exit(void *arg)
{
    struct thread_state *thread = arg;
    if (driver_state != DRIVER_READY)
        return;
    pthread_mutex_lock(&api_lock);
    if (object_is(thread->own, OBJ_STREAM) && thread->own->per_thread)
        stream_release(thread->own);
    pthread_mutex_unlock(&api_lock);
}

static void make_thread_exit(void)
{
    pthread_key_create(&thread_exit, on_thread_exit);
}

static CUresult own_stream(struct CUctx_st *ctx, struct CUstream_st **stream)
{
    struct thread_state *thread = &sim_thread;
    CUresult result = CUDA_SUCCESS;
    if (thread->own && thread->own_ctx_id == ctx->id) {
        *stream = thread->own;
        return CUDA_SUCCESS;
    }
    pthread_once(&thread_exit_once, make_thread_exit);
    pthread_mutex_lock(&api_lock);
    if (object_is(thread->own, OBJ_STREAM) && thread->own->per_thread)
        stream_release(thread->own); /* one context at a time: coming back to another makes a new one */
    thread->own = NULL;
    result = stream_new(ctx, CU_STREAM_DEFAULT, 0, stream);
    if (result == CUDA_SUCCESS) {
        (*stream)->per_thread = true;
        thread->own = *stream;
        thread->own_ctx_id = ctx->id;
        pthread_setspecific(thread_exit, thread);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

CUresult stream_get(bool ptds, CUstream handle, struct CUstream_st **stream)
{
    struct CUctx_st *ctx;
    CHECK_INIT();
    if ((uintptr_t)handle > 2) {
        if (!object_is(handle, OBJ_STREAM))
            return CUDA_ERROR_INVALID_HANDLE;
        if (handle->detached)
            return CUDA_ERROR_CONTEXT_IS_DESTROYED;
        *stream = handle;
        return CUDA_SUCCESS;
    }
    TRY(current_context(&ctx));
    if (handle == CU_STREAM_PER_THREAD || (!handle && ptds))
        return own_stream(ctx, stream);
    *stream = ctx->legacy;
    return CUDA_SUCCESS;
}

/* ---- order with the legacy stream ---- */

static CUresult append_wait(struct queue *queue, uint32_t channel, uint32_t dep, uint64_t tail)
{
    struct work work = {.kind = SIM_WAIT, .dep = dep, .dep_seq = tail - 1};
    return queue_append(queue, channel, &work);
}

static CUresult barriers(struct CUstream_st *stream)
{
    struct CUctx_st *ctx = stream->object.ctx;
    struct queue *queue = &stream->gpu->queue;
    if (stream->flags & CU_STREAM_NON_BLOCKING)
        return CUDA_SUCCESS;
    if (!stream->legacy) {
        uint64_t tail = queue_tail(queue, 0);
        if (tail != load_relaxed(&stream->saw_legacy) && queue_behind(queue, 0, tail))
            TRY(append_wait(queue, stream->channel, 0, tail));
        store_relaxed(&stream->saw_legacy, tail);
        return CUDA_SUCCESS;
    }
    for (uint32_t blocking = load_relaxed(&ctx->blocking); blocking; blocking &= blocking - 1) {
        uint32_t c = (uint32_t)__builtin_ctz(blocking);
        uint64_t tail = queue_tail(queue, c);
        if (tail != load_relaxed(&ctx->legacy_saw[c]) && queue_behind(queue, c, tail))
            TRY(append_wait(queue, 0, c, tail));
        store_relaxed(&ctx->legacy_saw[c], tail);
    }
    return CUDA_SUCCESS;
}

CUresult stream_append(struct CUstream_st *stream, struct work *work)
{
    TRY(barriers(stream));
    return queue_append(&stream->gpu->queue, stream->channel, work);
}

/* The channels whose work so far a synchronisation with the stream covers. */
static uint32_t covers(const struct CUstream_st *stream)
{
    uint32_t mask = 1u << stream->channel;
    if (stream->legacy)
        mask |= stream->object.ctx->blocking;
    return mask;
}

CUresult stream_sync(struct CUstream_st *stream)
{
    struct queue *queue = &stream->gpu->queue;
    uint64_t tails[SIM_CHANNELS];
    uint32_t mask = covers(stream);
    for (uint32_t m = mask; m; m &= m - 1)
        tails[__builtin_ctz(m)] = queue_tail(queue, (uint32_t)__builtin_ctz(m));
    for (uint32_t m = mask; m; m &= m - 1) {
        uint32_t c = (uint32_t)__builtin_ctz(m);
        if (tails[c])
            queue_wait(queue, c, tails[c] - 1);
    }
    pool_trim_all(stream->gpu);
    return CUDA_SUCCESS;
}

bool stream_idle(struct CUstream_st *stream)
{
    for (uint32_t mask = covers(stream); mask; mask &= mask - 1) {
        uint32_t c = (uint32_t)__builtin_ctz(mask);
        uint64_t tail = queue_tail(&stream->gpu->queue, c);
        if (tail && !queue_done(&stream->gpu->queue, c, tail - 1))
            return false;
    }
    return true;
}

/* ---- entry points ---- */

API cuStreamCreate(CUstream *stream, unsigned int flags);
API cuStreamCreateWithPriority(CUstream *stream, unsigned int flags, int priority);
API cuStreamDestroy(CUstream stream);
API cuStreamDestroy_v2(CUstream stream);

API cuStreamCreateWithPriority(CUstream *out, unsigned int flags, int priority)
{
    struct CUctx_st *ctx;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!out || (flags & ~CU_STREAM_NON_BLOCKING))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = stream_new(ctx, flags, priority, out);
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuStreamCreate(CUstream *stream, unsigned int flags)
{
    return cuStreamCreateWithPriority(stream, flags, 0);
}

/* Returns at once; the work goes on. */
API cuStreamDestroy_v2(CUstream stream)
{
    CHECK_INIT();
    if ((uintptr_t)stream <= 2 || !object_is(stream, OBJ_STREAM) || stream->legacy || stream->per_thread)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&api_lock);
    stream_release(stream);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuStreamDestroy(CUstream stream)
{
    return cuStreamDestroy_v2(stream);
}

static CUresult get_id(bool ptds, CUstream handle, unsigned long long *id)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = stream->legacy ? 1 : stream->id;
    return CUDA_SUCCESS;
}
API_PAIR(cuStreamGetId, _ptsz, get_id, (CUstream stream, unsigned long long *id), stream, id)

static CUresult get_priority(bool ptds, CUstream handle, int *priority)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!priority)
        return CUDA_ERROR_INVALID_VALUE;
    *priority = stream->priority;
    return CUDA_SUCCESS;
}
API_PAIR(cuStreamGetPriority, _ptsz, get_priority, (CUstream stream, int *priority), stream, priority)

static CUresult get_flags(bool ptds, CUstream handle, unsigned int *flags)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = stream->flags;
    return CUDA_SUCCESS;
}
API_PAIR(cuStreamGetFlags, _ptsz, get_flags, (CUstream stream, unsigned int *flags), stream, flags)

static CUresult get_ctx(bool ptds, CUstream handle, CUcontext *ctx)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!ctx)
        return CUDA_ERROR_INVALID_VALUE;
    *ctx = stream->object.ctx;
    return CUDA_SUCCESS;
}
API_PAIR(cuStreamGetCtx, _ptsz, get_ctx, (CUstream stream, CUcontext *ctx), stream, ctx)

static CUresult get_ctx_v2(bool ptds, CUstream handle, CUcontext *ctx, CUgreenCtx *green)
{
    TRY(get_ctx(ptds, handle, ctx));
    if (green)
        *green = (*ctx)->green;
    if ((*ctx)->green)
        *ctx = (*ctx)->gpu->primary;
    return CUDA_SUCCESS;
}
API_PAIR(cuStreamGetCtx_v2, _ptsz, get_ctx_v2, (CUstream stream, CUcontext *ctx, CUgreenCtx *green), stream, ctx, green)

static CUresult get_device(bool ptds, CUstream handle, CUdevice *device)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!device)
        return CUDA_ERROR_INVALID_VALUE;
    *device = stream->gpu->ordinal;
    return CUDA_SUCCESS;
}
API_PAIR(cuStreamGetDevice, _ptsz, get_device, (CUstream stream, CUdevice *device), stream, device)

static CUresult check_capture(struct CUstream_st *stream)
{
    if (!captures_active)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&api_lock);
    CUresult result = capture_forbids_sync(stream);
    pthread_mutex_unlock(&api_lock);
    return result;
}

static CUresult synchronize(bool ptds, CUstream handle)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    TRY(check_capture(stream));
    return stream_sync(stream);
}
API_PAIR(cuStreamSynchronize, _ptsz, synchronize, (CUstream stream), stream)

static CUresult query(bool ptds, CUstream handle)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    TRY(check_capture(stream));
    return stream_idle(stream) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
API_PAIR(cuStreamQuery, _ptsz, query, (CUstream stream), stream)

static CUresult wait_event(bool ptds, CUstream handle, CUevent event, unsigned int flags)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!object_is(event, OBJ_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~CU_EVENT_WAIT_EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    return event_wait(stream, event);
}
API_PAIR(cuStreamWaitEvent, _ptsz, wait_event, (CUstream stream, CUevent event, unsigned int flags), stream, event,
         flags)

/* Attributes are taken and forgotten: a policy window or a priority hint changes nothing here. */
static CUresult set_attribute(bool ptds, CUstream handle, CUlaunchAttributeID id, const void *value)
{
    struct CUstream_st *stream;
    (void)id;
    TRY(stream_get(ptds, handle, &stream));
    return value ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API_PAIR(cuStreamSetAttribute, _ptsz, set_attribute, (CUstream stream, CUlaunchAttributeID id, const void *value),
         stream, id, value)

static CUresult attach_mem(bool ptds, CUstream handle, CUdeviceptr pointer, size_t length, unsigned int flags)
{
    struct CUstream_st *stream;
    (void)length;
    (void)flags;
    TRY(stream_get(ptds, handle, &stream));
    return device_range(pointer, 1) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
API_PAIR(cuStreamAttachMemAsync, _ptsz, attach_mem,
         (CUstream stream, CUdeviceptr pointer, size_t length, unsigned int flags), stream,
         pointer, length, flags)
