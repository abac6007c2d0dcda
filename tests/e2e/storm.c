/* storm.c: takes so many bytes, holds them for a moment and is without them for a moment, some 10,000 times a second. Ends
 * when it is refused. */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

/* Up to 100 us, never the same. */
static void a_moment(void)
{
    struct timespec t;
    long long now, until = 0;
    do {
        clock_gettime(CLOCK_MONOTONIC, &t);
        now = t.tv_sec * 1000000000LL + t.tv_nsec;
        if (!until)
            until = now + random() % 100000;
    } while (now < until);
}

int main(int count, char **arguments)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (!driver || count != 2) {
        fprintf(stderr, "%s\n", driver ? "storm BYTES" : dlerror());
        return 1;
    }
    int (*init)(unsigned), (*retain)(void **, int), (*current)(void *), (*alloc)(unsigned long long *, size_t),
        (*release)(unsigned long long);
    *(void **)&init = dlsym(driver, "cuInit");
    *(void **)&retain = dlsym(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&current = dlsym(driver, "cuCtxSetCurrent");
    *(void **)&alloc = dlsym(driver, "cuMemAlloc_v2");
    *(void **)&release = dlsym(driver, "cuMemFree_v2");
    int result = init(0);
    if (!result)
        result = retain(&context, 0);
    if (!result)
        result = current(context);
    while (!result) {
        unsigned long long block;
        result = alloc(&block, strtoull(arguments[1], NULL, 10));
        a_moment();
        if (!result)
            result = release(block);
        a_moment();
    }
    fprintf(stderr, "refused: %d\n", result);
    return result;
}
