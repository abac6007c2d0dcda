/* learning.c: how long a submission takes, and when work in flight has ended.
 *
 * Learning the length of a submission, the weak part of bounding work by time. A stamp contains whatever else ran on the
 * device, so: the distance of two events counts only if both are of one turn and work was in flight all the while; the first
 * span of a turn counts only if it is long against the overlap, since it may contain the predecessor's tail; one sample moves
 * the length by at most a factor two, and K grows at most twofold. The end of a turn is a sample too: the only one for a
 * program that gets one kernel into a turn. */
#include "lanes.h"

#include "hook.h"
#include "internal.h"

CU_NEED(CUresult, cuEventQuery, (CUevent));
CU_NEED(CUresult, cuEventElapsedTime, (float *, CUevent, CUevent));

#define GRAPHS  64
#define WAKE_NS 50000u /* a waiting thread's wake-up takes up to so much */

static struct { CUgraphExec graph; uint64_t length; uint32_t uses; } graphs[GRAPHS]; /* racy, only an estimate */

static unsigned place_of(CUgraphExec graph) { return (unsigned)(((uintptr_t)graph >> 4) % GRAPHS); }

static void learn_graph(CUgraphExec graph, uint64_t length)
{
    unsigned i = place_of(graph);
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
    struct cgpu_slot *slot = load_acquire(&lane->gate->slot);
    if (slot)
        store_relaxed(&slot->kernel_ns, lane->length);
}

void learn_by_clock(struct lane *lane, const struct span *span, uint64_t n, uint64_t from, uint64_t now, uint64_t error, bool first)
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
        if (lane->stamped && !load_relaxed(&streams_gave_up) && !span->gap && before->turn == span->turn &&
            REAL(cuEventElapsedTime)(&ms, before->event, span->event) == CUDA_SUCCESS && n) {
            uint64_t took = (uint64_t)((double)ms * 1e6);
            if (lane->done_ns + took < now)
                end = lane->done_ns + took; /* it was done before we looked */
            learn(lane, span, span->graph ? took : took / n, false);
        } else {
            uint64_t due = lane->start_ns + n * lane->length;
            learn_by_clock(lane, span, n, from, now, error, span->first);
            if (span->gap && !span->graph && due < now && now - due < WAKE_NS)
                end = due; /* it takes so long to wake up: what was predicted is nearer the truth */
        }
        lane->stamped = true;
    }
    lane->done = span->upto;
    lane->done_ns = end;
    lane->head++;
}

void lane_reap(struct lane *lane, uint64_t now, uint64_t error)
{
    while (lane->head != lane->tail) {
        struct span *span = &lane->ring[lane->head % RING];
        bool done = load_relaxed(&streams_gave_up) ||
                    (span->due_ns ? now >= span->due_ns : REAL(cuEventQuery)(span->event) != CUDA_ERROR_NOT_READY);
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

uint64_t learned_graph(CUgraphExec graph, const struct lane *lane, bool *known)
{
    unsigned i = place_of(graph);
    uint64_t units = 1;
    *known = graphs[i].graph == graph;
    if (*known && lane->length)
        units = (graphs[i].length + lane->length / 2) / lane->length;
    if (*known)
        *known = graphs[i].uses++ % 64 != 0;
    return units < 1 ? 1 : units > INT32_MAX ? INT32_MAX : units;
}
