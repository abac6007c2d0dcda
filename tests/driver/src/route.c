/* Reaches the driver by the way that argv[1] names, then asks for more than its quota and keeps the device busy.
 * Prints the result of an allocation past the quota, of one within it, of the launches, and whether the library that
 * answered is the one at argv[3]. argv[2]: the library as this way wants it named. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define TOO_MUCH (2ul << 30)
#define ENOUGH (512ul << 20)
#define LAUNCHES 20

static int (*init)(unsigned), (*retain)(void **, int), (*use)(void *), (*alloc)(uint64_t *, size_t);
static int (*load)(void **, const void *), (*function)(void **, void *, const char *), (*synchronize)(void);
static int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);

static const struct { const char *name, *asked; void **to; int version; } wanted[] = {
    {"cuInit", "cuInit", (void **)&init, 2000},
    {"cuDevicePrimaryCtxRetain", "cuDevicePrimaryCtxRetain", (void **)&retain, 7000},
    {"cuCtxSetCurrent", "cuCtxSetCurrent", (void **)&use, 4000},
    {"cuMemAlloc_v2", "cuMemAlloc", (void **)&alloc, 3020},
    {"cuModuleLoadData", "cuModuleLoadData", (void **)&load, 2000},
    {"cuModuleGetFunction", "cuModuleGetFunction", (void **)&function, 2000},
    {"cuCtxSynchronize", "cuCtxSynchronize", (void **)&synchronize, 2000},
    {"cuLaunchKernel", "cuLaunchKernel", (void **)&launch, 4000},
};

#ifdef LINKED
/* bound by the loader: at the start where this is linked to the driver, else lazily, at the first call */
int cuInit(unsigned), cuDevicePrimaryCtxRetain(void **, int), cuCtxSetCurrent(void *), cuMemAlloc_v2(uint64_t *, size_t);
int cuModuleLoadData(void **, const void *), cuModuleGetFunction(void **, void *, const char *), cuCtxSynchronize(void);
int cuLaunchKernel(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **, void **);
/* called, never taken the address of: that would not go through the PLT */
static int call_init(unsigned a) { return cuInit(a); }
static int call_retain(void **a, int b) { return cuDevicePrimaryCtxRetain(a, b); }
static int call_use(void *a) { return cuCtxSetCurrent(a); }
static int call_alloc(uint64_t *a, size_t b) { return cuMemAlloc_v2(a, b); }
static int call_load(void **a, const void *b) { return cuModuleLoadData(a, b); }
static int call_function(void **a, void *b, const char *c) { return cuModuleGetFunction(a, b, c); }
static int call_synchronize(void) { return cuCtxSynchronize(); }
static int call_launch(void *f, unsigned a, unsigned b, unsigned c, unsigned d, unsigned e, unsigned g, unsigned h, void *s,
                       void **p, void **x) { return cuLaunchKernel(f, a, b, c, d, e, g, h, s, p, x); }
static void by_linking(void)
{
    init = call_init, retain = call_retain, use = call_use, alloc = call_alloc, load = call_load;
    function = call_function, synchronize = call_synchronize, launch = call_launch;
}
#else
static void by_linking(void) {}
#endif

static void *must(void *found, const char *what)
{
    if (found)
        return found;
    const char *why = dlerror();
    fprintf(stderr, "%s: %s\n", what, why ? why : "not found");
    exit(9);
}

static void each(void *handle, int versioned)
{
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++)
        *wanted[i].to = must(versioned ? dlvsym(handle, wanted[i].name, "CUDA_1") : dlsym(handle, wanted[i].name),
                             wanted[i].name);
}

static void by_get_proc_address(void *handle, int v2)
{
    int (*get2)(const char *, void **, int, uint64_t, int *) = must(dlsym(handle, "cuGetProcAddress_v2"), "v2");
    int (*get1)(const char *, void **, int, uint64_t) = must(dlsym(handle, "cuGetProcAddress"), "v1");
    for (size_t i = 0; i < sizeof wanted / sizeof *wanted; i++) {
        int status = 0, version = wanted[i].version;
        if (v2 ? get2(wanted[i].asked, wanted[i].to, version, 0, &status) : get1(wanted[i].asked, wanted[i].to, version, 0))
            exit(8);
        must(*wanted[i].to, wanted[i].asked);
    }
}

int route(const char *way, const char *library)
{
    if (!strcmp(way, "linked"))
        by_linking();
    else if (!strcmp(way, "linked-rtld-next"))
        each(RTLD_NEXT, 0);
    else if (!strcmp(way, "linked-rtld-default"))
        each(RTLD_DEFAULT, 0);
    else if (!strcmp(way, "dlopen"))
        each(must(dlopen(library, RTLD_NOW), library), 0);
    else if (!strcmp(way, "dlvsym"))
        each(must(dlopen(library, RTLD_NOW), library), 1);
    else if (!strcmp(way, "rtld-default"))
        must(dlopen(library, RTLD_NOW | RTLD_GLOBAL), library), each(RTLD_DEFAULT, 0);
    else if (!strcmp(way, "deepbind"))
        each(must(dlopen(library, RTLD_NOW | RTLD_DEEPBIND), library), 0);
    else if (!strcmp(way, "dlmopen"))
        each(must(dlmopen(LM_ID_NEWLM, library, RTLD_NOW), library), 0);
    else if (!strcmp(way, "lazy-plt"))
        must(dlopen(library, RTLD_LAZY | RTLD_GLOBAL), library), by_linking();
    else if (!strcmp(way, "get-proc-address"))
        by_get_proc_address(must(dlopen(library, RTLD_NOW), library), 0);
    else if (!strcmp(way, "get-proc-address-v2"))
        by_get_proc_address(must(dlopen(library, RTLD_NOW), library), 1);
    else
        return 7;
    static const char ptx[] = ".version 7.0\n.target sm_52\n.address_size 64\n.visible .entry spin_us2000()\n{\n ret;\n}\n";
    void *context, *module, *kernel;
    uint64_t pointer;
    if (init(0) || retain(&context, 0) || use(context) || load(&module, ptx) || function(&kernel, module, "spin_us2000"))
        return 6;
    int past = alloc(&pointer, TOO_MUCH), within = alloc(&pointer, ENOUGH), launched = 0;
    for (int i = 0; i < LAUNCHES && !launched; i++)
        launched = launch(kernel, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    launched = launched ? launched : synchronize();
    printf("%d %d %d\n", past, within, launched);
    return 0;
}

#ifndef PLUGIN
int main(int count, char **argv)
{
    if (count == 3)
        return route(argv[1], argv[2]);
    /* argv[3]: a plugin with a route() of its own */
    void *plugin = must(dlopen(argv[3], RTLD_NOW | RTLD_LOCAL | RTLD_DEEPBIND), argv[3]);
    int (*its)(const char *, const char *) = must(dlsym(plugin, "route"), "route");
    return its(argv[1], argv[2]);
}
#endif
