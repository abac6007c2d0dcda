/* user.c: what uses the tree and a GPU while daemons come and go; until SIGTERM, then it says what came of it.
 *
 *     user read TREE                 a descriptor held open, open+read+close, a listing
 *     user write TREE                a value, and whether it is what is read then
 *     user allocate WITHIN BEYOND    allocations that fit into the share and ones that do not; now and then in a new process
 *     user once WITHIN BEYOND        that process: exits 0 if both went as they must
 *
 * Prints {"count", "lost", "failed", "first": [texts], "longest_ns", "waits": [[begin_ns, ns], ...]}. A wait is one system call
 * or one call of the driver; those from WAIT_NS on are listed, by CLOCK_MONOTONIC. `lost`: written, and not what was read then. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define WAIT_NS 20000000ull
#define WAITS 65536
#define TEXTS 5
#define PAUSE_NS 10000000
#define EACH 20 /* allocations between two new processes */

static volatile sig_atomic_t ended;
static uint64_t count, lost, failed, longest, waits[WAITS][2], began;
static int nwaits, ntexts;
static char texts[TEXTS][160];

static void on_end(int number)
{
    (void)number;
    ended = 1;
}

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void begin(void) { began = now(); }

/* The end of what begin() began: how long it took. Gives `result` back. */
static long took(long result)
{
    int code = errno;
    uint64_t ns = now() - began;
    if (ns > longest)
        longest = ns;
    if (ns >= WAIT_NS && nwaits < WAITS) {
        waits[nwaits][0] = began;
        waits[nwaits++][1] = ns;
    }
    errno = code;
    return result;
}

static bool fail(const char *what, const char *why)
{
    if (ntexts < TEXTS)
        snprintf(texts[ntexts++], sizeof *texts, "%s: %s", what, why);
    failed++;
    return false;
}

static int open_at(const char *tree, const char *name, int flags)
{
    char path[4096];
    snprintf(path, sizeof path, "%s/%s", tree, name);
    begin();
    int fd = (int)took(open(path, flags | O_CLOEXEC));
    if (fd < 0)
        fail(name, strerror(errno));
    return fd;
}

static bool close_it(int fd, const char *what)
{
    begin();
    return took(close(fd)) == 0 || fail(what, strerror(errno));
}

static bool list(const char *tree, const char *name)
{
    int fd = open_at(tree, name, O_RDONLY | O_DIRECTORY), found = 0;
    DIR *folder = fd < 0 ? NULL : fdopendir(fd);
    if (!folder)
        return false;
    errno = 0;
    for (;;) {
        begin();
        struct dirent *entry = readdir(folder);
        took(0);
        if (!entry)
            break;
        found += strcmp(entry->d_name, "policy") == 0 || strcmp(entry->d_name, "max_inst") == 0;
    }
    if (errno || found != 2)
        fail(name, errno ? strerror(errno) : "entries are missing");
    begin();
    return took(closedir(folder)) == 0 && found == 2;
}

static void read_tree(const char *tree)
{
    static int held = -1;
    char text[64];
    if (held < 0)
        held = open_at(tree, "0/policy", O_RDONLY);
    begin();
    long n = took(pread(held, text, sizeof text, 0));
    if (n != 2 || text[0] < '0' || text[0] > '5')
        fail("policy, held open", n < 0 ? strerror(errno) : "not a policy");
    int fd = open_at(tree, "version", O_RDONLY);
    if (fd >= 0) {
        begin();
        n = took(read(fd, text, sizeof text));
        if (n < 6)
            fail("version", n < 0 ? strerror(errno) : "not a version");
        close_it(fd, "version");
    }
    list(tree, "0");
}

static void write_tree(const char *tree)
{
    static uint64_t value = 1 << 20;
    char text[64], back[64];
    int length = snprintf(text, sizeof text, "%llu\n", (unsigned long long)++value);
    int fd = open_at(tree, "default_memsize", O_RDWR);
    if (fd < 0)
        return;
    begin();
    long n = took(write(fd, text, (size_t)length));
    if (n != length)
        fail("default_memsize, written", n < 0 ? strerror(errno) : "in part");
    begin();
    long found = took(pread(fd, back, sizeof back, 0));
    if (found < 0)
        fail("default_memsize, read", strerror(errno));
    else if (n == length && (found != length || memcmp(text, back, (size_t)length)))
        lost++;
    close_it(fd, "default_memsize");
}

/* ---- the GPU ---- */

static int (*mem_alloc)(unsigned long long *, size_t), (*mem_free)(unsigned long long);

static void *find(void *driver, const char *name)
{
    void *found = dlsym(driver, name);
    if (!found) {
        fprintf(stderr, "user: the driver has no %s\n", name);
        exit(3);
    }
    return found;
}

static void use_gpu(void)
{
    void *driver = dlopen("libcuda.so.1", RTLD_NOW), *context;
    if (!driver) {
        fprintf(stderr, "user: %s\n", dlerror());
        exit(3);
    }
    int (*init)(unsigned), (*retain)(void **, int), (*current)(void *);
    *(void **)&init = find(driver, "cuInit");
    *(void **)&retain = find(driver, "cuDevicePrimaryCtxRetain");
    *(void **)&current = find(driver, "cuCtxSetCurrent");
    *(void **)&mem_alloc = find(driver, "cuMemAlloc_v2");
    *(void **)&mem_free = find(driver, "cuMemFree_v2");
    int result = init(0);
    if (!result)
        result = retain(&context, 0);
    if (!result)
        result = current(context);
    if (result) {
        fprintf(stderr, "user: no context: %d\n", result);
        exit(4);
    }
}

static void expect(int result, int right, const char *what)
{
    char text[16];
    snprintf(text, sizeof text, "%d", result);
    if (result != right)
        fail(what, text);
}

static void allocate(size_t within, size_t beyond)
{
    unsigned long long one, two;
    begin();
    int result = (int)took(mem_alloc(&one, within));
    expect(result, 0, "an allocation that fits");
    begin();
    expect((int)took(mem_alloc(&two, beyond)), 2, "an allocation that does not fit");
    begin();
    if (!result)
        expect((int)took(mem_free(one)), 0, "a free");
}

static void run_once(char **arguments)
{
    begin();
    pid_t child = fork();
    if (child == 0) {
        execl("/proc/self/exe", "user", "once", arguments[2], arguments[3], (char *)NULL);
        _exit(99);
    }
    int status = -1;
    while (waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    took(0);
    expect(WIFEXITED(status) ? WEXITSTATUS(status) : 1000 + WTERMSIG(status), 0, "a new process");
}

static void report(void)
{
    printf("{\"count\": %llu, \"lost\": %llu, \"failed\": %llu, \"longest_ns\": %llu, \"first\": [", (unsigned long long)count,
           (unsigned long long)lost, (unsigned long long)failed, (unsigned long long)longest);
    for (int i = 0; i < ntexts; i++)
        printf("%s\"%s\"", i ? ", " : "", texts[i]);
    printf("], \"waits\": [");
    for (int i = 0; i < nwaits; i++)
        printf("%s[%llu, %llu]", i ? ", " : "", (unsigned long long)waits[i][0], (unsigned long long)waits[i][1]);
    printf("]}\n");
}

int main(int argc, char **argv)
{
    const char *what = argc > 1 ? argv[1] : "";
    bool tree = argc == 3 && (!strcmp(what, "read") || !strcmp(what, "write"));
    bool gpu = argc == 4 && (!strcmp(what, "allocate") || !strcmp(what, "once"));
    if (!tree && !gpu) {
        fprintf(stderr, "usage: user read|write TREE, user allocate|once WITHIN BEYOND\n");
        return 2;
    }
    struct sigaction action = {.sa_handler = on_end, .sa_flags = SA_RESTART};
    sigaction(SIGTERM, &action, NULL);
    size_t within = gpu ? strtoull(argv[2], NULL, 10) : 0, beyond = gpu ? strtoull(argv[3], NULL, 10) : 0;
    if (gpu)
        use_gpu();
    if (!strcmp(what, "once")) {
        allocate(within, beyond);
        return failed != 0;
    }
    while (!ended) {
        if (!strcmp(what, "read"))
            read_tree(argv[2]);
        else if (!strcmp(what, "write"))
            write_tree(argv[2]);
        else if (count % EACH)
            allocate(within, beyond);
        else
            run_once(argv);
        count++;
        nanosleep(&(struct timespec){0, PAUSE_NS}, NULL);
    }
    report();
    return 0;
}
