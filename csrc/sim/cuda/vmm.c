/* vmm.c: virtual memory management. Physical memory is a stretch of one memfd of the process (a memfd a handle would
 * run into the limit of open files), mapped wherever cuMemMap says. An allocation lives as long as a handle or a
 * mapping
 * does. */
#define _GNU_SOURCE
#include <linux/falloc.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "cuda/sim.h"

#define GRANULARITY (2ull << 20)

struct allocation {
    uint64_t magic;
    uint64_t at, size;               /* in the memfd */
    unsigned handles, mappings;
    CUmemAllocationProp prop;
    struct gpu *gpu;                 /* NULL: host memory */
    struct allocation *next;         /* free list: a handle is the address of one of these, never returned */
};
#define ALLOCATION_MAGIC 0x636f6c6c616d6976ull

static int backing = -1;
static uint64_t backing_end;
static struct allocation *unused;

static struct allocation *allocation_of(CUmemGenericAllocationHandle handle)
{
    struct allocation *allocation = (struct allocation *)(uintptr_t)handle;
    return handle > 4096 && !(handle & 7) && allocation->magic == ALLOCATION_MAGIC && allocation->handles ? allocation
        : NULL;
}

static void drop_if_last(struct allocation *allocation)
{
    if (allocation->handles || allocation->mappings)
        return;
    fallocate(backing, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)allocation->at, (off_t)allocation->size);
    if (allocation->gpu)
        sim_refund(&allocation->gpu->map, allocation->size);
    allocation->magic = 0;
    allocation->next = unused;
    unused = allocation;
}

/* Stretches of the same size are used again; the file is sparse, so its length is only address space. */
static struct allocation *allocation_new(uint64_t size)
{
    if (backing < 0) {
        backing = (int)syscall(SYS_memfd_create, "cuda-vmm", 1u /* MFD_CLOEXEC */);
        if (backing < 0)
            return NULL;
    }
    for (struct allocation **at = &unused; *at; at = &(*at)->next) {
        if ((*at)->size == size) {
            struct allocation *allocation = *at;
            *at = allocation->next;
            return allocation;
        }
    }
    if (ftruncate(backing, (off_t)(backing_end + size)) < 0)
        return NULL;
    struct allocation *allocation = calloc(1, sizeof *allocation);
    if (allocation) {
        allocation->at = backing_end;
        allocation->size = size;
        backing_end += size;
    }
    return allocation;
}

/* ---- addresses ---- */

API cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr hint,
                        unsigned long long flags);
API cuMemAddressFree(CUdeviceptr pointer, size_t size);
API cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                  CUmemAllocationGranularity_flags option);

API cuMemAddressReserve(CUdeviceptr *pointer, size_t size, size_t alignment, CUdeviceptr hint, unsigned long long flags)
{
    CHECK_INIT();
    if (!pointer || !size || size % GRANULARITY || flags || (alignment & (alignment - 1)))
        return CUDA_ERROR_INVALID_VALUE;
    if (alignment < GRANULARITY)
        alignment = GRANULARITY;
    uint8_t *at =
        mmap((void *)(uintptr_t)hint, size + alignment, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint64_t start = ((uintptr_t)at + alignment - 1) & ~(uint64_t)(alignment - 1);
    uint64_t before = start - (uintptr_t)at, after = alignment - before;
    if (before)
        munmap(at, before);
    if (after)
        munmap((void *)(uintptr_t)(start + size), after);
    pthread_mutex_lock(&api_lock);
    struct block *block = block_insert(start, size, BLOCK_RESERVED, NULL, NULL);
    pthread_mutex_unlock(&api_lock);
    if (!block) {
        munmap((void *)(uintptr_t)start, size);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *pointer = start;
    return CUDA_SUCCESS;
}

static bool mapped_within(uint64_t start, uint64_t size)
{
    for (uint64_t at = start; at < start + size; at += GRANULARITY)
        if (block_find(at))
            return true;
    return false;
}

API cuMemAddressFree(CUdeviceptr pointer, size_t size)
{
    CHECK_INIT();
    pthread_mutex_lock(&api_lock);
    struct block *block = reservation_find(pointer);
    CUresult result = !block || block->base != pointer || block->size != size || mapped_within(pointer, size)
                          ? CUDA_ERROR_INVALID_VALUE
                          : CUDA_SUCCESS;
    if (result == CUDA_SUCCESS) {
        munmap((void *)(uintptr_t)pointer, size);
        block_remove(block);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemGetAllocationGranularity(size_t *granularity, const CUmemAllocationProp *prop,
                                  CUmemAllocationGranularity_flags option)
{
    CHECK_INIT();
    if (!granularity || !prop || (unsigned)option > 1)
        return CUDA_ERROR_INVALID_VALUE;
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

/* ---- physical memory ---- */

API cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                unsigned long long flags);
API cuMemRelease(CUmemGenericAllocationHandle handle);
API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address);
API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle);

API cuMemCreate(CUmemGenericAllocationHandle *handle, size_t size, const CUmemAllocationProp *prop,
                unsigned long long flags)
{
    CHECK_INIT();
    if (!handle || !prop || !size || size % GRANULARITY || flags || prop->type != CU_MEM_ALLOCATION_TYPE_PINNED)
        return CUDA_ERROR_INVALID_VALUE;
    if (prop->requestedHandleTypes != CU_MEM_HANDLE_TYPE_NONE)
        return CUDA_ERROR_NOT_SUPPORTED; /* nothing is exported between processes */
    bool device = prop->location.type == CU_MEM_LOCATION_TYPE_DEVICE;
    struct gpu *gpu = device ? gpu_of(prop->location.id) : NULL;
    if (device && !gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    if (prop->location.type == CU_MEM_LOCATION_TYPE_INVALID ||
        prop->location.type > CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT)
        return CUDA_ERROR_INVALID_VALUE;
    CUresult result = CUDA_SUCCESS;
    pthread_mutex_lock(&api_lock);
    if (gpu && (gpu_join(gpu) != CUDA_SUCCESS || sim_charge(&gpu->map, size) != 0)) {
        result = CUDA_ERROR_OUT_OF_MEMORY;
    } else {
        struct allocation *allocation = allocation_new(size);
        if (allocation) {
            allocation->magic = ALLOCATION_MAGIC;
            allocation->handles = 1;
            allocation->mappings = 0;
            allocation->prop = *prop;
            allocation->gpu = gpu;
            *handle = (uintptr_t)allocation;
        } else {
            if (gpu)
                sim_refund(&gpu->map, size);
            result = CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemRelease(CUmemGenericAllocationHandle handle)
{
    CHECK_INIT();
    pthread_mutex_lock(&api_lock);
    struct allocation *allocation = allocation_of(handle);
    if (allocation) {
        allocation->handles--;
        drop_if_last(allocation);
    }
    pthread_mutex_unlock(&api_lock);
    return allocation ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuMemRetainAllocationHandle(CUmemGenericAllocationHandle *handle, void *address)
{
    CHECK_INIT();
    if (!handle)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find((uintptr_t)address);
    bool found = block && block->kind == BLOCK_MAPPING;
    if (found) {
        block->allocation->handles++;
        *handle = (uintptr_t)block->allocation;
    }
    pthread_mutex_unlock(&api_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

API cuMemGetAllocationPropertiesFromHandle(CUmemAllocationProp *prop, CUmemGenericAllocationHandle handle)
{
    CHECK_INIT();
    pthread_mutex_lock(&api_lock);
    struct allocation *allocation = allocation_of(handle);
    if (allocation && prop)
        *prop = allocation->prop;
    pthread_mutex_unlock(&api_lock);
    return allocation && prop ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}

/* ---- mapping ---- */

API cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags);
API cuMemUnmap(CUdeviceptr pointer, size_t size);
API cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *desc, size_t count);
API cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer);

static CUresult map_block(CUdeviceptr pointer, size_t size, size_t offset, struct allocation *allocation)
{
    struct block *reservation = reservation_find(pointer);
    if (!allocation || offset > allocation->size || size > allocation->size - offset)
        return CUDA_ERROR_INVALID_VALUE;
    if (!reservation || size > reservation->base + reservation->size - pointer || mapped_within(pointer, size))
        return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap((void *)(uintptr_t)pointer, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, backing,
                    (off_t)(allocation->at + offset));
    if (at == MAP_FAILED)
        return CUDA_ERROR_OUT_OF_MEMORY;
    madvise(at, size, MADV_DONTDUMP);
    struct gpu *gpu = allocation->gpu ? allocation->gpu : gpus[0];
    struct block *block = block_insert(pointer, size, BLOCK_MAPPING, NULL, gpu);
    if (!block) {
        mmap(at, size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE, -1, 0);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    block->allocation = allocation;
    block->offset = offset;
    allocation->mappings++;
    return CUDA_SUCCESS;
}

API cuMemMap(CUdeviceptr pointer, size_t size, size_t offset, CUmemGenericAllocationHandle handle,
             unsigned long long flags)
{
    CHECK_INIT();
    if (!size || size % GRANULARITY || pointer % GRANULARITY || offset || flags)
        return CUDA_ERROR_INVALID_VALUE; /* the real driver wants no offset either */
    pthread_mutex_lock(&api_lock);
    CUresult result = map_block(pointer, size, offset, allocation_of(handle));
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* Whole mappings only, as many as lie side by side. */
static bool covered(CUdeviceptr pointer, size_t size)
{
    uint64_t at = pointer, end = pointer + size;
    while (at < end) {
        struct block *block = block_find(at);
        if (!block || block->kind != BLOCK_MAPPING || block->base != at || block->size > end - at)
            return false;
        at += block->size;
    }
    return size != 0;
}

API cuMemUnmap(CUdeviceptr pointer, size_t size)
{
    CHECK_INIT();
    pthread_mutex_lock(&api_lock);
    CUresult result = covered(pointer, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = pointer; result == CUDA_SUCCESS && at < pointer + size;) {
        struct block *block = block_find(at);
        struct allocation *allocation = block->allocation;
        queue_wait_all(&block->gpu->queue);
        mmap((void *)(uintptr_t)at, block->size, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED | MAP_NORESERVE,
             -1, 0);
        at += block->size;
        block_remove(block);
        allocation->mappings--;
        drop_if_last(allocation);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemSetAccess(CUdeviceptr pointer, size_t size, const CUmemAccessDesc *desc, size_t count)
{
    CHECK_INIT();
    if (!desc || !count)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = covered(pointer, size) ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
    for (uint64_t at = pointer; result == CUDA_SUCCESS && at < pointer + size;) {
        struct block *block = block_find(at);
        for (size_t i = 0; i < count; i++) {
            bool device = desc[i].location.type == CU_MEM_LOCATION_TYPE_DEVICE;
            if (device && gpu_of(desc[i].location.id) != block->gpu)
                continue; /* another GPU's view of it: there is but one address space */
            block->access = desc[i].flags;
        }
        int protection = block->access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE ? PROT_READ | PROT_WRITE
                         : block->access == CU_MEM_ACCESS_FLAGS_PROT_READ    ? PROT_READ
                                                                             : PROT_NONE;
        if (mprotect((void *)(uintptr_t)at, block->size, protection) < 0)
            result = CUDA_ERROR_OUT_OF_MEMORY;
        at += block->size;
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMemGetAccess(unsigned long long *flags, const CUmemLocation *location, CUdeviceptr pointer)
{
    CHECK_INIT();
    if (!flags || !location)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(pointer);
    bool found = block && block->kind == BLOCK_MAPPING;
    if (found)
        *flags = location->type == CU_MEM_LOCATION_TYPE_DEVICE && gpu_of(location->id) == block->gpu ? block->access
            : 0;
    pthread_mutex_unlock(&api_lock);
    return found ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
