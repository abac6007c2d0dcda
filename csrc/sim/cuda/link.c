/* link.c: the linker takes anything and hands back the last of it that a module can be made of. */
#include <stdlib.h>
#include <string.h>
#include "cuda/sim.h"

struct CUlinkState_st {
    struct object object;
    char *image;
    size_t size;
};

API cuLinkCreate(unsigned int count, CUjit_option *options, void **values, CUlinkState *state);
API cuLinkCreate_v2(unsigned int count, CUjit_option *options, void **values, CUlinkState *state);
API cuLinkAddData(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name, unsigned int count,
                  CUjit_option *options, void **values);
API cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
                     unsigned int count,
                     CUjit_option *options, void **values);
API cuLinkComplete(CUlinkState state, void **image, size_t *size);
API cuLinkDestroy(CUlinkState state);

API cuLinkCreate_v2(unsigned int count, CUjit_option *options, void **values, CUlinkState *state)
{
    struct CUctx_st *ctx;
    (void)count;
    (void)options;
    (void)values;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!state)
        return CUDA_ERROR_INVALID_VALUE;
    *state = object_new(OBJ_LINK, sizeof **state, ctx);
    return *state ? CUDA_SUCCESS : CUDA_ERROR_OUT_OF_MEMORY;
}

API cuLinkCreate(unsigned int count, CUjit_option *options, void **values, CUlinkState *state)
{
    return cuLinkCreate_v2(count, options, values, state);
}

API cuLinkAddData_v2(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name,
                     unsigned int count,
                     CUjit_option *options, void **values)
{
    (void)name;
    (void)count;
    (void)options;
    (void)values;
    CHECK_INIT();
    if (!object_is(state, OBJ_LINK))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!data || (unsigned)type > CU_JIT_INPUT_NVVM)
        return CUDA_ERROR_INVALID_VALUE;
    if (state->image && type != CU_JIT_INPUT_PTX && type != CU_JIT_INPUT_CUBIN)
        return CUDA_SUCCESS; /* a library of device functions: no kernels in it */
    char *image = calloc(1, size + 64);
    if (!image)
        return CUDA_ERROR_OUT_OF_MEMORY;
    memcpy(image, data, size);
    free(state->image);
    state->image = image;
    state->size = size;
    return CUDA_SUCCESS;
}

API cuLinkAddData(CUlinkState state, CUjitInputType type, void *data, size_t size, const char *name, unsigned int count,
                  CUjit_option *options, void **values)
{
    return cuLinkAddData_v2(state, type, data, size, name, count, options, values);
}

API cuLinkComplete(CUlinkState state, void **image, size_t *size)
{
    CHECK_INIT();
    if (!object_is(state, OBJ_LINK))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!image || !state->image)
        return CUDA_ERROR_INVALID_VALUE;
    *image = state->image;
    if (size)
        *size = state->size;
    return CUDA_SUCCESS;
}

API cuLinkDestroy(CUlinkState state)
{
    CHECK_INIT();
    if (!object_is(state, OBJ_LINK))
        return CUDA_ERROR_INVALID_HANDLE;
    free(state->image);
    object_free(state);
    return CUDA_SUCCESS;
}
