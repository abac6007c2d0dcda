/* busy.c: launches kernels for ever.  busy KERNEL_NS SYNC_NS SECONDS; SYNC_NS 0 = never synchronises. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#include "cuda_min.h"

CUresult cuInit(unsigned);
CUresult cuCtxCreate_v2(CUcontext *, unsigned, CUdevice);
CUresult cuCtxSynchronize(void);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamSynchronize(CUstream);
CUresult cuEventCreate(CUevent *, unsigned);
CUresult cuEventRecord(CUevent, CUstream);
CUresult cuEventSynchronize(CUevent);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
CUresult cuModuleLoadData(CUmodule *, const void *) __attribute__((weak)); /* the test's driver has none */
CUresult cuModuleGetFunction(CUfunction *, CUmodule, const char *) __attribute__((weak));

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

#define DEPTH 1024 /* a driver blocks in a launch when its queue is full; the test's driver does not */

int main(int argc, char **argv)
{
    uint64_t ns = argc > 1 ? strtoull(argv[1], NULL, 10) : 100000, sync = argc > 2 ? strtoull(argv[2], NULL, 10) : 0;
    uint64_t end = now_ns() + (argc > 3 ? strtoull(argv[3], NULL, 10) : 1) * 1000000000u, queued = 0;
    CUcontext context;
    CUstream stream;
    CUevent ring[DEPTH];
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0) || cuStreamCreate(&stream, 0))
        return 1;
    CUfunction kernel = (CUfunction)(uintptr_t)ns;
    if (cuModuleLoadData) { /* the simulated device: the name says how long it lasts */
        CUmodule module;
        char name[64], text[256];
        snprintf(name, sizeof name, "spin_ns%llu", (unsigned long long)ns);
        snprintf(text, sizeof text, ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry %s() { ret; }\n", name);
        if (cuModuleLoadData(&module, text) || cuModuleGetFunction(&kernel, module, name))
            return 1;
    }
    for (int i = 0; i < DEPTH; i++)
        cuEventCreate(&ring[i], 2);
    for (uint64_t i = 0; now_ns() < end; i++) {
        if (!sync && i >= DEPTH)
            cuEventSynchronize(ring[i % DEPTH]);
        if (cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL))
            return 1;
        if (!sync)
            cuEventRecord(ring[i % DEPTH], stream);
        else if ((queued += ns) >= sync) {
            queued = 0;
            cuStreamSynchronize(stream);
        }
    }
    return 0;
}
