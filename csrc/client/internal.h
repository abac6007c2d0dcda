/* internal.h: what the files of the gate's client side offer each other and nobody else. lanes.h is for those of streams.h. */
#ifndef CGPU_INTERNAL_H
#define CGPU_INTERNAL_H
#include <stdbool.h>
#include <stdint.h>
#include "client.h"

/* Marks that have stood for seconds (a launch left by longjmp) are not waited for twice. */
void gate_clear_marks(const struct gate *g);

uint64_t gate_joined(void); /* when, ns */
int gate_own_socket(void);  /* gate_socket(), after a look whether it still is the connection */
bool gate_owns(int fd);     /* it still is our connection, not what the program has opened under its number */
/* Reads what the daemon sends after its welcome. false: the connection has ended. Any thread may. */
bool gate_hear(int fd);
void gate_nap(uint64_t ns);
void threads_prepare_fork(void);
void joining_after_fork(void);
void agent_after_fork(void);
void streams_after_fork(void);

/* ---- draining.c, for the agent; each takes gate.work ---- */

/* Submissions so far, those included that a marked thread is about to make. */
uint64_t streams_submitted(struct gate *g);
/* True if nothing is in flight. Records what is needed to know. */
bool streams_quiet(struct gate *g, uint64_t now);
/* True if what is in flight fills the turn up: no thread will submit more in it. */
bool streams_turn_is_full(struct gate *g, uint64_t now, uint64_t deadline);
/* The gate is closed and no thread is marked: every stream gets its last event. */
void streams_close(struct gate *g, uint64_t now);
/* Work of unknown length is predicted to go on for so long, at every look. */
#define STREAMS_UNKNOWN_NS 1000000u
/* True when all of it is done, at *end; else *end: when it is predicted to be. */
bool streams_drained(struct gate *g, uint64_t now, uint64_t *end);
/* What was recorded counts as done, finished or not: it was waited for long enough. */
void streams_abandon(struct gate *g);
/* The process ends: no more calls into the driver; everything counts as done. */
void streams_give_up(void);
/* The agent's own thread: harmless to captures. */
void streams_agent_thread(void);
#endif
