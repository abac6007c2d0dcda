/* launch_overhead.c: what cuLaunchKernel costs the launching thread.
 *
 *     launch_overhead THREADS [LAUNCHES [REPEATS]]
 *
 * Prints the median over the repeats of the ns per launch, in thread CPU time and in wall time, one line a thread:
 * "thread 0 cpu_ns 2.31 wall_ns 2.35". Run it twice, with the bare driver and with the proxy in LD_LIBRARY_PATH; the difference
 * is what the gate adds. The kernel is "cgpu_null" of the simulated driver where there is one (a launch that returns at once),
 * else the null function, which a test's driver may take for the same. Links against libcuda.so.1 through the PLT. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

#define THREADS 16
#define REPEATS 99

typedef void *CUfunction, *CUstream, *CUcontext, *CUmodule;
int cuInit(unsigned);
int cuCtxCreate_v2(CUcontext *, unsigned, int);
int cuCtxSetCurrent(CUcontext);
int cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
int cuModuleLoadData(CUmodule *, const void *) __attribute__((weak));
int cuModuleGetFunction(CUfunction *, CUmodule, const char *) __attribute__((weak));

static CUcontext context;
static CUfunction function;
static long launches = 1000000;
static int repeats = 9;
static pthread_barrier_t barrier;
static double cpu[THREADS][REPEATS], wall[THREADS][REPEATS];

static double ns(clockid_t clock)
{
    struct timespec t;
    clock_gettime(clock, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *run(void *arg)
{
    int me = (int)(intptr_t)arg;
    cuCtxSetCurrent(context);
    for (int r = -1; r < repeats; r++) { /* the first is a warm-up */
        pthread_barrier_wait(&barrier);
        double c = ns(CLOCK_THREAD_CPUTIME_ID), w = ns(CLOCK_MONOTONIC);
        for (long i = 0; i < launches; i++)
            cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
        c = ns(CLOCK_THREAD_CPUTIME_ID) - c;
        w = ns(CLOCK_MONOTONIC) - w;
        if (r >= 0) {
            cpu[me][r] = c / (double)launches;
            wall[me][r] = w / (double)launches;
        }
    }
    return NULL;
}

static int order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    int threads = argc > 1 ? atoi(argv[1]) : 1;
    if (argc > 2)
        launches = atol(argv[2]);
    if (argc > 3)
        repeats = atoi(argv[3]);
    if (threads < 1 || threads > THREADS || repeats < 1 || repeats > REPEATS || launches < 1)
        return 2;
    CUmodule module;
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0))
        return 1;
    if (cuModuleLoadData && cuModuleGetFunction &&
        (cuModuleLoadData(&module, ".version 8.0\n.target sm_80\n.address_size 64\n.visible .entry cgpu_null() { ret; }\n") ||
         cuModuleGetFunction(&function, module, "cgpu_null")))
        return 1;
    pthread_t thread[THREADS];
    pthread_barrier_init(&barrier, NULL, (unsigned)threads);
    for (int i = 1; i < threads; i++)
        pthread_create(&thread[i], NULL, run, (void *)(intptr_t)i);
    run(NULL);
    for (int i = 1; i < threads; i++)
        pthread_join(thread[i], NULL);
    for (int i = 0; i < threads; i++) {
        qsort(cpu[i], (size_t)repeats, sizeof(double), order);
        qsort(wall[i], (size_t)repeats, sizeof(double), order);
        printf("thread %d cpu_ns %.2f wall_ns %.2f\n", i, cpu[i][repeats / 2], wall[i][repeats / 2]);
    }
    return 0;
}
