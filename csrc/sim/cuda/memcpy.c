/* memcpy.c: the 74 copies. All become a CUDA_MEMCPY3D and then a struct copy. */
#include "cuda/sim.h"

static CUresult box_copy(bool ptds, const CUDA_MEMCPY3D *box, CUstream stream, bool sync)
{
    struct copy copy;
    CHECK_INIT();
    TRY(copy_of_3d(box, &copy));
    return copy_request(ptds, stream, &copy, box, sync);
}

#define HOST   CU_MEMORYTYPE_HOST
#define DEVICE CU_MEMORYTYPE_DEVICE
#define ARRAY  CU_MEMORYTYPE_ARRAY
#define UNIFIED CU_MEMORYTYPE_UNIFIED

struct end { CUmemorytype type; const void *host; CUdeviceptr device; CUarray array; size_t offset; };

static CUresult line(bool ptds, struct end dst, struct end src, size_t bytes, CUstream stream, bool sync)
{
    CUDA_MEMCPY3D box = {.srcMemoryType = src.type, .srcHost = src.host, .srcDevice = src.device, .srcArray = src.array,
                         .srcXInBytes = src.offset, .dstMemoryType = dst.type, .dstHost = (void *)dst.host,
                         .dstDevice = dst.device, .dstArray = dst.array, .dstXInBytes = dst.offset, .WidthInBytes =
                             bytes,
                         .Height = 1, .Depth = 1};
    return box_copy(ptds, &box, stream, sync);
}

static struct end host(const void *at) { return (struct end){HOST, at, 0, NULL, 0}; }
static struct end device(CUdeviceptr at) { return (struct end){DEVICE, NULL, at, NULL, 0}; }
static struct end unified(CUdeviceptr at) { return (struct end){UNIFIED, NULL, at, NULL, 0}; }
static struct end array(CUarray of, size_t offset) { return (struct end){ARRAY, NULL, 0, of, offset}; }

/* An entry point: its parameters, and where the bytes go and come from in terms of them. */
#define ENTRY(name, ptds, params, dst, src, bytes, stream, sync) \
    API name params; \
    API name params { return line(ptds, dst, src, bytes, stream, sync); }
#define SYNC3(name, params_v1, params_v2, dst, src) \
    ENTRY(name, false, params_v1, dst, src, bytes, NULL, true) \
    ENTRY(name##_v2, false, params_v2, dst, src, bytes, NULL, true) \
    ENTRY(name##_v2_ptds, true, params_v2, dst, src, bytes, NULL, true)
#define ASYNC3(name, params_v1, params_v2, dst, src) \
    ENTRY(name, false, params_v1, dst, src, bytes, stream, false) \
    ENTRY(name##_v2, false, params_v2, dst, src, bytes, stream, false) \
    ENTRY(name##_v2_ptsz, true, params_v2, dst, src, bytes, stream, false)

typedef CUdeviceptr_v1 P1;
typedef CUdeviceptr P2;

SYNC3(cuMemcpyHtoD, (P1 d, const void *h, unsigned int bytes), (P2 d, const void *h, size_t bytes), device(d), host(h))
SYNC3(cuMemcpyDtoH, (void *h, P1 d, unsigned int bytes), (void *h, P2 d, size_t bytes), host(h), device(d))
SYNC3(cuMemcpyDtoD, (P1 d, P1 f, unsigned int bytes), (P2 d, P2 f, size_t bytes), device(d), device(f))
SYNC3(cuMemcpyDtoA, (CUarray a, unsigned int o, P1 f, unsigned int bytes), (CUarray a, size_t o, P2 f, size_t bytes),
      array(a, o), device(f))
SYNC3(cuMemcpyAtoD, (P1 d, CUarray a, unsigned int o, unsigned int bytes), (P2 d, CUarray a, size_t o, size_t bytes),
      device(d), array(a, o))
SYNC3(cuMemcpyHtoA, (CUarray a, unsigned int o, const void *h, unsigned int bytes),
      (CUarray a, size_t o, const void *h, size_t bytes), array(a, o), host(h))
SYNC3(cuMemcpyAtoH, (void *h, CUarray a, unsigned int o, unsigned int bytes),
      (void *h, CUarray a, size_t o, size_t bytes), host(h), array(a, o))
SYNC3(cuMemcpyAtoA, (CUarray a, unsigned int o, CUarray b, unsigned int p, unsigned int bytes),
      (CUarray a, size_t o, CUarray b, size_t p, size_t bytes), array(a, o), array(b, p))

ASYNC3(cuMemcpyHtoDAsync, (P1 d, const void *h, unsigned int bytes, CUstream stream),
       (P2 d, const void *h, size_t bytes, CUstream stream), device(d), host(h))
ASYNC3(cuMemcpyDtoHAsync, (void *h, P1 d, unsigned int bytes, CUstream stream),
       (void *h, P2 d, size_t bytes, CUstream stream), host(h), device(d))
ASYNC3(cuMemcpyDtoDAsync, (P1 d, P1 f, unsigned int bytes, CUstream stream),
       (P2 d, P2 f, size_t bytes, CUstream stream), device(d), device(f))
ASYNC3(cuMemcpyHtoAAsync, (CUarray a, unsigned int o, const void *h, unsigned int bytes, CUstream stream),
       (CUarray a, size_t o, const void *h, size_t bytes, CUstream stream), array(a, o), host(h))
ASYNC3(cuMemcpyAtoHAsync, (void *h, CUarray a, unsigned int o, unsigned int bytes, CUstream stream),
       (void *h, CUarray a, size_t o, size_t bytes, CUstream stream), host(h), array(a, o))

ENTRY(cuMemcpy, false, (P2 d, P2 f, size_t bytes), unified(d), unified(f), bytes, NULL, true)
ENTRY(cuMemcpy_ptds, true, (P2 d, P2 f, size_t bytes), unified(d), unified(f), bytes, NULL, true)
ENTRY(cuMemcpyAsync, false, (P2 d, P2 f, size_t bytes, CUstream stream), unified(d), unified(f), bytes, stream, false)
ENTRY(cuMemcpyAsync_ptsz, true, (P2 d, P2 f, size_t bytes, CUstream stream), unified(d), unified(f), bytes, stream,
      false)

/* Between GPUs: one address space, so the contexts are only checked. */
static CUresult peer(bool ptds, P2 d, CUcontext to, P2 f, CUcontext from, size_t bytes, CUstream stream, bool sync)
{
    CHECK_INIT();
    if (!object_is(to, OBJ_CONTEXT) || !object_is(from, OBJ_CONTEXT))
        return CUDA_ERROR_INVALID_CONTEXT;
    return line(ptds, device(d), device(f), bytes, stream, sync);
}

static CUresult peer_sync(bool ptds, P2 d, CUcontext to, P2 f, CUcontext from, size_t bytes)
{
    return peer(ptds, d, to, f, from, bytes, NULL, true);
}
API_PAIR(cuMemcpyPeer, _ptds, peer_sync, (P2 d, CUcontext to, P2 f, CUcontext from, size_t bytes), d, to, f, from,
         bytes)

static CUresult peer_async(bool ptds, P2 d, CUcontext to, P2 f, CUcontext from, size_t bytes, CUstream stream)
{
    return peer(ptds, d, to, f, from, bytes, stream, false);
}
API_PAIR(cuMemcpyPeerAsync, _ptsz, peer_async,
         (P2 d, CUcontext to, P2 f, CUcontext from, size_t bytes, CUstream stream), d, to, f, from,
         bytes, stream)

/* ---- two and three dimensions ---- */

#define WIDEN(field) .field = c->field
#define FIELDS2D \
    WIDEN(srcXInBytes), WIDEN(srcY), WIDEN(srcMemoryType), WIDEN(srcHost), WIDEN(srcDevice), WIDEN(srcArray), \
        WIDEN(srcPitch), \
    WIDEN(dstXInBytes), WIDEN(dstY), WIDEN(dstMemoryType), WIDEN(dstHost), WIDEN(dstDevice), WIDEN(dstArray), \
        WIDEN(dstPitch), \
    WIDEN(WidthInBytes), WIDEN(Height)

static CUresult box2d(bool ptds, const CUDA_MEMCPY2D *c, CUstream stream, bool sync)
{
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D box = {FIELDS2D, .Depth = 1};
    return box_copy(ptds, &box, stream, sync);
}

static CUresult box2d_v1(const CUDA_MEMCPY2D_v1 *c, CUstream stream, bool sync)
{
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D box = {FIELDS2D, .Depth = 1};
    return box_copy(false, &box, stream, sync);
}

static CUresult box3d(bool ptds, const CUDA_MEMCPY3D *c, CUstream stream, bool sync)
{
    return c ? box_copy(ptds, c, stream, sync) : CUDA_ERROR_INVALID_VALUE;
}

static CUresult box3d_v1(const CUDA_MEMCPY3D_v1 *c, CUstream stream, bool sync)
{
    if (!c)
        return CUDA_ERROR_INVALID_VALUE;
    CUDA_MEMCPY3D box =
        {FIELDS2D, WIDEN(srcZ), WIDEN(srcLOD), WIDEN(srcHeight), WIDEN(dstZ), WIDEN(dstLOD), WIDEN(dstHeight),
                         WIDEN(Depth)};
    return box_copy(false, &box, stream, sync);
}

#define BOX(name, params, call) \
    API name params; \
    API name params { return call; }

BOX(cuMemcpy2D, (const CUDA_MEMCPY2D_v1 *c), box2d_v1(c, NULL, true))
BOX(cuMemcpy2D_v2, (const CUDA_MEMCPY2D *c), box2d(false, c, NULL, true))
BOX(cuMemcpy2D_v2_ptds, (const CUDA_MEMCPY2D *c), box2d(true, c, NULL, true))
BOX(cuMemcpy2DUnaligned, (const CUDA_MEMCPY2D_v1 *c), box2d_v1(c, NULL, true))
BOX(cuMemcpy2DUnaligned_v2, (const CUDA_MEMCPY2D *c), box2d(false, c, NULL, true))
BOX(cuMemcpy2DUnaligned_v2_ptds, (const CUDA_MEMCPY2D *c), box2d(true, c, NULL, true))
BOX(cuMemcpy3D, (const CUDA_MEMCPY3D_v1 *c), box3d_v1(c, NULL, true))
BOX(cuMemcpy3D_v2, (const CUDA_MEMCPY3D *c), box3d(false, c, NULL, true))
BOX(cuMemcpy3D_v2_ptds, (const CUDA_MEMCPY3D *c), box3d(true, c, NULL, true))
BOX(cuMemcpy3DPeer, (const CUDA_MEMCPY3D_PEER *c), box3d(false, c, NULL, true))
BOX(cuMemcpy3DPeer_ptds, (const CUDA_MEMCPY3D_PEER *c), box3d(true, c, NULL, true))
BOX(cuMemcpy2DAsync, (const CUDA_MEMCPY2D_v1 *c, CUstream stream), box2d_v1(c, stream, false))
BOX(cuMemcpy2DAsync_v2, (const CUDA_MEMCPY2D *c, CUstream stream), box2d(false, c, stream, false))
BOX(cuMemcpy2DAsync_v2_ptsz, (const CUDA_MEMCPY2D *c, CUstream stream), box2d(true, c, stream, false))
BOX(cuMemcpy3DAsync, (const CUDA_MEMCPY3D_v1 *c, CUstream stream), box3d_v1(c, stream, false))
BOX(cuMemcpy3DAsync_v2, (const CUDA_MEMCPY3D *c, CUstream stream), box3d(false, c, stream, false))
BOX(cuMemcpy3DAsync_v2_ptsz, (const CUDA_MEMCPY3D *c, CUstream stream), box3d(true, c, stream, false))
BOX(cuMemcpy3DPeerAsync, (const CUDA_MEMCPY3D_PEER *c, CUstream stream), box3d(false, c, stream, false))
BOX(cuMemcpy3DPeerAsync_ptsz, (const CUDA_MEMCPY3D_PEER *c, CUstream stream), box3d(true, c, stream, false))

/* ---- batches: one after the other ---- */

static CUresult batch(bool ptds, P2 *dst, P2 *src, size_t *sizes, size_t count, size_t *failed, CUstream stream)
{
    CHECK_INIT();
    if (!dst || !src || !sizes || !count || (uintptr_t)stream <= 2)
        return CUDA_ERROR_INVALID_VALUE;
    for (size_t i = 0; i < count; i++) {
        CUresult result = line(ptds, unified(dst[i]), unified(src[i]), sizes[i], stream, false);
        if (result != CUDA_SUCCESS) {
            if (failed)
                *failed = i;
            return result;
        }
    }
    return CUDA_SUCCESS;
}

static CUresult batch_v1(bool ptds, P2 *dst, P2 *src, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
                         size_t *indices,
                         size_t attribute_count, size_t *failed, CUstream stream)
{
    (void)attributes;
    (void)indices;
    (void)attribute_count;
    return batch(ptds, dst, src, sizes, count, failed, stream);
}
API_PAIR(cuMemcpyBatchAsync, _ptsz, batch_v1,
         (P2 *dst, P2 *src, size_t *sizes, size_t count, CUmemcpyAttributes *attributes, size_t *indices, size_t n,
          size_t *failed,
          CUstream stream),
         dst, src, sizes, count, attributes, indices, n, failed, stream)

static CUresult batch_v2(bool ptds, P2 *dst, P2 *src, size_t *sizes, size_t count, CUmemcpyAttributes *attributes,
                         size_t *indices,
                         size_t attribute_count, CUstream stream)
{
    (void)attributes;
    (void)indices;
    (void)attribute_count;
    return batch(ptds, dst, src, sizes, count, NULL, stream);
}
API_PAIR(cuMemcpyBatchAsync_v2, _ptsz, batch_v2,
         (P2 *dst, P2 *src, size_t *sizes, size_t count, CUmemcpyAttributes *attributes, size_t *indices, size_t n,
          CUstream stream), dst,
         src, sizes, count, attributes, indices, n, stream)
