/* array.c: arrays and mipmapped arrays. What one takes is known only after it was made, and not for every kind: charged is an
 * estimate from its description, in the blocks of 64 bytes by 8 rows that array memory is laid out in. */
#include "memory.h"

#define ROW_GRANULE 64u
#define ROWS_GRANULE 8u
#define UNBACKED (CUDA_ARRAY3D_SPARSE | CUDA_ARRAY3D_DEFERRED_MAPPING) /* memory is mapped in later, by cuMemMapArrayAsync */

/* Of one element, all channels. Planar formats: of all planes together, per element of the first. */
static uint64_t element_bits(CUarray_format format, uint64_t channels)
{
    switch ((unsigned int)format) {
    case CU_AD_FORMAT_UNSIGNED_INT16: case CU_AD_FORMAT_SIGNED_INT16: case CU_AD_FORMAT_HALF:
    case 0xc3: case 0xc4: case 0xc5: case 0xc9: case 0xca: case 0xcb: /* 16-bit normalised */
        return 16 * channels;
    case CU_AD_FORMAT_UNSIGNED_INT32: case CU_AD_FORMAT_SIGNED_INT32: case CU_AD_FORMAT_FLOAT:
        return 32 * channels;
    case 0x91: case 0x92: case 0x97: case 0x98: /* BC1, BC4: blocks of 4 by 4 in 8 bytes */
        return 4;
    case 0x93: case 0x94: case 0x95: case 0x96: case 0x99: case 0x9a: case 0x9b: case 0x9c: case 0x9d: case 0x9e: /* in 16 */
        return 8;
    case 0xb0: /* NV12 */
        return 12;
    case 0xa2: case 0xa5: /* NV16, YUY2 */
        return 16;
    case 0x9f: case 0xa1: case 0xb2: case 0xb4: /* P010, P016, 4:4:4 of 8 bits */
        return 24;
    case 0x50: case 0xa3: case 0xa4: case 0xa6: case 0xa7: case 0xa8: case 0xa9: /* 10-10-10-2, P21x, Y21x, AYUV, Y410 */
        return 32;
    case 0xb3: case 0xb5: /* 4:4:4 of 16 bits */
        return 48;
    case 0xb1: /* Y416 */
        return 64;
    default: /* 8-bit, normalised or not, and what came later */
        return 8 * channels;
    }
}

/* One level. Height and depth 0 mean that the array has not that dimension. */
static uint64_t level_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, uint64_t width, uint64_t height, uint64_t depth)
{
    uint64_t row, plane, bytes;
    uint64_t rows = height ? round_up(height, ROWS_GRANULE) : 1;
    if (__builtin_mul_overflow(width, element_bits(d->Format, d->NumChannels ? d->NumChannels : 1), &row) ||
        __builtin_mul_overflow(round_up(row / 8 + (row % 8 != 0), ROW_GRANULE), rows, &plane) ||
        __builtin_mul_overflow(plane, depth ? depth : 1, &bytes))
        return UINT64_MAX;
    return bytes;
}

static uint64_t array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels)
{
    uint64_t sum = 0, width = d->Width, height = d->Height, depth = d->Depth;
    if (d->Flags & UNBACKED)
        return 0;
    for (unsigned int level = 0; level < levels && level < 64; level++) {
        if (__builtin_add_overflow(sum, level_bytes(d, width, height, depth), &sum))
            return UINT64_MAX;
        if (width <= 1 && height <= 1 && (depth <= 1 || d->Flags & CUDA_ARRAY3D_LAYERED))
            break;
        width = width > 1 ? width / 2 : width;
        height = height > 1 ? height / 2 : height;
        if (!(d->Flags & CUDA_ARRAY3D_LAYERED)) /* depth counts layers then, and every level has them all */
            depth = depth > 1 ? depth / 2 : depth;
    }
    return device_bytes(sum);
}

static struct charge charge_array(const CUDA_ARRAY3D_DESCRIPTOR *description, unsigned int levels)
{
    struct place at = place_here();
    return charge_at(at, at.gpu < 0 ? 0 : array_bytes(description, levels));
}

static CUresult finish(const struct charge *charge, CUresult result, void *const *array)
{
    charge_end(charge, result, LEDGER_ARRAY, result == CUDA_SUCCESS ? (uint64_t)(uintptr_t)*array : 0);
    return result;
}

CU_WRAP(CUresult, cuArrayCreate_v2, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR *d))
{
    CUDA_ARRAY3D_DESCRIPTOR full = {0};
    if (d)
        full = (CUDA_ARRAY3D_DESCRIPTOR){.Width = d->Width, .Height = d->Height, .Format = d->Format,
                                         .NumChannels = d->NumChannels};
    struct charge charge = charge_array(&full, 1);
    return charge.refused ? CUDA_ERROR_OUT_OF_MEMORY
                          : finish(&charge, REAL(cuArrayCreate_v2)(array, d), (void *const *)array);
}

CU_WRAP(CUresult, cuArrayCreate, (CUarray *array, const CUDA_ARRAY_DESCRIPTOR_v1 *d))
{
    CUDA_ARRAY3D_DESCRIPTOR full = {0};
    if (d)
        full = (CUDA_ARRAY3D_DESCRIPTOR){.Width = d->Width, .Height = d->Height, .Format = d->Format,
                                         .NumChannels = d->NumChannels};
    struct charge charge = charge_array(&full, 1);
    return charge.refused ? CUDA_ERROR_OUT_OF_MEMORY
                          : finish(&charge, REAL(cuArrayCreate)(array, d), (void *const *)array);
}

CU_WRAP(CUresult, cuArray3DCreate_v2, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR *d))
{
    struct charge charge = charge_array(d ? d : &(CUDA_ARRAY3D_DESCRIPTOR){0}, 1);
    return charge.refused ? CUDA_ERROR_OUT_OF_MEMORY
                          : finish(&charge, REAL(cuArray3DCreate_v2)(array, d), (void *const *)array);
}

CU_WRAP(CUresult, cuArray3DCreate, (CUarray *array, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d))
{
    CUDA_ARRAY3D_DESCRIPTOR full = {0};
    if (d)
        full = (CUDA_ARRAY3D_DESCRIPTOR){.Width = d->Width, .Height = d->Height, .Depth = d->Depth, .Format = d->Format,
                                         .NumChannels = d->NumChannels, .Flags = d->Flags};
    struct charge charge = charge_array(&full, 1);
    return charge.refused ? CUDA_ERROR_OUT_OF_MEMORY
                          : finish(&charge, REAL(cuArray3DCreate)(array, d), (void *const *)array);
}

CU_WRAP(CUresult, cuMipmappedArrayCreate, (CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels))
{
    struct charge charge = charge_array(d ? d : &(CUDA_ARRAY3D_DESCRIPTOR){0}, levels);
    return charge.refused ? CUDA_ERROR_OUT_OF_MEMORY
                          : finish(&charge, REAL(cuMipmappedArrayCreate)(array, d, levels), (void *const *)array);
}

CU_WRAP(CUresult, cuArrayDestroy, (CUarray array))
{
    struct release release = release_begin(LEDGER_ARRAY, (uint64_t)(uintptr_t)array);
    return release_end(&release, REAL(cuArrayDestroy)(array));
}

CU_WRAP(CUresult, cuMipmappedArrayDestroy, (CUmipmappedArray array))
{
    struct release release = release_begin(LEDGER_ARRAY, (uint64_t)(uintptr_t)array);
    return release_end(&release, REAL(cuMipmappedArrayDestroy)(array));
}
