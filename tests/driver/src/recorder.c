/* Stands in for libcuda.so.1 and writes down what is asked of it: `name version flags` a line into the file LOOKUPS names.
 * Every name exists, every function fails, every private table is missing: cudart resolves all it wants before it looks at
 * anything that would tell this from a driver. */
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static int fails(void) { return 3; /* CUDA_ERROR_NOT_INITIALIZED */ }
static int no_table(void) { return 500; /* CUDA_ERROR_NOT_FOUND */ }

int cuInit(unsigned flags) { return 0; }
int cuDriverGetVersion(int *version) { *version = 13050; return 0; }
int cuGetExportTable(const void **table, const void *id) { return no_table(); }

int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status);
int cuGetProcAddress(const char *name, void **out, int version, uint64_t flags)
{
    static int fd = -1;
    char line[300];
    if (fd < 0)
        fd = open(getenv("LOOKUPS"), O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0666);
    int length = snprintf(line, sizeof line, "%s %d %d\n", *name ? name : "-", version, (int)flags);
    if (write(fd, line, length) != length)
        abort();
    *out = !strcmp(name, "cuInit") ? (void *)cuInit
         : !strcmp(name, "cuDriverGetVersion") ? (void *)cuDriverGetVersion
         : !strcmp(name, "cuGetExportTable") ? (void *)no_table
         : !strcmp(name, "cuGetProcAddress") ? (version >= 12000 ? (void *)cuGetProcAddress_v2 : (void *)cuGetProcAddress)
         : (void *)fails;
    return 0;
}
int cuGetProcAddress_v2(const char *name, void **out, int version, uint64_t flags, int *status)
{
    if (status)
        *status = 0;
    return cuGetProcAddress(name, out, version, flags);
}
