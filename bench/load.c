/* load.c: keeps the device busy, for the benchmark.
 *
 *     load KERNEL_US SYNC SECONDS
 *
 * Kernels of KERNEL_US in one stream. SYNC 1: synchronises after the first kernel past 10 ms of work; 0: never, the driver's
 * full queue is all that holds it back. */
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef void *CUfunction, *CUstream, *CUcontext, *CUmodule;
int cuInit(unsigned);
int cuCtxCreate_v2(CUcontext *, unsigned, int);
int cuStreamCreate(CUstream *, unsigned);
int cuStreamSynchronize(CUstream);
int cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
int cuModuleLoadData(CUmodule *, const void *);
int cuModuleGetFunction(CUfunction *, CUmodule, const char *);

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    long us = atol(argv[1]), queued = 0;
    int sync = atoi(argv[2]);
    double end = now() + atof(argv[3]);
    CUcontext context;
    CUstream stream;
    CUmodule module;
    CUfunction kernel;
    char name[64], ptx[256];
    snprintf(name, sizeof name, "spin_us%ld", us);
    snprintf(ptx, sizeof ptx, ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry %s()\n{\n ret;\n}\n", name);
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuStreamCreate(&stream, 0) || cuModuleLoadData(&module, ptx) ||
        cuModuleGetFunction(&kernel, module, name)) {
        fprintf(stderr, "load: the driver refused to start\n");
        return 1;
    }
    while (now() < end) {
        if (cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL))
            return 1;
        if (sync && (queued += us) >= 10000) {
            queued = 0;
            cuStreamSynchronize(stream);
        }
    }
    return 0;
}
