/* agent.c: the thread "cgpu-agent", one a process, that keeps the gates' promises to the daemon.
 *
 * It sleeps in ppoll() on the agent eventfd (the daemon changed a page, or a launcher wants something), on the socket (its end
 * is the daemon's death) and on the nearest of its own times. Each gate is a small state machine (step()), so that one thread
 * serves sixteen; no step waits for the device.
 *
 * Times and why: marks are held for the length of a launch, so 200 yields find them clear nearly always, then naps; a thread
 * that left its launch by longjmp is given up after 2 s. Before the early acknowledgement 250 us between looks is plenty, for
 * its moment is predicted; after it 20 us, because the look that finds the device drained is where the daemon moves the
 * charge from us to our successor. */
#define _GNU_SOURCE
#include <errno.h>
#include <linux/membarrier.h>
#include <poll.h>
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "client.h"
#include "hook.h"
#include "internal.h"
#include "stall.h"

#define MARK_SPINS      200
#define MARK_NAP_NS     50000u
#define MARK_PATIENCE_NS 2000000000ull
/* After its predicted end, work is waited for so long and then called done, and counted as dirty. What it waits for may be
 * a thread of ours at the closed gate (stall.h), and the daemon grants nothing to who has not drained. */
#define DRAIN_PATIENCE_NS 10000000000ull
#define STALL_PATIENCE_NS 250000000ull
#define LOOK_NS         250000u
#define LOOK_NEAR_NS    20000u
#define GUARD_NS        3000u    /* a prediction's error: our successor is rather late than early */
#define ASIDE_NS        50000u   /* a look later than the predicted end, which is when our successor needs its core */
#define LAST_LOOKS_NS   1000000u /* so long before the end of a turn: is it full? */
#define BLURRED_LOOK_NS 50000u
#define OVERDUE_BLURS   4
#define BLUR_MAX_NS     4000000u /* about two of a device's time slices; forgotten in some 50 turns */
#define BUSY_LOOK_NS    1000000u /* is it idle? only while it holds the gate and others want the device */
#define BEAT_LOOK_NS    100000000u
#define REJOIN_SOON_NS  40000000ull  /* a failed try costs some 20 us, and a daemon that is back is to find all of us soon */
#define REJOIN_LATER_NS 200000000ull
#define REJOIN_SOON_TRIES 50
#define NEVER           UINT64_MAX

static struct hook_lock starting;
static bool started;
static bool at_exit_set;
static uint64_t rejoin_at, rejoin_tries;

static uint64_t min_u64(uint64_t a, uint64_t b) { return a < b ? a : b; }

/* ---- letting go ---- */

static uint64_t begin(struct gate *g, enum gate_reason reason, uint64_t now)
{
    gate_let_go(g, load_relaxed(&g->word), reason);
    store_relaxed(&g->closing_ns, now);
    return now;
}

static uint64_t step_held(struct gate *g, uint64_t now)
{
    if (load_relaxed(&g->orphan)) {
        if (!gate_daemon_silent(g, now)) { /* it is back: what it says counts again */
            hook_lock_take(&g->lock);
            if (g->orphan) {
                store_relaxed(&g->accept, CGPU_ACCEPT_NONE);
                store_relaxed(&g->state, GATE_CLOSED);
                store_relaxed(&g->orphan, false);
            }
            hook_lock_drop(&g->lock);
            return NEVER;
        }
        return now + BEAT_LOOK_NS;
    }
    uint64_t word = load_relaxed(&g->word);
    if (load_acquire(&g->ctl->grant) != word)
        return begin(g, GATE_REVOKED, now);
    uint64_t deadline = gate_deadline(g, word);
    if (deadline == 0)
        return NEVER; /* nobody waits; the daemon pokes us when somebody does */
    if (now >= deadline || (now + LAST_LOOKS_NS >= deadline && streams_turn_is_full(g, now, deadline)))
        return begin(g, GATE_DEADLINE, now); /* a launcher that waits for its work cannot, and it would be late afterwards */
    uint64_t submitted = streams_submitted(g), next = now + BUSY_LOOK_NS;
    bool hint = __atomic_exchange_n(&g->idle_hint, 0, __ATOMIC_ACQ_REL) != 0;
    if (submitted != g->idle_sum && !hint) {
        g->idle_sum = submitted;
        store_relaxed(&g->idle_since, 0);
    } else if (streams_quiet(g, now)) {
        if (submitted != g->idle_sum || load_relaxed(&g->idle_since) == 0) {
            uint64_t start = gate_start(g, word);
            g->idle_sum = submitted;
            store_relaxed(&g->idle_since, start > now ? start : now);
        }
        uint64_t idle_at = load_relaxed(&g->idle_since) + load_relaxed(&g->ctl->grace_ns);
        if (now >= idle_at)
            return begin(g, GATE_IDLE, now);
        next = idle_at;
    } else {
        g->idle_sum = submitted;
        store_relaxed(&g->idle_since, 0);
    }
    uint64_t last = now + LAST_LOOKS_NS < deadline ? deadline - LAST_LOOKS_NS : now + LAST_LOOKS_NS / 3;
    return min_u64(min_u64(next, last), deadline);
}

static bool marks_clear(struct gate *g)
{
    for (int i = 0; i < MARK_SPINS; i++) {
        if (!gate_any_mark(g))
            return true;
        sched_yield();
    }
    return false;
}

static uint64_t step_closing(struct gate *g, uint64_t now)
{
    /* Every launch that our `accept = NONE` came too late for is marked by now, and every later one sees NONE. */
    if (gate_has_membarrier())
        syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
    else
        fence_seq_cst(); /* the launchers mark with an exchange then (streams.c) */
    if (!marks_clear(g)) {
        if (now - load_relaxed(&g->closing_ns) < MARK_PATIENCE_NS)
            return now + MARK_NAP_NS;
        fetch_add(&g->slot->dirty, 1);
        gate_clear_marks(g);
    }
    streams_close(g, now_ns());
    hook_lock_take(&g->lock);
    if (g->state == GATE_CLOSING)
        store_relaxed(&g->state, GATE_DRAINING);
    hook_lock_drop(&g->lock);
    return now;
}

/* What should have ended at `end` has not, long after that and after it began to let go or acknowledged. */
static bool is_stuck(const struct gate *g, uint64_t now, uint64_t end)
{
    uint64_t since = load_relaxed(&g->closing_ns);
    if (g->foreseen_ns > since)
        since = g->foreseen_ns;
    return g->slot && end <= now + STREAMS_UNKNOWN_NS &&
           now > since + (stall_is_possible() ? STALL_PATIENCE_NS : DRAIN_PATIENCE_NS);
}

/* All of it ended at `end`. Work that ends later than foreseen, as where a stream's kernels differ in length, must not be
 * acknowledged early: a device that shares its time lets our successor cut in, and we would pay for that. */
static void foresight(struct gate *g, uint64_t end)
{
    uint64_t late = g->foreseen_ns && end > g->foreseen_ns ? end - g->foreseen_ns : 0;
    if (late > BLUR_MAX_NS)
        late = BLUR_MAX_NS;
    g->blur_ns = late > g->blur_ns ? late : g->blur_ns - g->blur_ns / 16;
    g->foreseen_ns = 0;
}

/* A bad prediction must not cost a core. */
static uint64_t look_again(const struct gate *g, uint64_t now)
{
    uint64_t late = g->foreseen_ns && now > g->foreseen_ns ? (now - g->foreseen_ns) / 8 : 0;
    return late < LOOK_NEAR_NS ? LOOK_NEAR_NS : min_u64(late, LOOK_NS);
}

static uint64_t step_draining(struct gate *g, uint64_t now)
{
    uint64_t end = 0, word, next = NEVER;
    bool drained = streams_drained(g, now, &end), ring = false;
    now = now_ns();
    if (!drained && is_stuck(g, now, end)) {
        fetch_add(&g->slot->dirty, 1);
        streams_abandon(g);
        drained = true;
    }
    uint64_t overlap = load_relaxed(&g->ctl->overlap_ns);
    bool near = end <= now + overlap;
    if (drained)
        foresight(g, end);
    else if (near && !g->foreseen_ns)
        g->foreseen_ns = end;
    if (near && g->blur_ns > overlap) /* then only when it is long overdue: whatever it waits for may be behind our own gate */
        near = now > g->foreseen_ns + OVERDUE_BLURS * g->blur_ns;
    hook_lock_take(&g->lock);
    struct cgpu_slot *slot = g->slot;
    word = g->word;
    if (g->state == GATE_DRAINING && slot) { /* else a launcher accepted the next word meanwhile, or a new daemon came */
        bool acked = load_relaxed(&slot->acked) == word;
        bool soft = load_relaxed(&g->ctl->flags) & CTL_NODRAIN;
        if (!acked && (drained || soft || near)) {
            store_relaxed(&slot->inflight_ns, drained || end <= now ? 0 : end - now);
            store_relaxed(&slot->end_ns, end + GUARD_NS);
            if (g->reason == GATE_IDLE)
                store_relaxed(&slot->idle, word);
            store_release(&slot->acked, word);
            acked = ring = true;
            store_relaxed(&g->closing_ns, now); /* from here on: when it was acknowledged */
        } else if (!acked) {
            store_relaxed(&slot->inflight_ns, end > now ? end - now : 0);
        }
        if (drained) {
            store_relaxed(&slot->end_ns, end);
            store_release(&slot->drained, word);
            store_relaxed(&g->state, GATE_CLOSED);
            ring = true;
        } else if (acked) {
            next = now + (soft ? LOOK_NS : look_again(g, now));
            if (next < end + ASIDE_NS)
                next = min_u64(end + ASIDE_NS, now + LOOK_NS);
        } else {
            uint64_t wait = end > now + overlap ? end - now - overlap : 0;
            next = now + (wait < LOOK_NEAR_NS ? look_again(g, now) : min_u64(wait, g->blur_ns > overlap ? BLURRED_LOOK_NS : LOOK_NS));
        }
    }
    hook_lock_drop(&g->lock);
    if (ring)
        gate_bell(g);
    return next;
}

/* One gate as far as it goes now; gives when to look again. */
static uint64_t step(struct gate *g)
{
    for (;;) {
        uint64_t now = now_ns(), next = NEVER;
        enum gate_state before = __atomic_load_n(&g->state, __ATOMIC_ACQUIRE);
        if (g->slot == NULL && before != GATE_HELD)
            return NEVER;
        switch (before) {
        case GATE_CLOSED: return NEVER;
        case GATE_HELD: next = step_held(g, now); break;
        case GATE_CLOSING: next = step_closing(g, now); break;
        case GATE_DRAINING: next = step_draining(g, now); break;
        }
        if (next > now)
            return next;
    }
}

/* ---- the daemon's death ---- */

static uint64_t step_link(uint64_t now)
{
    if (gate_socket() >= 0)
        return NEVER;
    if (now < rejoin_at)
        return rejoin_at;
    if (gate_rejoin() == 0) {
        hook_log("info", "joined the daemon again");
        return NEVER;
    }
    return rejoin_at = now + (rejoin_tries++ < REJOIN_SOON_TRIES ? REJOIN_SOON_NS : REJOIN_LATER_NS);
}

static void look_at_socket(int fd)
{
    if (gate_hear(fd))
        return;
    hook_log("info", "the daemon is gone; will join again");
    gate_disconnected();
    rejoin_at = rejoin_tries = 0;
}

/* ---- the thread ---- */

static void *agent(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "cgpu-agent", 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); /* 1 us instead of 50: the naps above are short */
    streams_agent_thread();
    for (;;) {
        uint64_t next = step_link(now_ns());
        for (int i = 0; i < gate_count(); i++)
            next = min_u64(next, step(gate_of(i)));
        uint64_t now = now_ns(), left = next > now ? next - now : 0;
        struct timespec timeout = {.tv_sec = (time_t)(left / 1000000000u), .tv_nsec = (long)(left % 1000000000u)};
        int fd = gate_socket();
        struct pollfd polls[3] = {{.fd = gate_agent_fd(), .events = POLLIN}, {.fd = gate_kick_fd(), .events = POLLIN},
                                  {.fd = fd, .events = POLLIN}};
        if (ppoll(polls, 3, next == NEVER ? NULL : &timeout, NULL) <= 0)
            continue;
        uint64_t rings;
        for (int i = 0; i < 2; i++)
            if (polls[i].revents & POLLIN) {
                ssize_t n = read(polls[i].fd, &rings, sizeof rings);
                (void)n;
            }
        if (polls[2].revents)
            look_at_socket(fd);
        if ((polls[0].revents & ~POLLIN) && gate_socket() >= 0) /* closed under us: get a new one */
            gate_disconnected();
    }
    return NULL;
}

static void at_exit(void) { streams_give_up(); }

void agent_start(void)
{
    if (__builtin_expect(load_acquire(&started), 1))
        return;
    hook_lock_take(&starting);
    if (!started) {
        sigset_t all, old;
        pthread_t thread;
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &old); /* the thread inherits it */
        int error = pthread_create(&thread, NULL, agent, NULL);
        pthread_sigmask(SIG_SETMASK, &old, NULL);
        if (error) {
            hook_log("error", "no agent thread: %d", error); /* tried again by the next slow launch */
        } else {
            pthread_detach(thread);
            store_release(&started, true);
            if (!at_exit_set)
                atexit(at_exit); /* after the driver's own, so it runs before them */
            at_exit_set = true;
        }
    }
    hook_lock_drop(&starting);
}

void agent_after_fork(void)
{
    starting.word = 0;
    started = false;
    rejoin_at = rejoin_tries = 0;
}
