/* soak.c: one process of an instance, for tests that start, steer and kill many.
 *
 *     soak                    says "ready", then obeys its standard input, and answers each line with a line:
 *       alloc BYTES           the result of cuMemAlloc; a block that was granted becomes the newest
 *       free NUMBER           the result of cuMemFree of that block, counted from the oldest
 *       info                  cuMemGetInfo: "FREE TOTAL"
 *       churn BYTES THREADS   so many threads allocate and free blocks of up to BYTES from now on
 *       calm                  they end, having freed everything; how many calls failed but for want of memory
 *       fork HOW BYTES        a child that ends in that way; its wait status, 0 at once for one that lingers
 *       exec                  becomes itself anew: "ready"
 *       end HOW BYTES         ends, without an answer
 *     soak once HOW BYTES     allocates so much, says the result, and ends
 *     soak step COUNT BYTES [held]
 *                             allocates once, says "ready", waits for a line; then frees that and allocates again,
 *                             killed after COUNT instructions of that, or of those alone during which the ledger's
 *                             mutex was held: says "killed", or "through" when there were fewer; "untraced" and no
 *                             "ready" where ptrace is forbidden
 *
 * HOW: exit, return (through atexit), abort, segv, kill; exec (becomes `once exit BYTES`); linger (a child's: it lives
 * on for a moment with what it inherited, whatever becomes of its parent). */
#define _GNU_SOURCE
#include <pthread.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ptrace.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

typedef unsigned long long CUdeviceptr;
int cuInit(unsigned);
int cuDevicePrimaryCtxRetain(void **, int);
int cuCtxSetCurrent(void *);
int cuMemAlloc_v2(CUdeviceptr *, size_t);
int cuMemFree_v2(CUdeviceptr);
int cuMemGetInfo_v2(size_t *, size_t *);

#define BLOCKS 1024
#define CHURNED 16
#define THREADS 8
#define OUT_OF_MEMORY 2
#define LINGER_US 300000
#define MUTEX_OFFSET 64

static void *context;
static CUdeviceptr blocks[BLOCKS];
static int count, churners, calm, failures;
static pthread_t threads[THREADS];
static size_t most;

static void start(void)
{
    int result = cuInit(0);
    if (!result)
        result = cuDevicePrimaryCtxRetain(&context, 0);
    if (!result)
        result = cuCtxSetCurrent(context);
    if (result) {
        fprintf(stderr, "soak: CUDA does not start: %d\n", result);
        _exit(4);
    }
}

static void say(long number)
{
    printf("%ld\n", number);
    fflush(stdout);
}

static int allocate(size_t bytes)
{
    int result = cuMemAlloc_v2(&blocks[count], bytes);
    count += result == 0 && count < BLOCKS - 1;
    return result;
}

static int give_back(int number)
{
    int result = cuMemFree_v2(blocks[number]);
    memmove(&blocks[number], &blocks[number + 1], (size_t)(--count - number) * sizeof *blocks);
    return result;
}

static void *churn(void *arg)
{
    CUdeviceptr mine[CHURNED] = {0};
    unsigned seed = (unsigned)(uintptr_t)arg ^ (unsigned)getpid();
    cuCtxSetCurrent(context);
    while (!__atomic_load_n(&calm, __ATOMIC_RELAXED)) {
        CUdeviceptr *one = &mine[rand_r(&seed) % CHURNED];
        int result;
        if (*one) {
            result = cuMemFree_v2(*one);
            *one = 0;
        } else {
            result = cuMemAlloc_v2(one, (size_t)rand_r(&seed) % most + 1);
            if (result)
                *one = 0;
        }
        if (result && result != OUT_OF_MEMORY)
            __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
    }
    for (int i = 0; i < CHURNED; i++)
        if (mine[i] && cuMemFree_v2(mine[i]))
            __atomic_fetch_add(&failures, 1, __ATOMIC_RELAXED);
    return NULL;
}

static void end(const char *how, const char *bytes)
{
    if (!strcmp(how, "return"))
        exit(0);
    if (!strcmp(how, "abort"))
        abort();
    if (!strcmp(how, "segv"))
        raise(SIGSEGV);
    if (!strcmp(how, "kill"))
        raise(SIGKILL);
    if (!strcmp(how, "exec")) {
        if (!freopen("/dev/null", "w", stdout))
            _exit(5);
        execl("/proc/self/exe", "soak", "once", "exit", bytes, (char *)NULL);
    }
    if (!strcmp(how, "linger"))
        usleep(LINGER_US);
    _exit(0);
}

/* A child of fork() owns nothing of its parent's: neither may it take, nor give back. */
static void forked(const char *how, const char *bytes)
{
    CUdeviceptr block;
    pid_t pid = fork();
    int status = 0;
    if (pid == 0) {
        if (cuMemAlloc_v2(&block, 4096) == 0 || (count && cuMemFree_v2(blocks[0]) == 0))
            _exit(6);
        if (strcmp(how, "linger"))
            end(how, bytes);
        if (fork() == 0) /* nobody's child, so that nobody waits for it */
            end(how, bytes);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    say(status);
}

static void obey(char *line)
{
    char word[16], how[16] = "", bytes[24] = "0";
    unsigned long long number = 0;
    int given = 0;
    if (sscanf(line, "%15s %15s %23s", word, how, bytes) < 1)
        _exit(2);
    number = strtoull(how, NULL, 10);
    if (!strcmp(word, "alloc")) {
        say(allocate(number));
    } else if (!strcmp(word, "free")) {
        say(give_back((int)number));
    } else if (!strcmp(word, "info")) {
        size_t free_bytes = 0, total = 0;
        given = cuMemGetInfo_v2(&free_bytes, &total);
        printf("%zu %zu\n", given ? 0 : free_bytes, given ? 0 : total);
        fflush(stdout);
    } else if (!strcmp(word, "churn")) {
        most = number;
        calm = 0;
        for (churners = 0; churners < atoi(bytes) && churners < THREADS; churners++)
            pthread_create(&threads[churners], NULL, churn, (void *)(uintptr_t)(churners + 1));
        say(churners);
    } else if (!strcmp(word, "calm")) {
        __atomic_store_n(&calm, 1, __ATOMIC_RELAXED);
        while (churners)
            pthread_join(threads[--churners], NULL);
        say(failures);
    } else if (!strcmp(word, "fork")) {
        forked(how, bytes);
    } else if (!strcmp(word, "exec")) {
        execl("/proc/self/exe", "soak", (char *)NULL);
        _exit(5);
    } else if (!strcmp(word, "end")) {
        end(how, bytes);
    }
}

/* Where the ledger's mutex lies in that process (csrc/abi/cgpu_abi.h). */
static unsigned long mutex_of(pid_t pid)
{
    char path[32], line[256];
    unsigned long start = 0;
    snprintf(path, sizeof path, "/proc/%d/maps", (int)pid);
    FILE *maps = fopen(path, "r");
    while (maps && !start && fgets(line, sizeof line, maps))
        if (strstr(line, "memfd:cgpu-report"))
            start = strtoul(line, NULL, 16);
    if (maps)
        fclose(maps);
    return start ? start + MUTEX_OFFSET : 0;
}

/* The parent is the tracer: it never touches CUDA. */
static void step(long instructions, size_t bytes, int held)
{
    int status = 0;
    pid_t pid = fork();
    if (pid == 0) {
        start();
        allocate(bytes);
        if (ptrace(PTRACE_TRACEME, 0, NULL, NULL))
            _exit(7);
        raise(SIGSTOP);
        give_back(0);
        allocate(bytes);
        raise(SIGSTOP);
        _exit(0);
    }
    waitpid(pid, &status, 0);
    if (!WIFSTOPPED(status)) {
        puts(WIFEXITED(status) && WEXITSTATUS(status) == 7 ? "untraced" : "failed");
        exit(0);
    }
    puts("ready");
    fflush(stdout);
    if (getchar() == EOF)
        exit(0);
    unsigned long mutex = mutex_of(pid);
    for (long i = 0; i < instructions;) {
        if (ptrace(PTRACE_SINGLESTEP, pid, NULL, NULL) || waitpid(pid, &status, 0) != pid || !WIFSTOPPED(status)) {
            puts("failed");
            exit(0);
        }
        if (WSTOPSIG(status) == SIGSTOP) {
            kill(pid, SIGKILL);
            waitpid(pid, &status, 0);
            puts("through");
            exit(0);
        }
        i += !held || (int)ptrace(PTRACE_PEEKDATA, pid, (void *)mutex, NULL) != 0;
    }
    kill(pid, SIGKILL);
    waitpid(pid, &status, 0);
    puts(WIFSIGNALED(status) ? "killed" : "failed");
    exit(0);
}

int main(int argc, char **argv)
{
    char line[128];
    struct rlimit none = {0, 0};
    setrlimit(RLIMIT_CORE, &none);
    if (argc >= 4 && !strcmp(argv[1], "step"))
        step(atol(argv[2]), strtoull(argv[3], NULL, 10), argc > 4);
    start();
    if (argc == 4 && !strcmp(argv[1], "once")) {
        say(allocate(strtoull(argv[3], NULL, 10)));
        end(argv[2], argv[3]);
    }
    puts("ready");
    fflush(stdout);
    while (fgets(line, sizeof line, stdin))
        obey(line);
    return 0;
}
