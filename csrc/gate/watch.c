/* watch.c: whatever goes wrong with the scheduling, nobody who is due waits for ever: plain sharing instead, for a while.
 *
 * Due: it asks, is not paused, not in debt, not passed over for not coming, and no high-priority program: that one waits for
 * its percentage by design, and the time that it has is not counted as the others' waiting. The patience is starve_ns, a
 * round, and a few kernels of everybody else, as long as they claim these to be (up to overdue_cap_ns).
 *
 * Plain sharing lasts retry_ns, and on until nobody keeps the device any more although told to let go. If somebody is kept
 * waiting again within four times as long as it lasted, the next one is twice as long, up to 64 times. */
#include "core_parts.h"

#define RETRIES 6  /* doublings */
#define IN_FLIGHT 3 /* submissions of a turn that began with a long one: the window, and one */
#define LOOKS   16 /* in the time that somebody may wait */

uint64_t core_longest_wait(const struct core *c, uint64_t now)
{
    uint64_t longest = 0;
    for (uint64_t some = core_wanting(c, 1) & c->asking & ~c->due; some; some &= some - 1) {
        const struct core_entity *e = &c->entity[__builtin_ctzll(some)];
        if (e->phase == CORE_OPEN || e->credit < 0)
            continue;
        uint64_t since = e->wait_ns > e->granted_ns ? e->wait_ns : e->granted_ns, high = c->high_ns - e->high_at;
        if (now > since && now - since > high && now - since - high > longest)
            longest = now - since - high;
    }
    return longest;
}

/* What may be waited for when all is well. */
static uint64_t patience(const struct core *c)
{
    uint64_t sum = c->tuning.starve_ns + c->plan.unowned_ns;
    for (uint64_t some = c->member[0] | c->member[1]; some; some &= some - 1) {
        const struct core_entity *e = &c->entity[__builtin_ctzll(some)];
        sum += e->quantum + IN_FLIGHT * earlier(e->kernel_ns, c->tuning.overdue_cap_ns);
    }
    return sum;
}

static void share_plainly(struct core *c, bool plainly)
{
    struct core_plan plan = c->plan;
    plan.native = plainly;
    core_apply(c, &(struct core_event){.type = CORE_PLAN, .plan = &plan});
    c->fallback = plainly;
}

static bool somebody_keeps_it(const struct core *c)
{
    return c->closing || c->overdue;
}

void watch(struct core *c)
{
    if (c->fallback) {
        if (c->now < c->retry_at || somebody_keeps_it(c))
            return;
        share_plainly(c, false);
        c->sound_since = c->now;
        return;
    }
    if (c->plan.native || c->now < c->watch_at)
        return;
    c->watch_at = c->now + c->tuning.starve_ns / LOOKS; /* it costs more than a step, the more wait the more */
    bool starving = core_longest_wait(c, c->now) > patience(c);
    bool still = starving && c->starving; /* once more: it may be this step, come late, that ends the wait */
    c->starving = starving;
    if (!still)
        return;
    bool again = c->starved && c->now - c->sound_since < 4 * c->retry_ns;
    c->retry_ns = !again ? c->tuning.retry_ns : c->retry_ns < c->tuning.retry_ns << RETRIES ? 2 * c->retry_ns : c->retry_ns;
    c->retry_at = c->now + c->retry_ns;
    c->starved++;
    share_plainly(c, true);
}

uint64_t watch_next(const struct core *c)
{
    if (c->fallback)
        return c->retry_at > c->now ? c->retry_at : CORE_NEVER;
    if (c->plan.native || !core_wanting(c, 1))
        return CORE_NEVER;
    return c->watch_at > c->now ? c->watch_at : c->now + c->tuning.starve_ns / LOOKS;
}
