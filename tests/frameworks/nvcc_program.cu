// nvcc_program.cu: what nvcc makes of <<<>>>, of device and managed variables and of the runtime API, on the cudart it
// is linked with. On the simulated driver kernels take the time in their name and compute nothing, copies copy.
// Prints key=value lines that test_nvcc.py reads.
#include <cstdio>
#include <cstdlib>
#include <cstring>

#define CHECK(call) \
    do { \
        cudaError_t error_ = (call); \
        if (error_ != cudaSuccess) { \
            fprintf(stderr, "%s: %s (%s)\n", #call, cudaGetErrorName(error_), cudaGetErrorString(error_)); \
            exit(1); \
        } \
    } while (0)

static const int COUNT = 1 << 16, LAUNCHES = 20;
__device__ int table[256];
__managed__ int counter;

extern "C" __global__ void spin_us500(const int *in, int *out, int n)
{
    int at = blockIdx.x * blockDim.x + threadIdx.x;
    if (at < n)
        out[at] = in[at] + table[at % 256] + counter;
}

static float timed(cudaStream_t stream, cudaGraphExec_t graph, const int *in, int *out)
{
    cudaEvent_t start, end;
    float ms;
    CHECK(cudaEventCreate(&start));
    CHECK(cudaEventCreate(&end));
    CHECK(cudaEventRecord(start, stream));
    for (int i = 0; !graph && i < LAUNCHES; i++)
        spin_us500<<<COUNT / 256, 256, 0, stream>>>(in, out, COUNT);
    if (graph)
        CHECK(cudaGraphLaunch(graph, stream));
    CHECK(cudaGetLastError());
    CHECK(cudaEventRecord(end, stream));
    CHECK(cudaEventSynchronize(end));
    CHECK(cudaEventElapsedTime(&ms, start, end));
    CHECK(cudaEventDestroy(start));
    CHECK(cudaEventDestroy(end));
    return ms;
}

int main()
{
    static int host[COUNT], back[COUNT];
    size_t free_bytes, total, after;
    int *in, *out, *pooled, words[256];
    cudaDeviceProp properties;
    cudaPointerAttributes where;
    cudaFuncAttributes function;
    cudaStream_t stream;
    cudaGraph_t graph;
    cudaGraphExec_t exec;

    for (int i = 0; i < COUNT; i++)
        host[i] = i;
    CHECK(cudaGetDeviceProperties(&properties, 0));
    CHECK(cudaMemGetInfo(&free_bytes, &total));
    printf("name=%s\ncapability=%d.%d\nproperties=%zu\ntotal=%zu\n", properties.name, properties.major,
           properties.minor, properties.totalGlobalMem, total);

    CHECK(cudaMalloc(&in, sizeof host));
    CHECK(cudaMalloc(&out, sizeof host));
    CHECK(cudaPointerGetAttributes(&where, in));
    printf("device_pointer=%d\n", where.type == cudaMemoryTypeDevice);
    CHECK(cudaMemcpy(in, host, sizeof host, cudaMemcpyHostToDevice));
    CHECK(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    CHECK(cudaMemcpyAsync(out, in, sizeof host, cudaMemcpyDeviceToDevice, stream));
    CHECK(cudaMemcpyAsync(back, out, sizeof host, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaStreamSynchronize(stream));
    printf("copied=%d\n", memcmp(host, back, sizeof host) == 0);

    CHECK(cudaMemcpyToSymbol(table, host, sizeof table));
    CHECK(cudaMemcpyFromSymbol(words, table, sizeof words));
    counter = 7;
    printf("symbol=%d\nmanaged=%d\n", memcmp(words, host, sizeof words) == 0, counter);

    CHECK(cudaFuncGetAttributes(&function, spin_us500));
    printf("threads=%d\n", function.maxThreadsPerBlock);
    printf("kernels_ms=%f\n", timed(stream, nullptr, in, out));
    printf("default_ms=%f\n", timed(nullptr, nullptr, in, out));
    CHECK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeGlobal));
    for (int i = 0; i < LAUNCHES; i++)
        spin_us500<<<COUNT / 256, 256, 0, stream>>>(in, out, COUNT);
    CHECK(cudaStreamEndCapture(stream, &graph));
    CHECK(cudaGraphInstantiate(&exec, graph, 0));
    printf("graph_ms=%f\n", timed(stream, exec, in, out));
    CHECK(cudaGraphExecDestroy(exec));
    CHECK(cudaGraphDestroy(graph));

    CHECK(cudaMallocAsync(&pooled, sizeof host, stream));
    CHECK(cudaMemsetAsync(pooled, 0x5a, sizeof host, stream));
    CHECK(cudaMemcpyAsync(back, pooled, sizeof host, cudaMemcpyDeviceToHost, stream));
    CHECK(cudaFreeAsync(pooled, stream));
    CHECK(cudaStreamSynchronize(stream));
    printf("filled=%d\n", back[0] == 0x5a5a5a5a && back[COUNT - 1] == 0x5a5a5a5a);

    void *too_much = nullptr;
    printf("oom=%s\n", cudaGetErrorName(cudaMalloc(&too_much, total + 1)));
    printf("last=%s\n", cudaGetErrorName(cudaGetLastError()));
    CHECK(cudaGetLastError());
    CHECK(cudaFree(in));
    CHECK(cudaFree(out));
    CHECK(cudaStreamDestroy(stream));
    CHECK(cudaMemGetInfo(&after, &total));
    printf("leaked=%d\n", free_bytes - after > 4 << 20);
    CHECK(cudaDeviceReset());
    return 0;
}
