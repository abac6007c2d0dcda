/* vmm.c: virtual memory management. Physical memory is a stretch of one memfd of the process (a memfd a handle would
 * run into the limit of open files), mapped wherever cuMemMap says; what is exported moves to a file of its own. An
 * allocation lives as long as a handle or a mapping does. */
#define _GNU_SOURCE
#include <linux/falloc.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "cuda/vmm.h"

#define ALLOCATION_MAGIC 0x636f6c6c616d6976ull

static int backing = -1;
static uint64_t backing_end;
static struct allocation *unused, *bare, *shared; /* free with a stretch, free without; those with their own file */

struct allocation *allocation_of(CUmemGenericAllocationHandle handle)
{
    struct allocation *allocation = (struct allocation *)(uintptr_t)handle;
    return handle > 4096 && !(handle & 7) && allocation->magic == ALLOCATION_MAGIC && allocation->handles ? allocation
        : NULL;
}

struct allocation *allocation_bare(void)
{
    struct allocation *allocation = bare;
    if (allocation)
        bare = allocation->next;
    else
        allocation = malloc(sizeof *allocation);
    if (allocation)
        *allocation = (struct allocation){.magic = ALLOCATION_MAGIC, .file = -1, .handles = 1};
    return allocation;
}

static void give_bare(struct allocation *allocation)
{
    allocation->magic = 0;
    allocation->next = bare;
    bare = allocation;
}

static void unlist(struct allocation *allocation)
{
    struct allocation **at = &shared;
    while (*at && *at != allocation)
        at = &(*at)->shared;
    if (*at)
        *at = allocation->shared;
}

void allocation_drop_if_last(struct allocation *allocation)
{
    if (allocation->handles || allocation->mappings)
        return;
    allocation->magic = 0;
    if (allocation->multicast)
        multicast_release(allocation->multicast);
    if (allocation->share)
        sim_share_drop(&allocation->gpu->map, allocation->share);
    else if (allocation->gpu && allocation->file >= 0)
        sim_refund(&allocation->gpu->map, allocation->size);
    if (allocation->own) {
        unlist(allocation);
        close(allocation->file);
    }
    if (allocation->own || allocation->file < 0) {
        give_bare(allocation);
        return;
    }
    fallocate(backing, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)allocation->at, (off_t)allocation->size);
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
            *allocation = (struct allocation){.magic = ALLOCATION_MAGIC, .at = allocation->at, .size = size,
                                              .file = backing, .handles = 1};
            return allocation;
        }
    }
    if (ftruncate(backing, (off_t)(backing_end + size)) < 0)
        return NULL;
    struct allocation *allocation = allocation_bare();
    if (allocation) {
        allocation->file = backing;
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
    if (prop->requestedHandleTypes & ~(unsigned)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_NOT_SUPPORTED; /* neither Windows nor a fabric */
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
        allocation_drop_if_last(allocation);
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
    if (allocation && allocation->multicast && !multicast_ready(allocation->multicast))
        return CUDA_ERROR_NOT_PERMITTED;
    if (!allocation || offset > allocation->size || size > allocation->size - offset)
        return CUDA_ERROR_INVALID_VALUE;
    if (!reservation || size > reservation->base + reservation->size - pointer || mapped_within(pointer, size))
        return CUDA_ERROR_INVALID_VALUE;
    void *at = mmap((void *)(uintptr_t)pointer, size, PROT_NONE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE,
                    allocation->file, (off_t)(allocation->at + offset));
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
        allocation_drop_if_last(allocation);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

static int protection(const struct block *block)
{
    if (block->access == CU_MEM_ACCESS_FLAGS_PROT_READWRITE)
        return PROT_READ | PROT_WRITE;
    return block->access == CU_MEM_ACCESS_FLAGS_PROT_READ ? PROT_READ : PROT_NONE;
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
        if (mprotect((void *)(uintptr_t)at, block->size, protection(block)) < 0)
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

/* ---- between processes ---- */

API cuMemExportToShareableHandle(void *handle, CUmemGenericAllocationHandle allocation, CUmemAllocationHandleType type,
                                 unsigned long long flags);
API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor,
                                   CUmemAllocationHandleType type);

struct move { const struct allocation *allocation; int file; bool failed; };

static void remap(struct block *block, void *arg)
{
    struct move *move = arg;
    if (block->kind != BLOCK_MAPPING || block->allocation != move->allocation)
        return;
    void *at = (void *)(uintptr_t)block->base;
    if (mmap(at, block->size, protection(block), MAP_SHARED | MAP_FIXED | MAP_NORESERVE, move->file,
             (off_t)block->offset) == MAP_FAILED)
        move->failed = true;
    else
        madvise(at, block->size, MADV_DONTDUMP);
}

/* To a file of its own, with its bytes and under every mapping of it. */
static CUresult make_shared(struct allocation *allocation)
{
    struct label label = {.kind = LABEL_ALLOCATION, .prop = allocation->prop};
    struct allocation *stretch = allocation_bare();
    if (!stretch)
        return CUDA_ERROR_OUT_OF_MEMORY;
    stretch->magic = 0;
    if (allocation->gpu) {
        memcpy(label.uuid, allocation->gpu->conf.uuid, sizeof label.uuid);
        if (!allocation->share && sim_share(&allocation->gpu->map, allocation->size, &allocation->share) != 0) {
            give_bare(stretch);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
        label.share = allocation->share;
    }
    struct move move = {.allocation = allocation, .file = shared_file_new(allocation->size, &label)};
    copies_stop();
    move.failed = move.file < 0 || !shared_file_copy(move.file, 0, allocation->file, allocation->at, allocation->size);
    if (!move.failed)
        block_each(remap, &move);
    copies_go_on();
    if (move.failed) { /* the entry stays: it counts the same */
        if (move.file >= 0)
            close(move.file);
        give_bare(stretch);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    stretch->at = allocation->at;
    stretch->size = allocation->size;
    stretch->next = unused;
    unused = stretch;
    fallocate(backing, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)stretch->at, (off_t)stretch->size);
    allocation->file = move.file;
    allocation->at = 0;
    allocation->own = true;
    allocation->inode = shared_file_inode(move.file);
    allocation->shared = shared;
    shared = allocation;
    return CUDA_SUCCESS;
}

/* The descriptor is the program's, and keeps the bytes but counts as nothing. */
API cuMemExportToShareableHandle(void *out, CUmemGenericAllocationHandle handle, CUmemAllocationHandleType type,
                                 unsigned long long flags)
{
    CHECK_INIT();
    if (!out || flags || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct allocation *allocation = allocation_of(handle);
    CUresult result = allocation && (allocation->prop.requestedHandleTypes & type) ? CUDA_SUCCESS
                                                                                  : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS && !allocation->own)
        result = make_shared(allocation);
    if (result == CUDA_SUCCESS) {
        int descriptor = fcntl(allocation->file, F_DUPFD_CLOEXEC, 3);
        if (descriptor < 0)
            result = CUDA_ERROR_OPERATING_SYSTEM;
        else
            *(int *)out = descriptor;
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

struct allocation *allocation_of_file(int file, const struct label *label, struct gpu *gpu)
{
    struct allocation *allocation = allocation_bare();
    if (!allocation)
        return NULL;
    if (label->devices && !(allocation->multicast = multicast_open(file, label))) {
        give_bare(allocation);
        return NULL;
    }
    allocation->file = file;
    allocation->own = true;
    allocation->size = label->size;
    allocation->inode = shared_file_inode(file);
    allocation->share = gpu ? label->share : 0;
    allocation->prop = label->prop;
    allocation->gpu = gpu;
    if (gpu)
        allocation->prop.location.id = gpu->ordinal; /* which may have another number here */
    allocation->shared = shared;
    shared = allocation;
    return allocation;
}

static CUresult adopt(int descriptor, const struct label *label, struct allocation **out)
{
    static const uint8_t host[16];
    struct gpu *gpu = gpu_of_uuid(label->uuid);
    if (!gpu && memcmp(label->uuid, host, sizeof host) != 0)
        return CUDA_ERROR_INVALID_DEVICE;
    if (gpu)
        TRY(gpu_join(gpu));
    int file = fcntl(descriptor, F_DUPFD_CLOEXEC, 3);
    if (file < 0)
        return CUDA_ERROR_OPERATING_SYSTEM;
    if (gpu && sim_share_hold(&gpu->map, label->share, label->size) != 0) {
        close(file);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    *out = allocation_of_file(file, label, gpu);
    if (*out)
        return CUDA_SUCCESS;
    if (gpu)
        sim_share_drop(&gpu->map, label->share);
    close(file);
    return CUDA_ERROR_OUT_OF_MEMORY;
}

CUresult allocation_import(int descriptor, struct allocation **out)
{
    struct label label;
    if (!shared_file_label(descriptor, LABEL_ALLOCATION, &label))
        return CUDA_ERROR_INVALID_VALUE;
    uint64_t inode = shared_file_inode(descriptor);
    for (struct allocation *allocation = shared; allocation; allocation = allocation->shared) {
        if (allocation->inode == inode) { /* this process has it: one more handle */
            allocation->handles++;
            *out = allocation;
            return CUDA_SUCCESS;
        }
    }
    return adopt(descriptor, &label, out);
}

API cuMemImportFromShareableHandle(CUmemGenericAllocationHandle *handle, void *descriptor,
                                   CUmemAllocationHandleType type)
{
    struct allocation *allocation;
    CHECK_INIT();
    if (!handle || type != CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = allocation_import((int)(intptr_t)descriptor, &allocation);
    if (result == CUDA_SUCCESS)
        *handle = (uintptr_t)allocation;
    pthread_mutex_unlock(&api_lock);
    return result;
}
