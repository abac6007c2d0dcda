/* array.c: arrays and mipmapped arrays. What one takes is known only after it was made, and not for every kind: charged is an
 * estimate from its description, in the blocks of 64 bytes by 8 rows that array memory is laid out in. Where the driver then
 * says what the array needs (documented for those with deferred mapping only), that is the charge. */
#include "memory.h"
#include "vmm.h"

CU_NEED(CUresult, cuArrayGetMemoryRequirements, (CUDA_ARRAY_MEMORY_REQUIREMENTS *needs, CUarray array, CUdevice device));
CU_NEED(CUresult, cuMipmappedArrayGetMemoryRequirements,
        (CUDA_ARRAY_MEMORY_REQUIREMENTS *needs, CUmipmappedArray array, CUdevice device));
CU_NEED(CUresult, cuCtxGetDevice, (CUdevice *device));

/* ---- destroying (first: what cannot be charged is taken back) ---- */

CU_WRAP(CUresult, cuArrayDestroy, (CUarray array))
{
    struct release release = ledger_releasing(LEDGER_ARRAY, (uint64_t)(uintptr_t)array);
    CUresult result = REAL(cuArrayDestroy)(array);
    ledger_released(release, LEDGER_ARRAY, (uint64_t)(uintptr_t)array, result == CUDA_SUCCESS);
    if (result == CUDA_SUCCESS)
        vmm_array_destroyed((uint64_t)(uintptr_t)array);
    return result;
}

CU_WRAP(CUresult, cuMipmappedArrayDestroy, (CUmipmappedArray array))
{
    struct release release = ledger_releasing(LEDGER_ARRAY, (uint64_t)(uintptr_t)array);
    CUresult result = REAL(cuMipmappedArrayDestroy)(array);
    ledger_released(release, LEDGER_ARRAY, (uint64_t)(uintptr_t)array, result == CUDA_SUCCESS);
    if (result == CUDA_SUCCESS)
        vmm_array_destroyed((uint64_t)(uintptr_t)array);
    return result;
}

/* ---- sizes ---- */

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

static struct charge charge_array(CUDA_ARRAY3D_DESCRIPTOR description, unsigned int levels)
{
    struct place at = place_here();
    return charge_at(at, at.gpu < 0 ? 0 : array_bytes(&description, levels));
}

/* true: charged for what the driver says that it needs, if it does. */
static bool correct(struct charge *charge, bool answers, const CUDA_ARRAY_MEMORY_REQUIREMENTS *needs)
{
    return !answers || needs->size == 0 || charge_correct(charge, round_up(needs->size, SMALL_GRANULE));
}

static bool asks(const struct charge *charge, CUdevice *device)
{
    return charge->at.gpu >= 0 && charge->bytes && have(cuCtxGetDevice) && REAL(cuCtxGetDevice)(device) == CUDA_SUCCESS;
}

/* The program's handle stays as it is until the charge stands. */
static CUresult finish(struct charge *charge, CUresult result, CUarray got, CUarray *array)
{
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs = {0};
    CUdevice device;
    if (result == CUDA_SUCCESS && have(cuArrayGetMemoryRequirements) && asks(charge, &device) &&
        !correct(charge, REAL(cuArrayGetMemoryRequirements)(&needs, got, device) == CUDA_SUCCESS, &needs)) {
        REAL(cuArrayDestroy)(got);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    charge_end(charge, result, LEDGER_ARRAY, (uint64_t)(uintptr_t)got);
    if (result == CUDA_SUCCESS)
        *array = got;
    return result;
}

static CUresult finish_mipmapped(struct charge *charge, CUresult result, CUmipmappedArray got, CUmipmappedArray *array)
{
    CUDA_ARRAY_MEMORY_REQUIREMENTS needs = {0};
    CUdevice device;
    if (result == CUDA_SUCCESS && have(cuMipmappedArrayGetMemoryRequirements) && asks(charge, &device) &&
        !correct(charge, REAL(cuMipmappedArrayGetMemoryRequirements)(&needs, got, device) == CUDA_SUCCESS, &needs)) {
        REAL(cuMipmappedArrayDestroy)(got);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    charge_end(charge, result, LEDGER_ARRAY, (uint64_t)(uintptr_t)got);
    if (result == CUDA_SUCCESS)
        *array = got;
    return result;
}

#define FULL_2D(d) \
    ((d) ? (CUDA_ARRAY3D_DESCRIPTOR){.Width = (d)->Width, .Height = (d)->Height, .Format = (d)->Format, \
                                     .NumChannels = (d)->NumChannels} \
         : (CUDA_ARRAY3D_DESCRIPTOR){0})
#define FULL_3D(d) \
    ((d) ? (CUDA_ARRAY3D_DESCRIPTOR){.Width = (d)->Width, .Height = (d)->Height, .Depth = (d)->Depth, .Format = (d)->Format, \
                                     .NumChannels = (d)->NumChannels, .Flags = (d)->Flags} \
         : (CUDA_ARRAY3D_DESCRIPTOR){0})
#define CREATE_WRAP(name, type, full) \
    CU_WRAP(CUresult, name, (CUarray *array, const type *d)) \
    { \
        CUarray got = NULL; \
        struct charge charge = charge_array(full(d), 1); \
        if (charge.refused) \
            return CUDA_ERROR_OUT_OF_MEMORY; \
        CUresult result = REAL(name)(array ? &got : NULL, d); \
        return finish(&charge, result, got, array); \
    }

CREATE_WRAP(cuArrayCreate_v2, CUDA_ARRAY_DESCRIPTOR, FULL_2D)
CREATE_WRAP(cuArrayCreate, CUDA_ARRAY_DESCRIPTOR_v1, FULL_2D)
CREATE_WRAP(cuArray3DCreate_v2, CUDA_ARRAY3D_DESCRIPTOR, FULL_3D)
CREATE_WRAP(cuArray3DCreate, CUDA_ARRAY3D_DESCRIPTOR_v1, FULL_3D)

CU_WRAP(CUresult, cuMipmappedArrayCreate, (CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels))
{
    CUmipmappedArray got = NULL;
    struct charge charge = charge_array(FULL_3D(d), levels);
    if (charge.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = REAL(cuMipmappedArrayCreate)(array ? &got : NULL, d, levels);
    return finish_mipmapped(&charge, result, got, array);
}
