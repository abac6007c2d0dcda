/* load.c: work for the device in a window of time, and how much of it was done.
 *
 *     load spin US BEGIN END [STAMPS]   kernels of US us, one block; STAMPS: a file that gets {u64 start, end} of each,
 *                                       by the GPU's clock
 *     load fma US BEGIN END             a whole card's worth of multiply-adds for about US us
 *     load gemm N BEGIN END             cuBLAS's SGEMM of N x N; CGPU_CHECK_CUBLAS names the library
 *     load flag MS BEGIN END            one kernel from BEGIN on that ends when END has come
 *
 * BEGIN, END: CLOCK_MONOTONIC ns; work runs from the start of the program to END, with a synchronise about every 10 ms
 * of it. Prints "UNITS LONGEST_NS COUNT": kernels done between the two moments (what was under way at either counts in
 * proportion), the longest time from a launch to its synchronise, and fma's count of multiply-adds. That is measured,
 * unless CGPU_CHECK_COUNT says it: programs that are compared must do the same. Both moments 0: only starts and prints.
 * Status 3: it was not ready at BEGIN. */
#include "probe.h"

#define SYNC_NS 10000000.0
#define STAMPS 65536

static uint64_t begin, end;
static CUfunction kernel;
static CUdeviceptr stamps;
static long stamped;
static unsigned grid = 1, block = 1;
static uint64_t argument;
static int (*sgemm)(void *, int, int, int, int, int, const float *, CUdeviceptr, int, CUdeviceptr, int, const float *,
                    CUdeviceptr, int);
static void *cublas;
static int n;
static CUdeviceptr matrix[3];

static void unit(void)
{
    static const float one = 1, zero = 0;
    if (sgemm) {
        if (sgemm(cublas, 0, 0, n, n, n, &one, matrix[0], n, matrix[1], n, &zero, matrix[2], n)) {
            fprintf(stderr, "cublasSgemm failed\n");
            exit(1);
        }
        return;
    }
    uint64_t at = argument;
    if (stamps && now() >= begin && stamped < STAMPS)
        at = stamps + 16u * (uint64_t)stamped++;
    probe_launch(kernel, grid, block, NULL, at);
}

static void open_cublas(long size)
{
    const char *path = getenv("CGPU_CHECK_CUBLAS");
    void *library = dlopen(path ? path : "libcublas.so", RTLD_NOW);
    int (*create)(void **) = NULL;
    if (library) {
        *(void **)&create = dlsym(library, "cublasCreate_v2");
        *(void **)&sgemm = dlsym(library, "cublasSgemm_v2");
    }
    if (!create || !sgemm || create(&cublas)) {
        fprintf(stderr, "cuBLAS does not start: %s\n", library ? "cublasCreate failed" : dlerror());
        exit(1);
    }
    n = (int)size;
    for (int i = 0; i < 3; i++) {
        must(cuMemAlloc(&matrix[i], (size_t)size * (size_t)size * sizeof(float)), "a matrix");
        must(cuMemsetD32(matrix[i], 0x3f800000u, (size_t)size * (size_t)size), "a matrix");
    }
}

static uint64_t timed(long units)
{
    uint64_t start = now();
    for (long i = 0; i < units; i++)
        unit();
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    return now() - start;
}

/* How many multiply-adds last so long, measured where nobody says it: the best of three. */
static void calibrate(long us)
{
    int sms = 1;
    const char *said = getenv("CGPU_CHECK_COUNT");
    cuDeviceGetAttribute(&sms, CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT, 0);
    grid = (unsigned)sms * 4;
    block = 256;
    if (said && (argument = strtoull(said, NULL, 10)) != 0)
        return;
    argument = 200000;
    timed(1);
    uint64_t best = UINT64_MAX;
    for (int i = 0; i < 3; i++) {
        uint64_t took = timed(1);
        best = took < best ? took : best;
    }
    argument = (uint64_t)((double)argument * (double)us * 1000 / (double)(best ? best : 1)) + 1;
}

static void write_stamps(const char *path)
{
    uint64_t *all = calloc(2 * STAMPS, sizeof *all);
    FILE *file = fopen(path, "wb");
    must(cuMemcpyDtoH(all, stamps, (size_t)stamped * 16), "the stamps");
    if (!all || !file || fwrite(all, 16, (size_t)stamped, file) != (size_t)stamped || fclose(file))
        exit(1);
    free(all);
}

static int wait_for_flag(long ms)
{
    char name[48];
    unsigned *flag;
    CUdeviceptr device;
    must(cuMemHostAlloc((void **)&flag, 64, CU_MEMHOSTALLOC_DEVICEMAP), "cuMemHostAlloc");
    *flag = 0;
    must(cuMemHostGetDevicePointer(&device, flag, 0), "cuMemHostGetDevicePointer");
    snprintf(name, sizeof name, "flag_ms%ld", ms);
    CUfunction waiter = probe_kernel(PTX_FLAG, name, 0);
    while (now() < begin)
        usleep(1000);
    uint64_t start = now();
    probe_launch(waiter, 1, 1, NULL, device);
    while (now() < end)
        usleep(1000);
    __atomic_store_n(flag, 1, __ATOMIC_SEQ_CST);
    must(cuCtxSynchronize(), "cuCtxSynchronize");
    printf("1 %llu 0\n", (unsigned long long)(now() - start));
    return 0;
}

int main(int argc, char **argv)
{
    char name[48];
    if (argc < 5)
        return 2;
    long size = atol(argv[2]);
    begin = strtoull(argv[3], NULL, 10);
    end = strtoull(argv[4], NULL, 10);
    probe_start();
    if (!strcmp(argv[1], "flag"))
        return wait_for_flag(size);
    snprintf(name, sizeof name, "%s_us%ld", argv[1], size);
    if (!strcmp(argv[1], "gemm"))
        open_cublas(size);
    else
        kernel = probe_kernel(!strcmp(argv[1], "fma") ? PTX_FMA : PTX_SPIN, name, size);
    if (!strcmp(argv[1], "fma"))
        calibrate(size);
    if (argc > 5)
        must(cuMemAlloc(&stamps, 16 * STAMPS), "the stamps");
    timed(1);
    uint64_t one = timed(1), again = timed(1);
    double each = (double)(one < again ? one : again) + 1;
    double units = 0, longest = 0;
    if (end && now() > begin) {
        fprintf(stderr, "load was not ready in time\n");
        return 3;
    }
    while (now() < end) {
        long batch = each >= SYNC_NS ? 1 : (long)(SYNC_NS / each);
        uint64_t start = now(), took = timed(batch), stop = start + took;
        /* a batch that had to wait for its turn says nothing about its length */
        each = (double)took / (double)batch < each ? (double)took / (double)batch + 1 : each;
        uint64_t from = start > begin ? start : begin, to = stop < end ? stop : end;
        if (to > from && took) {
            units += (double)batch * (double)(to - from) / (double)took;
            longest = (double)took > longest ? (double)took : longest;
        }
    }
    if (argc > 5)
        write_stamps(argv[5]);
    printf("%.3f %.0f %llu\n", units, longest, (unsigned long long)argument);
    return 0;
}
