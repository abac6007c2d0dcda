/* registry.c: what the host code that nvcc writes registers before main: fat binaries with their kernels and variables,
 * each known by a host address. A fat binary is loaded when something of it is first used (PyTorch registers tens of
 * thousands of kernels and uses a few). */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <fatbinary_section.h>
#include "driver.h"

#define BUCKETS 65536

struct binary {
    const void *image;
    CUlibrary library;    /* NULL: not loaded */
    struct entry *entries;
};

struct entry {
    const void *host;
    const char *name;
    struct binary *binary;
    bool variable, managed;
    size_t bytes;
    CUkernel kernel;      /* of a function used before */
    CUdeviceptr address;  /* of a variable used before */
    struct entry *next, *sibling;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct entry *buckets[BUCKETS];

static struct entry **bucket_of(const void *host)
{
    return &buckets[((uintptr_t)host >> 4) * 2654435761u % BUCKETS];
}

static struct entry *entry_of(const void *host)
{
    struct entry *entry = *bucket_of(host);
    while (entry && entry->host != host)
        entry = entry->next;
    return entry;
}

static CUresult load(struct binary *binary)
{
    if (binary->library)
        return CUDA_SUCCESS;
    return DRIVE(cuLibraryLoadData, &binary->library, binary->image, NULL, NULL, 0, NULL, NULL, 0);
}

/* ---- what registering calls ---- */

void **__cudaRegisterFatBinary(void *wrapper);
void __cudaRegisterFatBinaryEnd(void **handle);
void __cudaUnregisterFatBinary(void **handle);
void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *warp);
void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int ext, size_t size, int constant,
                       int global);
void __cudaRegisterManagedVar(void **handle, void **host, char *address, const char *name, int ext, size_t size,
                              int constant, int global);
char __cudaInitModule(void **handle);

void **__cudaRegisterFatBinary(void *wrapper)
{
    struct binary *binary = calloc(1, sizeof *binary);
    if (binary)
        binary->image = ((const __fatBinC_Wrapper_t *)wrapper)->data;
    return (void **)binary;
}

void __cudaRegisterFatBinaryEnd(void **handle)
{
    (void)handle;
}

void __cudaUnregisterFatBinary(void **handle)
{
    struct binary *binary = (struct binary *)handle;
    if (!binary)
        return;
    pthread_mutex_lock(&lock);
    while (binary->entries) {
        struct entry *entry = binary->entries, **at = bucket_of(entry->host);
        binary->entries = entry->sibling;
        while (*at != entry)
            at = &(*at)->next;
        *at = entry->next;
        free(entry);
    }
    if (binary->library)
        DRIVE(cuLibraryUnload, binary->library);
    free(binary);
    pthread_mutex_unlock(&lock);
}

static struct entry *add(void **handle, const void *host, const char *name)
{
    struct binary *binary = (struct binary *)handle;
    struct entry *entry = binary ? calloc(1, sizeof *entry) : NULL;
    if (!entry)
        return NULL; /* its use will be an invalid function or symbol */
    *entry = (struct entry){.host = host, .name = name, .binary = binary};
    pthread_mutex_lock(&lock);
    entry->sibling = binary->entries;
    binary->entries = entry;
    entry->next = *bucket_of(host);
    *bucket_of(host) = entry;
    pthread_mutex_unlock(&lock);
    return entry;
}

void __cudaRegisterFunction(void **handle, const char *host, char *device, const char *name, int limit, uint3 *tid,
                            uint3 *bid, dim3 *block, dim3 *grid, int *warp)
{
    (void)device, (void)limit, (void)tid, (void)bid, (void)block, (void)grid, (void)warp;
    add(handle, host, name);
}

void __cudaRegisterVar(void **handle, char *host, char *address, const char *name, int ext, size_t size, int constant,
                       int global)
{
    (void)address, (void)ext, (void)constant, (void)global;
    struct entry *entry = add(handle, host, name);
    if (entry) {
        entry->variable = true;
        entry->bytes = size;
    }
}

void __cudaRegisterManagedVar(void **handle, void **host, char *address, const char *name, int ext, size_t size,
                              int constant, int global)
{
    (void)address, (void)ext, (void)constant, (void)global;
    struct entry *entry = add(handle, host, name);
    if (entry) {
        entry->variable = entry->managed = true;
        entry->bytes = size;
    }
}

/* ---- use ---- */

/* A driver that does not read fat binaries knows no variable in them (the simulated one does not): then it is memory of
 * the registered size, zeroed. */
static CUresult place_variable(struct entry *entry)
{
    size_t bytes;
    if (entry->address)
        return CUDA_SUCCESS;
    TRY(load(entry->binary));
    CUresult result =
        entry->managed ? DRIVE(cuLibraryGetManaged, &entry->address, &bytes, entry->binary->library, entry->name)
                       : DRIVE(cuLibraryGetGlobal, &entry->address, &bytes, entry->binary->library, entry->name);
    if (result != CUDA_ERROR_NOT_FOUND)
        return result;
    TRY(entry->managed ? DRIVE(cuMemAllocManaged, &entry->address, entry->bytes, CU_MEM_ATTACH_GLOBAL)
                       : DRIVE(cuMemAlloc, &entry->address, entry->bytes));
    return DRIVE(cuMemsetD8, entry->address, 0, entry->bytes);
}

CUresult rt_symbol(const void *host, CUdeviceptr *address, size_t *bytes)
{
    TRY(rt_enter());
    pthread_mutex_lock(&lock);
    struct entry *entry = entry_of(host);
    CUresult result = entry && entry->variable ? place_variable(entry) : (CUresult)cudaErrorInvalidSymbol;
    if (result == CUDA_SUCCESS && address)
        *address = entry->address;
    if (result == CUDA_SUCCESS && bytes)
        *bytes = entry->bytes;
    pthread_mutex_unlock(&lock);
    return result;
}

/* Called before the first use of a managed variable: the host's pointer to each is set. */
char __cudaInitModule(void **handle)
{
    struct binary *binary = (struct binary *)handle;
    CUresult result = rt_enter();
    pthread_mutex_lock(&lock);
    for (struct entry *entry = binary->entries; entry && result == CUDA_SUCCESS; entry = entry->sibling) {
        if (!entry->managed)
            continue;
        result = place_variable(entry);
        *(void **)entry->host = (void *)entry->address;
    }
    pthread_mutex_unlock(&lock);
    return rt_done(result) == cudaSuccess;
}

CUresult rt_kernel(const void *host, CUfunction *function)
{
    CUresult result = CUDA_SUCCESS;
    TRY(rt_enter());
    if (!host)
        return (CUresult)cudaErrorInvalidDeviceFunction;
    pthread_mutex_lock(&lock);
    struct entry *entry = entry_of(host);
    if (entry && !entry->kernel) {
        result = entry->variable ? (CUresult)cudaErrorInvalidDeviceFunction : load(entry->binary);
        if (result == CUDA_SUCCESS)
            result = DRIVE(cuLibraryGetKernel, &entry->kernel, entry->binary->library, entry->name);
    }
    *function = entry ? (CUfunction)entry->kernel : (CUfunction)host;
    pthread_mutex_unlock(&lock);
    return result;
}

cudaError_t cudaGetSymbolAddress(void **address, const void *symbol)
{
    return rt_done(address ? rt_symbol(symbol, (CUdeviceptr *)address, NULL) : CUDA_ERROR_INVALID_VALUE);
}

cudaError_t cudaGetSymbolSize(size_t *bytes, const void *symbol)
{
    return rt_done(bytes ? rt_symbol(symbol, NULL, bytes) : CUDA_ERROR_INVALID_VALUE);
}
