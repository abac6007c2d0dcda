/* graph_exec.c: instantiated graphs. Launched, the nodes go into the stream one after the other, kernels that follow
 * each other as one entry of the queue. */
#include <stdlib.h>
#include <string.h>
#include "cuda/graph.h"

static CUresult instantiate(CUgraphExec *out, CUgraph graph, uint64_t flags)
{
    CHECK_INIT();
    if (!out || !object_is(graph, OBJ_GRAPH) || flags > 15)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    if (graph->memory && graph->instances) { /* whose memory would it be? */
        pthread_mutex_unlock(&api_lock);
        return CUDA_ERROR_NOT_SUPPORTED;
    }
    struct CUgraphExec_st *exec = object_new(OBJ_EXEC, sizeof *exec, NULL);
    CUresult result = exec ? graph_steps(graph, &exec->steps, &exec->count) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        exec->graph = graph;
        exec->flags = flags;
        graph->refs++;
        graph->instances++;
        *out = exec;
    } else if (exec) {
        object_free(exec);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size);
API cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size);
API cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags);
API cuGraphExecDestroy(CUgraphExec exec);
API cuGraphExecGetFlags(CUgraphExec exec, uint64_t *flags);
API cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error, CUgraphExecUpdateResult *result);
API cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info);
API cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p);
API cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p);

API cuGraphInstantiate(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
    if (error)
        *error = NULL;
    if (log && size)
        *log = 0;
    return instantiate(exec, graph, 0);
}

API cuGraphInstantiate_v2(CUgraphExec *exec, CUgraph graph, CUgraphNode *error, char *log, size_t size)
{
    return cuGraphInstantiate(exec, graph, error, log, size);
}

API cuGraphInstantiateWithFlags(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    return instantiate(exec, graph, flags);
}

static CUresult with_params(bool ptds, CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    (void)ptds;
    if (!params)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = instantiate(exec, graph, params->flags);
    params->hErrNode_out = NULL;
    params->result_out = result == CUDA_SUCCESS ? CUDA_GRAPH_INSTANTIATE_SUCCESS : CUDA_GRAPH_INSTANTIATE_ERROR;
    return result;
}
API_PAIR(cuGraphInstantiateWithParams, _ptsz, with_params,
         (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params),
         exec, graph, params)

/* Work in flight has taken what it needs along. */
API cuGraphExecDestroy(CUgraphExec exec)
{
    CHECK_INIT();
    if (!object_is(exec, OBJ_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    graph_steps_free(exec->steps, exec->count);
    exec->graph->instances--;
    graph_unref(exec->graph);
    object_free(exec);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuGraphExecGetFlags(CUgraphExec exec, uint64_t *flags)
{
    CHECK_INIT();
    if (!object_is(exec, OBJ_EXEC) || !flags)
        return CUDA_ERROR_INVALID_VALUE;
    *flags = exec->flags;
    return CUDA_SUCCESS;
}

API cuGraphExecUpdate_v2(CUgraphExec exec, CUgraph graph, CUgraphExecUpdateResultInfo *info)
{
    CHECK_INIT();
    if (!object_is(exec, OBJ_EXEC) || !object_is(graph, OBJ_GRAPH) || !info)
        return CUDA_ERROR_INVALID_VALUE;
    struct step *steps;
    size_t count;
    pthread_mutex_lock(&api_lock);
    CUresult result = graph_steps(graph, &steps, &count);
    bool same = result == CUDA_SUCCESS && count == exec->count && !graph->memory && !exec->graph->memory;
    for (size_t i = 0; same && i < count; i++)
        same = steps[i].params.type == exec->steps[i].params.type;
    if (same) {
        graph_steps_free(exec->steps, exec->count);
        exec->steps = steps;
        exec->graph->instances--;
        graph_unref(exec->graph);
        exec->graph = graph;
        graph->refs++;
        graph->instances++;
    } else if (result == CUDA_SUCCESS) {
        graph_steps_free(steps, count);
        result = CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE;
    }
    pthread_mutex_unlock(&api_lock);
    *info = (CUgraphExecUpdateResultInfo){
        .result = same ? CU_GRAPH_EXEC_UPDATE_SUCCESS : CU_GRAPH_EXEC_UPDATE_ERROR_TOPOLOGY_CHANGED};
    return result;
}

API cuGraphExecUpdate(CUgraphExec exec, CUgraph graph, CUgraphNode *error, CUgraphExecUpdateResult *result)
{
    CUgraphExecUpdateResultInfo info;
    CUresult outcome = cuGraphExecUpdate_v2(exec, graph, &info);
    if (error)
        *error = NULL;
    if (result && (outcome == CUDA_SUCCESS || outcome == CUDA_ERROR_GRAPH_EXEC_UPDATE_FAILURE))
        *result = info.result;
    return outcome;
}

API cuGraphExecKernelNodeSetParams_v2(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
    struct CUfunc_st *function;
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    CHECK_INIT();
    if (!object_is(exec, OBJ_EXEC) || !p)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(function_of(p->func, &function));
    pthread_mutex_lock(&api_lock);
    for (size_t i = 0; i < exec->count; i++) {
        if (exec->steps[i].node != node || exec->steps[i].params.type != CU_GRAPH_NODE_TYPE_KERNEL)
            continue;
        bool null = function->duration == DURATION_NULL;
        exec->steps[i].params.ns = null ? 0 : kernel_ns(function, p->kernelParams, p->extra);
        result = CUDA_SUCCESS;
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuGraphExecKernelNodeSetParams(CUgraphExec exec, CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
    return cuGraphExecKernelNodeSetParams_v2(exec, node, p); /* reads no further than the old structure goes */
}

/* ---- launch ---- */

static CUresult run_step(struct CUstream_st *stream, const struct node_params *p)
{
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return p->copy.width && p->copy.height && p->copy.depth ? copy_submit(stream, &p->copy, true) : CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return fill_submit(stream, &p->fill, true);
    case CU_GRAPH_NODE_TYPE_HOST:
        return host_submit(stream, p->host.fn, p->host.userData);
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return event_record(p->event, stream);
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
        return event_wait(stream, p->event);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
        return memops_submit(stream, p->memops->op, p->memops->count);
    default:
        return CUDA_SUCCESS; /* empty; memory nodes: see graph_memory.c */
    }
}

static CUresult launch_steps(const struct CUgraphExec_st *exec, struct CUstream_st *stream)
{
    uint64_t kernels = 0;
    for (size_t i = 0; i < exec->count; i++) {
        const struct node_params *p = &exec->steps[i].params;
        if (p->type == CU_GRAPH_NODE_TYPE_KERNEL) {
            kernels += p->ns;
            continue;
        }
        if (kernels)
            TRY(kernel_submit(stream, kernels));
        kernels = 0;
        TRY(run_step(stream, p));
    }
    return kernels || !exec->count ? kernel_submit(stream, kernels) : CUDA_SUCCESS;
}

/* No lock while queueing: a full queue may wait long, and launching a graph that another thread destroys is the
 * program's fault. */
static CUresult graph_launch(bool ptds, CUgraphExec exec, CUstream handle)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!object_is(exec, OBJ_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    if (captures_active) {
        struct node_params node = {.type = CU_GRAPH_NODE_TYPE_GRAPH, .child = exec->graph};
        CUresult result = CUDA_SUCCESS;
        pthread_mutex_lock(&api_lock);
        bool capturing = stream->capture != NULL;
        if (capturing && exec->graph->memory) {
            result = CUDA_ERROR_NOT_SUPPORTED;
        } else if (capturing) {
            exec->graph->refs++;
            result = capture_add(stream, &node);
        } else if (stream_capturing_blocked(stream)) {
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        pthread_mutex_unlock(&api_lock);
        if (capturing || result != CUDA_SUCCESS)
            return result;
    }
    if (!exec->graph->memory)
        return launch_steps(exec, stream);
    TRY(graph_memory_take(exec, stream));
    CUresult result = launch_steps(exec, stream);
    CUresult marked = graph_memory_queued(stream);
    return result != CUDA_SUCCESS ? result : marked;
}
API_PAIR(cuGraphLaunch, _ptsz, graph_launch, (CUgraphExec exec, CUstream stream), exec, stream)

static CUresult upload(bool ptds, CUgraphExec exec, CUstream handle)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!object_is(exec, OBJ_EXEC))
        return CUDA_ERROR_INVALID_VALUE;
    return exec->graph->memory ? graph_memory_upload(exec, stream) : CUDA_SUCCESS;
}
API_PAIR(cuGraphUpload, _ptsz, upload, (CUgraphExec exec, CUstream stream), exec, stream)
