/* wait.c: calls that make a stream wait for somebody, or set it going again. They never pass the gate: what they release may be
 * the very work that our own drain waits for, and none of them occupies the device. That a stream may stand still is noted
 * (stall.h): from then on neither a launch nor the agent waits for it without end. */
#include "client.h"
#include "hook.h"
#include "pool.h"
#include "stall.h"

static bool possible;

void stall_possible_from_now(void)
{
    if (!load_relaxed(&possible))
        store_relaxed(&possible, true);
}

bool stall_was_possible(void) { return load_relaxed(&possible); }

#define STALLING(name, args, call) \
    CU_WRAP(CUresult, name, args) \
    { \
        stall_possible_from_now(); \
        return REAL(name) call; \
    }
#define STALLING_BOTH(name, args, call) \
    STALLING(name, args, call) \
    STALLING(name##_ptsz, args, call)

#define WAIT_VALUE(name, type) \
    STALLING_BOTH(name, (CUstream stream, CUdeviceptr at, type value, unsigned flags), (stream, at, value, flags)) \
    STALLING_BOTH(name##_v2, (CUstream stream, CUdeviceptr at, type value, unsigned flags), (stream, at, value, flags))
WAIT_VALUE(cuStreamWaitValue32, uint32_t)
WAIT_VALUE(cuStreamWaitValue64, uint64_t)

#define MEM_OP_ARGS (CUstream stream, unsigned count, CUstreamBatchMemOpParams *list, unsigned flags)
STALLING_BOTH(cuStreamBatchMemOp, MEM_OP_ARGS, (stream, count, list, flags))
STALLING_BOTH(cuStreamBatchMemOp_v2, MEM_OP_ARGS, (stream, count, list, flags))

STALLING_BOTH(cuWaitExternalSemaphoresAsync,
              (const CUexternalSemaphore *semaphores, const CUDA_EXTERNAL_SEMAPHORE_WAIT_PARAMS *list, unsigned count,
               CUstream stream),
              (semaphores, list, count, stream))

/* Another process records it. */
STALLING(cuIpcOpenEventHandle, (CUevent *event, CUipcEventHandle handle), (event, handle))

/* ---- the same as nodes of a graph, and host functions, which a capture would have brought by capture.c ---- */

#define NODE_ARGS(type) (CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, const type *params)
#define NODE_CALL (node, graph, deps, count, params)
STALLING(cuGraphAddHostNode, NODE_ARGS(CUDA_HOST_NODE_PARAMS), NODE_CALL)
STALLING(cuGraphAddExternalSemaphoresWaitNode, NODE_ARGS(CUDA_EXT_SEM_WAIT_NODE_PARAMS), NODE_CALL)
STALLING(cuGraphAddBatchMemOpNode, NODE_ARGS(CUDA_BATCH_MEM_OP_NODE_PARAMS), NODE_CALL)

static void note_node(const CUgraphNodeParams *params)
{
    graph_memory_sees(params);
    if (params && (params->type == CU_GRAPH_NODE_TYPE_HOST || params->type == CU_GRAPH_NODE_TYPE_EXT_SEMAS_WAIT ||
                   params->type == CU_GRAPH_NODE_TYPE_BATCH_MEM_OP))
        stall_possible_from_now();
}

CU_WRAP(CUresult, cuGraphAddNode,
        (CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, size_t count, CUgraphNodeParams *params))
{
    note_node(params);
    return REAL(cuGraphAddNode)(node, graph, deps, count, params);
}

CU_WRAP(CUresult, cuGraphAddNode_v2,
        (CUgraphNode *node, CUgraph graph, const CUgraphNode *deps, const CUgraphEdgeData *edges, size_t count,
         CUgraphNodeParams *params))
{
    note_node(params);
    return REAL(cuGraphAddNode_v2)(node, graph, deps, edges, count, params);
}
