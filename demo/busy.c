/* busy.c: keeps the GPU busy through the CUDA driver API alone, as an ordinary program would, and says once a second how
 * much it got. It knows nothing of cgpufs.
 *
 *     busy MICROSECONDS SECONDS [MIB]     kernels that last so long, for so long, beside an allocation of so much
 *
 * Needs no CUDA toolkit: it opens libcuda.so.1 itself and declares the few calls it makes. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

typedef int CUresult;
typedef unsigned long long CUdeviceptr;
typedef void *CUcontext, *CUmodule, *CUfunction, *CUstream;

static CUresult (*cuInit)(unsigned);
static CUresult (*cuDevicePrimaryCtxRetain)(CUcontext *, int);
static CUresult (*cuCtxSetCurrent)(CUcontext);
static CUresult (*cuModuleLoadData)(CUmodule *, const void *);
static CUresult (*cuModuleGetFunction)(CUfunction *, CUmodule, const char *);
static CUresult (*cuLaunchKernel)(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned,
                                  CUstream, void **, void **);
static CUresult (*cuCtxSynchronize)(void);
static CUresult (*cuMemAlloc)(CUdeviceptr *, size_t);
static CUresult (*cuGetErrorName)(CUresult, const char **);

static void check(CUresult r, const char *what)
{
    const char *name = "?";
    if (r == 0)
        return;
    if (cuGetErrorName)
        cuGetErrorName(r, &name);
    fprintf(stderr, "busy: %s: %s (%d)\n", what, name, r);
    exit(1);
}

static void find(void *driver, void *slot, const char *name)
{
    void *address = dlsym(driver, name);
    if (!address) {
        fprintf(stderr, "busy: the driver has no %s\n", name);
        exit(1);
    }
    memcpy(slot, &address, sizeof address);
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

/* A kernel that spins on the GPU's own clock. Its name tells the simulated device how long it lasts. */
static const char *const PTX =
    ".version 7.0\n.target sm_52\n.address_size 64\n"
    ".visible .entry spin_us%ld()\n{\n"
    "    .reg .pred %%p; .reg .u64 %%start, %%end, %%now;\n"
    "    mov.u64 %%start, %%globaltimer;\n"
    "    add.u64 %%end, %%start, %ld000;\n"
    "again:\n"
    "    mov.u64 %%now, %%globaltimer;\n"
    "    setp.lt.u64 %%p, %%now, %%end;\n"
    "    @%%p bra again;\n"
    "    ret;\n}\n";

int main(int argc, char **argv)
{
    if (argc < 3) {
        fprintf(stderr, "usage: busy MICROSECONDS SECONDS [MIB]\n");
        return 2;
    }
    long us = atol(argv[1]);
    double seconds = atof(argv[2]);
    size_t mib = argc > 3 ? (size_t)atol(argv[3]) : 0;
    void *driver = dlopen("libcuda.so.1", RTLD_NOW);
    if (!driver) {
        fprintf(stderr, "busy: %s\n", dlerror());
        return 1;
    }
    find(driver, &cuInit, "cuInit");
    find(driver, &cuGetErrorName, "cuGetErrorName");
    find(driver, &cuDevicePrimaryCtxRetain, "cuDevicePrimaryCtxRetain");
    find(driver, &cuCtxSetCurrent, "cuCtxSetCurrent");
    find(driver, &cuModuleLoadData, "cuModuleLoadData");
    find(driver, &cuModuleGetFunction, "cuModuleGetFunction");
    find(driver, &cuLaunchKernel, "cuLaunchKernel");
    find(driver, &cuCtxSynchronize, "cuCtxSynchronize");
    find(driver, &cuMemAlloc, "cuMemAlloc_v2");

    CUcontext context;
    CUmodule module;
    CUfunction kernel;
    CUdeviceptr memory;
    char ptx[1024], name[64];
    snprintf(ptx, sizeof ptx, PTX, us, us);
    snprintf(name, sizeof name, "spin_us%ld", us);
    check(cuInit(0), "cuInit");
    check(cuDevicePrimaryCtxRetain(&context, 0), "cuDevicePrimaryCtxRetain");
    check(cuCtxSetCurrent(context), "cuCtxSetCurrent");
    if (mib)
        check(cuMemAlloc(&memory, mib << 20), "cuMemAlloc");
    check(cuModuleLoadData(&module, ptx), "cuModuleLoadData");
    check(cuModuleGetFunction(&kernel, module, name), "cuModuleGetFunction");

    double start = now(), mark = start;
    long done = 0, batch = us >= 10000 ? 1 : 10000 / us; /* synchronise about every 10 ms of work */
    while (now() - start < seconds) {
        for (long i = 0; i < batch; i++)
            check(cuLaunchKernel(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        check(cuCtxSynchronize(), "cuCtxSynchronize");
        done += batch;
        double t = now();
        if (t - mark >= 1) {
            printf("%ld kernels, %.0f ms of the GPU a second\n", done, (double)(done * us) / 1000 / (t - mark));
            fflush(stdout);
            done = 0;
            mark = t;
        }
    }
    return 0;
}
