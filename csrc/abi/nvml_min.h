/* nvml_min.h: the part of NVML's ABI that this project needs. Types, constants and layouts only, no prototypes.
 * tests/sim/test_cuda_layout.py checks sizes against NVIDIA's header where one is installed. */
#ifndef CGPU_NVML_MIN_H
#define CGPU_NVML_MIN_H
#include <stddef.h>
#include <stdint.h>

/* ---- handles ---- */
typedef struct nvmlDevice_st *nvmlDevice_t;
typedef struct nvmlEventSet_st *nvmlEventSet_t;

/* ---- results ---- */
typedef enum {
    NVML_SUCCESS = 0,
    NVML_ERROR_UNINITIALIZED = 1,
    NVML_ERROR_INVALID_ARGUMENT = 2,
    NVML_ERROR_NOT_SUPPORTED = 3,
    NVML_ERROR_NO_PERMISSION = 4,
    NVML_ERROR_ALREADY_INITIALIZED = 5,
    NVML_ERROR_NOT_FOUND = 6,
    NVML_ERROR_INSUFFICIENT_SIZE = 7,
    NVML_ERROR_INSUFFICIENT_POWER = 8,
    NVML_ERROR_DRIVER_NOT_LOADED = 9,
    NVML_ERROR_TIMEOUT = 10,
    NVML_ERROR_IRQ_ISSUE = 11,
    NVML_ERROR_LIBRARY_NOT_FOUND = 12,
    NVML_ERROR_FUNCTION_NOT_FOUND = 13,
    NVML_ERROR_CORRUPTED_INFOROM = 14,
    NVML_ERROR_GPU_IS_LOST = 15,
    NVML_ERROR_RESET_REQUIRED = 16,
    NVML_ERROR_OPERATING_SYSTEM = 17,
    NVML_ERROR_LIB_RM_VERSION_MISMATCH = 18,
    NVML_ERROR_IN_USE = 19,
    NVML_ERROR_MEMORY = 20,
    NVML_ERROR_NO_DATA = 21,
    NVML_ERROR_VGPU_ECC_NOT_SUPPORTED = 22,
    NVML_ERROR_INSUFFICIENT_RESOURCES = 23,
    NVML_ERROR_FREQ_NOT_SUPPORTED = 24,
    NVML_ERROR_ARGUMENT_VERSION_MISMATCH = 25,
    NVML_ERROR_DEPRECATED = 26,
    NVML_ERROR_NOT_READY = 27,
    NVML_ERROR_GPU_NOT_FOUND = 28,
    NVML_ERROR_INVALID_STATE = 29,
    NVML_ERROR_RESET_TYPE_NOT_SUPPORTED = 30,
    NVML_ERROR_UNKNOWN = 999
} nvmlReturn_t;

/* ---- constants ---- */
#define NVML_VALUE_NOT_AVAILABLE_U64 (~0ull) /* a process's memory that the driver does not know */
#define NVML_VERSION(type, version) ((unsigned int)(sizeof(type) | (version) << 24))
#define NVML_BRAND_NVIDIA 14
#define NVML_DEVICE_ARCH_HOPPER 9
#define NVML_INIT_FLAG_NO_GPUS 1u
#define NVML_INIT_FLAG_NO_ATTACH 2u
#define NVML_UUID_TYPE_ASCII 1
#define NVML_UUID_TYPE_BINARY 2
typedef int nvmlClockId_t;
typedef int nvmlClockType_t;  /* 0 graphics, 1 SM, 2 memory, 3 video */
typedef int nvmlEnableState_t;
typedef int nvmlPstates_t;
typedef int nvmlTemperatureSensors_t;

/* ---- structures ---- */
typedef struct { unsigned long long bar1Total, bar1Free, bar1Used; } nvmlBAR1Memory_t;
typedef struct { unsigned long long total, free, used; } nvmlMemory_t;
typedef struct { unsigned int version; unsigned long long total, reserved, free, used; } nvmlMemory_v2_t;
#define NVML_MEMORY_V2 NVML_VERSION(nvmlMemory_v2_t, 2)

typedef struct {
    char busIdLegacy[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId;
    char busId[32];
} nvmlPciInfo_t; /* of nvmlDeviceGetPciInfo_v3 */
typedef struct {
    char busId[16];
    unsigned int domain, bus, device, pciDeviceId, pciSubSystemId, reserved[4];
} nvmlPciInfo_v2_t; /* of nvmlDeviceGetPciInfo_v2; the first variant's ends before `pciSubSystemId` */

typedef struct { unsigned int pid; unsigned long long usedGpuMemory; } nvmlProcessInfo_v1_t;
typedef struct { /* v2 and v3 functions alike */
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlProcessInfo_t;
typedef struct {
    unsigned int pid;
    unsigned long long usedGpuMemory;
    unsigned int gpuInstanceId, computeInstanceId;
    unsigned long long usedGpuCcProtectedMemory;
} nvmlProcessDetail_v1_t;
#define NVML_PROCESS_MODE_COMPUTE 0
typedef struct { unsigned int version, mode, numProcArrayEntries; nvmlProcessDetail_v1_t *procArray; }
    nvmlProcessDetailList_t;

typedef struct {
    unsigned int sessionId, pid, vgpuInstance;
    int codecType;
    unsigned int hResolution, vResolution, averageFps, averageLatency;
} nvmlEncoderSessionInfo_t;
typedef struct {
    unsigned int sessionId, pid, vgpuInstance, displayOrdinal;
    int sessionType;
    unsigned int sessionFlags, hMaxResolution, vMaxResolution, hResolution, vResolution, averageFPS, averageLatency;
} nvmlFBCSessionInfo_t;

typedef struct { unsigned int gpu, memory; } nvmlUtilization_t; /* percent */
typedef struct { unsigned int pid; unsigned long long timeStamp; unsigned int smUtil, memUtil, encUtil, decUtil; }
    nvmlProcessUtilizationSample_t; /* microseconds since the epoch, percent */
typedef struct {
    unsigned long long timeStamp;
    unsigned int pid, smUtil, memUtil, encUtil, decUtil, jpgUtil, ofaUtil;
} nvmlProcessUtilizationInfo_v1_t;
typedef struct {
    unsigned int version, processSamplesCount;
    unsigned long long lastSeenTimeStamp;
    nvmlProcessUtilizationInfo_v1_t *procUtilArray;
} nvmlProcessesUtilizationInfo_t;

#define NVML_GPU_UTILIZATION_SAMPLES 1
#define NVML_MEMORY_UTILIZATION_SAMPLES 2
#define NVML_VALUE_TYPE_UNSIGNED_INT 1
typedef struct {
    unsigned long long timeStamp;
    union { unsigned int ui; unsigned long long ull; double d; } value;
} nvmlSample_t;
typedef struct {
    unsigned int flags;
    struct { unsigned int present, percentage, incThreshold, decThreshold; } utilization[8]; /* 0 GPU, 1 memory, ... */
} nvmlGpuDynamicPstatesInfo_t;
typedef struct { unsigned int version, isSupportedDevice; } nvmlGpmSupport_t;
typedef struct nvmlGpmSample_st *nvmlGpmSample_t;

typedef struct {
    unsigned int gpuUtilization, memoryUtilization;
    unsigned long long maxMemoryUsage, time, startTime;
    unsigned int isRunning, reserved[5];
} nvmlAccountingStats_t;
typedef struct { unsigned int pid, isRunning; } nvmlAccountingStats_v2_t; /* its first part */

typedef struct {
    nvmlDevice_t device;
    unsigned long long eventType, eventData;
    unsigned int gpuInstanceId, computeInstanceId;
} nvmlEventData_t;

typedef struct { unsigned int version, type; union { char str[41]; unsigned char bytes[16]; } value; } nvmlUUID_t;

/* ---- the private table that nvidia-smi asks for. Word 0 is its size in bytes, the others are functions ----
 * From NVIDIA's own mock (k8s-test-infra, written for 580), from the tables of 535 and 550, and from what nvidia-smi of
 * those asks of the simulated one. */
static const unsigned char nvml_private_id[16] __attribute__((unused)) = {
    0xc4, 0xfe, 0x3e, 0x6c, 0xc9, 0x8f, 0x6c, 0x4e, 0xa3, 0x27, 0xee, 0x69, 0x6e, 0x12, 0xf7, 0xc4};
#define NVML_PRIVATE_HANDLE_BY_INDEX 81 /* (index, nvmlDevice_t *, flags) */
#define NVML_PRIVATE_HANDLE_FLAGS 0x22  /* as nvidia-smi has them */
#define NVML_PRIVATE_UTILIZATION 145    /* of processes: (device, since, ...) */
#define NVML_PRIVATE_PROCESSES 213      /* and the two after it: (device, count, nvmlPrivateProcess_t *) */
typedef struct { nvmlProcessDetail_v1_t numbers; char name[4096]; } nvmlPrivateProcess_t;
#endif
