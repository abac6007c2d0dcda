/* Wrappers that only the tests of the binding use, and a gate with one slot, so that the framework is tested by itself. */
#include <stdio.h>
#include <stdlib.h>
#include "client.h"
#include "hook.h"

static struct cgpu_slot slot;
static struct gate gate = {.slot = &slot};

int gate_count(void) { return getenv("TEST_JOINED") ? 1 : 0; }
struct gate *gate_of(int index) { return index == 0 && gate_count() ? &gate : NULL; }

/* For the program under test: dlsym() finds these in libcgpu-hook.so.1. */
__attribute__((visibility("default"))) unsigned long test_unknown_in_slot(void);
__attribute__((visibility("default"))) unsigned long test_unknown_in_slot(void) { return slot.unknown; }
__attribute__((visibility("default"))) void test_publish(void);
__attribute__((visibility("default"))) void test_publish(void) { hook_count_unknown(); }
__attribute__((visibility("default"))) unsigned long test_wrapped_calls;
unsigned long test_wrapped_calls;
__attribute__((visibility("default"))) void test_log(const char *level, const char *text);
__attribute__((visibility("default"))) void test_log(const char *level, const char *text) { hook_log(level, "%s", text); }

#define COUNT() __atomic_fetch_add(&test_wrapped_calls, 1, __ATOMIC_RELAXED)

CU_NEED(CUresult, cuInit, (unsigned flags));
CU_NEED(CUresult, cuNoDriverHasThis, (void));
CU_WRAP(CUresult, cuMemAlloc_v2, (CUdeviceptr *ptr, size_t bytes))
{
    COUNT();
    return REAL(cuMemAlloc_v2)(ptr, bytes);
}
CU_WRAP(CUresult, cuMemAlloc, (unsigned *ptr, unsigned bytes))
{
    COUNT();
    return REAL(cuMemAlloc)(ptr, bytes);
}
CU_WRAP(CUresult, cuStreamQuery_ptsz, (CUstream stream))
{
    COUNT();
    return REAL(cuStreamQuery_ptsz)(stream);
}
CU_WRAP(CUresult, cuStreamQuery, (CUstream stream))
{
    COUNT();
    return REAL(cuStreamQuery)(stream);
}
/* 550 exports no such name, but a driver may hand it out: see adopt() in init.c */
CU_WRAP(CUresult, cuGreenCtxGetId, (CUgreenCtx context, unsigned long long *id))
{
    COUNT();
    return REAL(cuGreenCtxGetId)(context, id);
}
NVML_WRAP(nvmlReturn_t, nvmlDeviceGetCount_v2, (unsigned *count))
{
    COUNT();
    return REAL(nvmlDeviceGetCount_v2)(count);
}
