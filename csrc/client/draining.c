/* draining.c: what the agent sees and does about what is in flight: is it idle, has it drained, when will it have? */
#include "lanes.h"

#include <sched.h>

#include "hook.h"
#include "internal.h"
#include "streams.h"

CU_NEED(CUresult, cuThreadExchangeStreamCaptureMode, (CUstreamCaptureMode *));

#define GIVE_UP_NS 100000000u

uint64_t streams_submitted(struct gate *g)
{
    uint64_t sum = 0;
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate)
        sum += lane_submitted(lane);
    hook_lock_drop(&g->work);
    return sum;
}

/* Ends the open span of a lane from outside its thread. All of `upto` must have reached the driver. */
static void record_tail(struct lane *lane, uint64_t upto, uint64_t now)
{
    if (upto == lane->recorded)
        return;
    bool possible = lane->stream != CU_STREAM_PER_THREAD && lane->stream != GATE_NO_STREAM && lane_push(lane);
    lane_record(lane, upto, now, possible && !stream_captures(lane->stream));
    if (possible)
        lane_pop();
}

static void reap_from_outside(struct lane *lane, uint64_t now)
{
    if (lane->head == lane->tail)
        return;
    bool there = lane_push(lane);
    if (there || load_relaxed(&streams_gave_up))
        lane_reap(lane, now, UINT64_MAX);
    if (there)
        lane_pop();
}

bool streams_quiet(struct gate *g, uint64_t now)
{
    bool quiet = true;
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        uint64_t upto = lane_submitted(lane);
        if (lane_in_flight(lane) == 0)
            continue;
        __atomic_thread_fence(__ATOMIC_ACQUIRE);
        if (gate_any_mark(g)) { /* `upto` may count a submission that the driver has not seen yet */
            quiet = false;
            break;
        }
        if (lane_unfinished(lane) < WINDOW_MAX && upto != lane->recorded) {
            record_tail(lane, upto, now);
            lane->open_turn = 0; /* what follows until the next batch began at an unknown time */
        }
        reap_from_outside(lane, now);
        if (lane_in_flight(lane))
            quiet = false;
    }
    hook_lock_drop(&g->work);
    return quiet;
}

void streams_close(struct gate *g, uint64_t now)
{
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        lane_take_back(lane);
        lane_count(lane);
        record_tail(lane, lane->allotted, now);
    }
    hook_lock_drop(&g->work);
}

bool streams_turn_is_full(struct gate *g, uint64_t now, uint64_t deadline)
{
    hook_lock_take(&g->work);
    uint64_t span = load_relaxed(&g->ctl->span_ns), end = 0;
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        uint64_t e = lane_end(lane, now), next = lane->length > span ? lane->length : span;
        if (lane_in_flight(lane) && e + next / 2 > end)
            end = e + next / 2;
    }
    hook_lock_drop(&g->work);
    return end > deadline;
}

static uint64_t last_done(const struct gate *g)
{
    uint64_t last = 0;
    for (const struct lane *lane = g->lanes; lane; lane = lane->next_in_gate)
        if (lane->done_ns > last)
            last = lane->done_ns;
    return last;
}

bool streams_drained(struct gate *g, uint64_t now, uint64_t *end)
{
    bool drained = true;
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        reap_from_outside(lane, now);
        if (load_relaxed(&streams_gave_up) || !lane->context) {
            lane->head = lane->tail;
            lane->done = lane->recorded;
        }
        if (lane->head != lane->tail)
            drained = false;
    }
    *end = drained ? last_done(g) : lanes_end(g, now);
    hook_lock_drop(&g->work);
    return drained;
}

void streams_abandon(struct gate *g)
{
    hook_lock_take(&g->work);
    for (struct lane *lane = g->lanes; lane; lane = lane->next_in_gate) {
        lane->head = lane->tail;
        lane->done = lane->recorded;
        lane->stamped = false;
    }
    hook_lock_drop(&g->work);
}

void streams_give_up(void)
{
    store_release(&streams_gave_up, true);
    fence_seq_cst();
    /* Who holds gate.work may be inside the driver, whose own exit handlers come next: let it out. Never hang an exit. */
    uint64_t until = now_ns() + GIVE_UP_NS;
    for (int i = 0; i < gate_count(); i++)
        while (load_acquire(&gate_of(i)->work.word) && now_ns() < until)
            sched_yield();
}

void streams_agent_thread(void)
{
    CUstreamCaptureMode mode = CU_STREAM_CAPTURE_MODE_RELAXED;
    if (have(cuThreadExchangeStreamCaptureMode))
        REAL(cuThreadExchangeStreamCaptureMode)(&mode);
}

void streams_after_fork(void) { /* gate.lanes went with the gates; a context does not live on in the child */ }
