/* capture.c: streams that build a graph instead of running. All state here is under api_lock; captures_active alone is
 * read without it, to keep captures out of every other call's way. */
#include <stdlib.h>
#include <string.h>
#include "cuda/graph.h"

int captures_active;
static uint64_t capture_ids;
static struct capture *captures[64];

/* ---- captures ---- */

static void leave(struct CUstream_st *stream)
{
    struct capture *capture = stream->capture;
    stream->capture = NULL;
    free(stream->deps);
    stream->deps = NULL;
    stream->deps_count = 0;
    stream->object.ctx->captures--;
    capture->streams--;
}

static void end_capture(struct capture *capture)
{
    for (size_t i = 0; i < 64; i++)
        if (captures[i] == capture)
            captures[i] = NULL;
    fetch_sub(&captures_active, 1);
    free(capture);
}

static void drop_graph(struct capture *capture)
{
    if (capture->own_graph) {
        object_hide(capture->graph);
        graph_unref(capture->graph);
    }
    capture->graph = NULL;
}

/* A capturing stream is destroyed: its capture can only fail. */
void capture_drop(struct CUstream_st *stream)
{
    struct capture *capture = stream->capture;
    capture_invalidate(capture);
    leave(stream);
    if (capture->origin == stream) {
        drop_graph(capture);
        capture->origin = NULL;
    }
    if (!capture->streams)
        end_capture(capture);
}

void capture_invalidate(struct capture *capture)
{
    capture->status = CU_STREAM_CAPTURE_STATUS_INVALIDATED;
}

CUresult capture_add(struct CUstream_st *stream, const struct node_params *params)
{
    struct CUgraphNode_st *node;
    struct capture *capture = stream->capture;
    if (capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    TRY(graph_add(capture->graph, params, stream->deps, stream->deps_count, &node));
    return depends_set(&stream->deps, &stream->deps_count, &node, 1) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult capture_record(struct CUevent_st *event, struct CUstream_st *stream)
{
    if (stream->capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    event->capture_id = stream->capture->id;
    bool kept = depends_set(&event->deps, &event->deps_count, stream->deps, stream->deps_count);
    return kept ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

static struct capture *capture_of(uint64_t id)
{
    for (size_t i = 0; i < 64; i++)
        if (captures[i] && captures[i]->id == id)
            return captures[i];
    return NULL;
}

/* The stream waits for an event of a capture: it becomes part of it, or its next node gets one more edge. */
CUresult capture_join(struct CUstream_st *stream, struct CUevent_st *event)
{
    struct capture *capture = capture_of(event->capture_id);
    if (!capture || capture->status != CU_STREAM_CAPTURE_STATUS_ACTIVE || !capture->origin)
        return CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    if (stream->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    if (stream->capture && stream->capture != capture) {
        capture_invalidate(capture);
        capture_invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_MERGE;
    }
    if (!stream->capture) {
        stream->capture = capture;
        stream->object.ctx->captures++;
        capture->streams++;
    }
    size_t n = stream->deps_count + event->deps_count;
    struct CUgraphNode_st **all = malloc((n + 1) * sizeof *all);
    if (!all)
        return CUDA_ERROR_OUT_OF_MEMORY;
    if (stream->deps_count)
        memcpy(all, stream->deps, stream->deps_count * sizeof *all);
    if (event->deps_count)
        memcpy(all + stream->deps_count, event->deps, event->deps_count * sizeof *all);
    free(stream->deps);
    stream->deps = all;
    stream->deps_count = n;
    return CUDA_SUCCESS;
}

/* ---- what a capture forbids ---- */

/* Calls that might do work behind a capture's back (cuMemAlloc, cuMemFree): forbidden to every thread while a capture
 * in global mode is under way, to the capturing thread in thread-local mode, to nobody that has relaxed its own mode.
 * */
CUresult capture_forbids(void)
{
    CUresult result = CUDA_SUCCESS;
    if (!captures_active || sim_thread.capture_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_SUCCESS;
    pthread_mutex_lock(&api_lock);
    for (size_t i = 0; i < 64; i++) {
        struct capture *capture = captures[i];
        if (!capture || capture->mode == CU_STREAM_CAPTURE_MODE_RELAXED)
            continue;
        if (capture->thread == &sim_thread ||
            (capture->mode == CU_STREAM_CAPTURE_MODE_GLOBAL &&
             sim_thread.capture_mode == CU_STREAM_CAPTURE_MODE_GLOBAL)) {
            capture_invalidate(capture);
            result = CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
        }
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* The capture that makes the legacy stream unusable, if there is one. */
static struct capture *blocking_capture(const struct CUstream_st *stream)
{
    for (size_t i = 0; i < 64 && stream->legacy; i++) {
        struct capture *capture = captures[i];
        if (capture && capture->origin && capture->origin->object.ctx == stream->object.ctx &&
            !(capture->origin->flags & CU_STREAM_NON_BLOCKING))
            return capture;
    }
    return NULL;
}

bool stream_capturing_blocked(struct CUstream_st *stream)
{
    struct capture *capture = blocking_capture(stream);
    if (capture)
        capture_invalidate(capture);
    return capture != NULL;
}

/* Waiting for, or asking after, a stream that captures. For the legacy stream: any capture of its context. */
CUresult capture_forbids_sync(struct CUstream_st *stream)
{
    if (stream->capture) {
        capture_invalidate(stream->capture);
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    }
    if (stream_capturing_blocked(stream))
        return CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    return CUDA_SUCCESS;
}

/* ---- entry points ---- */

API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode);

API cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CHECK_INIT();
    if (!mode || (unsigned)*mode > CU_STREAM_CAPTURE_MODE_RELAXED)
        return CUDA_ERROR_INVALID_VALUE;
    CUstreamCaptureMode old = sim_thread.capture_mode;
    sim_thread.capture_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}

static CUresult begin_locked(struct CUstream_st *stream, CUgraph graph, const CUgraphNode *deps, size_t count,
                             CUstreamCaptureMode mode)
{
    size_t place = 0;
    if (stream->capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (stream->legacy)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    while (place < 64 && captures[place])
        place++;
    struct capture *capture = place < 64 ? calloc(1, sizeof *capture) : NULL;
    if (!capture)
        return CUDA_ERROR_OUT_OF_MEMORY;
    capture->own_graph = !graph;
    capture->graph = graph ? graph : graph_new();
    if (!capture->graph || !depends_set(&stream->deps, &stream->deps_count, deps, count)) {
        free(capture);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    capture->id = ++capture_ids;
    capture->mode = mode;
    capture->status = CU_STREAM_CAPTURE_STATUS_ACTIVE;
    capture->origin = stream;
    capture->thread = &sim_thread;
    capture->streams = 1;
    stream->capture = capture;
    stream->object.ctx->captures++;
    captures[place] = capture;
    fetch_add(&captures_active, 1);
    return CUDA_SUCCESS;
}

static CUresult begin(bool ptds, CUstream handle, CUgraph graph, const CUgraphNode *deps, size_t count,
                      CUstreamCaptureMode mode)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if ((unsigned)mode > CU_STREAM_CAPTURE_MODE_RELAXED || (count && !deps))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = begin_locked(stream, graph, deps, count, mode);
    pthread_mutex_unlock(&api_lock);
    return result;
}

static CUresult begin_v1(bool ptds, CUstream stream)
{
    return begin(ptds, stream, NULL, NULL, 0, CU_STREAM_CAPTURE_MODE_GLOBAL);
}
API_PAIR(cuStreamBeginCapture, _ptsz, begin_v1, (CUstream stream), stream)

static CUresult begin_v2(bool ptds, CUstream stream, CUstreamCaptureMode mode)
{
    return begin(ptds, stream, NULL, NULL, 0, mode);
}
API_PAIR(cuStreamBeginCapture_v2, _ptsz, begin_v2, (CUstream stream, CUstreamCaptureMode mode), stream, mode)

static CUresult begin_to_graph(bool ptds, CUstream stream, CUgraph graph, const CUgraphNode *deps,
                               const CUgraphEdgeData *data,
                               size_t count, CUstreamCaptureMode mode)
{
    (void)data;
    CHECK_INIT();
    return object_is(graph, OBJ_GRAPH) ? begin(ptds, stream, graph, deps, count, mode) : CUDA_ERROR_INVALID_VALUE;
}
API_PAIR(cuStreamBeginCaptureToGraph, _ptsz, begin_to_graph,
         (CUstream stream, CUgraph graph, const CUgraphNode *deps, const CUgraphEdgeData *data, size_t count,
          CUstreamCaptureMode mode),
         stream, graph, deps, data, count, mode)

/* Streams that joined must have been joined again: their last nodes must be reachable from the origin's. */
static bool reaches(struct CUgraphNode_st *const *from, size_t n, const struct CUgraphNode_st *target)
{
    for (size_t i = 0; i < n; i++)
        if (from[i] == target || reaches(from[i]->deps, from[i]->deps_count, target))
            return true;
    return false;
}

static bool joined(const struct capture *capture, const struct CUstream_st *stream)
{
    for (size_t i = 0; i < stream->deps_count; i++)
        if (!reaches(capture->origin->deps, capture->origin->deps_count, stream->deps[i]))
            return false;
    return true;
}

static CUresult end_locked(struct CUstream_st *stream, CUgraph *graph)
{
    struct capture *capture = stream->capture;
    if (!capture)
        return CUDA_ERROR_ILLEGAL_STATE;
    if (capture->origin != stream)
        return CUDA_ERROR_STREAM_CAPTURE_UNMATCHED;
    if (capture->mode != CU_STREAM_CAPTURE_MODE_RELAXED && capture->thread != &sim_thread)
        return CUDA_ERROR_STREAM_CAPTURE_WRONG_THREAD;
    bool active = capture->status == CU_STREAM_CAPTURE_STATUS_ACTIVE;
    CUresult result = active ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
    for (struct object *object = stream->object.ctx->children; object;) {
        struct CUstream_st *other = (struct CUstream_st *)object;
        object = object->next;
        if (other->object.type != OBJ_STREAM || other == stream || other->capture != capture)
            continue;
        if (result == CUDA_SUCCESS && !joined(capture, other))
            result = CUDA_ERROR_STREAM_CAPTURE_UNJOINED;
        leave(other);
    }
    leave(stream);
    if (result == CUDA_SUCCESS)
        *graph = capture->graph;
    else
        drop_graph(capture);
    end_capture(capture);
    return result;
}

static CUresult end(bool ptds, CUstream handle, CUgraph *graph)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!graph)
        return CUDA_ERROR_INVALID_VALUE;
    *graph = NULL;
    pthread_mutex_lock(&api_lock);
    CUresult result = end_locked(stream, graph);
    pthread_mutex_unlock(&api_lock);
    return result;
}
API_PAIR(cuStreamEndCapture, _ptsz, end, (CUstream stream, CUgraph *graph), stream, graph)

static CUresult capture_info(bool ptds, CUstream handle, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                             const CUgraphNode **deps, size_t *count)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!status)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = blocking_capture(stream) ? CUDA_ERROR_STREAM_CAPTURE_IMPLICIT : CUDA_SUCCESS; /* asking spoils nothing */
    struct capture *capture = stream->capture;
    *status = capture ? capture->status : CU_STREAM_CAPTURE_STATUS_NONE;
    if (capture && capture->status == CU_STREAM_CAPTURE_STATUS_ACTIVE) {
        if (id)
            *id = capture->id;
        if (graph)
            *graph = capture->graph;
        if (deps)
            *deps = stream->deps;
        if (count)
            *count = stream->deps_count;
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

static CUresult is_capturing(bool ptds, CUstream stream, CUstreamCaptureStatus *status)
{
    return capture_info(ptds, stream, status, NULL, NULL, NULL, NULL);
}
API_PAIR(cuStreamIsCapturing, _ptsz, is_capturing, (CUstream stream, CUstreamCaptureStatus *status), stream, status)

static CUresult info_v1(bool ptds, CUstream stream, CUstreamCaptureStatus *status, uint64_t *id)
{
    return capture_info(ptds, stream, status, id, NULL, NULL, NULL);
}
API_PAIR(cuStreamGetCaptureInfo, _ptsz, info_v1, (CUstream stream, CUstreamCaptureStatus *status, uint64_t *id),
         stream, status, id)

static CUresult info_v2(bool ptds, CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                        const CUgraphNode **deps,
                        size_t *count)
{
    return capture_info(ptds, stream, status, id, graph, deps, count);
}
API_PAIR(cuStreamGetCaptureInfo_v2, _ptsz, info_v2,
         (CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph, const CUgraphNode **deps,
          size_t *count), stream,
         status, id, graph, deps, count)

static CUresult info_v3(bool ptds, CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph,
                        const CUgraphNode **deps,
                        const CUgraphEdgeData **data, size_t *count)
{
    if (data)
        *data = NULL;
    return capture_info(ptds, stream, status, id, graph, deps, count);
}
API_PAIR(cuStreamGetCaptureInfo_v3, _ptsz, info_v3,
         (CUstream stream, CUstreamCaptureStatus *status, uint64_t *id, CUgraph *graph, const CUgraphNode **deps,
          const CUgraphEdgeData **data, size_t *count),
         stream, status, id, graph, deps, data, count)

static CUresult update_dependencies(bool ptds, CUstream handle, CUgraphNode *deps, size_t count, unsigned int flags)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (flags > 1 || (count && !deps))
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&api_lock);
    if (!stream->capture) {
        result = CUDA_ERROR_ILLEGAL_STATE;
    } else if (flags == 1) {
        result = depends_set(&stream->deps, &stream->deps_count, deps, count) ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        struct CUevent_st addition = {.capture_id = stream->capture->id, .deps = deps, .deps_count = count};
        result = capture_join(stream, &addition);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}
API_PAIR(cuStreamUpdateCaptureDependencies, _ptsz, update_dependencies,
         (CUstream stream, CUgraphNode *deps, size_t count, unsigned int flags), stream, deps, count, flags)

static CUresult update_dependencies_v2(bool ptds, CUstream stream, CUgraphNode *deps, const CUgraphEdgeData *data,
                                       size_t count,
                                       unsigned int flags)
{
    (void)data;
    return update_dependencies(ptds, stream, deps, count, flags);
}
API_PAIR(cuStreamUpdateCaptureDependencies_v2, _ptsz, update_dependencies_v2,
         (CUstream stream, CUgraphNode *deps, const CUgraphEdgeData *data, size_t count, unsigned int flags), stream,
             deps, data, count,
         flags)
