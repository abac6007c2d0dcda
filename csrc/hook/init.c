/* init.c: binding a proxy to the real library behind it.
 *
 * Runs in the constructor of libcuda.so.1 and libnvidia-ml.so.1 (the proxies), in every program that loads one: so it opens
 * the real library, as the program would have, fills two tables, and does nothing else: no thread, no socket, no device.
 * The real library is opened by path and local, so that nothing resolves to it by accident; it shares its SONAME with the
 * proxy, and the loader answers a later dlopen("libcuda.so.1") with whichever was loaded first: the proxy.
 *
 * Where the proxies are mounted over the driver's own files (cgpusched.driver.cover), the path written into the proxy leads
 * to a proxy, and the real files are at `real/` beside this library. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "bind.h"

#define WRAPPERS 1024

enum state { CLOSED, OPENING, OPEN, FAILED };
static struct driver {
    const char *soname;
    enum state state;
    void *handle;
    const struct cgpu_proxy *proxy; /* the first that was bound */
    void **reals;                   /* beside its names */
} drivers[] = {[HOOK_CUDA] = {.soname = "libcuda.so.1"}, [HOOK_NVML] = {.soname = "libnvidia-ml.so.1"}};

/* real -> wrapper, in order of address */
static struct pair {
    void *real, *wrapper;
} pairs[WRAPPERS];
static unsigned pair_count;

/* ---- what answers where there is nothing to forward to ---- */

static CUresult cuda_missing(void) { return CUDA_ERROR_NOT_FOUND; }
static CUresult cuda_absent(void) { return CUDA_ERROR_NO_DEVICE; }
static CUresult cuda_absent_text(CUresult error, const char **text)
{
    (void)error;
    if (text)
        *text = "the CUDA driver library could not be opened";
    return CUDA_SUCCESS;
}
static nvmlReturn_t nvml_missing(void) { return NVML_ERROR_FUNCTION_NOT_FOUND; }
static nvmlReturn_t nvml_absent(void) { return NVML_ERROR_LIBRARY_NOT_FOUND; }
static const char *nvml_absent_text(nvmlReturn_t error)
{
    (void)error;
    return "the NVML library could not be opened";
}

static void *fallback(enum hook_lib lib, bool open, const char *name)
{
    if (lib == HOOK_NVML)
        return !strcmp(name, "nvmlErrorString") ? (void *)nvml_absent_text : open ? (void *)nvml_missing : (void *)nvml_absent;
    if (!strcmp(name, "cuGetErrorString") || !strcmp(name, "cuGetErrorName"))
        return (void *)cuda_absent_text;
    return open ? (void *)cuda_missing : (void *)cuda_absent;
}

/* ---- opening ---- */

static void *open_path(const char *path)
{
    void *handle = dlopen(path, RTLD_NOW | RTLD_LOCAL | RTLD_NODELETE);
    if (!handle) {
        const char *why = dlerror();
        hook_log("info", "driver library not opened path=%s reason=%s", path, why ? why : "?");
        return NULL;
    }
    if (selfbind_is_proxy(handle)) {
        hook_log("error", "driver library is a proxy, not the real one path=%s", path);
        return NULL;
    }
    selfbind(handle);
    return handle;
}

bool hook_covered(const char *name, char *path, size_t room)
{
    Dl_info us;
    const char *slash = dladdr((void *)&drivers, &us) && us.dli_fname ? strrchr(us.dli_fname, '/') : NULL;
    int folder = slash ? (int)(slash - us.dli_fname) : 0;
    return slash && snprintf(path, room, "%.*s/real/%s", folder, us.dli_fname, name) < (int)room;
}

/* The real library at `real/SONAME` beside this one. NULL: there is a link, or nothing: the usual ways lead to it. */
static void *open_covered(const char *soname)
{
    char path[4096], target;
    if (!hook_covered(soname, path, sizeof path))
        return NULL;
    bool file = readlink(path, &target, 1) < 0 && errno == EINVAL;
    return file ? open_path(path) : NULL;
}

static void open_driver(struct driver *driver, const char *real_path)
{
    driver->state = OPENING; /* another copy of the proxy, loaded by what follows, must not come in here again */
    char path[4096];
    snprintf(path, sizeof path, "%s", real_path);
    const char *folder = secure_getenv("CGPU_DRIVER_DIR");
    driver->handle = open_covered(driver->soname); /* before what the environment says: it could only lead to a proxy */
    if (!driver->handle && folder && *folder) {
        snprintf(path, sizeof path, "%s/%s", folder, driver->soname);
        driver->handle = open_path(path);
    } else if (!driver->handle) {
        driver->handle = open_path(path);
        /* A container may have the same driver in another folder. Its full name, libcuda.so.550.163.01, is not the proxy's. */
        const char *file = strrchr(real_path, '/');
        if (!driver->handle && file && strcmp(file + 1, driver->soname))
            driver->handle = open_path(file + 1);
    }
    driver->state = driver->handle ? OPEN : FAILED;
    if (driver->state == FAILED)
        hook_log("error", "the real %s cannot be opened path=%s: its functions answer that there is no device",
                 driver->soname, path);
}

/* The function behind a proxy's label: "name", or "name@version" for one that is not its name's default. */
static void *lookup(void *handle, const char *label)
{
    const char *at = strchr(label, '@');
    if (!at)
        return dlsym(handle, label);
    char name[256];
    if ((size_t)(at - label) >= sizeof name)
        return NULL;
    memcpy(name, label, (size_t)(at - label));
    name[at - label] = '\0';
    return dlvsym(handle, name, at + 1);
}

/* ---- the tables ---- */

static int64_t index_of(const struct cgpu_proxy *proxy, const char *name)
{
    uint64_t low = 0, high = proxy->count; /* names are in strcmp order */
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        int order = strcmp(name, proxy->names[middle]);
        if (!order)
            return (int64_t)middle;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return -1;
}

static void add_pair(void *real, void *wrapper)
{
    unsigned at = pair_count;
    while (at && (uintptr_t)pairs[at - 1].real > (uintptr_t)real)
        at--;
    if (pair_count == WRAPPERS || (at && pairs[at - 1].real == real))
        return; /* a second name of one function; bind_wrapper() tells them apart by name first */
    memmove(&pairs[at + 1], &pairs[at], (pair_count - at) * sizeof *pairs);
    pairs[at] = (struct pair){real, wrapper};
    pair_count++;
}

static void *wrapper_of_address(const void *real)
{
    unsigned low = 0, high = pair_count;
    while (low < high) {
        unsigned middle = (low + high) / 2;
        if (pairs[middle].real == real)
            return pairs[middle].wrapper;
        if ((uintptr_t)pairs[middle].real > (uintptr_t)real)
            high = middle;
        else
            low = middle + 1;
    }
    return NULL;
}

/* The driver hands out, for this export's name, a function that it does not export under it. */
static void *adopt(const char *name, void *real)
{
    void *wrapper = NULL;
    for (const struct hook_entry *entry = __start_cgpu_entries; entry < __stop_cgpu_entries; entry++) {
        if (entry->lib != HOOK_CUDA || strcmp(entry->name, name))
            continue;
        void *none = NULL; /* several threads may ask at once; the driver gives all of them the same address */
        __atomic_compare_exchange_n(entry->real, &none, real, false, __ATOMIC_RELEASE, __ATOMIC_RELAXED);
        if (entry->wrapper)
            wrapper = entry->wrapper;
    }
    return wrapper;
}

enum bind_found bind_wrapper(const char *export_name, void *real, void **wrapper)
{
    const struct driver *driver = &drivers[HOOK_CUDA];
    *wrapper = real;
    for (unsigned i = 0; i < pair_count; i++)
        if (pairs[i].wrapper == real)
            return BIND_EXPORT; /* the driver came back to us by itself: wrapping it once more would call in a circle */
    int64_t at = export_name && driver->proxy ? index_of(driver->proxy, export_name) : -1;
    if (at >= 0 && driver->reals[at] == real) {
        *wrapper = driver->proxy->slots[at];
        return BIND_EXPORT;
    }
    void *found = wrapper_of_address(real);
    if (found) {
        *wrapper = found;
        return BIND_EXPORT;
    }
    for (uint64_t i = 0; driver->proxy && i < driver->proxy->count; i++)
        if (driver->reals[i] == real)
            return BIND_EXPORT;
    found = export_name ? adopt(export_name, real) : NULL;
    if (found)
        *wrapper = found;
    return found ? BIND_ADOPTED : BIND_UNEXPORTED;
}

/* `reals`: the real function of each of the proxy's names, NULL where the driver lacks it. */
static void fill_entries(enum hook_lib lib, const struct cgpu_proxy *proxy, void **reals, bool first)
{
    for (const struct hook_entry *entry = __start_cgpu_entries; entry < __stop_cgpu_entries; entry++) {
        if (entry->lib != lib)
            continue;
        int64_t at = index_of(proxy, entry->name); /* cheaper than a dlsym(), above all than one that finds nothing */
        if (first) {
            *entry->real = at >= 0 ? reals[at] : dlsym(drivers[lib].handle, entry->name);
            if (*entry->real && entry->wrapper)
                add_pair(*entry->real, entry->wrapper);
        }
        if (at >= 0 && reals[at] && entry->wrapper)
            proxy->slots[at] = entry->wrapper;
    }
}

void cgpu_proxy_bind(const struct cgpu_proxy *proxy)
{
    if (proxy->abi != CGPU_ABI_VERSION || proxy->lib > HOOK_NVML) {
        hook_log("error", "proxy of another version abi=%u lib=%u ours=%u: write the proxies anew", proxy->abi, proxy->lib,
                 CGPU_ABI_VERSION);
        return; /* its functions go on answering that the driver is not initialised */
    }
    enum hook_lib lib = (enum hook_lib)proxy->lib;
    struct driver *driver = &drivers[lib];
    if (driver->state == CLOSED)
        open_driver(driver, proxy->real_path);
    bool open = driver->state == OPEN;
    void **reals = open ? calloc(proxy->count, sizeof *reals) : NULL;
    bool *known = open ? calloc(proxy->count, sizeof *known) : NULL;
    if (!reals || !known) { /* without room for the tables, as if there were no library */
        for (uint64_t i = 0; i < proxy->count; i++)
            proxy->slots[i] = fallback(lib, false, proxy->names[i]);
        goto out;
    }
    unknown_mark(lib, proxy->names, proxy->count, known);
    for (uint64_t i = 0; i < proxy->count; i++) {
        reals[i] = lookup(driver->handle, proxy->names[i]);
        if (!reals[i])
            proxy->slots[i] = fallback(lib, true, proxy->names[i]);
        else if (known[i])
            proxy->slots[i] = reals[i];
        else
            proxy->slots[i] = unknown_entry(proxy->names[i], reals[i], &proxy->slots[i]);
    }
    bool first = !driver->proxy; /* a second copy of the proxy in this process: its slots only */
    fill_entries(lib, proxy, reals, first);
    if (first) {
        driver->proxy = proxy;
        driver->reals = reals;
        reals = NULL;
    }
out:
    free(reals);
    free(known);
    dlerror(); /* a name that was not found must not look to the program like the failure of its own dlopen() */
}
