/* memset.c: the 30 fills. */
#include "cuda/sim.h"

static CUresult fill(bool ptds, CUdeviceptr at, size_t pitch, uint32_t value, uint32_t element, size_t width,
                     size_t height,
                     CUstream stream, bool sync)
{
    struct fill f = {.dst = (uint8_t *)(uintptr_t)at, .pitch = pitch, .width = width, .height = height, .value = value,
                     .element = element};
    CHECK_INIT();
    return fill_request(ptds, stream, &f, sync);
}

#define ENTRY(name, ptds, params, pitch, element, height, stream, sync) \
    API name params; \
    API name params { return fill(ptds, at, pitch, value, element, width, height, stream, sync); }

typedef CUdeviceptr_v1 P1;
typedef CUdeviceptr P2;

#define FILL1D(name, type, element) \
    ENTRY(name, false, (P1 at, type value, unsigned int width), 0, element, 1, NULL, true) \
    ENTRY(name##_v2, false, (P2 at, type value, size_t width), 0, element, 1, NULL, true) \
    ENTRY(name##_v2_ptds, true, (P2 at, type value, size_t width), 0, element, 1, NULL, true) \
    ENTRY(name##Async, false, (P2 at, type value, size_t width, CUstream stream), 0, element, 1, stream, false) \
    ENTRY(name##Async_ptsz, true, (P2 at, type value, size_t width, CUstream stream), 0, element, 1, stream, false)

#define BOX1(type) (P1 at, unsigned int pitch, type value, unsigned int width, unsigned int height)
#define BOX2(type) (P2 at, size_t pitch, type value, size_t width, size_t height)
#define BOX2_ASYNC(type) (P2 at, size_t pitch, type value, size_t width, size_t height, CUstream stream)
#define FILL2D(name, type, element) \
    ENTRY(name, false, BOX1(type), pitch, element, height, NULL, true) \
    ENTRY(name##_v2, false, BOX2(type), pitch, element, height, NULL, true) \
    ENTRY(name##_v2_ptds, true, BOX2(type), pitch, element, height, NULL, true) \
    ENTRY(name##Async, false, BOX2_ASYNC(type), pitch, element, height, stream, false) \
    ENTRY(name##Async_ptsz, true, BOX2_ASYNC(type), pitch, element, height, stream, false)

FILL1D(cuMemsetD8, unsigned char, 1)
FILL1D(cuMemsetD16, unsigned short, 2)
FILL1D(cuMemsetD32, unsigned int, 4)
FILL2D(cuMemsetD2D8, unsigned char, 1)
FILL2D(cuMemsetD2D16, unsigned short, 2)
FILL2D(cuMemsetD2D32, unsigned int, 4)
