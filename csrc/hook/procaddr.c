/* procaddr.c: the other ways in which the driver hands out its functions.
 *
 * cuGetProcAddress: the real one is asked with the caller's own arguments, so which variant a version and flags mean, and
 * every refusal, is its decision. What comes back is looked up by address: the driver's export at that address says which
 * wrapper it is. (On 535 and 550 every row of the table comes out right this way, and no two exports share an address.) The
 * table decides only between exports that do share one, and what a function is that the driver does not export. */
#include <string.h>
#include "bind.h"
#include "cuda_api.h"

#define NEWEST 13000 /* the table's: a variant that came later is not the one a row describes */

/* The export that answers (name, version, flags), or NULL. A name without a per-thread variant answers with the plain one. */
static const char *table_export(const char *name, int version, bool per_thread)
{
    int low = 0, high = CUDA_API_ROWS;
    while (low < high) {
        int middle = (low + high) / 2;
        if (strcmp(cuda_api_rows[middle].name, name) < 0)
            low = middle + 1;
        else
            high = middle;
    }
    const char *plain = NULL, *threaded = NULL;
    for (; low < CUDA_API_ROWS && !strcmp(cuda_api_rows[low].name, name); low++)
        if (cuda_api_rows[low].version <= version) /* in rising order within one kind of flags */
            *(cuda_api_rows[low].flags ? &threaded : &plain) = cuda_api_rows[low].export_name;
    return per_thread && threaded ? threaded : plain;
}

static void *ours(const char *name, int version, uint64_t flags, void *found)
{
    bool per_thread = flags & CU_GET_PROC_ADDRESS_PER_THREAD_DEFAULT_STREAM;
    const char *export_name = version <= NEWEST ? table_export(name, version, per_thread) : NULL;
    void *wrapper;
    enum bind_found what = bind_wrapper(export_name, found, &wrapper);
    if (!unknown_is_known(HOOK_CUDA, name))
        unknown_note(name, 0);
    else if (what == BIND_UNEXPORTED && version > NEWEST)
        unknown_note(name, version); /* a variant newer than the table, under a name we know */
    return wrapper;
}

static void answer(const char *name, void **function, int version, uint64_t flags, CUresult result)
{
    if (result == CUDA_SUCCESS && name && function && *function)
        *function = ours(name, version, flags, *function);
    hook_count_unknown(); /* a process resolves most names before it joins: carry the count over when it has */
}

CU_WRAP(CUresult, cuGetProcAddress, (const char *name, void **function, int version, uint64_t flags))
{
    CUresult result = REAL(cuGetProcAddress)(name, function, version, flags);
    answer(name, function, version, flags, result);
    return result;
}

CU_WRAP(CUresult, cuGetProcAddress_v2, (const char *name, void **function, int version, uint64_t flags,
                                        CUdriverProcAddressQueryResult *status))
{
    CUresult result = REAL(cuGetProcAddress_v2)(name, function, version, flags, status);
    answer(name, function, version, flags, result);
    return result;
}

/* Private tables are the driver's own affair: forwarded, named in the debug log. (NVML's: nvml_private.c.) */
CU_WRAP(CUresult, cuGetExportTable, (const void **table, const CUuuid *id))
{
    const uint8_t *b = (const void *)id;
    if (b)
        hook_log("debug", "private table asked for by=cuGetExportTable "
                 "uuid=%02x%02x%02x%02x-%02x%02x-%02x%02x-%02x%02x-%02x%02x%02x%02x%02x%02x", b[0], b[1], b[2], b[3],
                 b[4], b[5], b[6], b[7], b[8], b[9], b[10], b[11], b[12], b[13], b[14], b[15]);
    return REAL(cuGetExportTable)(table, id);
}
