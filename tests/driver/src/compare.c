/* Prints everything that can be seen of a driver without a GPU; run against the real libraries and through the proxies. */
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include "cuda_api.h"

int main(int count, char **paths)
{
    void *cuda = dlopen(paths[1], RTLD_NOW), *nvml = dlopen(paths[2], RTLD_NOW);
    if (!cuda || !nvml)
        return puts(dlerror());
    int (*init)(unsigned) = dlsym(cuda, "cuInit"), (*get_version)(int *) = dlsym(cuda, "cuDriverGetVersion");
    int (*error)(int, const char **) = dlsym(cuda, "cuGetErrorName");
    const char *name = "?";
    int version = 0, result = init(0);
    get_version(&version);
    error(result, &name);
    printf("cuInit %d %s version %d\n", result, name, version);
    int (*get)(const char *, void **, int, uint64_t, int *) = dlsym(cuda, "cuGetProcAddress_v2");
    for (int i = 0; i < CUDA_API_ROWS; i++) {
        void *found = NULL;
        int status = -1;
        result = get(cuda_api_rows[i].name, &found, cuda_api_rows[i].version, (uint64_t)cuda_api_rows[i].flags, &status);
        printf("%s %d %d: %d %d %d export %d\n", cuda_api_rows[i].name, cuda_api_rows[i].version, cuda_api_rows[i].flags,
               result, status, found != NULL, dlsym(cuda, cuda_api_rows[i].export_name) != NULL);
    }
    int (*start)(void) = dlsym(nvml, "nvmlInit_v2");
    const char *(*text)(int) = dlsym(nvml, "nvmlErrorString");
    result = start();
    printf("nvmlInit %d %s\n", result, text(result));
    return 0;
}
