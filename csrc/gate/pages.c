#define _GNU_SOURCE
/* pages.c: making, handing out, writing and reading the shared pages of a region. */
#include "pages.h"
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <linux/futex.h>
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
#ifndef F_SEAL_FUTURE_WRITE
#define F_SEAL_FUTURE_WRITE 0x0010
#endif

#define KERNEL_NS_MAX 10000000000ull /* no submission is believed to be longer */

_Static_assert(sizeof(pthread_mutex_t) <= sizeof(((struct cgpu_report *)0)->ledger_mutex), "ledger mutex");

static int shared_file(const char *name, size_t size)
{
    int fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING | MFD_NOEXEC_SEAL);
    if (fd < 0 && errno == EINVAL) /* before Linux 6.3 */
        fd = memfd_create(name, MFD_CLOEXEC | MFD_ALLOW_SEALING);
    if (fd >= 0 && ftruncate(fd, (off_t)size) < 0) {
        int error = errno;
        close(fd);
        errno = error;
        return -1;
    }
    return fd;
}

static int init_ledger(struct cgpu_report *report)
{
    pthread_mutexattr_t attr;
    int error = pthread_mutexattr_init(&attr);
    if (error)
        return -error;
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    error = pthread_mutex_init((pthread_mutex_t *)(void *)report->ledger_mutex, &attr);
    pthread_mutexattr_destroy(&attr);
    report->magic = CGPU_ABI_MAGIC;
    report->version = CGPU_ABI_VERSION;
    return -error;
}

static int create_report(struct pages *p)
{
    p->report_fd = shared_file("cgpu-report", sizeof(struct cgpu_report));
    if (p->report_fd < 0)
        return -errno;
    struct cgpu_report *report = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED, p->report_fd, 0);
    if (report == MAP_FAILED)
        return -errno;
    int error = init_ledger(report);
    if (!error && (mprotect(report, sizeof *report, PROT_READ) < 0 ||
                   fcntl(p->report_fd, F_ADD_SEALS, F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0))
        error = -errno;
    p->report = report;
    return error;
}

static int create_ctl(struct pages *p, const uint8_t uuid[16], uint32_t gpu, uint64_t generation)
{
    int fd = shared_file("cgpu-control", sizeof(struct cgpu_ctl));
    if (fd < 0)
        return -errno;
    int error = 0;
    char path[40];
    struct cgpu_ctl *ctl = mmap(NULL, sizeof *ctl, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (ctl == MAP_FAILED) {
        error = -errno;
        goto out;
    }
    p->ctl = ctl;
    ctl->magic = CGPU_ABI_MAGIC;
    ctl->version = CGPU_ABI_VERSION;
    ctl->generation = generation;
    memcpy(ctl->uuid, uuid, sizeof ctl->uuid);
    ctl->gpu = gpu;
    ctl->grant = 2; /* epoch 1, closed */
    ctl->heartbeat_ns = now_ns();
    /* Our mapping above stays writable; nothing can be made writable from now on, whoever asks. */
    if (fcntl(fd, F_ADD_SEALS, F_SEAL_FUTURE_WRITE | F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL) < 0) {
        error = -errno;
        goto out;
    }
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    p->ctl_fd = open(path, O_RDONLY | O_CLOEXEC);
    if (p->ctl_fd < 0)
        error = -errno;
out:
    close(fd);
    return error;
}

int pages_create(struct pages *p, const uint8_t uuid[16], uint32_t gpu, uint64_t generation)
{
    memset(p, 0, sizeof *p);
    p->ctl_fd = p->report_fd = p->bell_fd = -1;
    p->next_gen = 1;
    int error = create_ctl(p, uuid, gpu, generation);
    if (!error)
        error = create_report(p);
    if (!error) {
        p->bell_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
        if (p->bell_fd < 0)
            error = -errno;
    }
    if (error)
        pages_destroy(p);
    return error;
}

void pages_destroy(struct pages *p)
{
    for (uint32_t k = 0; k < p->live_count; k++)
        close(p->agent_fd[p->live[k]]);
    p->live_count = 0;
    if (p->ctl)
        munmap(p->ctl, sizeof *p->ctl);
    if (p->report)
        munmap((void *)(uintptr_t)p->report, sizeof *p->report);
    int *fds[] = {&p->ctl_fd, &p->report_fd, &p->bell_fd};
    for (int k = 0; k < 3; k++) {
        if (*fds[k] >= 0)
            close(*fds[k]);
        *fds[k] = -1;
    }
    p->ctl = NULL;
    p->report = NULL;
}

int pages_attach(struct pages *p, int agent_fd, uint32_t *slot, uint32_t *gen)
{
    struct stat st;
    if (p->live_count == CGPU_SLOTS)
        return -EAGAIN;
    int fd = fcntl(agent_fd, F_DUPFD_CLOEXEC, 3);
    if (fd < 0)
        return -errno;
    uint32_t i = p->next_slot; /* the slot unused longest: survivors had the most time to repair its ledger entry */
    while (p->ctl->slot_gen[i])
        i = (i + 1) % CGPU_SLOTS;
    p->agent_socket[i] = fstat(fd, &st) == 0 && S_ISSOCK(st.st_mode);
    fcntl(fd, F_SETFL, O_NONBLOCK | fcntl(fd, F_GETFL));
    p->agent_fd[i] = fd;
    p->live[p->live_count++] = (uint16_t)i;
    p->next_slot = (i + 1) % CGPU_SLOTS;
    *slot = i;
    *gen = p->next_gen;
    store_release(&p->ctl->slot_gen[i], *gen);
    if (++p->next_gen == 0)
        p->next_gen = 1;
    return 0;
}

int pages_detach(struct pages *p, uint32_t slot)
{
    for (uint32_t k = 0; k < p->live_count; k++) {
        if (p->live[k] != slot)
            continue;
        uint64_t ungated = load_relaxed(&p->report->slot[slot].ungated);
        if (load_relaxed(&p->report->slot[slot].gen) == p->ctl->slot_gen[slot] && ungated < UINT32_MAX)
            p->retired_ungated += ungated;
        p->live[k] = p->live[--p->live_count];
        close(p->agent_fd[slot]);
        store_release(&p->ctl->slot_gen[slot], 0);
        store_release(&p->ctl->dead_seq, p->ctl->dead_seq + 1); /* whoever sees it sees the slot's owner gone */
        return 0;
    }
    return -ENOENT;
}

/* ---- reading ---- */

static const struct cgpu_slot *entered(const struct pages *p, uint32_t slot)
{
    const struct cgpu_slot *s = &p->report->slot[slot];
    return load_acquire(&s->gen) == p->ctl->slot_gen[slot] ? s : NULL;
}

void pages_look(const struct pages *p, uint64_t epoch, struct core_report *r)
{
    uint64_t word = epoch << 1 | 1;
    memset(r, 0, sizeof *r);
    r->epoch = epoch;
    r->idle = true;
    for (uint32_t k = 0; k < p->live_count; k++) {
        const struct cgpu_slot *s = entered(p, p->live[k]);
        if (!s)
            continue;
        bool demand = load_acquire(&s->demand) != 0;
        r->demand |= demand;
        uint64_t kernel = load_relaxed(&s->kernel_ns);
        if (kernel <= KERNEL_NS_MAX && kernel > r->kernel_ns)
            r->kernel_ns = kernel;
        uint64_t away = load_relaxed(&s->away_ns);
        if (away > r->away_ns)
            r->away_ns = away;
        /* `drained` first: a process that accepts anew clears it before it sets `opened`. */
        uint64_t drained = load_acquire(&s->drained), acked = load_acquire(&s->acked), idle = load_acquire(&s->idle);
        if (load_acquire(&s->opened) != word)
            continue;
        r->opened = true;
        if (acked != word) {
            r->holds = true;
        } else if (idle != word) {
            r->idle = false;
            r->stale |= demand;
        }
        if (acked == word) {
            uint64_t end = load_relaxed(&s->end_ns);
            if (end > r->end_ns)
                r->end_ns = end;
        }
        if (drained != word || acked != word) {
            uint64_t inflight = load_relaxed(&s->inflight_ns);
            r->undrained = true;
            if (inflight > r->inflight_ns)
                r->inflight_ns = inflight;
        }
    }
    r->idle &= r->opened;
}

void pages_use(const struct pages *p, uint32_t slot, struct gate_slot_use *use)
{
    const struct cgpu_slot *s = entered(p, slot);
    memset(use, 0, sizeof *use);
    use->slot = slot;
    if (!s)
        return;
    uint64_t total = p->ctl->mem_total;
    use->mem_used = load_relaxed(&s->mem_used);
    if (use->mem_used > total) /* nonsense must not overflow a sum */
        use->mem_used = total;
    use->mem_peak = load_relaxed(&s->mem_peak);
    if (use->mem_peak > total)
        use->mem_peak = total;
    use->mem_refused = load_relaxed(&s->mem_refused);
    use->launches = load_relaxed(&s->launches);
    use->ungated = load_relaxed(&s->ungated);
    use->unknown = load_relaxed(&s->unknown);
    use->dirty = load_relaxed(&s->dirty);
    use->kernel_ns = load_relaxed(&s->kernel_ns);
    if (use->kernel_ns > KERNEL_NS_MAX)
        use->kernel_ns = KERNEL_NS_MAX;
}

uint64_t pages_ungated(const struct pages *p)
{
    uint64_t sum = p->retired_ungated;
    for (uint32_t k = 0; k < p->live_count; k++) {
        const struct cgpu_slot *s = entered(p, p->live[k]);
        uint64_t ungated = s ? load_relaxed(&s->ungated) : 0;
        sum += ungated < UINT32_MAX ? ungated : 0;
    }
    return sum;
}

/* ---- writing ---- */

static void ring(const struct pages *p, uint32_t slot)
{
    uint64_t one = 1;
    ssize_t n;
    if (p->agent_socket[slot]) {
        n = send(p->agent_fd[slot], &one, sizeof one, MSG_DONTWAIT | MSG_NOSIGNAL);
    } else {
        /* An eventfd's O_NONBLOCK is shared with the client, who may clear it and fill the counter: look first. A client
         * that fills it in between can still block us; who cares for that hands out a socket. */
        struct pollfd full = {.fd = p->agent_fd[slot], .events = POLLOUT};
        if (poll(&full, 1, 0) != 1 || !(full.revents & POLLOUT))
            return;
        n = write(p->agent_fd[slot], &one, sizeof one);
    }
    (void)n; /* EAGAIN: likewise; EPIPE: it is gone, and its socket tells */
}

/* Rings those that hold `word`. The caller stored what they must see, then fenced; one that accepts later sees it itself
 * (it stores `opened`, fences, and looks again). */
static void ring_holders(const struct pages *p, uint64_t word)
{
    for (uint32_t k = 0; k < p->live_count; k++) {
        const struct cgpu_slot *s = entered(p, p->live[k]);
        if (s && load_relaxed(&s->opened) == word && load_relaxed(&s->acked) != word)
            ring(p, p->live[k]);
    }
}

void pages_grant(struct pages *p, uint64_t epoch, uint64_t deadline, uint64_t start)
{
    store_relaxed(&p->ctl->start_ns, start);
    store_release(&p->ctl->deadline_ns, deadline); /* read between two equal looks at the word */
    store_release(&p->ctl->grant, epoch << 1 | 1);
    /* Not FUTEX_PRIVATE: waiters are in other processes. The low half is the futex (little-endian). */
    syscall(SYS_futex, (uint32_t *)(void *)&p->ctl->grant, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
}

void pages_close(struct pages *p, uint64_t epoch)
{
    store_release(&p->ctl->grant, epoch << 1);
    fence_seq_cst(); /* pairs with the client's, between `opened` and its second look at the word */
    ring_holders(p, epoch << 1 | 1);
}

void pages_start(struct pages *p, uint64_t start)
{
    if (p->ctl->start_ns != start)
        store_release(&p->ctl->start_ns, start);
}

void pages_deadline(struct pages *p, uint64_t epoch, uint64_t deadline, bool ring_now)
{
    store_release(&p->ctl->deadline_ns, deadline);
    fence_seq_cst(); /* likewise: who opened unseen reads the new deadline */
    if (ring_now)
        ring_holders(p, epoch << 1 | 1);
}
