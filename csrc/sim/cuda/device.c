/* device.c: what a program is told about the GPU: an invented one of compute capability 9.0. */
#include <stdio.h>
#include <string.h>
#include "cuda/sim.h"

#define ATTRIBUTES 148

/* By number as in CUdevice_attribute; what is absent here is 0. */
static const int attributes[ATTRIBUTES] = {
    [1] = 1024, [2] = 1024, [3] = 1024, [4] = 64,               /* threads of a block, its dimensions */
    [5] = 2147483647, [6] = 65535, [7] = 65535,                 /* grid dimensions */
    [8] = 49152, [9] = 65536, [10] = 32, [11] = 2147483647,     /* shared, constant memory, warp, pitch */
    [12] = 65536, [13] = 1980000, [14] = 512, [15] = 1, [16] = 132, /* registers, kHz, alignment, overlap, SMs */
    [19] = 1,                                                   /* maps host memory */
    [21] = 131072, [22] = 131072, [23] = 65536, [24] = 16384, [25] = 16384, [26] = 16384, [27] = 32768, [28] = 32768,
    [29] = 2048, [30] = 512, [31] = 1, [32] = 1,                /* textures, concurrent kernels, ECC */
    [36] = 2619000, [37] = 5120, [38] = 52428800, [39] = 2048, [40] = 3, [41] = 1, /* memory, L2, copy engines, UVA */
    [42] = 32768, [43] = 2048, [45] = 32768, [46] = 32768, [47] = 8192, [48] = 8192, [49] = 32768, [51] = 32,
    [52] = 32768, [53] = 32768, [54] = 2046, [55] = 32768, [56] = 131072, [57] = 65536, [58] = 16384, [59] = 16384,
    [60] = 16384, [61] = 32768, [62] = 2048, [63] = 32768, [64] = 32768, [65] = 2048, [66] = 32768, [67] = 32768,
    [68] = 2046, [69] = 268435456, [70] = 131072, [71] = 65000, [72] = 2097120, [73] = 32768, [74] = 32768,
    [75] = 9, [76] = 0, [77] = 32768, [78] = 1, [79] = 1, [80] = 1, [81] = 233472, [82] = 65536, [83] = 1,
    [87] = 2, [89] = 1, [90] = 1, [91] = 1,                     /* managed access, preemption, registered pointers */
    [92] = 1, [93] = 1, [94] = 1,                               /* values in memory that streams wait for */
    [95] = 1, [97] = 232448, [99] = 1, [102] = 1, [103] = 1, [106] = 32, [108] = 32768000, [109] = 134217728,
    [111] = 1024, [113] = 1, [115] = 1, [118] = 100, [119] = 1, [120] = 1, [121] = 1, [122] = 1, [123] = 1, [126] = 4,
    [125] = 1, [131] = -1, [132] = 1, [134] = -1,
};

API cuDeviceGet(CUdevice *device, int ordinal);
API cuDeviceGetCount(int *count);
API cuDeviceGetName(char *name, int length, CUdevice device);
API cuDeviceGetUuid(CUuuid *uuid, CUdevice device);
API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device);
API cuDeviceGetLuid(char *luid, unsigned int *mask, CUdevice device);
API cuDeviceTotalMem(unsigned int *bytes, CUdevice device);
API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device);
API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device);
API cuDeviceGetProperties(CUdevprop *properties, CUdevice device);
API cuDeviceComputeCapability(int *major, int *minor, CUdevice device);
API cuDeviceGetPCIBusId(char *id, int length, CUdevice device);
API cuDeviceGetByPCIBusId(CUdevice *device, const char *id);
API cuDeviceGetTexture1DLinearMaxWidth(size_t *width, CUarray_format format, unsigned channels, CUdevice device);
API cuDeviceGetExecAffinitySupport(int *supported, CUexecAffinityType type, CUdevice device);
API cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer);
API cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to);
API cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags);
API cuCtxDisablePeerAccess(CUcontext peer);

#define DEVICE(out, device) \
    CHECK_INIT(); \
    struct gpu *gpu = gpu_of(device); \
    if (!(out)) \
        return CUDA_ERROR_INVALID_VALUE; \
    if (!gpu) \
        return CUDA_ERROR_INVALID_DEVICE

API cuDeviceGet(CUdevice *device, int ordinal)
{
    DEVICE(device, ordinal);
    (void)gpu;
    *device = ordinal;
    return CUDA_SUCCESS;
}

API cuDeviceGetCount(int *count)
{
    CHECK_INIT();
    if (!count)
        return CUDA_ERROR_INVALID_VALUE;
    *count = gpu_count;
    return CUDA_SUCCESS;
}

API cuDeviceGetName(char *name, int length, CUdevice device)
{
    DEVICE(name, device);
    if (length <= 0)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(name, (size_t)length, "%s", gpu->conf.name);
    return CUDA_SUCCESS;
}

API cuDeviceGetUuid(CUuuid *uuid, CUdevice device)
{
    DEVICE(uuid, device);
    memcpy(uuid->bytes, gpu->conf.uuid, 16);
    return CUDA_SUCCESS;
}

API cuDeviceGetUuid_v2(CUuuid *uuid, CUdevice device)
{
    return cuDeviceGetUuid(uuid, device);
}

API cuDeviceGetLuid(char *luid, unsigned int *mask, CUdevice device)
{
    DEVICE(luid, device);
    (void)gpu;
    (void)mask;
    return CUDA_ERROR_NOT_SUPPORTED; /* Windows only */
}

API cuDeviceTotalMem_v2(size_t *bytes, CUdevice device)
{
    DEVICE(bytes, device);
    *bytes = gpu->conf.bytes;
    return CUDA_SUCCESS;
}

API cuDeviceTotalMem(unsigned int *bytes, CUdevice device)
{
    DEVICE(bytes, device);
    *bytes = gpu->conf.bytes > UINT32_MAX ? UINT32_MAX : (unsigned int)gpu->conf.bytes;
    return CUDA_SUCCESS;
}

API cuDeviceGetAttribute(int *value, CUdevice_attribute attribute, CUdevice device)
{
    DEVICE(value, device);
    if ((int)attribute <= 0 || (int)attribute >= ATTRIBUTES)
        return CUDA_ERROR_INVALID_VALUE;
    *value = attribute == CU_DEVICE_ATTRIBUTE_PCI_BUS_ID ? gpu->host_index + 1 : attributes[attribute];
    return CUDA_SUCCESS;
}

API cuDeviceGetProperties(CUdevprop *properties, CUdevice device)
{
    DEVICE(properties, device);
    (void)gpu;
    const int *a = attributes;
    *properties = (CUdevprop){
        .maxThreadsPerBlock = a[1], .maxThreadsDim = {a[2], a[3], a[4]}, .maxGridSize = {a[5], a[6], a[7]},
        .sharedMemPerBlock = a[8], .totalConstantMemory = a[9], .SIMDWidth = a[10], .memPitch = a[11],
        .regsPerBlock = a[12], .clockRate = a[13], .textureAlign = a[14],
    };
    return CUDA_SUCCESS;
}

API cuDeviceComputeCapability(int *major, int *minor, CUdevice device)
{
    DEVICE(major && minor, device);
    (void)gpu;
    *major = attributes[75];
    *minor = attributes[76];
    return CUDA_SUCCESS;
}

API cuDeviceGetPCIBusId(char *id, int length, CUdevice device)
{
    DEVICE(id, device);
    if (length < 13)
        return CUDA_ERROR_INVALID_VALUE;
    snprintf(id, (size_t)length, "0000:%02X:00.0", gpu->host_index + 1);
    return CUDA_SUCCESS;
}

API cuDeviceGetByPCIBusId(CUdevice *device, const char *id)
{
    CHECK_INIT();
    if (!device || !id)
        return CUDA_ERROR_INVALID_VALUE;
    for (int i = 0; i < gpu_count; i++) {
        char bus[8];
        snprintf(bus, sizeof bus, ":%02X:00", gpus[i]->host_index + 1);
        if (strstr(id, bus)) {
            *device = i;
            return CUDA_SUCCESS;
        }
    }
    return CUDA_ERROR_INVALID_DEVICE;
}

API cuDeviceGetTexture1DLinearMaxWidth(size_t *width, CUarray_format format, unsigned channels, CUdevice device)
{
    DEVICE(width, device);
    (void)gpu;
    (void)format;
    (void)channels;
    *width = (size_t)attributes[69];
    return CUDA_SUCCESS;
}

API cuDeviceGetExecAffinitySupport(int *supported, CUexecAffinityType type, CUdevice device)
{
    DEVICE(supported, device);
    (void)gpu;
    (void)type;
    *supported = 0; /* needs MPS */
    return CUDA_SUCCESS;
}

API cuDeviceCanAccessPeer(int *can, CUdevice device, CUdevice peer)
{
    DEVICE(can, device);
    (void)gpu;
    if (!gpu_of(peer))
        return CUDA_ERROR_INVALID_DEVICE;
    *can = 0;
    return CUDA_SUCCESS;
}

API cuDeviceGetP2PAttribute(int *value, CUdevice_P2PAttribute attribute, CUdevice from, CUdevice to)
{
    DEVICE(value, from);
    (void)gpu;
    if (!gpu_of(to) || from == to)
        return CUDA_ERROR_INVALID_DEVICE;
    if (attribute < 1 || attribute > 5)
        return CUDA_ERROR_INVALID_VALUE;
    *value = 0;
    return CUDA_SUCCESS;
}

API cuCtxEnablePeerAccess(CUcontext peer, unsigned int flags)
{
    CHECK_INIT();
    if (flags || !object_is(peer, OBJ_CONTEXT))
        return flags ? CUDA_ERROR_INVALID_VALUE : CUDA_ERROR_INVALID_CONTEXT;
    return CUDA_ERROR_PEER_ACCESS_UNSUPPORTED;
}

API cuCtxDisablePeerAccess(CUcontext peer)
{
    CHECK_INIT();
    return object_is(peer, OBJ_CONTEXT) ? CUDA_ERROR_PEER_ACCESS_NOT_ENABLED : CUDA_ERROR_INVALID_CONTEXT;
}
