/* submit.c: what puts work on the device passes the gate. One line a name; gate_enter() is inline. */
#include "client.h"
#include "hook.h"
#include "streams.h"

#define SUBMIT_TO(name, args, call, enter) \
    CU_WRAP(CUresult, name, args) \
    { \
        struct gate_thread *t = enter; \
        CUresult result = REAL(name) call; \
        gate_leave(t); \
        return result; \
    }
#define SUBMIT(name, args, call, stream) SUBMIT_TO(name, args, call, gate_enter(stream_key(stream)))
#define SUBMIT_PTSZ(name, args, call, stream) SUBMIT_TO(name, args, call, gate_enter(stream_key_ptsz(stream)))
/* Both forms of a name whose last argument is the stream. */
#define SUBMIT_BOTH(name, args, call) \
    SUBMIT(name, args, call, stream) \
    SUBMIT_PTSZ(name##_ptsz, args, call, stream)

/* ---- kernels ---- */

#define KERNEL_ARGS \
    (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
     CUstream stream, void **params, void **extra)
#define KERNEL_CALL (f, gx, gy, gz, bx, by, bz, shared, stream, params, extra)
SUBMIT_BOTH(cuLaunchKernel, KERNEL_ARGS, KERNEL_CALL)

#define EX_ARGS (const CUlaunchConfig *config, CUfunction f, void **params, void **extra)
SUBMIT(cuLaunchKernelEx, EX_ARGS, (config, f, params, extra), config ? config->hStream : NULL)
SUBMIT_PTSZ(cuLaunchKernelEx_ptsz, EX_ARGS, (config, f, params, extra), config ? config->hStream : NULL)

#define COOPERATIVE_ARGS \
    (CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz, unsigned shared, \
     CUstream stream, void **params)
SUBMIT_BOTH(cuLaunchCooperativeKernel, COOPERATIVE_ARGS, (f, gx, gy, gz, bx, by, bz, shared, stream, params))

/* Its kernels go to several devices: it passes the gate of the current one. */
SUBMIT(cuLaunchCooperativeKernelMultiDevice, (CUDA_LAUNCH_PARAMS *list, unsigned count, unsigned flags), (list, count, flags),
       count && list ? list[0].hStream : NULL)

SUBMIT(cuLaunch, (CUfunction f), (f), NULL)
SUBMIT(cuLaunchGrid, (CUfunction f, int width, int height), (f, width, height), NULL)
SUBMIT(cuLaunchGridAsync, (CUfunction f, int width, int height, CUstream stream), (f, width, height, stream), stream)

/* ---- graphs ---- */

SUBMIT_TO(cuGraphLaunch, (CUgraphExec graph, CUstream stream), (graph, stream), streams_enter_graph(graph, stream_key(stream)))
SUBMIT_TO(cuGraphLaunch_ptsz, (CUgraphExec graph, CUstream stream), (graph, stream),
          streams_enter_graph(graph, stream_key_ptsz(stream)))

/* ---- asynchronous memset and copies within the device: they run there as kernels do ---- */

SUBMIT_BOTH(cuMemsetD8Async, (CUdeviceptr p, unsigned char value, size_t n, CUstream stream), (p, value, n, stream))
SUBMIT_BOTH(cuMemsetD16Async, (CUdeviceptr p, unsigned short value, size_t n, CUstream stream), (p, value, n, stream))
SUBMIT_BOTH(cuMemsetD32Async, (CUdeviceptr p, unsigned value, size_t n, CUstream stream), (p, value, n, stream))
SUBMIT_BOTH(cuMemsetD2D8Async, (CUdeviceptr p, size_t pitch, unsigned char value, size_t width, size_t height, CUstream stream),
            (p, pitch, value, width, height, stream))
SUBMIT_BOTH(cuMemsetD2D16Async, (CUdeviceptr p, size_t pitch, unsigned short value, size_t width, size_t height, CUstream stream),
            (p, pitch, value, width, height, stream))
SUBMIT_BOTH(cuMemsetD2D32Async, (CUdeviceptr p, size_t pitch, unsigned value, size_t width, size_t height, CUstream stream),
            (p, pitch, value, width, height, stream))
SUBMIT(cuMemcpyDtoDAsync_v2, (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream), (to, from, n, stream), stream)
SUBMIT_PTSZ(cuMemcpyDtoDAsync_v2_ptsz, (CUdeviceptr to, CUdeviceptr from, size_t n, CUstream stream), (to, from, n, stream), stream)
SUBMIT(cuMemcpyDtoDAsync, (CUdeviceptr_v1 to, CUdeviceptr_v1 from, unsigned n, CUstream stream), (to, from, n, stream), stream)
