/* offer.c: asks the daemon to be taken in. See offer.h. */
#define _GNU_SOURCE
#include "offer.h"

#include <errno.h>
#include <libgen.h>
#include <poll.h>
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

#include "atomics.h"
#include "internal.h"

#define ANSWER_NS 2000000000ull /* as long as a daemon may take to work off 300 clients at once */
#define MUTEX_NS  2000000000ull
#define AGAIN_NS  20000000

void offer_drop(struct offer *offer)
{
    for (int i = 0; i < offer->nfds; i++)
        close(offer->fds[i]);
    offer->nfds = 0;
    if (offer->sock >= 0)
        close(offer->sock);
    offer->sock = -1;
    for (int i = 0; i < CGPU_MAX_GPUS; i++)
        if (offer->report[i])
            munmap(offer->report[i], sizeof(struct cgpu_report));
}

static bool folder_exists(const char *path)
{
    char copy[sizeof((struct sockaddr_un *)0)->sun_path];
    strncpy(copy, path, sizeof copy - 1);
    copy[sizeof copy - 1] = 0;
    return access(dirname(copy), F_OK) == 0;
}

/* A connected socket, or -errno. `until`: 0 = one attempt. */
static int connect_until(const char *path, uint64_t until)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    if (strlen(path) >= sizeof address.sun_path)
        return -ENAMETOOLONG;
    strcpy(address.sun_path, path);
    for (;;) {
        int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
        if (fd < 0)
            return -errno;
        if (connect(fd, (struct sockaddr *)&address, sizeof address) == 0)
            return fd;
        int error = errno;
        close(fd);
        bool retry = error == EAGAIN || error == ECONNREFUSED || error == EINTR || (error == ENOENT && folder_exists(path));
        if (!retry || now_ns() >= until)
            return -error;
        gate_nap(5000000);
    }
}

static int readable_until(int fd, uint64_t until)
{
    for (;;) {
        uint64_t now = now_ns();
        if (now >= until)
            return -ETIMEDOUT;
        uint64_t left = until - now;
        struct timespec t = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int n = ppoll(&p, 1, &t, NULL);
        if (n > 0)
            return 0;
        if (n < 0 && errno != EINTR)
            return -errno;
    }
}

static int receive(struct offer *offer, uint64_t until)
{
    union {
        char bytes[CMSG_SPACE(MAX_FDS * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {&offer->welcome, sizeof offer->welcome};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    ssize_t n;
    do {
        int error = readable_until(offer->sock, until);
        if (error)
            return error;
        n = recvmsg(offer->sock, &message, MSG_CMSG_CLOEXEC);
    } while (n < 0 && (errno == EINTR || errno == EAGAIN));
    if (n < 0)
        return -errno;
    for (struct cmsghdr *c = CMSG_FIRSTHDR(&message); c; c = CMSG_NXTHDR(&message, c))
        if (c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS) {
            int got = (int)((c->cmsg_len - CMSG_LEN(0)) / sizeof(int));
            for (int i = 0; i < got && offer->nfds < MAX_FDS; i++)
                memcpy(&offer->fds[offer->nfds++], CMSG_DATA(c) + (size_t)i * sizeof(int), sizeof(int));
        }
    if (n == 0)
        return -ECONNRESET;
    const struct cgpu_welcome *w = &offer->welcome;
    if ((size_t)n != sizeof *w || w->magic != CGPU_ABI_MAGIC || w->version != CGPU_ABI_VERSION)
        return -EPROTO;
    offer->welcome.id[sizeof w->id - 1] = offer->welcome.text[sizeof w->text - 1] = 0;
    if (w->error)
        return w->error > 0 && w->error < 4096 ? -w->error : -EPROTO;
    if (w->ngpus < 1 || w->ngpus > CGPU_MAX_GPUS || offer->nfds != 1 + 3 * (int)w->ngpus || (message.msg_flags & MSG_CTRUNC))
        return -EPROTO;
    return 0;
}

static bool big_enough(int fd, size_t size)
{
    return lseek(fd, 0, SEEK_END) >= (off_t)size; /* a shorter one would be a SIGBUS later */
}

/* The ledger mutex, waiting boundedly: a stopped sibling may sit on it. 0 or -errno. */
static int ledger_lock(struct cgpu_report *report)
{
    pthread_mutex_t *mutex = (pthread_mutex_t *)(void *)report->ledger_mutex;
    for (uint64_t until = now_ns() + MUTEX_NS;;) {
        int error = pthread_mutex_trylock(mutex);
        if (error == EOWNERDEAD) { /* died between total and slot: the slots are right */
            uint64_t total = 0;
            for (int i = 0; i < CGPU_SLOTS; i++)
                if (load_relaxed(&report->slot[i].gen))
                    total += load_relaxed(&report->slot[i].mem_used);
            store_relaxed(&report->mem_total_used, total);
            pthread_mutex_consistent(mutex);
            return 0;
        }
        if (error != EBUSY)
            return -error;
        if (now_ns() >= until)
            return -ETIMEDOUT;
        gate_nap(50000);
    }
}

/* The slot the daemon gave us, clean: what a dead predecessor held is given back. The total may still have it, or not any more:
 * it is at least the sum of the slots, and added up by who would be refused (csrc/hook/account.c). */
static int take_slot(struct cgpu_report *report, const struct cgpu_welcome_gpu *gpu)
{
    struct cgpu_slot *slot = &report->slot[gpu->slot];
    int error = ledger_lock(report);
    if (error)
        return error;
    store_release(&slot->gen, 0); /* the daemon must not take what follows for a live process's */
    memset((char *)slot + offsetof(struct cgpu_slot, opened), 0, sizeof *slot - offsetof(struct cgpu_slot, opened));
    store_relaxed(&slot->pid, (uint32_t)getpid());
    store_release(&slot->gen, gpu->slot_gen);
    pthread_mutex_unlock((pthread_mutex_t *)(void *)report->ledger_mutex);
    return 0;
}

/* Maps and checks everything offered, before anything of ours changes. */
static int check(struct offer *offer)
{
    for (uint32_t i = 0; i < offer->welcome.ngpus; i++) {
        const int *fd = &offer->fds[1 + 3 * i];
        const struct cgpu_welcome_gpu *gpu = &offer->welcome.gpu[i];
        if (!big_enough(fd[0], sizeof(struct cgpu_ctl)) || !big_enough(fd[1], sizeof(struct cgpu_report)))
            return -EPROTO;
        struct cgpu_ctl *ctl = mmap(NULL, sizeof *ctl, PROT_READ, MAP_SHARED, fd[0], 0);
        if (ctl == MAP_FAILED)
            return -errno;
        bool ok = ctl->magic == CGPU_ABI_MAGIC && ctl->version == CGPU_ABI_VERSION;
        munmap(ctl, sizeof *ctl);
        struct cgpu_report *report = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED, fd[1], 0);
        if (report == MAP_FAILED)
            return -errno;
        offer->report[i] = report;
        if (!ok || report->magic != CGPU_ABI_MAGIC || report->version != CGPU_ABI_VERSION || gpu->slot >= CGPU_SLOTS)
            return -EPROTO;
    }
    for (uint32_t i = 0; i < offer->welcome.ngpus; i++) {
        const struct cgpu_welcome_gpu *gpu = &offer->welcome.gpu[i];
        int error = gpu->slot_gen ? take_slot(offer->report[i], gpu) : 0;
        if (error)
            return error;
    }
    return 0;
}

static int ask(struct offer *offer, const char *path, uint32_t flags, uint64_t until)
{
    memset(offer, 0, sizeof *offer);
    offer->sock = connect_until(path, until);
    if (offer->sock < 0)
        return offer->sock;
    struct cgpu_hello hello = {.magic = CGPU_ABI_MAGIC, .version = CGPU_ABI_VERSION, .pid = (uint32_t)getpid(), .flags = flags};
    if (send(offer->sock, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello)
        return -errno;
    int error = receive(offer, now_ns() + ANSWER_NS);
    return error ? error : check(offer);
}

int offer_get(struct offer *offer, const char *path, uint32_t flags, uint64_t until)
{
    for (;;) {
        int error = ask(offer, path, flags, until);
        bool died = error == -ECONNRESET || error == -EPIPE; /* with us in its queue: the next one may take us in */
        if (!died || now_ns() >= until)
            return error;
        offer_drop(offer);
        gate_nap(AGAIN_NS);
    }
}
