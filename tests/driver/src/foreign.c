/* A driver that nobody wrote for us. Every function checks every argument it is called with: six in integer registers, eight
 * in vector registers, four on the stack. A function that the hook wraps is called as its prototype says.
 * functions.inc: F(number, symbol) each, W(number, symbol, arguments, masks...) for wrapped ones. */
#include <stddef.h>
#include <stdint.h>
#include <string.h>
#include "cuda_api.h"
#include "foreign.h"

#define F(i, symbol) int f##i(ARGUMENTS) __asm__(#symbol); int f##i(ARGUMENTS) { return CHECK(i) ? i + 5000 : -1; }
#define W(i, symbol, n, ...)                                                                                       \
    int f##i(long, long, long, long, long, long, long, long, long, long, long, long, long, long) __asm__(#symbol); \
    int f##i(long a, long b, long c, long d, long e, long f, long g, long h, long j, long k, long l, long m, long o, long p) \
    {                                                                                                              \
        const long got[] = {a, b, c, d, e, f, g, h, j, k, l, m, o, p}, masks[] = {__VA_ARGS__ 0};                  \
        for (int x = 0; x < n; x++)                                                                                \
            if ((got[x] & masks[x]) != (WRAPPED(i, x, masks[x]) & masks[x]))                                       \
                return -1;                                                                                         \
        return i + 5000;                                                                                           \
    }
#include "functions.inc"
#undef F
#undef W

/* in no export: handed out by cuGetProcAddress alone */
static int hidden_known(long a, long b) { return a == 3 && b == 4 ? 6001 : -1; }
static int hidden_variant(long a) { return a == 5 ? 6002 : -1; }
static int hidden_unknown(long a) { return a == 6 ? 6003 : -1; }

static const struct { const char *name; void *function; } exports[] = {
#define F(i, symbol) {#symbol, (void *)f##i},
#define W(i, symbol, n, ...) F(i, symbol)
#include "functions.inc"
};

static void *exported(const char *name)
{
    for (size_t i = 0; i < sizeof exports / sizeof *exports; i++)
        if (!strcmp(exports[i].name, name))
            return exports[i].function;
    return NULL;
}

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);
static int resolve(const char *name, void **out, int version, uint64_t flags, int *status)
{
    if (!name || !out)
        return 1;
    *out = NULL;
    int heard = 0, best = -1;
    if (!strcmp(name, "cuGreenCtxGetId") && version >= 12090)
        *out = (void *)hidden_known;
    else if (!strcmp(name, "cuMemAlloc") && version >= 13020)
        *out = (void *)hidden_variant;
    else if (!strcmp(name, "cuNobodyKnowsMe"))
        *out = (void *)hidden_unknown;
    else if (!strncmp(name, "cuForeign", 9))
        *out = exported(name);
    else if (!strcmp(name, "cuGetProcAddress"))
        *out = (void *)cuGetProcAddress_v2;
    else
        for (int threaded = flags & 2; best < 0 && threaded >= 0; threaded -= 2)
            for (int i = 0; i < CUDA_API_ROWS; i++) {
                if (strcmp(cuda_api_rows[i].name, name) || cuda_api_rows[i].flags != threaded)
                    continue;
                void *found = exported(cuda_api_rows[i].export_name);
                heard |= found != NULL;
                if (found && cuda_api_rows[i].version <= version && cuda_api_rows[i].version > best) {
                    best = cuda_api_rows[i].version;
                    *out = found;
                }
            }
    if (status)
        *status = *out ? 0 : heard ? 2 : 1;
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    return resolve(name, out, version, flags, status);
}
int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    int status;
    int result = resolve(name, out, version, flags, &status);
    return result ? result : status ? 500 : 0; /* the old one has no status */
}
static int private_table;
int cuGetExportTable(const void **table, const void *id)
{
    *table = &private_table;
    return *(const char *)id == 0x5a ? 0 : 500;
}
