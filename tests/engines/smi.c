/* smi.c: what nvidia-smi would show of memory: a line a GPU, `INDEX USED TOTAL` in MiB, then a line a process, `PID`. */
#include <dlfcn.h>
#include <stdio.h>

struct memory {
    unsigned long long total, free, used;
};
struct process {
    unsigned pid;
    unsigned long long memory;
    unsigned gpu_instance, compute_instance;
};

int main(void)
{
    void *library = dlopen("libnvidia-ml.so.1", RTLD_NOW), *gpu;
    if (!library) {
        fprintf(stderr, "%s\n", dlerror());
        return 2;
    }
    int (*init)(void), (*count)(unsigned *), (*handle)(unsigned, void **), (*memory)(void *, struct memory *),
        (*processes)(void *, unsigned *, struct process *);
    *(void **)&init = dlsym(library, "nvmlInit_v2");
    *(void **)&count = dlsym(library, "nvmlDeviceGetCount_v2");
    *(void **)&handle = dlsym(library, "nvmlDeviceGetHandleByIndex_v2");
    *(void **)&memory = dlsym(library, "nvmlDeviceGetMemoryInfo");
    *(void **)&processes = dlsym(library, "nvmlDeviceGetComputeRunningProcesses_v3");
    unsigned gpus;
    int error = init();
    if (error || (error = count(&gpus)))
        return error;
    for (unsigned i = 0; i < gpus; i++) {
        struct memory m;
        struct process p[64];
        unsigned n = 64;
        if ((error = handle(i, &gpu)) || (error = memory(gpu, &m)) || (error = processes(gpu, &n, p)))
            return error;
        printf("%u %llu %llu\n", i, m.used >> 20, m.total >> 20);
        for (unsigned k = 0; k < n; k++)
            printf("%u\n", p[k].pid);
    }
    return 0;
}
