/* nvml_process.c: whatever NVML says of single processes, narrowed to the instance's own: who runs, what they use of the
 * device, their encoder and capture sessions, their accounts. (What nvidia-smi lists comes from a private table and is not
 * narrowed here.)
 *
 * NVML counts processes as its caller's PID namespace does. The instance's are known by the pids in its live slots, each as
 * the process counts itself: the same for bare processes, and for a container that shares one PID namespace. Own pids of a
 * process in a namespace of its own match nothing foreign by accident only if the driver translates; an entry that matches no
 * slot is left out. While no daemon answers there are no slots, and a process sees itself alone. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client.h"
#include "nvml.h"

#define ROOM 64         /* entries more than the list had a moment ago */
#define TRIES 8

/* One function that lists processes, whichever its entries' type. `more`: what else it takes. */
typedef nvmlReturn_t (*list_function)(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long more);

struct list {
    list_function real;
    size_t size, pid; /* of an entry; of the pid in it */
    unsigned long long more;
};

static bool is_member(int gpu, uint32_t pid)
{
    if (pid == (uint32_t)getpid())
        return true;
    const struct gate *gate = gpu < gate_count() ? gate_of(gpu) : NULL;
    if (!gate || !gate->report || !gate->ctl)
        return false;
    for (int i = 0; i < CGPU_SLOTS; i++) {
        uint32_t gen = load_relaxed(&gate->report->slot[i].gen);
        if (gen != 0 && gen == load_relaxed(&gate->ctl->slot_gen[i]) && load_relaxed(&gate->report->slot[i].pid) == pid)
            return true;
    }
    return false;
}

/* The whole real list, malloc()ed; *count entries. NULL with *result NVML_SUCCESS: empty. */
static char *whole_list(nvmlDevice_t device, const struct list *list, unsigned int *count, nvmlReturn_t *result)
{
    unsigned int room = ROOM;
    for (int i = 0; i < TRIES; i++) {
        char *entries = calloc(room, list->size);
        if (!entries) {
            *result = NVML_ERROR_MEMORY;
            return NULL;
        }
        *count = room;
        *result = list->real(device, count, entries, list->more);
        if (*result == NVML_SUCCESS)
            return entries;
        free(entries);
        if (*result != NVML_ERROR_INSUFFICIENT_SIZE)
            return NULL;
        room = *count + ROOM;
    }
    return NULL;
}

static nvmlReturn_t own_processes(nvmlDevice_t device, unsigned int *count, void *out, const struct list *list)
{
    nvmlReturn_t result;
    unsigned int all = 0, own = 0, room = count ? *count : 0;
    int gpu = hook_join(true) ? nvml_gpu(device) : -1;
    if (gpu < 0 || !count || (room && !out)) /* also what is wrong with the arguments is NVML's to say */
        return list->real(device, count, out, list->more);
    char *entries = whole_list(device, list, &all, &result);
    if (!entries)
        return result;
    for (unsigned int i = 0; i < all; i++) {
        uint32_t pid;
        memcpy(&pid, entries + i * list->size + list->pid, sizeof pid);
        if (is_member(gpu, pid)) {
            if (own < room)
                memcpy((char *)out + own * list->size, entries + i * list->size, list->size);
            own++;
        }
    }
    free(entries);
    *count = own;
    return own > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define PROCESS_LIST_AT(name, type, place) \
    static nvmlReturn_t all_##name(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long more); \
    NVML_WRAP(nvmlReturn_t, name, (nvmlDevice_t device, unsigned int *count, type *entries)) \
    { \
        return own_processes(device, count, entries, &(struct list){all_##name, sizeof(type), place, 0}); \
    } \
    static nvmlReturn_t all_##name(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long more) \
    { \
        (void)more; \
        return REAL(name)(device, count, entries); \
    }
#define PROCESS_LIST(name, type) PROCESS_LIST_AT(name, type, offsetof(type, pid))

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetEncoderSessions, nvmlEncoderSessionInfo_t)
PROCESS_LIST(nvmlDeviceGetFBCSessions, nvmlFBCSessionInfo_t)
PROCESS_LIST_AT(nvmlDeviceGetAccountingPids, unsigned int, 0)

/* ---- lists in a structure of their own, with a version: of one we don't know the layout of, the program falls back ---- */

#define DETAIL_V1 NVML_VERSION(nvmlProcessDetailList_t, 1)
#define UTILIZATION_V1 NVML_VERSION(nvmlProcessesUtilizationInfo_t, 1)

static nvmlReturn_t all_details(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long mode);
static nvmlReturn_t all_utilization(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long since);

static bool is_ours(nvmlDevice_t device)
{
    return hook_join(true) && nvml_gpu(device) >= 0;
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetRunningProcessDetailList, (nvmlDevice_t device, nvmlProcessDetailList_t *list))
{
    if (!list || !is_ours(device))
        return REAL(nvmlDeviceGetRunningProcessDetailList)(device, list);
    if (list->version != DETAIL_V1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return own_processes(device, &list->numProcArrayEntries, list->procArray,
                         &(struct list){all_details, sizeof *list->procArray, offsetof(nvmlProcessDetail_v1_t, pid), list->mode});
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetProcessesUtilizationInfo, (nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *list))
{
    if (!list || !is_ours(device))
        return REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, list);
    if (list->version != UTILIZATION_V1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return own_processes(device, &list->processSamplesCount, list->procUtilArray,
                         &(struct list){all_utilization, sizeof *list->procUtilArray,
                                        offsetof(nvmlProcessUtilizationInfo_v1_t, pid), list->lastSeenTimeStamp});
}

static nvmlReturn_t all_details(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long mode)
{
    nvmlProcessDetailList_t list = {DETAIL_V1, (unsigned int)mode, *count, entries};
    nvmlReturn_t result = REAL(nvmlDeviceGetRunningProcessDetailList)(device, &list);
    *count = list.numProcArrayEntries;
    return result;
}

static nvmlReturn_t all_utilization(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long since)
{
    nvmlProcessesUtilizationInfo_t list = {UTILIZATION_V1, *count, since, entries};
    nvmlReturn_t result = REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, &list);
    *count = list.processSamplesCount;
    return result;
}

/* ---- samples and accounts ---- */

static nvmlReturn_t all_samples(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long since);

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetProcessUtilization,
          (nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count, unsigned long long since))
{
    unsigned int room = samples && count ? *count : 0;
    if (!count || !is_ours(device))
        return REAL(nvmlDeviceGetProcessUtilization)(device, samples, count, since);
    nvmlReturn_t result =
        own_processes(device, &room, samples,
                      &(struct list){all_samples, sizeof *samples, offsetof(nvmlProcessUtilizationSample_t, pid), since});
    *count = room;
    return result == NVML_SUCCESS && room == 0 ? NVML_ERROR_NOT_FOUND : result; /* as the driver where there is none */
}

static nvmlReturn_t all_samples(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long since)
{
    return REAL(nvmlDeviceGetProcessUtilization)(device, entries, count, since);
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetAccountingStats, (nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats))
{
    int gpu = hook_join(true) ? nvml_gpu(device) : -1;
    if (gpu >= 0 && !is_member(gpu, pid))
        return NVML_ERROR_NOT_FOUND;
    return REAL(nvmlDeviceGetAccountingStats)(device, pid, stats);
}
