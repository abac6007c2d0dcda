/* alloc_overhead.c: what cuMemAlloc and cuMemFree cost the calling thread, with so many blocks live, and what the proxy adds.
 *
 *     alloc_overhead LIVE [TURNS]
 *
 * Prints "alloc_ns A added B free_ns C added D": the driver's own thread CPU time a call and what a call through the proxy
 * takes more; medians over the turns, of the differences pair by pair. Without a proxy the added time is that of nothing.
 *
 * Both are measured in one process, on one CPU, on the same blocks: where memory lies and who else is on the machine changes
 * a free among 100,000 blocks by more than what is looked for, also from one ten milliseconds to the next, so turns are short. A
 * turn frees 2,000 random old blocks of 4 KiB and allocates as many, BATCHES times; the first WARM ones only warm the caches:
 * what they go through is larger than the second-level cache. The simulated driver hands out again what was just freed, so
 * the blocks that the proxy has seen stay the same ones; that is checked. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <link.h>
#include <pthread.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#define BLOCK 4096
#define CALLS 2000
#define BATCHES 2
#define WARM 1
#define TURNS 99

typedef unsigned long long CUdeviceptr;
typedef void *CUcontext;
int cuInit(unsigned);
int cuCtxCreate_v2(CUcontext *, unsigned, int);
int cuMemAlloc_v2(CUdeviceptr *, size_t);
int cuMemFree_v2(CUdeviceptr);

struct driver {
    int (*alloc)(CUdeviceptr *, size_t);
    int (*free)(CUdeviceptr);
};

static CUdeviceptr *block;
static long live;

static void fail(const char *what)
{
    fprintf(stderr, "alloc_overhead: %s\n", what);
    exit(1);
}

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

static double median(double *values, int count)
{
    qsort(values, (size_t)count, sizeof *values, order);
    return values[count / 2];
}

static void *idle(void *arg) /* glibc leaves out lock prefixes while a process has one thread */
{
    for (;;)
        pause();
    return arg;
}

/* The path of the libcuda.so.1 behind the one that this program is linked with. */
static int find_real(struct dl_phdr_info *info, size_t size, void *path)
{
    Dl_info linked;
    const char *name = strrchr(info->dlpi_name, '/');
    (void)size;
    if (!name || strcmp(name, "/libcuda.so.1") || !dladdr((void *)cuMemFree_v2, &linked) ||
        !strcmp(linked.dli_fname, info->dlpi_name))
        return 0;
    *(const char **)path = info->dlpi_name;
    return 1;
}

static struct driver real_driver(void)
{
    const char *path = NULL;
    if (!dl_iterate_phdr(find_real, &path))
        return (struct driver){cuMemAlloc_v2, cuMemFree_v2};
    void *handle = dlopen(path, RTLD_NOW | RTLD_NOLOAD);
    struct driver driver = {0};
    if (handle) {
        driver.alloc = (int (*)(CUdeviceptr *, size_t))dlsym(handle, "cuMemAlloc_v2");
        driver.free = (int (*)(CUdeviceptr))dlsym(handle, "cuMemFree_v2");
    }
    if (!driver.alloc || !driver.free)
        fail("no driver behind the proxy");
    return driver;
}

static void random_to_the_front(long count)
{
    static uint64_t random = 88172645463325252u;
    for (long i = 0; i < count; i++) {
        random ^= random << 13, random ^= random >> 7, random ^= random << 17;
        long j = i + (long)(random % (uint64_t)(live - i));
        CUdeviceptr t = block[i];
        block[i] = block[j], block[j] = t;
    }
}

static uint64_t fingerprint(long count)
{
    uint64_t sum = 0;
    for (long i = 0; i < count; i++)
        sum += block[i] * block[i];
    return sum;
}

static void turn(const struct driver *driver, double *alloc, double *freed)
{
    long batch = live < CALLS ? live : CALLS, calls = 0;
    *alloc = *freed = 0;
    for (int n = 0; n < BATCHES; n++)
        for (long done = 0; done < CALLS; done += batch) {
            random_to_the_front(batch);
            uint64_t before = fingerprint(batch);
            double start = cpu_ns();
            for (long i = 0; i < batch; i++)
                if (driver->free(block[i]))
                    fail("a free failed");
            double middle = cpu_ns();
            for (long i = 0; i < batch; i++)
                if (driver->alloc(&block[i], BLOCK))
                    fail("an allocation failed");
            double end = cpu_ns();
            if (fingerprint(batch) != before)
                fail("the driver gave other blocks than were freed");
            if (n < WARM)
                continue;
            *freed += middle - start;
            *alloc += end - middle;
            calls += batch;
        }
    *alloc /= (double)calls, *freed /= (double)calls;
}

int main(int argc, char **argv)
{
    int turns = argc > 2 ? atoi(argv[2]) : 61;
    live = argc > 1 ? atol(argv[1]) : 10;
    CUcontext context;
    pthread_t other;
    cpu_set_t here;
    CPU_ZERO(&here);
    CPU_SET(sched_getcpu(), &here);
    if (live < 1 || turns < 1 || turns > TURNS || cuInit(0) || cuCtxCreate_v2(&context, 0, 0))
        fail("usage: alloc_overhead LIVE [TURNS]; or no device");
    sched_setaffinity(0, sizeof here, &here); /* this thread alone */
    pthread_create(&other, NULL, idle, NULL);
    struct driver drivers[2] = {real_driver(), {cuMemAlloc_v2, cuMemFree_v2}};
    block = calloc((size_t)live, sizeof *block);
    if (!block)
        fail("no memory");
    for (long i = 0; i < live; i++)
        if (cuMemAlloc_v2(&block[i], BLOCK))
            fail("an allocation failed");
    double alloc[2][TURNS], freed[2][TURNS];
    for (int t = 0; t < turns; t++) {
        for (int n = 0; n < 2; n++) { /* the one that was last begins: changes of the machine's pace cancel */
            int which = n ^ (t & 1);
            turn(&drivers[which], &alloc[which][t], &freed[which][t]);
        }
        alloc[1][t] -= alloc[0][t];
        freed[1][t] -= freed[0][t];
    }
    printf("alloc_ns %.1f added %.1f free_ns %.1f added %.1f\n", median(alloc[0], turns), median(alloc[1], turns),
           median(freed[0], turns), median(freed[1], turns));
    return 0;
}
