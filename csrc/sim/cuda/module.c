/* module.c: modules, and the libraries that are the same thing here: a CUlibrary is a CUmodule of no context, a
 * CUkernel
 * a CUfunction. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "cuda/sim.h"

/* ---- contents; under api_lock ---- */

struct CUfunc_st *module_function(struct CUmod_st *module, const char *name, bool add)
{
    for (struct CUfunc_st *function = module->functions; function; function = function->next)
        if (strcmp(function->name, name) == 0)
            return function;
    if (!add)
        return NULL;
    struct CUfunc_st *function = object_new(OBJ_FUNCTION, sizeof *function, NULL);
    if (!function || !(function->name = strdup(name)))
        return NULL;
    function->module = module;
    function_defaults(function);
    function->next = module->functions;
    module->functions = function;
    return function;
}

bool module_global(struct CUmod_st *module, const char *name, uint64_t size)
{
    struct global *global = calloc(1, sizeof *global);
    if (!global || !(global->name = strdup(name))) {
        free(global);
        return false;
    }
    global->size = size;
    global->next = module->globals;
    module->globals = global;
    return true;
}

/* NULL: it has taken none, or that went with its context. */
static struct block *image_of(const struct CUmod_st *module)
{
    struct block *block = module->image ? block_find(module->image) : NULL;
    return block && block->id == module->image_id ? block : NULL;
}

/* Takes the memory that a loaded module needs in the current context, once; a library may have none current yet. */
static CUresult take_image(struct CUmod_st *module)
{
    struct CUctx_st *ctx;
    struct block *block;
    if (image_of(module) || current_context(&ctx) != CUDA_SUCCESS)
        return CUDA_SUCCESS;
    uint64_t bytes = sim_env_u64("CGPU_SIM_MODULE_BYTES", ctx->gpu->conf.module_bytes);
    if (!bytes)
        return CUDA_SUCCESS;
    TRY(block_alloc(ctx, ctx->gpu, bytes, BLOCK_GLOBAL, false, &block));
    module->image = block->base;
    module->image_id = block->id;
    return CUDA_SUCCESS;
}

void module_release(struct CUmod_st *module)
{
    struct block *image = image_of(module);
    if (image)
        block_destroy(image);
    while (module->functions) {
        struct CUfunc_st *function = module->functions;
        module->functions = function->next;
        free(function->name);
        object_free(function);
    }
    while (module->globals) {
        struct global *global = module->globals;
        struct block *block = global->at ? block_find(global->at) : NULL;
        module->globals = global->next;
        if (block && block->base == global->at && block->kind == BLOCK_GLOBAL)
            block_destroy(block);
        free(global->name);
        free(global);
    }
    object_free(module);
}

static CUresult load(const void *image, struct CUctx_st *ctx, bool library, struct CUmod_st **out)
{
    struct CUmod_st *module = object_new(OBJ_MODULE, sizeof *module, ctx);
    if (!module)
        return CUDA_ERROR_OUT_OF_MEMORY;
    module->library = library;
    if (!image_parse(image, module)) {
        module_release(module);
        return CUDA_ERROR_OUT_OF_MEMORY;
    }
    CUresult result = take_image(module);
    if (result != CUDA_SUCCESS) {
        module_release(module);
        return result;
    }
    *out = module;
    return CUDA_SUCCESS;
}

static CUresult read_file(const char *path, void **image)
{
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0)
        return path ? CUDA_ERROR_FILE_NOT_FOUND : CUDA_ERROR_INVALID_VALUE;
    off_t size = lseek(fd, 0, SEEK_END);
    char *text = size >= 0 ? calloc(1, (size_t)size + 64) : NULL;
    ssize_t got = text ? pread(fd, text, (size_t)size, 0) : -1;
    close(fd);
    if (got != size) {
        free(text);
        return CUDA_ERROR_FILE_NOT_FOUND;
    }
    *image = text;
    return CUDA_SUCCESS;
}

/* Variables get their memory when first asked for, in the context current then. */
static CUresult get_global(struct CUmod_st *module, const char *name, CUdeviceptr *pointer, size_t *bytes)
{
    struct CUctx_st *ctx;
    TRY(current_context(&ctx));
    TRY(take_image(module));
    for (struct global *global = module->globals; global; global = global->next) {
        if (strcmp(global->name, name) != 0)
            continue;
        if (!global->at) {
            struct block *block;
            TRY(block_alloc(ctx, ctx->gpu, global->size, BLOCK_GLOBAL, false, &block));
            memset((void *)(uintptr_t)block->base, 0, global->size);
            global->at = block->base;
        }
        if (pointer)
            *pointer = global->at;
        if (bytes)
            *bytes = global->size;
        return CUDA_SUCCESS;
    }
    return CUDA_ERROR_NOT_FOUND;
}

static CUresult locked_global(struct CUmod_st *module, const char *name, CUdeviceptr *pointer, size_t *bytes)
{
    CHECK_INIT();
    if (!object_is(module, OBJ_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!name)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = get_global(module, name, pointer, bytes);
    pthread_mutex_unlock(&api_lock);
    return result;
}

static CUresult locked_function(struct CUmod_st *module, const char *name, struct CUfunc_st **out)
{
    CHECK_INIT();
    if (!object_is(module, OBJ_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !name)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = take_image(module);
    *out = result == CUDA_SUCCESS ? module_function(module, name, module->open) : NULL;
    pthread_mutex_unlock(&api_lock);
    return *out || result != CUDA_SUCCESS ? result : CUDA_ERROR_NOT_FOUND;
}

static CUresult count_functions(struct CUmod_st *module, struct CUfunc_st **out, unsigned int room, unsigned int *count)
{
    CHECK_INIT();
    if (!object_is(module, OBJ_MODULE))
        return CUDA_ERROR_INVALID_HANDLE;
    unsigned int n = 0;
    pthread_mutex_lock(&api_lock);
    for (struct CUfunc_st *function = module->functions; function; function = function->next, n++)
        if (out && n < room)
            out[n] = function;
    pthread_mutex_unlock(&api_lock);
    if (count)
        *count = n;
    return CUDA_SUCCESS;
}

/* ---- modules ---- */

API cuModuleLoad(CUmodule *module, const char *path);
API cuModuleLoadData(CUmodule *module, const void *image);
API cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values);
API cuModuleLoadFatBinary(CUmodule *module, const void *image);
API cuModuleUnload(CUmodule module);
API cuModuleGetLoadingMode(CUmoduleLoadingMode *mode);
API cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name);
API cuModuleGetFunctionCount(unsigned int *count, CUmodule module);
API cuModuleEnumerateFunctions(CUfunction *functions, unsigned int room, CUmodule module);
API cuModuleGetGlobal(CUdeviceptr_v1 *pointer, unsigned int *bytes, CUmodule module, const char *name);
API cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name);

API cuModuleLoadData(CUmodule *module, const void *image)
{
    struct CUctx_st *ctx;
    CHECK_INIT();
    TRY(current_context(&ctx));
    if (!module || !image)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = load(image, ctx, false, module);
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* The compiler's options; its logs are empty. */
static void clear_logs(unsigned int count, const CUjit_option *options, void **values)
{
    for (unsigned int i = 0; options && values && i < count; i++)
        if (options[i] == 4 || options[i] == 6) /* sizes of the info and error logs, in and out */
            values[i] = NULL;
}

API cuModuleLoadDataEx(CUmodule *module, const void *image, unsigned int count, CUjit_option *options, void **values)
{
    CUresult result = cuModuleLoadData(module, image);
    clear_logs(count, options, values);
    return result;
}

API cuModuleLoadFatBinary(CUmodule *module, const void *image)
{
    return cuModuleLoadData(module, image);
}

API cuModuleLoad(CUmodule *module, const char *path)
{
    void *image;
    CHECK_INIT();
    TRY(read_file(path, &image));
    CUresult result = cuModuleLoadData(module, image);
    free(image);
    return result;
}

API cuModuleUnload(CUmodule module)
{
    CHECK_INIT();
    if (!object_is(module, OBJ_MODULE) || module->library)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&api_lock);
    queue_wait_all(&module->object.ctx->gpu->queue);
    module_release(module);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuModuleGetLoadingMode(CUmoduleLoadingMode *mode)
{
    CHECK_INIT();
    if (!mode)
        return CUDA_ERROR_INVALID_VALUE;
    *mode = CU_MODULE_LAZY_LOADING;
    return CUDA_SUCCESS;
}

API cuModuleGetFunction(CUfunction *function, CUmodule module, const char *name)
{
    return locked_function(module, name, function);
}

API cuModuleGetFunctionCount(unsigned int *count, CUmodule module)
{
    return count ? count_functions(module, NULL, 0, count) : CUDA_ERROR_INVALID_VALUE;
}

API cuModuleEnumerateFunctions(CUfunction *functions, unsigned int room, CUmodule module)
{
    return functions ? count_functions(module, functions, room, NULL) : CUDA_ERROR_INVALID_VALUE;
}

API cuModuleGetGlobal_v2(CUdeviceptr *pointer, size_t *bytes, CUmodule module, const char *name)
{
    return locked_global(module, name, pointer, bytes);
}

API cuModuleGetGlobal(CUdeviceptr_v1 *pointer, unsigned int *bytes, CUmodule module, const char *name)
{
    CUdeviceptr wide;
    size_t size;
    TRY(locked_global(module, name, &wide, &size));
    if (pointer && wide > UINT32_MAX)
        return CUDA_ERROR_INVALID_VALUE;
    if (pointer)
        *pointer = (CUdeviceptr_v1)wide;
    if (bytes)
        *bytes = (unsigned int)size;
    return CUDA_SUCCESS;
}

/* ---- libraries ---- */

API cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *options, void **values, unsigned int count,
                      CUlibraryOption *library_options, void **library_values, unsigned int library_count);
API cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options, void **values,
                          unsigned int count,
                          CUlibraryOption *library_options, void **library_values, unsigned int library_count);
API cuLibraryUnload(CUlibrary library);
API cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name);
API cuLibraryGetKernelCount(unsigned int *count, CUlibrary library);
API cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int room, CUlibrary library);
API cuLibraryGetModule(CUmodule *module, CUlibrary library);
API cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name);
API cuLibraryGetManaged(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name);
API cuKernelGetFunction(CUfunction *function, CUkernel kernel);
API cuKernelGetLibrary(CUlibrary *library, CUkernel kernel);

API cuLibraryLoadData(CUlibrary *library, const void *image, CUjit_option *options, void **values, unsigned int count,
                      CUlibraryOption *library_options, void **library_values, unsigned int library_count)
{
    CHECK_INIT();
    (void)library_options;
    (void)library_values;
    (void)library_count;
    if (!library || !image)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = load(image, NULL, true, (struct CUmod_st **)library);
    pthread_mutex_unlock(&api_lock);
    clear_logs(count, options, values);
    return result;
}

API cuLibraryLoadFromFile(CUlibrary *library, const char *path, CUjit_option *options, void **values,
                          unsigned int count,
                          CUlibraryOption *library_options, void **library_values, unsigned int library_count)
{
    void *image;
    CHECK_INIT();
    TRY(read_file(path, &image));
    CUresult result =
        cuLibraryLoadData(library, image, options, values, count, library_options, library_values, library_count);
    free(image);
    return result;
}

API cuLibraryUnload(CUlibrary library)
{
    struct CUmod_st *module = (struct CUmod_st *)library;
    CHECK_INIT();
    if (!object_is(module, OBJ_MODULE) || !module->library)
        return CUDA_ERROR_INVALID_HANDLE;
    pthread_mutex_lock(&api_lock);
    for (int i = 0; i < gpu_count; i++)
        queue_wait_all(&gpus[i]->queue);
    module_release(module);
    pthread_mutex_unlock(&api_lock);
    return CUDA_SUCCESS;
}

API cuLibraryGetKernel(CUkernel *kernel, CUlibrary library, const char *name)
{
    return locked_function((struct CUmod_st *)library, name, (struct CUfunc_st **)kernel);
}

API cuLibraryGetKernelCount(unsigned int *count, CUlibrary library)
{
    return cuModuleGetFunctionCount(count, (CUmodule)library);
}

API cuLibraryEnumerateKernels(CUkernel *kernels, unsigned int room, CUlibrary library)
{
    return cuModuleEnumerateFunctions((CUfunction *)kernels, room, (CUmodule)library);
}

API cuLibraryGetModule(CUmodule *module, CUlibrary library)
{
    CHECK_INIT();
    if (!module || !object_is(library, OBJ_MODULE))
        return module ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *module = (CUmodule)library;
    return CUDA_SUCCESS;
}

API cuLibraryGetGlobal(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name)
{
    return locked_global((struct CUmod_st *)library, name, pointer, bytes);
}

API cuLibraryGetManaged(CUdeviceptr *pointer, size_t *bytes, CUlibrary library, const char *name)
{
    return locked_global((struct CUmod_st *)library, name, pointer, bytes);
}

API cuKernelGetFunction(CUfunction *function, CUkernel kernel)
{
    CHECK_INIT();
    if (!function || !object_is(kernel, OBJ_FUNCTION))
        return function ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *function = (CUfunction)kernel;
    return CUDA_SUCCESS;
}

API cuKernelGetLibrary(CUlibrary *library, CUkernel kernel)
{
    CHECK_INIT();
    if (!library || !object_is(kernel, OBJ_FUNCTION))
        return library ? CUDA_ERROR_INVALID_HANDLE : CUDA_ERROR_INVALID_VALUE;
    *library = (CUlibrary)((struct CUfunc_st *)kernel)->module;
    return CUDA_SUCCESS;
}
