/* cap.c: how much of any window the high class had while others wanted the device. */
#include "core_parts.h"

#define BEGIN_ROOM_NS     100000 /* so much less than the window allows when a run begins */

static uint32_t nth(const struct core_cap *cap, uint32_t n)
{
    return (cap->first + n) % CORE_HISTORY;
}

void cap_add(struct core_cap *cap, uint64_t from, uint64_t to, uint64_t window)
{
    while (cap->count && cap->end[cap->first] + window <= to) {
        cap->first = nth(cap, 1);
        cap->count--;
    }
    if (cap->count && cap->end[nth(cap, cap->count - 1)] == from) {
        cap->end[nth(cap, cap->count - 1)] = to;
        return;
    }
    if (cap->count == CORE_HISTORY) {
        /* Join the two oldest, moved towards the present: they leave the window later than they should, never earlier. */
        uint32_t a = nth(cap, 0), b = nth(cap, 1);
        cap->start[b] -= cap->end[a] - cap->start[a];
        cap->first = b;
        cap->count--;
    }
    uint32_t n = nth(cap, cap->count++);
    cap->start[n] = from;
    cap->end[n] = to;
}

/* What it had after `since`. */
static uint64_t had_since(const struct core_cap *cap, uint64_t since)
{
    uint64_t had = 0;
    for (uint32_t k = 0; k < cap->count; k++) {
        uint32_t n = nth(cap, k);
        uint64_t start = cap->start[n] > since ? cap->start[n] : since;
        if (cap->end[n] > start)
            had += cap->end[n] - start;
    }
    return had;
}

/* A run of `r` from now on makes it r + what it had since now + r - window: as long as the window's old edge moves through
 * time that it had, the run costs nothing; through time that it had not, a nanosecond each. */
uint64_t cap_until(const struct core_cap *cap, uint64_t now, uint64_t limit, uint64_t window)
{
    uint64_t edge = now > window ? now - window : 0, used = had_since(cap, edge);
    if (used > limit)
        return now;
    uint64_t room = limit - used, run = window - (now - edge); /* before time began it had nothing */
    if (run >= room)
        return now + room;
    room -= run;
    for (uint32_t k = 0; k < cap->count; k++) {
        uint32_t n = nth(cap, k);
        if (cap->end[n] <= edge)
            continue;
        if (cap->start[n] > edge) {
            if (cap->start[n] - edge > room)
                return now + run + room;
            room -= cap->start[n] - edge;
            run += cap->start[n] - edge;
            edge = cap->start[n];
        }
        run += cap->end[n] - edge;
        edge = cap->end[n];
    }
    return now + run + room;
}

uint64_t cap_when(const struct core_cap *cap, uint64_t now, uint64_t need, uint64_t limit, uint64_t window)
{
    uint64_t allowed = limit > need ? limit - need : 0, had = 0;
    for (uint32_t k = cap->count; k-- > 0;) { /* the newest first: from which moment on did it have `allowed`? */
        uint32_t n = nth(cap, k);
        uint64_t length = cap->end[n] - cap->start[n];
        if (had + length > allowed) {
            uint64_t when = cap->end[n] - (allowed - had) + window - (need < window ? need : window);
            return when > now ? when : now;
        }
        had += length;
    }
    return now;
}

/* ---- what that means for the high class ---- */

static uint64_t limit_of(const struct core *c)
{
    uint64_t limit = c->tuning.window_ns / 100 * c->plan.high_percent + c->tuning.excess_ns;
    return limit > c->tuning.margin_ns ? limit - c->tuning.margin_ns : 0;
}

/* A window in which the percentage is as long as this kernel, for those that do not fit into the ordinary one. */
static uint64_t long_window(const struct core *c, const struct core_entity *e)
{
    return e->kernel_ns > limit_of(c) && c->plan.high_percent ? e->kernel_ns / c->plan.high_percent * 100 : 0;
}

/* How far back the high class's history must go. */
uint64_t high_history(const struct core *c)
{
    uint64_t longest = c->tuning.window_ns;
    for (uint64_t some = c->member[0]; some; some &= some - 1) {
        uint64_t window = long_window(c, &c->entity[__builtin_ctzll(some)]);
        longest = window > longest ? window : longest;
    }
    return longest;
}

/* When an entity may begin: the window must have room for a run that is worth it and holds one of its kernels. */
uint64_t high_begins(const struct core *c, const struct core_entity *e)
{
    /* A window that is just full stays so as long as its old edge moves through time that the class had: rounding must not
     * end such a run at once. */
    uint64_t limit = limit_of(c), begin = limit > BEGIN_ROOM_NS ? limit - BEGIN_ROOM_NS : 0, window = long_window(c, e);
    uint64_t need = e->kernel_ns > c->tuning.resume_ns ? e->kernel_ns : c->tuning.resume_ns;
    uint64_t when = cap_when(&c->cap, c->now, earlier(need, begin), begin, c->tuning.window_ns);
    uint64_t repaid = window ? cap_when(&c->cap, c->now, e->kernel_ns, e->kernel_ns, window) : 0;
    return repaid > when ? repaid : when;
}

/* Until when the high class may go on. */
uint64_t high_ends(const struct core *c)
{
    return cap_until(&c->cap, c->now, limit_of(c), c->tuning.window_ns);
}
