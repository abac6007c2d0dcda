/* stub_gate.c: the gate's client without a daemon: pages are files. See stub.h. */
#include "stub.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

static struct gate gates[CGPU_MAX_GPUS], offered[CGPU_MAX_GPUS];
static int joined, answer = -ENOENT, joins, natives;
static bool lost[CGPU_MAX_GPUS];
static uint32_t indices[CGPU_MAX_GPUS];
static struct cgpu_welcome_gpu native[CGPU_MAX_GPUS];
static void (*on_rejoin)(int index);

static void *map_file(const char *path, size_t size, int protection)
{
    int fd = open(path, O_RDWR | O_CREAT | O_CLOEXEC, 0600);
    if (fd < 0 || ftruncate(fd, (off_t)size) != 0)
        return NULL;
    void *memory = mmap(NULL, size, protection, MAP_SHARED, fd, 0);
    close(fd);
    return memory == MAP_FAILED ? NULL : memory;
}

int stub_make_pages(const char *ctl_path, const char *report_path, uint64_t limit, uint64_t total, const uint8_t uuid[16])
{
    struct cgpu_ctl *ctl = map_file(ctl_path, sizeof *ctl, PROT_READ | PROT_WRITE);
    struct cgpu_report *report = map_file(report_path, sizeof *report, PROT_READ | PROT_WRITE);
    pthread_mutexattr_t attributes;
    if (!ctl || !report)
        return -1;
    ctl->magic = report->magic = CGPU_ABI_MAGIC;
    ctl->version = report->version = CGPU_ABI_VERSION;
    ctl->generation = now_ns();
    ctl->mem_limit = limit;
    ctl->mem_total = total;
    memcpy(ctl->uuid, uuid, 16);
    pthread_mutexattr_init(&attributes);
    pthread_mutexattr_setpshared(&attributes, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attributes, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init((pthread_mutex_t *)(void *)report->ledger_mutex, &attributes);
    munmap(ctl, sizeof *ctl);
    munmap(report, sizeof *report);
    return 0;
}

struct cgpu_ctl *stub_ctl(const char *path)
{
    return map_file(path, sizeof(struct cgpu_ctl), PROT_READ | PROT_WRITE);
}

int stub_offer(int gpu, const char *ctl, const char *report, int slot)
{
    struct gate *gate = &offered[gpu];
    gate->ctl = map_file(ctl, sizeof *gate->ctl, PROT_READ);
    gate->report = map_file(report, sizeof *gate->report, PROT_READ | PROT_WRITE);
    gate->slot = slot < 0 || !gate->report ? NULL : &gate->report->slot[slot];
    gate->index = gpu;
    gate->told = CGPU_GPU_PIDS | CGPU_GPU_NOTES;
    return gate->ctl && gate->report ? 0 : -1;
}

void stub_index(int gpu, uint32_t index) { indices[gpu] = index; }

void stub_native(uint32_t index, const uint8_t uuid[16])
{
    struct cgpu_welcome_gpu *one = &native[natives++];
    one->gpu = index;
    one->flags = CGPU_GPU_NATIVE;
    memcpy(one->uuid, uuid, 16);
}

void stub_joins(int gpus_or_error) { answer = gpus_or_error; }
int stub_join_count(void) { return joins; }
int gate_count(void) { return joined; }
struct gate *gate_of(int index) { return &gates[index]; }
void gate_on_rejoin(void (*enter)(int index)) { on_rejoin = enter; }

void stub_lose(int gpu) { lost[gpu] = true; }

static void take_offer(int count)
{
    joined = count;
    for (int i = 0; i < count; i++)
        if (!lost[i]) /* else its gate stays as it was, as joining.c does it */
            gates[i] = offered[i];
}

static struct {
    char *page;
    size_t bytes;
    struct cgpu_ctl *ctl;
    struct sigaction before;
} watched;

/* Asynchronous-signal-safe: system calls and stores. A fault that is not ours comes again at once, to whom it is. */
static void on_read(int sign, siginfo_t *info, void *context)
{
    (void)context;
    char *at = info->si_addr;
    sigaction(sign, &watched.before, NULL);
    if (at < watched.page || at >= watched.page + watched.bytes)
        return;
    mprotect(watched.page, watched.bytes, PROT_READ | PROT_WRITE);
    watched.ctl->generation++;
    for (int i = 0; i < CGPU_SLOTS; i++)
        watched.ctl->slot_gen[i] = 0;
}

void stub_replace_when_read(int gpu, const char *ctl_path, int slot)
{
    struct sigaction action = {.sa_sigaction = on_read, .sa_flags = SA_SIGINFO};
    watched.bytes = (size_t)sysconf(_SC_PAGESIZE);
    watched.page = (char *)((uintptr_t)&gates[gpu].report->slot[slot] & ~(watched.bytes - 1));
    watched.ctl = stub_ctl(ctl_path);
    sigaction(SIGSEGV, &action, &watched.before);
    mprotect(watched.page, watched.bytes, PROT_NONE);
}

int gate_join(const char *path, uint32_t flags, struct cgpu_welcome *welcome)
{
    joins++;
    if (answer < 0 || !path)
        return answer;
    take_offer(answer);
    if (flags & CGPU_HELLO_INFO) /* as client.c does it */
        for (int i = 0; i < joined; i++)
            gates[i].slot = NULL;
    welcome->ngpus = 0;
    for (int i = 0; i < joined; i++) {
        struct cgpu_welcome_gpu *gpu = &welcome->gpu[welcome->ngpus];
        if (lost[i])
            continue;
        memcpy(gpu->uuid, (const void *)gates[i].ctl->uuid, 16);
        gpu->gpu = indices[i];
        gpu->mem_limit = gates[i].ctl->mem_limit;
        gpu->mem_total = gates[i].ctl->mem_total;
        welcome->ngpus++;
    }
    memcpy(&welcome->gpu[welcome->ngpus], native, sizeof *native * (size_t)natives);
    return 0;
}

int gate_rejoin(void)
{
    joins++;
    if (answer < 0)
        return answer;
    take_offer(answer);
    for (int i = 0; i < joined; i++)
        on_rejoin(i);
    return 0;
}

void stub_rejoin(void) { gate_rejoin(); }

static int notes;
int stub_notes(void) { return notes; }
bool gate_note(const struct gate *g, uint64_t patience_ns)
{
    (void)g;
    (void)patience_ns;
    notes++;
    return false;
}

/* streams.h */
static int capture, forgotten;
void stub_capturing(int on) { capture = on; }
int stub_forgotten(void) { return forgotten; }
bool stream_captures(void *stream) { return capture && stream != (void *)-1; }
void streams_forget_context(CUcontext context) { forgotten += context != NULL; }
void gate_context_changed(void) {}
bool capture_is_active(void) { return capture != 0; }
int capture_relax(void) { return -1; }
void capture_restore(int mode) { (void)mode; }

/* stall.h */
static int stalls;
void stub_stalls(int on) { stalls = on; }
bool stall_is_possible(void) { return stalls != 0; }

bool hook_covered(const char *name, char *path, size_t room)
{
    (void)name;
    (void)path;
    (void)room;
    return false;
}

void hook_log(const char *level, const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    fprintf(stderr, "%s ", level);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
}
