/* streams.c: lanes, spans and what is known about their length. See streams.h.
 *
 * Learning the length of a submission, the weak part of bounding work by time. A stamp contains whatever else ran on the
 * device, so: the distance of two events counts only if both are of one turn and work was in flight all the while; the first
 * span of a turn counts only if it is long against the overlap, since it may contain the predecessor's tail; one sample moves
 * the length by at most a factor two, and K grows at most twofold. The end of a turn is a sample too: the only one for a
 * program that gets one kernel into a turn. */
#include "streams.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hook.h"
#include "internal.h"

CU_NEED(CUresult, cuCtxGetCurrent, (CUcontext *));
CU_NEED(CUresult, cuCtxPushCurrent_v2, (CUcontext));
CU_NEED(CUresult, cuCtxPopCurrent_v2, (CUcontext *));
CU_NEED(CUresult, cuEventCreate, (CUevent *, unsigned));
CU_NEED(CUresult, cuEventRecord, (CUevent, CUstream));
CU_NEED(CUresult, cuEventQuery, (CUevent));
CU_NEED(CUresult, cuEventSynchronize, (CUevent));
CU_NEED(CUresult, cuEventElapsedTime, (float *, CUevent, CUevent));
CU_NEED(CUresult, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *));

#define RING       8   /* events of a lane: the unfinished ones and the newest finished one, for its stamp */
#define WINDOW_MAX 6
#define K_MAX      512 /* two spans stay below the 1024 launches at which the driver itself blocks */
#define GRAPHS     64
#define LOOK_ERROR_NS 20000u /* a look this fresh is a better stamp than a sum of measured distances */

struct span {
    CUevent event;
    uint64_t upto;     /* submissions of the lane before `event` */
    uint64_t due_ns;   /* != 0: no event could be recorded; taken for done at this time */
    CUgraphExec graph; /* it is this one graph */
    uint32_t turn;
    bool gap;          /* nothing was in flight when it began */
    bool first;        /* of its turn */
};

struct lane {
    struct gate *gate;
    void *stream;              /* GATE_NO_STREAM: destroyed */
    CUcontext context;         /* NULL: destroyed, the events with it */
    struct gate_thread *owner; /* NULL: the thread has ended */
    int32_t left;              /* while it is not owner->lane: see left_of() */
    uint32_t k;
    uint64_t allotted;         /* submissions handed out; those not used are still in `left` */
    uint64_t recorded;         /* before the newest event */
    uint64_t done;
    uint64_t counted;          /* entered in slot.launches */
    uint64_t done_ns;          /* when `done` was reached, as well as we know */
    uint64_t start_ns;         /* when the oldest work in flight was submitted, if nothing was in flight before */
    uint64_t polled_ns;        /* last time that the oldest event was seen unfinished */
    uint64_t length;           /* ns of a submission, 0 = unknown */
    uint32_t open_turn;        /* the turn in which the span being filled began */
    bool open_gap, open_first;
    CUgraphExec open_graph;
    uint32_t graph_units;      /* != 0: the next batch is one graph, as long as so many submissions */
    CUgraphExec next_graph;
    struct span ring[RING];
    uint32_t head, tail;       /* unfinished: [head, tail) */
    bool stamped;              /* ring[head - 1] is finished and its stamp is of use */
    struct lane *next_in_gate, *next_in_thread;
};

/* Where nothing is gated: no instance, or no GPU of it. Always open. */
static struct gate open_gate;
static const uint64_t open_word;
/* For a thread without a block of its own (no memory): nobody looks at its mark. */
static struct gate_thread no_thread;

static struct { CUgraphExec graph; uint64_t length; uint32_t uses; } graphs[GRAPHS]; /* racy, only an estimate */
static bool gave_up, hooked;

static int32_t *left_of(struct lane *lane)
{
    return lane->owner && lane->owner->lane == lane ? &lane->owner->left : &lane->left;
}

static uint64_t submitted(struct lane *lane)
{
    int32_t left = load_relaxed(left_of(lane));
    return lane->allotted - (uint64_t)(left > 0 ? left : 0);
}

/* Takes back what was handed out and not used. No submission can be under way. */
static void take_back(struct lane *lane)
{
    int32_t *left = left_of(lane);
    lane->allotted -= (uint64_t)(*left > 0 ? *left : 0);
    store_relaxed(left, 0);
}

static uint64_t in_flight(struct lane *lane)
{
    int64_t n = (int64_t)(submitted(lane) - lane->done);
    return n > 0 ? (uint64_t)n : 0;
}

static uint32_t unfinished(const struct lane *lane) { return lane->tail - lane->head; }

static uint64_t predicted_end(struct lane *lane, uint64_t now)
{
    uint64_t n = in_flight(lane);
    if (n == 0)
        return now;
    uint64_t from = lane->done_ns > lane->start_ns ? lane->done_ns : lane->start_ns;
    uint64_t end = from + n * lane->length;
    for (uint32_t i = lane->head; i != lane->tail; i++)
        if (lane->ring[i % RING].due_ns > end)
            end = lane->ring[i % RING].due_ns;
    return end > now ? end : now;
}

/* ---- learning ---- */

static void learn_graph(CUgraphExec graph, uint64_t length)
{
    unsigned i = (unsigned)(((uintptr_t)graph >> 4) % GRAPHS);
    if (graphs[i].graph != graph)
        graphs[i].uses = 0;
    graphs[i].graph = graph;
    graphs[i].length = length;
}

/* `late`: taken by the clock, so it can only be too long, by a wake-up or by a predecessor's tail. */
static void learn(struct lane *lane, const struct span *span, uint64_t sample, bool late)
{
    if (span && span->graph)
        learn_graph(span->graph, sample);
    if (span && span->graph && lane->length)
        return; /* kernels of the same stream have a length of their own */
    if (sample == 0)
        sample = 1;
    if (lane->length) {
        if (sample < lane->length / 2)
            sample = lane->length / 2;
        if (sample > lane->length * 2)
            sample = lane->length * 2;
        if (late && sample > lane->length && sample - lane->length < lane->length / 4)
            sample = lane->length + (sample - lane->length) / 8; /* drifts up slowly; what is shorter is nearer the truth */
        else
            sample = (lane->length + sample + 1) / 2;
    }
    lane->length = sample ? sample : 1;
    if (lane->gate->slot)
        store_relaxed(&lane->gate->slot->kernel_ns, lane->length);
}

/* `n` submissions were seen done now, at most `error` after the fact, that began at `from`. */
static void learn_by_clock(struct lane *lane, const struct span *span, uint64_t n, uint64_t from, uint64_t now, uint64_t error,
                           bool first)
{
    uint64_t took = now > from ? now - from : 0;
    if (n == 0)
        return;
    if (error > took / 8) { /* only an upper bound; all there is for kernels shorter than their launch */
        if (!(span && span->graph) && (lane->length == 0 || took / n < lane->length))
            learn(lane, span, took / n, true);
        return;
    }
    uint64_t sample = (took - error / 2) / n;
    if (first && gate_deadline(lane->gate, lane->gate->word) && took < 4ull * load_relaxed(&lane->gate->ctl->overlap_ns) &&
        sample > lane->length && lane->length)
        return;
    learn(lane, span, span && span->graph ? took - error / 2 : sample, true);
}

/* The oldest unfinished span is done. `error`: by how much `now` may be late. */
static void span_done(struct lane *lane, uint64_t now, uint64_t error)
{
    struct span *span = &lane->ring[lane->head % RING], *before = &lane->ring[(lane->head - 1) % RING];
    uint64_t n = span->upto - lane->done, from = span->gap ? lane->start_ns : lane->done_ns, end = now;
    float ms = 0;
    if (span->due_ns || span->turn == 0) {
        lane->stamped = false;
    } else {
        if (lane->stamped && !span->gap && before->turn == span->turn &&
            REAL(cuEventElapsedTime)(&ms, before->event, span->event) == CUDA_SUCCESS && n) {
            uint64_t took = (uint64_t)((double)ms * 1e6);
            if (error > LOOK_ERROR_NS && lane->done_ns + took < now)
                end = lane->done_ns + took; /* it was done before we looked */
            learn(lane, span, span->graph ? took : took / n, false);
        } else {
            learn_by_clock(lane, span, n, from, now, error, span->first);
        }
        lane->stamped = true;
    }
    lane->done = span->upto;
    lane->done_ns = end;
    lane->head++;
}

/* Takes off what is done. `error`: by how much the caller may be late in noticing; UINT64_MAX = since the last look. */
static void reap(struct lane *lane, uint64_t now, uint64_t error)
{
    while (lane->head != lane->tail) {
        struct span *span = &lane->ring[lane->head % RING];
        bool done = gave_up || (span->due_ns ? now >= span->due_ns : REAL(cuEventQuery)(span->event) != CUDA_ERROR_NOT_READY);
        if (!done) {
            lane->polled_ns = now;
            break;
        }
        uint64_t late = error;
        if (error == UINT64_MAX)
            late = lane->polled_ns > lane->start_ns ? now - lane->polled_ns : now - lane->start_ns;
        span_done(lane, now, late);
    }
}

/* ---- events ---- */

static bool push(struct lane *lane) { return !gave_up && lane->context && REAL(cuCtxPushCurrent_v2)(lane->context) == CUDA_SUCCESS; }

static void pop(void)
{
    CUcontext context;
    REAL(cuCtxPopCurrent_v2)(&context);
}

/* Ends the span being filled, after `upto` submissions. `event`: false = only a prediction. In the lane's context. */
static void record(struct lane *lane, uint64_t upto, uint64_t now, bool event)
{
    struct span *span = &lane->ring[lane->tail % RING];
    if (upto == lane->recorded)
        return;
    if (unfinished(lane) == RING - 1) { /* cannot happen with WINDOW_MAX; the newest event then stands for more */
        lane->tail--;
        span = &lane->ring[lane->tail % RING];
    }
    if (event && !span->event)
        event = REAL(cuEventCreate)(&span->event, CU_EVENT_BLOCKING_SYNC) == CUDA_SUCCESS;
    if (event)
        event = REAL(cuEventRecord)(span->event, (CUstream)lane->stream) == CUDA_SUCCESS;
    span->due_ns = event ? 0 : predicted_end(lane, now);
    span->upto = upto;
    span->graph = lane->open_graph;
    span->turn = lane->open_turn;
    span->gap = lane->open_gap;
    span->first = lane->open_first;
    lane->open_graph = NULL;
    lane->open_gap = false;
    lane->recorded = upto;
    lane->tail++;
}

/* All that was submitted to the lane before now is done, and the caller has waited for it. */
static void finished(struct lane *lane, uint64_t now)
{
    uint64_t all = submitted(lane);
    take_back(lane); /* the next submission comes by again, and its time is noted */
    if (all == lane->done)
        return;
    struct span last = {.graph = all - lane->done == 1 ? lane->open_graph : NULL};
    if (unfinished(lane) == 0 && lane->open_turn)
        learn_by_clock(lane, &last, all - lane->done, lane->open_gap ? lane->start_ns : lane->done_ns, now, 0, lane->open_first);
    lane->head = lane->tail;
    lane->stamped = false;
    lane->recorded = lane->done = all;
    lane->done_ns = now;
    lane->open_graph = NULL;
}

/* ---- the end of a batch ---- */

static void fill(struct gate_thread *t, struct lane *lane, uint64_t now, uint64_t deadline, uint64_t end)
{
    struct gate *g = lane->gate;
    uint32_t k = 1;
    if (lane->graph_units) {
        k = lane->graph_units;
    } else if (lane->length) {
        uint64_t span = load_relaxed(&g->ctl->span_ns), n = span / lane->length;
        if (deadline && deadline > end && (deadline - end) / lane->length < n)
            n = (deadline - end + lane->length / 2) / lane->length; /* the turn ends at its deadline, not a span later */
        k = n > K_MAX ? K_MAX : n < 1 ? 1 : (uint32_t)n;
        if (k > 2 * lane->k)
            k = lane->k ? 2 * lane->k : 1;
        lane->k = k;
    }
    lane->open_gap = lane->allotted == lane->done;
    if (lane->open_gap)
        lane->start_ns = lane->polled_ns = now;
    lane->open_turn = g->turn;
    lane->open_first = g->filled_turn != g->turn;
    lane->open_graph = lane->graph_units ? lane->next_graph : NULL;
    lane->graph_units = 0;
    g->filled_turn = g->turn;
    lane->allotted += k;
    store_relaxed(&t->left, (int32_t)k);
}

static void nap_until(uint64_t then)
{
    struct timespec t = {.tv_sec = (time_t)(then / 1000000000u), .tv_nsec = (long)(then % 1000000000u)};
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

static uint64_t gate_end(struct gate *g, uint64_t now)
{
    uint64_t end = now;
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        uint64_t e = predicted_end(lane, now);
        if (e > end)
            end = e;
    }
    return end;
}

static void count(struct lane *lane)
{
    if (lane->gate->slot)
        fetch_add(&lane->gate->slot->launches, lane->allotted - lane->counted);
    lane->counted = lane->allotted;
}

/* `left` is used up. Records the event, waits while the window is full, and either hands out the next batch or lets go of the
 * grant because the turn is over. Not marked. */
static void boundary(struct gate_thread *t, struct lane *lane)
{
    struct gate *g = lane->gate;
    hook_lock_take(&g->work);
    if (t->lane != lane || t->left > 0) {
        hook_lock_drop(&g->work);
        return;
    }
    int mode = capture_relax();
    uint64_t now = now_ns(), word = load_relaxed(&g->accept);
    bool open = load_relaxed(&g->ctl->grant) == word;
    count(lane);
    if (open && (load_relaxed(&g->ctl->flags) & CTL_NATIVE)) {
        fill(t, lane, now, 0, now); /* the driver shares the device; one event at the end is enough */
    } else if (open || lane->stream == CU_STREAM_PER_THREAD) { /* nobody else can record in the latter */
        record(lane, submitted(lane), now, true);
        reap(lane, now, UINT64_MAX);
        while (open) {
            uint64_t deadline = gate_deadline(g, word), end = gate_end(g, now);
            uint32_t window = load_relaxed(&g->ctl->window);
            if (deadline && !g->orphan && g->filled_turn == g->turn) {
                uint64_t span = load_relaxed(&g->ctl->span_ns);
                uint64_t next = lane->length * (lane->graph_units ? lane->graph_units : 1);
                if (end + (next > span ? next : span) / 2 > deadline) {
                    hook_lock_drop(&g->work);
                    if (gate_let_go(g, word, GATE_DEADLINE))
                        gate_kick();
                    capture_restore(mode);
                    return;
                }
            }
            if (unfinished(lane) < (window < 1 ? 1 : window > WINDOW_MAX ? WINDOW_MAX : window)) {
                fill(t, lane, now, deadline, end);
                break;
            }
            uint32_t oldest = lane->head;
            struct span span = lane->ring[oldest % RING];
            hook_lock_drop(&g->work);
            if (span.due_ns)
                nap_until(span.due_ns);
            else
                REAL(cuEventSynchronize)(span.event);
            hook_lock_take(&g->work);
            now = now_ns();
            if (lane->head == oldest)
                reap(lane, now, 0);
            open = load_relaxed(&g->ctl->grant) == word && load_relaxed(&g->accept) == word;
            if (lane->head == oldest) /* the event failed: do not spin on it */
                finished(lane, now);
        }
    }
    capture_restore(mode);
    hook_lock_drop(&g->work);
}

/* ---- lanes ---- */

static void switch_to(struct gate_thread *t, struct lane *lane)
{
    struct lane *old = t->lane;
    if (old == lane)
        return;
    if (old) {
        hook_lock_take(&old->gate->work);
        old->left = t->left;
        t->lane = NULL;
        t->left = 0;
        hook_lock_drop(&old->gate->work);
    }
    if (lane) {
        hook_lock_take(&lane->gate->work);
        t->left = lane->left;
        t->lane = lane;
        hook_lock_drop(&lane->gate->work);
    }
}

static void pass_always(struct gate_thread *t, void *stream)
{
    switch_to(t, NULL);
    t->word = &open_word;
    t->gate = &open_gate;
    t->stream = stream;
    t->left = INT32_MAX;
}

static bool is_default(const void *stream) { return (uintptr_t)stream <= 2; }

/* The lane of this thread and stream, or NULL where nothing is gated. */
static struct lane *lane_of(struct gate_thread *t, void *stream)
{
    if (!t->context) {
        CUcontext current = NULL;
        if (!have(cuCtxGetCurrent) || REAL(cuCtxGetCurrent)(&current) != CUDA_SUCCESS)
            current = NULL;
        t->context = current;
    }
    if (!t->context)
        return NULL;
    struct lane *spare = NULL;
    for (struct lane *lane = t->lanes; lane; lane = lane->next_in_thread) {
        if (lane->stream == stream && (lane->context == t->context || !is_default(stream)))
            return lane;
        if (lane->stream == GATE_NO_STREAM && lane->head == lane->tail)
            spare = lane; /* its stream was destroyed; perhaps its context, and then it has no events */
    }
    int index = hook_current_gpu();
    if (index < 0 || index >= gate_count())
        return NULL;
    struct gate *g = gate_of(index);
    if (spare && (spare->gate != g || (spare->context && spare->context != t->context)))
        spare = NULL;
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane && !spare; lane = lane->next_in_gate) /* of a thread that has ended */
        if (!lane->owner && lane->head == lane->tail && in_flight(lane) == 0 &&
            lane->context == t->context) {
            spare = lane;
            lane->next_in_thread = t->lanes;
            t->lanes = lane;
        }
    struct lane *lane = spare;
    if (!lane && (lane = calloc(1, sizeof *lane))) {
        lane->gate = g;
        lane->next_in_gate = g->lanes;
        g->lanes = lane;
        lane->next_in_thread = t->lanes;
        t->lanes = lane;
    }
    if (lane) {
        lane->owner = t;
        lane->context = t->context;
        lane->stream = stream;
        lane->stamped = false;
        lane->left = 0;
    }
    hook_lock_drop(&g->work);
    return lane;
}

static void thread_ends(struct gate_thread *t)
{
    switch_to(t, NULL);
    for (struct lane *lane = t->lanes; lane;) {
        struct lane *next = lane->next_in_thread;
        hook_lock_take(&lane->gate->work);
        take_back(lane);
        count(lane);
        if (lane->stream == CU_STREAM_PER_THREAD)
            record(lane, submitted(lane), now_ns(), false); /* the stream ends with its thread, the driver's part of it too */
        lane->owner = NULL;
        hook_lock_drop(&lane->gate->work);
        lane = next;
    }
    t->lanes = NULL;
}

/* ---- entering ---- */

static bool mark(struct gate_thread *t, struct gate *g)
{
    if (gate_has_membarrier()) {
        store_relaxed(&t->in, 1);
        compiler_barrier();
    } else {
        __atomic_exchange_n(&t->in, 1, __ATOMIC_SEQ_CST); /* pairs with the fence in agent.c */
    }
    if (t->left > 0 && load_relaxed(&g->ctl->grant) == load_relaxed(&g->accept)) {
        t->left--;
        return true;
    }
    store_release(&t->in, 0);
    return false;
}

static struct gate_thread *enter(struct gate_thread *t, void *stream)
{
    if (t->in_callback || stream_captures(stream)) {
        t->stream = GATE_NO_STREAM; /* ask again next time */
        return t;
    }
    if (gate_count() == 0 && !hook_join(false)) {
        pass_always(t, stream);
        return t;
    }
    struct lane *lane = lane_of(t, stream);
    if (!lane) {
        pass_always(t, stream);
        if (!t->context)
            t->stream = GATE_NO_STREAM;
        return t;
    }
    struct gate *g = lane->gate;
    agent_start();
    switch_to(t, lane);
    t->gate = g;
    t->word = (const uint64_t *)(uintptr_t)&g->ctl->grant;
    t->stream = gate_has_membarrier() ? stream : GATE_NO_STREAM; /* without it every launch comes by here */
    for (;;) {
        if (t->left <= 0)
            boundary(t, lane);
        if (mark(t, g))
            return t;
        if (load_relaxed(&g->ctl->grant) != load_relaxed(&g->accept) && !gate_try_open(g)) {
            if (lane->stream == CU_STREAM_PER_THREAD)
                boundary(t, lane);
            gate_wait(g);
        }
    }
}

struct gate_thread *gate_enter_slow(void *stream)
{
    int saved = errno;
    struct gate_thread *t = gate_self;
    if (t)
        store_release(&t->in, 0);
    else
        t = gate_thread_here();
    if (!hooked) {
        hooked = true;
        gate_on_thread_exit(thread_ends);
    }
    if (!t)
        return &no_thread;
    t = enter(t, stream);
    errno = saved;
    return t;
}

struct gate_thread *streams_enter_graph(CUgraphExec graph, void *stream)
{
    struct gate_thread *t = gate_thread_here();
    if (!t || gate_count() == 0 || t->in_callback || stream_captures(stream))
        return gate_enter(stream);
    int saved = errno;
    struct lane *lane = lane_of(t, stream);
    if (!lane) {
        errno = saved;
        return gate_enter(stream);
    }
    switch_to(t, lane);
    unsigned i = (unsigned)(((uintptr_t)graph >> 4) % GRAPHS);
    uint64_t units = 1;
    bool known = graphs[i].graph == graph;
    if (known && lane->length)
        units = (graphs[i].length + lane->length / 2) / lane->length;
    if (units < 1)
        units = 1;
    if (known && graphs[i].uses++ % 64 != 0 && (int64_t)units <= t->left) { /* a short one: part of the span */
        t = gate_enter_slow(stream);
        if (t->lane == lane && t->left >= (int32_t)units - 1)
            t->left -= (int32_t)units - 1;
    } else { /* a span of its own, so that it is measured */
        if (units > INT32_MAX)
            units = INT32_MAX;
        hook_lock_take(&lane->gate->work);
        take_back(lane);
        lane->graph_units = (uint32_t)units;
        lane->next_graph = graph;
        hook_lock_drop(&lane->gate->work);
        t = gate_enter_slow(stream);
        if (t->lane == lane)
            t->left = 0;
    }
    errno = saved;
    return t;
}

/* ---- what else happens to contexts and streams ---- */

void gate_context_changed(void)
{
    struct gate_thread *t = gate_self;
    if (!t)
        return;
    t->context = NULL;
    if (is_default(t->stream)) /* any other handle says by itself which context it is of */
        t->stream = GATE_NO_STREAM;
}

static void uncache(struct lane *lane)
{
    if (lane->owner && lane->owner->lane == lane)
        store_relaxed(&lane->owner->stream, GATE_NO_STREAM); /* may be another thread's: it sets it under gate.work only */
}

void streams_forget_context(CUcontext context)
{
    for (int i = 0; i < gate_count(); i++) {
        struct gate *g = gate_of(i);
        hook_lock_take(&g->work);
        for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
            if (lane->context != context)
                continue;
            take_back(lane);
            count(lane);
            uncache(lane);
            lane->recorded = lane->done = lane->allotted;
            lane->head = lane->tail = 0;
            lane->stamped = false;
            memset(lane->ring, 0, sizeof lane->ring); /* the driver destroys the events with the context */
            lane->context = NULL;
            lane->stream = GATE_NO_STREAM;
        }
        hook_lock_drop(&g->work);
    }
    if (gate_self && gate_self->context == context)
        gate_context_changed();
}

void streams_forget(CUstream stream)
{
    for (int i = 0; i < gate_count(); i++) {
        struct gate *g = gate_of(i);
        hook_lock_take(&g->work);
        for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
            if (lane->stream != stream || is_default(stream))
                continue;
            take_back(lane);
            if (submitted(lane) != lane->recorded) {
                bool there = push(lane);
                record(lane, submitted(lane), now_ns(), there && !stream_captures(stream));
                if (there)
                    pop();
            }
            uncache(lane);
            lane->stream = GATE_NO_STREAM;
        }
        hook_lock_drop(&g->work);
    }
}

static void hint(struct gate *g)
{
    if (g->state == GATE_HELD && gate_deadline(g, g->word) && __atomic_exchange_n(&g->idle_hint, 1, __ATOMIC_ACQ_REL) == 0)
        gate_kick();
}

static void synced(struct lane *lane, uint64_t now)
{
    hook_lock_take(&lane->gate->work);
    finished(lane, now);
    hook_lock_drop(&lane->gate->work);
    hint(lane->gate);
}

void streams_synced(void *stream)
{
    struct gate_thread *t = gate_self;
    if (!t)
        return;
    for (struct lane *lane = t->lanes; lane; lane = lane->next_in_thread)
        if (lane->stream == stream && (!is_default(stream) || lane->context == t->context || !t->context))
            synced(lane, now_ns());
}

void streams_synced_context(void)
{
    struct gate_thread *t = gate_self;
    if (!t)
        return;
    CUcontext context = t->context;
    if (!context && (!have(cuCtxGetCurrent) || REAL(cuCtxGetCurrent)(&context) != CUDA_SUCCESS))
        return;
    uint64_t now = now_ns();
    for (struct lane *lane = t->lanes; lane; lane = lane->next_in_thread)
        if (lane->context == context)
            synced(lane, now);
}

void streams_hint(void)
{
    struct gate_thread *t = gate_self;
    if (!t || !t->lane || t->left == t->hinted_left)
        return;
    t->hinted_left = t->left; /* once for the same state: programs poll in loops */
    hint(t->lane->gate);
}

/* ---- for the agent ---- */

uint64_t streams_submitted(struct gate *g)
{
    uint64_t sum = 0;
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate)
        sum += submitted(lane);
    hook_lock_drop(&g->work);
    return sum;
}

/* Ends the open span of a lane from outside its thread. All of `upto` must have reached the driver. */
static void record_tail(struct lane *lane, uint64_t upto, uint64_t now)
{
    if (upto == lane->recorded)
        return;
    bool possible = lane->stream != CU_STREAM_PER_THREAD && lane->stream != GATE_NO_STREAM && push(lane);
    record(lane, upto, now, possible && !stream_captures(lane->stream));
    if (possible)
        pop();
}

static void reap_from_outside(struct lane *lane, uint64_t now)
{
    if (lane->head == lane->tail)
        return;
    bool there = push(lane);
    if (there || gave_up)
        reap(lane, now, UINT64_MAX);
    if (there)
        pop();
}

bool streams_quiet(struct gate *g, uint64_t now)
{
    bool quiet = true;
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        uint64_t upto = submitted(lane);
        if (in_flight(lane) == 0)
            continue;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (gate_any_mark(g)) { /* `upto` may count a submission that the driver has not seen yet */
            quiet = false;
            break;
        }
        if (unfinished(lane) < WINDOW_MAX && upto != lane->recorded) {
            record_tail(lane, upto, now);
            lane->open_turn = 0; /* what follows until the next batch began at an unknown time */
        }
        reap_from_outside(lane, now);
        if (in_flight(lane))
            quiet = false;
    }
    hook_lock_drop(&g->work);
    return quiet;
}

void streams_close(struct gate *g, uint64_t now)
{
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        take_back(lane);
        count(lane);
        record_tail(lane, lane->allotted, now);
    }
    hook_lock_drop(&g->work);
}

bool streams_drained(struct gate *g, uint64_t now, uint64_t *end)
{
    bool drained = true;
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        reap_from_outside(lane, now);
        if (gave_up || !lane->context) {
            lane->head = lane->tail;
            lane->done = lane->recorded;
        }
        if (lane->head != lane->tail)
            drained = false;
    }
    *end = gate_end(g, now);
    hook_lock_drop(&g->work);
    return drained;
}

void streams_give_up(void) { store_release(&gave_up, true); }

void streams_agent_thread(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (have(cuThreadExchangeStreamCaptureMode))
        REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

void streams_after_fork(void) { /* gate.lanes went with the gates; a context does not live on in the child */ }
