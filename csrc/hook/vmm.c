/* vmm.c: memory by handle. cuMemCreate takes device memory; it goes back when no handle reference AND no mapping is left, in
 * whichever order they end, so a release of mapped memory refunds nothing yet.
 *
 * Handles are one value an allocation for as long as it lives (cuMemRetainAllocationHandle gives back the one that was mapped).
 * Not charged: memory in host locations, and imported handles, whose exporter has been charged.
 * Weaker: memory that only an importer or a multicast object still holds counts no more. */
#include <stdlib.h>

#include "instance.h"
#include "lock.h"
#include "memory.h"
#include "table.h"

#define GRANULE (2ull << 20) /* of mappings: the step over what we have not seen mapped */

struct physical {
    uint64_t handle, bytes;
    int gpu;
    uint32_t refs, maps;
    uint32_t pins; /* calls under way that may yet put a reference or mapping back */
};

struct mapping {
    struct physical *physical;
    uint64_t bytes;
};

static struct hook_lock lock; /* of all below; never held around a call into the driver */
static struct table handles;  /* handle -> value: struct physical */
static struct table mappings; /* address -> value: struct mapping */

static struct physical *find(CUmemGenericAllocationHandle handle)
{
    struct table_entry *entry = table_find(&handles, handle);
    return entry ? (struct physical *)(uintptr_t)entry->value : NULL;
}

/* Lock held. The bytes to refund once it is not, 0 while something is left. */
static uint64_t settle(struct physical *physical, int *gpu)
{
    if (physical->refs || physical->maps || physical->pins)
        return 0;
    uint64_t bytes = physical->bytes;
    struct table_entry gone;
    *gpu = physical->gpu;
    if (find(physical->handle) == physical) /* else the driver has handed the value out anew */
        table_take(&handles, physical->handle, &gone);
    free(physical);
    return bytes;
}

static void remember(CUmemGenericAllocationHandle handle, int gpu, uint64_t bytes)
{
    struct physical *physical = malloc(sizeof *physical);
    struct table_entry old;
    bool done = false;
    if (physical) {
        *physical = (struct physical){.handle = handle, .bytes = bytes, .gpu = gpu, .refs = 1};
        struct table_entry entry = {handle, (uint64_t)(uintptr_t)physical};
        hook_lock_take(&lock);
        done = table_put(&handles, &entry, &old);
        hook_lock_drop(&lock);
    }
    if (!done) {
        free(physical);
        hook_log("error", "event=ledger-full bytes=%llu: no memory to remember an allocation", (unsigned long long)bytes);
    }
}

CU_WRAP(CUresult, cuMemCreate,
        (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags))
{
    int gpu = -1;
    if (hook_gpus() && prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        gpu = hook_gpu_of_device(prop->location.id);
    if (gpu >= 0 && !ledger_charge(gpu, size)) /* the driver takes multiples of its granularity only: nothing to round */
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = REAL(cuMemCreate)(handle, size, prop, flags);
    if (gpu >= 0 && result == CUDA_SUCCESS)
        remember(*handle, gpu, size);
    else if (gpu >= 0)
        ledger_refund(gpu, size);
    return result;
}

CU_WRAP(CUresult, cuMemRelease, (CUmemGenericAllocationHandle handle))
{
    int gpu = 0;
    uint64_t bytes = 0;
    hook_lock_take(&lock);
    struct physical *physical = find(handle);
    if (physical && physical->refs) {
        physical->refs--;
        physical->pins++;
    } else {
        physical = NULL;
    }
    hook_lock_drop(&lock);
    CUresult result = REAL(cuMemRelease)(handle);
    if (physical) {
        hook_lock_take(&lock);
        physical->pins--;
        if (result != CUDA_SUCCESS)
            physical->refs++;
        bytes = settle(physical, &gpu);
        hook_lock_drop(&lock);
        ledger_refund(gpu, bytes);
    }
    return result;
}

static void add_reference(CUmemGenericAllocationHandle handle)
{
    hook_lock_take(&lock);
    struct physical *physical = find(handle);
    if (physical)
        physical->refs++;
    hook_lock_drop(&lock);
}

CU_WRAP(CUresult, cuMemRetainAllocationHandle, (CUmemGenericAllocationHandle *handle, void *address))
{
    CUresult result = REAL(cuMemRetainAllocationHandle)(handle, address);
    if (result == CUDA_SUCCESS)
        add_reference(*handle);
    return result;
}

/* A new handle to memory that its exporter was charged for; or one more reference, should the driver know it as ours. */
CU_WRAP(CUresult, cuMemImportFromShareableHandle,
        (CUmemGenericAllocationHandle *handle, void *os_handle, CUmemAllocationHandleType type))
{
    CUresult result = REAL(cuMemImportFromShareableHandle)(handle, os_handle, type);
    if (result == CUDA_SUCCESS)
        add_reference(*handle);
    return result;
}

CU_WRAP(CUresult, cuMemMap,
        (CUdeviceptr ptr, size_t size, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags))
{
    int gpu = 0;
    uint64_t bytes = 0;
    struct table_entry old;
    hook_lock_take(&lock);
    struct physical *physical = find(handle);
    if (physical)
        physical->pins++;
    hook_lock_drop(&lock);
    CUresult result = REAL(cuMemMap)(ptr, size, offset, handle, flags);
    if (physical) {
        struct mapping *mapping = result == CUDA_SUCCESS ? malloc(sizeof *mapping) : NULL;
        if (mapping)
            *mapping = (struct mapping){physical, size};
        struct table_entry entry = {ptr, (uint64_t)(uintptr_t)mapping};
        hook_lock_take(&lock);
        physical->pins--;
        if (mapping && table_put(&mappings, &entry, &old))
            physical->maps++;
        bytes = settle(physical, &gpu);
        hook_lock_drop(&lock);
        ledger_refund(gpu, bytes);
    }
    return result;
}

/* The range is whole mappings, one or more, next to each other. Nobody can map there before this call has returned. */
CU_WRAP(CUresult, cuMemUnmap, (CUdeviceptr ptr, size_t size))
{
    CUresult result = REAL(cuMemUnmap)(ptr, size);
    if (result != CUDA_SUCCESS || hook_gpus() == 0)
        return result;
    uint64_t refunds[CGPU_MAX_GPUS] = {0};
    hook_lock_take(&lock);
    for (uint64_t at = ptr, left = size; left > 0;) {
        struct table_entry entry;
        uint64_t step = GRANULE;
        if (table_take(&mappings, at, &entry)) {
            struct mapping *mapping = (struct mapping *)(uintptr_t)entry.value;
            int gpu = 0;
            step = mapping->bytes ? mapping->bytes : GRANULE;
            mapping->physical->maps--;
            uint64_t bytes = settle(mapping->physical, &gpu);
            refunds[gpu] += bytes;
            free(mapping);
        }
        at += step;
        left -= step < left ? step : left;
    }
    hook_lock_drop(&lock);
    for (int gpu = 0; gpu < CGPU_MAX_GPUS; gpu++)
        ledger_refund(gpu, refunds[gpu]);
    return result;
}

/* The records themselves are the parent's malloc blocks, and stay. */
void vmm_after_fork(void)
{
    table_free(&handles);
    table_free(&mappings);
    lock = (struct hook_lock){0};
}
