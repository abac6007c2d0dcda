/* event.c: an event is the place of a mark in a queue, and that mark's exact device time once it is done. */
#include "cuda/sim.h"

static pthread_mutex_t event_lock = PTHREAD_MUTEX_INITIALIZER; /* state, refs and dead; inside queue.retire */

static void mark_done(void *arg, uint64_t seq, uint64_t done_ns)
{
    struct CUevent_st *event = arg;
    pthread_mutex_lock(&event_lock);
    if (event->state == EVENT_PENDING && event->seq == seq) { /* else recorded again since */
        event->stamp_ns = done_ns;
        store_release(&event->state, EVENT_DONE);
    }
    bool last = --event->refs == 0 && event->dead;
    pthread_mutex_unlock(&event_lock);
    if (last)
        object_recycle(event);
}

/* The memory stays this event's until its last mark is done. */
void event_release(struct CUevent_st *event)
{
    object_hide(event);
    if (event->shared)
        ipc_event_forget(event);
    pthread_mutex_lock(&event_lock);
    event->dead = true;
    bool last = event->refs == 0;
    pthread_mutex_unlock(&event_lock);
    if (last)
        object_recycle(event);
}

CUresult event_record(struct CUevent_st *event, struct CUstream_st *stream)
{
    struct work work = {.kind = SIM_MARK, .action = {.run = mark_done, .arg = event}, .seq = &event->seq};
    pthread_mutex_lock(&event_lock);
    event->refs++;
    event->state = EVENT_PENDING;
    event->seq = UINT64_MAX; /* until it is queued no older mark may answer for it */
    event->gpu = stream->gpu;
    event->channel = stream->channel;
    pthread_mutex_unlock(&event_lock);
    CUresult result = stream_append(stream, &work);
    if (result != CUDA_SUCCESS) {
        pthread_mutex_lock(&event_lock);
        event->refs--;
        event->state = EVENT_NEVER;
        pthread_mutex_unlock(&event_lock);
    }
    if (event->shared && result == CUDA_SUCCESS)
        ipc_event_record(event);
    return result;
}

static void wait_elsewhere(void *arg, uint64_t seq, uint64_t done_ns)
{
    struct CUevent_st *event = arg;
    (void)done_ns;
    (void)seq;
    while (load_acquire(&event->state) == EVENT_PENDING && load_acquire(&event->seq) == UINT64_MAX)
        __builtin_ia32_pause();
    if (load_acquire(&event->state) == EVENT_PENDING)
        queue_wait(&event->gpu->queue, event->channel, event->seq);
}

CUresult event_wait(struct CUstream_st *stream, struct CUevent_st *event)
{
    if (captures_active) {
        pthread_mutex_lock(&api_lock);
        CUresult result = CUDA_SUCCESS;
        bool captured = event->capture_id != 0;
        if (captured) {
            result = capture_join(stream, event);
        } else if (stream->capture) { /* an event from outside is no part of the graph */
            capture_invalidate(stream->capture);
            result = CUDA_ERROR_STREAM_CAPTURE_ISOLATION;
        }
        bool capturing = stream->capture != NULL;
        pthread_mutex_unlock(&api_lock);
        if (captured || capturing || result != CUDA_SUCCESS)
            return result;
    }
    if (event->shared)
        return ipc_event_wait(stream, event);
    if (load_acquire(&event->state) != EVENT_PENDING)
        return CUDA_SUCCESS;
    if (event->gpu != stream->gpu) { /* the queues of another GPU are another simulation: its clock is the host's */
        struct work gate =
            {.kind = SIM_GATE, .action = {.run = wait_elsewhere, .arg = event, .gate = true, .prompt = true}};
        return stream_append(stream, &gate);
    }
    if (event->channel == stream->channel || !queue_behind(&event->gpu->queue, event->channel, event->seq + 1))
        return CUDA_SUCCESS;
    struct work wait = {.kind = SIM_WAIT, .dep = event->channel, .dep_seq = event->seq};
    return stream_append(stream, &wait);
}

static bool event_done(struct CUevent_st *event)
{
    if (event->shared)
        return ipc_event_done(event->object.ctx->gpu, load_acquire(event->shared));
    if (load_acquire(&event->state) == EVENT_PENDING)
        queue_done(&event->gpu->queue, event->channel, event->seq);
    return load_acquire(&event->state) != EVENT_PENDING;
}

/* ---- entry points ---- */

API cuEventCreate(CUevent *event, unsigned int flags);
API cuEventDestroy(CUevent event);
API cuEventDestroy_v2(CUevent event);
API cuEventQuery(CUevent event);
API cuEventSynchronize(CUevent event);
API cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end);
API cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end);
API cuCtxRecordEvent(CUcontext ctx, CUevent event);
API cuCtxWaitEvent(CUcontext ctx, CUevent event);
API cuGreenCtxRecordEvent(CUgreenCtx green, CUevent event);
API cuGreenCtxWaitEvent(CUgreenCtx green, CUevent event);

API cuEventCreate(CUevent *out, unsigned int flags)
{
    struct CUctx_st *ctx;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!out || flags > 7 || ((flags & CU_EVENT_INTERPROCESS) && !(flags & CU_EVENT_DISABLE_TIMING)))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct CUevent_st *event = object_new(OBJ_EVENT, sizeof *event, ctx);
    pthread_mutex_unlock(&api_lock);
    if (!event)
        return CUDA_ERROR_OUT_OF_MEMORY;
    event->flags = flags;
    *out = event;
    return CUDA_SUCCESS;
}

API cuEventDestroy_v2(CUevent event)
{
    CHECK_INIT();
    if (!object_is(event, OBJ_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&api_lock);
    event_release(event);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuEventDestroy(CUevent event)
{
    return cuEventDestroy_v2(event);
}

static CUresult record_with_flags(bool ptds, CUevent event, CUstream handle, unsigned int flags)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!object_is(event, OBJ_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (flags & ~CU_EVENT_RECORD_EXTERNAL)
        return CUDA_ERROR_INVALID_VALUE;
    if (captures_active) {
        struct node_params node = {.type = CU_GRAPH_NODE_TYPE_EVENT_RECORD, .event = event};
        CUresult result = CUDA_SUCCESS;
        pthread_mutex_lock(&api_lock);
        bool capturing = stream->capture != NULL;
        if (stream_capturing_blocked(stream))
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        else if (capturing && (flags & CU_EVENT_RECORD_EXTERNAL))
            result = capture_add(stream, &node);
        else if (capturing)
            result = capture_record(event, stream);
        pthread_mutex_unlock(&api_lock);
        if (capturing || result != CUDA_SUCCESS)
            return result;
    }
    event->capture_id = 0;
    return event_record(event, stream);
}
API_PAIR(cuEventRecordWithFlags, _ptsz, record_with_flags, (CUevent event, CUstream stream, unsigned int flags), event,
         stream, flags)

static CUresult record(bool ptds, CUevent event, CUstream stream)
{
    return record_with_flags(ptds, event, stream, 0);
}
API_PAIR(cuEventRecord, _ptsz, record, (CUevent event, CUstream stream), event, stream)

static CUresult check(CUevent event)
{
    CHECK_INIT();
    if (!object_is(event, OBJ_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    return event->capture_id ? CUDA_ERROR_CAPTURED_EVENT : CUDA_SUCCESS;
}

API cuEventQuery(CUevent event)
{
    TRY(check(event));
    return event_done(event) ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}

API cuEventSynchronize(CUevent event)
{
    TRY(check(event));
    if (event->shared)
        ipc_event_sync(event);
    else if (load_acquire(&event->state) == EVENT_PENDING)
        queue_wait(&event->gpu->queue, event->channel, event->seq);
    pool_trim_all(event->object.ctx->gpu);
    return CUDA_SUCCESS;
}

API cuEventElapsedTime_v2(float *milliseconds, CUevent start, CUevent end)
{
    TRY(check(start));
    TRY(check(end));
    if (!milliseconds)
        return CUDA_ERROR_INVALID_VALUE;
    if (((start->flags | end->flags) & CU_EVENT_DISABLE_TIMING) || start->state == EVENT_NEVER ||
        end->state == EVENT_NEVER)
        return CUDA_ERROR_INVALID_HANDLE;
    if (!event_done(start) || !event_done(end))
        return CUDA_ERROR_NOT_READY;
    *milliseconds = (float)((double)(int64_t)(end->stamp_ns - start->stamp_ns) / 1e6);
    return CUDA_SUCCESS;
}

API cuEventElapsedTime(float *milliseconds, CUevent start, CUevent end)
{
    return cuEventElapsedTime_v2(milliseconds, start, end);
}

/* All streams of the context: the legacy stream stands for the blocking ones, and that is all that a mark can wait for
 * without waiting itself. */
API cuCtxRecordEvent(CUcontext ctx, CUevent event)
{
    CHECK_INIT();
    if (!object_is(ctx, OBJ_CONTEXT) || !ctx->active)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (ctx->green)
        return cuGreenCtxRecordEvent(ctx->green, event);
    if (!object_is(event, OBJ_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    event->capture_id = 0;
    return event_record(event, ctx->legacy);
}

API cuCtxWaitEvent(CUcontext ctx, CUevent event)
{
    CHECK_INIT();
    if (!object_is(ctx, OBJ_CONTEXT) || !ctx->active)
        return CUDA_ERROR_INVALID_CONTEXT;
    if (ctx->green)
        return cuGreenCtxWaitEvent(ctx->green, event);
    return object_is(event, OBJ_EVENT) ? event_wait(ctx->legacy, event) : CUDA_ERROR_INVALID_HANDLE;
}
