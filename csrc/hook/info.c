/* info.c: what CUDA tells the program about memory: the quota for the card, what the whole instance uses for what is used. */
#include "memory.h"

/* What is told, given what the card really has. Never more than either. */
struct told {
    uint64_t free, total;
};

static struct told tell(int gpu, uint64_t free, uint64_t total)
{
    pools_refresh(gpu);
    struct ledger_view view = ledger_view(gpu);
    struct told told = {view.used < view.limit ? view.limit - view.used : 0, view.limit};
    if (told.total > total)
        told.total = total;
    if (told.free > free)
        told.free = free;
    return told;
}

static unsigned int clamp(uint64_t bytes)
{
    return bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)bytes;
}

CU_WRAP(CUresult, cuMemGetInfo_v2, (size_t *free, size_t *total))
{
    size_t real_free = 0, real_total = 0;
    int gpu = hook_current_gpu();
    if (gpu < 0 || (!free && !total))
        return REAL(cuMemGetInfo_v2)(free, total);
    CUresult result = REAL(cuMemGetInfo_v2)(&real_free, &real_total);
    if (result != CUDA_SUCCESS)
        return result;
    struct told told = tell(gpu, real_free, real_total);
    if (free)
        *free = told.free;
    if (total)
        *total = told.total;
    return result;
}

/* 32-bit: the card's figures come from the newer variant, since this one's say nothing beyond 4 GiB. */
CU_WRAP(CUresult, cuMemGetInfo, (unsigned int *free, unsigned int *total))
{
    unsigned int old_free = 0, old_total = 0;
    size_t real_free = 0, real_total = 0;
    int gpu = hook_current_gpu();
    if (gpu < 0 || (!free && !total))
        return REAL(cuMemGetInfo)(free, total);
    CUresult result = REAL(cuMemGetInfo)(&old_free, &old_total);
    if (result != CUDA_SUCCESS)
        return result;
    if (!have(cuMemGetInfo_v2) || REAL(cuMemGetInfo_v2)(&real_free, &real_total) != CUDA_SUCCESS) {
        real_free = old_free;
        real_total = old_total;
    }
    struct told told = tell(gpu, real_free, real_total);
    if (free)
        *free = clamp(told.free);
    if (total)
        *total = clamp(told.total);
    return result;
}

CU_WRAP(CUresult, cuDeviceTotalMem_v2, (size_t *bytes, CUdevice device))
{
    CUresult result = REAL(cuDeviceTotalMem_v2)(bytes, device);
    int gpu = result == CUDA_SUCCESS && hook_gpus() ? hook_gpu_of_device(device) : -1;
    if (gpu >= 0)
        *bytes = tell(gpu, 0, *bytes).total;
    return result;
}

CU_WRAP(CUresult, cuDeviceTotalMem, (unsigned int *bytes, CUdevice device))
{
    size_t real = 0;
    CUresult result = REAL(cuDeviceTotalMem)(bytes, device);
    int gpu = result == CUDA_SUCCESS && hook_gpus() ? hook_gpu_of_device(device) : -1;
    if (gpu < 0)
        return result;
    if (!have(cuDeviceTotalMem_v2) || REAL(cuDeviceTotalMem_v2)(&real, device) != CUDA_SUCCESS)
        real = *bytes;
    *bytes = clamp(tell(gpu, 0, real).total);
    return result;
}
