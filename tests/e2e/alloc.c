/* alloc.c: a small CUDA program that starts fast. Allocates so many bytes, says what came of it, waits for the end of its
 * input. Of several sizes it allocates each and frees every second one.
 *
 *     alloc BYTES...                says `RESULT`, that of the first call that failed (0: none)
 *     alloc fork CHILDREN BYTES     children that do the same by fork and by fork + exec, by turns; says how many failed
 */
#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

static int work(char **sizes)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (!driver) {
        fprintf(stderr, "%s\n", dlerror());
        return 999;
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
    for (int i = 0; !result && sizes[i]; i++) {
        unsigned long long block;
        result = alloc(&block, strtoull(sizes[i], NULL, 10));
        if (!result && i & 1)
            result = release(block);
    }
    return result;
}

static int forks(int children, char **sizes)
{
    int failed = 0, status;
    for (int i = 0; i < children; i++)
        if (fork() == 0) {
            if (i & 1)
                execl("/proc/self/exe", "alloc", sizes[0], (char *)NULL);
            _exit(work(sizes) != 0);
        }
    while (wait(&status) > 0)
        failed += status != 0;
    return failed;
}

int main(int count, char **arguments)
{
    char byte;
    int forking = count == 4 && strcmp(arguments[1], "fork") == 0;
    int result = forking ? forks(atoi(arguments[2]), arguments + 3) : work(arguments + 1);
    printf("%d\n", result);
    fflush(stdout);
    while (read(0, &byte, 1) > 0)
        ;
    return result != 0;
}
