/* internal.h: what client.c, agent.c and streams.c offer each other and nobody else. */
#ifndef CGPU_INTERNAL_H
#define CGPU_INTERNAL_H
#include <stdbool.h>
#include <stdint.h>
#include "client.h"

/* Marks that have stood for seconds (a launch left by longjmp) are not waited for twice. */
void gate_clear_marks(const struct gate *g);

void agent_after_fork(void);
void streams_after_fork(void);

/* ---- streams.c, for the agent; each takes gate.work ---- */

/* Submissions so far, those included that a marked thread is about to make. */
uint64_t streams_submitted(struct gate *g);
/* True if nothing is in flight. Records what is needed to know. */
bool streams_quiet(struct gate *g, uint64_t now);
/* The gate is closed and no thread is marked: every stream gets its last event. */
void streams_close(struct gate *g, uint64_t now);
/* True when all of it is done; else *end: when it is predicted to be. */
bool streams_drained(struct gate *g, uint64_t now, uint64_t *end);
/* The process ends: no more calls into the driver; everything counts as done. */
void streams_give_up(void);
/* The agent's own thread: harmless to captures. */
void streams_agent_thread(void);
#endif
