/* streams.h: what this process has in flight, stream by stream.
 *
 * A *lane* is one thread's submissions to one stream. The launching thread counts down `left` (client.h) and comes here when
 * it is used up: an event is recorded, and the next batch of K submissions is handed out such that a *span*, the work between
 * two events, lasts about ctl.span_ns and at most ctl.window of them are unfinished. At the end of a turn the agent records a
 * last event in each lane with work after its newest one, and polls: it never synchronises a context, and touches no stream
 * that captures. */
#ifndef CGPU_STREAMS_H
#define CGPU_STREAMS_H
#include <stdbool.h>
#include "client.h"
#include "cuda_min.h"

/* What a wrapper passes to gate_enter(): the null handle means the per-thread stream in the _ptsz variants. */
static inline void *stream_key(CUstream stream) { return stream; }
static inline void *stream_key_ptsz(CUstream stream) { return stream ? stream : CU_STREAM_PER_THREAD; }

/* Like gate_enter(), for a graph of unknown length: it is measured, each executable graph by itself. */
struct gate_thread *streams_enter_graph(CUgraphExec graph, void *stream);

/* One submission to several GPUs, each by one of `count` streams: holds the gates of all of them at once. Gives how many are held,
 * in held[]; streams_leave_many() lets them go. */
unsigned streams_enter_many(void *const *streams, unsigned count, struct gate *held[CGPU_MAX_GPUS]);
void streams_leave_many(struct gate *const *held, unsigned count);

/* The calling thread's current context may have changed. */
void gate_context_changed(void);
/* `context` is about to be destroyed (call it before): forgets its streams and events. */
void streams_forget_context(CUcontext context);
/* `stream` is about to be destroyed: its work still counts. */
void streams_forget(CUstream stream);

/* The thread has waited for everything it had submitted to `stream`, or to all streams of the current context. */
void streams_synced(void *stream);
void streams_synced_context(void);
/* Something of this thread's was found done: perhaps it is idle now. */
void streams_hint(void);

/* ---- capture.c ---- */

/* True if a submission to `stream` is recorded instead of run, or if asking might harm a capture. Cheap while none is active. */
bool stream_captures(void *stream);
/* Around calls into the driver that a global capture of another thread forbids ("potentially unsafe"). */
int capture_relax(void);
void capture_restore(int mode);
#endif
