/* multicast.c: multicast objects: handles that are mapped like memory, have none of their own, and say which GPUs'
 * memory belongs together. Kernels compute nothing here, and what is written to a mapping of one stays there; what
 * counts is that the calls go together as documented, and that memory bound to one is held. An object is a shared file
 * with the list of its GPUs behind its label, so that several processes may have it. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "cuda/vmm.h"

#define LIST_AT 2048u /* in the page of the label */


API cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop);
API cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device);
API cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory,
                       size_t memory_offset, size_t size, unsigned long long flags);
API cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr pointer, size_t size,
                        unsigned long long flags);
API cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t size);
API cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *prop, int option);

struct list { uint32_t taken, added; uint8_t uuid[SIM_GPUS][16]; }; /* added: those of which the UUID is there */
struct binding { struct gpu *gpu; uint64_t offset, size; struct allocation *allocation; struct binding *next; };
struct multicast {
    uint32_t devices;
    void *page;
    struct list *list;
    struct binding *bindings;
};

/* ---- under api_lock ---- */

struct multicast *multicast_open(int file, const struct label *label)
{
    struct multicast *multicast = calloc(1, sizeof *multicast);
    void *page = mmap(NULL, 4096, PROT_READ | PROT_WRITE, MAP_SHARED, file, (off_t)label->size);
    if (!multicast || page == MAP_FAILED) {
        free(multicast);
        if (page != MAP_FAILED)
            munmap(page, 4096);
        return NULL;
    }
    multicast->devices = label->devices;
    multicast->page = page;
    multicast->list = (struct list *)((char *)page + LIST_AT);
    return multicast;
}

static bool has(const struct multicast *multicast, const struct gpu *gpu)
{
    uint32_t taken = load_acquire(&multicast->list->taken);
    for (uint32_t i = 0; i < taken && i < multicast->devices; i++)
        if (memcmp(multicast->list->uuid[i], gpu->conf.uuid, 16) == 0)
            return true;
    return false;
}

bool multicast_ready(const struct multicast *multicast)
{
    return load_acquire(&multicast->list->added) >= multicast->devices;
}

static void unbind(struct binding **at)
{
    struct binding *binding = *at;
    *at = binding->next;
    binding->allocation->mappings--;
    allocation_drop_if_last(binding->allocation);
    free(binding);
}

void multicast_release(struct multicast *multicast)
{
    while (multicast->bindings)
        unbind(&multicast->bindings);
    munmap(multicast->page, 4096);
    free(multicast);
}

static CUresult bind(struct allocation *object, uint64_t offset, struct allocation *memory, uint64_t memory_offset,
                     uint64_t size)
{
    if (!object || !object->multicast || !memory || memory->multicast || !memory->gpu)
        return CUDA_ERROR_INVALID_VALUE;
    if (!size || offset % GRANULARITY || memory_offset % GRANULARITY || size % GRANULARITY)
        return CUDA_ERROR_INVALID_VALUE;
    if (offset > object->size || size > object->size - offset || memory_offset > memory->size ||
        size > memory->size - memory_offset)
        return CUDA_ERROR_INVALID_VALUE;
    struct multicast *multicast = object->multicast;
    if (!has(multicast, memory->gpu))
        return CUDA_ERROR_INVALID_DEVICE;
    if (!multicast_ready(multicast))
        return CUDA_ERROR_NOT_PERMITTED;
    for (struct binding *other = multicast->bindings; other; other = other->next)
        if (other->gpu == memory->gpu && offset < other->offset + other->size && other->offset < offset + size)
            return CUDA_ERROR_INVALID_VALUE;
    struct binding *binding = malloc(sizeof *binding);
    if (!binding)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *binding = (struct binding){memory->gpu, offset, size, memory, multicast->bindings};
    multicast->bindings = binding;
    memory->mappings++;
    return CUDA_SUCCESS;
}

/* ---- entry points ---- */

static CUresult check(const CUmulticastObjectProp *prop)
{
    if (!prop || !prop->numDevices || prop->numDevices > SIM_GPUS || !prop->size || prop->flags)
        return CUDA_ERROR_INVALID_VALUE;
    return prop->handleTypes & ~(unsigned long long)CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR ? CUDA_ERROR_NOT_SUPPORTED
        : CUDA_SUCCESS;
}

API cuMulticastGetGranularity(size_t *granularity, const CUmulticastObjectProp *prop, int option)
{
    CHECK_INIT();
    if (!granularity || (unsigned)option > 1)
        return CUDA_ERROR_INVALID_VALUE;
    TRY(check(prop));
    *granularity = GRANULARITY;
    return CUDA_SUCCESS;
}

static struct allocation *object_new_for(const CUmulticastObjectProp *prop)
{
    struct label label = {.kind = LABEL_ALLOCATION, .devices = prop->numDevices, .size = prop->size};
    label.prop.requestedHandleTypes = (CUmemAllocationHandleType)prop->handleTypes;
    int file = shared_file_new(prop->size, &label);
    struct allocation *allocation = file >= 0 ? allocation_of_file(file, &label, NULL) : NULL;
    if (file >= 0 && !allocation)
        close(file);
    return allocation;
}

API cuMulticastCreate(CUmemGenericAllocationHandle *handle, const CUmulticastObjectProp *prop)
{
    CHECK_INIT();
    TRY(check(prop));
    if (!handle || prop->size % GRANULARITY)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct allocation *allocation = object_new_for(prop);
    if (allocation)
        *handle = (uintptr_t)allocation;
    pthread_mutex_unlock(&api_lock);
    return allocation ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API cuMulticastAddDevice(CUmemGenericAllocationHandle handle, CUdevice device)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    struct allocation *object = allocation_of(handle);
    CUresult result = object && object->multicast && !has(object->multicast, gpu) ? CUDA_SUCCESS
                                                                                 : CUDA_ERROR_INVALID_VALUE;
    if (result == CUDA_SUCCESS) {
        struct list *list = object->multicast->list;
        uint32_t place = load_acquire(&list->taken);
        while (place < object->multicast->devices && !__sync_bool_compare_and_swap(&list->taken, place, place + 1))
            place = load_acquire(&list->taken); /* another process has added one */
        if (place < object->multicast->devices) {
            memcpy(list->uuid[place], gpu->conf.uuid, sizeof list->uuid[place]);
            fetch_add(&list->added, 1);
        } else {
            result = CUDA_ERROR_INVALID_VALUE;
        }
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMulticastBindMem(CUmemGenericAllocationHandle handle, size_t offset, CUmemGenericAllocationHandle memory,
                       size_t memory_offset, size_t size, unsigned long long flags)
{
    CHECK_INIT();
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = bind(allocation_of(handle), offset, allocation_of(memory), memory_offset, size);
    pthread_mutex_unlock(&api_lock);
    return result;
}

API cuMulticastBindAddr(CUmemGenericAllocationHandle handle, size_t offset, CUdeviceptr pointer, size_t size,
                        unsigned long long flags)
{
    CHECK_INIT();
    if (flags)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    struct block *block = block_find(pointer);
    bool good = block && block->kind == BLOCK_MAPPING && size <= block->base + block->size - pointer;
    CUresult result = good ? bind(allocation_of(handle), offset, block->allocation,
                                  pointer - block->base + block->offset, size) : CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* What was bound, as it was bound. */
API cuMulticastUnbind(CUmemGenericAllocationHandle handle, CUdevice device, size_t offset, size_t size)
{
    CHECK_INIT();
    struct gpu *gpu = gpu_of(device);
    CUresult result = CUDA_ERROR_INVALID_VALUE;
    if (!gpu)
        return CUDA_ERROR_INVALID_DEVICE;
    pthread_mutex_lock(&api_lock);
    struct allocation *object = allocation_of(handle);
    if (object && object->multicast) {
        struct binding **at = &object->multicast->bindings;
        while (*at && ((*at)->gpu != gpu || (*at)->offset != offset || (*at)->size != size))
            at = &(*at)->next;
        if (*at) {
            unbind(at);
            result = CUDA_SUCCESS;
        }
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}
