/* probe.h: the CUDA driver API for the programs beside it, without the toolkit: libcuda.so.1 is opened by name, as CUDA
 * runtimes do, so LD_LIBRARY_PATH alone decides whether the proxies stand before it. Kernels are PTX text, which the
 * driver compiles; the simulated device takes their length from their name and computes nothing.
 *
 *   spin_us<N>(stamps)      lasts N us by the GPU's own clock; stores its start and end at `stamps` unless that is 0
 *   flag_ms<N>(flag)        lasts until the word at `flag` is not 0 (simulated: N ms)
 *   fma_us<N>(count)        `count` multiply-adds of each thread: arithmetic that cannot be hurried (simulated: N us)
 *   count_us<N>(sum)        adds 1 to the word at `sum`
 *   cgpu_null()             nothing */
#ifndef PROBE_H
#define PROBE_H
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "cuda_min.h"

#define CALLS(X) \
    X(cuInit, "", (unsigned)) \
    X(cuGetErrorName, "", (CUresult, const char **)) \
    X(cuDeviceGetAttribute, "", (int *, CUdevice_attribute, CUdevice)) \
    X(cuDeviceTotalMem, "_v2", (size_t *, CUdevice)) \
    X(cuDevicePrimaryCtxRetain, "", (CUcontext *, CUdevice)) \
    X(cuCtxSetCurrent, "", (CUcontext)) \
    X(cuCtxSynchronize, "", (void)) \
    X(cuMemGetInfo, "_v2", (size_t *, size_t *)) \
    X(cuMemAlloc, "_v2", (CUdeviceptr *, size_t)) \
    X(cuMemFree, "_v2", (CUdeviceptr)) \
    X(cuMemHostAlloc, "", (void **, size_t, unsigned)) \
    X(cuMemHostGetDevicePointer, "_v2", (CUdeviceptr *, void *, unsigned)) \
    X(cuMemsetD32, "_v2", (CUdeviceptr, unsigned, size_t)) \
    X(cuMemcpyDtoH, "_v2", (void *, CUdeviceptr, size_t)) \
    X(cuModuleLoadData, "", (CUmodule *, const void *)) \
    X(cuModuleGetFunction, "", (CUfunction *, CUmodule, const char *)) \
    X(cuStreamCreate, "", (CUstream *, unsigned)) \
    X(cuStreamSynchronize, "", (CUstream)) \
    X(cuStreamBeginCapture, "_v2", (CUstream, CUstreamCaptureMode)) \
    X(cuStreamEndCapture, "", (CUstream, CUgraph *)) \
    X(cuGraphInstantiateWithFlags, "", (CUgraphExec *, CUgraph, unsigned long long)) \
    X(cuGraphLaunch, "", (CUgraphExec, CUstream)) \
    X(cuLaunchKernel, "", (CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, \
                           void **, void **))
#define DECLARE(name, suffix, parameters) static CUresult (*name) parameters __attribute__((unused));
CALLS(DECLARE)

static inline void must(CUresult result, const char *what)
{
    const char *name = "?";
    if (result == CUDA_SUCCESS)
        return;
    if (cuGetErrorName)
        cuGetErrorName(result, &name);
    fprintf(stderr, "%s: %s (%d)\n", what, name, (int)result);
    exit(1);
}

static inline uint64_t clock_of(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static inline uint64_t now(void) { return clock_of(CLOCK_MONOTONIC); }

/* Opens the driver and makes device 0's primary context current. */
static inline void probe_start(void)
{
    CUcontext context;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW | RTLD_GLOBAL);
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        exit(1);
    }
#define FIND(name, suffix, parameters) \
    *(void **)&name = dlsym(driver, #name suffix); \
    if (!name) { \
        fprintf(stderr, "the driver has no %s\n", #name suffix); \
        exit(1); \
    }
    CALLS(FIND)
#undef FIND
    must(cuInit(0), "cuInit");
    must(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    must(cuCtxSetCurrent(context), "cuCtxSetCurrent");
}

static const char *const PTX_SPIN =
    ".visible .entry %s(.param .u64 stamps)\n{\n"
    "    .reg .pred %%p; .reg .u64 %%start, %%end, %%now, %%out;\n"
    "    ld.param.u64 %%out, [stamps];\n"
    "    mov.u64 %%start, %%globaltimer;\n"
    "    add.u64 %%end, %%start, %ld000;\n"
    "again:\n"
    "    mov.u64 %%now, %%globaltimer;\n"
    "    setp.lt.u64 %%p, %%now, %%end;\n"
    "    @%%p bra again;\n"
    "    setp.eq.u64 %%p, %%out, 0;\n"
    "    @%%p bra done;\n"
    "    cvta.to.global.u64 %%out, %%out;\n"
    "    st.global.u64 [%%out], %%start;\n"
    "    st.global.u64 [%%out+8], %%now;\n"
    "done:\n"
    "    ret;\n}\n";
static const char *const PTX_FLAG =
    ".visible .entry %s(.param .u64 flag)\n{\n"
    "    .reg .pred %%p; .reg .u64 %%at; .reg .u32 %%word;\n"
    "    ld.param.u64 %%at, [flag];\n"
    "    cvta.to.global.u64 %%at, %%at;\n"
    "again:\n"
    "    ld.volatile.global.u32 %%word, [%%at];\n"
    "    setp.eq.u32 %%p, %%word, 0;\n"
    "    @%%p bra again;\n"
    "    ret;\n}\n";
static const char *const PTX_FMA =
    ".visible .entry %s(.param .u64 count)\n{\n"
    "    .reg .pred %%p; .reg .u64 %%left; .reg .f32 %%a, %%b;\n"
    "    ld.param.u64 %%left, [count];\n"
    "    mov.f32 %%a, 0f3F800001; mov.f32 %%b, 0f3F800001;\n"
    "again:\n"
    "    fma.rn.f32 %%b, %%a, %%b, %%a;\n"
    "    sub.u64 %%left, %%left, 1;\n"
    "    setp.ne.u64 %%p, %%left, 0;\n"
    "    @%%p bra again;\n"
    "    setp.eq.f32 %%p, %%b, 0f00000000;\n" /* never: the result must seem to matter */
    "    @%%p trap;\n"
    "    ret;\n}\n";
static const char *const PTX_COUNT =
    ".visible .entry %s(.param .u64 sum)\n{\n"
    "    .reg .u64 %%at; .reg .u32 %%old;\n"
    "    ld.param.u64 %%at, [sum];\n"
    "    cvta.to.global.u64 %%at, %%at;\n"
    "    atom.global.add.u32 %%old, [%%at], 1;\n"
    "    ret;\n}\n";
static const char *const PTX_NULL = ".visible .entry %s()\n{\n    ret;\n}\n";

/* A kernel of that text and name; `number` goes where the text has one. */
static inline CUfunction probe_kernel(const char *text, const char *name, long number)
{
    /* the oldest target first: it does for any card, unless the driver no longer knows it */
    static const char *const heads[] = {".version 6.0\n.target sm_50\n.address_size 64\n",
                                        ".version 7.0\n.target sm_75\n.address_size 64\n",
                                        ".version 8.0\n.target sm_90\n.address_size 64\n"};
    char ptx[2048];
    CUmodule module;
    CUfunction function;
    CUresult result = CUDA_ERROR_INVALID_PTX;
    for (size_t i = 0; result && i < sizeof heads / sizeof *heads; i++) {
        size_t length = (size_t)snprintf(ptx, sizeof ptx, "%s", heads[i]);
        /* the texts above and no other: each takes a name and at most one number */
#pragma GCC diagnostic ignored "-Wformat-nonliteral"
        snprintf(ptx + length, sizeof ptx - length, text, name, number);
        result = cuModuleLoadData(&module, ptx);
    }
    must(result, name);
    must(cuModuleGetFunction(&function, module, name), name);
    return function;
}

static inline void probe_launch(CUfunction function, unsigned grid, unsigned block, CUstream stream, uint64_t argument)
{
    void *parameters[] = {&argument};
    must(cuLaunchKernel(function, grid, 1, 1, block, 1, 1, 0, stream, parameters, NULL), "cuLaunchKernel");
}
#endif
