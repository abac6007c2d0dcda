/* alloc_cost.c: CPU time that the wrappers add to an allocation and to a free, over a driver that does nothing.
 * alloc_cost CTL REPORT ROUNDS: for 10, 4,000 and 100,000 live blocks of 1 MiB prints "LIVE ALLOC_NS FREE_NS", medians of ROUNDS.
 * What is freed is a random old block. A second thread is alive, so that locks are real. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "stub.h"

#define OPERATIONS 10000
#define MOST 100000
#define MOST_ROUNDS 101

typedef CUresult (*alloc_fn)(CUdeviceptr *, size_t);
typedef CUresult (*free_fn)(CUdeviceptr);

static CUdeviceptr hooked[MOST + OPERATIONS], bare[MOST + OPERATIONS], next_address = 1ull << 40;

/* not through stub_driver.c: its bookkeeping would be most of the time */
static __attribute__((noinline)) CUresult bare_alloc(CUdeviceptr *ptr, size_t bytes)
{
    *ptr = next_address += bytes;
    return CUDA_SUCCESS;
}
static __attribute__((noinline)) CUresult bare_free(CUdeviceptr ptr)
{
    return ptr ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

static double now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (double)t.tv_sec * 1e9 + (double)t.tv_nsec;
}

static void *idle(void *arg)
{
    for (;;)
        pause();
    return arg;
}

static int by_size(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

/* OPERATIONS of each on top of `live` blocks. */
static void measure(alloc_fn alloc, free_fn release, CUdeviceptr *blocks, int live, double *alloc_ns, double *free_ns)
{
    double start = now();
    for (int i = 0; i < OPERATIONS; i++)
        alloc(&blocks[live + i], 1 << 20);
    *alloc_ns = (now() - start) / OPERATIONS;
    for (int i = 0; i < OPERATIONS; i++) { /* the last OPERATIONS places: random old blocks, in random order */
        int other = rand() % (live + OPERATIONS - i), last = live + OPERATIONS - 1 - i;
        CUdeviceptr swap = blocks[other];
        blocks[other] = blocks[last];
        blocks[last] = swap;
    }
    start = now();
    for (int i = OPERATIONS - 1; i >= 0; i--)
        release(blocks[live + i]);
    *free_ns = (now() - start) / OPERATIONS;
}

int main(int argc, char **argv)
{
    static const uint8_t uuids[1][16] = {{1}};
    static const int lives[] = {10, 4000, 100000};
    double added[2][MOST_ROUNDS];
    pthread_t thread;
    if (argc != 4)
        return 2;
    int rounds = atoi(argv[3]);
    if (rounds < 1 || rounds > MOST_ROUNDS)
        return 2;
    stub_cards(1, uuids, 1ull << 50, 1ull << 50);
    stub_joins(1);
    stub_bind("");
    if (stub_make_pages(argv[1], argv[2], 1ull << 50, 1ull << 50, uuids[0]))
        return 2;
    stub_ctl(argv[1])->slot_gen[0] = 1;
    if (stub_offer(0, argv[1], argv[2], 0) || !hook_join(false))
        return 2;
    stub_current(0, 0);
    stub_replace("cuMemAlloc_v2", (void *)bare_alloc);
    stub_replace("cuMemFree_v2", (void *)bare_free);
    pthread_create(&thread, NULL, idle, NULL);
    alloc_fn alloc = (alloc_fn)stub_wrapper("cuMemAlloc_v2");
    free_fn release = (free_fn)stub_wrapper("cuMemFree_v2");
    int made = 0;
    for (size_t i = 0; i < sizeof lives / sizeof *lives; i++) {
        for (; made < lives[i]; made++) {
            alloc(&hooked[made], 1 << 20);
            bare_alloc(&bare[made], 1 << 20);
        }
        for (int round = 0; round < rounds; round++) {
            double with[2], without[2];
            measure(alloc, release, hooked, made, &with[0], &with[1]);
            measure(bare_alloc, bare_free, bare, made, &without[0], &without[1]);
            added[0][round] = with[0] - without[0];
            added[1][round] = with[1] - without[1];
        }
        for (int j = 0; j < 2; j++)
            qsort(added[j], (size_t)rounds, sizeof **added, by_size);
        printf("%d %.1f %.1f\n", lives[i], added[0][rounds / 2], added[1][rounds / 2]);
    }
    return 0;
}
