/* graph.c: graphs. Most programs capture them (stream.c); of the nodes that can be added by hand, the ones without
 * parameters and kernels. */
#include "driver.h"

cudaError_t cudaGraphCreate(cudaGraph_t *graph, unsigned int flags)
{
    PASS(cuGraphCreate, graph, flags);
}

cudaError_t cudaGraphClone(cudaGraph_t *clone, cudaGraph_t graph)
{
    PASS(cuGraphClone, clone, graph);
}

cudaError_t cudaGraphDestroy(cudaGraph_t graph)
{
    PASS(cuGraphDestroy, graph);
}

cudaError_t cudaGraphGetNodes(cudaGraph_t graph, cudaGraphNode_t *nodes, size_t *count)
{
    PASS(cuGraphGetNodes, graph, nodes, count);
}

cudaError_t cudaGraphNodeGetType(cudaGraphNode_t node, enum cudaGraphNodeType *type)
{
    PASS(cuGraphNodeGetType, node, (CUgraphNodeType *)type);
}

cudaError_t cudaGraphNodeGetDependencies(cudaGraphNode_t node, cudaGraphNode_t *nodes, cudaGraphEdgeData *edges,
                                         size_t *count)
{
    PASS(cuGraphNodeGetDependencies, node, nodes, (CUgraphEdgeData *)edges, count);
}

cudaError_t cudaGraphDebugDotPrint(cudaGraph_t graph, const char *path, unsigned int flags)
{
    PASS(cuGraphDebugDotPrint, graph, path, flags);
}

cudaError_t cudaGraphAddEmptyNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, size_t count)
{
    PASS(cuGraphAddEmptyNode, node, graph, nodes, count);
}

cudaError_t cudaGraphAddKernelNode(cudaGraphNode_t *node, cudaGraph_t graph, const cudaGraphNode_t *nodes, size_t count,
                                   const struct cudaKernelNodeParams *params)
{
    CUfunction function;
    CUresult result = params ? rt_kernel(params->func, &function) : CUDA_ERROR_INVALID_VALUE;
    if (result != CUDA_SUCCESS)
        return rt_done(result);
    CUDA_KERNEL_NODE_PARAMS same = {
        .kern = (CUkernel)function, .gridDimX = params->gridDim.x, .gridDimY = params->gridDim.y,
        .gridDimZ = params->gridDim.z, .blockDimX = params->blockDim.x, .blockDimY = params->blockDim.y,
        .blockDimZ = params->blockDim.z, .sharedMemBytes = params->sharedMemBytes,
        .kernelParams = params->kernelParams, .extra = params->extra,
    };
    return rt_done(DRIVE(cuGraphAddKernelNode, node, graph, nodes, count, &same));
}

cudaError_t cudaGraphInstantiate(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    PASS(cuGraphInstantiateWithFlags, exec, graph, flags);
}

cudaError_t cudaGraphInstantiateWithFlags(cudaGraphExec_t *exec, cudaGraph_t graph, unsigned long long flags)
{
    PASS(cuGraphInstantiateWithFlags, exec, graph, flags);
}

cudaError_t cudaGraphExecUpdate(cudaGraphExec_t exec, cudaGraph_t graph, cudaGraphExecUpdateResultInfo *info)
{
    PASS(cuGraphExecUpdate, exec, graph, (CUgraphExecUpdateResultInfo *)info);
}

cudaError_t cudaGraphExecDestroy(cudaGraphExec_t exec)
{
    PASS(cuGraphExecDestroy, exec);
}

cudaError_t cudaGraphConditionalHandleCreate(cudaGraphConditionalHandle *handle, cudaGraph_t graph, unsigned int value,
                                             unsigned int flags)
{
    CUcontext ctx;
    CUresult result = rt_enter();
    if (result == CUDA_SUCCESS)
        result = DRIVE(cuCtxGetCurrent, &ctx);
    if (result == CUDA_SUCCESS)
        result = DRIVE(cuGraphConditionalHandleCreate, (CUgraphConditionalHandle *)handle, graph, ctx, value, flags);
    return rt_done(result);
}

/* ---- objects a graph keeps alive ---- */

cudaError_t cudaUserObjectCreate(cudaUserObject_t *object, void *pointer, cudaHostFn_t destroy, unsigned int count,
                                 unsigned int flags)
{
    PASS(cuUserObjectCreate, object, pointer, destroy, count, flags);
}

cudaError_t cudaUserObjectRetain(cudaUserObject_t object, unsigned int count)
{
    PASS(cuUserObjectRetain, object, count);
}

cudaError_t cudaUserObjectRelease(cudaUserObject_t object, unsigned int count)
{
    PASS(cuUserObjectRelease, object, count);
}

cudaError_t cudaGraphRetainUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count,
                                      unsigned int flags)
{
    PASS(cuGraphRetainUserObject, graph, object, count, flags);
}

cudaError_t cudaGraphReleaseUserObject(cudaGraph_t graph, cudaUserObject_t object, unsigned int count)
{
    PASS(cuGraphReleaseUserObject, graph, object, count);
}
