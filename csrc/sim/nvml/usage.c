/* usage.c: memory, processes and utilization, from the shared state. */
#include <stdlib.h>
#include <time.h>
#include "nvml/nvml_sim.h"

API nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory);
API nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory);
API nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory);

API nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory)
{
    TRY(nvml_device(device, memory));
    TRY(nvml_lock(device));
    uint64_t used = sim_used(device->map.state), total = device->map.state->total;
    nvml_unlock(device);
    *memory = (nvmlMemory_t){.total = total, .free = used < total ? total - used : 0, .used = used};
    return NVML_SUCCESS;
}

API nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    nvmlMemory_t plain;
    TRY(nvml_device(device, memory));
    if (memory->version != NVML_MEMORY_V2)
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(nvmlDeviceGetMemoryInfo(device, &plain));
    *memory =
        (nvmlMemory_v2_t){.version = NVML_MEMORY_V2, .total = plain.total, .free = plain.free, .used = plain.used};
    return NVML_SUCCESS;
}

API nvmlDeviceGetBAR1MemoryInfo(nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    TRY(nvml_device(device, memory));
    *memory = (nvmlBAR1Memory_t){.bar1Total = device->conf.bytes, .bar1Free = device->conf.bytes};
    return NVML_SUCCESS;
}

/* ---- processes ---- */

nvmlReturn_t nvml_processes(nvmlDevice_t device, struct nvml_process *list, unsigned int *count)
{
    TRY(nvml_lock(device));
    const struct sim_state *state = device->map.state;
    unsigned int n = 0;
    for (uint32_t i = 0; i < state->slots; i++) {
        int pid = sim_pid(&device->map, (int)i);
        if (pid > 0)
            list[n++] = (struct nvml_process){(unsigned)pid, state->proc[i].mem_used};
    }
    nvml_unlock(device);
    *count = n;
    return NVML_SUCCESS;
}

/* *count: room in, number out; too little room: how much it would take. */
static nvmlReturn_t running(nvmlDevice_t device, unsigned int *count, void *infos, bool v1)
{
    struct nvml_process list[SIM_PROCS];
    unsigned int n, room;
    TRY(nvml_device(device, count));
    TRY(nvml_processes(device, list, &n));
    room = *count;
    *count = n;
    if (n > room)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    if (n && !infos)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; i < n; i++) {
        if (v1)
            ((nvmlProcessInfo_v1_t *)infos)[i] = (nvmlProcessInfo_v1_t){list[i].pid, list[i].used};
        else
            ((nvmlProcessInfo_t *)infos)[i] = (nvmlProcessInfo_t){list[i].pid, list[i].used, ~0u, ~0u}; /* no MIG */
    }
    return NVML_SUCCESS;
}

static nvmlReturn_t nobody(nvmlDevice_t device, unsigned int *count)
{
    TRY(nvml_device(device, count));
    *count = 0;
    return NVML_SUCCESS;
}

#define COMPUTE(name, type, v1) \
    API name(nvmlDevice_t device, unsigned int *count, type *infos); \
    API name(nvmlDevice_t device, unsigned int *count, type *infos) { return running(device, count, infos, v1); }
#define NOBODY(name) \
    API name(nvmlDevice_t device, unsigned int *count, void *infos); \
    API name(nvmlDevice_t device, unsigned int *count, void *infos) { (void)infos; return nobody(device, count); }

COMPUTE(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t, true)
COMPUTE(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t, false)
COMPUTE(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t, false)
NOBODY(nvmlDeviceGetGraphicsRunningProcesses)
NOBODY(nvmlDeviceGetGraphicsRunningProcesses_v2)
NOBODY(nvmlDeviceGetGraphicsRunningProcesses_v3)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses_v2)
NOBODY(nvmlDeviceGetMPSComputeRunningProcesses_v3)

API nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list);

API nvmlDeviceGetRunningProcessDetailList(nvmlDevice_t device, nvmlProcessDetailList_t *list)
{
    struct nvml_process found[SIM_PROCS];
    unsigned int n = 0;
    TRY(nvml_device(device, list));
    if (list->version != NVML_VERSION(nvmlProcessDetailList_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    if (list->mode == NVML_PROCESS_MODE_COMPUTE)
        TRY(nvml_processes(device, found, &n));
    unsigned int room = list->numProcArrayEntries;
    list->numProcArrayEntries = n;
    if (n > room || (n && !list->procArray))
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++)
        list->procArray[i] = (nvmlProcessDetail_v1_t){found[i].pid, found[i].used, ~0u, ~0u, 0};
    return NVML_SUCCESS;
}

/* ---- utilization: share of the last second or so that the engine was busy ---- */

static uint64_t window_start(const struct sim_state *state, uint64_t *at)
{
    uint64_t have = state->sample_seq < SIM_SAMPLES ? state->sample_seq : SIM_SAMPLES;
    uint64_t back = have < 11 ? have : 11; /* 1 to 1.1 s */
    if (!back)
        return 0;
    *at = (state->sample_seq - back) % SIM_SAMPLES;
    return state->sample_ns[*at];
}

static unsigned int percent(uint64_t part, uint64_t whole)
{
    uint64_t value = whole ? (part * 100 + whole / 2) / whole : 0;
    return value > 100 ? 100 : (unsigned int)value;
}

API nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization);
API nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
                                    unsigned long long since);
API nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info);

API nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization)
{
    uint64_t at = 0, gpu = 0;
    TRY(nvml_device(device, utilization));
    TRY(nvml_lock(device));
    const struct sim_state *state = device->map.state;
    uint64_t start = window_start(state, &at);
    if (start)
        gpu = percent(state->busy_ns - state->sample_busy[at], state->now_ns - start);
    nvml_unlock(device);
    *utilization = (nvmlUtilization_t){.gpu = (unsigned int)gpu, .memory = (unsigned int)gpu / 2};
    return NVML_SUCCESS;
}

API nvmlDeviceGetDynamicPstatesInfo(nvmlDevice_t device, nvmlGpuDynamicPstatesInfo_t *info);

API nvmlDeviceGetDynamicPstatesInfo(nvmlDevice_t device, nvmlGpuDynamicPstatesInfo_t *info)
{
    nvmlUtilization_t now;
    TRY(nvml_device(device, info));
    TRY(nvmlDeviceGetUtilizationRates(device, &now));
    *info = (nvmlGpuDynamicPstatesInfo_t){.utilization = {{1, now.gpu, 0, 0}, {1, now.memory, 0, 0}}};
    return NVML_SUCCESS;
}

static nvmlReturn_t process_shares(nvmlDevice_t device, nvmlProcessUtilizationInfo_v1_t *list, unsigned int *count)
{
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    uint64_t at = 0, stamp = (uint64_t)t.tv_sec * 1000000u + (uint64_t)t.tv_nsec / 1000;
    unsigned int n = 0;
    TRY(nvml_lock(device));
    const struct sim_state *state = device->map.state;
    uint64_t start = window_start(state, &at);
    for (uint32_t i = 0; start && i < state->slots; i++) {
        int pid = sim_pid(&device->map, (int)i);
        uint64_t busy = state->proc[i].busy_ns - state->proc[i].samples[at];
        if (pid > 0 && busy)
            list[n++] = (nvmlProcessUtilizationInfo_v1_t){.timeStamp = stamp, .pid = (unsigned)pid,
                                                          .smUtil = percent(busy, state->now_ns - start)};
    }
    nvml_unlock(device);
    *count = n;
    return NVML_SUCCESS;
}

API nvmlDeviceGetProcessUtilization(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
                                    unsigned long long since)
{
    nvmlProcessUtilizationInfo_v1_t list[SIM_PROCS];
    unsigned int n;
    (void)since; /* one sample a process, always of now */
    TRY(nvml_device(device, count));
    TRY(process_shares(device, list, &n));
    unsigned int room = *count;
    *count = n;
    if (!n)
        return NVML_ERROR_NOT_FOUND;
    if (n > room || !samples)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++)
        samples[i] =
            (nvmlProcessUtilizationSample_t){.pid = list[i].pid, .timeStamp = list[i].timeStamp, .smUtil =
                                             list[i].smUtil};
    return NVML_SUCCESS;
}

API nvmlDeviceGetProcessesUtilizationInfo(nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *info)
{
    nvmlProcessUtilizationInfo_v1_t list[SIM_PROCS];
    unsigned int n;
    TRY(nvml_device(device, info));
    if (info->version != NVML_VERSION(nvmlProcessesUtilizationInfo_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    TRY(process_shares(device, list, &n));
    unsigned int room = info->processSamplesCount;
    info->processSamplesCount = n;
    if (n > room || (n && !info->procUtilArray))
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < n; i++)
        info->procUtilArray[i] = list[i];
    return NVML_SUCCESS;
}
