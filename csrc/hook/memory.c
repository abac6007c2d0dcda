/* memory.c: the synchronous allocations, pitched and managed ones, and cuMemFree. Unsuffixed names are the 32-bit variants. */
#include "memory.h"

#define PITCH_GRANULE 512u /* rows of a pitched block, on every GPU of the last ten years; corrected by what the driver says */

/* ---- free (first: the pitched ones take back what they could not charge) ---- */

CU_WRAP(CUresult, cuMemFree_v2, (CUdeviceptr ptr))
{
    struct release release = ledger_releasing(LEDGER_POINTER, ptr);
    CUresult result = REAL(cuMemFree_v2)(ptr);
    ledger_released(release, LEDGER_POINTER, ptr, result == CUDA_SUCCESS);
    pools_synced(false); /* it waited for the device */
    return result;
}

CU_WRAP(CUresult, cuMemFree, (CUdeviceptr_v1 ptr))
{
    struct release release = ledger_releasing(LEDGER_POINTER, ptr);
    CUresult result = REAL(cuMemFree)(ptr);
    ledger_released(release, LEDGER_POINTER, ptr, result == CUDA_SUCCESS);
    pools_synced(false);
    return result;
}

/* ---- plain and managed ---- */

CU_WRAP(CUresult, cuMemAlloc_v2, (CUdeviceptr *ptr, size_t bytes))
{
    struct charge charge = charge_at(place_here(), device_bytes(bytes));
    if (charge.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = REAL(cuMemAlloc_v2)(ptr, bytes);
    charge_end(&charge, result, LEDGER_POINTER, result == CUDA_SUCCESS ? *ptr : 0);
    return result;
}

CU_WRAP(CUresult, cuMemAlloc, (CUdeviceptr_v1 *ptr, unsigned int bytes))
{
    struct charge charge = charge_at(place_here(), device_bytes(bytes));
    if (charge.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = REAL(cuMemAlloc)(ptr, bytes);
    charge_end(&charge, result, LEDGER_POINTER, result == CUDA_SUCCESS ? *ptr : 0);
    return result;
}

/* Managed memory may be paged out to the host; all of it counts, since all of it may be on the device. */
CU_WRAP(CUresult, cuMemAllocManaged, (CUdeviceptr *ptr, size_t bytes, unsigned int flags))
{
    struct charge charge = charge_at(place_here(), device_bytes(bytes));
    if (charge.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = REAL(cuMemAllocManaged)(ptr, bytes, flags);
    charge_end(&charge, result, LEDGER_POINTER, result == CUDA_SUCCESS ? *ptr : 0);
    return result;
}

/* ---- pitched ---- */

static uint64_t pitched_bytes(uint64_t pitch, uint64_t height)
{
    uint64_t bytes;
    return __builtin_mul_overflow(pitch, height, &bytes) ? UINT64_MAX : device_bytes(bytes);
}

CU_WRAP(CUresult, cuMemAllocPitch_v2, (CUdeviceptr *ptr, size_t *pitch, size_t width, size_t height, unsigned int element))
{
    struct charge charge = charge_at(place_here(), pitched_bytes(round_up(width, PITCH_GRANULE), height));
    if (charge.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUdeviceptr got = 0; /* the program's pointers stay as they are until the charge stands */
    size_t got_pitch = 0;
    CUresult result = REAL(cuMemAllocPitch_v2)(ptr ? &got : NULL, pitch ? &got_pitch : NULL, width, height, element);
    if (result == CUDA_SUCCESS && !charge_correct(&charge, pitched_bytes(got_pitch, height))) {
        if (have(cuMemFree_v2))
            REAL(cuMemFree_v2)(got);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    charge_end(&charge, result, LEDGER_POINTER, got);
    if (result == CUDA_SUCCESS) {
        *ptr = got;
        *pitch = got_pitch;
    }
    return result;
}

CU_WRAP(CUresult, cuMemAllocPitch,
        (CUdeviceptr_v1 *ptr, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element))
{
    struct charge charge = charge_at(place_here(), pitched_bytes(round_up(width, PITCH_GRANULE), height));
    if (charge.refused)
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUdeviceptr_v1 got = 0;
    unsigned int got_pitch = 0;
    CUresult result = REAL(cuMemAllocPitch)(ptr ? &got : NULL, pitch ? &got_pitch : NULL, width, height, element);
    if (result == CUDA_SUCCESS && !charge_correct(&charge, pitched_bytes(got_pitch, height))) {
        if (have(cuMemFree))
            REAL(cuMemFree)(got);
        result = CUDA_ERROR_OUT_OF_MEMORY;
    }
    charge_end(&charge, result, LEDGER_POINTER, got);
    if (result == CUDA_SUCCESS) {
        *ptr = got;
        *pitch = got_pitch;
    }
    return result;
}
