/* graph_nodes.c: adding nodes by hand, and their parameters. */
#include <string.h>
#include "cuda/graph.h"

static CUresult add(CUgraph graph, const CUgraphNode *deps, size_t count, const struct node_params *params,
                    CUgraphNode *node)
{
    CHECK_INIT();
    if (!object_is(graph, OBJ_GRAPH) || !node) {
        memops_unref(params->memops);
        return CUDA_ERROR_INVALID_VALUE;
    }
    pthread_mutex_lock(&api_lock);
    if (params->child)
        params->child->refs++;
    CUresult result = graph_add(graph, params, deps, count, node);
    if (result != CUDA_SUCCESS && params->child)
        params->child->refs--;
    if (result != CUDA_SUCCESS)
        memops_unref(params->memops);
    pthread_mutex_unlock(&api_lock);
    return result;
}

static CUresult kernel_params(const CUDA_KERNEL_NODE_PARAMS *kernel, bool v1, struct node_params *params)
{
    struct CUfunc_st *function;
    if (!kernel)
        return CUDA_ERROR_INVALID_VALUE;
    CUfunction handle = !kernel->func && !v1 ? (CUfunction)kernel->kern : kernel->func;
    TRY(function_of(handle, &function));
    params->type = CU_GRAPH_NODE_TYPE_KERNEL;
    memcpy(&params->kernel, kernel, v1 ? offsetof(CUDA_KERNEL_NODE_PARAMS, kern) : sizeof *kernel);
    params->kernel.func = handle;
    params->ns = function->duration == DURATION_NULL ? 0 : kernel_ns(function, kernel->kernelParams, kernel->extra);
    return CUDA_SUCCESS;
}

static CUresult memcpy_params(const CUDA_MEMCPY3D *copy, struct node_params *params)
{
    if (!copy)
        return CUDA_ERROR_INVALID_VALUE;
    params->type = CU_GRAPH_NODE_TYPE_MEMCPY;
    params->copy3d = *copy;
    return copy_of_3d(copy, &params->copy);
}

static CUresult memset_params(const CUDA_MEMSET_NODE_PARAMS *set, struct node_params *params)
{
    if (!set || (set->elementSize != 1 && set->elementSize != 2 && set->elementSize != 4) || !set->width ||
        !set->height ||
        set->dst % set->elementSize)
        return CUDA_ERROR_INVALID_VALUE;
    params->type = CU_GRAPH_NODE_TYPE_MEMSET;
    memcpy(&params->memset, set, offsetof(CUDA_MEMSET_NODE_PARAMS, ctx));
    params->fill = (struct fill){.dst = (uint8_t *)(uintptr_t)set->dst, .pitch = set->pitch, .width = set->width,
                                 .height = set->height, .value = set->value, .element = set->elementSize};
    uint64_t bytes = (set->height - 1) * set->pitch + set->width * set->elementSize;
    return device_range(set->dst, bytes) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static CUresult host_params(const CUDA_HOST_NODE_PARAMS *host, struct node_params *params)
{
    if (!host || !host->fn)
        return CUDA_ERROR_INVALID_VALUE;
    params->type = CU_GRAPH_NODE_TYPE_HOST;
    params->host = *host;
    return CUDA_SUCCESS;
}

static CUresult event_params(CUevent event, CUgraphNodeType type, struct node_params *params)
{
    if (!object_is(event, OBJ_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    params->type = type;
    params->event = event;
    return CUDA_SUCCESS;
}

static CUresult child_params(CUgraph child, struct node_params *params)
{
    if (!object_is(child, OBJ_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    if (child->memory) /* only if it moved into the parent for good */
        return CUDA_ERROR_NOT_SUPPORTED;
    params->type = CU_GRAPH_NODE_TYPE_GRAPH;
    params->child = child;
    return CUDA_SUCCESS;
}

static CUresult alloc_params(CUDA_MEM_ALLOC_NODE_PARAMS *alloc, struct node_params *params)
{
    struct CUctx_st *ctx;
    TRY(current_context(&ctx));
    if (!alloc || !alloc->bytesize || alloc->poolProps.location.type != CU_MEM_LOCATION_TYPE_DEVICE)
        return CUDA_ERROR_INVALID_VALUE;
    struct gpu *gpu = gpu_of(alloc->poolProps.location.id);
    if (!gpu || gpu != ctx->gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    if (alloc->poolProps.handleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_NOT_SUPPORTED;
    pthread_mutex_lock(&api_lock);
    CUresult result = graph_address(ctx, alloc->bytesize, &alloc->dptr);
    pthread_mutex_unlock(&api_lock);
    params->type = CU_GRAPH_NODE_TYPE_MEM_ALLOC;
    params->dptr = alloc->dptr;
    params->bytes = alloc->bytesize;
    return result;
}

static CUresult memop_params(const CUDA_BATCH_MEM_OP_NODE_PARAMS *batch, struct node_params *params)
{
    if (!batch)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(memops_check(batch->paramArray, batch->count, batch->flags));
    params->type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP;
    params->memops = memops_new(batch->paramArray, batch->count);
    return params->memops ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

/* Of a graph's allocation only, and once in a graph. */
static CUresult free_params(CUgraph graph, CUdeviceptr pointer, struct node_params *params)
{
    if (!object_is(graph, OBJ_GRAPH))
        return CUDA_ERROR_INVALID_VALUE;
    params->type = CU_GRAPH_NODE_TYPE_MEM_FREE;
    params->dptr = pointer;
    pthread_mutex_lock(&api_lock);
    bool good = graph_block(pointer) != NULL;
    for (size_t i = 0; i < graph->count; i++)
        good &= graph->nodes[i]->params.type != CU_GRAPH_NODE_TYPE_MEM_FREE || graph->nodes[i]->params.dptr != pointer;
    pthread_mutex_unlock(&api_lock);
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- entry points: adding ---- */

API cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                         const CUDA_KERNEL_NODE_PARAMS *p);
API cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                            const CUDA_KERNEL_NODE_PARAMS *p);
API cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                         const CUDA_MEMCPY3D *p, CUcontext ctx);
API cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                         const CUDA_MEMSET_NODE_PARAMS *p,
                         CUcontext ctx);
API cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                       const CUDA_HOST_NODE_PARAMS *p);
API cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count);
API cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraph child);
API cuGraphAddEventRecordNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUevent event);
API cuGraphAddEventWaitNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUevent event);
API cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                           CUDA_MEM_ALLOC_NODE_PARAMS *p);
API cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUdeviceptr pointer);
API cuGraphAddBatchMemOpNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                             const CUDA_BATCH_MEM_OP_NODE_PARAMS *p);
API cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraphNodeParams *p);
API cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, const CUgraphEdgeData *data,
                      size_t count,
                      CUgraphNodeParams *p);

#define ADD(call) \
    struct node_params params = {0}; \
    CHECK_INIT(); \
    TRY(call); \
    return add(graph, deps, count, &params, node)

API cuGraphAddKernelNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                            const CUDA_KERNEL_NODE_PARAMS *p)
{
    ADD(kernel_params(p, false, &params));
}

API cuGraphAddKernelNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                         const CUDA_KERNEL_NODE_PARAMS *p)
{
    ADD(kernel_params(p, true, &params));
}

API cuGraphAddMemcpyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                         const CUDA_MEMCPY3D *p, CUcontext ctx)
{
    (void)ctx;
    ADD(memcpy_params(p, &params));
}

API cuGraphAddMemsetNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                         const CUDA_MEMSET_NODE_PARAMS *p,
                         CUcontext ctx)
{
    (void)ctx;
    ADD(memset_params(p, &params));
}

API cuGraphAddHostNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                       const CUDA_HOST_NODE_PARAMS *p)
{
    ADD(host_params(p, &params));
}

API cuGraphAddEmptyNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count)
{
    struct node_params params = {.type = CU_GRAPH_NODE_TYPE_EMPTY};
    return add(graph, deps, count, &params, node);
}

API cuGraphAddChildGraphNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraph child)
{
    ADD(child_params(child, &params));
}

API cuGraphAddEventRecordNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUevent event)
{
    ADD(event_params(event, CU_GRAPH_NODE_TYPE_EVENT_RECORD, &params));
}

API cuGraphAddEventWaitNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUevent event)
{
    ADD(event_params(event, CU_GRAPH_NODE_TYPE_WAIT_EVENT, &params));
}

API cuGraphAddMemAllocNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                           CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
    ADD(alloc_params(p, &params));
}

API cuGraphAddMemFreeNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUdeviceptr pointer)
{
    ADD(free_params(graph, pointer, &params));
}

API cuGraphAddBatchMemOpNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count,
                             const CUDA_BATCH_MEM_OP_NODE_PARAMS *p)
{
    ADD(memop_params(p, &params));
}

static CUresult any_params(CUgraph graph, CUgraphNodeParams *p, struct node_params *params)
{
    params->type = p->type;
    switch (p->type) {
    case CU_GRAPH_NODE_TYPE_KERNEL:
        return kernel_params(&p->kernel, false, params);
    case CU_GRAPH_NODE_TYPE_MEMCPY:
        return memcpy_params(&p->memcpy.copyParams, params);
    case CU_GRAPH_NODE_TYPE_MEMSET:
        return memset_params(&p->memset, params);
    case CU_GRAPH_NODE_TYPE_HOST:
        return host_params(&p->host, params);
    case CU_GRAPH_NODE_TYPE_GRAPH:
        return child_params(p->graph.graph, params);
    case CU_GRAPH_NODE_TYPE_EMPTY:
        return CUDA_SUCCESS;
    case CU_GRAPH_NODE_TYPE_WAIT_EVENT:
    case CU_GRAPH_NODE_TYPE_EVENT_RECORD:
        return event_params(p->event, p->type, params);
    case CU_GRAPH_NODE_TYPE_BATCH_MEM_OP:
        return memop_params((const CUDA_BATCH_MEM_OP_NODE_PARAMS *)p->reserved1, params);
    case CU_GRAPH_NODE_TYPE_MEM_ALLOC:
        return alloc_params(&p->alloc, params);
    case CU_GRAPH_NODE_TYPE_MEM_FREE:
        return free_params(graph, p->free.dptr, params);
    default:
        return CUDA_ERROR_NOT_SUPPORTED;
    }
}

API cuGraphAddNode(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraphNodeParams *p)
{
    if (!p)
        return CUDA_ERROR_INVALID_VALUE;
    ADD(any_params(graph, p, &params));
}

API cuGraphAddNode_v2(CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, const CUgraphEdgeData *data,
                      size_t count,
                      CUgraphNodeParams *p)
{
    (void)data;
    return cuGraphAddNode(node, graph, deps, count, p);
}

/* ---- entry points: parameters ---- */

API cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *p);
API cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *p);
API cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p);
API cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p);
API cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *p);
API cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *p);
API cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *p);
API cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *p);
API cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS *p);
API cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS *p);
API cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *p);
API cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *pointer);
API cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph);

static CUresult of_type(CUgraphNode node, CUgraphNodeType type, const void *p)
{
    CHECK_INIT();
    return p && object_is(node, OBJ_NODE) && node->params.type == type ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuGraphKernelNodeGetParams_v2(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *p)
{
    TRY(of_type(node, CU_GRAPH_NODE_TYPE_KERNEL, p));
    *p = node->params.kernel;
    return CUDA_SUCCESS;
}

API cuGraphKernelNodeGetParams(CUgraphNode node, CUDA_KERNEL_NODE_PARAMS *p)
{
    TRY(of_type(node, CU_GRAPH_NODE_TYPE_KERNEL, p));
    memcpy(p, &node->params.kernel, offsetof(CUDA_KERNEL_NODE_PARAMS, kern));
    return CUDA_SUCCESS;
}

#define SET(node_type, call) \
    struct node_params params = {0}; \
    TRY(of_type(node, node_type, p)); \
    TRY(call); \
    node->params = params; \
    return CUDA_SUCCESS

API cuGraphKernelNodeSetParams_v2(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
    SET(CU_GRAPH_NODE_TYPE_KERNEL, kernel_params(p, false, &params));
}

API cuGraphKernelNodeSetParams(CUgraphNode node, const CUDA_KERNEL_NODE_PARAMS *p)
{
    SET(CU_GRAPH_NODE_TYPE_KERNEL, kernel_params(p, true, &params));
}

API cuGraphMemcpyNodeGetParams(CUgraphNode node, CUDA_MEMCPY3D *p)
{
    TRY(of_type(node, CU_GRAPH_NODE_TYPE_MEMCPY, p));
    *p = node->params.copy3d;
    return CUDA_SUCCESS;
}

API cuGraphMemcpyNodeSetParams(CUgraphNode node, const CUDA_MEMCPY3D *p)
{
    SET(CU_GRAPH_NODE_TYPE_MEMCPY, memcpy_params(p, &params));
}

API cuGraphMemsetNodeGetParams(CUgraphNode node, CUDA_MEMSET_NODE_PARAMS *p)
{
    TRY(of_type(node, CU_GRAPH_NODE_TYPE_MEMSET, p));
    const struct fill *f = &node->params.fill;
    CUDA_MEMSET_NODE_PARAMS set = {(uintptr_t)f->dst, f->pitch, f->value, f->element, f->width, f->height, NULL};
    memcpy(p, &set, offsetof(CUDA_MEMSET_NODE_PARAMS, ctx));
    return CUDA_SUCCESS;
}

API cuGraphMemsetNodeSetParams(CUgraphNode node, const CUDA_MEMSET_NODE_PARAMS *p)
{
    SET(CU_GRAPH_NODE_TYPE_MEMSET, memset_params(p, &params));
}

API cuGraphHostNodeGetParams(CUgraphNode node, CUDA_HOST_NODE_PARAMS *p)
{
    TRY(of_type(node, CU_GRAPH_NODE_TYPE_HOST, p));
    *p = node->params.host;
    return CUDA_SUCCESS;
}

API cuGraphHostNodeSetParams(CUgraphNode node, const CUDA_HOST_NODE_PARAMS *p)
{
    SET(CU_GRAPH_NODE_TYPE_HOST, host_params(p, &params));
}

API cuGraphMemAllocNodeGetParams(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *p)
{
    TRY(of_type(node, CU_GRAPH_NODE_TYPE_MEM_ALLOC, p));
    *p = (CUDA_MEM_ALLOC_NODE_PARAMS){.bytesize = node->params.bytes, .dptr = node->params.dptr};
    return CUDA_SUCCESS;
}

API cuGraphMemFreeNodeGetParams(CUgraphNode node, CUdeviceptr *pointer)
{
    TRY(of_type(node, CU_GRAPH_NODE_TYPE_MEM_FREE, pointer));
    *pointer = node->params.dptr;
    return CUDA_SUCCESS;
}

API cuGraphChildGraphNodeGetGraph(CUgraphNode node, CUgraph *graph)
{
    TRY(of_type(node, CU_GRAPH_NODE_TYPE_GRAPH, graph));
    *graph = node->params.child;
    return CUDA_SUCCESS;
}
