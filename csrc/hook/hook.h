/* hook.h: how a wrapper is declared, and what the parts of the hook offer each other.
 *
 * libcgpu-hook.so.1 holds the wrappers. The libcuda.so.1 and libnvidia-ml.so.1 that a program sees are *proxies* written on
 * the node by cgpusched.driver.proxy: they export exactly the names of the node's real library, each a jump through a table
 * that cgpu_proxy_bind() (init.c) fills: with our wrapper where there is one, with the real function where there is none.
 *
 * A wrapper costs one macro in the file it belongs to and nothing elsewhere:
 *
 *     CU_WRAP(CUresult, cuMemAlloc_v2, (CUdeviceptr *ptr, size_t bytes))
 *     {
 *         ...
 *         return REAL(cuMemAlloc_v2)(ptr, bytes);
 *     }
 *
 * It is offered only if the real library exports that name (or its cuGetProcAddress hands it out). CU_NEED declares a real
 * function that the hook itself calls without wrapping it; REAL(name) may be NULL there on old drivers: check have(name).
 */
#ifndef CGPU_HOOK_H
#define CGPU_HOOK_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "cgpu_abi.h"
#include "cuda_min.h"
#include "nvml_min.h"

enum hook_lib { HOOK_CUDA, HOOK_NVML };

struct hook_entry {
    const char *name;   /* exported name, e.g. "cuMemAlloc_v2" */
    void *wrapper;      /* NULL: only needed, not wrapped */
    void **real;        /* filled at bind time; stays NULL where the driver lacks it */
    enum hook_lib lib;
};

#define HOOK_ENTRY_(lib, name, wrapper) \
    static const struct hook_entry hook_entry_##name __attribute__((section("cgpu_entries"), used, aligned(8))) = \
        {#name, wrapper, (void **)&real_##name, lib}
#define HOOK_WRAP_(lib, ret, name, args) \
    static ret (*real_##name) args; \
    static ret wrap_##name args; \
    HOOK_ENTRY_(lib, name, (void *)wrap_##name); \
    static ret wrap_##name args
#define HOOK_NEED_(lib, ret, name, args) \
    static ret (*real_##name) args; \
    HOOK_ENTRY_(lib, name, NULL)

#define CU_WRAP(ret, name, args)   HOOK_WRAP_(HOOK_CUDA, ret, name, args)
#define CU_NEED(ret, name, args)   HOOK_NEED_(HOOK_CUDA, ret, name, args)
#define NVML_WRAP(ret, name, args) HOOK_WRAP_(HOOK_NVML, ret, name, args)
#define NVML_NEED(ret, name, args) HOOK_NEED_(HOOK_NVML, ret, name, args)
#define REAL(name) real_##name
#define have(name) (real_##name != NULL)

/* One name may be declared in several files (each has its own static pointer); the registry fills all of them. Only one
 * file may WRAP a name. Linker-made bounds of the section: */
extern const struct hook_entry __start_cgpu_entries[] __attribute__((visibility("hidden")));
extern const struct hook_entry __stop_cgpu_entries[] __attribute__((visibility("hidden")));

/* ---- init.c: binding and life ---- */

/* What a proxy hands over from its constructor. `names` and `slots` have `count` entries. */
struct cgpu_proxy {
    uint32_t abi;               /* CGPU_ABI_VERSION */
    uint32_t lib;               /* enum hook_lib */
    const char *real_path;      /* the library this proxy was made from; CGPU_DRIVER_DIR in the environment overrides its folder */
    uint64_t count;
    const char *const *names;
    void **slots;
};
__attribute__((visibility("default"))) void cgpu_proxy_bind(const struct cgpu_proxy *proxy);

/* The path of `real/NAME` beside this library, where `cgpuctl run` mounts what belongs to the program. false: too long. */
bool hook_covered(const char *name, char *path, size_t room);

/* A line on stderr or CGPU_LOG, rate-limited; never on stdout; keeps errno. level: "error", "warning", "info", "debug". */
void hook_log(const char *level, const char *format, ...) __attribute__((format(printf, 2, 3)));

/* unknown.c: carries the count of unknown driver functions over into this process's slots; after every join and rejoin. */
void hook_count_unknown(void);

/* ---- visible.c: which GPUs this process has, in its order ---- */

/* Joins the instance if there is one (CGPU_SOCKET, else that of the mount namespace, else CGPU_DEFAULT_SOCKET); idempotent, thread-safe; after fork the child
 * joins anew. false: no instance, everything passes through untouched. */
bool hook_join(bool for_nvml);
int hook_gpus(void);                          /* 0 without an instance */
int hook_gpu_of_device(CUdevice device);      /* index into the instance's GPUs, or -1; valid after cuInit */
int hook_gpu_of_uuid(const uint8_t uuid[16]); /* likewise */
int hook_current_gpu(void);                   /* of the calling thread's current context, or -1 */

#define CGPU_DEFAULT_SOCKET "/usr/local/cgpu/sock/gate.sock"
#endif
