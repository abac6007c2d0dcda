/* families.c: calls every submission of the driver, each by its own name and on a thread of its own, all at once. When a call
 * returns its line "NAME RESULT" is printed. With arguments: those names only. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "cuda_min.h"

#define N 4096
typedef CUdeviceptr_v1 P1;
typedef CUdeviceptr P2;

static CUcontext context;
static CUmodule module;
static CUfunction f;
static CUgraphExec exec_graph;
static void *library;

/* What a thread works with: nothing is shared, so that no call waits for another's. */
struct set {
    CUstream s;
    P2 p, q;
    P1 low, low2;
    void *h;
    CUarray a, b;
    CUDA_MEMCPY2D c2;
    CUDA_MEMCPY2D_v1 o2;
    CUDA_MEMCPY3D c3;
    CUDA_MEMCPY3D_v1 o3;
    CUDA_MEMCPY3D_PEER peer;
    CUlaunchConfig config;
    CUDA_LAUNCH_PARAMS list;
    size_t n, index, failed;
    CUmemcpyAttributes attributes;
    CUDA_MEMCPY3D_BATCH_OP op;
    CUmemLocation where;
};

static void *sym(const char *name) { return dlsym(library, name); }
#define REAL(name) ((CUresult (*)())sym(name))

static int prepare(struct set *x)
{
    memset(x, 0, sizeof *x);
    CUDA_ARRAY_DESCRIPTOR d = {N, 0, CU_AD_FORMAT_UNSIGNED_INT8, 1};
    int bad = (int)REAL("cuStreamCreate")(&x->s, 1u) | (int)REAL("cuMemAlloc_v2")(&x->p, (size_t)N) |
              (int)REAL("cuMemAlloc_v2")(&x->q, (size_t)N) | (int)REAL("cuMemAlloc")(&x->low, N) |
              (int)REAL("cuMemAlloc")(&x->low2, N) | (int)REAL("cuMemAllocHost_v2")(&x->h, (size_t)N) |
              (int)REAL("cuArrayCreate_v2")(&x->a, &d) | (int)REAL("cuArrayCreate_v2")(&x->b, &d);
    x->c2 = (CUDA_MEMCPY2D){.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = x->p, .srcPitch = 64,
                            .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = x->q, .dstPitch = 64, .WidthInBytes = 32, .Height = 8};
    x->o2 = (CUDA_MEMCPY2D_v1){.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = x->low, .srcPitch = 64,
                               .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = x->low2, .dstPitch = 64, .WidthInBytes = 32,
                               .Height = 8};
    x->c3 = (CUDA_MEMCPY3D){.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = x->p, .srcPitch = 64, .srcHeight = 8,
                            .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = x->q, .dstPitch = 64, .dstHeight = 8,
                            .WidthInBytes = 32, .Height = 8, .Depth = 1};
    x->o3 = (CUDA_MEMCPY3D_v1){.srcMemoryType = CU_MEMORYTYPE_DEVICE, .srcDevice = x->low, .srcPitch = 64, .srcHeight = 8,
                               .dstMemoryType = CU_MEMORYTYPE_DEVICE, .dstDevice = x->low2, .dstPitch = 64, .dstHeight = 8,
                               .WidthInBytes = 32, .Height = 8, .Depth = 1};
    x->peer = x->c3;
    x->peer.reserved0 = x->peer.reserved1 = context;
    x->config = (CUlaunchConfig){1, 1, 1, 1, 1, 1, 0, x->s, NULL, 0};
    x->list = (CUDA_LAUNCH_PARAMS){f, 1, 1, 1, 1, 1, 1, 0, x->s, NULL};
    x->n = N;
    x->where = (CUmemLocation){CU_MEM_LOCATION_TYPE_DEVICE, 0};
    return bad;
}

/* ---- the calls: a name, its prototype, its arguments ---- */

#define CALLS(DO) \
    PAIR(DO, cuLaunchKernel, _ptsz, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, \
         void **, void **), (f, 1, 1, 1, 1, 1, 1, 0, x->s, NULL, NULL)) \
    PAIR(DO, cuLaunchKernelEx, _ptsz, (const CUlaunchConfig *, CUfunction, void **, void **), (&x->config, f, NULL, NULL)) \
    PAIR(DO, cuLaunchCooperativeKernel, _ptsz, (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, \
         CUstream, void **), (f, 1, 1, 1, 1, 1, 1, 0, x->s, NULL)) \
    DO(cuLaunchCooperativeKernelMultiDevice, (CUDA_LAUNCH_PARAMS *, unsigned, unsigned), (&x->list, 1, 0)) \
    DO(cuLaunch, (CUfunction), (f)) \
    DO(cuLaunchGrid, (CUfunction, int, int), (f, 1, 1)) \
    DO(cuLaunchGridAsync, (CUfunction, int, int, CUstream), (f, 1, 1, x->s)) \
    PAIR(DO, cuGraphLaunch, _ptsz, (CUgraphExec, CUstream), (exec_graph, x->s)) \
    PAIR(DO, cuGraphUpload, _ptsz, (CUgraphExec, CUstream), (exec_graph, x->s)) \
    FILL(DO, cuMemsetD8, unsigned char) FILL(DO, cuMemsetD16, unsigned short) FILL(DO, cuMemsetD32, unsigned) \
    FILL2D(DO, cuMemsetD2D8, unsigned char) FILL2D(DO, cuMemsetD2D16, unsigned short) FILL2D(DO, cuMemsetD2D32, unsigned) \
    COPY(DO, cuMemcpyHtoD, (P1, const void *, unsigned), (x->low, x->h, N), (P2, const void *, size_t), (x->p, x->h, N)) \
    COPY(DO, cuMemcpyDtoH, (void *, P1, unsigned), (x->h, x->low, N), (void *, P2, size_t), (x->h, x->p, N)) \
    COPY(DO, cuMemcpyDtoD, (P1, P1, unsigned), (x->low, x->low2, N), (P2, P2, size_t), (x->p, x->q, N)) \
    COPY(DO, cuMemcpyDtoA, (CUarray, unsigned, P1, unsigned), (x->a, 0, x->low, N), (CUarray, size_t, P2, size_t), (x->a, 0, x->p, N)) \
    COPY(DO, cuMemcpyAtoD, (P1, CUarray, unsigned, unsigned), (x->low, x->a, 0, N), (P2, CUarray, size_t, size_t), (x->p, x->a, 0, N)) \
    COPY(DO, cuMemcpyHtoA, (CUarray, unsigned, const void *, unsigned), (x->a, 0, x->h, N), (CUarray, size_t, const void *, size_t), \
         (x->a, 0, x->h, N)) \
    COPY(DO, cuMemcpyAtoH, (void *, CUarray, unsigned, unsigned), (x->h, x->a, 0, N), (void *, CUarray, size_t, size_t), \
         (x->h, x->a, 0, N)) \
    COPY(DO, cuMemcpyAtoA, (CUarray, unsigned, CUarray, unsigned, unsigned), (x->a, 0, x->b, 0, N), \
         (CUarray, size_t, CUarray, size_t, size_t), (x->a, 0, x->b, 0, N)) \
    COPY(DO, cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *), (&x->o2), (const CUDA_MEMCPY2D *), (&x->c2)) \
    COPY(DO, cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *), (&x->o2), (const CUDA_MEMCPY2D *), (&x->c2)) \
    COPY(DO, cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *), (&x->o3), (const CUDA_MEMCPY3D *), (&x->c3)) \
    PAIR(DO, cuMemcpy, _ptds, (P2, P2, size_t), (x->p, x->q, N)) \
    PAIR(DO, cuMemcpyPeer, _ptds, (P2, CUcontext, P2, CUcontext, size_t), (x->p, context, x->q, context, N)) \
    PAIR(DO, cuMemcpy3DPeer, _ptds, (const CUDA_MEMCPY3D_PEER *), (&x->peer)) \
    ACOPY(DO, cuMemcpyHtoDAsync, (P1, const void *, unsigned, CUstream), (x->low, x->h, N, x->s), \
          (P2, const void *, size_t, CUstream), (x->p, x->h, N, x->s)) \
    ACOPY(DO, cuMemcpyDtoHAsync, (void *, P1, unsigned, CUstream), (x->h, x->low, N, x->s), (void *, P2, size_t, CUstream), \
          (x->h, x->p, N, x->s)) \
    ACOPY(DO, cuMemcpyDtoDAsync, (P1, P1, unsigned, CUstream), (x->low, x->low2, N, x->s), (P2, P2, size_t, CUstream), \
          (x->p, x->q, N, x->s)) \
    ACOPY(DO, cuMemcpyHtoAAsync, (CUarray, unsigned, const void *, unsigned, CUstream), (x->a, 0, x->h, N, x->s), \
          (CUarray, size_t, const void *, size_t, CUstream), (x->a, 0, x->h, N, x->s)) \
    ACOPY(DO, cuMemcpyAtoHAsync, (void *, CUarray, unsigned, unsigned, CUstream), (x->h, x->a, 0, N, x->s), \
          (void *, CUarray, size_t, size_t, CUstream), (x->h, x->a, 0, N, x->s)) \
    ACOPY(DO, cuMemcpy2DAsync, (const CUDA_MEMCPY2D_v1 *, CUstream), (&x->o2, x->s), (const CUDA_MEMCPY2D *, CUstream), (&x->c2, x->s)) \
    ACOPY(DO, cuMemcpy3DAsync, (const CUDA_MEMCPY3D_v1 *, CUstream), (&x->o3, x->s), (const CUDA_MEMCPY3D *, CUstream), (&x->c3, x->s)) \
    PAIR(DO, cuMemcpyAsync, _ptsz, (P2, P2, size_t, CUstream), (x->p, x->q, N, x->s)) \
    PAIR(DO, cuMemcpyPeerAsync, _ptsz, (P2, CUcontext, P2, CUcontext, size_t, CUstream), (x->p, context, x->q, context, N, x->s)) \
    PAIR(DO, cuMemcpy3DPeerAsync, _ptsz, (const CUDA_MEMCPY3D_PEER *, CUstream), (&x->peer, x->s)) \
    PAIR(DO, cuMemcpyBatchAsync, _ptsz, (P2 *, P2 *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, size_t *, CUstream), \
         (&x->p, &x->q, &x->n, 1, &x->attributes, &x->index, 1, &x->failed, x->s)) \
    PAIR(DO, cuMemcpyBatchAsync_v2, _ptsz, (P2 *, P2 *, size_t *, size_t, CUmemcpyAttributes *, size_t *, size_t, CUstream), \
         (&x->p, &x->q, &x->n, 1, &x->attributes, &x->index, 1, x->s)) \
    PAIR(DO, cuMemcpy3DBatchAsync, _ptsz, (size_t, CUDA_MEMCPY3D_BATCH_OP *, size_t *, unsigned long long, CUstream), \
         (1, &x->op, &x->failed, 0, x->s)) \
    PAIR(DO, cuMemcpy3DBatchAsync_v2, _ptsz, (size_t, CUDA_MEMCPY3D_BATCH_OP *, unsigned long long, CUstream), (1, &x->op, 0, x->s)) \
    PAIR(DO, cuMemPrefetchAsync, _ptsz, (P2, size_t, CUdevice, CUstream), (x->p, N, 0, x->s)) \
    PAIR(DO, cuMemPrefetchAsync_v2, _ptsz, (P2, size_t, CUmemLocation, unsigned, CUstream), (x->p, N, x->where, 0, x->s)) \
    PAIR(DO, cuMemPrefetchBatchAsync, _ptsz, (P2 *, size_t *, size_t, CUmemLocation *, size_t *, size_t, unsigned long long, CUstream), \
         (&x->p, &x->n, 1, &x->where, &x->index, 1, 0, x->s)) \
    PAIR(DO, cuMemDiscardAndPrefetchBatchAsync, _ptsz, \
         (P2 *, size_t *, size_t, CUmemLocation *, size_t *, size_t, unsigned long long, CUstream), \
         (&x->p, &x->n, 1, &x->where, &x->index, 1, 0, x->s)) \
    PAIR(DO, cuMemBatchDecompressAsync, _ptsz, (void *, size_t, unsigned, size_t *, CUstream), (NULL, 0, 0, &x->failed, x->s))

#define PAIR(DO, name, end, args, call) DO(name, args, call) DO(name##end, args, call)
#define COPY(DO, name, old_args, old_call, args, call) \
    DO(name, old_args, old_call) DO(name##_v2, args, call) DO(name##_v2_ptds, args, call)
#define ACOPY(DO, name, old_args, old_call, args, call) \
    DO(name, old_args, old_call) DO(name##_v2, args, call) DO(name##_v2_ptsz, args, call)
#define FILL(DO, name, type) \
    COPY(DO, name, (P1, type, unsigned), (x->low, 1, 64), (P2, type, size_t), (x->p, 1, 64)) \
    PAIR(DO, name##Async, _ptsz, (P2, type, size_t, CUstream), (x->p, 1, 64, x->s))
#define FILL2D(DO, name, type) \
    COPY(DO, name, (P1, unsigned, type, unsigned, unsigned), (x->low, 64, 1, 8, 8), (P2, size_t, type, size_t, size_t), \
         (x->p, 64, 1, 8, 8)) \
    PAIR(DO, name##Async, _ptsz, (P2, size_t, type, size_t, size_t, CUstream), (x->p, 64, 1, 8, 8, x->s))

#define NAME(name, args, call) #name,
static const char *const names[] = {CALLS(NAME)};
#define NAMES (sizeof names / sizeof *names)

static CUresult call(const char *name, struct set *x)
{
#define CALL(which, args, with) \
    if (!strcmp(name, #which)) \
        return ((CUresult (*) args)sym(#which)) with;
    CALLS(CALL)
    return CUDA_ERROR_NOT_FOUND;
}

static struct set sets[NAMES];
static pthread_t threads[NAMES];

static void *one(void *arg)
{
    size_t i = (size_t)(uintptr_t)arg;
    REAL("cuCtxSetCurrent")(context);
    CUresult result = call(names[i], &sets[i]);
    printf("%s %d\n", names[i], (int)result);
    fflush(stdout);
    return NULL;
}

int main(int argc, char **argv)
{
    CUgraph graph;
    CUstream s;
    library = dlopen("libcuda.so.1", RTLD_NOW);
    if (!library || REAL("cuInit")(0u) || REAL("cuCtxCreate_v2")(&context, 0u, 0) ||
        REAL("cuModuleLoadData")(&module, "\x50\xed\x55\xba") || REAL("cuModuleGetFunction")(&f, module, "spin_us10") ||
        REAL("cuStreamCreate")(&s, 1u) || REAL("cuStreamBeginCapture_v2")(s, 1) ||
        REAL("cuStreamEndCapture")(s, &graph) || REAL("cuGraphInstantiateWithFlags")(&exec_graph, graph, 0ull))
        return 1;
    for (size_t i = 0; i < NAMES; i++)
        if (prepare(&sets[i]))
            return 2;
    for (size_t i = 0; i < NAMES; i++) {
        int wanted = argc < 2;
        for (int k = 1; k < argc; k++)
            wanted |= !strcmp(argv[k], names[i]);
        if (wanted && pthread_create(&threads[i], NULL, one, (void *)(uintptr_t)i))
            return 3;
    }
    for (size_t i = 0; i < NAMES; i++)
        if (threads[i])
            pthread_join(threads[i], NULL);
    printf("done 0\n");
    return 0;
}
