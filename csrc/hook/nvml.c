/* nvml.c: NVML as the instance sees it: its GPUs only, numbered from 0, and memory scaled to the quota; its native ones
 * (instance.h) as they are.
 *
 * A handle is opaque; which GPU it stands for is asked once, by UUID. Init and everything not named here is forwarded. */
#include "nvml.h"

#include <string.h>

#include "atomics.h"
#include "instance.h"
#include "ledger.h"

NVML_NEED(nvmlReturn_t, nvmlDeviceGetUUID, (nvmlDevice_t device, char *uuid, unsigned int length));

/* ---- handles ---- */

#define HANDLES 64
static struct {
    nvmlDevice_t device; /* written last */
    struct which {
        int gpu, place;
    } which;
    uint32_t taken;
} handles[HANDLES];

/* Never shrinks: a handle keeps its meaning for as long as the library is loaded. A fork inherits it with the library's. */
static void remember(nvmlDevice_t device, struct which which)
{
    for (int i = 0; i < HANDLES; i++) {
        uint32_t free = 0;
        if (load_acquire(&handles[i].device) == device)
            return;
        if (__atomic_compare_exchange_n(&handles[i].taken, &free, 1, false, __ATOMIC_ACQ_REL, __ATOMIC_RELAXED)) {
            handles[i].which = which;
            store_release(&handles[i].device, device);
            return;
        }
    }
}

static struct which which(nvmlDevice_t device)
{
    static const struct which none = {-1, -1};
    char text[96];
    uint8_t uuid[16];
    if (!device)
        return none;
    for (int i = 0; i < HANDLES && load_relaxed(&handles[i].taken); i++)
        if (load_acquire(&handles[i].device) == device)
            return handles[i].which;
    if (!have(nvmlDeviceGetUUID) || REAL(nvmlDeviceGetUUID)(device, text, sizeof text) != NVML_SUCCESS ||
        !uuid_parse(text, uuid))
        return none;
    struct which found = {hook_gpu_of_uuid(uuid), seen_place(uuid)};
    remember(device, found);
    return found;
}

int nvml_gpu(nvmlDevice_t device)
{
    return which(device).gpu;
}

int nvml_place(nvmlDevice_t device)
{
    return which(device).place;
}

/* Finds by `key` in the whole node: kept if the program sees it, else as if there were no such GPU. */
typedef nvmlReturn_t (*by_key)(const void *key, nvmlDevice_t *device);

static nvmlReturn_t find(const void *key, nvmlDevice_t *device, by_key real)
{
    nvmlDevice_t got = NULL;
    if (!hook_join(true) || !device)
        return real(key, device);
    nvmlReturn_t result = real(key, &got);
    if (result == NVML_SUCCESS && nvml_place(got) < 0)
        return NVML_ERROR_NOT_FOUND;
    if (result == NVML_SUCCESS)
        *device = got;
    return result;
}

/* ---- counting and finding ---- */

#define FIND(name, type) \
    NVML_WRAP(nvmlReturn_t, name, (type key, nvmlDevice_t *device)) \
    { \
        return find(key, device, (by_key)(void *)REAL(name)); \
    }

FIND(nvmlDeviceGetHandleByUUID, const char *)
FIND(nvmlDeviceGetHandleByUUIDV, const nvmlUUID_t *)
FIND(nvmlDeviceGetHandleByPciBusId, const char *)
FIND(nvmlDeviceGetHandleByPciBusId_v2, const char *)
FIND(nvmlDeviceGetHandleBySerial, const char *)

static nvmlReturn_t count(unsigned int *number, nvmlReturn_t (*real)(unsigned int *))
{
    nvmlReturn_t result = real(number);
    if (result == NVML_SUCCESS && hook_join(true))
        *number = (unsigned int)seen_gpus();
    return result;
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetCount, (unsigned int *number))
{
    return count(number, REAL(nvmlDeviceGetCount));
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetCount_v2, (unsigned int *number))
{
    return count(number, REAL(nvmlDeviceGetCount_v2));
}

nvmlReturn_t nvml_handle_by_index(unsigned int index, nvmlDevice_t *device,
                                  nvmlReturn_t (*real)(unsigned int index, nvmlDevice_t *device))
{
    char uuid[UUID_TEXT];
    if (!hook_join(true))
        return real(index, device);
    if (index >= (unsigned int)seen_gpus() || !device) {
        unsigned int none = ~0u; /* the driver's own answer for what is not there, before and after nvmlInit */
        nvmlReturn_t result = real(none, device);
        return result == NVML_SUCCESS ? NVML_ERROR_INVALID_ARGUMENT : result;
    }
    if (!have(nvmlDeviceGetHandleByUUID))
        return NVML_ERROR_FUNCTION_NOT_FOUND;
    uuid_format(seen_uuid((int)index), uuid);
    return REAL(nvmlDeviceGetHandleByUUID)(uuid, device);
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetHandleByIndex, (unsigned int index, nvmlDevice_t *device))
{
    return nvml_handle_by_index(index, device, REAL(nvmlDeviceGetHandleByIndex));
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetHandleByIndex_v2, (unsigned int index, nvmlDevice_t *device))
{
    return nvml_handle_by_index(index, device, REAL(nvmlDeviceGetHandleByIndex_v2));
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetIndex, (nvmlDevice_t device, unsigned int *index))
{
    nvmlReturn_t result = REAL(nvmlDeviceGetIndex)(device, index);
    int place = result == NVML_SUCCESS && hook_join(true) ? nvml_place(device) : -1;
    if (place >= 0)
        *index = (unsigned int)place;
    return result;
}

/* ---- a GPU's neighbours, a CPU's GPUs: those of them that the program sees ---- */

/* *count: room in `out` (NULL: only counted), number out, as the driver has it. */
static nvmlReturn_t keep_own(const nvmlDevice_t *all, unsigned int found, unsigned int *count, nvmlDevice_t *out)
{
    unsigned int own = 0, room = *count;
    for (unsigned int i = 0; i < found && i < HANDLES; i++) {
        if (nvml_place(all[i]) < 0)
            continue;
        if (out && own < room)
            out[own] = all[i];
        own++;
    }
    *count = out && own > room ? room : own;
    return NVML_SUCCESS;
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetTopologyNearestGpus,
          (nvmlDevice_t device, int level, unsigned int *count, nvmlDevice_t *devices))
{
    nvmlDevice_t all[HANDLES];
    unsigned int found = HANDLES;
    if (!count || !hook_join(true))
        return REAL(nvmlDeviceGetTopologyNearestGpus)(device, level, count, devices);
    nvmlReturn_t result = REAL(nvmlDeviceGetTopologyNearestGpus)(device, level, &found, all);
    return result == NVML_SUCCESS ? keep_own(all, found, count, devices) : result;
}

NVML_WRAP(nvmlReturn_t, nvmlSystemGetTopologyGpuSet, (unsigned int cpu, unsigned int *count, nvmlDevice_t *devices))
{
    nvmlDevice_t all[HANDLES];
    unsigned int found = HANDLES;
    if (!count || !hook_join(true))
        return REAL(nvmlSystemGetTopologyGpuSet)(cpu, count, devices);
    nvmlReturn_t result = REAL(nvmlSystemGetTopologyGpuSet)(cpu, &found, all);
    return result == NVML_SUCCESS ? keep_own(all, found, count, devices) : result;
}

/* ---- memory ---- */

/* used + free == total, as NVML has it, unless the card itself has less free than the quota. */
static void scale(int gpu, unsigned long long *total, unsigned long long *free, unsigned long long *used)
{
    struct ledger_view view = ledger_view(gpu);
    if (*total > view.limit)
        *total = view.limit;
    *used = view.used < *total ? view.used : *total;
    if (*free > *total - *used)
        *free = *total - *used;
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *memory))
{
    nvmlReturn_t result = REAL(nvmlDeviceGetMemoryInfo)(device, memory);
    int gpu = result == NVML_SUCCESS && hook_join(true) ? nvml_gpu(device) : -1;
    if (gpu >= 0)
        scale(gpu, &memory->total, &memory->free, &memory->used);
    return result;
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *memory))
{
    nvmlReturn_t result = REAL(nvmlDeviceGetMemoryInfo_v2)(device, memory);
    int gpu = result == NVML_SUCCESS && hook_join(true) ? nvml_gpu(device) : -1;
    if (gpu < 0)
        return result;
    if (memory->version != NVML_MEMORY_V2) /* a layout younger than this code: the program falls back to one we can scale */
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    scale(gpu, &memory->total, &memory->free, &memory->used);
    memory->reserved = 0; /* the card's, not the instance's */
    return result;
}

/* BAR1 in proportion to the quota: the part of the card's address window that goes with this part of its memory. */
NVML_WRAP(nvmlReturn_t, nvmlDeviceGetBAR1MemoryInfo, (nvmlDevice_t device, nvmlBAR1Memory_t *memory))
{
    nvmlReturn_t result = REAL(nvmlDeviceGetBAR1MemoryInfo)(device, memory);
    int gpu = result == NVML_SUCCESS && hook_join(true) ? nvml_gpu(device) : -1;
    if (gpu < 0)
        return result;
    struct ledger_view view = ledger_view(gpu);
    if (view.total == 0 || view.limit >= view.total)
        return result;
    double part = (double)view.limit / (double)view.total;
    memory->bar1Total = (unsigned long long)((double)memory->bar1Total * part);
    memory->bar1Used = (unsigned long long)((double)memory->bar1Used * part);
    memory->bar1Free = memory->bar1Total - memory->bar1Used;
    return result;
}
