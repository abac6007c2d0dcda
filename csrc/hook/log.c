/* log.c: the hook's own lines. They go to the program's stderr, so they must be few, and never harm it: no SIGPIPE, no
 * waiting for a full pipe, no allocation, errno as it was. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "atomics.h"
#include "hook.h"

#define LINE 768
/* A start with many unknown names may say all of them; after that this many a second. */
#define BURST 200u
#define PER_SECOND 20u

static const char *const levels[] = {"error", "warning", "info", "debug"};

static int rank(const char *level, int otherwise)
{
    for (int i = 0; level && i < 4; i++)
        if (!strcmp(level, levels[i]))
            return i;
    return otherwise;
}

/* How many lines were held back since the last one, or -1: hold this one back too. Approximate under contention, which only
 * lets a line more or less through. */
static long admit(void)
{
    static uint64_t second, budget = BURST, held;
    uint64_t now = now_ns() / 1000000000u, last = load_relaxed(&second);
    if (now != last && __atomic_compare_exchange_n(&second, &last, now, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED) && last) {
        uint64_t left = load_relaxed(&budget), more = left + (now - last) * PER_SECOND;
        store_relaxed(&budget, more > BURST ? BURST : more);
    }
    uint64_t left = load_relaxed(&budget);
    while (left)
        if (__atomic_compare_exchange_n(&budget, &left, left - 1, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return (long)__atomic_exchange_n(&held, 0, __ATOMIC_RELAXED);
    __atomic_fetch_add(&held, 1, __ATOMIC_RELAXED);
    return -1;
}

/* write(2) without SIGPIPE: a program whose stderr nobody reads any more lives on as if we had said nothing. */
static void put(int fd, const char *line, size_t length)
{
    struct pollfd room = {.fd = fd, .events = POLLOUT};
    if (poll(&room, 1, 0) != 1)
        return;
    sigset_t pipe_only, before, waiting;
    sigemptyset(&pipe_only);
    sigaddset(&pipe_only, SIGPIPE);
    sigemptyset(&waiting);
    sigpending(&waiting);
    if (pthread_sigmask(SIG_BLOCK, &pipe_only, &before))
        return;
    if (write(fd, line, length) < 0 && errno == EPIPE && !sigismember(&waiting, SIGPIPE)) {
        const struct timespec none = {0, 0};
        sigtimedwait(&pipe_only, NULL, &none);
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void hook_log(const char *level, const char *format, ...)
{
    int saved = errno, cancel;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel); /* callers hold locks that a thread must not die with */
    /* secure_getenv: a setuid program's caller does not choose what it writes to */
    if (rank(level, 0) > rank(secure_getenv("CGPU_LOG_LEVEL"), 1))
        goto out;
    long held = admit();
    if (held < 0)
        goto out;
    char line[LINE];
    int at = snprintf(line, sizeof line, "cgpu: level=%s pid=%d ", level, (int)getpid());
    if (held > 0)
        at += snprintf(line + at, sizeof line - (size_t)at, "held_back=%ld ", held);
    va_list args;
    va_start(args, format);
    int said = vsnprintf(line + at, sizeof line - (size_t)at - 1, format, args);
    va_end(args);
    if (said < 0)
        goto out;
    size_t length = (size_t)at + (size_t)said;
    if (length > sizeof line - 2)
        length = sizeof line - 2;
    line[length++] = '\n';
    const char *path = secure_getenv("CGPU_LOG");
    int fd = path && *path ? open(path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC | O_NOCTTY | O_NONBLOCK, 0666) : -1;
    put(fd >= 0 ? fd : STDERR_FILENO, line, length);
    if (fd >= 0)
        close(fd);
out:
    pthread_setcancelstate(cancel, NULL);
    errno = saved;
}
