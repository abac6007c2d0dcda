/* pairs.c: kernels on two GPUs that wait for each other, launched in turn by one thread or by one for each GPU.
 *
 *     pairs KERNEL_US THREADS SECONDS
 *
 * Writes how many pairs ended to stdout. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

typedef void *CUfunction, *CUstream, *CUcontext, *CUmodule, *CUevent;
int cuInit(unsigned);
int cuCtxCreate_v2(CUcontext *, unsigned, int);
int cuCtxSetCurrent(CUcontext);
int cuStreamCreate(CUstream *, unsigned);
int cuStreamSynchronize(CUstream);
int cuEventCreate(CUevent *, unsigned);
int cuEventRecord(CUevent, CUstream);
int cuEventSynchronize(CUevent);
int cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
int cuModuleLoadData(CUmodule *, const void *);
int cuModuleGetFunction(CUfunction *, CUmodule, const char *);

#define DEPTH 4 /* pairs in flight */
static CUcontext context[2];
static CUstream stream[2];
static CUfunction kernel[2];
static CUevent event[2][DEPTH];
static double end;
static int turns = 2; /* by one thread */
static long pairs[2];
static volatile long last = 1000000;

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + (double)t.tv_nsec * 1e-9;
}

static void one(int gpu, long n)
{
    if (turns == 2)
        cuCtxSetCurrent(context[gpu]);
    if (n >= DEPTH)
        cuEventSynchronize(event[gpu][n % DEPTH]);
    if (cuLaunchKernel(kernel[gpu], 1, 1, 1, 1, 1, 1, 0, stream[gpu], NULL, NULL) ||
        cuEventRecord(event[gpu][n % DEPTH], stream[gpu]))
        exit(1);
    pairs[gpu] = n + 1;
}

static void *side(void *number)
{
    int gpu = (int)(intptr_t)number;
    cuCtxSetCurrent(context[gpu]);
    /* both sides do the same number, or the last one would wait for ever; neither is more than DEPTH ahead */
    for (long n = 0; n < last; n++) {
        if (gpu == 0 && last == 1000000 && now() >= end)
            last = n + 2 * DEPTH;
        one(gpu, n);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    char name[64], ptx[256];
    snprintf(name, sizeof name, "cgpu_pair_us%ld", atol(argv[1]));
    snprintf(ptx, sizeof ptx, ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry %s()\n{\n ret;\n}\n", name);
    if (cuInit(0))
        return 1;
    for (int gpu = 0; gpu < 2; gpu++) {
        CUmodule module;
        if (cuCtxCreate_v2(&context[gpu], 0, gpu) || cuStreamCreate(&stream[gpu], 1) || cuModuleLoadData(&module, ptx) ||
            cuModuleGetFunction(&kernel[gpu], module, name))
            return 1;
        for (int k = 0; k < DEPTH; k++)
            cuEventCreate(&event[gpu][k], 2);
    }
    end = now() + atof(argv[3]);
    if (atoi(argv[2]) == 2) {
        pthread_t thread;
        turns = 1;
        pthread_create(&thread, NULL, side, (void *)1);
        side((void *)0);
        pthread_join(thread, NULL);
    } else {
        for (long n = 0; now() < end; n++) {
            one(0, n);
            one(1, n);
        }
    }
    for (int gpu = 0; gpu < 2; gpu++) {
        cuCtxSetCurrent(context[gpu]);
        cuStreamSynchronize(stream[gpu]);
    }
    printf("%ld\n", pairs[0]);
    return 0;
}
