/* copy.c: boxes of bytes that are moved when their time in the queue is up. memcpy.c has the entry points. */
#include <stdlib.h>
#include <string.h>
#include "cuda/sim.h"

#define STAGED (64u << 10) /* the real driver copies this much of pageable memory aside before it returns */

static void move_bytes(const struct copy *c)
{
    for (uint64_t z = 0; z < c->depth; z++)
        for (uint64_t y = 0; y < c->height; y++)
            memmove(c->dst + z * c->dst_slice + y * c->dst_pitch, c->src + z * c->src_slice + y * c->src_pitch,
                    c->width);
}

static void fill_bytes(const struct fill *f)
{
    for (uint64_t y = 0; y < f->height; y++) {
        uint8_t *row = f->dst + y * f->pitch;
        if (f->element == 1) {
            memset(row, (int)f->value, f->width);
            continue;
        }
        for (uint64_t x = 0; x < f->width; x++) {
            if (f->element == 2)
                ((uint16_t *)row)[x] = (uint16_t)f->value;
            else
                ((uint32_t *)row)[x] = f->value;
        }
    }
}

static void run_copy(void *arg, uint64_t seq, uint64_t done_ns)
{
    (void)seq;
    (void)done_ns;
    move_bytes(arg);
    free(arg);
}

static void run_fill(void *arg, uint64_t seq, uint64_t done_ns)
{
    (void)seq;
    (void)done_ns;
    fill_bytes(arg);
    free(arg);
}

static uint64_t copy_ns(uint64_t bytes)
{
    static uint64_t fixed, rate; /* the environment is read once; reading it twice at once does no harm */
    if (!load_relaxed(&rate)) {
        store_relaxed(&fixed, sim_env_u64("CGPU_SIM_COPY_NS", 1000));
        uint64_t given = sim_env_u64("CGPU_SIM_COPY_BYTES", 25);
        store_relaxed(&rate, given ? given : 25);
    }
    return load_relaxed(&fixed) + bytes / load_relaxed(&rate);
}

CUresult copy_submit(struct CUstream_st *stream, const struct copy *from, bool prompt)
{
    struct copy *copy = malloc(sizeof *copy);
    struct work work = {.kind = SIM_DELAY, .ns = copy_ns(from->width * from->height * from->depth),
                        .action = {.run = run_copy, .arg = copy, .prompt = prompt}};
    if (!copy)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *copy = *from;
    CUresult result = stream_append(stream, &work);
    if (result != CUDA_SUCCESS)
        free(copy);
    return result;
}

CUresult fill_submit(struct CUstream_st *stream, const struct fill *from, bool prompt)
{
    struct fill *fill = malloc(sizeof *fill);
    struct work work = {.kind = SIM_KERNEL, .ns = 1000 + from->width * from->element * from->height / 1000,
                        .action = {.run = run_fill, .arg = fill, .prompt = prompt}};
    if (!fill)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *fill = *from;
    CUresult result = stream_append(stream, &work);
    if (result != CUDA_SUCCESS)
        free(fill);
    return result;
}

/* ---- with capture, and what host memory the driver knows ---- */

static bool known(const void *address)
{
    pthread_mutex_lock(&api_lock);
    bool found = block_find((uintptr_t)address) != NULL;
    pthread_mutex_unlock(&api_lock);
    return found;
}

/* Pageable memory: little of it is copied aside, otherwise the call waits, as the real one does. */
static CUresult submit_async(struct CUstream_st *stream, struct copy copy, bool from_host, bool to_host)
{
    uint64_t bytes = copy.width * copy.height * copy.depth;
    bool pageable_source = from_host && !known(copy.src);
    if (pageable_source && copy.height == 1 && copy.depth == 1 && bytes <= STAGED) {
        struct copy *staged = malloc(sizeof *staged + bytes);
        if (!staged)
            return CUDA_ERROR_OUT_OF_MEMORY;
        *staged = copy;
        staged->src = memcpy(staged + 1, copy.src, bytes);
        struct work work =
            {.kind = SIM_DELAY, .ns = copy_ns(bytes), .action = {.run = run_copy, .arg = staged, .prompt = true}};
        CUresult result = stream_append(stream, &work);
        if (result != CUDA_SUCCESS)
            free(staged);
        return result;
    }
    bool wait = pageable_source || (to_host && !known(copy.dst));
    TRY(copy_submit(stream, &copy, !wait));
    return wait ? stream_sync(stream) : CUDA_SUCCESS;
}

static CUresult captured(struct CUstream_st *stream, const struct node_params *node, bool sync, bool *taken)
{
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&api_lock);
    *taken = stream->capture && !sync;
    if (sync)
        result = capture_forbids_sync(stream);
    else if (stream->capture)
        result = capture_add(stream, node);
    else if (stream_capturing_blocked(stream))
        result = CUDA_ERROR_STREAM_CAPTURE_IMPLICIT;
    pthread_mutex_unlock(&api_lock);
    return result;
}

CUresult copy_request(bool ptds, CUstream handle, const struct copy *copy, const CUDA_MEMCPY3D *box, bool sync)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    if (captures_active) {
        struct node_params node = {.type = CU_GRAPH_NODE_TYPE_MEMCPY, .copy = *copy, .copy3d = *box};
        bool taken;
        CUresult result = captured(stream, &node, sync, &taken);
        if (taken || result != CUDA_SUCCESS)
            return result;
    }
    if (!copy->width || !copy->height || !copy->depth)
        return CUDA_SUCCESS;
    if (!sync) {
        bool from_host = box->srcMemoryType == CU_MEMORYTYPE_HOST || box->srcMemoryType == CU_MEMORYTYPE_UNIFIED;
        bool to_host = box->dstMemoryType == CU_MEMORYTYPE_HOST || box->dstMemoryType == CU_MEMORYTYPE_UNIFIED;
        return submit_async(stream, *copy, from_host, to_host);
    }
    TRY(copy_submit(stream, copy, false));
    return stream_sync(stream);
}

CUresult fill_request(bool ptds, CUstream handle, const struct fill *fill, bool sync)
{
    struct CUstream_st *stream;
    TRY(stream_get(ptds, handle, &stream));
    uint64_t bytes = fill->height ? (fill->height - 1) * fill->pitch + fill->width * fill->element : 0;
    if ((uintptr_t)fill->dst % fill->element || (fill->height > 1 && fill->pitch < fill->width * fill->element))
        return CUDA_ERROR_INVALID_VALUE;
    if (captures_active) {
        struct node_params node = {.type = CU_GRAPH_NODE_TYPE_MEMSET, .fill = *fill};
        bool taken;
        CUresult result = captured(stream, &node, sync, &taken);
        if (taken || result != CUDA_SUCCESS)
            return result;
    }
    if (!fill->width || !fill->height)
        return CUDA_SUCCESS;
    if (!device_range((uintptr_t)fill->dst, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    TRY(fill_submit(stream, fill, !sync));
    return sync ? stream_sync(stream) : CUDA_SUCCESS;
}

/* ---- boxes ---- */

struct side {
    CUmemorytype type;
    uint64_t base;
    CUarray array;
    uint64_t x, y, z, pitch, height;
};

static CUresult locate(const struct side *side, const CUDA_MEMCPY3D *box, uint8_t **at, uint64_t *pitch,
                       uint64_t *slice)
{
    uint64_t base = side->base;
    *pitch = side->pitch ? side->pitch : side->x + box->WidthInBytes;
    uint64_t rows = side->height ? side->height : side->y + box->Height;
    if (side->type == CU_MEMORYTYPE_ARRAY) {
        if (!object_is(side->array, OBJ_ARRAY))
            return CUDA_ERROR_INVALID_HANDLE;
        const struct CUarray_st *array = side->array;
        if (!array->data)
            return CUDA_ERROR_INVALID_VALUE;
        uint64_t height = array->desc.Height ? array->desc.Height : 1;
        uint64_t depth = array->desc.Depth ? array->desc.Depth : 1;
        *pitch = array->desc.Width * array->element;
        rows = height;
        base = (uintptr_t)array->data;
        if (side->x + box->WidthInBytes > *pitch || side->y + box->Height > height || side->z + box->Depth > depth)
            return CUDA_ERROR_INVALID_VALUE;
    } else if (side->type < CU_MEMORYTYPE_HOST || side->type > CU_MEMORYTYPE_UNIFIED || !base) {
        return CUDA_ERROR_INVALID_VALUE;
    }
    if (*pitch < side->x + box->WidthInBytes && (box->Height > 1 || box->Depth > 1))
        return CUDA_ERROR_INVALID_VALUE;
    *slice = *pitch * rows;
    uint64_t start = base + side->z * *slice + side->y * *pitch + side->x;
    uint64_t bytes = (box->Depth - 1) * *slice + (box->Height - 1) * *pitch + box->WidthInBytes;
    if (side->type == CU_MEMORYTYPE_DEVICE && !device_range(start, bytes))
        return CUDA_ERROR_INVALID_VALUE;
    *at = (uint8_t *)(uintptr_t)start;
    return CUDA_SUCCESS;
}

static uint64_t base_of(CUmemorytype type, const void *host, CUdeviceptr device)
{
    return type == CU_MEMORYTYPE_HOST ? (uintptr_t)host : device;
}

CUresult copy_of_3d(const CUDA_MEMCPY3D *box, struct copy *copy)
{
    struct side src = {box->srcMemoryType, base_of(box->srcMemoryType, box->srcHost, box->srcDevice), box->srcArray,
                       box->srcXInBytes, box->srcY, box->srcZ, box->srcPitch, box->srcHeight};
    struct side dst = {box->dstMemoryType, base_of(box->dstMemoryType, box->dstHost, box->dstDevice), box->dstArray,
                       box->dstXInBytes, box->dstY, box->dstZ, box->dstPitch, box->dstHeight};
    uint8_t *from;
    *copy = (struct copy){.width = box->WidthInBytes, .height = box->Height, .depth = box->Depth};
    if (!box->WidthInBytes || !box->Height || !box->Depth)
        return CUDA_SUCCESS;
    TRY(locate(&src, box, &from, &copy->src_pitch, &copy->src_slice));
    TRY(locate(&dst, box, &copy->dst, &copy->dst_pitch, &copy->dst_slice));
    copy->src = from;
    return CUDA_SUCCESS;
}
