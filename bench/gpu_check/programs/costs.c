/* costs.c: what a call costs the thread that makes it, in ns, each the median of REPEATS.
 *
 *     costs REPEATS
 *
 * Prints "NAME WALL_NS CPU_NS" a line: launch (a kernel that does nothing; 256 at a time, then a synchronise that is
 * not counted), and alloc and free of blocks of 64 KiB and of 4 MiB, 32 live at a time; these, dear as they are, a
 * tenth as often. */
#include "probe.h"

#define REPEATS 999
#define LAUNCHES 256
#define BLOCKS 32

static int repeats;

static int order(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void report(const char *name, double *wall, double *cpu)
{
    qsort(wall, (size_t)repeats, sizeof *wall, order);
    qsort(cpu, (size_t)repeats, sizeof *cpu, order);
    printf("%s %.1f %.1f\n", name, wall[repeats / 2], cpu[repeats / 2]);
}

static void launches(void)
{
    static double wall[REPEATS], cpu[REPEATS];
    CUfunction null = probe_kernel(PTX_NULL, "cgpu_null", 0);
    for (int r = -3; r < repeats; r++) { /* the first ones warm up */
        uint64_t w = now(), c = clock_of(CLOCK_THREAD_CPUTIME_ID);
        for (int i = 0; i < LAUNCHES; i++)
            must(cuLaunchKernel(null, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL), "cuLaunchKernel");
        w = now() - w;
        c = clock_of(CLOCK_THREAD_CPUTIME_ID) - c;
        must(cuCtxSynchronize(), "cuCtxSynchronize");
        if (r >= 0) {
            wall[r] = (double)w / LAUNCHES;
            cpu[r] = (double)c / LAUNCHES;
        }
    }
    report("launch", wall, cpu);
}

static void blocks(size_t bytes, const char *alloc, const char *freed)
{
    static double wall[2][REPEATS], cpu[2][REPEATS];
    CUdeviceptr block[BLOCKS];
    for (int r = 0; r < repeats; r++)
        for (int half = 0; half < 2; half++) {
            uint64_t w = now(), c = clock_of(CLOCK_THREAD_CPUTIME_ID);
            for (int i = 0; i < BLOCKS; i++)
                must(half ? cuMemFree(block[i]) : cuMemAlloc(&block[i], bytes), half ? "cuMemFree" : "cuMemAlloc");
            wall[half][r] = (double)(now() - w) / BLOCKS;
            cpu[half][r] = (double)(clock_of(CLOCK_THREAD_CPUTIME_ID) - c) / BLOCKS;
        }
    report(alloc, wall[0], cpu[0]);
    report(freed, wall[1], cpu[1]);
}

int main(int argc, char **argv)
{
    repeats = argc > 1 ? atoi(argv[1]) : 99;
    if (repeats < 1 || repeats > REPEATS)
        return 2;
    probe_start();
    launches();
    repeats = repeats > 50 ? repeats / 10 : 5;
    blocks(64 << 10, "alloc_64KiB", "free_64KiB");
    blocks(4 << 20, "alloc_4MiB", "free_4MiB");
    return 0;
}
