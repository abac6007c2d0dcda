/* context.c: where the calling thread's allocations land, what a context takes, and what is lost with it. */
#include <pthread.h>
#include <stdlib.h>

#include "atomics.h"
#include "instance.h"
#include "lock.h"
#include "memory.h"
#include "streams.h"

CU_NEED(CUresult, cuCtxGetCurrent, (CUcontext *context));
CU_NEED(CUresult, cuCtxGetDevice, (CUdevice *device));
CU_NEED(CUresult, cuCtxPushCurrent_v2, (CUcontext context));
CU_NEED(CUresult, cuCtxPopCurrent_v2, (CUcontext *context));
CU_NEED(CUresult, cuStreamGetCtx, (CUstream stream, CUcontext *context));
CU_NEED(CUresult, cuCtxFromGreenCtx, (CUcontext *context, CUgreenCtx green));
CU_NEED(CUresult, cuDevicePrimaryCtxGetState, (CUdevice device, unsigned int *flags, int *active));

/* The last context this thread asked about. A handle may come again for another device once its context has died: `deaths`
 * tells. */
static uint32_t deaths;
static CGPU_TLS struct {
    CUcontext context, owner;
    uint32_t deaths;
    int gpu;
} last;

/* A green context is a part of its device's primary one: what is allocated in it lives as long as that. */
struct green {
    CUgreenCtx handle;
    CUdevice device;
    CUcontext context, primary;
    struct green *next;
};
#define GREENS 128 /* that are looked at: there are as many as a card has multiprocessors, at most */
static struct green *greens;
static struct hook_lock greens_lock;

static CUcontext owner_of(CUcontext context)
{
    if (__builtin_expect(!load_relaxed(&greens), 1))
        return context;
    hook_lock_take(&greens_lock);
    for (const struct green *green = greens; green; green = green->next)
        if (green->context == context && green->primary) {
            context = green->primary;
            break;
        }
    hook_lock_drop(&greens_lock);
    return context;
}

/* Of `context`, which is current. */
static struct place place_in_current(CUcontext context)
{
    CUdevice device;
    uint32_t now = load_acquire(&deaths);
    if (last.context == context && last.deaths == now)
        return (struct place){last.gpu, last.owner};
    if (REAL(cuCtxGetDevice)(&device) != CUDA_SUCCESS)
        return (struct place){-1, NULL};
    struct place place = {hook_gpu_of_device(device), owner_of(context)};
    if (place.gpu >= 0) {
        last.context = context;
        last.owner = (CUcontext)(uintptr_t)place.context;
        last.deaths = now;
        last.gpu = place.gpu;
    }
    return place;
}

/* *context is the context itself, where the place has what its memory dies with. */
static struct place here(CUcontext *context)
{
    *context = NULL;
    if (hook_gpus() == 0 || !have(cuCtxGetCurrent) || !have(cuCtxGetDevice) ||
        REAL(cuCtxGetCurrent)(context) != CUDA_SUCCESS || !*context)
        return (struct place){-1, NULL};
    return place_in_current(*context);
}

struct place place_here(void)
{
    CUcontext context;
    return here(&context);
}

int hook_current_gpu(void)
{
    return place_here().gpu;
}

static struct place of_stream(CUstream stream, CUcontext *context)
{
    CUcontext current = NULL, popped;
    *context = NULL;
    if (hook_gpus() == 0 || !stream || stream == CU_STREAM_LEGACY || stream == CU_STREAM_PER_THREAD || !have(cuStreamGetCtx))
        return here(context);
    if (REAL(cuStreamGetCtx)(stream, context) != CUDA_SUCCESS || !*context)
        return (struct place){-1, NULL}; /* the driver will say what is wrong with it */
    if (hook_gpus() == 1 && seen_gpus() == 1)
        return (struct place){0, owner_of(*context)};
    if (!have(cuCtxGetCurrent) || !have(cuCtxGetDevice))
        return (struct place){-1, NULL};
    if (REAL(cuCtxGetCurrent)(&current) == CUDA_SUCCESS && current == *context)
        return place_in_current(*context);
    if (!have(cuCtxPushCurrent_v2) || !have(cuCtxPopCurrent_v2) || REAL(cuCtxPushCurrent_v2)(*context) != CUDA_SUCCESS)
        return (struct place){-1, NULL};
    struct place place = place_in_current(*context);
    REAL(cuCtxPopCurrent_v2)(&popped);
    return place;
}

struct place place_of_stream(CUstream stream)
{
    CUcontext context;
    return of_stream(stream, &context);
}

int gpu_of_stream(CUstream stream, CUcontext *context)
{
    return of_stream(stream, context).gpu;
}

/* ---- the making of a context ----
 *
 * What one takes, no call tells, and afterwards NVML alone. The first one of an instance is reported: the daemon asks NVML, and the
 * call returns when it counts (ctl.mem_other). From then on it is known what the least takes (ctl.mem_context), and that is
 * charged before the driver is asked: of two that race for the last room one gets a context. The audit adds what it takes beyond. */

#define NOTE_NS 3000000000ull /* beyond that it counts when it counts. The daemon answers after two seconds at the latest */

struct making {
    struct gate *gate; /* NULL: not ours to count */
    int gpu;
    bool known;
    uint64_t bytes;
    int cancel; /* as the thread had it: it must not end with the lock */
};
static struct hook_lock making_lock; /* two threads that want the primary context make one */
static CGPU_TLS bool making_here;    /* what the driver calls back from in there may make another */

static bool primary_is_active(CUdevice device)
{
    unsigned int flags;
    int active = 0;
    return !have(cuDevicePrimaryCtxGetState) || REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) != CUDA_SUCCESS ||
           active;
}

static void making_over(const struct making *making)
{
    making_here = false;
    hook_lock_drop(&making_lock);
    pthread_setcancelstate(making->cancel, NULL);
}

/* `primary`: the device's, which may be there already. false: there is no room for one. */
static bool making_begin(struct making *making, CUdevice device, bool primary)
{
    *making = (struct making){.gpu = hook_gpus() ? hook_gpu_of_device(device) : -1};
    struct gate *gate = making->gpu >= 0 && making->gpu < gate_count() ? gate_of(making->gpu) : NULL;
    if (making_here || !gate || !load_relaxed(&gate->slot) || !(load_relaxed(&gate->told) & CGPU_GPU_NOTES) ||
        (primary && primary_is_active(device)))
        return true;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &making->cancel);
    hook_lock_take(&making_lock);
    making_here = true;
    if (primary && primary_is_active(device)) { /* by another thread meanwhile */
        making_over(making);
        return true;
    }
    making->known = load_acquire(&gate->ctl->contexts) != 0;
    making->bytes = making->known ? load_relaxed(&gate->ctl->mem_context) / LEDGER_UNIT * LEDGER_UNIT : 0;
    if (making->bytes && !memory_charge(making->gpu, making->bytes)) {
        making_over(making);
        return false;
    }
    making->gate = gate;
    return true;
}

/* `context`: it, where it was made. What was charged ends with it, as what is allocated in it. */
static void making_end(const struct making *making, CUcontext context)
{
    if (!making->gate)
        return;
    struct ledger_entry entry = {.gpu = making->gpu, .bytes = making->bytes, .owner = context};
    if (making->bytes && context)
        ledger_put(LEDGER_ARRAY, (uint64_t)(uintptr_t)context, &entry); /* known by a handle, as an array is */
    else if (making->bytes)
        ledger_refund(making->gpu, making->bytes);
    if (!making->known && context)
        gate_note(making->gate, NOTE_NS);
    making_over(making);
}

#define CREATE_WRAP(name, args, call) \
    CU_WRAP(CUresult, name, args) \
    { \
        struct making making; \
        if (!making_begin(&making, device, false)) \
            return CUDA_ERROR_OUT_OF_MEMORY; \
        CUresult result = REAL(name) call; \
        making_end(&making, result == CUDA_SUCCESS ? *context : NULL); \
        gate_context_changed(); \
        return result; \
    }

CREATE_WRAP(cuCtxCreate, (CUcontext *context, unsigned flags, CUdevice device), (context, flags, device))
CREATE_WRAP(cuCtxCreate_v2, (CUcontext *context, unsigned flags, CUdevice device), (context, flags, device))
CREATE_WRAP(cuCtxCreate_v3, (CUcontext *context, CUexecAffinityParam *params, int count, unsigned flags, CUdevice device),
            (context, params, count, flags, device))
CREATE_WRAP(cuCtxCreate_v4, (CUcontext *context, CUctxCreateParams *params, unsigned flags, CUdevice device),
            (context, params, flags, device))

/* ---- the end of a context ----
 *
 * Its allocations are set apart under a tag before the driver is asked, since another thread may be given a context with the
 * same handle at once; afterwards they are dropped, or put back. A tag is the address of a local variable: unique while it
 * lives. streams.c must forget the context's streams while they still exist. */

/* device: whose primary context it was; -1: another one. */
static void context_died(const void *tag, CUdevice device)
{
    fetch_add(&deaths, 1);
    ledger_drop_owner(tag);
    pools_context_ended(device);
}

static CUresult destroy(CUcontext context, CUresult (*real)(CUcontext))
{
    char tag;
    if (hook_gpus() == 0 || !context)
        return real(context);
    streams_forget_context(context);
    ledger_retag_owner(context, &tag);
    CUresult result = real(context);
    if (result == CUDA_SUCCESS)
        context_died(&tag, -1);
    else
        ledger_retag_owner(&tag, context);
    gate_context_changed();
    return result;
}

CU_WRAP(CUresult, cuCtxDestroy, (CUcontext context))
{
    return destroy(context, REAL(cuCtxDestroy));
}

CU_WRAP(CUresult, cuCtxDestroy_v2, (CUcontext context))
{
    return destroy(context, REAL(cuCtxDestroy_v2));
}

/* cuCtxAttach adds a user to a context, cuCtxDetach takes one away and destroys with the last. Nobody has used the pair since
 * CUDA 4: once there was an attach, a detach is taken for the lesser of the two, and the memory counts until the process ends
 * or the context is destroyed. */
static bool attached;

CU_WRAP(CUresult, cuCtxAttach, (CUcontext *context, unsigned int flags))
{
    store_relaxed(&attached, true);
    return REAL(cuCtxAttach)(context, flags);
}

CU_WRAP(CUresult, cuCtxDetach, (CUcontext context))
{
    return load_relaxed(&attached) ? REAL(cuCtxDetach)(context) : destroy(context, REAL(cuCtxDetach));
}

/* ---- primary contexts: one a device, counted by the driver ---- */

#define DEVICES 64
static int retained[DEVICES]; /* by the program, through us */

CU_WRAP(CUresult, cuDevicePrimaryCtxRetain, (CUcontext *context, CUdevice device))
{
    struct making making;
    if (!making_begin(&making, device, true))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = REAL(cuDevicePrimaryCtxRetain)(context, device);
    making_end(&making, result == CUDA_SUCCESS ? *context : NULL);
    if (result == CUDA_SUCCESS && device >= 0 && device < DEVICES)
        fetch_add(&retained[device], 1);
    return result;
}

static struct hook_lock primary; /* around the driver's calls here, so that two releases see each other's outcome in order */

/* The handle, NULL if the context is not active. Leaves the count as it was. */
static CUcontext primary_context(CUdevice device, CUresult (*release)(CUdevice))
{
    CUcontext context = NULL;
    unsigned int flags;
    int active = 0;
    if (hook_gpus() == 0 || !have(cuDevicePrimaryCtxGetState) || !have(cuDevicePrimaryCtxRetain) ||
        REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) != CUDA_SUCCESS || !active ||
        REAL(cuDevicePrimaryCtxRetain)(&context, device) != CUDA_SUCCESS)
        return NULL;
    release(device);
    return context;
}

static CUresult green_destroy(CUgreenCtx green);
static void forget_greens(CUdevice device);

/* `real`, or the end of `green`, which gives the primary context back like a release. */
static CUresult end_primary(CUdevice device, CUresult (*real)(CUdevice), CUresult (*release)(CUdevice), bool always,
                            CUgreenCtx green)
{
    char tag;
    unsigned int flags;
    int active = 0;
    if (hook_gpus() == 0 || !release)
        return green ? green_destroy(green) : real(device);
    hook_lock_take(&primary);
    CUcontext context = primary_context(device, release);
    bool ends = always || device < 0 || device >= DEVICES || load_relaxed(&retained[device]) <= 1;
    if (context && ends) {
        streams_forget_context(context);
        forget_greens(device);
    }
    if (context)
        ledger_retag_owner(context, &tag);
    CUresult result = green ? green_destroy(green) : real(device);
    if (result == CUDA_SUCCESS && !always && device >= 0 && device < DEVICES)
        fetch_sub(&retained[device], 1);
    if (context) {
        bool dead = result == CUDA_SUCCESS &&
                    (always || (REAL(cuDevicePrimaryCtxGetState)(device, &flags, &active) == CUDA_SUCCESS && !active));
        if (dead)
            context_died(&tag, device);
        else
            ledger_retag_owner(&tag, context);
    }
    hook_lock_drop(&primary);
    gate_context_changed();
    return result;
}

CU_WRAP(CUresult, cuDevicePrimaryCtxRelease, (CUdevice device))
{
    return end_primary(device, REAL(cuDevicePrimaryCtxRelease), REAL(cuDevicePrimaryCtxRelease), false, NULL);
}

CU_WRAP(CUresult, cuDevicePrimaryCtxRelease_v2, (CUdevice device))
{
    return end_primary(device, REAL(cuDevicePrimaryCtxRelease_v2), REAL(cuDevicePrimaryCtxRelease_v2), false, NULL);
}

/* a reset frees everything in the context, whoever else still uses it */
CU_WRAP(CUresult, cuDevicePrimaryCtxReset, (CUdevice device))
{
    return end_primary(device, REAL(cuDevicePrimaryCtxReset), REAL(cuDevicePrimaryCtxRelease), true, NULL);
}

CU_WRAP(CUresult, cuDevicePrimaryCtxReset_v2, (CUdevice device))
{
    return end_primary(device, REAL(cuDevicePrimaryCtxReset_v2),
                       have(cuDevicePrimaryCtxRelease_v2) ? REAL(cuDevicePrimaryCtxRelease_v2)
                                                          : REAL(cuDevicePrimaryCtxRelease), true, NULL);
}

/* ---- green contexts ---- */

static CUresult (*release_call(void))(CUdevice)
{
    return have(cuDevicePrimaryCtxRelease_v2) ? REAL(cuDevicePrimaryCtxRelease_v2) : REAL(cuDevicePrimaryCtxRelease);
}

CU_WRAP(CUresult, cuGreenCtxCreate, (CUgreenCtx *green, CUdevResourceDesc resources, CUdevice device, unsigned int flags))
{
    struct making making; /* of the primary context, which it is a part of */
    if (!making_begin(&making, device, true))
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = REAL(cuGreenCtxCreate)(green, resources, device, flags);
    CUcontext context = NULL;
    if (result == CUDA_SUCCESS && hook_gpus()) {
        hook_lock_take(&primary);
        context = primary_context(device, release_call());
        hook_lock_drop(&primary);
    }
    making_end(&making, context);
    if (result != CUDA_SUCCESS || hook_gpus() == 0)
        return result;
    if (device >= 0 && device < DEVICES)
        fetch_add(&retained[device], 1);
    struct green *one = calloc(1, sizeof *one);
    if (!one)
        return result; /* its memory counts until it is freed, or the process ends */
    *one = (struct green){.handle = *green, .device = device, .primary = context};
    if (have(cuCtxFromGreenCtx) && REAL(cuCtxFromGreenCtx)(&one->context, *green) != CUDA_SUCCESS)
        one->context = NULL; /* what its streams are said to be of, also where the program never asks */
    hook_lock_take(&greens_lock);
    one->next = greens;
    store_relaxed(&greens, one);
    hook_lock_drop(&greens_lock);
    fetch_add(&deaths, 1); /* what threads remember of a context of this handle is another's */
    return result;
}

/* Their streams go with the primary context. */
static void forget_greens(CUdevice device)
{
    CUcontext contexts[GREENS];
    int count = 0;
    hook_lock_take(&greens_lock);
    for (const struct green *green = greens; green && count < GREENS; green = green->next)
        if (green->device == device && green->context)
            contexts[count++] = green->context;
    hook_lock_drop(&greens_lock);
    for (int i = 0; i < count; i++)
        streams_forget_context(contexts[i]);
}

CU_WRAP(CUresult, cuGreenCtxDestroy, (CUgreenCtx green))
{
    struct green *gone = NULL;
    hook_lock_take(&greens_lock);
    struct green **at = &greens;
    while (*at && (*at)->handle != green)
        at = &(*at)->next;
    if ((gone = *at))
        *at = gone->next;
    hook_lock_drop(&greens_lock);
    if (!gone)
        return REAL(cuGreenCtxDestroy)(green);
    if (gone->context)
        streams_forget_context(gone->context);
    CUresult result = end_primary(gone->device, NULL, release_call(), false, green);
    if (result == CUDA_SUCCESS) {
        fetch_add(&deaths, 1);
        free(gone);
        return result;
    }
    hook_lock_take(&greens_lock);
    gone->next = greens;
    store_relaxed(&greens, gone);
    hook_lock_drop(&greens_lock);
    return result;
}

static CUresult green_destroy(CUgreenCtx green)
{
    return REAL(cuGreenCtxDestroy)(green);
}

void context_after_fork(void)
{
    greens = NULL;
    greens_lock = (struct hook_lock){0};
    primary = making_lock = (struct hook_lock){0};
    making_here = false;
    last.context = NULL;
}
