/* does.c: a CUDA program that does what it is told, a line at a time: "THREAD COMMAND [A [B [C]]]", a C program like any other to
 * the hook. A thread prints "THREAD COMMAND RESULT" when it is done; thread 0 exists from the start, others begin with their first
 * line, with device 0's context current. Streams: 0 legacy, 1 per-thread (by the _ptsz form), 2 to 7 of device 0 (6 and 7
 * blocking), 8 to 11 of device 1. Kernels are of the simulated driver: A microseconds. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/filter.h>
#include <linux/seccomp.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "cuda_min.h"

CUresult cuInit(unsigned);
CUresult cuDeviceGetCount(int *);
CUresult cuDevicePrimaryCtxRetain(CUcontext *, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxCreate_v2(CUcontext *, unsigned, CUdevice);
CUresult cuCtxSynchronize(void);
CUresult cuModuleLoadData(CUmodule *, const void *);
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamSynchronize(CUstream);
CUresult cuStreamWaitEvent(CUstream, CUevent, unsigned);
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
CUresult cuStreamEndCapture(CUstream, CUgraph *);
CUresult cuStreamAddCallback(CUstream, CUstreamCallback, void *, unsigned);
CUresult cuLaunchHostFunc(CUstream, CUhostFn, void *);
CUresult cuEventCreate(CUevent *, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventQuery(CUevent);
CUresult cuGraphCreate(CUgraph *, unsigned);
CUresult cuGraphAddHostNode(CUgraphNode *, CUgraph, const CUgraphNode *, size_t, const CUDA_HOST_NODE_PARAMS *);
CUresult cuGraphHostNodeGetParams(CUgraphNode, CUDA_HOST_NODE_PARAMS *);
CUresult cuGraphGetNodes(CUgraph, CUgraphNode *, size_t *);
CUresult cuGraphNodeGetType(CUgraphNode, CUgraphNodeType *);
CUresult cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuGraphUpload(CUgraphExec, CUstream);
CUresult cuMemAlloc_v2(CUdeviceptr *, size_t);
CUresult cuMemFree_v2(CUdeviceptr);
CUresult cuMemAllocHost_v2(void **, size_t);
CUresult cuMemcpyHtoD_v2(CUdeviceptr, const void *, size_t);
CUresult cuMemcpyDtoH_v2(void *, CUdeviceptr, size_t);
CUresult cuMemcpyHtoDAsync_v2(CUdeviceptr, const void *, size_t, CUstream);
CUresult cuMemcpyDtoHAsync_v2(void *, CUdeviceptr, size_t, CUstream);
CUresult cuMemsetD8Async(CUdeviceptr, unsigned char, size_t, CUstream);
CUresult cuDeviceGetDevResource(CUdevice, void *, int);
CUresult cuDevResourceGenerateDesc(CUdevResourceDesc *, void *, unsigned);
CUresult cuGreenCtxCreate(CUgreenCtx *, CUdevResourceDesc, CUdevice, unsigned);
CUresult cuGreenCtxDestroy(CUgreenCtx);
CUresult cuGreenCtxStreamCreate(CUstream *, CUgreenCtx, unsigned, int);
CUresult cuCtxFromGreenCtx(CUcontext *, CUgreenCtx);
CUresult cuLaunchGrid(CUfunction, int, int);
CUresult cuLaunch(CUfunction);
CUresult cuLaunchKernelEx(const CUlaunchConfig *, CUfunction, void **, void **);
CUresult cuLaunchCooperativeKernelMultiDevice(CUDA_LAUNCH_PARAMS *, unsigned, unsigned);
#define LAUNCH_ARGS CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **
CUresult cuLaunchKernel(LAUNCH_ARGS, void **);
CUresult cuLaunchKernel_ptsz(LAUNCH_ARGS, void **);
CUresult cuLaunchCooperativeKernel(LAUNCH_ARGS);

#define STREAMS 12
#define BYTES (1u << 20)

static CUcontext contexts[2];
static CUmodule modules[2];
static CUstream streams[STREAMS];
static CUevent events[8];
static CUgreenCtx greens[2];
static CUgraph graph;
static CUgraphExec execs[8];
static CUdeviceptr memory;
static void *pinned;
static int pipes[16][2];
static volatile int flag, ran;
static volatile CUresult in_callback = CUDA_ERROR_UNKNOWN;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static CUfunction kernel(int device, long us)
{
    char name[32];
    CUfunction function = NULL;
    snprintf(name, sizeof name, "spin_us%ld", us);
    cuModuleGetFunction(&function, modules[device], name);
    return function;
}

static CUresult launch(long s, long us)
{
    CUfunction f = kernel(s >= 8, us);
    if (s == 1)
        return cuLaunchKernel_ptsz(f, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    return cuLaunchKernel(f, 1, 1, 1, 1, 1, 1, 0, streams[s], NULL, NULL);
}

/* ---- host functions ---- */

static void call_launch(void *unused) { (void)unused; in_callback = launch(3, 10); ran++; }
static void call_alloc(void *unused)
{
    CUdeviceptr p;
    (void)unused;
    in_callback = cuMemAlloc_v2(&p, 4096);
    ran++;
}
static void call_wait(void *unused) /* for a thread that has something to launch first */
{
    (void)unused;
    while (!flag)
        usleep(1000);
    ran++;
}
static CUhostFn functions[] = {call_launch, call_alloc, call_wait};
static void callback(CUstream stream, CUresult status, void *data) { (void)stream, (void)status; functions[(intptr_t)data](NULL); }

/* ---- commands ---- */

static CUresult capture(long s, long n, long us)
{
    CUresult result = cuStreamBeginCapture_v2(streams[s], CU_STREAM_CAPTURE_MODE_THREAD_LOCAL);
    for (long i = 0; i < n && !result; i++)
        result = launch(s, us);
    result = result ? result : cuStreamEndCapture(streams[s], &graph);
    return result ? result : cuGraphInstantiateWithFlags(&execs[s % 8], graph, 0);
}

static CUresult count_nodes(long expected)
{
    size_t n = 0;
    CUresult result = cuGraphGetNodes(graph, NULL, &n);
    return result ? result : n == (size_t)expected ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
}

static CUresult host_nodes_are_ours(void)
{
    CUgraphNode nodes[64];
    size_t n = 64;
    CUresult result = cuGraphGetNodes(graph, nodes, &n);
    for (size_t i = 0; i < n && !result; i++) {
        CUgraphNodeType type;
        CUDA_HOST_NODE_PARAMS params;
        result = cuGraphNodeGetType(nodes[i], &type);
        if (!result && type == CU_GRAPH_NODE_TYPE_HOST) {
            result = cuGraphHostNodeGetParams(nodes[i], &params);
            if (!result && (params.fn != functions[0] || params.userData != (void *)42))
                result = CUDA_ERROR_UNKNOWN;
        }
    }
    return result;
}

static CUresult host_graph(long kind)
{
    CUDA_HOST_NODE_PARAMS params = {functions[kind], NULL};
    CUgraphNode node;
    CUresult result = cuGraphCreate(&graph, 0);
    result = result ? result : cuGraphAddHostNode(&node, graph, NULL, 0, &params);
    return result ? result : cuGraphInstantiateWithFlags(&execs[2], graph, 0);
}

static CUresult both_devices(long us)
{
    CUDA_LAUNCH_PARAMS list[2] = {
        {kernel(1, us), 1, 1, 1, 1, 1, 1, 0, streams[8], NULL}, {kernel(0, us), 1, 1, 1, 1, 1, 1, 0, streams[2], NULL}};
    return cuLaunchCooperativeKernelMultiDevice(list, 2, 0);
}

static CUresult busy(long s, long us, long ms) /* never synchronises */
{
    uint64_t end = now_ns() + (uint64_t)ms * 1000000u;
    CUresult result = CUDA_SUCCESS;
    while (now_ns() < end && !result)
        result = launch(s, us);
    return result;
}

static CUresult polling(long s, long us, long n)
{
    CUevent event;
    CUresult result = cuEventCreate(&event, CU_EVENT_DISABLE_TIMING);
    while (n-- && !result) {
        result = launch(s, us);
        result = result ? result : cuEventRecord(event, streams[s]);
        while (!result && (result = cuEventQuery(event)) == CUDA_ERROR_NOT_READY)
            result = CUDA_SUCCESS;
    }
    return result;
}

static CUresult synchronising(long s, long us, long n)
{
    CUresult result = CUDA_SUCCESS;
    while (n-- && !result) {
        result = launch(s, us);
        result = result ? result : cuStreamSynchronize(streams[s]);
    }
    return result;
}

/* n times: a capture of two streams joined by events, everything that can be captured in it. */
static CUresult captures(long mode, long n)
{
    CUresult result = CUDA_SUCCESS;
    CUevent fork, join;
    cuEventCreate(&fork, CU_EVENT_DISABLE_TIMING);
    cuEventCreate(&join, CU_EVENT_DISABLE_TIMING);
#define TRY(call) result = result ? result : (call)
    while (n-- && !result) {
        TRY(launch(4, 5));
        TRY(cuStreamBeginCapture_v2(streams[4], (CUstreamCaptureMode)mode));
        TRY(launch(4, 10));
        TRY(cuEventRecord(fork, streams[4]));
        TRY(cuStreamWaitEvent(streams[5], fork, 0));
        TRY(launch(5, 10));
        TRY(cuMemsetD8Async(memory, 1, 4096, streams[5]));
        TRY(cuMemcpyDtoHAsync_v2(pinned, memory, 4096, streams[5]));
        TRY(cuEventRecord(join, streams[5]));
        TRY(cuLaunchHostFunc(streams[4], functions[0], (void *)42));
        TRY(cuStreamWaitEvent(streams[4], join, 0));
        TRY(launch(4, 10));
        TRY(cuStreamEndCapture(streams[4], &graph));
        TRY(count_nodes(6));
    }
    return result;
}

/* A green context with all that the device has; stream `s` is one of its own from now on. */
static CUresult green(long g, long s)
{
    char resource[144];
    CUdevResourceDesc desc;
    CUresult result = cuDeviceGetDevResource(0, resource, 1);
    result = result ? result : cuDevResourceGenerateDesc(&desc, resource, 1);
    result = result ? result : cuGreenCtxCreate(&greens[g], desc, 0, 1);
    return result ? result : cuGreenCtxStreamCreate(&streams[s], greens[g], CU_STREAM_NON_BLOCKING, 0);
}

static CUresult green_current(long g)
{
    CUcontext context;
    CUresult result = cuCtxFromGreenCtx(&context, greens[g]);
    return result ? result : cuCtxSetCurrent(context);
}

static CUresult copies(long n, long bytes)
{
    CUresult result = CUDA_SUCCESS;
    void *pageable = malloc((size_t)bytes);
    memset(pageable, 7, (size_t)bytes);
    while (n-- && !result) {
        TRY(cuMemcpyHtoD_v2(memory, pageable, (size_t)bytes));
        TRY(cuMemcpyHtoDAsync_v2(memory, pageable, (size_t)bytes, streams[2]));
        TRY(cuMemcpyDtoHAsync_v2(pageable, memory, (size_t)bytes, streams[2]));
        TRY(cuMemcpyDtoH_v2(pageable, memory, (size_t)bytes));
    }
    result = result ? result : ((char *)pageable)[bytes - 1] == 7 ? CUDA_SUCCESS : CUDA_ERROR_UNKNOWN;
    free(pageable);
    return result;
}

static CUresult run(const char *what, long a, long b, long c)
{
#define IS(name) (!strcmp(what, name))
    if (IS("launch")) return launch(a, b);
    if (IS("launches")) { CUresult result = CUDA_SUCCESS; while (c-- && !result) result = launch(a, b); return result; }
    if (IS("coop")) return cuLaunchCooperativeKernel(kernel(0, b), 1, 1, 1, 1, 1, 1, 0, streams[a], NULL);
    if (IS("ex")) return cuLaunchKernelEx(&(CUlaunchConfig){1, 1, 1, 1, 1, 1, 0, streams[a], NULL, 0}, kernel(0, b), NULL, NULL);
    if (IS("both")) return both_devices(a);
    if (IS("capture")) return capture(a, b, c);
    if (IS("graph")) return cuGraphLaunch(execs[a % 8], streams[a]);
    if (IS("upload")) return cuGraphUpload(execs[a % 8], streams[a]);
    if (IS("hostgraph")) return host_graph(a);
    if (IS("captures")) return captures(a, b);
    if (IS("begin")) return cuStreamBeginCapture_v2(streams[a], (CUstreamCaptureMode)b);
    if (IS("end")) return cuStreamEndCapture(streams[a], &graph);
    if (IS("nodes")) return count_nodes(a);
    if (IS("ownhost")) return host_nodes_are_ours();
    if (IS("record")) return cuEventRecord(events[a], streams[b]);
    if (IS("wait")) return cuStreamWaitEvent(streams[b], events[a], 0);
    if (IS("host")) return cuLaunchHostFunc(streams[a], functions[b], NULL);
    if (IS("callback")) return cuStreamAddCallback(streams[a], callback, (void *)(intptr_t)b, 0);
    if (IS("called")) { while (ran < a) usleep(1000); return in_callback; }
    if (IS("flag")) { flag = (int)a; return CUDA_SUCCESS; }
    if (IS("sync")) return cuCtxSynchronize();
    if (IS("ssync")) return cuStreamSynchronize(streams[a]);
    if (IS("busy")) return busy(a, b, c);
    if (IS("polling")) return polling(a, b, c);
    if (IS("synchronising")) return synchronising(a, b, c);
    if (IS("copies")) return copies(a, b);
    if (IS("dtoh")) return cuMemcpyDtoH_v2(pinned, memory, (size_t)a);
    if (IS("memset")) return cuMemsetD8Async(memory, 1, (size_t)b, streams[a]);
    if (IS("context")) return cuCtxSetCurrent(a < 0 ? NULL : contexts[a]);
    if (IS("green")) return green(a, b);
    if (IS("greencurrent")) return green_current(a);
    if (IS("greenend")) return cuGreenCtxDestroy(greens[a]);
    if (IS("another")) { CUcontext one; return cuCtxCreate_v2(&one, 0, (CUdevice)a); }
    if (IS("fills")) {
        uint64_t end = now_ns() + (uint64_t)b * 1000000u;
        CUresult result = CUDA_SUCCESS;
        while (now_ns() < end && !result)
            result = cuMemsetD8Async(memory, 1, 64 * BYTES, streams[a]);
        return result;
    }
    if (IS("cancelled")) { /* the end has been asked for, and the next cancellation point brings it: not one of ours */
        pthread_cancel(pthread_self());
        CUresult result = launch(a, b);
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, NULL);
        return result;
    }
    if (IS("alloc")) { CUdeviceptr p; return cuMemAlloc_v2(&p, (size_t)a); }
    return CUDA_ERROR_NOT_FOUND;
}

static void *thread(void *arg)
{
    int me = (int)(intptr_t)arg;
    char line[256];
    FILE *in = fdopen(pipes[me][0], "r");
    cuCtxSetCurrent(contexts[0]);
    while (fgets(line, sizeof line, in)) {
        char what[64];
        long a = 0, b = 0, c = 0;
        if (sscanf(line, "%63s %ld %ld %ld", what, &a, &b, &c) < 1)
            continue;
        if (!strcmp(what, "end-thread"))
            break;
        if (!strcmp(what, "exit")) /* the whole process, from this thread */
            exit((int)a);
        int result = (int)run(what, a, b, c);
        printf("%d %s %d\n", me, what, result);
        fflush(stdout);
    }
    return NULL;
}

/* From here on the kernel has no membarrier(), as in a container whose seccomp profile does not know it. */
static void forbid_membarrier(void)
{
    struct sock_filter filter[] = {
        BPF_STMT(BPF_LD | BPF_W | BPF_ABS, offsetof(struct seccomp_data, nr)),
        BPF_JUMP(BPF_JMP | BPF_JEQ | BPF_K, SYS_membarrier, 0, 1),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ERRNO | ENOSYS),
        BPF_STMT(BPF_RET | BPF_K, SECCOMP_RET_ALLOW),
    };
    struct sock_fprog program = {sizeof filter / sizeof *filter, filter};
    if (prctl(PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0) || prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, &program) ||
        syscall(SYS_membarrier, 0, 0, 0) != -1)
        exit(9);
}

int main(void)
{
    char line[256];
    if (getenv("DOES_WITHOUT_MEMBARRIER"))
        forbid_membarrier();
    int devices = 0;
    if (cuInit(0) || cuDeviceGetCount(&devices))
        return 1;
    for (int d = devices > 1; d >= 0; d--) {
        if (cuDevicePrimaryCtxRetain(&contexts[d], d) || cuCtxSetCurrent(contexts[d]) ||
            cuModuleLoadData(&modules[d], "\x50\xed\x55\xba"))
            return 2;
        for (int s = d ? 8 : 2; s < (d ? 12 : 8); s++)
            if (cuStreamCreate(&streams[s], s == 6 || s == 7 ? 0 : CU_STREAM_NON_BLOCKING))
                return 3;
    }
    for (int i = 0; i < 8; i++)
        cuEventCreate(&events[i], CU_EVENT_DISABLE_TIMING);
    if (cuMemAlloc_v2(&memory, 64 * BYTES) || cuMemAllocHost_v2(&pinned, 64 * BYTES))
        return 4;
    for (int i = 0; i < 16; i++)
        if (pipe(pipes[i]))
            return 5;
    pthread_t threads[16];
    int made[16] = {0};
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        char *rest;
        long which = strtol(line, &rest, 10);
        if (!strncmp(line, "quit", 4))
            break;
        if (which < 0 || which > 15 || *rest != ' ')
            continue;
        if (!made[which]) {
            made[which] = 1;
            pthread_create(&threads[which], NULL, thread, (void *)(intptr_t)which);
        }
        ssize_t n = write(pipes[which][1], rest + 1, strlen(rest + 1));
        (void)n;
        if (!strncmp(rest + 1, "end-thread", 10)) {
            pthread_join(threads[which], NULL);
            made[which] = 0;
            printf("%ld end-thread 0\n", which);
            fflush(stdout);
        }
    }
    return 0;
}
