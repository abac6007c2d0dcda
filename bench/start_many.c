/* start_many.c: how long it takes until many processes that are started at once have all made their first allocation.
 *
 *     start_many COUNT BYTES [hold]
 *
 * Starts itself COUNT times by fork and exec; each starts CUDA, allocates BYTES and reports. Prints "GRANTED NS": how
 * many were granted theirs, and the time from the first fork to the last report. All hold what they have until then,
 * with `hold` until standard input ends. Links against libcuda.so.1 through the PLT: run it with the bare driver and
 * with the proxy in LD_LIBRARY_PATH. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

typedef void *CUcontext;
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(CUcontext *, int);
int cuCtxSetCurrent(CUcontext);
int cuMemAlloc_v2(unsigned long long *, size_t);

#define REPORT 3 /* the descriptors of a child */
#define RELEASE 4

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int child(size_t bytes)
{
    CUcontext context;
    unsigned long long block;
    char byte = 'n';
    if (!cuInit(0) && !cuDevicePrimaryCtxRetain(&context, 0) && !cuCtxSetCurrent(context) &&
        !cuMemAlloc_v2(&block, bytes))
        byte = 'y';
    if (write(REPORT, &byte, 1) != 1)
        return 1;
    close(REPORT);
    return read(RELEASE, &byte, 1) != 0;
}

static void start(const int report[2], const int release[2], const char *bytes)
{
    if (dup2(report[1], REPORT) < 0 || dup2(release[0], RELEASE) < 0)
        _exit(1);
    execl("/proc/self/exe", "start_many", "child", bytes, (char *)NULL);
    _exit(1);
}

int main(int argc, char **argv)
{
    int report[2], release[2], granted = 0;
    char bytes[256];
    if (argc == 3 && !strcmp(argv[1], "child"))
        return child(strtoull(argv[2], NULL, 10));
    int spare[2]; /* takes a child's two numbers, so that none of the ends below has them */
    if (argc < 3 || pipe2(spare, O_CLOEXEC) || pipe2(report, O_CLOEXEC) || pipe2(release, O_CLOEXEC))
        return 2;
    int count = atoi(argv[1]);
    uint64_t begin = now();
    for (int i = 0; i < count; i++) {
        pid_t pid = fork();
        if (pid < 0)
            return 1;
        if (pid == 0)
            start(report, release, argv[2]);
    }
    close(report[1]);
    for (ssize_t got; (got = read(report[0], bytes, sizeof bytes)) > 0;) /* until every child has closed its end */
        for (ssize_t i = 0; i < got; i++)
            granted += bytes[i] == 'y';
    printf("%d %llu\n", granted, (unsigned long long)(now() - begin));
    fflush(stdout);
    while (argc > 3 && read(0, bytes, sizeof bytes) > 0)
        ;
    close(release[1]);
    while (wait(NULL) > 0)
        ;
    return granted != count;
}
