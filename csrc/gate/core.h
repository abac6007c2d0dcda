/* core.h: one GPU's scheduling step, as a pure function of (state, now, events): no clock, no I/O, no allocation.
 *
 * An *entity* is an instance on this GPU. It is offered the device by a grant, lets go of it (acknowledges), and has drained
 * when its work has really ended. Time is charged by one rule: every nanosecond goes to the oldest grant that has not
 * drained (a device runs what was submitted first), so an early acknowledgement costs the leaver, not the newcomer, and the
 * charges always add up to the time that passed.
 *
 * The rotation is deficit round robin by time: a turn adds the entity's quantum to its credit and lasts until the credit is
 * used up; what it overran is debt, taken from its next turns. Where idle owners are not skipped, their turns and the
 * unowned time pass in the same rotation with nobody running. High-priority entities rotate among themselves, before
 * everybody else, within a sliding window. An owner that comes back after everybody else who waits has had a turn goes next,
 * where idle owners are skipped: a share that was lent is back after the turn that runs, not after a round.
 *
 * An instance over several GPUs has an entity on each; gang.h says how those get their turns together. A watchdog (watch.c)
 * makes the plan native for a while when somebody who is due waits for too long.
 *
 * The caller (server.c, or a test in virtual time) feeds what it saw and carries out the actions in order. After a
 * CORE_CLOSE it must look at the entity again (close; seq_cst fence; look) and report what it saw, in a further step. */
#ifndef CGPU_CORE_H
#define CGPU_CORE_H
#include <stdbool.h>
#include <stdint.h>

#define CORE_ENTITIES 64 /* an entity set is one 64-bit word */
#define CORE_ACTIONS  (4 * CORE_ENTITIES)
#define CORE_HISTORY  64
#define CORE_NEVER    UINT64_MAX

/* Defaults: core_tuning_default(). docs/architecture.md has the reasons. */
struct core_tuning {
    uint64_t presume_ns;     /* a turn that was cut leaves a presumed demand for so long after its drain */
    uint64_t overlap_ns;     /* how much earlier than its drain a client may acknowledge */
    uint64_t overdue_ns;     /* patience with a closed entity that does not let go, beside its work in flight... */
    uint64_t overdue_cap_ns; /* ...of which at most so much is believed */
    uint64_t noshow_ns;      /* a demand that does not open its grant by then is passed over */
    uint64_t backoff_cap_ns; /* for at most so long at a time */
    uint64_t backstop_ns;    /* who does not let go at its deadline by itself is closed so much later */
    uint64_t window_ns;      /* high priority: the sliding window its percentage is of */
    uint64_t resume_ns;      /* high priority: resumes when the window has so much room */
    uint64_t margin_ns;      /* high priority: kept free of the percentage, for the way a close takes */
    uint64_t excess_ns;      /* high priority: by so much the percentage of a window may be passed: a kernel may just not fit */
    uint64_t linger_ns;      /* high priority: another that runs out of work may only be late with a launch: it counts as wanting the
                              * device for so long, or as long as it had work, unless its last pause was longer */
    uint64_t starve_ns;      /* the watchdog: who is due waits at most so long, beside a round and the others' kernels; ... */
    uint64_t retry_ns;       /* ...then everybody shares plainly for so long, twice as long each time it happens again */
};

struct core_turn {
    uint32_t entity;
    uint32_t high;
    uint64_t quantum_ns;     /* 0 = paused */
};
struct core_plan {
    uint32_t count;
    uint32_t skip_idle, drain, native;
    uint32_t high_percent;
    uint64_t unowned_ns;     /* of a round; only where idle owners are not skipped */
    struct core_turn turn[CORE_ENTITIES];
};

/* What the caller saw of an entity's processes, about its latest grant. */
struct core_report {
    uint64_t epoch;          /* of that grant */
    uint64_t inflight_ns;    /* predicted rest of its work; only lengthens patience */
    uint64_t kernel_ns;      /* measured length of a submission; only for the high-priority window */
    uint64_t end_ns;         /* it has let go: when its work is predicted to drain, or did; 0 = unknown */
    uint64_t away_ns;        /* device time that it had while no daemon was there, and others had none */
    uint8_t demand;          /* a launcher waits */
    uint8_t opened;          /* a process accepted the grant */
    uint8_t holds;           /* and one has not acknowledged yet */
    uint8_t undrained;       /* and one has work left */
    uint8_t idle;            /* all that accepted it let go for want of work */
    uint8_t stale;           /* a process gave it back before its end, has a launcher waiting, and cannot accept it again */
};

enum core_event_type { CORE_TICK, CORE_JOIN, CORE_LEAVE, CORE_PLAN, CORE_REPORT };
struct core_event {
    uint32_t type;
    uint32_t entity;
    struct core_report report;
    const struct core_plan *plan;
};

enum core_action_type {
    CORE_GRANT,              /* open it, with this epoch and deadline */
    CORE_CLOSE,              /* close it; then look again */
    CORE_DEADLINE            /* it stays open, with this deadline; ring: its processes must look now */
};
struct core_action {
    uint32_t type, entity;
    uint64_t epoch;
    uint64_t deadline;       /* 0 = nobody else wants the device */
    uint32_t ring;
    uint32_t pad;
};

enum core_phase { CORE_SHUT, CORE_OPEN, CORE_CLOSING, CORE_TAIL /* let go, not drained */ };

struct core_entity {
    uint64_t epoch;          /* of the latest grant */
    uint64_t granted_ns, acked_ns;
    uint64_t unopened_ns;    /* of this grant, taken for idle as long as we have not heard that it was opened */
    uint64_t end_ns;         /* tail: when its work is predicted to have drained, within overlap_ns of acked_ns */
    uint64_t open_by_ns;     /* a grant that nobody accepted by then is withdrawn, if others want the device */
    uint64_t overdue_ns;     /* closing or draining: patience ends */
    uint64_t presume_ns;     /* demand is presumed until then */
    uint64_t backoff_ns;     /* not asked again before */
    uint64_t wait_ns;        /* since when it asks */
    uint64_t deadline;       /* as published */
    uint64_t provisional_ns; /* the end of its turn as long as the one before still drains */
    uint64_t quantum, inflight_ns, kernel_ns;
    int64_t credit;          /* < 0: debt */
    uint64_t busy_ns;        /* charged and not known to have been idle */
    uint64_t turns, overdue_count;
    uint64_t served;         /* core.turns at its latest grant */
    uint64_t high_at;        /* core.high_ns when it began to wait */
    uint64_t paused_at;      /* since when it has no work; 0 = it has some, or had none yet */
    uint64_t paused_busy_ns; /* busy_ns when it last ran out of it */
    uint64_t away_ns, away_at; /* of that much has been charged; since when there is more */
    uint8_t phase, alive, high, demand, opened, holds, idle, released, stale;
    uint8_t pauses;          /* the last time that it had none was longer than linger_ns */
    uint8_t free;            /* its work in flight is from before a plan change: not charged */
    uint8_t strikes;         /* its claims of work in flight are not believed for so many turns */
    uint8_t noshows;
};

struct core_cap {            /* when the high class held the device while others wanted it */
    uint64_t start[CORE_HISTORY], end[CORE_HISTORY];
    uint32_t first, count;
};

struct core {
    struct core_tuning tuning;
    struct core_plan plan;
    struct core_entity entity[CORE_ENTITIES];
    struct core_cap cap;
    uint64_t now, epoch;
    uint64_t overdue;        /* a set: ignored until they let go */
    uint64_t total_ns, idle_ns, turns;
    int32_t holder;          /* the open entity, -1 = none (or native: all) */
    uint32_t closing;        /* entities closed that have not let go */
    uint8_t line[CORE_ENTITIES]; /* grants that have not drained, oldest first */
    uint32_t line_count;
    /* [0]: the high class, [1]: the others */
    uint8_t order[2][CORE_ENTITIES];
    uint32_t order_count[2];
    uint32_t position[2];    /* in order: who had or has the turn */
    uint8_t resume[2];       /* the turn at `position` was cut short from above: it goes on before the next */
    uint8_t in_void;         /* the turn is the unowned time after `position` */
    uint8_t turn_over;
    uint8_t contended;       /* the holder's turn has an end */
    uint8_t lower_active;    /* somebody of the lower class wants or has the device, ... */
    uint64_t lower_until;    /* ... or counts as wanting it until then */
    int64_t void_credit;
    /* sets, so that a step costs the same however many wait */
    uint64_t member[2];      /* of a class, not paused */
    uint64_t asking;         /* those with a launcher that waits */
    uint64_t timed;          /* those that presume_ns or backoff_ns may speak of */
    uint64_t returned;       /* asked after they had nothing to run, and had no turn since */
    /* gang.h */
    uint64_t gang, due, pending, called;
    int32_t reserved;        /* the device is for this entity alone, -1 = nobody's */
    uint8_t go;              /* and it may have it now: 1 = not yet granted, 2 = granted */
    uint8_t straggle;        /* one more submission of it may pass: 1 = asked for, 2 = granted */
    uint8_t gang_rests;      /* it has nothing to run on any GPU */
    uint8_t stirred;         /* gang_step() changed something: step again */
    uint64_t gang_end;       /* when its turn ends on the GPU where that is first */
    /* watch.c */
    uint64_t history_ns;     /* how far back `cap` goes */
    uint64_t high_ns;        /* time the high class had while others wanted the device */
    uint64_t starved;        /* times that somebody did */
    uint64_t watch_at, retry_at, retry_ns, sound_since;
    uint8_t starving;        /* at the last look */
    uint8_t fallback;        /* plain sharing until retry_at, whatever the plan says */
};

void core_tuning_default(struct core_tuning *tuning);
/* `tuning` NULL: the defaults. No entities, no plan; time begins at `now`. */
void core_init(struct core *core, const struct core_tuning *tuning, uint64_t now);
/* Applies the events in order, at `now` (never earlier than before; an earlier one counts as the latest). Writes at most
 * CORE_ACTIONS actions, and gives when it must be called again at the latest (CORE_NEVER: only upon an event).
 * Events about entities out of range or not joined are ignored. */
uint64_t core_step(struct core *core, uint64_t now, const struct core_event *events, uint32_t count,
                   struct core_action *actions, uint32_t *action_count);
/* Entities that must be looked at before a step: those with a grant that has not drained. A set, bit i = entity i. */
uint64_t core_watched(const struct core *core);
/* When the work ahead of a granted entity is predicted to have drained; 0 = nothing is ahead, or nobody waits for it. */
uint64_t core_start(const struct core *core, uint32_t entity);
/* How long the most patient runnable entity has waited, ns; 0 = nobody waits. For a watchdog. */
uint64_t core_longest_wait(const struct core *core, uint64_t now);
#endif
