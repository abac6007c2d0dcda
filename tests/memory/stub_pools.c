/* stub_pools.c: a driver with pools and graph memory, for stub_pools(). Pools grow by whole chunks that hold one block or several
 * of one free; what is freed stays reserved until a synchronisation finds more than the threshold, or a trim. */
#include "stub.h"

#include <string.h>

#define BLOCKS 4096
#define POOLS 16

struct CUmemPoolHandle_st {
    uint64_t reserved, used, threshold;
    bool alive;
};
static struct CUmemPoolHandle_st pools[POOLS]; /* [0]: device 0's default, [1]: device 1's */
static struct { CUdeviceptr ptr; uint64_t bytes, room; CUmemoryPool pool; bool live, pending; } blocks[BLOCKS];
static int block_count, asks, synchronised;
static CUmemoryPool now[2];
static uint64_t chunk, card, graph_reserved, graph_used, graph_takes;

uint64_t stub_pool_reserved(int n) { return pools[n].reserved; }
void *stub_pool(int n) { return &pools[n]; }
int stub_pool_asks(void) { return asks; }
int stub_pool_synchronised(void) { return synchronised; }

static CUresult get_pool(CUmemoryPool *pool, CUdevice device) { *pool = now[device]; return CUDA_SUCCESS; }
static CUresult get_default(CUmemoryPool *pool, CUdevice device) { *pool = &pools[device]; return CUDA_SUCCESS; }
static CUresult set_pool(CUdevice device, CUmemoryPool pool) { now[device] = pool; return CUDA_SUCCESS; }

static CUresult attribute(CUmemoryPool pool, CUmemPool_attribute name, void *value)
{
    asks++;
    if (!pool->alive)
        return CUDA_ERROR_INVALID_VALUE;
    *(uint64_t *)value = name == CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT ? pool->reserved
                         : name == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD  ? pool->threshold
                                                                      : pool->used;
    return CUDA_SUCCESS;
}

static CUresult set_attribute(CUmemoryPool pool, CUmemPool_attribute name, void *value)
{
    if (name == CU_MEMPOOL_ATTR_RELEASE_THRESHOLD)
        pool->threshold = *(uint64_t *)value;
    return CUDA_SUCCESS;
}

static CUresult alloc_from(CUdeviceptr *ptr, size_t bytes, CUmemoryPool pool, CUstream stream)
{
    int found = -1;
    (void)stream;
    if (!ptr)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < block_count && found < 0; i++)
        if (!blocks[i].live && !blocks[i].pending && blocks[i].pool == pool && blocks[i].room >= bytes &&
            blocks[i].room < bytes + chunk)
            found = i;
    if (found < 0) {
        found = block_count;
        uint64_t room = (bytes + chunk - 1) / chunk * chunk;
        if (found == BLOCKS || room > card)
            return CUDA_ERROR_OUT_OF_MEMORY;
        block_count++;
        card -= room;
        blocks[found].ptr = 0x600000000000ull + ((uint64_t)found << 32);
        blocks[found].room = room;
        blocks[found].pool = pool;
        pool->reserved += room;
    }
    blocks[found].live = true;
    blocks[found].bytes = bytes;
    pool->used += bytes;
    *ptr = blocks[found].ptr;
    return CUDA_SUCCESS;
}

static CUresult alloc(CUdeviceptr *ptr, size_t bytes, CUstream stream) { return alloc_from(ptr, bytes, now[0], stream); }

static void shrink(CUmemoryPool pool, uint64_t keep)
{
    for (int i = 0; i < block_count; i++)
        if (blocks[i].room && blocks[i].pool == pool && !blocks[i].live && !blocks[i].pending && pool->reserved > keep) {
            pool->reserved -= blocks[i].room;
            card += blocks[i].room;
            blocks[i].room = 0;
            blocks[i].pool = NULL;
        }
}

static CUresult free_block(CUdeviceptr ptr, bool pending)
{
    for (int i = 0; i < block_count; i++)
        if (blocks[i].ptr == ptr && blocks[i].live) {
            CUmemoryPool pool = blocks[i].pool;
            blocks[i].live = false;
            blocks[i].pending = pending;
            pool->used -= blocks[i].bytes;
            if (!pool->alive)
                shrink(pool, 0);
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_INVALID_VALUE;
}

static CUresult free_async(CUdeviceptr ptr, CUstream stream)
{
    (void)stream;
    return free_block(ptr, true);
}

static CUresult synchronize(void)
{
    synchronised++;
    for (int i = 0; i < block_count; i++)
        blocks[i].pending = false;
    for (int i = 0; i < POOLS; i++)
        if (pools[i].alive)
            shrink(&pools[i], pools[i].threshold);
    return CUDA_SUCCESS;
}
void stub_synchronize(void) { synchronize(); }

static CUresult free_now(CUdeviceptr ptr)
{
    CUresult result = free_block(ptr, false);
    synchronize();
    return result;
}

static CUresult trim(CUmemoryPool pool, size_t keep)
{
    shrink(pool, keep);
    return CUDA_SUCCESS;
}

static CUresult create(CUmemoryPool *pool, const CUmemPoolProps *props)
{
    (void)props;
    for (int i = 2; i < POOLS; i++)
        if (!pools[i].alive && !pools[i].reserved) {
            pools[i] = (struct CUmemPoolHandle_st){.alive = true};
            *pool = &pools[i];
            return CUDA_SUCCESS;
        }
    return CUDA_ERROR_OUT_OF_MEMORY;
}

static CUresult destroy(CUmemoryPool pool)
{
    if (pool == &pools[0])
        return CUDA_ERROR_NOT_PERMITTED;
    pool->alive = false;
    for (int i = 0; i < block_count; i++)
        blocks[i].pending = false;
    shrink(pool, 0);
    return CUDA_SUCCESS;
}

/* ---- graphs: a graph is an array of nodes, 0-terminated; an executable one is the graph ---- */

struct CUgraphNode_st { CUgraphNodeType type; CUdeviceptr ptr; uint64_t bytes; };
struct CUgraph_st { struct CUgraphNode_st nodes[8]; size_t count; };
static struct CUgraph_st graphs[8];

/* Negative bytes: a free of the allocation that many nodes back. */
void *stub_graph(int n, int count, const int64_t *bytes)
{
    graphs[n].count = (size_t)count;
    for (int i = 0; i < count; i++)
        graphs[n].nodes[i] = bytes[i] > 0 ? (struct CUgraphNode_st){CU_GRAPH_NODE_TYPE_MEM_ALLOC, 0x1000u + (unsigned)i, (uint64_t)bytes[i]}
                             : (struct CUgraphNode_st){CU_GRAPH_NODE_TYPE_MEM_FREE, graphs[n].nodes[i + bytes[i]].ptr, 0};
    return &graphs[n];
}
/* The next launches reserve so much, and use it. */
void stub_graph_takes(uint64_t bytes) { graph_takes = bytes; }
void stub_graph_uses(uint64_t bytes) { graph_used = bytes; }
uint64_t stub_graph_reserved(void) { return graph_reserved; }

static CUresult get_nodes(CUgraph graph, CUgraphNode *nodes, size_t *count)
{
    for (size_t i = 0; nodes && i < graph->count; i++)
        nodes[i] = &graph->nodes[i];
    *count = graph->count;
    return CUDA_SUCCESS;
}
static CUresult node_type(CUgraphNode node, CUgraphNodeType *type) { *type = node->type; return CUDA_SUCCESS; }
static CUresult alloc_params(CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    *params = (CUDA_MEM_ALLOC_NODE_PARAMS){.bytesize = node->bytes, .dptr = node->ptr};
    params->poolProps.location = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, 0};
    return CUDA_SUCCESS;
}
static CUresult free_params(CUgraphNode node, CUdeviceptr *ptr) { *ptr = node->ptr; return CUDA_SUCCESS; }
static CUresult add_alloc(CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *params)
{
    (void)node; (void)graph; (void)after; (void)count; (void)params;
    return CUDA_SUCCESS;
}
static void map_graph(void)
{
    if (graph_takes > graph_reserved)
        graph_reserved = graph_takes;
    graph_used = graph_takes;
}
static CUresult instantiate(CUgraphExec *exec, CUgraph graph, unsigned long long flags)
{
    (void)flags;
    *exec = (CUgraphExec)(void *)graph;
    return CUDA_SUCCESS;
}
static CUresult instantiate_params(CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
{
    *exec = (CUgraphExec)(void *)graph;
    if (params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
        map_graph();
    return CUDA_SUCCESS;
}
static CUresult exec_destroy(CUgraphExec exec) { (void)exec; return CUDA_SUCCESS; }
static CUresult graph_attribute(CUdevice device, CUgraphMem_attribute name, void *value)
{
    (void)device;
    *(uint64_t *)value = name == CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT ? graph_reserved : graph_used;
    return CUDA_SUCCESS;
}
static CUresult graph_trim(CUdevice device)
{
    (void)device;
    graph_reserved = graph_used;
    return CUDA_SUCCESS;
}

static CUresult launch_here(CUgraphExec exec, CUstream stream)
{
    (void)exec; (void)stream;
    map_graph();
    return CUDA_SUCCESS;
}

/* What submit.c does around the driver's call. */
int stub_launch_by(CUresult (*real)(CUgraphExec, CUstream), CUgraphExec exec, CUstream stream)
{
    struct graph_launch launch = {.gpu = -1};
    if (load_relaxed(&graph_memory_used) && !graph_memory_begin(&launch, exec))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = real(exec, stream);
    if (load_relaxed(&graph_memory_used))
        graph_memory_end(&launch, exec, result);
    return (int)result;
}
int stub_launch(CUgraphExec exec) { return stub_launch_by(launch_here, exec, NULL); }

/* What sync.c does after the driver's call. */
void stub_synchronized(void)
{
    synchronize();
    pools_synced(true);
}

void stub_pools(uint64_t granule, uint64_t free)
{
    static const struct { const char *name; void *function; } rows[] = {
        {"cuDeviceGetMemPool", (void *)get_pool}, {"cuDeviceGetDefaultMemPool", (void *)get_default},
        {"cuDeviceSetMemPool", (void *)set_pool}, {"cuMemPoolGetAttribute", (void *)attribute},
        {"cuMemPoolSetAttribute", (void *)set_attribute}, {"cuMemAllocAsync", (void *)alloc},
        {"cuMemAllocFromPoolAsync", (void *)alloc_from}, {"cuMemFreeAsync", (void *)free_async},
        {"cuMemFree_v2", (void *)free_now}, {"cuMemPoolTrimTo", (void *)trim}, {"cuMemPoolCreate", (void *)create},
        {"cuMemPoolDestroy", (void *)destroy}, {"cuCtxSynchronize", (void *)synchronize},
        {"cuGraphGetNodes", (void *)get_nodes}, {"cuGraphNodeGetType", (void *)node_type},
        {"cuGraphMemAllocNodeGetParams", (void *)alloc_params}, {"cuGraphMemFreeNodeGetParams", (void *)free_params},
        {"cuGraphAddMemAllocNode", (void *)add_alloc}, {"cuGraphInstantiateWithFlags", (void *)instantiate},
        {"cuGraphInstantiateWithParams", (void *)instantiate_params}, {"cuGraphExecDestroy", (void *)exec_destroy},
        {"cuDeviceGetGraphMemAttribute", (void *)graph_attribute}, {"cuDeviceGraphMemTrim", (void *)graph_trim},
    };
    chunk = granule;
    card = free;
    for (int i = 0; i < 2; i++) {
        pools[i].alive = true;
        now[i] = &pools[i];
    }
    for (size_t i = 0; i < sizeof rows / sizeof *rows; i++)
        stub_replace(rows[i].name, rows[i].function);
}
