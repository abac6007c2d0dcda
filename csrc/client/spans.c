/* spans.c: the events of a lane and the batches between them. See streams.h and lanes.h. */
#include "lanes.h"

#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>

#include "hook.h"
#include "internal.h"
#include "stall.h"
#include "streams.h"

CU_NEED(CUresult, cuCtxPushCurrent_v2, (CUcontext));
CU_NEED(CUresult, cuCtxPopCurrent_v2, (CUcontext *));
CU_NEED(CUresult, cuEventCreate, (CUevent *, unsigned));
CU_NEED(CUresult, cuEventRecord, (CUevent, CUstream));
CU_NEED(CUresult, cuEventQuery, (CUevent));
CU_NEED(CUresult, cuEventSynchronize, (CUevent));

#define K_MAX      512 /* two spans stay below the 1024 launches at which the driver itself blocks */
#define STALL_NS   20000000u /* a stream that may stand still is waited for so long beyond its time, then gone past */
#define START_MAX_NS 1000000   /* no later start is believed */
#define START_SPIN_NS 150000   /* a sleep's end is late by up to so much: timer slack, and a core that slept deeply */

bool streams_gave_up;

uint64_t lane_end(struct lane *lane, uint64_t now)
{
    uint64_t n = lane_in_flight(lane);
    if (n == 0)
        return now;
    uint64_t from = lane->done_ns > lane->start_ns ? lane->done_ns : lane->start_ns;
    uint64_t end = from + n * lane->length;
    if (lane->length == 0)
        end = now + STREAMS_UNKNOWN_NS;
    for (uint32_t i = lane->head; i != lane->tail; i++)
        if (lane->ring[i % RING].due_ns > end)
            end = lane->ring[i % RING].due_ns;
    return end > now ? end : now;
}

uint64_t lanes_end(struct gate *g, uint64_t now)
{
    uint64_t end = now;
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        uint64_t e = lane_end(lane, now);
        if (e > end)
            end = e;
    }
    return end;
}

bool lane_push(struct lane *lane)
{
    return !load_relaxed(&streams_gave_up) && lane->context && REAL(cuCtxPushCurrent_v2)(lane->context) == CUDA_SUCCESS;
}

void lane_pop(void)
{
    CUcontext context;
    REAL(cuCtxPopCurrent_v2)(&context);
}

void lane_record(struct lane *lane, uint64_t upto, uint64_t now, bool event)
{
    struct span *span = &lane->ring[lane->tail % RING];
    if (upto == lane->recorded)
        return;
    if (lane_unfinished(lane) == RING - 1) { /* cannot happen with WINDOW_MAX; the newest event then stands for more */
        lane->tail--;
        span = &lane->ring[lane->tail % RING];
    }
    if (event && !span->event)
        event = REAL(cuEventCreate)(&span->event, CU_EVENT_BLOCKING_SYNC) == CUDA_SUCCESS;
    if (event)
        event = REAL(cuEventRecord)(span->event, (CUstream)lane->stream) == CUDA_SUCCESS;
    span->due_ns = event ? 0 : lane_end(lane, now);
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

void lane_finished(struct lane *lane, uint64_t now)
{
    uint64_t all = lane_submitted(lane);
    lane_take_back(lane); /* the next submission comes by again, and its time is noted */
    if (all == lane->done)
        return;
    struct span last = {.graph = all - lane->done == 1 ? lane->open_graph : NULL};
    if (lane_unfinished(lane) == 0 && lane->open_turn)
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
        uint64_t room = deadline > end ? deadline - end : 0; /* none left: one all the same, a turn has one at least */
        if (deadline && room / lane->length < n)
            n = (room + lane->length / 2) / lane->length; /* the turn ends at its deadline, not a span later */
        k = n > K_MAX ? K_MAX : n < 1 ? 1 : (uint32_t)n;
        if (k > 2 * lane->k)
            k = lane->k ? 2 * lane->k : 1;
        lane->k = k;
    }
    lane->open_gap = lane->allotted == lane->done;
    if (lane->open_gap)
        lane->start_ns = lane->polled_ns = now;
    lane->open_turn = load_relaxed(&g->turn);
    lane->open_first = g->filled_turn != lane->open_turn;
    lane->open_graph = lane->graph_units ? lane->next_graph : NULL;
    lane->graph_units = 0;
    store_relaxed(&g->filled_turn, lane->open_turn);
    lane->allotted += k;
    store_relaxed(&t->left, (int32_t)k);
}

static void nap_until(uint64_t then)
{
    struct timespec t = {.tv_sec = (time_t)(then / 1000000000u), .tv_nsec = (long)(then % 1000000000u)};
    syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL);
}

/* The first submission of a turn waits until the turn before is predicted to have drained, for a device that shares its
 * time would run us at once and finish that work later, at its owner's expense. To the microsecond, and so by spinning:
 * a sleep is late by the half of it. */
static void wait_for_start(struct gate *g, uint64_t word)
{
    for (;;) {
        uint64_t start = gate_start(g, word), now = now_ns();
        if (start <= now || start - now > START_MAX_NS)
            return;
        if (start - now > START_SPIN_NS)
            nap_until(start - START_SPIN_NS);
        else
            cpu_pause();
    }
}

/* Waits for an event of a full window. False: not done, and perhaps never until this thread goes on (stall.h). */
static bool wait_for(CUevent event, uint64_t expected_ns)
{
    if (!stall_is_possible()) {
        REAL(cuEventSynchronize)(event);
        return true;
    }
    uint64_t now = now_ns(), until = (expected_ns > now ? expected_ns : now) + STALL_NS, pause = 20000;
    while (REAL(cuEventQuery)(event) == CUDA_ERROR_NOT_READY) {
        if (now >= until)
            return false;
        nap_until(now + pause);
        pause = pause < 400000 ? 2 * pause : pause;
        now = now_ns();
    }
    return true;
}

void lane_count(struct lane *lane)
{
    struct cgpu_slot *slot = load_acquire(&lane->gate->slot); /* a rejoin changes it */
    if (slot)
        fetch_add(&slot->launches, lane->allotted - lane->counted);
    lane->counted = lane->allotted;
}

/* `left` is used up. Records the event, waits while the window is full, and either hands out the next batch or lets go of the
 * grant because the turn is over. Not marked. */
void lane_boundary(struct gate_thread *t, struct lane *lane)
{
    struct gate *g = lane->gate;
    if (load_relaxed(&g->filled_turn) != load_relaxed(&g->turn))
        wait_for_start(g, load_relaxed(&g->accept));
    hook_lock_take(&g->work);
    if (t->lane != lane || t->left > 0) {
        hook_lock_drop(&g->work);
        return;
    }
    int mode = capture_relax();
    bool pushed = lane->context != t->context && lane_push(lane);
    uint64_t now = now_ns(), word = load_relaxed(&g->accept);
    bool open = load_relaxed(&g->ctl->grant) == word;
    lane_count(lane);
    if (open && (load_relaxed(&g->ctl->flags) & CTL_NATIVE)) {
        fill(t, lane, now, 0, now); /* the driver shares the device; one event at the end is enough */
    } else if (open || lane->stream == CU_STREAM_PER_THREAD) { /* nobody else can record in the latter */
        lane_record(lane, lane_submitted(lane), now, true);
        lane_reap(lane, now, UINT64_MAX);
        while (open) {
            uint64_t deadline = gate_deadline(g, word), end = lanes_end(g, now);
            uint32_t window = load_relaxed(&g->ctl->window);
            if (deadline && !load_relaxed(&g->orphan) && g->filled_turn == load_relaxed(&g->turn)) {
                uint64_t span = load_relaxed(&g->ctl->span_ns);
                uint64_t next = lane->length * (lane->graph_units ? lane->graph_units : 1);
                if (end + (next > span ? next : span) / 2 > deadline) {
                    hook_lock_drop(&g->work);
                    if (gate_let_go(g, word, GATE_DEADLINE))
                        gate_kick();
                    if (pushed)
                        lane_pop();
                    capture_restore(mode);
                    return;
                }
            }
            if (lane_unfinished(lane) < (window < 1 ? 1 : window > WINDOW_MAX ? WINDOW_MAX : window)) {
                fill(t, lane, now, deadline, end);
                break;
            }
            uint32_t oldest = lane->head;
            struct span span = lane->ring[oldest % RING];
            if (lane->stalled == oldest + 1) {
                fill(t, lane, now, deadline, end);
                break;
            }
            uint64_t expected = lane_end(lane, now);
            bool done = true;
            hook_lock_drop(&g->work);
            if (span.due_ns)
                nap_until(span.due_ns);
            else
                done = wait_for(span.event, expected);
            hook_lock_take(&g->work);
            if (!done && lane->head == oldest) {
                lane->stalled = oldest + 1;
                now = now_ns();
                open = load_relaxed(&g->ctl->grant) == word && load_relaxed(&g->accept) == word;
                continue;
            }
            now = now_ns();
            if (lane->head == oldest)
                lane_reap(lane, now, 0);
            open = load_relaxed(&g->ctl->grant) == word && load_relaxed(&g->accept) == word;
            if (lane->head == oldest) /* the event failed: do not spin on it */
                lane_finished(lane, now);
        }
    }
    if (pushed)
        lane_pop();
    capture_restore(mode);
    hook_lock_drop(&g->work);
}
