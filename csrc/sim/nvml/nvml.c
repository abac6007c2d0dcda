/* nvml.c: initialisation, and what identifies a GPU. */
#include <stdio.h>
#include <string.h>
#include "nvml/nvml_sim.h"

static pthread_mutex_t init_lock = PTHREAD_MUTEX_INITIALIZER;
static int init_count;
static struct nvmlDevice_st devices[SIM_GPUS];
static unsigned int device_count;

static const struct { nvmlReturn_t code; const char *text; } errors[] = {
    {NVML_SUCCESS, "Success"},
    {NVML_ERROR_UNINITIALIZED, "Uninitialized"},
    {NVML_ERROR_INVALID_ARGUMENT, "Invalid Argument"},
    {NVML_ERROR_NOT_SUPPORTED, "Not Supported"},
    {NVML_ERROR_NO_PERMISSION, "Insufficient Permissions"},
    {NVML_ERROR_ALREADY_INITIALIZED, "Already Initialized"},
    {NVML_ERROR_NOT_FOUND, "Not Found"},
    {NVML_ERROR_INSUFFICIENT_SIZE, "Insufficient Size"},
    {NVML_ERROR_INSUFFICIENT_POWER, "Insufficient External Power"},
    {NVML_ERROR_DRIVER_NOT_LOADED, "Driver Not Loaded"},
    {NVML_ERROR_TIMEOUT, "Timeout"},
    {NVML_ERROR_IRQ_ISSUE, "Interrupt Request Issue"},
    {NVML_ERROR_LIBRARY_NOT_FOUND, "NVML Shared Library Not Found"},
    {NVML_ERROR_FUNCTION_NOT_FOUND, "Function Not Found"},
    {NVML_ERROR_CORRUPTED_INFOROM, "Corrupted infoROM"},
    {NVML_ERROR_GPU_IS_LOST, "GPU is lost"},
    {NVML_ERROR_RESET_REQUIRED, "GPU requires reset"},
    {NVML_ERROR_OPERATING_SYSTEM, "GPU access blocked by the operating system"},
    {NVML_ERROR_LIB_RM_VERSION_MISMATCH, "Driver/library version mismatch"},
    {NVML_ERROR_IN_USE, "In use by another client"},
    {NVML_ERROR_MEMORY, "Insufficient Memory"},
    {NVML_ERROR_NO_DATA, "No data"},
    {NVML_ERROR_INSUFFICIENT_RESOURCES, "Insufficient Resources"},
    {NVML_ERROR_ARGUMENT_VERSION_MISMATCH, "Argument version mismatch"},
    {NVML_ERROR_DEPRECATED, "Deprecated"},
    {NVML_ERROR_NOT_READY, "Not Ready"},
    {NVML_ERROR_GPU_NOT_FOUND, "No GPUs found"},
};

__attribute__((visibility("default"))) const char *nvmlErrorString(nvmlReturn_t result);
API nvmlInit(void);
API nvmlInit_v2(void);
API nvmlInitWithFlags(unsigned int flags);
API nvmlShutdown(void);

__attribute__((visibility("default"))) const char *nvmlErrorString(nvmlReturn_t result)
{
    for (size_t i = 0; i < sizeof errors / sizeof *errors; i++)
        if (errors[i].code == result)
            return errors[i].text;
    return "Unknown Error";
}

API nvmlInitWithFlags(unsigned int flags)
{
    nvmlReturn_t result = NVML_SUCCESS;
    (void)flags;
    pthread_mutex_lock(&init_lock);
    if (init_count == 0 && device_count == 0) {
        struct sim_gpu conf[SIM_GPUS];
        int count = sim_conf(conf);
        for (int i = 0; i < count; i++)
            devices[i] =
                (struct nvmlDevice_st){.conf = conf[i], .index = (unsigned)i, .map = {.alive = -1, .slot = -1}};
        if (count > 0)
            device_count = (unsigned)count;
        else
            result = NVML_ERROR_DRIVER_NOT_LOADED;
    }
    if (result == NVML_SUCCESS)
        init_count++;
    pthread_mutex_unlock(&init_lock);
    return result;
}

API nvmlInit_v2(void)
{
    return nvmlInitWithFlags(0);
}

API nvmlInit(void)
{
    return nvmlInitWithFlags(0);
}

/* The GPUs stay as they were found: handles outlive this, and what was opened must not be closed. */
API nvmlShutdown(void)
{
    pthread_mutex_lock(&init_lock);
    nvmlReturn_t result = init_count ? NVML_SUCCESS : NVML_ERROR_UNINITIALIZED;
    if (init_count)
        init_count--;
    pthread_mutex_unlock(&init_lock);
    return result;
}

static nvmlReturn_t ready(const void *out)
{
    if (!load_acquire(&init_count))
        return NVML_ERROR_UNINITIALIZED;
    return out ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvml_device(nvmlDevice_t device, const void *out)
{
    TRY(ready(out));
    return device >= devices && device < devices + device_count ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

nvmlReturn_t nvml_lock(nvmlDevice_t device)
{
    int error = 0;
    pthread_mutex_lock(&init_lock);
    if (!device->map.state)
        error = sim_open(&device->conf, &device->map);
    pthread_mutex_unlock(&init_lock);
    if (error)
        return error == -1 || error == -13 ? NVML_ERROR_NO_PERMISSION : NVML_ERROR_UNKNOWN;
    sim_lock(&device->map);
    sim_advance(&device->map, now_ns());
    sim_reap(&device->map);
    return NVML_SUCCESS;
}

void nvml_unlock(nvmlDevice_t device)
{
    sim_unlock(&device->map);
}

static nvmlReturn_t put(char *out, unsigned int length, const char *text)
{
    if (strlen(text) >= length)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    strcpy(out, text);
    return NVML_SUCCESS;
}

/* ---- the system ---- */

API nvmlSystemGetDriverVersion(char *version, unsigned int length);
API nvmlSystemGetNVMLVersion(char *version, unsigned int length);
API nvmlSystemGetCudaDriverVersion(int *version);
API nvmlSystemGetCudaDriverVersion_v2(int *version);
API nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length);
API nvmlUnitGetCount(unsigned int *count);

API nvmlSystemGetDriverVersion(char *version, unsigned int length)
{
    TRY(ready(version));
    return put(version, length, DRIVER_VERSION);
}

API nvmlSystemGetNVMLVersion(char *version, unsigned int length)
{
    TRY(ready(version));
    return put(version, length, "13.580.00.00-sim");
}

API nvmlSystemGetCudaDriverVersion(int *version)
{
    if (!version) /* works without nvmlInit */
        return NVML_ERROR_INVALID_ARGUMENT;
    *version = CUDA_DRIVER_VERSION;
    return NVML_SUCCESS;
}

API nvmlSystemGetCudaDriverVersion_v2(int *version)
{
    return nvmlSystemGetCudaDriverVersion(version);
}

API nvmlSystemGetProcessName(unsigned int pid, char *name, unsigned int length)
{
    char path[64];
    TRY(ready(name));
    if (!length)
        return NVML_ERROR_INVALID_ARGUMENT;
    snprintf(path, sizeof path, "/proc/%u/cmdline", pid);
    FILE *file = fopen(path, "re");
    if (!file)
        return NVML_ERROR_NOT_FOUND;
    size_t n = fread(name, 1, length - 1, file); /* NUL-separated: the first word */
    fclose(file);
    name[n] = 0;
    return NVML_SUCCESS;
}

API nvmlUnitGetCount(unsigned int *count)
{
    TRY(ready(count));
    *count = 0;
    return NVML_SUCCESS;
}

/* ---- handles ---- */

API nvmlDeviceGetCount(unsigned int *count);
API nvmlDeviceGetCount_v2(unsigned int *count);
API nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device);
API nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device);
API nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device);
API nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device);
API nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device);
API nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *device);
API nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device);

API nvmlDeviceGetCount_v2(unsigned int *count)
{
    TRY(ready(count));
    *count = device_count;
    return NVML_SUCCESS;
}

API nvmlDeviceGetCount(unsigned int *count)
{
    return nvmlDeviceGetCount_v2(count);
}

API nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device)
{
    TRY(ready(device));
    if (index >= device_count)
        return NVML_ERROR_INVALID_ARGUMENT;
    *device = &devices[index];
    return NVML_SUCCESS;
}

API nvmlDeviceGetHandleByIndex(unsigned int index, nvmlDevice_t *device)
{
    return nvmlDeviceGetHandleByIndex_v2(index, device);
}

static nvmlReturn_t find(bool (*same)(const struct nvmlDevice_st *, const void *), const void *what,
                         nvmlDevice_t *device)
{
    TRY(ready(device));
    if (!what)
        return NVML_ERROR_INVALID_ARGUMENT;
    for (unsigned int i = 0; i < device_count; i++) {
        if (same(&devices[i], what)) {
            *device = &devices[i];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

static void serial_of(const struct nvmlDevice_st *device, char text[16])
{
    snprintf(text, 16, "1650000%06u", device->index);
}

static bool same_uuid(const struct nvmlDevice_st *device, const void *uuid)
{
    return strcmp(device->conf.uuid_text, uuid) == 0;
}

static bool same_uuid_bytes(const struct nvmlDevice_st *device, const void *uuid)
{
    return memcmp(device->conf.uuid, uuid, 16) == 0;
}

static bool same_serial(const struct nvmlDevice_st *device, const void *serial)
{
    char text[16];
    serial_of(device, text);
    return strcmp(text, serial) == 0;
}

static bool same_bus(const struct nvmlDevice_st *device, const void *id)
{
    char bus[8];
    snprintf(bus, sizeof bus, ":%02X:00", device->index + 1);
    return strstr(id, bus) != NULL;
}

API nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device)
{
    return find(same_uuid, uuid, device);
}

API nvmlDeviceGetHandleByUUIDV(const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
    if (uuid && uuid->version != NVML_VERSION(nvmlUUID_t, 1))
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    bool binary = uuid && uuid->type == NVML_UUID_TYPE_BINARY;
    return find(binary ? same_uuid_bytes : same_uuid, uuid ? (const void *)&uuid->value : NULL, device);
}

API nvmlDeviceGetHandleBySerial(const char *serial, nvmlDevice_t *device)
{
    return find(same_serial, serial, device);
}

API nvmlDeviceGetHandleByPciBusId_v2(const char *id, nvmlDevice_t *device)
{
    return find(same_bus, id, device);
}

API nvmlDeviceGetHandleByPciBusId(const char *id, nvmlDevice_t *device)
{
    return find(same_bus, id, device);
}

/* All GPUs are each other's nearest, and every CPU's. */
static nvmlReturn_t others(nvmlDevice_t device, unsigned int *count, nvmlDevice_t *out)
{
    unsigned int room = *count, n = 0;
    for (unsigned int i = 0; i < device_count; i++)
        if (&devices[i] != device) {
            if (out && n < room)
                out[n] = &devices[i];
            n++;
        }
    *count = out && n > room ? room : n;
    return NVML_SUCCESS;
}

API nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, int level, unsigned int *count, nvmlDevice_t *out);
API nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *out);

API nvmlDeviceGetTopologyNearestGpus(nvmlDevice_t device, int level, unsigned int *count, nvmlDevice_t *out)
{
    (void)level;
    TRY(nvml_device(device, count));
    return others(device, count, out);
}

API nvmlSystemGetTopologyGpuSet(unsigned int cpu, unsigned int *count, nvmlDevice_t *out)
{
    (void)cpu;
    TRY(ready(count));
    return others(NULL, count, out);
}

/* ---- identity ---- */

API nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length);
API nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length);
API nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length);
API nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length);
API nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index);
API nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor);
API nvmlDeviceGetPciInfo(nvmlDevice_t device, void *pci);
API nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *pci);
API nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci);
API nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor);

API nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int length)
{
    TRY(nvml_device(device, name));
    return put(name, length, device->conf.name);
}

API nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int length)
{
    TRY(nvml_device(device, uuid));
    return put(uuid, length, device->conf.uuid_text);
}

API nvmlDeviceGetSerial(nvmlDevice_t device, char *serial, unsigned int length)
{
    char text[16];
    TRY(nvml_device(device, serial));
    serial_of(device, text);
    return put(serial, length, text);
}

API nvmlDeviceGetVbiosVersion(nvmlDevice_t device, char *version, unsigned int length)
{
    TRY(nvml_device(device, version));
    return put(version, length, "96.00.00.00.01");
}

API nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index)
{
    TRY(nvml_device(device, index));
    *index = device->index;
    return NVML_SUCCESS;
}

API nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor)
{
    return nvmlDeviceGetIndex(device, minor);
}

API nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci)
{
    TRY(nvml_device(device, pci));
    *pci = (nvmlPciInfo_t){.bus = device->index + 1, .pciDeviceId = 0x233010de, .pciSubSystemId = 0x16c110de};
    snprintf(pci->busId, sizeof pci->busId, "00000000:%02X:00.0", device->index + 1);
    snprintf(pci->busIdLegacy, sizeof pci->busIdLegacy, "0000:%02X:00.0", device->index + 1);
    return NVML_SUCCESS;
}

API nvmlDeviceGetPciInfo_v2(nvmlDevice_t device, nvmlPciInfo_v2_t *pci)
{
    TRY(nvml_device(device, pci));
    *pci = (nvmlPciInfo_v2_t){.bus = device->index + 1, .pciDeviceId = 0x233010de, .pciSubSystemId = 0x16c110de};
    snprintf(pci->busId, sizeof pci->busId, "0000:%02X:00.0", device->index + 1);
    return NVML_SUCCESS;
}

API nvmlDeviceGetPciInfo(nvmlDevice_t device, void *pci)
{
    nvmlPciInfo_v2_t whole;
    TRY(nvml_device(device, pci));
    TRY(nvmlDeviceGetPciInfo_v2(device, &whole));
    memcpy(pci, &whole, offsetof(nvmlPciInfo_v2_t, pciSubSystemId));
    return NVML_SUCCESS;
}

API nvmlDeviceGetCudaComputeCapability(nvmlDevice_t device, int *major, int *minor)
{
    TRY(nvml_device(device, major ? minor : NULL));
    *major = 9;
    *minor = 0;
    return NVML_SUCCESS;
}
