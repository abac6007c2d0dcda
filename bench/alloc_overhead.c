/* alloc_overhead.c: what cuMemAlloc and cuMemFree cost the calling thread, with so many blocks live.
 *
 *     alloc_overhead LIVE [REPEATS]
 *
 * Prints "alloc_ns A free_ns F": medians over the repeats of the thread CPU time per call; each repeat frees and allocates 2,000
 * random old blocks of 4 KiB. Run it with the bare driver and with the proxy; the difference is the ledger's. */
#define _GNU_SOURCE
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define CALLS 2000
#define REPEATS 99

typedef unsigned long long CUdeviceptr;
typedef void *CUcontext;
int cuInit(unsigned);
int cuCtxCreate_v2(CUcontext *, unsigned, int);
int cuMemAlloc_v2(CUdeviceptr *, size_t);
int cuMemFree_v2(CUdeviceptr);

static double cpu_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static int order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void *idle(void *arg) /* glibc leaves out lock prefixes while a process has one thread */
{
    for (;;)
        pause();
    return arg;
}

int main(int argc, char **argv)
{
    long live = argc > 1 ? atol(argv[1]) : 10;
    int repeats = argc > 2 ? atoi(argv[2]) : 21;
    CUcontext context;
    pthread_t other;
    if (live < 1 || repeats < 1 || repeats > REPEATS || cuInit(0) || cuCtxCreate_v2(&context, 0, 0))
        return 1;
    pthread_create(&other, NULL, idle, NULL);
    CUdeviceptr *block = calloc((size_t)live, sizeof *block);
    if (!block)
        return 1;
    for (long i = 0; i < live; i++)
        if (cuMemAlloc_v2(&block[i], BLOCK))
            return 1;
    double alloc[REPEATS], freed[REPEATS];
    uint64_t random = 88172645463325252u;
    long batch = live < CALLS ? live : CALLS;
    for (int r = 0; r < repeats; r++) {
        alloc[r] = freed[r] = 0;
        for (long done = 0; done < CALLS; done += batch) {
            for (long i = 0; i < batch; i++) { /* random blocks to the front */
                random ^= random << 13, random ^= random >> 7, random ^= random << 17;
                long j = i + (long)(random % (uint64_t)(live - i));
                CUdeviceptr t = block[i];
                block[i] = block[j], block[j] = t;
            }
            double start = cpu_ns();
            for (long i = 0; i < batch; i++)
                if (cuMemFree_v2(block[i]))
                    return 1;
            double middle = cpu_ns();
            for (long i = 0; i < batch; i++)
                if (cuMemAlloc_v2(&block[i], BLOCK))
                    return 1;
            freed[r] += middle - start;
            alloc[r] += cpu_ns() - middle;
        }
        long calls = (CALLS + batch - 1) / batch * batch;
        alloc[r] /= (double)calls, freed[r] /= (double)calls;
    }
    qsort(alloc, (size_t)repeats, sizeof(double), order);
    qsort(freed, (size_t)repeats, sizeof(double), order);
    printf("alloc_ns %.1f free_ns %.1f\n", alloc[repeats / 2], freed[repeats / 2]);
    return 0;
}
