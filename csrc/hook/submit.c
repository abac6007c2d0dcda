/* submit.c: what puts work on the device passes the gate. docs/submission.md says which calls do, which don't, and why; a test
 * compares the two. The variants of a family are made here: one more name is one more line.
 *
 * A plain name means the legacy default stream by the null handle, one with _ptsz or _ptds the thread's own. */
#include "client.h"
#include "hook.h"
#include "pool.h"
#include "stall.h"
#include "streams.h"

CU_NEED(CUresult, cuStreamSynchronize, (CUstream));

#define SUBMIT_TO(name, args, call, enter) \
    CU_WRAP(CUresult, name, args) \
    { \
        struct gate_thread *t = enter; \
        CUresult result = REAL(name) call; \
        gate_leave(t); \
        return result; \
    }
#define SUBMIT(name, args, call, stream) SUBMIT_TO(name, args, call, gate_enter(stream_key(stream)))
#define SUBMIT_PTSZ(name, args, call, stream) SUBMIT_TO(name, args, call, gate_enter(stream_key_ptsz(stream)))
/* Both forms of a name with an argument `stream`. */
#define SUBMIT_BOTH(name, args, call) \
    SUBMIT(name, args, call, stream) \
    SUBMIT_PTSZ(name##_ptsz, args, call, stream)
/* The same, and the 32-bit form that came first. */
#define SUBMIT_OLD_BOTH(name, old_args, args, call) \
    SUBMIT(name, old_args, call, stream) \
    SUBMIT(name##_v2, args, call, stream) \
    SUBMIT_PTSZ(name##_v2_ptsz, args, call, stream)

/* ---- kernels ---- */

#define KERNEL_ARGS \
    (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
     CUstream stream, void **params, void **extra)
#define KERNEL_CALL (f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
SUBMIT_BOTH(cuLaunchKernel, KERNEL_ARGS, KERNEL_CALL)

#define EX_ARGS (const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
SUBMIT(cuLaunchKernelEx, EX_ARGS, (config, f, params, extra), config ? config->hStream : NULL)
SUBMIT_PTSZ(cuLaunchKernelEx_ptsz, EX_ARGS, (config, f, params, extra), config ? config->hStream : NULL)

#define COOPERATIVE_ARGS \
    (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
     CUstream stream, void **params)
SUBMIT_BOTH(cuLaunchCooperativeKernel, COOPERATIVE_ARGS, (f, gx, gy, gz, bx, by, bz, shared, stream, params))

/* Its kernels wait for each other: all of its devices' gates or none. */
CU_WRAP(CUresult, cuLaunchCooperativeKernelMultiDevice, (CUDA_LAUNCH_PARAMS *list, unsigned count, unsigned flags))
{
    void *streams[CGPU_MAX_GPUS];
    struct gate *held[CGPU_MAX_GPUS];
    unsigned n = 0;
    for (; list && n < count && n < CGPU_MAX_GPUS; n++)
        streams[n] = stream_key(list[n].hStream);
    n = streams_enter_many(streams, n, held);
    CUresult result = REAL(cuLaunchCooperativeKernelMultiDevice)(list, count, flags);
    streams_leave_many(held, n);
    return result;
}

SUBMIT(cuLaunch, (CUfunction f), (f), NULL)
SUBMIT(cuLaunchGrid, (CUfunction f, int width, int height), (f, width, height), NULL)
SUBMIT(cuLaunchGridAsync, (CUfunction f, int width, int height, CUstream stream), (f, width, height, stream), stream)

/* ---- graphs: each is measured by itself ---- */

#define SUBMIT_GRAPH(name, enter) \
    CU_WRAP(CUresult, name, (CUgraphExec graph, CUstream stream)) \
    { \
        struct graph_launch launch = {.gpu = -1}; \
        bool allocates = __builtin_expect(load_relaxed(&graph_memory_used), 0); \
        if (allocates && !graph_memory_begin(&launch, graph)) \
            return CUDA_ERROR_OUT_OF_MEMORY; \
        struct gate_thread *t = enter; \
        CUresult result = REAL(name)(graph, stream); \
        gate_leave(t); \
        if (allocates) \
            graph_memory_end(&launch, graph, result); \
        return result; \
    }
SUBMIT_GRAPH(cuGraphLaunch, streams_enter_graph(graph, stream_key(stream)))
SUBMIT_GRAPH(cuGraphLaunch_ptsz, streams_enter_graph(graph, stream_key_ptsz(stream)))
SUBMIT_GRAPH(cuGraphUpload, gate_enter(stream_key(stream)))
SUBMIT_GRAPH(cuGraphUpload_ptsz, gate_enter(stream_key_ptsz(stream)))

/* ---- calls that wait in the driver for their work and all before it ----
 *
 * The mark stays set until they return, and while it is set this process lets go of nothing. So where others want the device,
 * what was queued before is waited for first, without the mark: it then stands for the copy's own time. The call would have
 * waited for just that; the result, an earlier failure perhaps, is for it to report. */

static void wait_before(void *stream)
{
    const struct gate_thread *t = gate_self;
    if (t && t->lane && load_relaxed(&t->gate->ctl->deadline_ns) && !t->in_callback && !capture_is_active() &&
        have(cuStreamSynchronize))
        REAL(cuStreamSynchronize)((CUstream)stream);
}

static inline struct gate_thread *enter_waiting(void *stream)
{
    wait_before(stream);
    return gate_enter(stream);
}

#define WAITING(name, args, call) SUBMIT_TO(name, args, call, enter_waiting(stream_key(NULL)))
#define WAITING_PTDS(name, args, call) SUBMIT_TO(name, args, call, enter_waiting(stream_key_ptsz(NULL)))
#define WAITING_BOTH(name, args, call) \
    WAITING(name, args, call) \
    WAITING_PTDS(name##_ptds, args, call)
#define WAITING_OLD_BOTH(name, old_args, args, call) \
    WAITING(name, old_args, call) \
    WAITING(name##_v2, args, call) \
    WAITING_PTDS(name##_v2_ptds, args, call)

typedef CUdeviceptr_v1 P1;
typedef CUdeviceptr P2;

/* ---- memset: runs where kernels run ---- */

#define MEMSET(name, type) \
    WAITING_OLD_BOTH(name, (P1 p, type value, unsigned n), (P2 p, type value, size_t n), (p, value, n)) \
    SUBMIT_BOTH(name##Async, (P2 p, type value, size_t n, CUstream stream), (p, value, n, stream))
#define MEMSET_2D(name, type) \
    WAITING_OLD_BOTH(name, (P1 p, unsigned pitch, type value, unsigned width, unsigned height), \
                     (P2 p, size_t pitch, type value, size_t width, size_t height), (p, pitch, value, width, height)) \
    SUBMIT_BOTH(name##Async, (P2 p, size_t pitch, type value, size_t width, size_t height, CUstream stream), \
                (p, pitch, value, width, height, stream))

MEMSET(cuMemsetD8, unsigned char)
MEMSET(cuMemsetD16, unsigned short)
MEMSET(cuMemsetD32, unsigned)
MEMSET_2D(cuMemsetD2D8, unsigned char)
MEMSET_2D(cuMemsetD2D16, unsigned short)
MEMSET_2D(cuMemsetD2D32, unsigned)

/* ---- memcpy ---- */

#define COPY(name, old_args, args, call) WAITING_OLD_BOTH(name, old_args, args, call)
COPY(cuMemcpyHtoD, (P1 to, const void *from, unsigned n), (P2 to, const void *from, size_t n), (to, from, n))
COPY(cuMemcpyDtoH, (void *to, P1 from, unsigned n), (void *to, P2 from, size_t n), (to, from, n))
COPY(cuMemcpyDtoD, (P1 to, P1 from, unsigned n), (P2 to, P2 from, size_t n), (to, from, n))
COPY(cuMemcpyDtoA, (CUarray to, unsigned at, P1 from, unsigned n), (CUarray to, size_t at, P2 from, size_t n), (to, at, from, n))
COPY(cuMemcpyAtoD, (P1 to, CUarray from, unsigned at, unsigned n), (P2 to, CUarray from, size_t at, size_t n), (to, from, at, n))
COPY(cuMemcpyHtoA, (CUarray to, unsigned at, const void *from, unsigned n), (CUarray to, size_t at, const void *from, size_t n),
     (to, at, from, n))
COPY(cuMemcpyAtoH, (void *to, CUarray from, unsigned at, unsigned n), (void *to, CUarray from, size_t at, size_t n),
     (to, from, at, n))
COPY(cuMemcpyAtoA, (CUarray to, unsigned at, CUarray from, unsigned off, unsigned n),
     (CUarray to, size_t at, CUarray from, size_t off, size_t n), (to, at, from, off, n))
COPY(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *copy), (const CUDA_MEMCPY2D *copy), (copy))
COPY(cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *copy), (const CUDA_MEMCPY2D *copy), (copy))
COPY(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *copy), (const CUDA_MEMCPY3D *copy), (copy))
WAITING_BOTH(cuMemcpy, (P2 to, P2 from, size_t n), (to, from, n))
WAITING_BOTH(cuMemcpyPeer, (P2 to, CUcontext there, P2 from, CUcontext here, size_t n), (to, there, from, here, n))
WAITING_BOTH(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *copy), (copy))

#define COPY_ASYNC(name, old_args, args, call) SUBMIT_OLD_BOTH(name##Async, old_args, args, call)
COPY_ASYNC(cuMemcpyHtoD, (P1 to, const void *from, unsigned n, CUstream stream),
           (P2 to, const void *from, size_t n, CUstream stream), (to, from, n, stream))
COPY_ASYNC(cuMemcpyDtoH, (void *to, P1 from, unsigned n, CUstream stream), (void *to, P2 from, size_t n, CUstream stream),
           (to, from, n, stream))
COPY_ASYNC(cuMemcpyDtoD, (P1 to, P1 from, unsigned n, CUstream stream), (P2 to, P2 from, size_t n, CUstream stream),
           (to, from, n, stream))
COPY_ASYNC(cuMemcpyHtoA, (CUarray to, unsigned at, const void *from, unsigned n, CUstream stream),
           (CUarray to, size_t at, const void *from, size_t n, CUstream stream), (to, at, from, n, stream))
COPY_ASYNC(cuMemcpyAtoH, (void *to, CUarray from, unsigned at, unsigned n, CUstream stream),
           (void *to, CUarray from, size_t at, size_t n, CUstream stream), (to, from, at, n, stream))
COPY_ASYNC(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *copy, CUstream stream), (const CUDA_MEMCPY2D *copy, CUstream stream),
           (copy, stream))
COPY_ASYNC(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *copy, CUstream stream), (const CUDA_MEMCPY3D *copy, CUstream stream),
           (copy, stream))
SUBMIT_BOTH(cuMemcpyAsync, (P2 to, P2 from, size_t n, CUstream stream), (to, from, n, stream))
SUBMIT_BOTH(cuMemcpyPeerAsync, (P2 to, CUcontext there, P2 from, CUcontext here, size_t n, CUstream stream),
            (to, there, from, here, n, stream))
SUBMIT_BOTH(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *copy, CUstream stream), (copy, stream))

#define BATCH_ARGS P2 *to, P2 *from, size_t *n, size_t count, CUmemcpyAttributes *attributes, size_t *index, size_t attribute_count
SUBMIT_BOTH(cuMemcpyBatchAsync, (BATCH_ARGS, size_t *failed, CUstream stream),
            (to, from, n, count, attributes, index, attribute_count, failed, stream))
SUBMIT_BOTH(cuMemcpyBatchAsync_v2, (BATCH_ARGS, CUstream stream), (to, from, n, count, attributes, index, attribute_count, stream))
SUBMIT_BOTH(cuMemcpy3DBatchAsync,
            (size_t count, CUDA_MEMCPY3D_BATCH_OP *list, size_t *failed, unsigned long long flags, CUstream stream),
            (count, list, failed, flags, stream))
SUBMIT_BOTH(cuMemcpy3DBatchAsync_v2, (size_t count, CUDA_MEMCPY3D_BATCH_OP *list, unsigned long long flags, CUstream stream),
            (count, list, flags, stream))

/* ---- pages that move, and decompression ---- */

SUBMIT_BOTH(cuMemPrefetchAsync, (P2 p, size_t n, CUdevice device, CUstream stream), (p, n, device, stream))
SUBMIT_BOTH(cuMemPrefetchAsync_v2, (P2 p, size_t n, CUmemLocation where, unsigned flags, CUstream stream),
            (p, n, where, flags, stream))
#define PREFETCH_BATCH_ARGS \
    (P2 *p, size_t *n, size_t count, CUmemLocation *where, size_t *index, size_t where_count, unsigned long long flags, \
     CUstream stream)
#define PREFETCH_BATCH_CALL (p, n, count, where, index, where_count, flags, stream)
SUBMIT_BOTH(cuMemPrefetchBatchAsync, PREFETCH_BATCH_ARGS, PREFETCH_BATCH_CALL)
SUBMIT_BOTH(cuMemDiscardAndPrefetchBatchAsync, PREFETCH_BATCH_ARGS, PREFETCH_BATCH_CALL)
SUBMIT_BOTH(cuMemBatchDecompressAsync,
            (CUmemDecompressParams *list, size_t count, unsigned flags, size_t *failed, CUstream stream),
            (list, count, flags, failed, stream))
