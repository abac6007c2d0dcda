/* nvml_process.c: NVML's process lists, narrowed to the instance's own processes.
 *
 * NVML counts processes as its caller's PID namespace does. The instance's are known by the pids in its live slots, each as
 * the process counts itself: the same for bare processes, and for a container that shares one PID namespace. Own pids of a
 * process in a namespace of its own match nothing foreign by accident only if the driver translates; an entry that matches no
 * slot is left out. While no daemon answers there are no slots, and a process sees itself alone. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client.h"
#include "nvml.h"

#define ROOM 64         /* entries more than the list had a moment ago */
#define TRIES 8

/* One process list function, whichever its entries' type: their size, `pid` first. */
typedef nvmlReturn_t (*list_function)(nvmlDevice_t device, unsigned int *count, void *entries);

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
static char *whole_list(nvmlDevice_t device, list_function real, size_t size, unsigned int *count, nvmlReturn_t *result)
{
    unsigned int room = ROOM;
    for (int i = 0; i < TRIES; i++) {
        char *entries = calloc(room, size);
        if (!entries) {
            *result = NVML_ERROR_MEMORY;
            return NULL;
        }
        *count = room;
        *result = real(device, count, entries);
        if (*result == NVML_SUCCESS)
            return entries;
        free(entries);
        if (*result != NVML_ERROR_INSUFFICIENT_SIZE)
            return NULL;
        room = *count + ROOM;
    }
    return NULL;
}

static nvmlReturn_t own_processes(nvmlDevice_t device, unsigned int *count, void *out, list_function real, size_t size)
{
    nvmlReturn_t result;
    unsigned int all = 0, own = 0, room = count ? *count : 0;
    int gpu = hook_join(true) ? nvml_gpu(device) : -1;
    if (gpu < 0 || !count || (room && !out)) /* also what is wrong with the arguments is NVML's to say */
        return real(device, count, out);
    char *entries = whole_list(device, real, size, &all, &result);
    if (!entries)
        return result;
    for (unsigned int i = 0; i < all; i++) {
        uint32_t pid;
        memcpy(&pid, entries + i * size, sizeof pid);
        if (is_member(gpu, pid)) {
            if (own < room)
                memcpy((char *)out + own * size, entries + i * size, size);
            own++;
        }
    }
    free(entries);
    *count = own;
    return own > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

#define PROCESS_LIST(name, type) \
    NVML_WRAP(nvmlReturn_t, name, (nvmlDevice_t device, unsigned int *count, type *entries)) \
    { \
        return own_processes(device, count, entries, (list_function)(void *)REAL(name), sizeof(type)); \
    }

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)
