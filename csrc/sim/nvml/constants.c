/* constants.c: what does not change here: temperature, power, clocks, modes; and events, which never come. */
#include <stdlib.h>
#include <time.h>
#include "nvml/nvml_sim.h"

#define CONSTANT(name, type, value) \
    API name(nvmlDevice_t device, type *out); \
    API name(nvmlDevice_t device, type *out) \
    { \
        TRY(nvml_device(device, out)); \
        *out = (value); \
        return NVML_SUCCESS; \
    }
#define CONSTANT_OF(name, argument, type, value) \
    API name(nvmlDevice_t device, argument what, type *out); \
    API name(nvmlDevice_t device, argument what, type *out) \
    { \
        (void)what; \
        TRY(nvml_device(device, out)); \
        *out = (value); \
        return NVML_SUCCESS; \
    }
#define CONSTANT_PAIR(name, type, first, second) \
    API name(nvmlDevice_t device, type *one, type *two); \
    API name(nvmlDevice_t device, type *one, type *two) \
    { \
        TRY(nvml_device(device, one ? two : NULL)); \
        *one = (first); \
        *two = (second); \
        return NVML_SUCCESS; \
    }

static unsigned int clock_mhz(nvmlClockType_t type)
{
    return type == 2 ? 2619 : 1980;
}

CONSTANT(nvmlDeviceGetBrand, int, NVML_BRAND_NVIDIA)
CONSTANT(nvmlDeviceGetArchitecture, unsigned int, NVML_DEVICE_ARCH_HOPPER)
CONSTANT(nvmlDeviceGetComputeMode, int, 0)
CONSTANT(nvmlDeviceGetPersistenceMode, nvmlEnableState_t, 1)
CONSTANT(nvmlDeviceGetDisplayMode, nvmlEnableState_t, 0)
CONSTANT(nvmlDeviceGetDisplayActive, nvmlEnableState_t, 0)
CONSTANT(nvmlDeviceGetAccountingMode, nvmlEnableState_t, 0)
CONSTANT(nvmlDeviceGetPowerManagementMode, nvmlEnableState_t, 1)
CONSTANT(nvmlDeviceGetPowerManagementLimit, unsigned int, 700000) /* mW */
CONSTANT(nvmlDeviceGetPowerManagementDefaultLimit, unsigned int, 700000)
CONSTANT(nvmlDeviceGetEnforcedPowerLimit, unsigned int, 700000)
CONSTANT(nvmlDeviceGetPowerUsage, unsigned int, 120000)
CONSTANT(nvmlDeviceGetTotalEnergyConsumption, unsigned long long, 0)
CONSTANT(nvmlDeviceGetFanSpeed, unsigned int, 30)
CONSTANT(nvmlDeviceGetNumFans, unsigned int, 1)
CONSTANT(nvmlDeviceGetPerformanceState, nvmlPstates_t, 0)
CONSTANT(nvmlDeviceGetPowerState, nvmlPstates_t, 0)
CONSTANT(nvmlDeviceGetMaxPcieLinkGeneration, unsigned int, 5)
CONSTANT(nvmlDeviceGetCurrPcieLinkGeneration, unsigned int, 5)
CONSTANT(nvmlDeviceGetMaxPcieLinkWidth, unsigned int, 16)
CONSTANT(nvmlDeviceGetCurrPcieLinkWidth, unsigned int, 16)
CONSTANT(nvmlDeviceGetMultiGpuBoard, unsigned int, 0)
CONSTANT(nvmlDeviceGetBoardId, unsigned int, 256 * (device->index + 1))
CONSTANT(nvmlDeviceGetNumGpuCores, unsigned int, 16896)
CONSTANT(nvmlDeviceGetMemoryBusWidth, unsigned int, 5120)
CONSTANT(nvmlDeviceGetCurrentClocksThrottleReasons, unsigned long long, 1) /* idle */
CONSTANT(nvmlDeviceGetCurrentClocksEventReasons, unsigned long long, 1)
CONSTANT(nvmlDeviceGetMaxMigDeviceCount, unsigned int, 0)
CONSTANT(nvmlDeviceIsMigDeviceHandle, unsigned int, 0)
CONSTANT(nvmlDeviceGetVirtualizationMode, int, 0)
CONSTANT(nvmlDeviceGetAccountingBufferSize, unsigned int, 4000)
CONSTANT_OF(nvmlDeviceGetTemperature, nvmlTemperatureSensors_t, unsigned int, 40)
CONSTANT_OF(nvmlDeviceGetTemperatureThreshold, int, unsigned int, 90)
CONSTANT_OF(nvmlDeviceGetFanSpeed_v2, unsigned int, unsigned int, 30)
CONSTANT_OF(nvmlDeviceGetClockInfo, nvmlClockType_t, unsigned int, clock_mhz(what))
CONSTANT_OF(nvmlDeviceGetMaxClockInfo, nvmlClockType_t, unsigned int, clock_mhz(what))
CONSTANT_OF(nvmlDeviceGetApplicationsClock, nvmlClockType_t, unsigned int, clock_mhz(what))
CONSTANT_PAIR(nvmlDeviceGetEccMode, nvmlEnableState_t, 1, 1)
CONSTANT_PAIR(nvmlDeviceGetMigMode, unsigned int, 0, 0)
CONSTANT_PAIR(nvmlDeviceGetPowerManagementLimitConstraints, unsigned int, 200000, 700000)
CONSTANT_PAIR(nvmlDeviceGetEncoderUtilization, unsigned int, 0, 100000)
CONSTANT_PAIR(nvmlDeviceGetDecoderUtilization, unsigned int, 0, 100000)

API nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id, unsigned int *clock);
API nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int error, int counter, unsigned long long *count);
API nvmlDeviceValidateInforom(nvmlDevice_t device);
API nvmlEventSetCreate(nvmlEventSet_t *set);
API nvmlEventSetFree(nvmlEventSet_t set);
API nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds);
API nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds);
API nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set);
API nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types);

API nvmlDeviceGetClock(nvmlDevice_t device, nvmlClockType_t type, nvmlClockId_t id, unsigned int *clock)
{
    (void)id;
    return nvmlDeviceGetClockInfo(device, type, clock);
}

API nvmlDeviceGetTotalEccErrors(nvmlDevice_t device, int error, int counter, unsigned long long *count)
{
    (void)error;
    (void)counter;
    TRY(nvml_device(device, count));
    *count = 0;
    return NVML_SUCCESS;
}

API nvmlDeviceValidateInforom(nvmlDevice_t device)
{
    return nvml_device(device, device);
}

struct nvmlEventSet_st { int nothing; };

API nvmlEventSetCreate(nvmlEventSet_t *set)
{
    if (!set)
        return NVML_ERROR_INVALID_ARGUMENT;
    *set = calloc(1, sizeof **set);
    return *set ? NVML_SUCCESS : NVML_ERROR_MEMORY;
}

API nvmlEventSetFree(nvmlEventSet_t set)
{
    free(set);
    return NVML_SUCCESS;
}

API nvmlEventSetWait_v2(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds)
{
    if (!set || !data)
        return NVML_ERROR_INVALID_ARGUMENT;
    struct timespec wait = {.tv_sec = milliseconds / 1000, .tv_nsec = (long)(milliseconds % 1000) * 1000000};
    nanosleep(&wait, NULL);
    return NVML_ERROR_TIMEOUT;
}

API nvmlEventSetWait(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int milliseconds)
{
    return nvmlEventSetWait_v2(set, data, milliseconds);
}

API nvmlDeviceGetSupportedEventTypes(nvmlDevice_t device, unsigned long long *types)
{
    TRY(nvml_device(device, types));
    *types = 0x8; /* critical Xid errors */
    return NVML_SUCCESS;
}

API nvmlDeviceRegisterEvents(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set)
{
    TRY(nvml_device(device, set));
    return types & ~0x8ull ? NVML_ERROR_NOT_SUPPORTED : NVML_SUCCESS;
}
