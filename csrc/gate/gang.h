/* gang.h: turns at the same time on several GPUs, for instances that span them: pure, over the schedules (core.h) of the GPUs.
 *
 * A kernel on one GPU may wait for one on another (NCCL's do). If two such instances had their turns one here and one there,
 * each would wait for the other's turn, with the device. So an instance that uses several GPUs (its *members* there) has a
 * turn on all of them or on none. Each GPU keeps a schedule of its own, with its own rotation, credits and charges:
 *
 *   gather  Where its turn comes, the instance is *due*, and does not begin: somebody else has the GPU meanwhile, in the
 *           order of the rotation. So it goes at the pace of the slowest GPU, and costs the others nothing.
 *   clear   Due on all of them, those GPUs are *reserved*: turns that run there are cut, and finished later.
 *   run     All are free: it is granted everywhere in one step. Its turn ends everywhere when it ends anywhere, and is
 *           charged everywhere whether it uses all or not.
 *   drain   All stay reserved until its work has ended on all. Closing a gate may fall between the launches of two kernels
 *           that wait for each other. Then one GPU has drained and has a launcher waiting, another has not: one
 *           submission after the other is let through (a *straggler*), until all have drained.
 *
 * A GPU that the instance was not seen to use for GANG_MEMORY_NS is no member, so one that could use two GPUs and uses one
 * is scheduled there like any other. */
#ifndef CGPU_GANG_H
#define CGPU_GANG_H
#include "core.h"

#define GANG_MEMBERS   16
#define GANG_MEMORY_NS 1000000000ull
#define GANG_SLACK_NS  200000ull  /* a GPU that drains so much later than its sibling waits for it, presumably */
#define GANG_STUCK_NS  5000000ull /* likewise, where none has drained */

enum gang_state { GANG_GATHER, GANG_CLEAR, GANG_START, GANG_RUN, GANG_DRAIN };

struct gang {
    uint32_t count;
    struct core *core[GANG_MEMBERS];
    uint32_t entity[GANG_MEMBERS];
    uint64_t used_ns[GANG_MEMBERS];    /* when it was last seen to use that GPU */
    uint64_t drained_ns[GANG_MEMBERS]; /* since when, in drain */
    uint32_t members;                  /* a set; fewer than two = none */
    uint32_t state;
    uint64_t due_ns;                   /* since when on all of them */
    uint64_t drain_ns;                 /* since when */
    uint64_t turns, stragglers;
};

/* To be called after any of the cores was stepped, at a time that is not before any of theirs. Whose `stirred` is set then,
 * must be stepped again, and then this again. Gives when to call it at the latest. */
uint64_t gang_step(struct gang *const *gangs, uint32_t count, uint64_t now);
/* The core forgets what the gang did with it: before the entity leaves it, or the gang goes. */
void gang_forget(struct gang *gang);
#endif
