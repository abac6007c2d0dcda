/* times.c: when a turn ends, what its processes are told of that, and when the step has to look again. */
#include "core_parts.h"

#define STRAGGLER_NS      50000 /* a turn so short lets one submission pass */

/* When a waiting member of the high class has room again; CORE_NEVER = none waits. */
static uint64_t high_returns(const struct core *c)
{
    uint64_t when = CORE_NEVER;
    for (uint64_t some = core_wanting(c, 0) & ~(c->gang & c->due); some; some &= some - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(some);
        if ((int32_t)i != c->holder)
            when = earlier(when, high_begins(c, &c->entity[i]));
    }
    return when;
}

uint64_t core_turn_ends(const struct core *c, uint32_t i)
{
    const struct core_entity *e = &c->entity[i];
    uint64_t end = CORE_NEVER;
    if (c->plan.native)
        return end;
    if (c->straggle == 2)
        return e->granted_ns + STRAGGLER_ENDS_NS;
    if (c->contended)
        end = core_at_front(c, i) ? c->now + (uint64_t)(e->credit > 0 ? e->credit : 0) : e->provisional_ns;
    if (e->high && c->lower_active)
        end = earlier(end, high_ends(c));
    if (!e->high)
        end = earlier(end, high_returns(c));
    return end;
}

/* What its processes are told. They let go at the moment nearest to it between two submissions; the end of the high class's
 * window may not be passed, so there it is named half a submission early. */
uint64_t times_deadline(const struct core *c, uint32_t i)
{
    const struct core_entity *e = &c->entity[i];
    uint64_t end = core_turn_ends(c, i), half = e->kernel_ns / 2;
    if (c->straggle == 2)
        return e->granted_ns + STRAGGLER_NS;
    if (c->reserved == (int32_t)i)
        end = earlier(end, c->gang_end);
    if (e->high && c->lower_active && c->tuning.window_ns) {
        uint64_t window = high_ends(c);
        half = earlier(half, (window - c->now) / 2);
        end = earlier(end, window - half);
    }
    return end == CORE_NEVER ? 0 : end;
}

/* When to look whether the holder's turn is over. Its processes know the deadline and let go by themselves, when what they have
 * in flight is nearly done, and then they ring: to wake up at the deadline only to tell them would cost a fifth of what a
 * turn does. Not where somebody else relies on the very moment. */
static uint64_t look_at_turn(const struct core *c, uint32_t i)
{
    const struct core_entity *e = &c->entity[i];
    uint64_t end = core_turn_ends(c, i);
    if (end == CORE_NEVER || !e->opened || !e->holds || e->high || c->gang >> i & 1)
        return end;
    return earlier(end + c->tuning.backstop_ns, high_returns(c));
}

uint64_t times_next(const struct core *c)
{
    uint64_t next = watch_next(c);
    for (uint32_t k = 0; k < c->line_count; k++) {
        const struct core_entity *e = &c->entity[c->line[k]];
        if (e->phase == CORE_CLOSING || e->phase == CORE_TAIL)
            next = earlier(next, e->overdue_ns);
    }
    if (c->plan.native)
        return next;
    for (uint64_t some = c->timed; some; some &= some - 1) {
        const struct core_entity *e = &c->entity[__builtin_ctzll(some)];
        if (e->demand && e->backoff_ns > c->now)
            next = earlier(next, e->backoff_ns);
    }
    if (c->lower_until > c->now)
        next = earlier(next, c->lower_until);
    uint64_t waiting = core_wanting(c, 0) | core_wanting(c, 1);
    if (c->holder >= 0) {
        const struct core_entity *e = &c->entity[c->holder];
        if (!c->contended || core_at_front(c, (uint32_t)c->holder)) /* else its turn begins when the one before has drained */
            next = earlier(next, look_at_turn(c, (uint32_t)c->holder));
        else if (!e->high)
            next = earlier(next, high_returns(c));
        if (!e->opened && waiting & ~(1ull << c->holder))
            next = earlier(next, e->open_by_ns > c->now ? e->open_by_ns : CORE_NEVER);
        if (c->holder == c->reserved && c->gang_end > c->now)
            next = earlier(next, c->gang_end);
    } else if (waiting && !c->closing && c->reserved < 0 && !tails_block(c)) {
        if (c->lower_active)
            next = earlier(next, high_returns(c));
        if (!c->plan.skip_idle && !c->line_count && rotation_credit(c) > 0)
            next = earlier(next, c->now + (uint64_t)rotation_credit(c));
    }
    return next;
}
