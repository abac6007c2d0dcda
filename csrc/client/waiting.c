/* waiting.c: opening the gate, waiting for it, letting go of it, and waking who waits. See client.h. */
#define _GNU_SOURCE
#include "client.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hook.h"
#include "internal.h"

#define WAIT_NS   100000000ull  /* one sleep of a waiting launcher, between two looks at the daemon's heartbeat */
#define CLOSING_NAP_NS 20000

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

void gate_kick(void) { ring(gate_kick_fd()); }
void gate_bell(const struct gate *g) { ring(load_relaxed(&g->bell)); }

void gate_nap(uint64_t ns)
{
    struct timespec t = {.tv_sec = (time_t)(ns / 1000000000u), .tv_nsec = (long)(ns % 1000000000u)};
    nanosleep(&t, NULL);
}

bool gate_daemon_silent(const struct gate *g, uint64_t now)
{
    uint64_t beat = load_relaxed(&g->ctl->heartbeat_ns);
    if (beat < gate_joined())
        beat = gate_joined(); /* a page made this moment has none yet */
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
        store_relaxed(&g->state, GATE_HELD);
        store_relaxed(&g->word, word);
        store_relaxed(&g->orphan, false);
        g->opened_ns = now;
        store_relaxed(&g->idle_since, 0);
        store_relaxed(&g->turn, g->turn + 1);
        store_release(&g->accept, word);
        return true;
    }
    if (g->state == GATE_CLOSED) {
        store_release(&slot->acked, word);
        store_release(&slot->drained, word);
        gate_bell(g);
    } else {
        store_relaxed(&g->word, word); /* the release under way of the word before acknowledges this one */
    }
    return false;
}

bool gate_try_open(struct gate *g)
{
    hook_lock_take(&g->lock);
    uint64_t word = load_acquire(&g->ctl->grant), now = now_ns();
    bool open = word == g->accept, alarm = false, kick = false, accepted = false;
    if (g->state == GATE_CLOSING) { /* the agent has yet to see all marks gone and takes back what was handed out */
        hook_lock_drop(&g->lock);
        return false;
    }
    if (g->slot == NULL) { /* an NVML-only process that launches all the same: nobody counts on its answers */
        store_relaxed(&g->accept, word);
        open = true;
    }
    if (!open && (word & 1) && word != g->refused) {
        open = accepted = accept_word(g, word, now);
    }
    if (!open && gate_daemon_silent(g, now) && !(load_relaxed(&g->ctl->flags) & (CTL_PAUSED | CTL_SHUT))) {
        alarm = !g->orphan;
        store_relaxed(&g->orphan, true);
        store_relaxed(&g->state, GATE_HELD);
        store_relaxed(&g->word, word);
        store_relaxed(&g->turn, g->turn + 1);
        if (g->slot)
            fetch_add(&g->slot->ungated, 1);
        store_release(&g->accept, word);
        open = kick = true;
    }
    hook_lock_drop(&g->lock);
    if (accepted) { /* a ring from before `state` could be seen woke an agent with nothing to do: what it was about is seen now */
        fence_seq_cst();
        kick = load_relaxed(&g->ctl->deadline_ns) != 0 || load_relaxed(&g->ctl->grant) != word;
    }
    if (kick)
        gate_kick();
    if (alarm)
        hook_log("warning", "the daemon does not answer; running ungated gpu=%d", g->index);
    return open;
}

uint64_t gate_start(const struct gate *g, uint64_t word)
{
    uint64_t start = load_relaxed(&g->ctl->start_ns);
    return load_acquire(&g->ctl->grant) == word ? start : 0;
}

/* The agent is about to ring, and the daemon sees at that look whatever was written before. */
static bool is_leaving(const struct gate *g)
{
    enum gate_state state = __atomic_load_n(&g->state, __ATOMIC_SEQ_CST);
    return state == GATE_CLOSING || state == GATE_DRAINING;
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
            if (slot && fetch_add(&slot->demand, 1) == 0 && !is_leaving(g))
                gate_bell(g);
        }
        if ((word & 1) && word != load_relaxed(&g->refused)) { /* a release under way keeps us out, and nobody wakes us after it */
            gate_nap(CLOSING_NAP_NS); /* a matter of microseconds */
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
        store_relaxed(&g->state, GATE_CLOSING);
        g->reason = reason;
        store_relaxed(&g->closing_ns, now_ns());
        if (reason == GATE_DEADLINE)
            store_relaxed(&g->refused, word);
    }
    hook_lock_drop(&g->lock);
    return held;
}
