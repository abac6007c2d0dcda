/* vmm.c: memory by handle. cuMemCreate takes device memory; it goes back when no handle reference AND no mapping is left, in
 * whichever order they end, so a release of mapped memory refunds nothing yet. Mappings are those of addresses, those of sparse
 * arrays (cuMemMapArrayAsync), and those of multicast objects (cuMulticastBindMem, cuMulticastBindAddr).
 *
 * Handles are one value an allocation for as long as it lives (cuMemRetainAllocationHandle gives back the one that was mapped).
 * Not charged: memory in host locations, and imported handles, whose exporter has been charged. */
#include <stdlib.h>
#include <string.h>

#include "instance.h"
#include "lock.h"
#include "memory.h"
#include "streams.h"
#include "table.h"
#include "vmm.h"

#define GRANULE (2ull << 20) /* of mappings: the step over what we have not seen mapped */

struct physical {
    uint64_t handle, bytes;
    int gpu;
    CUdevice device;
    bool object; /* a multicast object: it holds others' memory and has none */
    uint32_t refs, maps;
    uint32_t pins; /* calls under way that may yet put a reference or mapping back */
    struct physical *next; /* of the same key in the table */
};

struct mapping {
    struct physical *physical;
    uint64_t bytes;
};

/* Memory that an array or a multicast object holds. Few: found by looking at all of them. */
struct binding {
    uint64_t holder;           /* the array; the multicast object's handle */
    uint64_t place[4], bytes;  /* where in it: as it was told, and will be told again */
    struct physical *physical;
    struct binding *next;
};

static struct hook_lock lock; /* of all below; never held around a call into the driver */
static struct table handles;  /* a handle's key -> struct physical */
static struct table mappings; /* address -> struct mapping */
static struct binding *bindings;

/* Handles seen so far were pointers, and are their own key; any other 64 bits will do, too. */
static uint64_t key_of(uint64_t handle)
{
    uint64_t key = (handle ^ handle >> 48) & ((1ull << 48) - 1);
    return key ? key : 1;
}

static struct physical *first_of(uint64_t key)
{
    return (struct physical *)(uintptr_t)table_find(&handles, key);
}

static struct physical *find(CUmemGenericAllocationHandle handle)
{
    struct physical *physical = first_of(key_of(handle));
    while (physical && physical->handle != handle)
        physical = physical->next;
    return physical;
}

/* Takes it out of the table. */
static void forget(struct physical *physical)
{
    uint64_t key = key_of(physical->handle), old;
    struct physical *at = first_of(key);
    if (at == physical && physical->next)
        table_put(&handles, key, (uint64_t)(uintptr_t)physical->next, &old);
    else if (at == physical)
        table_take(&handles, key);
    for (; at && at != physical; at = at->next)
        if (at->next == physical)
            at->next = physical->next;
}

/* To be refunded once the lock is not held. */
static uint64_t owed[CGPU_MAX_GPUS];

static void unbind_all(uint64_t holder);

/* Lock held. Forgets what nothing holds any more. */
static void settle(struct physical *physical)
{
    if (physical->refs || physical->maps || physical->pins)
        return;
    owed[physical->gpu] += physical->bytes;
    forget(physical);
    if (physical->object)
        unbind_all(physical->handle);
    free(physical);
}

static void unlock(void)
{
    uint64_t refunds[CGPU_MAX_GPUS];
    memcpy(refunds, owed, sizeof refunds);
    memset(owed, 0, sizeof owed);
    hook_lock_drop(&lock);
    for (int gpu = 0; gpu < CGPU_MAX_GPUS; gpu++)
        ledger_refund(gpu, refunds[gpu]);
}

/* A call that may add a mapping is under way. */
static struct physical *pin(CUmemGenericAllocationHandle handle)
{
    hook_lock_take(&lock);
    struct physical *physical = find(handle);
    if (physical)
        physical->pins++;
    hook_lock_drop(&lock);
    return physical;
}

static void remember(CUmemGenericAllocationHandle handle, struct physical as)
{
    struct physical *physical = malloc(sizeof *physical);
    uint64_t others;
    bool done = false;
    if (physical) {
        *physical = as;
        physical->handle = handle;
        physical->refs = 1;
        hook_lock_take(&lock);
        done = table_put(&handles, key_of(handle), (uint64_t)(uintptr_t)physical, &others);
        physical->next = (struct physical *)(uintptr_t)others;
        hook_lock_drop(&lock);
    }
    if (!done) {
        free(physical);
        hook_log("error", "event=ledger-full bytes=%llu: no memory to remember an allocation", (unsigned long long)as.bytes);
    }
}

CU_WRAP(CUresult, cuMemCreate,
        (CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop, unsigned long long flags))
{
    int gpu = -1;
    if (hook_gpus() && prop && prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE)
        gpu = hook_gpu_of_device(prop->location.id);
    if (gpu >= 0 && !memory_charge(gpu, size)) /* the driver takes multiples of its granularity only: nothing to round */
        return CUDA_ERROR_OUT_OF_MEMORY;
    CUresult result = REAL(cuMemCreate)(handle, size, prop, flags);
    if (gpu >= 0 && result == CUDA_SUCCESS)
        remember(*handle, (struct physical){.bytes = size, .gpu = gpu, .device = prop->location.id});
    else if (gpu >= 0)
        ledger_refund(gpu, size);
    return result;
}

CU_WRAP(CUresult, cuMemRelease, (CUmemGenericAllocationHandle handle))
{
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
        settle(physical);
        unlock();
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
    uint64_t old;
    struct physical *physical = pin(handle);
    CUresult result = REAL(cuMemMap)(ptr, size, offset, handle, flags);
    if (physical) {
        struct mapping *mapping = result == CUDA_SUCCESS ? malloc(sizeof *mapping) : NULL;
        if (mapping)
            *mapping = (struct mapping){physical, size};
        hook_lock_take(&lock);
        physical->pins--;
        if (mapping && table_put(&mappings, ptr, (uint64_t)(uintptr_t)mapping, &old))
            physical->maps++;
        settle(physical);
        unlock();
    }
    return result;
}

/* The range is whole mappings, one or more, next to each other. Nobody can map there before this call has returned. */
CU_WRAP(CUresult, cuMemUnmap, (CUdeviceptr ptr, size_t size))
{
    CUresult result = REAL(cuMemUnmap)(ptr, size);
    if (result != CUDA_SUCCESS || hook_gpus() == 0)
        return result;
    hook_lock_take(&lock);
    for (uint64_t at = ptr, left = size; left > 0;) {
        uint64_t step = GRANULE;
        struct mapping *mapping = (struct mapping *)(uintptr_t)table_take(&mappings, at);
        if (mapping) {
            step = mapping->bytes ? mapping->bytes : GRANULE;
            mapping->physical->maps--;
            settle(mapping->physical);
            free(mapping);
        }
        at += step;
        left -= step < left ? step : left;
    }
    unlock();
    return result;
}

/* ---- what arrays and multicast objects hold ---- */

/* The driver has answered a call that binds pinned memory: true, it is bound. */
static void unpin(struct physical *physical, bool bound, const struct binding *as)
{
    struct binding *binding = bound ? malloc(sizeof *binding) : NULL;
    hook_lock_take(&lock);
    physical->pins--;
    if (binding) {
        *binding = *as;
        binding->physical = physical;
        binding->next = bindings;
        bindings = binding;
        physical->maps++;
    }
    settle(physical);
    unlock();
}

/* Lets go of what `holder` has where `which` says so. Lock held. */
static void unbind_where(uint64_t holder, bool (*which)(const struct binding *binding, const struct binding *as),
                         const struct binding *as)
{
    for (struct binding **at = &bindings; *at;) {
        struct binding *binding = *at;
        if (binding->holder != holder || (which && !which(binding, as))) {
            at = &binding->next;
            continue;
        }
        *at = binding->next;
        binding->physical->maps--;
        settle(binding->physical); /* it is no multicast object itself: the list changes nowhere else */
        free(binding);
    }
}

static void unbind_all(uint64_t holder)
{
    unbind_where(holder, NULL, NULL);
}

static void unbind(uint64_t holder, bool (*which)(const struct binding *binding, const struct binding *as),
                   const struct binding *as)
{
    if (!load_relaxed(&bindings))
        return;
    hook_lock_take(&lock);
    unbind_where(holder, which, as);
    unlock();
}

void vmm_array_destroyed(uint64_t array)
{
    unbind(array, NULL, NULL);
}

/* Multicast: an unbind names the device and a range of the object. */
static bool within(const struct binding *binding, const struct binding *as)
{
    return binding->place[0] == as->place[0] && binding->place[1] >= as->place[1] &&
           binding->place[1] - as->place[1] < as->bytes;
}

CU_WRAP(CUresult, cuMulticastCreate, (CUmemGenericAllocationHandle *object, const CUmulticastObjectProp *prop))
{
    CUresult result = REAL(cuMulticastCreate)(object, prop);
    if (result == CUDA_SUCCESS && hook_gpus())
        remember(*object, (struct physical){.object = true});
    return result;
}

CU_WRAP(CUresult, cuMulticastBindMem,
        (CUmemGenericAllocationHandle object, size_t at, CUmemGenericAllocationHandle handle, size_t offset, size_t size,
         unsigned long long flags))
{
    struct physical *physical = pin(handle);
    CUresult result = REAL(cuMulticastBindMem)(object, at, handle, offset, size, flags);
    if (physical)
        unpin(physical, result == CUDA_SUCCESS,
              &(struct binding){.holder = object, .place = {(uint64_t)physical->device, at}, .bytes = size});
    return result;
}

/* The mapping that `address` is in. Lock held. */
static struct physical *find_mapped(uint64_t address)
{
    uint64_t start, value;
    for (uint64_t place = 0; table_next(&mappings, &place, &start, &value);) {
        const struct mapping *mapping = (const struct mapping *)(uintptr_t)value;
        if (address >= start && address - start < mapping->bytes)
            return mapping->physical;
    }
    return NULL;
}

CU_WRAP(CUresult, cuMulticastBindAddr,
        (CUmemGenericAllocationHandle object, size_t at, CUdeviceptr address, size_t size, unsigned long long flags))
{
    hook_lock_take(&lock);
    struct physical *physical = find_mapped(address);
    if (physical)
        physical->pins++;
    hook_lock_drop(&lock);
    CUresult result = REAL(cuMulticastBindAddr)(object, at, address, size, flags);
    if (physical)
        unpin(physical, result == CUDA_SUCCESS,
              &(struct binding){.holder = object, .place = {(uint64_t)physical->device, at}, .bytes = size});
    return result;
}

CU_WRAP(CUresult, cuMulticastUnbind, (CUmemGenericAllocationHandle object, CUdevice device, size_t at, size_t size))
{
    CUresult result = REAL(cuMulticastUnbind)(object, device, at, size);
    if (result == CUDA_SUCCESS)
        unbind(object, within, &(struct binding){.place = {(uint64_t)device, at}, .bytes = size});
    return result;
}

/* Sparse arrays: the place in the array is told for mapping and for unmapping alike. */
#define SPARSE_LEVEL 0
#define OPERATION_MAP 1
static struct binding tile(const CUarrayMapInfo *info)
{
    struct binding binding = {.holder = (uint64_t)(uintptr_t)info->resource.array};
    if (info->subresourceType == SPARSE_LEVEL) {
        binding.place[0] = (uint64_t)info->subresource.sparseLevel.level << 32 | info->subresource.sparseLevel.layer;
        binding.place[1] = info->subresource.sparseLevel.offsetX;
        binding.place[2] = info->subresource.sparseLevel.offsetY;
        binding.place[3] = info->subresource.sparseLevel.offsetZ;
    } else {
        binding.place[0] = UINT64_MAX - info->subresource.miptail.layer;
        binding.place[1] = info->subresource.miptail.offset;
    }
    return binding;
}

static bool same_place(const struct binding *binding, const struct binding *as)
{
    for (int i = 0; i < 4; i++)
        if (binding->place[i] != as->place[i])
            return false;
    return true;
}

static CUresult map_arrays(const CUarrayMapInfo *list, unsigned int count, CUstream stream,
                           CUresult (*real)(CUarrayMapInfo *, unsigned int, CUstream))
{
    struct physical **pinned = hook_gpus() && list && count ? calloc(count, sizeof *pinned) : NULL;
    for (unsigned int i = 0; pinned && i < count; i++)
        if (list[i].memOperationType == OPERATION_MAP)
            pinned[i] = pin(list[i].memHandle.memHandle);
    CUresult result = real((CUarrayMapInfo *)(uintptr_t)list, count, stream);
    for (unsigned int i = 0; pinned && i < count; i++) {
        struct binding where = tile(&list[i]);
        if (result == CUDA_SUCCESS) /* a place that is mapped anew lets go of what it had */
            unbind(where.holder, same_place, &where);
        if (pinned[i])
            unpin(pinned[i], result == CUDA_SUCCESS, &where);
    }
    free(pinned);
    return result;
}

CU_WRAP(CUresult, cuMemMapArrayAsync, (CUarrayMapInfo *list, unsigned int count, CUstream stream))
{
    return map_arrays(list, count, stream, REAL(cuMemMapArrayAsync));
}

CU_WRAP(CUresult, cuMemMapArrayAsync_ptsz, (CUarrayMapInfo *list, unsigned int count, CUstream stream))
{
    return map_arrays(list, count, stream, REAL(cuMemMapArrayAsync_ptsz));
}

/* The records themselves are the parent's malloc blocks, and stay. */
void vmm_after_fork(void)
{
    bindings = NULL;
    table_free(&handles);
    table_free(&mappings);
    memset(owed, 0, sizeof owed);
    lock = (struct hook_lock){0};
}
