/* driver.c: opening the driver, contexts, the thread's last error. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include "driver.h"

#define DEVICES 64

struct rt_driver rt_drivers[2];
__thread int rt_device;
static __thread cudaError_t last_error;
static CUresult state = CUDA_ERROR_NOT_INITIALIZED; /* what opening came to */
static pthread_once_t once = PTHREAD_ONCE_INIT;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static CUcontext primaries[DEVICES]; /* under lock */

static void resolve(struct rt_driver *driver, cuuint64_t flags)
{
    CUdriverProcAddressQueryResult status;
#define X(name, version) driver->find(#name, (void **)&driver->name##_, version, flags, &status);
    DRIVER_CALLS(X)
#undef X
}

static void open_driver(void)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW | RTLD_LOCAL);
    void *find = library ? dlsym(library, "cuGetProcAddress_v2") : NULL;
    if (!find) {
        state = (CUresult)cudaErrorInsufficientDriver;
        return;
    }
    rt_drivers[0].find = rt_drivers[1].find = (PFN_cuGetProcAddress_v12000)find;
    resolve(&rt_drivers[0], CU_GET_PROC_ADDRESS_LEGACY_STREAM);
    resolve(&rt_drivers[1], CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM);
    state = DRIVE(cuInit, 0);
}

CUresult rt_open(void)
{
    pthread_once(&once, open_driver);
    return state;
}

CUresult rt_primary(int device, CUcontext *ctx)
{
    CUresult result = CUDA_SUCCESS;
    if (device < 0 || device >= DEVICES)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&lock);
    if (!primaries[device])
        result = DRIVE(cuDevicePrimaryCtxRetain, &primaries[device], device);
    *ctx = primaries[device];
    pthread_mutex_unlock(&lock);
    return result;
}

static CUresult enter_device(int device)
{
    CUcontext ctx;
    TRY(rt_primary(device, &ctx));
    return DRIVE(cuCtxSetCurrent, ctx);
}

CUresult rt_enter(void)
{
    CUcontext ctx;
    TRY(rt_open());
    TRY(DRIVE(cuCtxGetCurrent, &ctx));
    return ctx ? CUDA_SUCCESS : enter_device(rt_device);
}

/* The two interfaces number their errors alike. */
cudaError_t rt_done(CUresult result)
{
    if (result != CUDA_SUCCESS)
        last_error = (cudaError_t)result;
    return (cudaError_t)result;
}

cudaError_t cudaGetLastError(void)
{
    cudaError_t error = last_error;
    last_error = cudaSuccess;
    return error;
}

cudaError_t cudaPeekAtLastError(void)
{
    return last_error;
}

const char *cudaGetErrorString(cudaError_t error)
{
    const char *text;
    if (rt_drivers[0].cuGetErrorString_ && DRIVE(cuGetErrorString, (CUresult)error, &text) == CUDA_SUCCESS)
        return text;
    return cudaGetErrorName(error); /* one that only the runtime has */
}

/* ---- the thread's device ---- */

cudaError_t cudaGetDevice(int *device)
{
    CUcontext ctx;
    CUresult result = rt_open();
    if (result == CUDA_SUCCESS)
        result = DRIVE(cuCtxGetCurrent, &ctx);
    if (result != CUDA_SUCCESS || !device)
        return rt_done(result ? result : CUDA_ERROR_INVALID_VALUE);
    if (ctx)
        return rt_done(DRIVE(cuCtxGetDevice, device));
    *device = rt_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device)
{
    CUresult result = rt_open();
    if (result == CUDA_SUCCESS)
        result = enter_device(device);
    if (result == CUDA_SUCCESS)
        rt_device = device;
    return rt_done(result);
}

cudaError_t cudaInitDevice(int device, unsigned int device_flags, unsigned int flags)
{
    CUcontext ctx;
    CUresult result = rt_open();
    if (result == CUDA_SUCCESS && (flags & cudaInitDeviceFlagsAreValid))
        result = DRIVE(cuDevicePrimaryCtxSetFlags, device, device_flags & ~(unsigned)cudaDeviceMapHost);
    return rt_done(result ? result : rt_primary(device, &ctx));
}

cudaError_t cudaSetDeviceFlags(unsigned int flags)
{
    PASS_OPEN(cuDevicePrimaryCtxSetFlags, rt_device, flags & ~(unsigned)cudaDeviceMapHost);
}

cudaError_t cudaGetDeviceFlags(unsigned int *flags)
{
    int active;
    PASS_OPEN(cuDevicePrimaryCtxGetState, rt_device, flags, &active);
}

/* The device's context as new; it is retained again when next used. */
cudaError_t cudaDeviceReset(void)
{
    int device;
    cudaError_t error = cudaGetDevice(&device);
    if (error)
        return error;
    pthread_mutex_lock(&lock);
    if (device < DEVICES)
        primaries[device] = NULL;
    pthread_mutex_unlock(&lock);
    CUresult result = DRIVE(cuDevicePrimaryCtxReset, device);
    return rt_done(result ? result : DRIVE(cuCtxSetCurrent, NULL));
}

cudaError_t cudaDriverGetVersion(int *version)
{
    rt_open();
    return rt_done(version ? DRIVE(cuDriverGetVersion, version) : CUDA_ERROR_INVALID_VALUE);
}

cudaError_t cudaRuntimeGetVersion(int *version)
{
    if (!version)
        return rt_done(CUDA_ERROR_INVALID_VALUE);
    *version = CUDART_VERSION;
    return cudaSuccess;
}
