/* stream.c: streams, events, capture, and the launching of graphs. Compiled twice (driver.h). */
#include "driver.h"

_Static_assert(sizeof(cudaGraphEdgeData) == sizeof(CUgraphEdgeData), "edges are described alike");

cudaError_t cudaStreamGetPriority(cudaStream_t stream, int *priority)
{
    PASS(cuStreamGetPriority, stream, priority);
}

cudaError_t cudaStreamGetFlags(cudaStream_t stream, unsigned int *flags)
{
    PASS(cuStreamGetFlags, stream, flags);
}

cudaError_t cudaStreamGetId(cudaStream_t stream, unsigned long long *id)
{
    PASS(cuStreamGetId, stream, id);
}

cudaError_t cudaStreamQuery(cudaStream_t stream)
{
    PASS(cuStreamQuery, stream);
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream)
{
    PASS(cuStreamSynchronize, stream);
}

cudaError_t cudaStreamWaitEvent(cudaStream_t stream, cudaEvent_t event, unsigned int flags)
{
    PASS(cuStreamWaitEvent, stream, event, flags);
}

cudaError_t cudaStreamAddCallback(cudaStream_t stream, cudaStreamCallback_t callback, void *data, unsigned int flags)
{
    PASS(cuStreamAddCallback, stream, (CUstreamCallback)callback, data, flags);
}

cudaError_t cudaLaunchHostFunc(cudaStream_t stream, cudaHostFn_t function, void *data)
{
    PASS(cuLaunchHostFunc, stream, function, data);
}

cudaError_t cudaEventRecord(cudaEvent_t event, cudaStream_t stream)
{
    PASS(cuEventRecord, event, stream);
}

cudaError_t cudaEventRecordWithFlags(cudaEvent_t event, cudaStream_t stream, unsigned int flags)
{
    PASS(cuEventRecordWithFlags, event, stream, flags);
}

cudaError_t cudaStreamBeginCapture(cudaStream_t stream, enum cudaStreamCaptureMode mode)
{
    PASS(cuStreamBeginCapture, stream, (CUstreamCaptureMode)mode);
}

cudaError_t cudaStreamBeginCaptureToGraph(cudaStream_t stream, cudaGraph_t graph, const cudaGraphNode_t *nodes,
                                          const cudaGraphEdgeData *edges, size_t count, enum cudaStreamCaptureMode mode)
{
    PASS(cuStreamBeginCaptureToGraph, stream, graph, nodes, (const CUgraphEdgeData *)edges, count,
         (CUstreamCaptureMode)mode);
}

cudaError_t cudaStreamEndCapture(cudaStream_t stream, cudaGraph_t *graph)
{
    PASS(cuStreamEndCapture, stream, graph);
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, enum cudaStreamCaptureStatus *status)
{
    PASS(cuStreamIsCapturing, stream, (CUstreamCaptureStatus *)status);
}

cudaError_t cudaStreamGetCaptureInfo(cudaStream_t stream, enum cudaStreamCaptureStatus *status, unsigned long long *id,
                                     cudaGraph_t *graph, const cudaGraphNode_t **nodes,
                                     const cudaGraphEdgeData **edges, size_t *count)
{
    PASS(cuStreamGetCaptureInfo, stream, (CUstreamCaptureStatus *)status, (cuuint64_t *)id, graph, nodes,
         (const CUgraphEdgeData **)edges, count);
}

cudaError_t cudaStreamUpdateCaptureDependencies(cudaStream_t stream, cudaGraphNode_t *nodes,
                                                const cudaGraphEdgeData *edges, size_t count, unsigned int flags)
{
    PASS(cuStreamUpdateCaptureDependencies, stream, nodes, (const CUgraphEdgeData *)edges, count, flags);
}

cudaError_t cudaGraphUpload(cudaGraphExec_t exec, cudaStream_t stream)
{
    PASS(cuGraphUpload, exec, stream);
}

cudaError_t cudaGraphLaunch(cudaGraphExec_t exec, cudaStream_t stream)
{
    PASS(cuGraphLaunch, exec, stream);
}

/* What has no stream to be in. */
#ifndef CUDA_API_PER_THREAD_DEFAULT_STREAM
cudaError_t cudaStreamCreate(cudaStream_t *stream)
{
    PASS(cuStreamCreateWithPriority, stream, 0, 0);
}

cudaError_t cudaStreamCreateWithFlags(cudaStream_t *stream, unsigned int flags)
{
    PASS(cuStreamCreateWithPriority, stream, flags, 0);
}

cudaError_t cudaStreamCreateWithPriority(cudaStream_t *stream, unsigned int flags, int priority)
{
    PASS(cuStreamCreateWithPriority, stream, flags, priority);
}

cudaError_t cudaStreamDestroy(cudaStream_t stream)
{
    PASS(cuStreamDestroy, stream);
}

cudaError_t cudaThreadExchangeStreamCaptureMode(enum cudaStreamCaptureMode *mode)
{
    PASS(cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *)mode);
}

cudaError_t cudaEventCreate(cudaEvent_t *event)
{
    PASS(cuEventCreate, event, 0);
}

cudaError_t cudaEventCreateWithFlags(cudaEvent_t *event, unsigned int flags)
{
    PASS(cuEventCreate, event, flags);
}

cudaError_t cudaEventQuery(cudaEvent_t event)
{
    PASS(cuEventQuery, event);
}

cudaError_t cudaEventSynchronize(cudaEvent_t event)
{
    PASS(cuEventSynchronize, event);
}

cudaError_t cudaEventElapsedTime(float *ms, cudaEvent_t start, cudaEvent_t end)
{
    PASS(cuEventElapsedTime, ms, start, end);
}

cudaError_t cudaEventDestroy(cudaEvent_t event)
{
    PASS(cuEventDestroy, event);
}
#endif
