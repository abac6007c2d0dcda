/* graph_memory.c: memory of graph nodes that allocate: cuGraphAddMemAllocNode and its kin, and captured cuMemAllocAsync.
 *
 * The driver maps it when a graph is launched or uploaded, from a pool of the device's own that only cuDeviceGraphMemTrim makes
 * smaller. Charged is what that pool reserves (CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT), asked after each such launch, and
 * before it what the graph is expected to add: the most that its nodes have allocated and not freed at once, in the order in
 * which they were made, less what the pool has to spare. Where that does not fit the launch is refused.
 *
 * The driver's choice may differ, above all for parallel branches: what a graph takes beyond the expectation is charged after
 * the launch whether it fits or not, and counts against all that follows.
 *
 * A process without such nodes pays a load for a launch. */
#include <stdlib.h>

#include "client.h"
#include "hook.h"
#include "lock.h"
#include "memory.h"
#include "pool.h"
#include "streams.h"
#include "table.h"

CU_NEED(CUresult, cuDeviceGetGraphMemAttribute, (CUdevice device, CUgraphMem_attribute attribute, void *value));
CU_NEED(CUresult, cuGraphGetNodes, (CUgraph graph, CUgraphNode *nodes, size_t *count));
CU_NEED(CUresult, cuGraphNodeGetType, (CUgraphNode node, CUgraphNodeType *type));
CU_NEED(CUresult, cuGraphMemAllocNodeGetParams, (CUgraphNode node, CUDA_MEM_ALLOC_NODE_PARAMS *params));
CU_NEED(CUresult, cuGraphMemFreeNodeGetParams, (CUgraphNode node, CUdeviceptr *ptr));
CU_NEED(CUresult, cuGraphChildGraphNodeGetGraph, (CUgraphNode node, CUgraph *graph));

#define DEPTH 8          /* of child graphs */
#define DEVICES 64

struct graph_pool {
    struct hook_lock lock; /* of all below; held around the driver's answer, so that answers are taken in their order */
    uint64_t charged;      /* `flying` is in it */
    uint64_t flying;       /* charged in advance for launches under way */
    uint32_t epoch;        /* raised by each trim: what was launched before is no longer mapped */
};

bool graph_memory_used;
static struct graph_pool graph_pools[CGPU_MAX_GPUS];

/* ---- the charge ---- */

static CUdevice device_of(int gpu)
{
    for (CUdevice device = 0; device < DEVICES; device++)
        if (hook_gpu_of_device(device) == gpu)
            return device;
    return -1;
}

static uint64_t ask(int gpu, CUgraphMem_attribute attribute)
{
    uint64_t bytes = 0;
    CUdevice device = device_of(gpu);
    if (device < 0 || !have(cuDeviceGetGraphMemAttribute) ||
        REAL(cuDeviceGetGraphMemAttribute)(device, attribute, &bytes) != CUDA_SUCCESS)
        return 0;
    return bytes;
}

/* As in pools.c. Lock held. */
static void settle(struct graph_pool *pool, int gpu)
{
    uint64_t has = ask(gpu, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
    if (pool->charged < has && ledger_force(gpu, has - pool->charged))
        pool->charged = has;
    if (pool->charged > has + pool->flying) {
        ledger_refund(gpu, pool->charged - has - pool->flying);
        pool->charged = has + pool->flying;
    }
}

void graph_memory_refresh(int gpu)
{
    if (!load_relaxed(&graph_memory_used))
        return;
    struct graph_pool *pool = &graph_pools[gpu];
    hook_lock_take(&pool->lock);
    settle(pool, gpu);
    hook_lock_drop(&pool->lock);
}

static void trimmed(int gpu)
{
    struct graph_pool *pool = &graph_pools[gpu];
    hook_lock_take(&pool->lock);
    pool->epoch++;
    settle(pool, gpu);
    hook_lock_drop(&pool->lock);
}

CU_WRAP(CUresult, cuDeviceGraphMemTrim, (CUdevice device))
{
    CUresult result = REAL(cuDeviceGraphMemTrim)(device);
    int gpu = result == CUDA_SUCCESS && hook_gpus() ? hook_gpu_of_device(device) : -1;
    if (gpu >= 0)
        trimmed(gpu);
    return result;
}

bool graph_memory_trim(int gpu)
{
    uint64_t before = load_relaxed(&graph_pools[gpu].charged);
    if (before == 0 || !have(cuDeviceGraphMemTrim))
        return false;
    int mode = capture_relax();
    REAL(cuDeviceGraphMemTrim)(device_of(gpu));
    capture_restore(mode);
    trimmed(gpu);
    return load_relaxed(&graph_pools[gpu].charged) < before;
}

/* ---- what a graph will need ---- */

struct need {
    int gpu;            /* of the first node that allocates; -1: none does */
    uint64_t live, most;
    struct table sizes; /* by address */
};

static void see_alloc(struct need *need, CUgraphNode node)
{
    CUDA_MEM_ALLOC_NODE_PARAMS params = {0};
    uint64_t old;
    if (!have(cuGraphMemAllocNodeGetParams) || REAL(cuGraphMemAllocNodeGetParams)(node, &params) != CUDA_SUCCESS)
        return;
    const CUmemLocation *location = &params.poolProps.location;
    if (location->type != CU_MEM_LOCATION_TYPE_DEVICE && location->type != CU_MEM_LOCATION_TYPE_INVALID)
        return; /* host memory */
    if (need->gpu < 0)
        need->gpu = location->type == CU_MEM_LOCATION_TYPE_DEVICE ? hook_gpu_of_device(location->id) : hook_current_gpu();
    uint64_t bytes = round_up(params.bytesize ? params.bytesize : 1, SMALL_GRANULE);
    if (!__builtin_add_overflow(need->live, bytes, &need->live) && need->live > need->most)
        need->most = need->live;
    table_put(&need->sizes, params.dptr, bytes, &old);
}

static void see_free(struct need *need, CUgraphNode node)
{
    CUdeviceptr ptr;
    if (have(cuGraphMemFreeNodeGetParams) && REAL(cuGraphMemFreeNodeGetParams)(node, &ptr) == CUDA_SUCCESS)
        need->live -= table_take(&need->sizes, ptr);
}

static void see_graph(struct need *need, CUgraph graph, int depth)
{
    size_t count = 0;
    if (depth > DEPTH || REAL(cuGraphGetNodes)(graph, NULL, &count) != CUDA_SUCCESS || count == 0)
        return;
    CUgraphNode *nodes = calloc(count, sizeof *nodes);
    if (!nodes || REAL(cuGraphGetNodes)(graph, nodes, &count) != CUDA_SUCCESS)
        count = 0;
    for (size_t i = 0; i < count; i++) {
        CUgraphNodeType type;
        CUgraph child;
        if (REAL(cuGraphNodeGetType)(nodes[i], &type) != CUDA_SUCCESS)
            continue;
        if (type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
            see_alloc(need, nodes[i]);
        else if (type == CU_GRAPH_NODE_TYPE_MEM_FREE)
            see_free(need, nodes[i]);
        else if (type == CU_GRAPH_NODE_TYPE_GRAPH && have(cuGraphChildGraphNodeGetGraph) &&
                 REAL(cuGraphChildGraphNodeGetGraph)(nodes[i], &child) == CUDA_SUCCESS)
            see_graph(need, child, depth + 1);
    }
    free(nodes);
}

/* true: it allocates on one of our GPUs. */
static bool look(CUgraph graph, struct ledger_entry *note)
{
    struct need need = {.gpu = -1};
    if (hook_gpus() == 0 || !load_relaxed(&graph_memory_used) || !have(cuGraphGetNodes) || !have(cuGraphNodeGetType))
        return false;
    see_graph(&need, graph, 0);
    table_free(&need.sizes);
    *note = (struct ledger_entry){.gpu = need.gpu, .bytes = need.most / LEDGER_UNIT};
    return need.gpu >= 0;
}

/* ---- launches ----
 *
 * A note of an executable graph: what it needs, in LEDGER_UNITs, and the low byte of the pool's epoch in which it was last
 * launched plus 1, 0 for never. */
#define EPOCH_BITS 8
#define EPOCH_MASK ((1u << EPOCH_BITS) - 1)

static uint64_t mapped_mark(const struct graph_pool *pool)
{
    return load_relaxed(&pool->epoch) % EPOCH_MASK + 1;
}

/* false: `bytes` do not fit beside what is charged. */
static bool claim(struct graph_launch *launch, uint64_t bytes)
{
    struct graph_pool *pool = &graph_pools[launch->gpu];
    hook_lock_take(&pool->lock);
    uint64_t reserved = ask(launch->gpu, CU_GRAPH_MEM_ATTR_RESERVED_MEM_CURRENT);
    uint64_t used = ask(launch->gpu, CU_GRAPH_MEM_ATTR_USED_MEM_CURRENT);
    uint64_t spare = reserved > used ? reserved - used : 0;
    launch->advance = bytes > spare ? bytes - spare : 0;
    bool fits = launch->advance == 0 || ledger_try(launch->gpu, launch->advance);
    if (fits) {
        pool->charged += launch->advance;
        pool->flying += launch->advance;
    }
    hook_lock_drop(&pool->lock);
    return fits;
}

static bool begin(struct graph_launch *launch, const struct ledger_entry *note)
{
    launch->gpu = note->gpu;
    launch->advance = 0;
    if ((note->bytes & EPOCH_MASK) == mapped_mark(&graph_pools[note->gpu]))
        return true;
    uint64_t bytes = (note->bytes >> EPOCH_BITS) * LEDGER_UNIT;
    if (claim(launch, bytes) || (memory_make_room(note->gpu) && claim(launch, bytes)))
        return true;
    ledger_refused(note->gpu);
    return false;
}

static void end(const struct graph_launch *launch)
{
    struct graph_pool *pool = &graph_pools[launch->gpu];
    hook_lock_take(&pool->lock);
    pool->flying -= launch->advance;
    settle(pool, launch->gpu);
    hook_lock_drop(&pool->lock);
}

static void remember(CUgraphExec graph, const struct ledger_entry *note, bool mapped)
{
    struct ledger_entry new = *note;
    new.bytes = (note->bytes & ~(uint64_t)EPOCH_MASK) | (mapped ? mapped_mark(&graph_pools[note->gpu]) : 0);
    if (new.bytes != note->bytes || !mapped)
        ledger_put(LEDGER_GRAPH, (uint64_t)(uintptr_t)graph, &new);
}

bool graph_memory_begin(struct graph_launch *launch, CUgraphExec graph)
{
    struct ledger_entry note;
    launch->gpu = -1;
    return !ledger_find(LEDGER_GRAPH, (uint64_t)(uintptr_t)graph, &note) || begin(launch, &note);
}

void graph_memory_end(const struct graph_launch *launch, CUgraphExec graph, CUresult result)
{
    struct ledger_entry note;
    if (launch->gpu < 0)
        return;
    end(launch);
    if (result == CUDA_SUCCESS && ledger_find(LEDGER_GRAPH, (uint64_t)(uintptr_t)graph, &note))
        remember(graph, &note, true);
}

/* ---- making graphs ---- */

#define INSTANTIATE_WRAP(name, args, call, uploads) \
    CU_WRAP(CUresult, name, args) \
    { \
        struct ledger_entry note; \
        struct graph_launch launch; \
        if (__builtin_expect(!look(graph, &note), 1)) \
            return REAL(name) call; \
        note.bytes <<= EPOCH_BITS; \
        bool upload = uploads; \
        if (upload && !begin(&launch, &note)) \
            return CUDA_ERROR_OUT_OF_MEMORY; \
        CUresult result = REAL(name) call; \
        if (upload) \
            end(&launch); \
        else \
            graph_memory_refresh(note.gpu); \
        if (result == CUDA_SUCCESS) \
            remember(*exec, &note, upload); \
        return result; \
    }

INSTANTIATE_WRAP(cuGraphInstantiate, (CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size),
                 (exec, graph, node, log, size), false)
INSTANTIATE_WRAP(cuGraphInstantiate_v2, (CUgraphExec *exec, CUgraph graph, CUgraphNode *node, char *log, size_t size),
                 (exec, graph, node, log, size), false)
INSTANTIATE_WRAP(cuGraphInstantiateWithFlags, (CUgraphExec *exec, CUgraph graph, unsigned long long flags),
                 (exec, graph, flags), false)
#define PARAMS (CUgraphExec *exec, CUgraph graph, CUDA_GRAPH_INSTANTIATE_PARAMS *params)
#define PARAMS_UPLOAD (params && params->flags & CUDA_GRAPH_INSTANTIATE_FLAG_UPLOAD)
INSTANTIATE_WRAP(cuGraphInstantiateWithParams, PARAMS, (exec, graph, params), PARAMS_UPLOAD)
INSTANTIATE_WRAP(cuGraphInstantiateWithParams_ptsz, PARAMS, (exec, graph, params), PARAMS_UPLOAD)

/* What it had mapped stays the device's until it is trimmed. */
CU_WRAP(CUresult, cuGraphExecDestroy, (CUgraphExec exec))
{
    struct ledger_entry note;
    if (!load_relaxed(&graph_memory_used))
        return REAL(cuGraphExecDestroy)(exec);
    bool known = ledger_take(LEDGER_GRAPH, (uint64_t)(uintptr_t)exec, &note);
    CUresult result = REAL(cuGraphExecDestroy)(exec);
    if (known && result != CUDA_SUCCESS)
        ledger_put(LEDGER_GRAPH, (uint64_t)(uintptr_t)exec, &note);
    else if (known)
        graph_memory_refresh(note.gpu);
    return result;
}

void graph_memory_captured(void)
{
    store_relaxed(&graph_memory_used, true);
}

CU_WRAP(CUresult, cuGraphAddMemAllocNode,
        (CUgraphNode *node, CUgraph graph, const CUgraphNode *after, size_t count, CUDA_MEM_ALLOC_NODE_PARAMS *params))
{
    graph_memory_captured();
    return REAL(cuGraphAddMemAllocNode)(node, graph, after, count, params);
}

void graph_memory_sees(const CUgraphNodeParams *params)
{
    if (params && params->type == CU_GRAPH_NODE_TYPE_MEM_ALLOC)
        graph_memory_captured();
}

void graph_memory_after_fork(void)
{
    for (int gpu = 0; gpu < CGPU_MAX_GPUS; gpu++)
        graph_pools[gpu] = (struct graph_pool){0};
    graph_memory_used = false;
}
