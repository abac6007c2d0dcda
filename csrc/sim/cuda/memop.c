/* memop.c: waiting for a value in memory and writing one, in the order of a stream. A wait is a gate that the driver
 * thread asks whether it may open: at once when a write of this process is done, else at growing intervals, up to a
 * millisecond, for what a copy, the host or another process writes. */
#include <stdlib.h>
#include <string.h>
#include "cuda/memop.h"

#define GREATER_OR_EQUAL 0u
#define EQUAL            1u
#define AND              2u
#define NOR              3u
#define FLUSH            (1u << 30)
#define NO_BARRIER       1u

struct memop { uint64_t address, value; unsigned flags; bool wide; };

/* ---- in the stream ---- */

static uint64_t read_value(const struct memop *op)
{
    return op->wide ? load_acquire((uint64_t *)(uintptr_t)op->address)
                    : load_acquire((uint32_t *)(uintptr_t)op->address);
}

static bool satisfied(void *arg)
{
    const struct memop *op = arg;
    uint64_t is = read_value(op), mask = op->wide ? ~0ull : UINT32_MAX;
    switch (op->flags & 3) {
    case GREATER_OR_EQUAL: /* of a number that may wrap */
        return op->wide ? (int64_t)(is - op->value) >= 0 : (int32_t)(uint32_t)(is - op->value) >= 0;
    case EQUAL:
        return is == (op->value & mask);
    case AND:
        return is & op->value & mask;
    default:
        return ~(is | op->value) & mask;
    }
}

static void end_wait(void *arg, uint64_t seq, uint64_t done_ns)
{
    (void)seq;
    (void)done_ns;
    free(arg);
}

static void write_value(void *arg, uint64_t seq, uint64_t done_ns)
{
    const struct memop *op = arg;
    if (op->wide)
        store_release((uint64_t *)(uintptr_t)op->address, op->value);
    else
        store_release((uint32_t *)(uintptr_t)op->address, (uint32_t)op->value);
    queues_ring();
    end_wait(arg, seq, done_ns);
}

static CUresult submit(struct CUstream_st *stream, const struct memop *from, bool wait)
{
    struct memop *op = malloc(sizeof *op);
    struct work work = {.kind = wait ? SIM_GATE : SIM_MARK,
                        .action = {.run = wait ? end_wait : write_value, .arg = op, .gate = wait,
                                   .ready = wait ? satisfied : NULL, .prompt = true}};
    if (!op)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *op = *from;
    CUresult result = stream_append(stream, &work);
    if (result != CUDA_SUCCESS)
        free(op);
    return result;
}

/* ---- what is asked for ---- */

static CUresult check_one(const CUstreamBatchMemOpParams *op)
{
    bool wide = op->operation == MEMOP_WAIT_64 || op->operation == MEMOP_WRITE_64;
    uint64_t bytes = wide ? 8 : 4;
    switch (op->operation) {
    case MEMOP_WAIT_32:
    case MEMOP_WAIT_64:
        if (op->value.flags & FLUSH)
            return CUDA_ERROR_NOT_SUPPORTED; /* nothing writes to this GPU from outside */
        if (op->value.flags > NOR)
            return CUDA_ERROR_INVALID_VALUE;
        break;
    case MEMOP_WRITE_32:
    case MEMOP_WRITE_64:
        if (op->value.flags & ~NO_BARRIER)
            return CUDA_ERROR_INVALID_VALUE;
        break;
    case MEMOP_BARRIER: /* what is in one stream is in order anyway */
        return CUDA_SUCCESS;
    case MEMOP_FLUSH:
        return CUDA_ERROR_NOT_SUPPORTED;
    default:
        return CUDA_ERROR_INVALID_VALUE;
    }
    bool good = op->value.address % bytes == 0 && device_range(op->value.address, bytes);
    return good ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

CUresult memops_check(const CUstreamBatchMemOpParams *ops, unsigned count, unsigned flags)
{
    if (!ops || !count || count > 256 || flags)
        return CUDA_ERROR_INVALID_VALUE;
    for (unsigned i = 0; i < count; i++)
        TRY(check_one(&ops[i]));
    return CUDA_SUCCESS;
}

CUresult memops_submit(struct CUstream_st *stream, const CUstreamBatchMemOpParams *ops, unsigned count)
{
    for (unsigned i = 0; i < count; i++) {
        uint32_t kind = ops[i].operation;
        bool wait = kind == MEMOP_WAIT_32 || kind == MEMOP_WAIT_64;
        bool wide = kind == MEMOP_WAIT_64 || kind == MEMOP_WRITE_64;
        struct memop op = {ops[i].value.address, wide ? ops[i].value.wide : (uint32_t)ops[i].value.wide,
                           ops[i].value.flags, wide};
        if (kind != MEMOP_BARRIER)
            TRY(submit(stream, &op, wait));
    }
    return CUDA_SUCCESS;
}

struct memops *memops_new(const CUstreamBatchMemOpParams *ops, unsigned count)
{
    struct memops *copy = malloc(sizeof *copy + count * sizeof *ops);
    if (!copy)
        return NULL;
    copy->refs = 1;
    copy->count = count;
    memcpy(copy->op, ops, count * sizeof *ops);
    return copy;
}

void memops_unref(struct memops *ops)
{
    if (ops && --ops->refs == 0)
        free(ops);
}

static CUresult request(bool ptds, CUstream handle, unsigned count, const CUstreamBatchMemOpParams *ops, unsigned flags)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    TRY(memops_check(ops, count, flags));
    if (captures_active) {
        CUresult result = CUDA_SUCCESS;
        pthread_mutex_lock(&api_lock);
        bool capturing = stream->capture != NULL;
        if (capturing) {
            struct node_params node = {.type = CU_GRAPH_NODE_TYPE_BATCH_MEM_OP, .memops = memops_new(ops, count)};
            result = node.memops ? capture_add(stream, &node) : CUDA_ERROR_OUT_OF_MEMORY;
            if (result != CUDA_SUCCESS)
                memops_unref(node.memops);
        } else if (stream_capturing_blocked(stream)) {
            result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
        }
        pthread_mutex_unlock(&api_lock);
        if (capturing || result != CUDA_SUCCESS)
            return result;
    }
    return memops_submit(stream, ops, count);
}

/* ---- entry points ---- */

static CUresult batch(bool ptds, CUstream stream, unsigned int count, CUstreamBatchMemOpParams *ops, unsigned int flags)
{
    return request(ptds, stream, count, ops, flags);
}
API_PAIR(cuStreamBatchMemOp, _ptsz, batch,
         (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *ops, unsigned int flags), stream, count, ops,
         flags)
API_PAIR(cuStreamBatchMemOp_v2, _ptsz, batch,
         (CUstream stream, unsigned int count, CUstreamBatchMemOpParams *ops, unsigned int flags), stream, count, ops,
         flags)

static CUresult one(bool ptds, CUstream stream, uint32_t operation, CUdeviceptr address, uint64_t value, unsigned flags)
{
    CUstreamBatchMemOpParams op = {.operation = operation};
    op.value.address = address;
    op.value.wide = value;
    op.value.flags = flags;
    return request(ptds, stream, 1, &op, 0);
}

#define MEMOP(name, do_name, kind, type) \
    static CUresult do_name(bool ptds, CUstream stream, CUdeviceptr address, type value, unsigned int flags) \
    { \
        return one(ptds, stream, kind, address, value, flags); \
    } \
    API_PAIR(name, _ptsz, do_name, (CUstream stream, CUdeviceptr address, type value, unsigned int flags), stream, \
             address, value, flags) \
    API_PAIR(name##_v2, _ptsz, do_name, (CUstream stream, CUdeviceptr address, type value, unsigned int flags), \
             stream, address, value, flags)
MEMOP(cuStreamWaitValue32, wait_32, MEMOP_WAIT_32, uint32_t)
MEMOP(cuStreamWaitValue64, wait_64, MEMOP_WAIT_64, uint64_t)
MEMOP(cuStreamWriteValue32, write_32, MEMOP_WRITE_32, uint32_t)
MEMOP(cuStreamWriteValue64, write_64, MEMOP_WRITE_64, uint64_t)
