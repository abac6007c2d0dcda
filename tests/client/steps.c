/* steps.c: a CUDA program that does what it is told, a line at a time: "THREAD COMMAND [ARGUMENT]".
 *
 * Each thread prints "THREAD COMMAND RESULT" when it is done. Thread 0 is the main one. Commands: launch NS, ptsz NS, sync,
 * destroy, begin (capture), end, callback (a host function that launches), graph NS, fork (the child launches once and says so),
 * event (an error value in errno survives a launch), closefds, busy NS (launches for ever), exit (of the thread), quit. */
#define _GNU_SOURCE
#include <errno.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include "cuda_min.h"

CUresult cuInit(unsigned);
CUresult cuCtxCreate_v2(CUcontext *, unsigned, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuCtxSynchronize(void);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamDestroy_v2(CUstream);
CUresult cuStreamBeginCapture_v2(CUstream, CUstreamCaptureMode);
CUresult cuStreamEndCapture(CUstream, CUgraph *);
CUresult cuLaunchHostFunc(CUstream, CUhostFn, void *);
CUresult cuStreamSynchronize(CUstream);
CUresult cuGraphLaunch(CUgraphExec, CUstream);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);
CUresult cuLaunchKernel_ptsz(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);

static CUcontext context;
static CUstream stream, other;
static int pipes[8][2];
static volatile int called;

static int launch(uint64_t ns, CUstream on)
{
    return (int)cuLaunchKernel((CUfunction)(uintptr_t)ns, 1, 1, 1, 1, 1, 1, 0, on, NULL, NULL);
}

static void call(void *unused)
{
    (void)unused;
    called = launch(1000, other) + 1;
}

static int run(const char *command, uint64_t value)
{
    CUgraph graph;
    if (!strcmp(command, "launch"))
        return launch(value, stream);
    if (!strcmp(command, "ptsz"))
        return (int)cuLaunchKernel_ptsz((CUfunction)(uintptr_t)value, 1, 1, 1, 1, 1, 1, 0, NULL, NULL, NULL);
    if (!strcmp(command, "other"))
        return launch(value, other);
    if (!strcmp(command, "sync"))
        return (int)cuCtxSynchronize();
    if (!strcmp(command, "begin"))
        return (int)cuStreamBeginCapture_v2(stream, CU_STREAM_CAPTURE_MODE_GLOBAL);
    if (!strcmp(command, "end"))
        return (int)cuStreamEndCapture(stream, &graph);
    if (!strcmp(command, "graph"))
        return (int)cuGraphLaunch((CUgraphExec)(uintptr_t)value, stream);
    if (!strcmp(command, "destroy")) {
        CUstream old = stream;
        cuStreamCreate(&stream, 0);
        return (int)cuStreamDestroy_v2(old);
    }
    if (!strcmp(command, "callback")) {
        cuLaunchHostFunc(stream, call, NULL);
        while (!called)
            usleep(1000);
        return called - 1;
    }
    if (!strcmp(command, "errno")) {
        errno = ERANGE;
        launch(value, stream);
        return errno == ERANGE ? 0 : 1;
    }
    if (!strcmp(command, "closefds")) {
        for (int fd = 3; fd < 1024; fd++)
            if (fd < pipes[0][0] || fd > pipes[7][1])
                close(fd);
        return 0;
    }
    if (!strcmp(command, "fork")) {
        pid_t child = fork();
        if (child == 0) {
            cuInit(0);
            cuCtxSetCurrent(context);
            _exit(launch(value, stream));
        }
        int status = -1;
        waitpid(child, &status, 0);
        return status;
    }
    if (!strcmp(command, "busy"))
        for (;;)
            launch(value, stream);
    return -1;
}

static void *thread(void *arg)
{
    int me = (int)(intptr_t)arg;
    char line[256];
    FILE *in = fdopen(pipes[me][0], "r");
    cuCtxSetCurrent(context);
    while (fgets(line, sizeof line, in)) {
        char command[64];
        unsigned long long value = 0;
        if (sscanf(line, "%63s %llu", command, &value) < 1)
            continue;
        if (!strcmp(command, "exit"))
            break;
        int result = run(command, value);
        printf("%d %s %d\n", me, command, result);
        fflush(stdout);
    }
    return NULL;
}

int main(void)
{
    char line[256];
    cuInit(0);
    cuCtxCreate_v2(&context, 0, 0);
    cuStreamCreate(&stream, 0);
    cuStreamCreate(&other, 0);
    for (int i = 0; i < 8; i++)
        if (pipe(pipes[i]))
            return 1;
    pthread_t threads[8];
    int made[8] = {0};
    printf("ready\n");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin)) {
        int which = line[0] - '0';
        if (!strncmp(line, "quit", 4))
            break;
        if (which < 0 || which > 7)
            continue;
        if (!made[which]) {
            made[which] = 1;
            pthread_create(&threads[which], NULL, thread, (void *)(intptr_t)which);
        }
        ssize_t n = write(pipes[which][1], line + 2, strlen(line + 2));
        (void)n;
        if (!strncmp(line + 2, "exit", 4)) {
            pthread_join(threads[which], NULL);
            made[which] = 0;
            printf("%d exit 0\n", which);
            fflush(stdout);
        }
    }
    return 0;
}
