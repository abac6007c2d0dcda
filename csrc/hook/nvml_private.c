/* nvml_private.c: the private table through which nvidia-smi finds GPUs and lists processes.
 *
 * In an instance the program gets a copy in which these slots are ours (nvml_min.h has the facts):
 *   81         handle by index: counts within the GPUs that the program sees
 *   213-215    a GPU's processes: none. Entries have a layout that no document promises, so they are not narrowed but
 *              left out; the public lists show the instance's own processes. A native GPU's (instance.h) are the driver's
 *   145        their utilization (nvidia-smi pmon): not supported, on no GPU, since nobody says what else it takes
 * All others work on handles that the program got through us, or on the node (the driver's version, log lines).
 *
 * These places held in 535, 550 and 580; the table grew at its end only. So a longer one is taken to be alike, if all
 * five are functions. A shorter one, and one of another id, goes through as it is, with a log line: a table that is
 * wrongly patched would take the program down, while this one shows at most who else runs. */
#include <stdlib.h>
#include <string.h>

#include "lock.h"
#include "nvml.h"

#define MOST_BYTES (1 << 16) /* 2,008 bytes in 550 */

typedef nvmlReturn_t (*private_by_index)(unsigned int index, nvmlDevice_t *device, unsigned long long flags);

typedef nvmlReturn_t (*private_processes)(nvmlDevice_t device, unsigned int *count, nvmlPrivateProcess_t *entries);

static private_by_index real_by_index;
static private_processes real_processes[3];

static nvmlReturn_t real_without_flags(unsigned int index, nvmlDevice_t *device)
{
    return real_by_index(index, device, NVML_PRIVATE_HANDLE_FLAGS);
}

static nvmlReturn_t handle_by_index(unsigned int index, nvmlDevice_t *device, unsigned long long flags)
{
    if (!hook_join(true))
        return real_by_index(index, device, flags);
    return nvml_handle_by_index(index, device, real_without_flags);
}

static nvmlReturn_t processes(int which, nvmlDevice_t device, unsigned int *count, nvmlPrivateProcess_t *entries)
{
    if (hook_join(true) && nvml_place(device) >= 0 && nvml_gpu(device) < 0)
        return real_processes[which](device, count, entries);
    if (!count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *count = 0;
    return NVML_SUCCESS;
}

#define PROCESSES(which) \
    static nvmlReturn_t processes_##which(nvmlDevice_t device, unsigned int *count, nvmlPrivateProcess_t *entries) \
    { \
        return processes(which, device, count, entries); \
    }
PROCESSES(0)
PROCESSES(1)
PROCESSES(2)

static nvmlReturn_t not_supported(void)
{
    return NVML_ERROR_NOT_SUPPORTED;
}

/* A patched copy, malloc()ed; NULL: not a table that we know, or no memory. */
static const void **copy_of(const void *const *table)
{
    static const int places[] = {NVML_PRIVATE_HANDLE_BY_INDEX, NVML_PRIVATE_UTILIZATION, NVML_PRIVATE_PROCESSES,
                                 NVML_PRIVATE_PROCESSES + 1, NVML_PRIVATE_PROCESSES + 2};
    size_t bytes = (size_t)table[0];
    if (bytes < (NVML_PRIVATE_PROCESSES + 3) * sizeof *table || bytes > MOST_BYTES || bytes % sizeof *table)
        return NULL;
    for (size_t i = 0; i < sizeof places / sizeof *places; i++)
        if (!table[places[i]])
            return NULL;
    const void **copy = malloc(bytes);
    if (!copy)
        return NULL;
    memcpy(copy, table, bytes);
    real_by_index = (private_by_index)table[NVML_PRIVATE_HANDLE_BY_INDEX];
    copy[NVML_PRIVATE_HANDLE_BY_INDEX] = (const void *)handle_by_index;
    copy[NVML_PRIVATE_UTILIZATION] = (const void *)not_supported;
    static const private_processes ours[3] = {processes_0, processes_1, processes_2};
    for (int i = 0; i < 3; i++) {
        real_processes[i] = (private_processes)table[NVML_PRIVATE_PROCESSES + i];
        copy[NVML_PRIVATE_PROCESSES + i] = (const void *)ours[i];
    }
    return copy;
}

NVML_WRAP(nvmlReturn_t, nvmlInternalGetExportTable, (const void **table, const void *id))
{
    static struct hook_lock lock;
    static const void *from, **copy;
    static bool told;
    nvmlReturn_t result = REAL(nvmlInternalGetExportTable)(table, id);
    if (result != NVML_SUCCESS || !id || !table || !*table || !hook_join(true))
        return result;
    bool known = memcmp(id, nvml_private_id, sizeof nvml_private_id) == 0;
    hook_lock_take(&lock);
    if (known && from != *table) {
        copy = copy_of(*table); /* the one before may be in use: never freed */
        from = *table;
    }
    const void **ours = known ? copy : NULL;
    bool tell = !ours && !told;
    told |= tell;
    hook_lock_drop(&lock);
    if (ours)
        *table = ours;
    else if (tell)
        hook_log("warning",
                 "event=nvml-private-table known=%d: handed out as it is: it may show other tenants' processes", known);
    return result;
}
