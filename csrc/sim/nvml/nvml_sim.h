/* nvml_sim.h: the simulated NVML: the same GPUs as the simulated driver, seen from outside. */
#ifndef CGPU_SIM_NVML_H
#define CGPU_SIM_NVML_H
#include <stdbool.h>
#include "nvml_min.h"
#include "shared/state.h"

#define API __attribute__((visibility("default"))) nvmlReturn_t
#define DRIVER_VERSION "580.00.00-sim"
#define CUDA_DRIVER_VERSION 13000
#define TRY(call) \
    do { \
        nvmlReturn_t try_ = (call); \
        if (try_ != NVML_SUCCESS) \
            return try_; \
    } while (0)

struct nvmlDevice_st {
    struct sim_gpu conf;
    struct sim_map map;              /* opened when first needed, never closed: see state.h */
    unsigned int index;
};

/* UNINITIALIZED, INVALID_ARGUMENT, or success; `out` is what must not be NULL. */
nvmlReturn_t nvml_device(nvmlDevice_t device, const void *out);
/* Locks its shared state, brought up to now and the dead gone. */
nvmlReturn_t nvml_lock(nvmlDevice_t device);
void nvml_unlock(nvmlDevice_t device);

/* Processes with a context, at most SIM_PROCS; pids as this process counts them, and none that it does not see. */
struct nvml_process { unsigned int pid; uint64_t used; };
nvmlReturn_t nvml_processes(nvmlDevice_t device, struct nvml_process *list, unsigned int *count);
#endif
