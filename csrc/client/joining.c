/* joining.c: this process's gates, their pages, and the connection they hang on. See client.h. */
#define _GNU_SOURCE
#include "client.h"

#include <errno.h>
#include <fcntl.h>
#include <linux/membarrier.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

#include "internal.h"
#include "offer.h"

#define JOIN_NS   2000000000ull /* as long as a daemon may take to restart */
#define HIGH_FD   512           /* ours stay out of the way of programs that count on low numbers */

/* The control pages lie inside this library, so that there is a valid, closed page before anything was joined and the
 * address never changes: a rejoin maps the new page over the old one. */
static _Alignas(4096) unsigned char pages[CGPU_MAX_GPUS][4096];
static struct gate gates[CGPU_MAX_GPUS];
static uint8_t uuids[CGPU_MAX_GPUS][16]; /* theirs */
static int count;

static struct hook_lock joining;
static char socket_path[sizeof((struct sockaddr_un *)0)->sun_path];
static uint32_t flags;
static int sock = -1, agent_fd = -1;
static int kick_fd = -1;            /* our own: what we write to agent_fd may go to the daemon, as on a socket */
static ino_t sock_ino;              /* tells our socket from what a program that closed all descriptors opened there */
static uint64_t joined_ns;
static bool membarrier_ok;
static void (*rejoined)(int index);
/* What the slots counted when the connection ended: the daemon may have read that. What is counted from then on goes into the
 * next slot, so that its daemon hears of it. */
static struct counted {
    uint64_t launches, ungated, dirty, mem_refused;
} told[CGPU_MAX_GPUS];
static bool away; /* `told` is of the present slots */
static uint64_t gone_ns; /* since then */

int gate_count(void) { return load_acquire(&count); }
struct gate *gate_of(int index) { return &gates[index]; }
int gate_socket(void) { return load_acquire(&sock); }
int gate_agent_fd(void) { return load_acquire(&agent_fd); }
int gate_kick_fd(void) { return load_acquire(&kick_fd); }
uint64_t gate_joined(void) { return load_relaxed(&joined_ns); }
bool gate_has_membarrier(void) { return load_relaxed(&membarrier_ok); }
void gate_on_rejoin(void (*enter)(int index)) { rejoined = enter; }

/* Closed, not joined. */
static void gate_init(int i)
{
    memset(&gates[i], 0, sizeof gates[i]);
    gates[i].accept = CGPU_ACCEPT_NONE;
    gates[i].ctl = (const volatile struct cgpu_ctl *)(void *)pages[i];
    gates[i].bell = -1;
    gates[i].index = i;
}

__attribute__((constructor)) static void start(void)
{
    for (int i = 0; i < CGPU_MAX_GPUS; i++)
        gate_init(i);
}

/* The child is not joined and holds nothing. */
void joining_after_fork(void)
{
    if (sock >= 0)
        close(sock);
    if (agent_fd >= 0)
        close(agent_fd);
    if (kick_fd >= 0)
        close(kick_fd);
    for (int i = 0; i < count; i++) {
        if (gates[i].bell >= 0)
            close(gates[i].bell);
        mmap(pages[i], sizeof pages[i], PROT_READ, MAP_FIXED | MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        gate_init(i);
    }
    sock = agent_fd = kick_fd = -1;
    count = 0;
    away = false;
    memset(&joining, 0, sizeof joining);
}

/* ---- joining ---- */

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

static struct counted counted(const struct cgpu_slot *slot)
{
    return (struct counted){load_relaxed(&slot->launches), load_relaxed(&slot->ungated), load_relaxed(&slot->dirty),
                            load_relaxed(&slot->mem_refused)};
}

/* Counts in a slot are since it was taken: its predecessor's are the daemon's already. */
static void hand_on(struct gate *g, const struct cgpu_slot *old)
{
    struct cgpu_slot *slot = g->slot;
    if (!old || !slot || old == slot)
        return;
    g->unknown_before += load_relaxed(&old->unknown);
    if (away) {
        struct counted now = counted(old), then = told[g->index];
        fetch_add(&slot->launches, now.launches - then.launches);
        fetch_add(&slot->ungated, now.ungated - then.ungated);
        fetch_add(&slot->dirty, now.dirty - then.dirty);
        fetch_add(&slot->mem_refused, now.mem_refused - then.mem_refused);
    }
}

/* Device time used since the daemon went, by what it had granted. None if nobody else wanted the device then. */
static uint64_t used_away(const struct gate *g, uint64_t now)
{
    if (!away || !g->slot || load_relaxed(&g->ctl->deadline_ns) == 0)
        return 0;
    uint64_t passed = now - gone_ns, length = load_relaxed(&g->slot->kernel_ns);
    uint64_t launches = load_relaxed(&g->slot->launches) - told[g->index].launches;
    return length && launches > passed / length ? passed : launches * length;
}

/* Which gate each GPU of the offer has: the next one at first, later that of its UUID. An instance's GPUs do not change, but one
 * may have gone for good or for a while: its gate stays as it was left. false: it offers others. */
static bool find_places(const struct offer *offer, int place[CGPU_MAX_GPUS])
{
    for (int i = 0, next = 0; i < (int)offer->welcome.ngpus; i++, next++) {
        while (count && next < count && memcmp(uuids[next], offer->welcome.gpu[i].uuid, sizeof uuids[next]))
            next++;
        if (count && next == count)
            return false;
        place[i] = next;
    }
    return true;
}

static bool commit(struct offer *offer, const int place[CGPU_MAX_GPUS])
{
    bool mapped = true;
    int most = count;
    for (int i = 0; i < (int)offer->welcome.ngpus; i++) {
        int at = place[i];
        struct gate *g = &gates[at];
        const struct cgpu_welcome_gpu *gpu = &offer->welcome.gpu[i];
        const int *fd = &offer->fds[1 + 3 * i];
        hook_lock_take(&g->lock);
        uint64_t used = used_away(g, now_ns());
        store_relaxed(&g->accept, CGPU_ACCEPT_NONE); /* a word of the old page must not open the new one */
        store_relaxed(&g->state, GATE_CLOSED);
        store_relaxed(&g->orphan, false);
        store_relaxed(&g->refused, 0);
        if (mmap(pages[at], sizeof pages[at], PROT_READ, MAP_FIXED | MAP_SHARED, fd[0], 0) == MAP_FAILED)
            mapped = false; /* the place keeps what it had: closed, until the fallback opens it */
        const struct cgpu_slot *old = g->slot;
        store_release(&g->slot, gpu->slot_gen && !(flags & CGPU_HELLO_INFO) ? &offer->report[i]->slot[gpu->slot] : NULL);
        hand_on(g, old);
        if (g->slot)
            store_relaxed(&g->slot->away_ns, used);
        store_relaxed(&g->told, gpu->flags);
        store_release(&g->report, offer->report[i]);
        settle(&g->bell, fd[2]);
        memcpy(uuids[at], gpu->uuid, sizeof uuids[at]);
        if (at >= most)
            most = at + 1;
        hook_lock_drop(&g->lock);
        close(fd[0]);
        close(fd[1]);
    }
    settle(&agent_fd, offer->fds[0]);
    int kick = kick_fd < 0 ? eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK) : -1;
    if (kick >= 0)
        settle(&kick_fd, kick);
    settle(&sock, offer->sock);
    store_relaxed(&sock_ino, inode(sock));
    store_relaxed(&joined_ns, now_ns());
    store_release(&count, most);
    away = false;
    return mapped;
}

/* A program that closes every descriptor may have opened its own under our numbers: leave those alone. */
static void forget_stolen(void)
{
    if (sock >= 0 && inode(sock) != sock_ino) {
        store_relaxed(&sock, -1);
        store_relaxed(&agent_fd, -1);
        store_relaxed(&kick_fd, -1);
        for (int i = 0; i < count; i++)
            store_relaxed(&gates[i].bell, -1);
    }
}

int gate_own_socket(void)
{
    hook_lock_take(&joining);
    forget_stolen();
    int fd = sock;
    hook_lock_drop(&joining);
    return fd;
}

bool gate_owns(int fd) { return inode(fd) == load_relaxed(&sock_ino); }

static int attach(uint64_t until, struct cgpu_welcome *welcome)
{
    struct offer offer;
    int place[CGPU_MAX_GPUS];
    int error = offer_get(&offer, socket_path, flags, until);
    if (!error && !find_places(&offer, place))
        error = -EPROTO;
    if (welcome)
        *welcome = offer.welcome;
    if (error) {
        offer_drop(&offer);
        return error;
    }
    forget_stolen();
    commit(&offer, place);
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
    threads_prepare_fork();
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
    for (int i = 0; i < count && !away; i++)
        if (gates[i].slot)
            told[i] = counted(gates[i].slot);
    gone_ns = away ? gone_ns : now_ns();
    away = true;
    /* Who let go at its deadline may have the word again if it still shows: nobody else was granted the device since. */
    for (int i = 0; i < count; i++) {
        hook_lock_take(&gates[i].lock);
        store_relaxed(&gates[i].refused, 0);
        hook_lock_drop(&gates[i].lock);
        gate_wake_waiters(&gates[i]);
    }
    hook_lock_drop(&joining);
}
