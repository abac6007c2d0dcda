/* driver.h: a stand-in for NVIDIA's CUDA runtime, libcudart.so.13, for tests only: the runtime API on top of the driver
 * API, written from the public headers, which it is built against (build.py). NVIDIA's own runtime asks the driver for
 * private tables, among them a check that the driver is genuine, so it does not start on the simulated one, and that is
 * as it should be. What is not implemented here is made a stub by build.py and answers cudaErrorNotSupported.
 *
 * Like the original it opens libcuda.so.1 at the first call, asks cuGetProcAddress for each function with the version
 * that introduced it, and retains the primary context of a device when a thread first uses it.
 *
 * copy.c, stream.c and launch.c are compiled twice: the headers rename what they define and what they call when
 * CUDA_API_PER_THREAD_DEFAULT_STREAM is set. */
#ifndef CUDART_DRIVER_H
#define CUDART_DRIVER_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <cuda.h>
#include <cudaTypedefs.h>
#include <cuda_runtime_api.h>

/* cudaProfiler.h comes in another package; NVIDIA's runtime, too, asks for the oldest form of the reset. */
typedef CUresult (*PFN_cuProfilerStart_v4000)(void);
typedef CUresult (*PFN_cuProfilerStop_v4000)(void);
typedef CUresult (*PFN_cuDevicePrimaryCtxReset_v7000)(CUdevice device);

/* Every driver function used, with the version that introduced the form used. */
#define DRIVER_CALLS(X) \
    X(cuInit, 2000) X(cuDriverGetVersion, 2020) X(cuGetErrorString, 6000) \
    X(cuDeviceGetCount, 2000) X(cuDeviceGetName, 2000) X(cuDeviceGetUuid, 11040) X(cuDeviceTotalMem, 3020) \
    X(cuDeviceGetAttribute, 2000) X(cuDeviceGetPCIBusId, 4010) X(cuDeviceGetByPCIBusId, 4010) \
    X(cuDeviceGetP2PAttribute, 8000) X(cuDeviceCanAccessPeer, 4000) X(cuCtxEnablePeerAccess, 4000) \
    X(cuCtxDisablePeerAccess, 4000) X(cuDevicePrimaryCtxRetain, 7000) X(cuDevicePrimaryCtxReset, 7000) \
    X(cuDevicePrimaryCtxSetFlags, 11000) X(cuDevicePrimaryCtxGetState, 7000) \
    X(cuCtxGetCurrent, 4000) X(cuCtxSetCurrent, 4000) X(cuCtxGetDevice, 2000) X(cuCtxSynchronize, 2000) \
    X(cuCtxSetLimit, 3010) X(cuCtxGetLimit, 3010) X(cuCtxGetCacheConfig, 3020) X(cuCtxSetCacheConfig, 3020) \
    X(cuCtxGetStreamPriorityRange, 5050) X(cuProfilerStart, 4000) X(cuProfilerStop, 4000) \
    X(cuMemGetInfo, 3020) X(cuMemAlloc, 3020) X(cuMemAllocPitch, 3020) X(cuMemAllocManaged, 6000) X(cuMemFree, 3020) \
    X(cuMemHostAlloc, 2020) X(cuMemFreeHost, 2000) X(cuMemHostGetDevicePointer, 3020) X(cuMemHostGetFlags, 2030) \
    X(cuMemHostRegister, 6050) X(cuMemHostUnregister, 4000) X(cuMemAdvise, 12020) X(cuPointerGetAttributes, 7000) \
    X(cuIpcGetEventHandle, 4010) X(cuIpcOpenEventHandle, 4010) X(cuIpcGetMemHandle, 4010) \
    X(cuIpcOpenMemHandle, 11000) X(cuIpcCloseMemHandle, 4010) \
    X(cuMemAllocAsync, 11020) X(cuMemAllocFromPoolAsync, 11020) X(cuMemFreeAsync, 11020) \
    X(cuDeviceGetDefaultMemPool, 11020) X(cuDeviceGetMemPool, 11020) X(cuDeviceSetMemPool, 11020) \
    X(cuMemPoolCreate, 11020) X(cuMemPoolDestroy, 11020) X(cuMemPoolTrimTo, 11020) X(cuMemPoolSetAttribute, 11020) \
    X(cuMemPoolGetAttribute, 11020) X(cuMemPoolSetAccess, 11020) X(cuMemPoolGetAccess, 11020) \
    X(cuMemPoolExportToShareableHandle, 11020) X(cuMemPoolImportFromShareableHandle, 11020) \
    X(cuMemPoolExportPointer, 11020) X(cuMemPoolImportPointer, 11020) \
    X(cuMemcpy, 4000) X(cuMemcpyHtoD, 3020) X(cuMemcpyDtoH, 3020) X(cuMemcpyDtoD, 3020) X(cuMemcpyPeer, 4000) \
    X(cuMemcpyAsync, 4000) X(cuMemcpyHtoDAsync, 3020) X(cuMemcpyDtoHAsync, 3020) X(cuMemcpyDtoDAsync, 3020) \
    X(cuMemcpyPeerAsync, 4000) X(cuMemcpy2DUnaligned, 3020) X(cuMemcpy2DAsync, 3020) X(cuMemPrefetchAsync, 12020) \
    X(cuMemsetD8, 3020) X(cuMemsetD8Async, 3020) X(cuMemsetD2D8, 3020) X(cuMemsetD2D8Async, 3020) \
    X(cuStreamCreateWithPriority, 5050) X(cuStreamDestroy, 4000) X(cuStreamGetPriority, 5050) \
    X(cuStreamGetFlags, 5050) X(cuStreamGetId, 12000) X(cuStreamWaitEvent, 3020) X(cuStreamAddCallback, 5000) \
    X(cuStreamQuery, 2000) X(cuStreamSynchronize, 2000) X(cuStreamBeginCapture, 10010) \
    X(cuStreamBeginCaptureToGraph, 12030) X(cuStreamEndCapture, 10000) X(cuStreamIsCapturing, 10000) \
    X(cuStreamGetCaptureInfo, 12030) X(cuStreamUpdateCaptureDependencies, 12030) \
    X(cuThreadExchangeStreamCaptureMode, 10010) X(cuLaunchHostFunc, 10000) \
    X(cuEventCreate, 2000) X(cuEventRecord, 2000) X(cuEventRecordWithFlags, 11010) X(cuEventQuery, 2000) \
    X(cuEventSynchronize, 2000) X(cuEventElapsedTime, 12080) X(cuEventDestroy, 4000) \
    X(cuLibraryLoadData, 12000) X(cuLibraryLoadFromFile, 12000) X(cuLibraryUnload, 12000) X(cuLibraryGetKernel, 12000) \
    X(cuLibraryGetGlobal, 12000) X(cuLibraryGetManaged, 12000) X(cuLibraryGetKernelCount, 12040) \
    X(cuLibraryEnumerateKernels, 12040) X(cuKernelGetFunction, 12000) X(cuKernelSetAttribute, 12000) \
    X(cuFuncGetAttribute, 2020) X(cuFuncSetAttribute, 9000) X(cuFuncSetCacheConfig, 3000) X(cuFuncGetName, 12030) \
    X(cuOccupancyMaxActiveBlocksPerMultiprocessorWithFlags, 7000) X(cuOccupancyAvailableDynamicSMemPerBlock, 10020) \
    X(cuOccupancyMaxActiveClusters, 11070) \
    X(cuLaunchKernel, 4000) X(cuLaunchKernelEx, 11060) X(cuLaunchCooperativeKernel, 9000) \
    X(cuGraphCreate, 10000) X(cuGraphDestroy, 10000) X(cuGraphClone, 10000) X(cuGraphGetNodes, 10000) \
    X(cuGraphNodeGetType, 10000) X(cuGraphNodeGetDependencies, 12030) X(cuGraphDebugDotPrint, 11030) \
    X(cuGraphAddEmptyNode, 10000) X(cuGraphAddKernelNode, 12000) X(cuGraphInstantiateWithFlags, 11040) \
    X(cuGraphUpload, 11010) X(cuGraphLaunch, 10000) X(cuGraphExecUpdate, 12000) X(cuGraphExecDestroy, 10000) \
    X(cuGraphConditionalHandleCreate, 12030) X(cuUserObjectCreate, 11030) X(cuUserObjectRetain, 11030) \
    X(cuUserObjectRelease, 11030) X(cuGraphRetainUserObject, 11030) X(cuGraphReleaseUserObject, 11030) \
    X(cuDeviceGetGraphMemAttribute, 11040) X(cuDeviceSetGraphMemAttribute, 11040) X(cuDeviceGraphMemTrim, 11040)

struct rt_driver {
    PFN_cuGetProcAddress_v12000 find;
#define X(name, version) PFN_##name##_v##version name##_;
    DRIVER_CALLS(X)
#undef X
};
extern struct rt_driver rt_drivers[2]; /* [1]: the forms for a thread's own default stream */

#ifdef CUDA_API_PER_THREAD_DEFAULT_STREAM
#define OWN_STREAM 1
#else
#define OWN_STREAM 0
#endif

/* Begin a call: the driver is open; with rt_enter a context is current, if need be that of the thread's device. */
CUresult rt_open(void);
CUresult rt_enter(void);
CUresult rt_primary(int device, CUcontext *ctx); /* retained once and for all */
extern __thread int rt_device;                   /* the thread's, where no context is current */
/* Ends every call: keeps a failure for cudaGetLastError. */
cudaError_t rt_done(CUresult result);

#define RT_CALL(function, ...) ((function) ? (function)(__VA_ARGS__) : CUDA_ERROR_NOT_SUPPORTED)
#define DRIVE(name, ...) RT_CALL(rt_drivers[OWN_STREAM].name##_, __VA_ARGS__)
/* A whole call that is the driver's. PASS_OPEN does without a context. */
#define RT_PASS(begin, function, ...) \
    do { \
        CUresult result_ = begin(); \
        return rt_done(result_ ? result_ : RT_CALL(function, __VA_ARGS__)); \
    } while (0)
#define PASS(name, ...) RT_PASS(rt_enter, rt_drivers[OWN_STREAM].name##_, __VA_ARGS__)
#define PASS_OPEN(name, ...) RT_PASS(rt_open, rt_drivers[OWN_STREAM].name##_, __VA_ARGS__)
#define TRY(call) \
    do { \
        CUresult try_ = (call); \
        if (try_ != CUDA_SUCCESS) \
            return try_; \
    } while (0)

/* ---- registry.c: what nvcc's host code registers ---- */
/* The kernel of a host function, or of what is already a kernel's or a function's handle; loads its code if it must. */
CUresult rt_kernel(const void *host, CUfunction *function);
CUresult rt_symbol(const void *host, CUdeviceptr *address, size_t *bytes);
#endif
