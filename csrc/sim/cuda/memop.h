/* memop.h: batches of waits for values and writes of them: in streams and in graphs. */
#ifndef CGPU_SIM_MEMOP_H
#define CGPU_SIM_MEMOP_H
#include "cuda/sim.h"

enum memop_kind { MEMOP_WAIT_32 = 1, MEMOP_WRITE_32 = 2, MEMOP_FLUSH = 3, MEMOP_WAIT_64 = 4, MEMOP_WRITE_64 = 5,
                  MEMOP_BARRIER = 6 };
union CUstreamBatchMemOpParams_union { /* as CUDA lays it out */
    uint32_t operation;
    struct {
        uint32_t operation;
        uint64_t address;
        uint64_t wide;                 /* the first half of it for 32 bits */
        unsigned flags;
        uint64_t alias;
    } value;
    uint64_t pad[6];
};
_Static_assert(sizeof(CUstreamBatchMemOpParams) == 48, "CUDA's");

struct CUDA_BATCH_MEM_OP_NODE_PARAMS_st {
    CUcontext ctx;
    unsigned int count;
    CUstreamBatchMemOpParams *paramArray;
    unsigned int flags;
};

struct memops { unsigned refs, count; CUstreamBatchMemOpParams op[]; }; /* of a graph's node; under api_lock */
CUresult memops_check(const CUstreamBatchMemOpParams *ops, unsigned count, unsigned flags);
CUresult memops_submit(struct CUstream_st *stream, const CUstreamBatchMemOpParams *ops, unsigned count);
struct memops *memops_new(const CUstreamBatchMemOpParams *ops, unsigned count); /* NULL: no host memory */
void memops_unref(struct memops *ops);
#endif
