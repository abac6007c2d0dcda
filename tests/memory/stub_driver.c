/* stub_driver.c: just enough of libcuda and NVML to be called through the wrappers. See stub.h. */
#include "stub.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define CARDS 8
#define CONTEXTS 8
#define NAMES 128

static uint8_t uuids[CARDS][16];
static int cards;
static uint64_t card_total, card_free, next_address = 0x7f0000000000ull, next_low = 0x10000;
static __thread int now_device = -1, now_context;
static int primary_users[CARDS];
static char seen[4096], contexts[CARDS][CONTEXTS];
static unsigned int process_count;
static uint32_t process_pids[256];

static struct record { const char *name; int calls, fail; } records[NAMES];

static struct record *record_of(const char *name)
{
    for (int i = 0; i < NAMES; i++) {
        if (!records[i].name)
            records[i].name = name;
        if (!strcmp(records[i].name, name))
            return &records[i];
    }
    abort();
}

void stub_fail(const char *name, int result) { record_of(strdup(name))->fail = result; }
int stub_calls(const char *name) { return record_of(strdup(name))->calls; }

static int enter(const char *name)
{
    struct record *record = record_of(name);
    int fail = record->fail;
    record->calls++;
    record->fail = 0;
    return fail;
}

void stub_cards(int count, const uint8_t (*ids)[16], uint64_t total, uint64_t free)
{
    cards = count;
    memcpy(uuids, ids, (size_t)count * 16);
    card_total = total;
    card_free = free;
}
void stub_current(int device, int n) { now_device = device; now_context = n; }
void *stub_context(int device, int n) { return &contexts[device][n]; }
const char *stub_seen_visible(void) { return seen; }
void stub_processes(int count, const uint32_t *pids)
{
    process_count = (unsigned int)count;
    memcpy(process_pids, pids, (size_t)count * sizeof *pids);
}

#define CU(name, ...) static CUresult stub_##name(__VA_ARGS__)
#define FAIL(name) do { int f_ = enter(#name); if (f_) return (CUresult)f_; } while (0)

CU(cuInit, unsigned int flags)
{
    const char *value = getenv("CUDA_VISIBLE_DEVICES");
    (void)flags;
    FAIL(cuInit);
    snprintf(seen, sizeof seen, "%s", value ? value : "(unset)");
    return CUDA_SUCCESS;
}
CU(cuDeviceGetUuid, CUuuid *uuid, CUdevice device)
{
    FAIL(cuDeviceGetUuid);
    if (device < 0 || device >= cards)
        return CUDA_ERROR_INVALID_DEVICE;
    memcpy(uuid->bytes, uuids[device], 16);
    return CUDA_SUCCESS;
}

/* ---- contexts ---- */
CU(cuCtxGetCurrent, CUcontext *context)
{
    *context = now_device < 0 ? NULL : (CUcontext)(void *)&contexts[now_device][now_context];
    return CUDA_SUCCESS;
}
CU(cuCtxGetDevice, CUdevice *device)
{
    *device = now_device;
    return now_device < 0 ? CUDA_ERROR_INVALID_CONTEXT : CUDA_SUCCESS;
}
static __thread int pushed_device, pushed_context;
CU(cuCtxPushCurrent_v2, CUcontext context)
{
    long at = (char *)context - contexts[0];
    pushed_device = now_device;
    pushed_context = now_context;
    now_device = (int)(at / CONTEXTS);
    now_context = (int)(at % CONTEXTS);
    return CUDA_SUCCESS;
}
CU(cuCtxPopCurrent_v2, CUcontext *context)
{
    *context = NULL;
    now_device = pushed_device;
    now_context = pushed_context;
    return CUDA_SUCCESS;
}
/* a stream of a context is its address */
CU(cuStreamGetCtx, CUstream stream, CUcontext *context) { *context = (CUcontext)(void *)stream; return CUDA_SUCCESS; }
CU(cuCtxDestroy_v2, CUcontext context) { (void)context; FAIL(cuCtxDestroy_v2); return CUDA_SUCCESS; }
CU(cuCtxDestroy, CUcontext context) { (void)context; FAIL(cuCtxDestroy); return CUDA_SUCCESS; }
CU(cuCtxDetach, CUcontext context) { (void)context; FAIL(cuCtxDetach); return CUDA_SUCCESS; }
CU(cuCtxAttach, CUcontext *context, unsigned int flags) { (void)context; (void)flags; FAIL(cuCtxAttach); return CUDA_SUCCESS; }
CU(cuDevicePrimaryCtxGetState, CUdevice device, unsigned int *flags, int *active)
{
    *flags = 0;
    *active = primary_users[device] > 0;
    return CUDA_SUCCESS;
}
CU(cuDevicePrimaryCtxRetain, CUcontext *context, CUdevice device)
{
    primary_users[device]++;
    *context = (CUcontext)(void *)&contexts[device][0];
    return CUDA_SUCCESS;
}
CU(cuDevicePrimaryCtxRelease_v2, CUdevice device)
{
    FAIL(cuDevicePrimaryCtxRelease_v2);
    if (primary_users[device] == 0)
        return CUDA_ERROR_INVALID_CONTEXT;
    primary_users[device]--;
    return CUDA_SUCCESS;
}
CU(cuDevicePrimaryCtxRelease, CUdevice device) { return stub_cuDevicePrimaryCtxRelease_v2(device); }
CU(cuDevicePrimaryCtxReset_v2, CUdevice device) { (void)device; FAIL(cuDevicePrimaryCtxReset_v2); return CUDA_SUCCESS; }
CU(cuDevicePrimaryCtxReset, CUdevice device) { return stub_cuDevicePrimaryCtxReset_v2(device); }

/* a green context of device d is contexts[d][GREEN], a user of the primary one */
#define GREEN 5
CU(cuGreenCtxCreate, CUgreenCtx *green, void *resources, CUdevice device, unsigned int flags)
{
    (void)resources; (void)flags;
    FAIL(cuGreenCtxCreate);
    primary_users[device]++;
    *green = (CUgreenCtx)(void *)&contexts[device][GREEN];
    return CUDA_SUCCESS;
}
CU(cuCtxFromGreenCtx, CUcontext *context, CUgreenCtx green) { *context = (CUcontext)(void *)green; return CUDA_SUCCESS; }
CU(cuGreenCtxDestroy, CUgreenCtx green)
{
    FAIL(cuGreenCtxDestroy);
    primary_users[((char *)green - contexts[0]) / CONTEXTS]--;
    return CUDA_SUCCESS;
}

/* ---- allocating: each gives the next address ---- */
static CUdeviceptr take_address(void) { return __atomic_add_fetch(&next_address, 0x200000, __ATOMIC_RELAXED); }
static CUdeviceptr_v1 take_low(void) { return (CUdeviceptr_v1)__atomic_add_fetch(&next_low, 0x10000, __ATOMIC_RELAXED); }
CU(cuMemAlloc_v2, CUdeviceptr *ptr, size_t n) { (void)n; FAIL(cuMemAlloc_v2); *ptr = take_address(); return CUDA_SUCCESS; }
CU(cuMemAlloc, CUdeviceptr_v1 *ptr, unsigned int n) { (void)n; FAIL(cuMemAlloc); *ptr = take_low(); return CUDA_SUCCESS; }
CU(cuMemAllocManaged, CUdeviceptr *ptr, size_t n, unsigned int flags)
{
    (void)n; (void)flags;
    FAIL(cuMemAllocManaged);
    *ptr = take_address();
    return CUDA_SUCCESS;
}
static size_t pitch_granule = 512;
void stub_pitch(size_t granule) { pitch_granule = granule; }
CU(cuMemAllocPitch_v2, CUdeviceptr *ptr, size_t *pitch, size_t width, size_t height, unsigned int element)
{
    (void)height; (void)element;
    FAIL(cuMemAllocPitch_v2);
    if (!ptr || !pitch)
        return CUDA_ERROR_INVALID_VALUE;
    *ptr = take_address();
    *pitch = (width + pitch_granule - 1) / pitch_granule * pitch_granule;
    return CUDA_SUCCESS;
}
CU(cuMemAllocPitch, CUdeviceptr_v1 *ptr, unsigned int *pitch, unsigned int width, unsigned int height, unsigned int element)
{
    (void)height; (void)element;
    FAIL(cuMemAllocPitch);
    *ptr = take_low();
    *pitch = (unsigned int)((width + pitch_granule - 1) / pitch_granule * pitch_granule);
    return CUDA_SUCCESS;
}
CU(cuMemAllocAsync, CUdeviceptr *ptr, size_t n, CUstream stream)
{
    (void)n; (void)stream;
    FAIL(cuMemAllocAsync);
    *ptr = take_address();
    return CUDA_SUCCESS;
}
CU(cuMemAllocAsync_ptsz, CUdeviceptr *ptr, size_t n, CUstream stream) { return stub_cuMemAllocAsync(ptr, n, stream); }
CU(cuMemAllocFromPoolAsync, CUdeviceptr *ptr, size_t n, CUmemoryPool pool, CUstream stream)
{
    (void)pool;
    return stub_cuMemAllocAsync(ptr, n, stream);
}
CU(cuMemPoolCreate, CUmemoryPool *pool, const CUmemPoolProps *props)
{
    (void)props;
    *pool = (CUmemoryPool)(uintptr_t)take_address();
    return CUDA_SUCCESS;
}
CU(cuMemPoolDestroy, CUmemoryPool pool) { (void)pool; FAIL(cuMemPoolDestroy); return CUDA_SUCCESS; }
CU(cuMemPoolImportFromShareableHandle, CUmemoryPool *pool, void *handle, CUmemAllocationHandleType type, unsigned long long flags)
{
    (void)handle; (void)type; (void)flags;
    *pool = (CUmemoryPool)(uintptr_t)take_address();
    return CUDA_SUCCESS;
}
CU(cuMemFree_v2, CUdeviceptr ptr) { (void)ptr; FAIL(cuMemFree_v2); return CUDA_SUCCESS; }
CU(cuMemFree, CUdeviceptr_v1 ptr) { (void)ptr; FAIL(cuMemFree); return CUDA_SUCCESS; }
CU(cuMemFreeAsync, CUdeviceptr ptr, CUstream stream) { (void)ptr; (void)stream; FAIL(cuMemFreeAsync); return CUDA_SUCCESS; }
CU(cuMemFreeAsync_ptsz, CUdeviceptr ptr, CUstream stream) { return stub_cuMemFreeAsync(ptr, stream); }

/* ---- by handle ---- */
static uint64_t mapped_handle;
CU(cuMemCreate, CUmemGenericAllocationHandle *handle, size_t n, const CUmemAllocationProp *prop, unsigned long long flags)
{
    (void)n; (void)prop; (void)flags;
    FAIL(cuMemCreate);
    *handle = take_address();
    return CUDA_SUCCESS;
}
CU(cuMemRelease, CUmemGenericAllocationHandle handle) { (void)handle; FAIL(cuMemRelease); return CUDA_SUCCESS; }
CU(cuMemRetainAllocationHandle, CUmemGenericAllocationHandle *handle, void *address)
{
    (void)address;
    FAIL(cuMemRetainAllocationHandle);
    *handle = mapped_handle;
    return CUDA_SUCCESS;
}
CU(cuMemMap, CUdeviceptr ptr, size_t n, size_t offset, CUmemGenericAllocationHandle handle, unsigned long long flags)
{
    (void)ptr; (void)n; (void)offset; (void)flags;
    FAIL(cuMemMap);
    mapped_handle = handle;
    return CUDA_SUCCESS;
}
CU(cuMemUnmap, CUdeviceptr ptr, size_t n) { (void)ptr; (void)n; FAIL(cuMemUnmap); return CUDA_SUCCESS; }
CU(cuMemImportFromShareableHandle, CUmemGenericAllocationHandle *handle, void *os, CUmemAllocationHandleType type)
{
    (void)os; (void)type;
    *handle = take_address();
    return CUDA_SUCCESS;
}
CU(cuMulticastCreate, CUmemGenericAllocationHandle *object, const void *prop)
{
    (void)prop;
    *object = take_address();
    return CUDA_SUCCESS;
}
CU(cuMulticastBindMem, CUmemGenericAllocationHandle object, size_t at, CUmemGenericAllocationHandle handle, size_t offset,
   size_t size, unsigned long long flags)
{
    (void)object; (void)at; (void)handle; (void)offset; (void)size; (void)flags;
    FAIL(cuMulticastBindMem);
    return CUDA_SUCCESS;
}
CU(cuMulticastBindAddr, CUmemGenericAllocationHandle object, size_t at, CUdeviceptr address, size_t size,
   unsigned long long flags)
{
    (void)object; (void)at; (void)address; (void)size; (void)flags;
    FAIL(cuMulticastBindAddr);
    return CUDA_SUCCESS;
}
CU(cuMulticastUnbind, CUmemGenericAllocationHandle object, CUdevice device, size_t at, size_t size)
{
    (void)object; (void)device; (void)at; (void)size;
    FAIL(cuMulticastUnbind);
    return CUDA_SUCCESS;
}
CU(cuMemMapArrayAsync, CUarrayMapInfo *list, unsigned int count, CUstream stream)
{
    (void)list; (void)count; (void)stream;
    FAIL(cuMemMapArrayAsync);
    return CUDA_SUCCESS;
}

/* ---- arrays ---- */
static size_t array_needs;
void stub_array_needs(size_t bytes) { array_needs = bytes; } /* 0: the driver does not say */
CU(cuArrayGetMemoryRequirements, CUDA_ARRAY_MEMORY_REQUIREMENTS *needs, CUarray array, CUdevice device)
{
    (void)array; (void)device;
    *needs = (CUDA_ARRAY_MEMORY_REQUIREMENTS){.size = array_needs, .alignment = 512};
    return array_needs ? CUDA_SUCCESS : CUDA_ERROR_INVALID_VALUE;
}
CU(cuMipmappedArrayGetMemoryRequirements, CUDA_ARRAY_MEMORY_REQUIREMENTS *needs, CUmipmappedArray array, CUdevice device)
{
    return stub_cuArrayGetMemoryRequirements(needs, (CUarray)(void *)array, device);
}
#define ARRAY(name, ...) \
    CU(name, CUarray *array, __VA_ARGS__) { (void)d; FAIL(name); *array = (CUarray)(uintptr_t)take_address(); return CUDA_SUCCESS; }
ARRAY(cuArrayCreate_v2, const CUDA_ARRAY_DESCRIPTOR *d)
ARRAY(cuArrayCreate, const CUDA_ARRAY_DESCRIPTOR_v1 *d)
ARRAY(cuArray3DCreate_v2, const CUDA_ARRAY3D_DESCRIPTOR *d)
ARRAY(cuArray3DCreate, const CUDA_ARRAY3D_DESCRIPTOR_v1 *d)
CU(cuMipmappedArrayCreate, CUmipmappedArray *array, const CUDA_ARRAY3D_DESCRIPTOR *d, unsigned int levels)
{
    (void)d; (void)levels;
    FAIL(cuMipmappedArrayCreate);
    *array = (CUmipmappedArray)(uintptr_t)take_address();
    return CUDA_SUCCESS;
}
CU(cuArrayDestroy, CUarray array) { (void)array; FAIL(cuArrayDestroy); return CUDA_SUCCESS; }
CU(cuMipmappedArrayDestroy, CUmipmappedArray array) { (void)array; FAIL(cuMipmappedArrayDestroy); return CUDA_SUCCESS; }

/* ---- information ---- */
CU(cuMemGetInfo_v2, size_t *free, size_t *total)
{
    FAIL(cuMemGetInfo_v2);
    if (!free && !total)
        return CUDA_ERROR_INVALID_VALUE;
    if (free)
        *free = card_free;
    if (total)
        *total = card_total;
    return CUDA_SUCCESS;
}
CU(cuMemGetInfo, unsigned int *free, unsigned int *total)
{
    FAIL(cuMemGetInfo);
    *free = (unsigned int)card_free; /* truncated, as a careless driver might */
    *total = (unsigned int)card_total;
    return CUDA_SUCCESS;
}
CU(cuDeviceTotalMem_v2, size_t *bytes, CUdevice device)
{
    (void)device;
    FAIL(cuDeviceTotalMem_v2);
    *bytes = card_total;
    return CUDA_SUCCESS;
}
CU(cuDeviceTotalMem, unsigned int *bytes, CUdevice device)
{
    (void)device;
    FAIL(cuDeviceTotalMem);
    *bytes = (unsigned int)card_total;
    return CUDA_SUCCESS;
}

/* ---- NVML: a device's handle is the address of its UUID ---- */
#define NVML(name, ...) static nvmlReturn_t stub_##name(__VA_ARGS__)
static nvmlReturn_t give(int card, nvmlDevice_t *device)
{
    if (!device)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (card < 0 || card >= cards)
        return NVML_ERROR_NOT_FOUND;
    *device = (nvmlDevice_t)(void *)uuids[card];
    return NVML_SUCCESS;
}
static int card_of(nvmlDevice_t device) { return (int)(((uint8_t *)(void *)device - uuids[0]) / 16); }
static void text_of(int card, char text[41])
{
    const uint8_t *u = uuids[card];
    snprintf(text, 41, "GPU-%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", u[0], u[1], u[2], u[3], u[4],
             u[5], u[6], u[7], u[8], u[9], u[10], u[11], u[12], u[13], u[14], u[15]);
}
NVML(nvmlDeviceGetCount_v2, unsigned int *count) { *count = (unsigned int)cards; return NVML_SUCCESS; }
NVML(nvmlDeviceGetCount, unsigned int *count) { return stub_nvmlDeviceGetCount_v2(count); }
NVML(nvmlDeviceGetHandleByIndex_v2, unsigned int index, nvmlDevice_t *device)
{
    return device && index < (unsigned int)cards ? give((int)index, device) : NVML_ERROR_INVALID_ARGUMENT;
}
NVML(nvmlDeviceGetHandleByIndex, unsigned int index, nvmlDevice_t *device)
{
    return stub_nvmlDeviceGetHandleByIndex_v2(index, device);
}
NVML(nvmlDeviceGetHandleByUUID, const char *uuid, nvmlDevice_t *device)
{
    char text[41];
    for (int i = 0; i < cards; i++) {
        text_of(i, text);
        if (!strcmp(text, uuid))
            return give(i, device);
    }
    return NVML_ERROR_NOT_FOUND;
}
NVML(nvmlDeviceGetHandleByUUIDV, const nvmlUUID_t *uuid, nvmlDevice_t *device)
{
    return stub_nvmlDeviceGetHandleByUUID(uuid->value.str, device);
}
/* bus IDs and serials of the stub: the card's number */
NVML(nvmlDeviceGetHandleByPciBusId_v2, const char *bus, nvmlDevice_t *device) { return give(atoi(bus), device); }
NVML(nvmlDeviceGetHandleByPciBusId, const char *bus, nvmlDevice_t *device) { return give(atoi(bus), device); }
NVML(nvmlDeviceGetHandleBySerial, const char *serial, nvmlDevice_t *device) { return give(atoi(serial), device); }
NVML(nvmlDeviceGetUUID, nvmlDevice_t device, char *uuid, unsigned int length)
{
    if (length < 41)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    text_of(card_of(device), uuid);
    return NVML_SUCCESS;
}
NVML(nvmlDeviceGetIndex, nvmlDevice_t device, unsigned int *index)
{
    *index = (unsigned int)card_of(device);
    return NVML_SUCCESS;
}
NVML(nvmlDeviceGetMemoryInfo, nvmlDevice_t device, nvmlMemory_t *memory)
{
    if (!device || !memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    *memory = (nvmlMemory_t){card_total, card_free, card_total - card_free};
    return NVML_SUCCESS;
}
NVML(nvmlDeviceGetMemoryInfo_v2, nvmlDevice_t device, nvmlMemory_v2_t *memory)
{
    if (!device || !memory)
        return NVML_ERROR_INVALID_ARGUMENT;
    *memory = (nvmlMemory_v2_t){memory->version, card_total, 7, card_free, card_total - card_free - 7};
    return NVML_SUCCESS;
}
NVML(nvmlDeviceGetBAR1MemoryInfo, nvmlDevice_t device, nvmlBAR1Memory_t *memory)
{
    (void)device;
    *memory = (nvmlBAR1Memory_t){1 << 30, (1 << 30) - (1 << 20), 1 << 20};
    return NVML_SUCCESS;
}
static nvmlReturn_t list(unsigned int *count, void *entries, size_t size, size_t pid)
{
    unsigned int room = *count;
    *count = process_count;
    if (room < process_count)
        return NVML_ERROR_INSUFFICIENT_SIZE;
    for (unsigned int i = 0; i < process_count; i++) {
        memset((char *)entries + i * size, 0xee, size);
        memcpy((char *)entries + i * size + pid, &process_pids[i], 4);
    }
    return NVML_SUCCESS;
}
#define LIST(name, type) \
    NVML(name, nvmlDevice_t device, unsigned int *count, type *entries) \
    { \
        (void)device; \
        return list(count, entries, sizeof(type), offsetof(type, pid)); \
    }
NVML(nvmlDeviceGetAccountingPids, nvmlDevice_t device, unsigned int *count, unsigned int *pids)
{
    (void)device;
    return list(count, pids, sizeof *pids, 0);
}
NVML(nvmlDeviceGetAccountingStats, nvmlDevice_t device, unsigned int pid, nvmlAccountingStats_t *stats)
{
    (void)device;
    stats->time = pid;
    return NVML_SUCCESS;
}
NVML(nvmlDeviceGetRunningProcessDetailList, nvmlDevice_t device, nvmlProcessDetailList_t *l)
{
    (void)device;
    if (l->mode != 1)
        return NVML_ERROR_INVALID_ARGUMENT;
    return list(&l->numProcArrayEntries, l->procArray, sizeof *l->procArray, offsetof(nvmlProcessDetail_v1_t, pid));
}
NVML(nvmlDeviceGetProcessesUtilizationInfo, nvmlDevice_t device, nvmlProcessesUtilizationInfo_t *l)
{
    (void)device;
    if (l->lastSeenTimeStamp != 77)
        return NVML_ERROR_INVALID_ARGUMENT;
    return list(&l->processSamplesCount, l->procUtilArray, sizeof *l->procUtilArray, offsetof(nvmlProcessUtilizationInfo_v1_t, pid));
}
NVML(nvmlDeviceGetProcessUtilization, nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
     unsigned long long since)
{
    (void)device;
    if (since != 77)
        return NVML_ERROR_INVALID_ARGUMENT;
    if (!process_count)
        return NVML_ERROR_NOT_FOUND;
    return list(count, samples, sizeof *samples, offsetof(nvmlProcessUtilizationSample_t, pid));
}
LIST(nvmlDeviceGetEncoderSessions, nvmlEncoderSessionInfo_t)
LIST(nvmlDeviceGetFBCSessions, nvmlFBCSessionInfo_t)
LIST(nvmlDeviceGetComputeRunningProcesses, nvmlProcessInfo_v1_t)
LIST(nvmlDeviceGetComputeRunningProcesses_v2, nvmlProcessInfo_t)
LIST(nvmlDeviceGetComputeRunningProcesses_v3, nvmlProcessInfo_t)
LIST(nvmlDeviceGetGraphicsRunningProcesses, nvmlProcessInfo_v1_t)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v2, nvmlProcessInfo_t)
LIST(nvmlDeviceGetGraphicsRunningProcesses_v3, nvmlProcessInfo_t)
LIST(nvmlDeviceGetMPSComputeRunningProcesses, nvmlProcessInfo_v1_t)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v2, nvmlProcessInfo_t)
LIST(nvmlDeviceGetMPSComputeRunningProcesses_v3, nvmlProcessInfo_t)

#define ROW(name) {#name, (void *)stub_##name}
static const struct { const char *name; void *function; } driver[] = {
    ROW(cuInit), ROW(cuDeviceGetUuid), ROW(cuCtxGetCurrent), ROW(cuCtxGetDevice), ROW(cuCtxPushCurrent_v2),
    ROW(cuCtxPopCurrent_v2), ROW(cuStreamGetCtx),
    ROW(cuCtxDestroy), ROW(cuCtxDestroy_v2), ROW(cuCtxDetach), ROW(cuCtxAttach), ROW(cuDevicePrimaryCtxGetState),
    ROW(cuDevicePrimaryCtxRetain), ROW(cuDevicePrimaryCtxRelease), ROW(cuDevicePrimaryCtxRelease_v2),
    ROW(cuDevicePrimaryCtxReset), ROW(cuDevicePrimaryCtxReset_v2), ROW(cuMemAlloc), ROW(cuMemAlloc_v2), ROW(cuMemAllocManaged),
    ROW(cuMemAllocPitch), ROW(cuMemAllocPitch_v2), ROW(cuMemAllocAsync), ROW(cuMemAllocAsync_ptsz),
    ROW(cuMemAllocFromPoolAsync), {"cuMemAllocFromPoolAsync_ptsz", (void *)stub_cuMemAllocFromPoolAsync}, ROW(cuMemPoolCreate),
    ROW(cuMemPoolDestroy), ROW(cuMemPoolImportFromShareableHandle), ROW(cuMemFree), ROW(cuMemFree_v2), ROW(cuMemFreeAsync),
    ROW(cuMemFreeAsync_ptsz), ROW(cuMemCreate), ROW(cuMemRelease), ROW(cuMemRetainAllocationHandle), ROW(cuMemMap),
    ROW(cuMemUnmap), ROW(cuMemImportFromShareableHandle), ROW(cuArrayCreate), ROW(cuArrayCreate_v2), ROW(cuArray3DCreate),
    ROW(cuArray3DCreate_v2), ROW(cuMipmappedArrayCreate), ROW(cuArrayDestroy), ROW(cuMipmappedArrayDestroy), ROW(cuMemGetInfo),
    ROW(cuGreenCtxCreate), ROW(cuCtxFromGreenCtx), ROW(cuGreenCtxDestroy), ROW(cuMulticastCreate), ROW(cuMulticastBindMem),
    ROW(cuMulticastBindAddr), ROW(cuMulticastUnbind), ROW(cuMemMapArrayAsync),
    {"cuMemMapArrayAsync_ptsz", (void *)stub_cuMemMapArrayAsync}, ROW(cuArrayGetMemoryRequirements),
    ROW(cuMipmappedArrayGetMemoryRequirements),
    ROW(cuMemGetInfo_v2), ROW(cuDeviceTotalMem), ROW(cuDeviceTotalMem_v2), ROW(nvmlDeviceGetCount), ROW(nvmlDeviceGetCount_v2),
    ROW(nvmlDeviceGetHandleByIndex), ROW(nvmlDeviceGetHandleByIndex_v2), ROW(nvmlDeviceGetHandleByUUID),
    ROW(nvmlDeviceGetHandleByUUIDV), ROW(nvmlDeviceGetHandleByPciBusId), ROW(nvmlDeviceGetHandleByPciBusId_v2),
    ROW(nvmlDeviceGetHandleBySerial), ROW(nvmlDeviceGetUUID), ROW(nvmlDeviceGetIndex), ROW(nvmlDeviceGetMemoryInfo),
    ROW(nvmlDeviceGetMemoryInfo_v2), ROW(nvmlDeviceGetBAR1MemoryInfo), ROW(nvmlDeviceGetComputeRunningProcesses),
    ROW(nvmlDeviceGetComputeRunningProcesses_v2), ROW(nvmlDeviceGetComputeRunningProcesses_v3),
    ROW(nvmlDeviceGetGraphicsRunningProcesses), ROW(nvmlDeviceGetGraphicsRunningProcesses_v2),
    ROW(nvmlDeviceGetGraphicsRunningProcesses_v3), ROW(nvmlDeviceGetMPSComputeRunningProcesses),
    ROW(nvmlDeviceGetMPSComputeRunningProcesses_v2), ROW(nvmlDeviceGetMPSComputeRunningProcesses_v3),
    ROW(nvmlDeviceGetAccountingPids), ROW(nvmlDeviceGetAccountingStats), ROW(nvmlDeviceGetRunningProcessDetailList),
    ROW(nvmlDeviceGetProcessesUtilizationInfo), ROW(nvmlDeviceGetProcessUtilization), ROW(nvmlDeviceGetEncoderSessions),
    ROW(nvmlDeviceGetFBCSessions),
};

static bool listed(const char *list, const char *name)
{
    size_t length = strlen(name);
    for (const char *at = list; (at = strstr(at, name)); at += length)
        if ((at == list || at[-1] == ' ') && (at[length] == ' ' || at[length] == 0))
            return true;
    return false;
}

void stub_bind(const char *without)
{
    for (const struct hook_entry *e = __start_cgpu_entries; e < __stop_cgpu_entries; e++)
        for (size_t i = 0; i < sizeof driver / sizeof *driver; i++)
            if (!strcmp(driver[i].name, e->name) && !listed(without, e->name))
                *e->real = driver[i].function;
}

/* In place of the stub driver: a whole one, such as the simulated. */
void stub_bind_library(void *handle)
{
    for (const struct hook_entry *e = __start_cgpu_entries; e < __stop_cgpu_entries; e++)
        if (e->lib == HOOK_CUDA)
            *e->real = dlsym(handle, e->name);
}

void *stub_wrapper(const char *name)
{
    for (const struct hook_entry *e = __start_cgpu_entries; e < __stop_cgpu_entries; e++)
        if (!strcmp(e->name, name) && e->wrapper)
            return e->wrapper;
    return NULL;
}

void stub_retain(int device) { primary_users[device]++; }

void stub_replace(const char *name, void *function)
{
    for (const struct hook_entry *e = __start_cgpu_entries; e < __stop_cgpu_entries; e++)
        if (!strcmp(e->name, name))
            *e->real = function;
}
