/* procaddr.c: cuGetProcAddress by the table. */
#include <string.h>
#include "cuda/sim.h"
#include "cuda_api.h"

#define X(name) extern const char address_##name[] __asm__(#name);
#include "cuda_exports.inc"
#undef X

static const struct { const char *name; const void *address; } exports[] = {
#define X(name) {#name, address_##name},
#include "cuda_exports.inc"
#undef X
};

static const void *export_address(const char *name)
{
    size_t low = 0, high = sizeof exports / sizeof *exports;
    while (low < high) {
        size_t middle = (low + high) / 2;
        int order = strcmp(name, exports[middle].name);
        if (order == 0)
            return exports[middle].address;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

static size_t first_row(const char *name)
{
    size_t low = 0, high = CUDA_API_ROWS;
    while (low < high) {
        size_t middle = (low + high) / 2;
        if (strcmp(cuda_api_rows[middle].name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    return low;
}

/* The newest variant that `version` knows. With the per-thread flag a name that has such variants is asked for among
 * those alone, unless the version is older than all of them; a name that has none gives its plain one. */
static CUdriverProcAddressQueryResult look_up(const char *name, int version, bool per_thread, const void **address)
{
    const struct cuda_api_row *plain = NULL, *own = NULL;
    bool known = false;
    for (size_t i = first_row(name); i < CUDA_API_ROWS && strcmp(cuda_api_rows[i].name, name) == 0; i++) {
        const struct cuda_api_row *row = &cuda_api_rows[i];
        known = true;
        if (row->version > version || row->version > CUDA_VERSION)
            continue;
        const struct cuda_api_row **best = row->flags ? &own : &plain;
        if (!*best || row->version > (*best)->version)
            *best = row;
    }
    const struct cuda_api_row *found = per_thread && own ? own : plain;
    if (!known)
        return CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
    if (!found)
        return CU_GET_PROC_ADDRESS_VERSION_NOT_SUFFICIENT;
    *address = export_address(found->export_name);
    return *address ? CU_GET_PROC_ADDRESS_SUCCESS : CU_GET_PROC_ADDRESS_SYMBOL_NOT_FOUND;
}

API cuGetProcAddress(const char *name, void **address, int version, uint64_t flags);
API cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                        CUdriverProcAddressQueryResult *status);
API cuGetExportTable(const void **table, const CUuuid *id);

API cuGetProcAddress_v2(const char *name, void **address, int version, uint64_t flags,
                        CUdriverProcAddressQueryResult *status)
{
    const void *found = NULL;
    if (!name || !address || flags > 3)
        return CUDA_ERROR_INVALID_VALUE;
    CUdriverProcAddressQueryResult result =
        look_up(name, version, (flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM) != 0, &found);
    *address = (void *)found;
    if (status)
        *status = result;
    return CUDA_SUCCESS;
}

/* The first form has no status: not finding is its result. */
API cuGetProcAddress(const char *name, void **address, int version, uint64_t flags)
{
    CUdriverProcAddressQueryResult status;
    TRY(cuGetProcAddress_v2(name, address, version, flags, &status));
    return status == CU_GET_PROC_ADDRESS_SUCCESS ? CUDA_SUCCESS : CUDA_ERROR_NOT_FOUND;
}

/* Private tables, one of them a check that the driver is genuine: this one is not, and says so. */
API cuGetExportTable(const void **table, const CUuuid *id)
{
    if (!table || !id)
        return CUDA_ERROR_INVALID_VALUE;
    *table = NULL;
    return CUDA_ERROR_NOT_FOUND;
}
