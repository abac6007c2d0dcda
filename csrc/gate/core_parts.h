/* core_parts.h: what the parts of the scheduling step offer each other; nobody else includes this.
 *
 *   core.c      decides: who is closed, who is granted, until when
 *   events.c    takes in time, reports and plans
 *   rotation.c  whose turn it is
 *   cap.c       how much of a window the high class had */
#ifndef CGPU_CORE_PARTS_H
#define CGPU_CORE_PARTS_H
#include "core.h"

static inline uint64_t earlier(uint64_t a, uint64_t b)
{
    return a < b ? a : b;
}

/* It has the grant and nobody in it uses it. */
static inline bool resting(const struct core_entity *e)
{
    return e->phase == CORE_OPEN && !e->holds && e->opened;
}

/* Where nobody drains first: more tails than two would only pile up before whoever comes next. */
static inline bool tails_block(const struct core *core)
{
    return !core->plan.drain && core->line_count >= 2;
}

/* ---- core.c ---- */
bool core_wants(const struct core *core, uint32_t entity);
/* Those of a class who want the device. */
uint64_t core_wanting(const struct core *core, int class);
/* A member of the high class wants it and has room in its window, or has it. */
bool core_high_busy(const struct core *core);

/* ---- events.c ---- */
/* Charges the time that has passed, and sets the clock. */
void core_settle(struct core *core, uint64_t now);
void core_apply(struct core *core, const struct core_event *event);
void core_line_remove(struct core *core, uint32_t entity);
bool core_at_front(const struct core *core, uint32_t entity);
void core_set_overdue(struct core *core, uint32_t entity, bool on);
/* How long its work still goes on, as predicted when it let go. */
uint64_t core_tail_left(const struct core *core, const struct core_entity *entity);

/* ---- rotation.c ---- */
void rotation_rebuild(struct core *core);
/* Work-conserving: the next of `ready` (a set) in its class, credited; -1 = none. */
int rotation_pick(struct core *core, int class, uint64_t ready);
/* Fixed rotation: begins the next turn, an owner's or unowned. */
void rotation_next(struct core *core);
/* Fixed rotation: lets `elapsed` ns pass in which nobody ran. */
void rotation_pass(struct core *core, uint64_t elapsed);
/* Fixed rotation: the current turn's owner, or -1 in unowned time or with no owners; its credit. */
int rotation_owner(const struct core *core);
int64_t rotation_credit(const struct core *core);

/* ---- cap.c ---- */
/* A sliding window. Times are absolute ns, `window` its length. */
void cap_add(struct core_cap *cap, uint64_t from, uint64_t to, uint64_t window);
/* Until when a run that begins or goes on now keeps every window within `limit` ns. */
uint64_t cap_until(const struct core_cap *cap, uint64_t now, uint64_t limit, uint64_t window);
/* When a run of `need` ns can begin that does, if nobody runs until then. */
uint64_t cap_when(const struct core_cap *cap, uint64_t now, uint64_t need, uint64_t limit, uint64_t window);

/* When an entity of the class may begin: the window must have room for a run that is worth it and holds one of its kernels. */
uint64_t high_begins(const struct core *core, const struct core_entity *entity);
/* Until when the class may go on. */
uint64_t high_ends(const struct core *core);
/* How far back its history must go. */
uint64_t high_history(const struct core *core);

/* ---- times.c ---- */
#define STRAGGLER_ENDS_NS 5000000
/* When the holder's turn ends by itself; CORE_NEVER = not. */
uint64_t core_turn_ends(const struct core *core, uint32_t entity);
/* What its processes are told: 0 = it does not. */
uint64_t times_deadline(const struct core *core, uint32_t entity);
/* When the core wants to be called again. */
uint64_t times_next(const struct core *core);

/* ---- watch.c ---- */
/* Before the step decides: begins or ends plain sharing. */
void watch(struct core *core);
/* When it must look again. */
uint64_t watch_next(const struct core *core);
#endif
