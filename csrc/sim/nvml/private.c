/* private.c: the one private table that nvidia-smi asks for, as far as it is known: from NVIDIA's own mock of NVML
 * (k8s-test-infra, Apache-2.0; seen with 580) and from what nvidia-smi 535 and 550 do. Slot 81 gives a handle by
 * index, 213 to 215 list a GPU's processes. Every other slot answers that it is not supported. */
#include <stdio.h>
#include <string.h>
#include "nvml/nvml_sim.h"

#define WORDS 251 /* as in 550; 535 has 245 */

API nvmlInternalGetExportTable(const void **table, const void *id);
API nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device);
API nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length);

static nvmlReturn_t not_known(void)
{
    return NVML_ERROR_NOT_SUPPORTED;
}

static nvmlReturn_t handle_by_index(unsigned int index, nvmlDevice_t *device, unsigned long long flags)
{
    (void)flags;
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

/* *count: room in, number out. */
static nvmlReturn_t compute(nvmlDevice_t device, unsigned int *count, nvmlPrivateProcess_t *out)
{
    struct nvml_process list[SIM_PROCS];
    unsigned int n;
    TRY(nvml_device(device, count));
    TRY(nvml_processes(device, list, &n));
    if (n > *count)
        n = *count;
    if (n && !out)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; i < n; i++) {
        out[i].numbers = (nvmlProcessDetail_v1_t){list[i].pid, list[i].used, ~0u, ~0u, 0};
        if (nvmlSystemGetProcessName(list[i].pid, out[i].name, sizeof out[i].name) != NVML_SUCCESS)
            strcpy(out[i].name, "-");
    }
    *count = n;
    return NVML_SUCCESS;
}

static nvmlReturn_t nobody(nvmlDevice_t device, unsigned int *count, nvmlPrivateProcess_t *out)
{
    (void)out;
    TRY(nvml_device(device, count));
    *count = 0;
    return NVML_SUCCESS;
}

static const void *words[WORDS];

__attribute__((constructor)) static void fill(void)
{
    words[0] = (const void *)sizeof words;
    for (int i = 1; i < WORDS; i++)
        words[i] = (const void *)not_known;
    words[NVML_PRIVATE_HANDLE_BY_INDEX] = (const void *)handle_by_index;
    words[NVML_PRIVATE_PROCESSES] = (const void *)compute;
    words[NVML_PRIVATE_PROCESSES + 1] = (const void *)nobody;
    words[NVML_PRIVATE_PROCESSES + 2] = (const void *)nobody;
}

API nvmlInternalGetExportTable(const void **table, const void *id)
{
    if (!table || !id || memcmp(id, nvml_private_id, sizeof nvml_private_id) != 0)
        return NVML_ERROR_INVALID_ARGUMENT; /* the real one's answer to a table that it does not have */
    *table = words;
    return NVML_SUCCESS;
}
