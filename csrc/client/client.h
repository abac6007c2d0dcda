/* client.h: the gate as an intercepted process sees it. Linked into libcgpu-hook.so.1.
 *
 * gate_enter()/gate_leave() bracket every submission. The open path is a load of the grant word and a mark of this thread's
 * own: no lock prefix, no clock, no shared store. Everything else is out of line:
 *
 *   offer.c     asks the daemon; joining.c takes what it gives: pages, descriptors; note.c says more on the same connection
 *   threads.c   the launching threads, their marks, fork
 *   waiting.c   opening the gate, waiting for it, letting go of it
 *   agent.c     the thread that lets go of a grant: marks, early and second acknowledgement, idleness, deadlines, rejoining
 *   streams.c   what each thread submits to which stream, in lanes (lanes.h); spans.c: the events between batches of it;
 *               learning.c: how long a submission takes; draining.c: what of all that is still in flight, for the agent
 *
 * Who may write what: `accept`, `state`, `word`, `refused` and `orphan` under gate.lock (a few instructions, never around a
 * system call that waits). A lane and what a thread caches of it under gate.work, which may be held around driver calls but
 * never while waiting for the device or for the gate. gate.work is taken before gate.lock, never after.
 *
 * fork: the child is not joined, holds nothing and joins anew at its first submission. exec: every descriptor is closed.
 * Signals: the agent has all of them blocked; waiting launchers run handlers as usual. Nothing here ends the process. */
#ifndef CGPU_CLIENT_H
#define CGPU_CLIENT_H
#include <stdbool.h>
#include <stdint.h>
#include "atomics.h"
#include "cgpu_abi.h"
#include "lock.h"

enum gate_state {
    GATE_CLOSED,   /* nothing of ours is in flight under a word that the daemon still waits for */
    GATE_HELD,     /* `word` is accepted */
    GATE_CLOSING,  /* accept is NONE; a thread may still be marked */
    GATE_DRAINING, /* no mark; work in flight */
};

enum gate_reason { GATE_REVOKED, GATE_DEADLINE, GATE_IDLE };

/* Per (process, GPU). `ctl` is mapped at a fixed place that is valid (closed, zeroed or ungated) before joining too. */
struct gate {
    uint64_t accept;               /* the word this process accepted, or CGPU_ACCEPT_NONE */
    const volatile struct cgpu_ctl *ctl;
    struct cgpu_report *report;    /* NULL: not joined */
    struct cgpu_slot *slot;        /* ours in `report`; NULL: takes no part in the gate (CGPU_HELLO_INFO) */
    int bell;                      /* eventfd towards the daemon */
    int index;                     /* 0 .. gate_count() - 1 */
    uint32_t told;                 /* CGPU_GPU_* */

    /* ---- from here on: csrc/client only ---- */
    _Alignas(64) struct hook_lock lock;
    enum gate_state state;
    enum gate_reason reason;       /* of the release under way */
    uint64_t word;                 /* held or being let go of */
    uint64_t refused;              /* let go of at its deadline: closed for us although the daemon still shows it */
    bool orphan;                   /* opened by the fallback: nobody hears our acknowledgements */
    uint32_t turn;                 /* counts accepts: what was measured in another turn contains others' work */
    uint32_t filled_turn;          /* the last turn in which something was handed out (gate.work) */
    uint64_t opened_ns;            /* when `word` was accepted */
    uint64_t closing_ns;           /* when the release began */
    uint64_t foreseen_ns;          /* agent: when the work in flight should have ended, as it seemed when that was near */
    uint64_t blur_ns;              /* agent: by how much later it did end, of late */
    uint64_t idle_sum, idle_since; /* agent: submissions seen at, and time of, the last look that found all of it done */
    uint32_t idle_hint;            /* a synchronise returned, or an event was found done */
    uint64_t unknown_before;       /* slot.unknown of former slots */

    uint32_t held;                 /* submissions to several GPUs under way: a mark that any number of threads can set */
    struct hook_lock work;
    struct lane *lanes;            /* lanes.h */
};

/* Per thread, on lines of its own. The first line is the launch's. */
struct gate_thread {
    uint32_t in;                   /* the mark: submitting */
    int32_t left;                  /* submissions until the next event on `stream` */
    void *stream;                  /* what `left` is about; GATE_NO_STREAM: look it up */
    const uint64_t *word;          /* &ctl->grant of the gate that `stream` belongs to */
    struct gate *gate;
    uint64_t pad[4];
    struct lane *lane;             /* of `stream` */
    struct lane *lanes;            /* this thread's, newest first (lanes.h) */
    void *context;                 /* current one, NULL: ask */
    uint32_t in_callback;          /* runs a host function: passes ungated */
    int32_t hinted_left;
    uint32_t dead;                 /* given back; may be reused */
    struct gate_thread *next;      /* all of them; never freed, reused */
} __attribute__((aligned(128)));

#define GATE_NO_STREAM ((void *)-1)

extern __thread struct gate_thread *gate_self __attribute__((tls_model("initial-exec"), visibility("hidden")));

/* Everything but the open path: first use, another stream, an event, a closed gate. Marks the thread before it returns,
 * unless the submission is one that must pass (captured, from a host callback). Never NULL. */
struct gate_thread *gate_enter_slow(void *stream);

/* `stream`: the handle a submission goes to, NULL for the legacy default stream, CU_STREAM_PER_THREAD for the other one. */
static inline __attribute__((always_inline)) struct gate_thread *gate_enter(void *stream)
{
    struct gate_thread *t = gate_self;
    if (__builtin_expect(t != NULL, 1)) {
        store_relaxed(&t->in, 1);
        compiler_barrier(); /* pairs with the membarrier() in agent.c, between `accept = NONE` and its look at the marks */
        if (__builtin_expect(t->stream == stream && t->left > 0 && load_relaxed(t->word) == load_relaxed(&t->gate->accept), 1)) {
            t->left--;
            return t;
        }
    }
    return gate_enter_slow(stream);
}

static inline __attribute__((always_inline)) void gate_leave(struct gate_thread *t)
{
    store_release(&t->in, 0); /* the submission happens before the agent sees the mark go */
}

/* ---- joining.c, threads.c, waiting.c ---- */

/* Joins through `socket_path`. 0 and the welcome, or -errno (then nothing changed). Waits up to two seconds while the socket's
 * folder is there but nobody answers. Starts the agent thread lazily, at the first submission. After fork() the child is not
 * joined. Joining again (an NVML-only process that turns to CUDA) replaces the pages. */
int gate_join(const char *socket_path, uint32_t hello_flags, struct cgpu_welcome *welcome);
/* 0: not joined. */
int gate_count(void);
struct gate *gate_of(int index);

/* Called under no lock, whenever the daemon has given new pages (a rejoin), so that the ledger can enter what it holds.
 * Registered once by ledger.c. Old report pages stay mapped. */
void gate_on_rejoin(void (*enter)(int index));

/* note.c: tells the daemon that this process has taken memory that no hook counts, and waits until it counts, at most
 * `patience_ns`. false: it may not yet. A cancellation point. */
bool gate_note(const struct gate *g, uint64_t patience_ns);

/* The rest is for csrc/client. */

/* One more attempt with the path and flags of gate_join(), not waiting for a socket that nobody listens on. */
int gate_rejoin(void);
int gate_socket(void);                        /* the connection, or -1 */
void gate_disconnected(void);                 /* it has ended: close it */
int gate_agent_fd(void);                      /* the daemon rings it */
int gate_kick_fd(void);                       /* this process does */
bool gate_has_membarrier(void);
void gate_kick(void);                         /* wakes the agent */
void gate_bell(const struct gate *g);         /* wakes the daemon */
void gate_wake_waiters(const struct gate *g);

struct gate_thread *gate_thread_here(void);   /* this thread's, registered if need be; NULL: no memory */
bool gate_any_mark(const struct gate *g);     /* is a thread between enter and leave on this gate? */
/* Called for a thread that ends, before its block can be reused. */
void gate_on_thread_exit(void (*leave)(struct gate_thread *t));

/* Accepts the word if it is granted to us, or if the fallback applies. gate.lock not held. */
bool gate_try_open(struct gate *g);
/* Blocks until gate_try_open() succeeds. Keep no mark and no lock. */
void gate_wait(struct gate *g);
/* Lets go of `word` if it is still held (true); the agent does the rest: kick it. */
bool gate_let_go(struct gate *g, uint64_t word, enum gate_reason reason);
bool gate_daemon_silent(const struct gate *g, uint64_t now); /* its heartbeat is too old */
/* When this turn should end; 0: nobody else wants the device, or the word is not `word` any more. */
uint64_t gate_deadline(const struct gate *g, uint64_t word);

/* When the work before ours is predicted to have drained; 0: nothing in the way, or the word is not `word` any more. */
uint64_t gate_start(const struct gate *g, uint64_t word);

/* ---- agent.c ---- */
void agent_start(void);                       /* idempotent; for this process */
#endif
