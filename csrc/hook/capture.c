/* capture.c: which streams are being captured, and which threads run host callbacks.
 *
 * A captured launch is not device work: it passes without gate, mark or count, and no event is ever recorded behind it. The
 * driver knows which streams a capture has reached (an event wait joins them), so it is asked, but only while any capture is
 * active in this process. For the legacy stream it may answer "implicit": any use would break a capture, so it counts as
 * captured too. Calls that a global capture forbids to other threads are made in relaxed mode.
 *
 * Host callbacks run on a thread of the driver while the stream waits for them: a launch from there that waited for the gate
 * would wait for its own drain. They pass ungated. */
#include <pthread.h>
#include <stdlib.h>

#include "client.h"
#include "hook.h"
#include "stall.h"
#include "streams.h"

CU_NEED(CUresult, cuStreamIsCapturing, (CUstream, CUstreamCaptureStatus *));
CU_NEED(CUresult, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *));

#define UNCHANGED (-1)

static int active; /* captures begun and not ended */

bool stream_captures(void *stream)
{
    CUstreamCaptureStatus status = CU_STREAM_CAPTURE_STATUS_NONE;
    if (__builtin_expect(load_relaxed(&active) == 0, 1) || !have(cuStreamIsCapturing))
        return false;
    return REAL(cuStreamIsCapturing)((CUstream)stream, &status) != CUDA_SUCCESS || status != CU_STREAM_CAPTURE_STATUS_NONE;
}

int capture_relax(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (__builtin_expect(load_relaxed(&active) == 0, 1) || !have(cuThreadExchangeStreamCaptureMode) ||
        REAL(cuThreadExchangeStreamCaptureMode)(&mode) != CUDA_SUCCESS)
        return UNCHANGED;
    return (int)mode;
}

void capture_restore(int mode)
{
    CUstreamCaptureMode old = (CUstreamCaptureMode)mode;
    if (mode != UNCHANGED)
        REAL(cuThreadExchangeStreamCaptureMode)(&old);
}

bool capture_is_active(void) { return load_relaxed(&active) != 0; }

/* Between the question whether a stream captures and the event recorded in it, which the agent and launching threads do under
 * gate.work, no stream may begin to: the event would be the capture's. So streams join captures with that lock held. */
static int hold_recorders(void)
{
    int count = gate_count();
    for (int i = 0; i < count; i++)
        hook_lock_take(&gate_of(i)->work);
    return count;
}

static void release_recorders(int count)
{
    while (count-- > 0)
        hook_lock_drop(&gate_of(count)->work);
}

static int begin(void)
{
    fetch_add(&active, 1); /* before the driver begins: nobody may take the stream for a plain one meanwhile */
    if (gate_self)
        gate_self->stream = GATE_NO_STREAM;
    return hold_recorders();
}

static CUresult begun(CUresult result, int held)
{
    release_recorders(held);
    if (result != CUDA_SUCCESS)
        fetch_sub(&active, 1);
    return result;
}

static void ended(CUresult result)
{
    bool was = result == CUDA_SUCCESS || result == CUDA_ERROR_STREAM_CAPTURE_INVALIDATED ||
               result == CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
    if (was && fetch_sub(&active, 1) <= 0)
        fetch_add(&active, 1); /* a capture that we did not see begin */
}

#define BEGIN_WRAP(name, args, call) \
    CU_WRAP(CUresult, name, args) \
    { \
        int held = begin(); \
        return begun(REAL(name) call, held); \
    }
#define END_WRAP(name) \
    CU_WRAP(CUresult, name, (CUstream stream, CUgraph *graph)) \
    { \
        CUresult result = REAL(name)(stream, graph); \
        ended(result); \
        return result; \
    }

BEGIN_WRAP(cuStreamBeginCapture, (CUstream stream), (stream))
BEGIN_WRAP(cuStreamBeginCapture_ptsz, (CUstream stream), (stream))
BEGIN_WRAP(cuStreamBeginCapture_v2, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))
BEGIN_WRAP(cuStreamBeginCapture_v2_ptsz, (CUstream stream, CUstreamCaptureMode mode), (stream, mode))
BEGIN_WRAP(cuStreamBeginCaptureToGraph,
           (CUstream stream, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count,
            CUstreamCaptureMode mode),
           (stream, graph, nodes, edges, count, mode))
BEGIN_WRAP(cuStreamBeginCaptureToGraph_ptsz,
           (CUstream stream, CUgraph graph, const CUgraphNode *nodes, const CUgraphEdgeData *edges, size_t count,
            CUstreamCaptureMode mode),
           (stream, graph, nodes, edges, count, mode))
END_WRAP(cuStreamEndCapture)
END_WRAP(cuStreamEndCapture_ptsz)

/* Waiting for an event of a capture takes the stream into it. */
#define JOIN_WRAP(name, args, call) \
    CU_WRAP(CUresult, name, args) \
    { \
        if (!capture_is_active()) \
            return REAL(name) call; \
        int held = hold_recorders(); \
        CUresult result = REAL(name) call; \
        release_recorders(held); \
        return result; \
    }

JOIN_WRAP(cuStreamWaitEvent, (CUstream stream, CUevent event, unsigned flags), (stream, event, flags))
JOIN_WRAP(cuStreamWaitEvent_ptsz, (CUstream stream, CUevent event, unsigned flags), (stream, event, flags))
JOIN_WRAP(cuCtxWaitEvent, (CUcontext context, CUevent event), (context, event))
JOIN_WRAP(cuGreenCtxWaitEvent, (CUgreenCtx context, CUevent event), (context, event))

/* ---- host callbacks ---- */

static int queued; /* host functions handed to the driver that have not returned */

bool stall_is_possible(void) { return load_relaxed(&queued) != 0 || stall_was_possible(); }

struct callback {
    CUhostFn function;
    CUstreamCallback with_status;
    void *data;
    bool once; /* not captured into a graph, which runs it any number of times */
};

static struct gate_thread *callback_begins(void)
{
    struct gate_thread *t = gate_thread_here();
    if (t) {
        t->in_callback++;
        t->stream = GATE_NO_STREAM;
    }
    return t;
}

static void callback_ends(struct gate_thread *t, struct callback *callback)
{
    if (t)
        t->in_callback--;
    if (callback->once) {
        free(callback);
        fetch_sub(&queued, 1);
    }
}

static void run_function(void *data)
{
    struct callback *callback = data;
    struct gate_thread *t = callback_begins();
    callback->function(callback->data);
    callback_ends(t, callback);
}

static void run_callback(CUstream stream, CUresult status, void *data)
{
    struct callback *callback = data;
    struct gate_thread *t = callback_begins();
    callback->with_status(stream, status, callback->data);
    callback_ends(t, callback);
}

static struct callback *callback_new(CUhostFn function, CUstreamCallback with_status, void *data, void *stream)
{
    struct callback *callback = malloc(sizeof *callback);
    if (!callback)
        return NULL;
    *callback = (struct callback){function, with_status, data, !stream_captures(stream)};
    if (callback->once)
        fetch_add(&queued, 1);
    else
        stall_possible_from_now(); /* it runs with the graph */
    return callback;
}

static CUresult callback_given(struct callback *callback, CUresult result)
{
    if (result != CUDA_SUCCESS) {
        if (callback->once)
            fetch_sub(&queued, 1);
        free(callback);
    }
    return result;
}

/* Without memory for the note the program's own function goes to the driver, unmarked. */
#define HOST_FUNC_WRAP(name, key) \
    CU_WRAP(CUresult, name, (CUstream stream, CUhostFn function, void *data)) \
    { \
        struct callback *callback = function ? callback_new(function, NULL, data, key(stream)) : NULL; \
        if (!callback) \
            return REAL(name)(stream, function, data); \
        return callback_given(callback, REAL(name)(stream, run_function, callback)); \
    }
#define CALLBACK_WRAP(name, key) \
    CU_WRAP(CUresult, name, (CUstream stream, CUstreamCallback function, void *data, unsigned flags)) \
    { \
        struct callback *callback = function ? callback_new(NULL, function, data, key(stream)) : NULL; \
        if (!callback) \
            return REAL(name)(stream, function, data, flags); \
        return callback_given(callback, REAL(name)(stream, run_callback, callback, flags)); \
    }

HOST_FUNC_WRAP(cuLaunchHostFunc, stream_key)
HOST_FUNC_WRAP(cuLaunchHostFunc_ptsz, stream_key_ptsz)
CALLBACK_WRAP(cuStreamAddCallback, stream_key)
CALLBACK_WRAP(cuStreamAddCallback_ptsz, stream_key_ptsz)

/* A program that reads a captured node sees its own function. */
CU_WRAP(CUresult, cuGraphHostNodeGetParams, (CUgraphNode node, CUDA_HOST_NODE_PARAMS *params))
{
    CUresult result = REAL(cuGraphHostNodeGetParams)(node, params);
    if (result == CUDA_SUCCESS && params->fn == run_function) {
        const struct callback *callback = params->userData;
        *params = (CUDA_HOST_NODE_PARAMS){callback->function, callback->data};
    }
    return result;
}

/* The child has no captures and no streams. */
static void after_fork(void)
{
    active = queued = 0;
}

__attribute__((constructor)) static void at_load(void)
{
    pthread_atfork(NULL, NULL, after_fork);
}
