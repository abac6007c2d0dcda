/* nvml.h: what nvml.c and nvml_process.c share. */
#ifndef CGPU_NVML_H
#define CGPU_NVML_H
#include "hook.h"

/* The instance's GPU behind a handle, or -1: not one of its, or no NVML yet. Needs hook_join(true) before. */
int nvml_gpu(nvmlDevice_t device);
#endif
