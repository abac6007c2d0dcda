/* green.c: green contexts and what they are made of. One is a context with a part of the multiprocessors, inside its device's
 * primary context: streams are its own, memory, modules and events are the primary's, which it keeps active. Kernels take the
 * time that their names say, however many multiprocessors they have. */
#include <string.h>
#include "cuda/sim.h"

#define TYPE_SM          1
#define MULTIPROCESSORS  132 /* device.c */
#define PART             8   /* the least part, and the step: multiprocessors that are scheduled together */
#define LONE_PART        2   /* where nobody minds that */
#define IGNORE_COSCHEDULING 1u
#define MAX_CLUSTER      2u
#define DEFAULT_STREAM   1u

/* What the program carries from call to call. `smCount` is all that CUDA 13.0 has; later ones have the three beside it. */
typedef struct {
    int type;
    uint32_t device, first, whole;   /* ours: of which device, from which on; whole: may be split */
    unsigned char padding[80];
    unsigned int smCount, minSmPartitionSize, smCoscheduledAlignment, flags;
    unsigned char oversize[32];
} CUdevResource;
_Static_assert(sizeof(CUdevResource) == 144 && offsetof(CUdevResource, smCount) == 96, "CUDA's");

struct CUdevResourceDesc_st {
    struct object object;
    uint32_t device, first, count;
};

struct CUgreenCtx_st {
    struct object object;
    struct gpu *gpu;
    struct CUctx_st *context;
    struct CUstream_st *all;         /* that what concerns all its streams goes through */
    uint32_t first, count;
    struct CUgreenCtx_st *next;
};
static struct CUgreenCtx_st *greens; /* under api_lock */

API cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, int type);
API cuCtxGetDevResource(CUcontext ctx, CUdevResource *resource, int type);
API cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource *resource, int type);
API cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *groups, const CUdevResource *input,
                                CUdevResource *remainder, unsigned int flags, unsigned int least);
API cuDevResourceGenerateDesc(CUdevResourceDesc *desc, CUdevResource *resources, unsigned int count);
API cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc desc, CUdevice device, unsigned int flags);
API cuGreenCtxDestroy(CUgreenCtx green);
API cuCtxFromGreenCtx(CUcontext *ctx, CUgreenCtx green);
API cuGreenCtxGetId(CUgreenCtx green, unsigned long long *id);
API cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx green, unsigned int flags, int priority);
API cuGreenCtxRecordEvent(CUgreenCtx green, CUevent event);
API cuGreenCtxWaitEvent(CUgreenCtx green, CUevent event);

static bool valid(const struct CUgreenCtx_st *green)
{
    return object_is(green, OBJ_GREEN) && green->context->active;
}

/* ---- resources ---- */

static CUresult fill(CUdevResource *out, int type, const struct gpu *gpu, uint32_t first, uint32_t count, bool whole)
{
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    if (type != TYPE_SM)
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    *out = (CUdevResource){.type = TYPE_SM, .device = (uint32_t)gpu->ordinal, .first = first, .whole = whole,
                           .smCount = count, .minSmPartitionSize = PART, .smCoscheduledAlignment = PART};
    return CUDA_SUCCESS;
}

API cuDeviceGetDevResource(CUdevice device, CUdevResource *resource, int type)
{
    CHECK_INIT();
    const struct gpu *gpu = gpu_of(device);
    return gpu ? fill(resource, type, gpu, 0, MULTIPROCESSORS, true) : CUDA_ERROR_INVALID_DEVICE;
}

API cuGreenCtxGetDevResource(CUgreenCtx green, CUdevResource *resource, int type)
{
    CHECK_INIT();
    return valid(green) ? fill(resource, type, green->gpu, green->first, green->count, true) : CUDA_ERROR_INVALID_CONTEXT;
}

API cuCtxGetDevResource(CUcontext ctx, CUdevResource *resource, int type)
{
    CHECK_INIT();
    if (!object_is(ctx, OBJ_CONTEXT) || !ctx->active)
        return CUDA_ERROR_INVALID_CONTEXT;
    return ctx->green ? cuGreenCtxGetDevResource(ctx->green, resource, type)
                      : fill(resource, type, ctx->gpu, 0, MULTIPROCESSORS, true);
}

API cuDevSmResourceSplitByCount(CUdevResource *result, unsigned int *groups, const CUdevResource *input,
                                CUdevResource *remainder, unsigned int flags, unsigned int least)
{
    CHECK_INIT();
    if (!groups || !input || (flags & ~(IGNORE_COSCHEDULING | MAX_CLUSTER)))
        return CUDA_ERROR_INVALID_VALUE;
    if (input->type != TYPE_SM)
        return CUDA_ERROR_INVALID_RESOURCE_TYPE;
    const struct gpu *gpu = gpu_of((CUdevice)input->device);
    if (!gpu || !input->whole || least > input->smCount)
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    uint32_t step = flags & IGNORE_COSCHEDULING ? LONE_PART : PART;
    uint32_t part = (least > step ? least + step - 1 : step) / step * step, most = input->smCount / part;
    uint32_t count = result && *groups < most ? *groups : most;
    for (uint32_t i = 0; result && i < count; i++)
        fill(&result[i], TYPE_SM, gpu, input->first + i * part, part, false);
    if (remainder && count * part < input->smCount)
        fill(remainder, TYPE_SM, gpu, input->first + count * part, input->smCount - count * part, false);
    else if (remainder)
        *remainder = (CUdevResource){0};
    *groups = count;
    return CUDA_SUCCESS;
}

/* Several parts make one where they lie side by side. */
API cuDevResourceGenerateDesc(CUdevResourceDesc *out, CUdevResource *resources, unsigned int count)
{
    CHECK_INIT();
    if (!out || !resources || !count)
        return CUDA_ERROR_INVALID_VALUE;
    uint32_t sum = 0;
    for (unsigned int i = 0; i < count; i++) {
        if (resources[i].type != TYPE_SM)
            return CUDA_ERROR_INVALID_RESOURCE_TYPE;
        if (resources[i].device != resources[0].device || resources[i].first != resources[0].first + sum)
            return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
        sum += resources[i].smCount;
    }
    if (!gpu_of((CUdevice)resources[0].device) || !sum || resources[0].first + sum > MULTIPROCESSORS)
        return CUDA_ERROR_INVALID_RESOURCE_CONFIGURATION;
    struct CUdevResourceDesc_st *desc = object_new(OBJ_RESOURCES, sizeof *desc, NULL); /* there is no call to free one */
    if (!desc)
        return CUDA_ERROR_OUT_OF_MEMORY;
    desc->device = resources[0].device;
    desc->first = resources[0].first;
    desc->count = sum;
    *out = desc;
    return CUDA_SUCCESS;
}

/* ---- life ---- */

static CUresult create(struct gpu *gpu, const struct CUdevResourceDesc_st *desc, CUgreenCtx *out)
{
    struct CUctx_st *primary;
    TRY(primary_retain(gpu, &primary));
    struct CUgreenCtx_st *green = object_new(OBJ_GREEN, sizeof *green, NULL);
    CUresult result = green ? context_new_green(green, gpu, &green->context) : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS)
        result = stream_new(green->context, CU_STREAM_NON_BLOCKING, 0, &green->all);
    if (result == CUDA_SUCCESS)
        green->all->hidden = true;
    if (result != CUDA_SUCCESS) {
        if (green && green->context)
            context_end_green(green->context);
        if (green)
            object_free(green);
        primary_release(gpu);
        return result;
    }
    green->gpu = gpu;
    green->first = desc->first;
    green->count = desc->count;
    green->next = greens;
    greens = green;
    *out = green;
    return CUDA_SUCCESS;
}

API cuGreenCtxCreate(CUgreenCtx *green, CUdevResourceDesc desc, CUdevice device, unsigned int flags)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    if (!green || flags != DEFAULT_STREAM || !object_is(desc, OBJ_RESOURCES))
        return CUDA_ERROR_INVALID_VALUE;
    if (!gpu || desc->device != (uint32_t)gpu->ordinal)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    CUresult result = create(gpu, desc, green);
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* Streams of the program's live on, detached: only cuStreamDestroy takes them yet. */
API cuGreenCtxDestroy(CUgreenCtx green)
{
    CHECK_INIT();
    if (!object_is(green, OBJ_GREEN))
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&api_lock);
    for (struct CUgreenCtx_st **at = &greens; *at; at = &(*at)->next)
        if (*at == green) {
            *at = green->next;
            break;
        }
    if (green->context->active)
        queue_wait_all(&green->gpu->queue);
    context_end_green(green->context);
    struct gpu *gpu = green->gpu;
    object_free(green);
    if (gpu->primary->retained)
        primary_release(gpu);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

/* Under api_lock, before all that is in the primary context goes. */
void greens_end(struct gpu *gpu)
{
    for (struct CUgreenCtx_st *green = greens; green; green = green->next)
        if (green->gpu == gpu && green->context->active)
            context_drop_green(green->context);
}

API cuCtxFromGreenCtx(CUcontext *ctx, CUgreenCtx green)
{
    CHECK_INIT();
    if (!valid(green))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!ctx)
        return CUDA_ERROR_INVALID_VALUE;
    *ctx = green->context;
    return CUDA_SUCCESS;
}

API cuGreenCtxGetId(CUgreenCtx green, unsigned long long *id)
{
    CHECK_INIT();
    if (!valid(green))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!id)
        return CUDA_ERROR_INVALID_VALUE;
    *id = green->context->id;
    return CUDA_SUCCESS;
}

/* ---- streams ---- */

API cuGreenCtxStreamCreate(CUstream *stream, CUgreenCtx green, unsigned int flags, int priority)
{
    CHECK_INIT();
    if (!stream || flags != CU_STREAM_NON_BLOCKING)
        return CUDA_ERROR_INVALID_VALUE;
    if (!valid(green))
        return CUDA_ERROR_INVALID_CONTEXT;
    pthread_mutex_lock(&api_lock);
    CUresult result = stream_new(green->context, flags, priority, stream);
    pthread_mutex_unlock(&api_lock);
    return result;
}

static CUresult get_green(bool ptds, CUstream handle, CUgreenCtx *green)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (!green)
        return CUDA_ERROR_INVALID_VALUE;
    *green = stream->object.ctx->green;
    return CUDA_SUCCESS;
}

API cuStreamGetGreenCtx(CUstream stream, CUgreenCtx *green);
API cuStreamGetGreenCtx(CUstream stream, CUgreenCtx *green)
{
    return get_green(false, stream, green);
}

/* One stream for each channel that its streams use: what a channel waits for, all of them do. */
static CUresult streams_of(struct CUgreenCtx_st *green, CUevent event, struct CUstream_st *streams[SIM_CHANNELS])
{
    CHECK_INIT();
    if (!valid(green))
        return CUDA_ERROR_INVALID_CONTEXT;
    if (!object_is(event, OBJ_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (green->context->captures)
        return CUDA_ERROR_STREAM_CAPTURE_UNSUPPORTED;
    memset(streams, 0, SIM_CHANNELS * sizeof *streams);
    pthread_mutex_lock(&api_lock);
    for (struct object *object = green->context->children; object; object = object->next)
        if (object->type == OBJ_STREAM)
            streams[((struct CUstream_st *)object)->channel] = (struct CUstream_st *)object;
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuGreenCtxRecordEvent(CUgreenCtx green, CUevent event)
{
    struct CUstream_st *streams[SIM_CHANNELS];
    TRY(streams_of(green, event, streams));
    struct queue *queue = &green->gpu->queue;
    for (uint32_t c = 0; c < SIM_CHANNELS; c++) {
        uint64_t tail = streams[c] ? queue_tail(queue, c) : 0;
        struct work wait = {.kind = SIM_WAIT, .dep = c, .dep_seq = tail - 1};
        if (tail && c != green->all->channel && queue_behind(queue, c, tail))
            TRY(queue_append(queue, green->all->channel, &wait));
    }
    event->capture_id = 0;
    return event_record(event, green->all);
}

API cuGreenCtxWaitEvent(CUgreenCtx green, CUevent event)
{
    struct CUstream_st *streams[SIM_CHANNELS];
    TRY(streams_of(green, event, streams));
    for (uint32_t c = 0; c < SIM_CHANNELS; c++)
        if (streams[c])
            TRY(event_wait(streams[c], event));
    return CUDA_SUCCESS;
}
