/* nvml_process.c: whatever NVML says of single processes, narrowed to the instance's own: who runs, what they use of
 * the device, their encoder and capture sessions, their accounts. (What nvidia-smi lists: nvml_private.c.)
 *
 * The instance's processes are known by the pids in its live slots, each as the process counts itself: the same for
 * bare processes, and for a container that shares one PID namespace. An entry of the driver's list is one of them or is
 * left out. In a container the driver may or may not count as the container does, and by accident a host's pid can be
 * one of the container's. One that does count so lists nobody else there: of a list with a foreign pid nothing is
 * believed, and who uses the device by the ledger is listed with what it was charged. While no daemon answers there are
 * no slots: on the host a process sees itself alone. */
#include <stddef.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "client.h"
#include "nvml.h"

#define ROOM 64         /* entries more than the list had a moment ago */
#define TRIES 8
#define HOST_NAMESPACE "pid:[4026531836]" /* the kernel's first PID namespace, of any boot */

/* One function that lists processes, whichever its entries' type. `more`: what else it takes. */
typedef nvmlReturn_t (*list_function)(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long more);

struct list {
    list_function real;
    size_t size, pid, memory; /* of an entry; of the pid and of the memory in it (0: none) */
    bool compute;             /* all that use the device by CUDA are in it */
    unsigned long long more;
};

struct member {
    uint32_t pid;
    bool uses, listed;        /* the device; by the driver */
    uint64_t memory;          /* charged */
};

struct members {
    int count;
    struct member member[CGPU_SLOTS + 1];
};

/* Whether the driver counts processes in another way than this one does, or may: the daemon knows; without it a process in the
 * kernel's first PID namespace does. */
static bool counts_otherwise(void)
{
    char text[sizeof HOST_NAMESPACE];
    if (gate_count() > 0)
        return !(load_relaxed(&gate_of(0)->told) & CGPU_GPU_PIDS);
    ssize_t length = readlink("/proc/self/ns/pid", text, sizeof text);
    return length > 0 && (length != sizeof text - 1 || memcmp(text, HOST_NAMESPACE, sizeof text - 1) != 0);
}

static struct member *find_member(struct members *members, uint32_t pid)
{
    for (int i = 0; i < members->count; i++)
        if (members->member[i].pid == pid)
            return &members->member[i];
    return NULL;
}

static void add_member(struct members *members, struct member member)
{
    if (!find_member(members, member.pid))
        members->member[members->count++] = member;
}

/* What the audit found beside the ledger (contexts, modules) is known of the whole instance: where one process alone uses the
 * device, it is that one's. */
static void find_members(int gpu, bool otherwise, struct members *members)
{
    const struct gate *gate = gpu < gate_count() ? gate_of(gpu) : NULL;
    struct member *user = NULL;
    int users = 0;
    members->count = 0;
    for (int i = 0; gate && gate->report && gate->ctl && i < CGPU_SLOTS; i++) {
        const struct cgpu_slot *slot = &gate->report->slot[i];
        uint32_t gen = load_relaxed(&slot->gen);
        uint64_t memory = load_relaxed(&slot->mem_used);
        if (gen != 0 && gen == load_relaxed(&gate->ctl->slot_gen[i]))
            add_member(members, (struct member){.pid = load_relaxed(&slot->pid), .memory = memory,
                                                .uses = memory || load_relaxed(&slot->launches)});
    }
    for (int i = 0; i < members->count; i++)
        if (members->member[i].uses) {
            user = &members->member[i];
            users++;
        }
    if (users == 1)
        user->memory += load_relaxed(&gate->ctl->mem_other);
    if (!otherwise)
        add_member(members, (struct member){.pid = (uint32_t)getpid(), .memory = NVML_VALUE_NOT_AVAILABLE_U64});
}

/* The whole real list, malloc()ed; *count entries. NULL: *result says why. */
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

/* What the driver does not know of a member's memory, the ledger does. */
static void correct(char *entry, const struct list *list, const struct member *member)
{
    unsigned long long memory;
    if (!list->memory)
        return;
    memcpy(&memory, entry + list->memory, sizeof memory);
    if (memory == NVML_VALUE_NOT_AVAILABLE_U64)
        memcpy(entry + list->memory, &member->memory, sizeof memory);
}

static struct member *member_of(struct members *members, const char *entry, const struct list *list)
{
    uint32_t pid;
    memcpy(&pid, entry + list->pid, sizeof pid);
    return find_member(members, pid);
}

static bool has_foreigner(struct members *members, const char *entries, unsigned int count, const struct list *list)
{
    for (unsigned int i = 0; i < count; i++)
        if (!member_of(members, entries + i * list->size, list))
            return true;
    return false;
}

/* An entry of a compute list that the driver does not have. All their types begin alike. */
static void invent(char *entry, const struct list *list, const struct member *member)
{
    nvmlProcessDetail_v1_t detail = {member->pid, member->memory, ~0u, ~0u, 0}; /* no MIG */
    memcpy(entry, &detail, list->size);
}
_Static_assert(offsetof(nvmlProcessInfo_t, computeInstanceId) == offsetof(nvmlProcessDetail_v1_t, computeInstanceId) &&
               offsetof(nvmlProcessInfo_v1_t, usedGpuMemory) == offsetof(nvmlProcessDetail_v1_t, usedGpuMemory),
               "begin alike");

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
    struct members members;
    bool otherwise = counts_otherwise();
    find_members(gpu, otherwise, &members);
    if (otherwise && has_foreigner(&members, entries, all, list))
        all = 0;
    for (unsigned int i = 0; i < all; i++) {
        char *entry = entries + i * list->size;
        struct member *member = member_of(&members, entry, list);
        if (!member)
            continue;
        member->listed = true;
        correct(entry, list, member);
        if (own < room)
            memcpy((char *)out + own * list->size, entry, list->size);
        own++;
    }
    free(entries);
    for (int i = 0; otherwise && list->compute && i < members.count; i++) {
        const struct member *member = &members.member[i];
        if (member->listed || !member->uses)
            continue;
        if (own < room)
            invent((char *)out + own * list->size, list, member);
        own++;
    }
    *count = own;
    return own > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static bool is_member(int gpu, uint32_t pid)
{
    struct members members;
    find_members(gpu, counts_otherwise(), &members);
    return find_member(&members, pid) != NULL;
}

#define LIST_WRAP(name, type, ...) \
    static nvmlReturn_t all_##name(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long more); \
    NVML_WRAP(nvmlReturn_t, name, (nvmlDevice_t device, unsigned int *count, type *entries)) \
    { \
        return own_processes(device, count, entries, \
                             &(struct list){.real = all_##name, .size = sizeof(type), __VA_ARGS__}); \
    } \
    static nvmlReturn_t all_##name(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long more) \
    { \
        (void)more; \
        return REAL(name)(device, count, entries); \
    }
#define SESSION_LIST(name, type) LIST_WRAP(name, type, .pid = offsetof(type, pid))
#define PROCESS_LIST(name, type, all) \
    LIST_WRAP(name, type, .pid = offsetof(type, pid), .memory = offsetof(type, usedGpuMemory), .compute = all)

PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, true)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t, true)
PROCESS_LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, true)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t, false)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t, false)
PROCESS_LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t, false)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t, false)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t, false)
PROCESS_LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t, false)
SESSION_LIST(nvmlDeviceGetEncoderSessions, nvmlEncoderSessionInfo_t)
SESSION_LIST(nvmlDeviceGetFBCSessions, nvmlFBCSessionInfo_t)
LIST_WRAP(nvmlDeviceGetAccountingPids, unsigned int, .pid = 0)

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
                         &(struct list){.real = all_details, .size = sizeof *list->procArray,
                                        .pid = offsetof(nvmlProcessDetail_v1_t, pid),
                                        .memory = offsetof(nvmlProcessDetail_v1_t, usedGpuMemory),
                                        .compute = list->mode == NVML_PROCESS_MODE_COMPUTE, .more = list->mode});
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetProcessesUtilizationInfo,
          (nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *list))
{
    if (!list || !is_ours(device))
        return REAL(nvmlDeviceGetProcessesUtilizationInfo)(device, list);
    if (list->version != UTILIZATION_V1)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    return own_processes(device, &list->processSamplesCount, list->procUtilArray,
                         &(struct list){.real = all_utilization, .size = sizeof *list->procUtilArray,
                                        .pid = offsetof(nvmlProcessUtilizationInfo_v1_t, pid),
                                        .more = list->lastSeenTimeStamp});
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
                      &(struct list){.real = all_samples, .size = sizeof *samples,
                                     .pid = offsetof(nvmlProcessUtilizationSample_t, pid), .more = since});
    *count = room;
    return result == NVML_SUCCESS && room == 0 ? NVML_ERROR_NOT_FOUND : result; /* as the driver where there is none */
}

static nvmlReturn_t all_samples(nvmlDevice_t device, unsigned int *count, void *entries, unsigned long long since)
{
    return REAL(nvmlDeviceGetProcessUtilization)(device, entries, count, since);
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetAccountingStats,
          (nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats))
{
    int gpu = hook_join(true) ? nvml_gpu(device) : -1;
    if (gpu >= 0 && !is_member(gpu, pid))
        return NVML_ERROR_NOT_FOUND;
    return REAL(nvmlDeviceGetAccountingStats)(device, pid, stats);
}

NVML_WRAP(nvmlReturn_t, nvmlDeviceGetAccountingStats_v2, (nvmlDevice_t device, nvmlAccountingStats_v2_t *stats))
{
    int gpu = stats && hook_join(true) ? nvml_gpu(device) : -1;
    if (gpu >= 0 && !is_member(gpu, stats->pid))
        return NVML_ERROR_NOT_FOUND;
    return REAL(nvmlDeviceGetAccountingStats_v2)(device, stats);
}
