/* lanes.h: what learning.c, spans.c, streams.c and draining.c share, and nobody else. gate.work is held around all of it.
 *
 * A lane counts its submissions: `done` <= `recorded` (before the newest event) <= submitted <= `allotted` (handed out). */
#ifndef CGPU_LANES_H
#define CGPU_LANES_H
#include <stdbool.h>
#include <stdint.h>
#include "client.h"
#include "cuda_min.h"

#define RING       8   /* events of a lane: the unfinished ones and the newest finished one, for its stamp */
#define WINDOW_MAX 6

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
    int32_t left;              /* while it is not owner->lane: see lane_left() */
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
    uint32_t stalled;          /* head + 1 while ring[head] was waited for in vain */
    struct lane *next_in_gate, *next_in_thread;
};

static inline int32_t *lane_left(struct lane *lane)
{
    return lane->owner && lane->owner->lane == lane ? &lane->owner->left : &lane->left;
}

static inline uint64_t lane_submitted(struct lane *lane)
{
    int32_t left = load_relaxed(lane_left(lane));
    return lane->allotted - (uint64_t)(left > 0 ? left : 0);
}

/* Takes back what was handed out and not used. No submission can be under way. */
static inline void lane_take_back(struct lane *lane)
{
    int32_t *left = lane_left(lane);
    lane->allotted -= (uint64_t)(*left > 0 ? *left : 0);
    store_relaxed(left, 0);
}

static inline uint64_t lane_in_flight(struct lane *lane)
{
    int64_t n = (int64_t)(lane_submitted(lane) - lane->done);
    return n > 0 ? (uint64_t)n : 0;
}

static inline uint32_t lane_unfinished(const struct lane *lane) { return lane->tail - lane->head; }

extern bool streams_gave_up __attribute__((visibility("hidden"))); /* the process ends: no more calls into the driver */

/* ---- spans.c ---- */

/* When the work in flight should have ended; `now` if it should have already. */
uint64_t lane_end(struct lane *lane, uint64_t now);
uint64_t lanes_end(struct gate *g, uint64_t now); /* of all lanes */
/* Makes the lane's context the calling thread's. False: it has none any more. */
bool lane_push(struct lane *lane);
void lane_pop(void);
/* Ends the span being filled, after `upto` submissions. `event`: false = only a prediction. In the lane's context. */
void lane_record(struct lane *lane, uint64_t upto, uint64_t now, bool event);
/* All that was submitted to the lane before now is done, and the caller has waited for it. */
void lane_finished(struct lane *lane, uint64_t now);
/* Enters what was handed out in slot.launches. */
void lane_count(struct lane *lane);
/* `left` of this thread is used up: hands out the next batch, or lets go of the grant because the turn is over. Not marked, gate.work
 * not held. */
void lane_boundary(struct gate_thread *t, struct lane *lane);

/* ---- learning.c ---- */

/* Takes off what is done. `error`: by how much the caller may be late in noticing; UINT64_MAX = since the last look. In the lane's
 * context. */
void lane_reap(struct lane *lane, uint64_t now, uint64_t error);
/* `n` submissions were seen done now, at most `error` after the fact, that began at `from`. `span`: NULL or only its `graph`. */
void learn_by_clock(struct lane *lane, const struct span *span, uint64_t n, uint64_t from, uint64_t now, uint64_t error, bool first);
/* How many submissions of the lane the graph is as long as; *known: false = a guess, or it is time to measure it again. */
uint64_t learned_graph(CUgraphExec graph, const struct lane *lane, bool *known);
#endif
