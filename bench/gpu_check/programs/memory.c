/* memory.c: what a program is told about memory, and what it gets.
 *
 *     memory fill          prints "TOTAL FREE DEVICE_TOTAL" in bytes, the result of an allocation of TOTAL + 2 MiB,
 *                          and how many bytes it was granted: by halves from TOTAL to 2 MiB, each until it is refused
 *     memory hold BYTES    allocates that (0: a context alone) and prints the result; ends with its standard input
 *     memory graph COUNT   captures COUNT kernels, with a pause of 50 ms in the midst of the capture, launches the
 *                          graph 20 times, and prints how many kernels ran by their own count */
#include "probe.h"

static int fill(void)
{
    size_t total, free_bytes, device, granted = 0;
    CUdeviceptr block;
    must(cuMemGetInfo(&free_bytes, &total), "cuMemGetInfo");
    must(cuDeviceTotalMem(&device, 0), "cuDeviceTotalMem");
    CUresult over = cuMemAlloc(&block, total + (2 << 20));
    for (size_t size = total; size >= 2 << 20; size /= 2)
        while (cuMemAlloc(&block, size) == CUDA_SUCCESS)
            granted += size;
    printf("%zu %zu %zu %d %zu\n", total, free_bytes, device, (int)over, granted);
    return 0;
}

static int hold(size_t bytes)
{
    CUdeviceptr block;
    char byte;
    printf("%d\n", bytes ? (int)cuMemAlloc(&block, bytes) : 0);
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        ;
    return 0;
}

static int graph(int count)
{
    CUstream stream;
    CUgraph captured;
    CUgraphExec exec;
    CUdeviceptr sum;
    unsigned ran = 0;
    CUfunction kernel = probe_kernel(PTX_COUNT, "count_us20", 0);
    must(cuMemAlloc(&sum, 4), "cuMemAlloc");
    must(cuMemsetD32(sum, 0, 1), "cuMemsetD32");
    must(cuStreamCreate(&stream, CU_STREAM_NON_BLOCKING), "cuStreamCreate");
    must(cuStreamBeginCapture(stream, CU_STREAM_CAPTURE_MODE_THREAD_LOCAL), "cuStreamBeginCapture");
    for (int i = 0; i < count; i++) {
        probe_launch(kernel, 1, 1, stream, sum);
        if (i == count / 2)
            usleep(50000); /* longer than a turn: its end falls into the capture */
    }
    must(cuStreamEndCapture(stream, &captured), "cuStreamEndCapture");
    must(cuGraphInstantiateWithFlags(&exec, captured, 0), "cuGraphInstantiate");
    for (int i = 0; i < 20; i++)
        must(cuGraphLaunch(exec, stream), "cuGraphLaunch");
    must(cuStreamSynchronize(stream), "cuStreamSynchronize");
    must(cuMemcpyDtoH(&ran, sum, 4), "cuMemcpyDtoH");
    printf("%u\n", ran);
    return 0;
}

int main(int argc, char **argv)
{
    if (argc < 2)
        return 2;
    probe_start();
    if (!strcmp(argv[1], "fill"))
        return fill();
    if (!strcmp(argv[1], "hold"))
        return hold(argc > 2 ? strtoull(argv[2], NULL, 10) : 0);
    return graph(argc > 2 ? atoi(argv[2]) : 100);
}
