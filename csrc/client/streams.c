/* streams.c: which lane a submission belongs to, and what programs do to streams and contexts. See streams.h. */
#include "streams.h"

#include <errno.h>
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "hook.h"
#include "internal.h"
#include "lanes.h"
#include "memory.h"

CU_NEED(CUresult, cuCtxGetCurrent, (CUcontext *));

/* Where nothing is gated: no instance, or no GPU of it. Always open. */
static struct gate open_gate;
static const uint64_t open_word;
/* For a thread without a block of its own (no memory): nobody looks at its mark. */
static struct gate_thread no_thread;

static bool hooked;

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
    store_relaxed(&t->gate, &open_gate);
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
    struct lane *spare = NULL;
    for (struct lane *lane = t->lanes; lane; lane = lane->next_in_thread) {
        if (lane->stream == stream && (lane->context == t->context || !is_default(stream)))
            return lane;
        if (lane->stream == GATE_NO_STREAM && lane->head == lane->tail)
            spare = lane; /* its stream was destroyed; perhaps its context, and then it has no events */
    }
    CUcontext context;
    int gpu = gpu_of_stream((CUstream)stream, &context); /* a stream may be of another context than the current one */
    if (gpu < 0 || gpu >= gate_count())
        return NULL;
    struct gate *g = gate_of(gpu);
    if (spare && (spare->gate != g || (spare->context && spare->context != context)))
        spare = NULL;
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane && !spare; lane = lane->next_in_gate) /* of a thread that has ended */
        if (!lane->owner && lane->head == lane->tail && lane_in_flight(lane) == 0 &&
            lane->context == context) {
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
        lane->context = context;
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
        lane_take_back(lane);
        lane_count(lane);
        if (lane->stream == CU_STREAM_PER_THREAD)
            lane_record(lane, lane_submitted(lane), now_ns(), false); /* the stream ends with its thread, the driver's part of it too */
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
        store_relaxed(&t->left, t->left - 1);
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
        t->stream = GATE_NO_STREAM; /* no context yet, a daemon that has not answered yet, a handle of nothing: ask again */
        return t;
    }
    struct gate *g = lane->gate;
    agent_start();
    switch_to(t, lane);
    store_relaxed(&t->gate, g);
    t->word = (const uint64_t *)(uintptr_t)&g->ctl->grant;
    t->stream = gate_has_membarrier() ? stream : GATE_NO_STREAM; /* without it every launch comes by here */
    for (;;) {
        if (t->left <= 0)
            lane_boundary(t, lane);
        if (mark(t, g))
            return t;
        if (load_relaxed(&g->ctl->grant) != load_relaxed(&g->accept) && !gate_try_open(g)) {
            if (lane->stream == CU_STREAM_PER_THREAD)
                lane_boundary(t, lane);
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
    if (!load_relaxed(&hooked)) {
        store_relaxed(&hooked, true);
        gate_on_thread_exit(thread_ends);
    }
    if (!t)
        return &no_thread;
    int cancel; /* no cancellation point for the program: the thread would stay counted as waiting, or die with a lock */
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    t = enter(t, stream);
    pthread_setcancelstate(cancel, NULL);
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
    bool known;
    uint64_t units = learned_graph(graph, lane, &known);
    if (known && (int64_t)units <= t->left) { /* a short one: part of the span */
        t = gate_enter_slow(stream);
        if (t->lane == lane && t->left >= (int32_t)units - 1)
            t->left -= (int32_t)units - 1;
    } else { /* a span of its own, so that it is measured */
        hook_lock_take(&lane->gate->work);
        lane_take_back(lane);
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

/* ---- several GPUs at once ---- */

#define MANY_NS 1000000000ull /* gates that are never open together: so long, then the submission goes ungated */
static void hold(struct gate *const *gates, unsigned count)
{
    for (unsigned i = 0; i < count; i++) /* a full barrier each: whoever closes a gate from now on sees it held */
        fetch_add(&gates[i]->held, 1);
}

void streams_leave_many(struct gate *const *held, unsigned count)
{
    while (count-- > 0)
        fetch_sub(&held[count]->held, 1);
}

static struct gate *closed_one(struct gate *const *gates, unsigned count)
{
    for (unsigned i = 0; i < count; i++)
        if (load_relaxed(&gates[i]->ctl->grant) != load_relaxed(&gates[i]->accept))
            return gates[i];
    return NULL;
}

/* Uses one submission of the lane's batch, or adds one to it. Its gate is held. */
static void use_one(struct lane *lane)
{
    hook_lock_take(&lane->gate->work);
    int32_t *left = lane_left(lane);
    if (*left > 0)
        store_relaxed(left, *left - 1);
    else
        lane->allotted++;
    hook_lock_drop(&lane->gate->work);
}

unsigned streams_enter_many(void *const *streams, unsigned count, struct gate *held[CGPU_MAX_GPUS])
{
    int saved = errno, cancel;
    struct gate_thread *t = gate_thread_here();
    struct lane *lanes[CGPU_MAX_GPUS];
    unsigned n = 0;
    pthread_setcancelstate(PTHREAD_CANCEL_DISABLE, &cancel);
    if (!t || t->in_callback || (gate_count() == 0 && !hook_join(false)))
        count = 0;
    for (unsigned i = 0; i < count && n < CGPU_MAX_GPUS; i++) {
        struct lane *lane = stream_captures(streams[i]) ? NULL : lane_of(t, streams[i]);
        unsigned at = n;
        if (!lane)
            continue;
        for (; at && lanes[at - 1]->gate->index > lane->gate->index; at--) /* in the order of the GPUs, for everybody */
            lanes[at] = lanes[at - 1];
        lanes[at] = lane;
        n++;
    }
    if (n)
        agent_start();
    for (unsigned i = 0; i < n; i++)
        held[i] = lanes[i]->gate;
    for (uint64_t until = now_ns() + MANY_NS; n;) {
        for (unsigned i = 0; i < n; i++) { /* each stream's window, as for any launch */
            switch_to(t, lanes[i]);
            if (t->left <= 0)
                lane_boundary(t, lanes[i]);
        }
        hold(held, n);
        struct gate *closed = closed_one(held, n);
        bool paused = closed && (load_relaxed(&closed->ctl->flags) & (CTL_PAUSED | CTL_SHUT));
        if (!closed || (now_ns() >= until && !paused)) {
            if (closed && closed->slot)
                fetch_add(&closed->slot->ungated, 1);
            break;
        }
        streams_leave_many(held, n); /* never wait while holding */
        if (!gate_try_open(closed))
            gate_wait(closed);
    }
    for (unsigned i = 0; i < n; i++)
        use_one(lanes[i]);
    switch_to(t, NULL);
    t->stream = GATE_NO_STREAM;
    pthread_setcancelstate(cancel, NULL);
    errno = saved;
    return n;
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
            lane_take_back(lane);
            lane_count(lane);
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
            lane_take_back(lane);
            if (lane_submitted(lane) != lane->recorded) {
                bool there = lane_push(lane);
                lane_record(lane, lane_submitted(lane), now_ns(), there && !stream_captures(stream));
                if (there)
                    lane_pop();
            }
            uncache(lane);
            lane->stream = GATE_NO_STREAM;
        }
        hook_lock_drop(&g->work);
    }
}

static void hint(struct gate *g)
{
    if (load_relaxed(&g->state) == GATE_HELD && gate_deadline(g, load_relaxed(&g->word)) &&
        __atomic_exchange_n(&g->idle_hint, 1, __ATOMIC_ACQ_REL) == 0)
        gate_kick();
}

static void synced(struct lane *lane, uint64_t now)
{
    hook_lock_take(&lane->gate->work);
    lane_finished(lane, now);
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
