/* load.c: keeps the device busy in one of several ways, for the benchmark.
 *
 *     load -k KERNEL_US [-s SYNC_US] [-g] [-b WORK_US:PERIOD_US] [-G KERNELS] [-p MEAN_US] -t SECONDS
 *
 * Kernels of KERNEL_US in one stream, launched as fast as the driver takes them; its full queue is all that holds them back.
 *   -s  synchronises after the first kernel past SYNC_US of work
 *   -g  a grid in proportion to the kernel's length, a block a microsecond; else one block
 *   -b  bursts: every PERIOD_US it wants WORK_US of the device, synchronises, and rests until the next period begins
 *   -G  launches graphs of so many kernels
 *   -p  a latency probe: one kernel and a synchronise about every MEAN_US (half to one and a half of it, at random). At the end
 *       it prints each latency in ns, launch to synchronised, one a line */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define PROBES 100000

typedef void *CUfunction, *CUstream, *CUcontext, *CUmodule, *CUgraph, *CUgraphExec;
int cuInit(unsigned);
int cuCtxCreate_v2(CUcontext *, unsigned, int);
int cuStreamCreate(CUstream *, unsigned);
int cuStreamSynchronize(CUstream);
int cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
int cuModuleLoadData(CUmodule *, const void *);
int cuModuleGetFunction(CUfunction *, CUmodule, const char *);
int cuStreamBeginCapture_v2(CUstream, int);
int cuStreamEndCapture(CUstream, CUgraph *);
int cuGraphInstantiateWithFlags(CUgraphExec *, CUgraph, unsigned long long);
int cuGraphLaunch(CUgraphExec, CUstream);

static long kernel_us, sync_us, work_us, period_us, graph_kernels, probe_us, blocks = 1;
static double seconds;
static CUstream stream;
static CUfunction kernel;
static CUgraphExec exec_graph;

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void until(uint64_t when)
{
    struct timespec t = {(time_t)(when / 1000000000u), (long)(when % 1000000000u)};
    while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL))
        ;
}

static void fail(const char *what)
{
    fprintf(stderr, "load: %s failed\n", what);
    exit(1);
}

static void launch_one(void)
{
    if (cuLaunchKernel(kernel, (unsigned)blocks, 1, 1, 1, 1, 1, 0, stream, NULL, NULL))
        fail("a launch");
}

/* Gives how much work it was, in us. */
static long launch(void)
{
    if (!graph_kernels) {
        launch_one();
        return kernel_us;
    }
    if (cuGraphLaunch(exec_graph, stream))
        fail("a graph's launch");
    return kernel_us * graph_kernels;
}

static void capture(void)
{
    CUgraph graph;
    if (cuStreamBeginCapture_v2(stream, 0))
        fail("a capture");
    for (long i = 0; i < graph_kernels; i++)
        launch_one();
    if (cuStreamEndCapture(stream, &graph) || cuGraphInstantiateWithFlags(&exec_graph, graph, 0))
        fail("a capture");
}

static void bursts(uint64_t end)
{
    uint64_t next = now();
    while (now() < end) {
        for (long done = 0; done < work_us;)
            done += launch();
        cuStreamSynchronize(stream);
        next += (uint64_t)period_us * 1000;
        if (next < now())
            next = now();
        until(next);
    }
}

static void probe(uint64_t end)
{
    static uint64_t took[PROBES];
    uint64_t random = 88172645463325252u;
    long count = 0;
    while (now() < end && count < PROBES) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        until(now() + (uint64_t)probe_us * 500 + random % ((uint64_t)probe_us * 1000));
        uint64_t start = now();
        launch();
        cuStreamSynchronize(stream);
        took[count++] = now() - start;
    }
    for (long i = 0; i < count; i++)
        printf("%lu\n", (unsigned long)took[i]);
}

int main(int argc, char **argv)
{
    CUcontext context;
    CUmodule module;
    char name[64], ptx[256];
    for (int option; (option = getopt(argc, argv, "k:s:gb:G:p:t:")) != -1;)
        switch (option) {
        case 'k': kernel_us = atol(optarg); break;
        case 's': sync_us = atol(optarg); break;
        case 'g': blocks = 0; break;
        case 'b':
            if (sscanf(optarg, "%ld:%ld", &work_us, &period_us) != 2)
                return 2;
            break;
        case 'G': graph_kernels = atol(optarg); break;
        case 'p': probe_us = atol(optarg); break;
        case 't': seconds = atof(optarg); break;
        default: return 2;
        }
    if (kernel_us < 1 || seconds <= 0)
        return 2;
    blocks = blocks ? blocks : kernel_us;
    snprintf(name, sizeof name, "spin_us%ld", kernel_us);
    snprintf(ptx, sizeof ptx, ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry %s()\n{\n ret;\n}\n", name);
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuStreamCreate(&stream, 1) || cuModuleLoadData(&module, ptx) ||
        cuModuleGetFunction(&kernel, module, name))
        fail("the start");
    if (graph_kernels)
        capture();
    uint64_t end = now() + (uint64_t)(seconds * 1e9);
    if (probe_us)
        probe(end);
    else if (period_us)
        bursts(end);
    else
        for (long queued = 0; now() < end;) {
            queued += launch();
            if (sync_us && queued >= sync_us) {
                queued = 0;
                cuStreamSynchronize(stream);
            }
        }
    return 0;
}
