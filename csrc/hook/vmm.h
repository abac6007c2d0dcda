/* vmm.h: what holds memory by handle besides handles and mappings. */
#ifndef CGPU_VMM_H
#define CGPU_VMM_H
#include <stdint.h>

/* A sparse or deferred array is gone, and with it what was mapped into it. */
void vmm_array_destroyed(uint64_t array);
#endif
