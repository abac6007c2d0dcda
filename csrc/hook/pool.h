/* pool.h: memory that the driver keeps for this process beyond what the program asked for: that of stream-ordered pools
 * (pool.c, pools.c) and that of graphs (graph_memory.c). Charged is what is reserved on the card, asked of the driver; before a
 * call that may reserve more, what it may reserve. */
#ifndef CGPU_POOL_H
#define CGPU_POOL_H
#include <stdbool.h>
#include <stdint.h>
#include "atomics.h"
#include "cuda_min.h"
#include "ledger.h"

/* ---- when something could be given back ---- */

extern bool pools_unsettled __attribute__((visibility("hidden"))); /* the next synchronisation may shrink a pool */
void pools_settle_unsettled(bool whole);
/* The driver has synchronised something, or the `whole` device: pools may have shrunk to their thresholds. One load where none
 * can. */
static inline void pools_synced(bool whole)
{
    if (__builtin_expect(load_relaxed(&pools_unsettled), 0))
        pools_settle_unsettled(whole);
}
/* Asks the driver what it keeps on this GPU. */
void pools_refresh(int gpu);

/* Charges after giving back what is kept for nothing: pools are trimmed, and once more when the frees under way are done. The
 * driver does the same before it says that memory is out. false: it does not fit; counted as refused. */
bool memory_charge_again(int gpu, uint64_t bytes);
/* The same without charging. false: there was nothing to give back. */
bool memory_make_room(int gpu);

/* ---- pools.c: for ledger.c, memory.h, context.c ---- */

struct pool;
void pool_freed(const struct ledger_entry *entry, uint64_t ptr); /* a block of a pool; the driver has taken it back */
void pool_lost(const void *pool, uint64_t bytes);                /* went unseen */
/* A context has ended: of `device` all that is in its primary context (reset), or some context of any device (device -1). */
void pools_context_ended(CUdevice device);
void pools_after_fork(void);

/* ---- pools.c: for pool.c ---- */

struct pool *pool_current(int gpu); /* what cuMemAllocAsync takes from; NULL: the driver does not say */
int pool_gpu(const struct pool *pool);
/* `gpu`: of the stream, for a pool seen for the first time. *charged false: not in a GPU's memory, or another process's. */
struct pool *pool_of_handle(CUmemoryPool handle, int gpu, bool *charged);
void pool_made(CUmemoryPool handle, const CUmemLocation *location); /* location NULL: imported */
void pool_note(CUmemoryPool handle, const CUmemLocation *location); /* the same, of one that may be known */
void pool_current_changed(void);
void pool_threshold(CUmemoryPool handle, uint64_t bytes);
void pool_settle_handle(CUmemoryPool handle);
struct pool *pool_destroying(CUmemoryPool handle); /* before; NULL: not ours to charge */
void pool_not_destroyed(struct pool *pool);        /* the driver refused */
void pool_destroyed(CUmemoryPool handle);

/* One allocation from a pool:
 *     struct pool_claim claim;
 *     if (!pool_claim(&claim, pool, bytes)) -> does not fit (not counted as refused)
 *     CUresult result = REAL(...)(&ptr, ...);
 *     if (!pool_claimed(&claim, result, ptr)) -> the pool took more than fits: free `ptr`, then pool_unclaim(&claim)
 */
struct pool_claim {
    struct pool *pool;
    uint64_t bytes, advance;
};
bool pool_claim(struct pool_claim *claim, struct pool *pool, uint64_t bytes);
bool pool_claimed(struct pool_claim *claim, CUresult result, CUdeviceptr ptr);
void pool_unclaim(struct pool_claim *claim);

/* ---- graph_memory.c ---- */

extern bool graph_memory_used __attribute__((visibility("hidden"))); /* a graph of this process has had a node that allocates */
void graph_memory_captured(void);   /* an allocation became a graph node */
void graph_memory_sees(const CUgraphNodeParams *params); /* a node is added to a graph: does it allocate? */
/* Around a launch or upload of `graph`, where graph_memory_used. begin false: its nodes do not fit. */
struct graph_launch {
    int gpu; /* -1: its nodes allocate nothing */
    uint64_t advance;
};
bool graph_memory_begin(struct graph_launch *launch, CUgraphExec graph);
void graph_memory_end(const struct graph_launch *launch, CUgraphExec graph, CUresult result);
bool graph_memory_trim(int gpu);    /* gives back what no graph uses now; false: nothing */
void graph_memory_refresh(int gpu);
void graph_memory_after_fork(void);
#endif
