/* instance.c: joining the instance, once a process and kind, and the limits that hold while no daemon answers. */
#define _GNU_SOURCE /* secure_getenv */
#include "instance.h"

#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "account.h"
#include "client.h"
#include "hook.h"
#include "ledger.h"
#include "lock.h"
#include "pool.h"

#define RETRY_NS 1000000000ull /* between two tries to reach a daemon that did not answer */

enum joined { JOINED_NOT_YET, JOINED_NONE, JOINED_FALLBACK, JOINED_INFO, JOINED_FULL };

static uint32_t joined;     /* enum joined; release after the rest is written */
static uint64_t retry_ns;   /* not before this, in JOINED_FALLBACK */
static bool asked_for_nvml; /* by the last gate_join() */
static int gpus, seen;
static uint8_t uuids[CGPU_MAX_GPUS][16];      /* of the instance's GPUs */
static uint8_t seen_uuids[CGPU_MAX_GPUS][16]; /* of all that the program sees */
static struct hook_lock joining;

int hook_gpus(void)
{
    return load_acquire(&gpus);
}

int seen_gpus(void)
{
    return load_acquire(&seen);
}

const uint8_t *seen_uuid(int place)
{
    return seen_uuids[place];
}

static int find_uuid(uint8_t list[][16], int count, const uint8_t uuid[16])
{
    for (int i = 0; i < count; i++)
        if (memcmp(list[i], uuid, 16) == 0)
            return i;
    return -1;
}

int hook_gpu_of_uuid(const uint8_t uuid[16])
{
    return find_uuid(uuids, hook_gpus(), uuid);
}

int seen_place(const uint8_t uuid[16])
{
    return find_uuid(seen_uuids, seen_gpus(), uuid);
}

void uuid_format(const uint8_t uuid[16], char text[UUID_TEXT])
{
    static const char digits[] = "0123456789abcdef";
    char *to = stpcpy(text, "GPU-");
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            *to++ = '-';
        *to++ = digits[uuid[i] >> 4];
        *to++ = digits[uuid[i] & 15];
    }
    *to = 0;
}

static int hex(char c)
{
    return c >= '0' && c <= '9' ? c - '0' : (c | 32) >= 'a' && (c | 32) <= 'f' ? (c | 32) - 'a' + 10 : -1;
}

bool uuid_parse(const char *text, uint8_t uuid[16])
{
    if (strncmp(text, "GPU-", 4) != 0)
        return false;
    text += 4;
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            if (*text++ != '-')
                return false;
        int high = hex(text[0]), low = high < 0 ? -1 : hex(text[1]);
        if (low < 0)
            return false;
        uuid[i] = (uint8_t)(high << 4 | low);
        text += 2;
    }
    return *text == 0;
}

/* A whole decimal number, digits only. Not strtoull: a new glibc binds that to a version that old ones lack. */
static bool number_parse(const char *text, uint64_t *number)
{
    *number = 0;
    if (!*text)
        return false;
    for (; *text; text++)
        if (*text < '0' || *text > '9' || __builtin_mul_overflow(*number, 10, number) ||
            __builtin_add_overflow(*number, (uint64_t)(*text - '0'), number))
            return false;
    return true;
}

/* A GPU as the daemon tells of it. */
struct granted {
    uint8_t uuid[16];
    uint32_t index; /* on the host */
    bool native;
    uint64_t limit, total;
};

/* `list`: in the order that the program sees. Gives how many are the instance's. A second join sets what is there already:
 * an instance's GPUs do not change. */
static int set_gpus(const struct granted *list, int count)
{
    int own = 0;
    for (int i = 0; i < count; i++) {
        memcpy(seen_uuids[i], list[i].uuid, 16);
        if (list[i].native)
            continue;
        memcpy(uuids[own], list[i].uuid, 16);
        account_fallback(own++, list[i].limit, list[i].total);
    }
    store_release(&seen, count);
    store_release(&gpus, own);
    return own;
}

/* Reads the file `limits` beside the socket: lines `UUID MEMSIZE`, and `UUID native` for native GPUs. Gives how many; 0: no such
 * file, or a bad one. */
static int read_limits(const char *socket_path, struct granted found[CGPU_MAX_GPUS])
{
    char path[4096], text[4096];
    const char *slash = strrchr(socket_path, '/');
    int folder = slash ? (int)(slash - socket_path) + 1 : 0;
    if (snprintf(path, sizeof path, "%.*slimits", folder, socket_path) >= (int)sizeof path)
        return 0;
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return 0;
    ssize_t length = read(fd, text, sizeof text - 1);
    close(fd);
    if (length < 0)
        return 0;
    text[length] = 0;
    int count = 0, own = 0;
    char *rest = text, *line;
    while ((line = strsep(&rest, "\n")) && count < CGPU_MAX_GPUS) {
        char *size = strchr(line, ' ');
        if (*line == 0)
            continue;
        if (!size)
            return 0;
        *size++ = 0;
        struct granted *one = &found[count++];
        *one = (struct granted){.native = strcmp(size, "native") == 0};
        if (!uuid_parse(line, one->uuid) || (!one->native && !number_parse(size, &one->limit)))
            return 0;
        own += !one->native;
    }
    return own ? count : 0;
}

static enum joined join_fallback(const char *socket_path, int error)
{
    struct granted found[CGPU_MAX_GPUS];
    int count = read_limits(socket_path, found);
    if (count == 0) {
        /* nothing at the default path: in no instance. A socket that was named, or is there, is one we should be in. */
        if (access(socket_path, F_OK) == 0 || strcmp(socket_path, CGPU_DEFAULT_SOCKET) != 0)
            hook_log("error", "event=join socket=%s error=%d: not joined, and no limits: this process runs unlimited",
                     socket_path, error);
        return JOINED_NONE;
    }
    hook_log("warning", "event=join socket=%s error=%d: not joined: each process alone is held to the instance's memory",
             socket_path, error);
    set_gpus(found, count);
    store_relaxed(&retry_ns, now_ns() + RETRY_NS);
    return JOINED_FALLBACK;
}

/* In the fallback: one look whether the daemon is there by now; gate_join() would wait for it. The gate's agent looks, too. */
static enum joined join_again(void)
{
    if (gate_count() == 0 && gate_rejoin() != 0) {
        store_relaxed(&retry_ns, now_ns() + RETRY_NS);
        return JOINED_FALLBACK;
    }
    for (int gpu = 0; gpu < gate_count() && gpu < hook_gpus(); gpu++)
        if (memcmp((const void *)gate_of(gpu)->ctl->uuid, uuids[gpu], 16) != 0)
            hook_log("error", "event=join gpu=%d: the daemon and the limits file disagree about the order of GPUs", gpu);
    return asked_for_nvml ? JOINED_INFO : JOINED_FULL;
}

/* Gives how many. */
static int read_welcome(const struct cgpu_welcome *welcome, struct granted found[CGPU_MAX_GPUS])
{
    int count = 0;
    for (const struct cgpu_welcome_gpu *gpu = welcome->gpu; count < CGPU_MAX_GPUS; gpu++) {
        bool native = count >= (int)welcome->ngpus;
        if (native && !(gpu->flags & CGPU_GPU_NATIVE))
            break;
        int at = count++;
        for (; native && at > 0 && found[at - 1].index > gpu->gpu; at--)
            found[at] = found[at - 1];
        found[at] = (struct granted){.index = gpu->gpu, .native = native, .limit = gpu->mem_limit, .total = gpu->mem_total};
        memcpy(found[at].uuid, gpu->uuid, 16);
    }
    return count;
}

static enum joined join_socket(const char *socket_path, bool for_nvml)
{
    struct cgpu_welcome welcome = {0};
    struct granted found[CGPU_MAX_GPUS];
    if (load_relaxed(&joined) == JOINED_FALLBACK && (for_nvml || !asked_for_nvml)) /* never from CUDA down to NVML alone */
        return join_again();
    asked_for_nvml = for_nvml;
    int error = gate_join(socket_path, for_nvml ? CGPU_HELLO_INFO : 0, &welcome);
    if (error == 0 && welcome.error != 0)
        error = -welcome.error;
    if (error == -EPROTO && welcome.magic == CGPU_ABI_MAGIC && welcome.version != CGPU_ABI_VERSION)
        hook_log("error", "event=join socket=%s: the daemon speaks version %u and this library %u", socket_path, welcome.version,
                 CGPU_ABI_VERSION);
    else if (error < 0 && welcome.error != 0)
        hook_log("error", "event=join socket=%s error=%d text=\"%.*s\"", socket_path, welcome.error,
                 (int)sizeof welcome.text, welcome.text);
    if (error < 0)
        return load_relaxed(&joined) == JOINED_INFO ? JOINED_INFO : join_fallback(socket_path, error);
    int count = read_welcome(&welcome, found);
    /* one may have been lost since it joined for NVML alone: the places of the others stay */
    int own = (int)welcome.ngpus < gate_count() ? hook_gpus() : set_gpus(found, count);
    for (int gpu = 0; gpu < own; gpu++)
        account_enter(gpu);
    return for_nvml ? JOINED_INFO : JOINED_FULL;
}

/* A program that was started with another environment is still in the mount namespace of its `cgpuctl run`. */
static const char *own_socket(void)
{
    static char path[4096];
    const char *named = secure_getenv("CGPU_SOCKET");
    if (named && *named)
        return named;
    if (hook_covered("sock", path, sizeof path) && access(path, F_OK) == 0 &&
        hook_covered("sock/gate.sock", path, sizeof path))
        return path;
    return CGPU_DEFAULT_SOCKET;
}

static bool settled(bool for_nvml)
{
    switch (load_acquire(&joined)) {
    case JOINED_NONE:
    case JOINED_FULL:
        return true;
    case JOINED_INFO:
        return for_nvml;
    case JOINED_FALLBACK:
        return now_ns() < load_relaxed(&retry_ns);
    default:
        return false;
    }
}

bool hook_join(bool for_nvml)
{
    if (!settled(for_nvml)) {
        int saved = errno, cancel;
        pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* it would die with the lock */
        hook_lock_take(&joining); /* held for the daemon's answer: gate_join bounds it */
        if (!settled(for_nvml)) {
            store_release(&joined, join_socket(own_socket(), for_nvml));
        }
        hook_lock_drop(&joining);
        pthread_setcancelstate(cancel, NULL);
        errno = saved;
    }
    return load_acquire(&joined) != JOINED_NONE;
}

static void after_fork(void)
{
    joined = JOINED_NOT_YET;
    joining = (struct hook_lock){0};
    gpus = seen = 0;
    account_after_fork();
    ledger_after_fork();
    visible_after_fork();
    context_after_fork();
    vmm_after_fork();
    pools_after_fork();
    graph_memory_after_fork();
}

__attribute__((constructor)) static void at_load(void)
{
    gate_on_rejoin(account_enter);
    pthread_atfork(NULL, NULL, after_fork);
}
