/* odd_nvml.c: an NVML that does what the simulated one never does.
 *   ODD_PIDS   "PID:BYTES,..." is what its compute list has, as the host counts: not translated for a container
 *   ODD_WORDS  its private table has so many words; ODD_HOLE: this one is NULL */
#include <stdlib.h>
#include <string.h>
#include "nvml_min.h"

static struct nvmlDevice_st { int nothing; } gpu;

nvmlReturn_t nvmlInit_v2(void) { return NVML_SUCCESS; }
nvmlReturn_t nvmlInitWithFlags(unsigned int flags) { (void)flags; return NVML_SUCCESS; }
const char *nvmlErrorString(nvmlReturn_t error) { (void)error; return "odd"; }
nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) { *count = 1; return NVML_SUCCESS; }

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    (void)device;
    if (strlen(getenv("ODD_UUID")) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(uuid, getenv("ODD_UUID"));
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    if (strcmp(uuid, getenv("ODD_UUID")) != 0)
        return NVML_ERROR_NOT_FOUND;
    *device = &gpu;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    if (index)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &gpu;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *out)
{
    unsigned int room = *count;
    (void)device;
    *count = 0;
    for (char *at = getenv("ODD_PIDS"); at && *at; at += *at == ',') {
        unsigned int pid = (unsigned int)strtoul(at, &at, 10);
        unsigned long long bytes = strtoull(at + 1, &at, 10);
        if (*count < room)
            out[*count] = (nvmlProcessInfo_t){pid, bytes, ~0u, ~0u};
        ++*count;
    }
    return *count > room ? NVML_ERROR_INSUFFICIENT_SIZE : NVML_SUCCESS;
}

static nvmlReturn_t slot(void) { return NVML_ERROR_UNKNOWN; }

nvmlReturn_t nvmlInternalGetExportTable(const void **table, const void *id)
{
    static const void *words[1024];
    size_t count = strtoul(getenv("ODD_WORDS"), NULL, 10);
    (void)id;
    for (size_t i = 1; i < count; i++)
        words[i] = (const void *)slot;
    words[0] = (const void *)(count * sizeof *words);
    words[strtoul(getenv("ODD_HOLE"), NULL, 10)] = getenv("ODD_HOLE")[0] == '0' ? words[0] : NULL;
    *table = words;
    return NVML_SUCCESS;
}
