/* fakecuda.c: a driver for the client's tests: one FIFO timeline shared by all processes that map FAKE_DEVICE, exact stamps.
 *
 * A CUfunction is its duration in ns; 0 returns at once. Each process adds its device time to the counter FAKE_WHO.
 * FAKE_UUID is the first device's, in hexadecimal. While the file FAKE_HANG is there a launch that takes time makes the file
 * FAKE_HANG.in and waits.
 * It is strict where the client must be careful: an event recorded in a capturing stream, a query or an event made by a thread
 * that is not relaxed while a global capture is on, invalidates the capture. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>

#include "cuda_min.h"

#define API __attribute__((visibility("default")))

struct device {
    uint64_t until;      /* end of all that was submitted */
    uint64_t pad[7];
    uint64_t busy[8];    /* ns submitted, by FAKE_WHO */
    uint64_t launches[8];
};
struct CUctx_st { int device; };
struct CUstream_st { uint64_t end; int capturing; /* 1 active, 2 invalidated */ };
struct CUevent_st { uint64_t stamp; };

static struct device *device;
static int who;
static struct CUctx_st contexts[64];
static int context_count;
static struct CUstream_st legacy;
static __thread struct CUstream_st per_thread;
static __thread CUcontext stack[16];
static __thread int depth;
static __thread CUstreamCaptureMode thread_mode;
static int global_captures;
static CUstream captured;

static uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
static void sleep_until(uint64_t then)
{
    struct timespec t = {.tv_sec = (time_t)(then / 1000000000u), .tv_nsec = (long)(then % 1000000000u)};
    while (now_ns() < then)
        clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}
static CUstream real_stream(CUstream s) { return !s || s == CU_STREAM_LEGACY ? &legacy : s == CU_STREAM_PER_THREAD ? &per_thread : s; }

static bool unsafe(void) /* true: refused, and the capture is spoilt */
{
    if (__atomic_load_n(&global_captures, __ATOMIC_ACQUIRE) == 0 || thread_mode == CU_STREAM_CAPTURE_MODE_RELAXED)
        return false;
    if (captured)
        captured->capturing = 2;
    return true;
}

API CUresult cuInit(unsigned flags)
{
    (void)flags;
    const char *path = getenv("FAKE_DEVICE"), *me = getenv("FAKE_WHO");
    who = me ? atoi(me) & 7 : 0;
    if (device)
        return CUDA_SUCCESS;
    int fd = path ? open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0666) : -1;
    if (fd >= 0 && ftruncate(fd, 4096) == 0)
        device = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    else
        device = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (fd >= 0)
        close(fd);
    return CUDA_SUCCESS;
}
API CUresult cuDriverGetVersion(int *v) { *v = 13000; return CUDA_SUCCESS; }
API CUresult cuDeviceGetCount(int *n) { *n = 2; return CUDA_SUCCESS; }
API CUresult cuDeviceGet(CUdevice *d, int i) { *d = i; return CUDA_SUCCESS; }
API CUresult cuDeviceGetUuid(CUuuid *uuid, CUdevice d)
{
    const char *given = d == 0 ? getenv("FAKE_UUID") : NULL;
    memset(uuid, d + 1, sizeof *uuid);
    for (unsigned i = 0; given && i < sizeof *uuid && given[2 * i] && given[2 * i + 1]; i++) {
        char byte[3] = {given[2 * i], given[2 * i + 1]};
        ((unsigned char *)uuid)[i] = (unsigned char)strtoul(byte, NULL, 16);
    }
    return CUDA_SUCCESS;
}
API CUresult cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice d) { return cuDeviceGetUuid(uuid, d); }
API CUresult cuCtxGetDevice(CUdevice *d)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    *d = stack[depth - 1]->device;
    return CUDA_SUCCESS;
}
API CUresult cuCtxGetCurrent(CUcontext *c) { *c = depth ? stack[depth - 1] : NULL; return CUDA_SUCCESS; }
API CUresult cuCtxSetCurrent(CUcontext c) { if (!depth) depth = 1; stack[depth - 1] = c; return CUDA_SUCCESS; }
API CUresult cuCtxPushCurrent_v2(CUcontext c) { stack[depth++] = c; return CUDA_SUCCESS; }
API CUresult cuCtxPopCurrent_v2(CUcontext *c)
{
    if (!depth)
        return CUDA_ERROR_INVALID_CONTEXT;
    depth--;
    if (c)
        *c = stack[depth];
    return CUDA_SUCCESS;
}
API CUresult cuCtxCreate_v2(CUcontext *c, unsigned flags, CUdevice d)
{
    (void)flags;
    *c = &contexts[__atomic_fetch_add(&context_count, 1, __ATOMIC_ACQ_REL)];
    (*c)->device = d;
    return cuCtxPushCurrent_v2(*c);
}
API CUresult cuCtxDestroy_v2(CUcontext c) { (void)c; if (depth) depth--; return CUDA_SUCCESS; }
API CUresult cuStreamCreate(CUstream *s, unsigned flags) { (void)flags; *s = calloc(1, sizeof **s); return CUDA_SUCCESS; }
API CUresult cuStreamDestroy_v2(CUstream s) { (void)s; return CUDA_SUCCESS; }
API CUresult cuEventCreate(CUevent *e, unsigned flags)
{
    (void)flags;
    if (unsafe())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    *e = calloc(1, sizeof **e);
    return CUDA_SUCCESS;
}
API CUresult cuEventDestroy_v2(CUevent e) { free(e); return CUDA_SUCCESS; }
API CUresult cuEventRecord(CUevent e, CUstream s)
{
    const char *slow = getenv("FAKE_SLOW_RECORD_US"); /* a driver that takes its time before the call takes effect */
    if (slow)
        usleep((useconds_t)atoi(slow));
    s = real_stream(s);
    if (s->capturing) {
        s->capturing = 2; /* not what a real driver does, but nothing of ours may ever land in a capture */
        return CUDA_SUCCESS;
    }
    uint64_t now = now_ns();
    e->stamp = s->end > now ? s->end : now;
    return CUDA_SUCCESS;
}
API CUresult cuEventQuery(CUevent e)
{
    if (unsafe())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    return now_ns() >= e->stamp ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY;
}
API CUresult cuEventSynchronize(CUevent e)
{
    if (unsafe())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    sleep_until(e->stamp);
    return CUDA_SUCCESS;
}
API CUresult cuEventElapsedTime(float *ms, CUevent a, CUevent b)
{
    *ms = (float)((double)((int64_t)(b->stamp - a->stamp)) / 1e6);
    return CUDA_SUCCESS;
}
static void hang(void)
{
    const char *path = getenv("FAKE_HANG");
    if (!path || access(path, F_OK))
        return;
    char in[4096];
    snprintf(in, sizeof in, "%s.in", path);
    int fd = open(in, O_WRONLY | O_CREAT | O_CLOEXEC, 0644);
    if (fd >= 0)
        close(fd);
    while (access(path, F_OK) == 0)
        usleep(1000);
}
static CUresult submit(uint64_t ns, CUstream stream)
{
    hang();
    struct CUstream_st *s = real_stream(stream);
    if (s->capturing)
        return CUDA_SUCCESS;
    uint64_t until = __atomic_load_n(&device->until, __ATOMIC_RELAXED), now = now_ns(), end;
    do
        end = (until > now ? until : now) + ns;
    while (!__atomic_compare_exchange_n(&device->until, &until, end, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED));
    s->end = end;
    __atomic_fetch_add(&device->busy[who], ns, __ATOMIC_RELAXED);
    __atomic_fetch_add(&device->launches[who], 1, __ATOMIC_RELAXED);
    return CUDA_SUCCESS;
}
API CUresult cuLaunchKernel(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                            unsigned shared, CUstream stream, void **params, void **extra)
{
    (void)gx, (void)gy, (void)gz, (void)bx, (void)by, (void)bz, (void)shared, (void)params, (void)extra;
    if (!f)
        return CUDA_SUCCESS;
    return submit((uintptr_t)f, stream);
}
API CUresult cuLaunchKernel_ptsz(CUfunction f, unsigned gx, unsigned gy, unsigned gz, unsigned bx, unsigned by, unsigned bz,
                                 unsigned shared, CUstream stream, void **params, void **extra)
{
    return cuLaunchKernel(f, gx, gy, gz, bx, by, bz, shared, stream ? stream : CU_STREAM_PER_THREAD, params, extra);
}
API CUresult cuGraphLaunch(CUgraphExec g, CUstream stream) { return submit((uintptr_t)g & ~(uintptr_t)15, stream); }
API CUresult cuStreamSynchronize(CUstream s)
{
    if (unsafe())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    sleep_until(real_stream(s)->end);
    return CUDA_SUCCESS;
}
API CUresult cuStreamQuery(CUstream s) { return now_ns() >= real_stream(s)->end ? CUDA_SUCCESS : CUDA_ERROR_NOT_READY; }
API CUresult cuCtxSynchronize(void)
{
    if (unsafe())
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    sleep_until(__atomic_load_n(&device->until, __ATOMIC_ACQUIRE)); /* of everybody: close enough for a test */
    return CUDA_SUCCESS;
}
API CUresult cuStreamBeginCapture_v2(CUstream s, CUstreamCaptureMode mode)
{
    s->capturing = 1;
    captured = s;
    if (mode == CU_STREAM_CAPTURE_MODE_GLOBAL)
        __atomic_fetch_add(&global_captures, 1, __ATOMIC_ACQ_REL);
    return CUDA_SUCCESS;
}
API CUresult cuStreamEndCapture(CUstream s, CUgraph *g)
{
    int was = s->capturing;
    s->capturing = 0;
    captured = NULL;
    if (global_captures)
        __atomic_fetch_sub(&global_captures, 1, __ATOMIC_ACQ_REL);
    *g = was == 1 ? (CUgraph)s : NULL;
    return was == 1 ? CUDA_SUCCESS : CUDA_ERROR_STREAM_CAPTURE_INVALIDATED;
}
API CUresult cuStreamIsCapturing(CUstream s, CUstreamCaptureStatus *status)
{
    s = real_stream(s);
    *status = (CUstreamCaptureStatus)s->capturing;
    return CUDA_SUCCESS;
}
API CUresult cuThreadExchangeStreamCaptureMode(CUstreamCaptureMode *mode)
{
    CUstreamCaptureMode old = thread_mode;
    thread_mode = *mode;
    *mode = old;
    return CUDA_SUCCESS;
}
/* On a thread of the driver's own; the stream waits for it. */
#include <pthread.h>
struct call { CUhostFn f; void *data; CUstream s; };
static void *run_call(void *p)
{
    struct call call = *(struct call *)p;
    free(p);
    depth = 1;
    stack[0] = &contexts[0];
    call.f(call.data);
    call.s->end = now_ns();
    return NULL;
}
API CUresult cuLaunchHostFunc(CUstream s, CUhostFn f, void *data)
{
    struct call *call = malloc(sizeof *call);
    pthread_t t;
    *call = (struct call){f, data, real_stream(s)};
    call->s->end = now_ns() + 3600000000000ull; /* until it has run */
    pthread_create(&t, NULL, run_call, call);
    pthread_detach(t);
    return CUDA_SUCCESS;
}
