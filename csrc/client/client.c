/* client.c: joining an instance, its pages, this process's threads, and opening the gate or waiting for it. See client.h. */
#define _GNU_SOURCE
#include "client.h"

#include <errno.h>
#include <fcntl.h>
#include <libgen.h>
#include <linux/futex.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "hook.h"
#include "internal.h"

#define JOIN_NS   2000000000ull /* as long as a daemon may take to restart or to work off 300 clients at once */
#define WAIT_NS   100000000ull  /* one sleep of a waiting launcher, between two looks at the daemon's heartbeat */
#define CLOSING_NAP_NS 20000
#define MUTEX_NS  2000000000ull
#define HIGH_FD   512           /* ours stay out of the way of programs that count on low numbers */
#define MAX_FDS   (1 + 3 * CGPU_MAX_GPUS)

/* The control pages lie inside this library, so that there is a valid, closed page before anything was joined and the
 * address never changes: a rejoin maps the new page over the old one. */
static _Alignas(4096) unsigned char pages[CGPU_MAX_GPUS][4096];
static struct gate gates[CGPU_MAX_GPUS];
static int count;

static struct hook_lock joining;
static char socket_path[sizeof((struct sockaddr_un *)0)->sun_path];
static uint32_t flags;
static int sock = -1, agent_fd = -1;
static ino_t sock_ino;              /* tells our socket from what a program that closed all descriptors opened there */
static uint64_t joined_ns;
static bool membarrier_ok;
static void (*rejoined)(int index);

__thread struct gate_thread *gate_self __attribute__((tls_model("initial-exec")));
static struct gate_thread *threads; /* only grows; blocks are reused, never freed */
static struct hook_lock threads_lock;
static pthread_key_t thread_key;
static bool thread_key_ok, atfork_ok;
static void (*thread_exit)(struct gate_thread *t);

int gate_count(void) { return load_acquire(&count); }
struct gate *gate_of(int index) { return &gates[index]; }
int gate_socket(void) { return load_acquire(&sock); }
int gate_agent_fd(void) { return load_acquire(&agent_fd); }
bool gate_has_membarrier(void) { return load_relaxed(&membarrier_ok); }
void gate_on_rejoin(void (*enter)(int index)) { rejoined = enter; }
void gate_on_thread_exit(void (*leave)(struct gate_thread *t)) { thread_exit = leave; }

static long futex(const volatile void *word, int op, uint32_t value, const struct timespec *timeout)
{
    return syscall(SYS_futex, word, op, value, timeout, NULL, 0);
}

/* The low half of the word; little-endian. Not FUTEX_PRIVATE: the daemon wakes us from its own mapping. */
static const volatile void *futex_word(const struct gate *g) { return &g->ctl->grant; }

void gate_wake_waiters(const struct gate *g) { futex(futex_word(g), FUTEX_WAKE, INT32_MAX, NULL); }

static void ring(int fd)
{
    static const uint64_t one = 1;
    if (fd >= 0) {
        ssize_t n = write(fd, &one, sizeof one);
        (void)n; /* EAGAIN: the counter is full, so the other side is being woken anyway */
    }
}

void gate_kick(void) { ring(gate_agent_fd()); }
void gate_bell(const struct gate *g) { ring(load_relaxed(&g->bell)); }

/* ---- threads ---- */

static void thread_ends(void *block)
{
    struct gate_thread *t = block;
    store_release(&t->in, 0);
    if (thread_exit)
        thread_exit(t);
    gate_self = NULL; /* a later key destructor that launches registers again */
    store_release(&t->dead, 1);
}

static void thread_reset(struct gate_thread *t)
{
    t->in = 0;
    t->left = 0;
    t->stream = GATE_NO_STREAM;
    t->gate = &gates[0]; /* never NULL: the open path reads through both */
    t->word = (const uint64_t *)(uintptr_t)&((struct cgpu_ctl *)(void *)pages[0])->grant;
    t->lane = t->lanes = NULL;
    t->context = NULL;
    t->in_callback = 0;
    t->dead = 0;
}

struct gate_thread *gate_thread_here(void)
{
    if (gate_self)
        return gate_self;
    hook_lock_take(&threads_lock);
    if (!thread_key_ok)
        thread_key_ok = pthread_key_create(&thread_key, thread_ends) == 0;
    struct gate_thread *t = threads;
    while (t && !load_acquire(&t->dead))
        t = t->next;
    if (t) {
        thread_reset(t);
    } else {
        void *memory = NULL;
        if (posix_memalign(&memory, _Alignof(struct gate_thread), sizeof *t) == 0) {
            t = memory;
            memset(t, 0, sizeof *t);
            thread_reset(t);
            t->next = threads;
            store_release(&threads, t); /* gate_any_mark() walks without the lock */
        }
    }
    hook_lock_drop(&threads_lock);
    if (t && thread_key_ok)
        pthread_setspecific(thread_key, t);
    gate_self = t;
    return t;
}

bool gate_any_mark(const struct gate *g)
{
    for (struct gate_thread *t = load_acquire(&threads); t; t = t->next)
        if (load_acquire(&t->in) && load_relaxed(&t->gate) == g)
            return true;
    return false;
}

void gate_clear_marks(const struct gate *g)
{
    for (struct gate_thread *t = load_acquire(&threads); t; t = t->next)
        if (load_relaxed(&t->gate) == g)
            store_release(&t->in, 0);
}

/* ---- fork ---- */

/* Closed, not joined. */
static void gate_init(int i)
{
    memset(&gates[i], 0, sizeof gates[i]);
    gates[i].accept = CGPU_ACCEPT_NONE;
    gates[i].ctl = (const volatile struct cgpu_ctl *)(void *)pages[i];
    gates[i].bell = -1;
    gates[i].index = i;
}

static void after_fork(void)
{
    struct gate_thread *t = gate_self;
    if (sock >= 0)
        close(sock);
    if (agent_fd >= 0)
        close(agent_fd);
    for (int i = 0; i < count; i++) {
        if (gates[i].bell >= 0)
            close(gates[i].bell);
        mmap(pages[i], sizeof pages[i], PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        gate_init(i);
    }
    sock = agent_fd = -1;
    count = 0;
    memset(&joining, 0, sizeof joining);
    memset(&threads_lock, 0, sizeof threads_lock);
    threads = t; /* the others do not exist here */
    if (t) {
        thread_reset(t);
        t->next = NULL;
    }
    agent_after_fork();
    streams_after_fork();
}

/* ---- joining ---- */

struct offer { /* what the daemon sent: descriptors and the pages, mapped where they do not matter yet */
    struct cgpu_welcome welcome;
    int sock, nfds, fds[MAX_FDS];
    struct cgpu_report *report[CGPU_MAX_GPUS];
};

static void offer_drop(struct offer *offer)
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

static void nap(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    nanosleep(&t, NULL);
}

static bool folder_exists(const char *path)
{
    char copy[sizeof socket_path];
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
        nap(5000000);
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
        nap(50000);
    }
}

/* The slot the daemon gave us, clean: what a dead predecessor held is given back. */
static int take_slot(struct cgpu_report *report, const struct cgpu_welcome_gpu *gpu)
{
    struct cgpu_slot *slot = &report->slot[gpu->slot];
    int error = ledger_lock(report);
    if (error)
        return error;
    if (load_relaxed(&slot->gen)) {
        uint64_t held = load_relaxed(&slot->mem_used), total = load_relaxed(&report->mem_total_used);
        store_relaxed(&report->mem_total_used, total > held ? total - held : 0);
    }
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

/* Puts `fd` where `*place` is (the number must not change while others use it), or at a high number. Consumes fd. */
static void settle(int *place, int fd)
{
    int at = load_relaxed(place);
    if (at >= 0 && dup3(fd, at, O_CLOEXEC) == at) {
        close(fd);
        return;
    }
    int high = fcntl(fd, F_DUPFD_CLOEXEC, HIGH_FD);
    if (high >= 0)
        close(fd);
    store_release(place, high >= 0 ? high : fd);
}

static ino_t inode(int fd)
{
    struct stat st; /* the call itself: glibc's fstat() is a new symbol in 2.33 */
    return syscall(SYS_fstat, fd, &st) == 0 ? st.st_ino : 0;
}

static bool commit(struct offer *offer)
{
    bool mapped = true;
    for (int i = 0; i < (int)offer->welcome.ngpus; i++) {
        struct gate *g = &gates[i];
        const struct cgpu_welcome_gpu *gpu = &offer->welcome.gpu[i];
        const int *fd = &offer->fds[1 + 3 * i];
        hook_lock_take(&g->lock);
        store_relaxed(&g->accept, CGPU_ACCEPT_NONE); /* a word of the old page must not open the new one */
        g->state = GATE_CLOSED;
        g->orphan = false;
        g->refused = 0;
        if (mmap(pages[i], sizeof pages[i], PROT_READ, MAP_FIXED | MAP_SHARED, fd[0], 0) == MAP_FAILED)
            mapped = false; /* the place keeps what it had: closed, until the fallback opens it */
        store_release(&g->slot, gpu->slot_gen && !(flags & CGPU_HELLO_INFO) ? &offer->report[i]->slot[gpu->slot] : NULL);
        store_release(&g->report, offer->report[i]);
        settle(&g->bell, fd[2]);
        hook_lock_drop(&g->lock);
        close(fd[0]);
        close(fd[1]);
    }
    settle(&agent_fd, offer->fds[0]);
    settle(&sock, offer->sock);
    sock_ino = inode(sock);
    joined_ns = now_ns();
    store_release(&count, (int)offer->welcome.ngpus);
    return mapped;
}

/* A program that closes every descriptor may have opened its own under our numbers: leave those alone. */
static void forget_stolen(void)
{
    if (sock >= 0 && inode(sock) != sock_ino) {
        sock = agent_fd = -1;
        for (int i = 0; i < count; i++)
            gates[i].bell = -1;
    }
}

static int attach(uint64_t until, struct cgpu_welcome *welcome)
{
    struct offer offer = {.sock = connect_until(socket_path, until)};
    if (offer.sock < 0)
        return offer.sock;
    struct cgpu_hello hello = {.magic = CGPU_ABI_MAGIC, .version = CGPU_ABI_VERSION, .pid = (uint32_t)getpid(), .flags = flags};
    int error = 0;
    if (send(offer.sock, &hello, sizeof hello, MSG_NOSIGNAL) != (ssize_t)sizeof hello)
        error = -errno;
    if (!error)
        error = receive(&offer, now_ns() + JOIN_NS);
    if (!error)
        error = check(&offer);
    if (!error && count && (int)offer.welcome.ngpus < count)
        error = -EPROTO; /* an instance's GPUs do not change */
    if (welcome)
        *welcome = offer.welcome;
    if (error) {
        offer_drop(&offer);
        return error;
    }
    forget_stolen();
    commit(&offer);
    return 0;
}

static void membarrier_register(void)
{
    membarrier_ok = syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0) == 0;
}

int gate_join(const char *path, uint32_t hello_flags, struct cgpu_welcome *welcome)
{
    int saved = errno;
    if (strlen(path) >= sizeof socket_path)
        return -ENAMETOOLONG;
    hook_lock_take(&joining);
    strcpy(socket_path, path);
    flags = hello_flags;
    if (!atfork_ok)
        atfork_ok = pthread_atfork(NULL, NULL, after_fork) == 0;
    if (!membarrier_ok)
        membarrier_register();
    int error = attach(now_ns() + JOIN_NS, welcome);
    hook_lock_drop(&joining);
    errno = saved;
    return error;
}

int gate_rejoin(void)
{
    hook_lock_take(&joining);
    int error = attach(0, NULL);
    hook_lock_drop(&joining);
    if (!error)
        for (int i = 0; i < count; i++) {
            if (rejoined)
                rejoined(i);
            gate_wake_waiters(&gates[i]);
        }
    return error;
}

void gate_disconnected(void)
{
    hook_lock_take(&joining);
    forget_stolen();
    if (sock >= 0)
        close(sock);
    store_release(&sock, -1);
    hook_lock_drop(&joining);
}

/* ---- opening ---- */

bool gate_daemon_silent(const struct gate *g, uint64_t now)
{
    uint64_t beat = load_relaxed(&g->ctl->heartbeat_ns);
    if (beat < joined_ns)
        beat = joined_ns; /* a page made this moment has none yet */
    return now > beat && now - beat > CGPU_ORPHAN_NS;
}

uint64_t gate_deadline(const struct gate *g, uint64_t word)
{
    if (load_acquire(&g->ctl->grant) != word || gate_socket() < 0)
        return 0; /* nobody would take over: keep what we have */
    uint64_t deadline = load_acquire(&g->ctl->deadline_ns);
    return load_acquire(&g->ctl->grant) == word ? deadline : 0;
}

/* The word is granted: say so, then look again. gate.lock held. */
static bool accept_word(struct gate *g, uint64_t word, uint64_t now)
{
    struct cgpu_slot *slot = g->slot;
    store_relaxed(&slot->drained, 0);
    store_relaxed(&slot->idle, 0);
    store_relaxed(&slot->acked, 0);
    store_release(&slot->opened, word);
    fence_seq_cst(); /* pairs with the daemon's: it closes the word, then looks at `opened` */
    if (load_relaxed(&g->ctl->grant) == word) {
        g->state = GATE_HELD;
        g->word = word;
        g->orphan = false;
        g->opened_ns = now;
        g->idle_since = 0;
        store_relaxed(&g->turn, g->turn + 1);
        store_release(&g->accept, word);
        return true;
    }
    if (g->state == GATE_CLOSED) {
        store_release(&slot->acked, word);
        store_release(&slot->drained, word);
        gate_bell(g);
    } else {
        g->word = word; /* the release under way of the word before acknowledges this one */
    }
    return false;
}

bool gate_try_open(struct gate *g)
{
    hook_lock_take(&g->lock);
    uint64_t word = load_acquire(&g->ctl->grant), now = now_ns();
    bool open = word == g->accept, alarm = false, kick = false;
    if (g->state == GATE_CLOSING) { /* the agent has yet to see all marks gone and takes back what was handed out */
        hook_lock_drop(&g->lock);
        return false;
    }
    if (g->slot == NULL) { /* an NVML-only process that launches all the same: nobody counts on its answers */
        store_relaxed(&g->accept, word);
        open = true;
    }
    if (!open && (word & 1) && word != g->refused) {
        open = accept_word(g, word, now);
        kick = open && load_relaxed(&g->ctl->deadline_ns) != 0; /* the agent keeps the time */
    }
    if (!open && gate_daemon_silent(g, now) && !(load_relaxed(&g->ctl->flags) & (CTL_PAUSED | CTL_SHUT))) {
        alarm = !g->orphan;
        g->orphan = true;
        g->state = GATE_HELD;
        g->word = word;
        store_relaxed(&g->turn, g->turn + 1);
        if (g->slot)
            fetch_add(&g->slot->ungated, 1);
        store_release(&g->accept, word);
        open = kick = true;
    }
    hook_lock_drop(&g->lock);
    if (kick)
        gate_kick();
    if (alarm)
        hook_log("warning", "the daemon does not answer; running ungated gpu=%d", g->index);
    return open;
}

void gate_wait(struct gate *g)
{
    struct cgpu_slot *asked = NULL;
    for (;;) {
        uint64_t word = load_acquire(&g->ctl->grant); /* before the look: a change in between ends the sleep at once */
        if (gate_try_open(g))
            break;
        struct cgpu_slot *slot = load_acquire(&g->slot);
        if (slot != asked) { /* at first, and again in a new daemon's page */
            asked = slot;
            if (slot && fetch_add(&slot->demand, 1) == 0)
                gate_bell(g);
        }
        if (__atomic_load_n(&g->state, __ATOMIC_ACQUIRE) == GATE_CLOSING) {
            nap(CLOSING_NAP_NS); /* a matter of microseconds */
            continue;
        }
        struct timespec t = {.tv_nsec = WAIT_NS};
        futex(futex_word(g), FUTEX_WAIT, (uint32_t)word, &t);
    }
    if (asked)
        fetch_sub(&asked->demand, 1);
}

bool gate_let_go(struct gate *g, uint64_t word, enum gate_reason reason)
{
    hook_lock_take(&g->lock);
    bool held = g->state == GATE_HELD && g->word == word && !g->orphan;
    if (held) {
        store_relaxed(&g->accept, CGPU_ACCEPT_NONE); /* the agent's membarrier comes before it trusts the marks */
        g->state = GATE_CLOSING;
        g->reason = reason;
        g->closing_ns = now_ns();
        if (reason == GATE_DEADLINE)
            g->refused = word;
    }
    hook_lock_drop(&g->lock);
    return held;
}

__attribute__((constructor)) static void start(void)
{
    for (int i = 0; i < CGPU_MAX_GPUS; i++)
        gate_init(i);
}
