/* rotation.h: whose turn it is. Parts of core.c; nobody else includes this. */
#ifndef CGPU_ROTATION_H
#define CGPU_ROTATION_H
#include "core.h"

bool core_wants(const struct core *core, uint32_t entity);

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

/* The high class's sliding window. Times are absolute ns, `window` its length. */
void cap_add(struct core_cap *cap, uint64_t from, uint64_t to, uint64_t window);
uint64_t cap_used(const struct core_cap *cap, uint64_t at, uint64_t window);
/* When a run that begins or goes on now fills the window up to `limit` ns. */
uint64_t cap_until(const struct core_cap *cap, uint64_t now, uint64_t limit, uint64_t window);
/* When, with nobody running, no more than `allowed` ns of the window are used. */
uint64_t cap_when(const struct core_cap *cap, uint64_t now, uint64_t allowed, uint64_t window);
#endif
