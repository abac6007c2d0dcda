/* nvml.h: what the files nvml*.c share. */
#ifndef CGPU_NVML_H
#define CGPU_NVML_H
#include "hook.h"

/* The instance's GPU behind a handle, or -1: not one of its, or no NVML yet. Needs hook_join(true) before. */
int nvml_gpu(nvmlDevice_t device);
/* Its place among the GPUs that the program sees, or -1: it does not see that one, or no NVML yet. Likewise. */
int nvml_place(nvmlDevice_t device);
/* Counts within the GPUs that the program sees. `real` counts in the node, and answers for an index that is not there. */
nvmlReturn_t nvml_handle_by_index(unsigned int index, nvmlDevice_t *device,
                                  nvmlReturn_t (*real)(unsigned int index, nvmlDevice_t *device));
#endif
