/* gang.c: see gang.h. */
#include "gang.h"
#include "core_parts.h"

static struct core_entity *entity_of(const struct gang *g, uint32_t k)
{
    return &g->core[k]->entity[g->entity[k]];
}

static uint64_t bit_of(const struct gang *g, uint32_t k)
{
    return 1ull << g->entity[k];
}

#define FOR_MEMBERS(g, k) \
    for (uint32_t k = 0; k < (g)->count; k++) \
        if ((g)->members >> k & 1)

static void put(uint64_t *set, uint64_t bit, bool in, struct core *c)
{
    uint64_t now = in ? *set | bit : *set & ~bit;
    if (now != *set)
        c->stirred = true;
    *set = now;
}

static bool holds_reservation(const struct gang *g, uint32_t k)
{
    return g->core[k]->reserved == (int32_t)g->entity[k];
}

static void reserve(struct gang *g, uint32_t k)
{
    struct core *c = g->core[k];
    c->reserved = (int32_t)g->entity[k];
    c->go = c->straggle = c->gang_rests = false;
    c->gang_end = CORE_NEVER;
    c->stirred = true;
}

static void release(struct gang *g, uint32_t k)
{
    struct core *c = g->core[k];
    if (!holds_reservation(g, k))
        return;
    c->reserved = -1;
    c->go = c->straggle = c->gang_rests = false;
    c->gang_end = CORE_NEVER;
    c->stirred = true;
}

static void leave(struct gang *g, uint32_t k)
{
    uint64_t bit = bit_of(g, k);
    struct core *c = g->core[k];
    release(g, k);
    put(&c->gang, bit, false, c);
    put(&c->due, bit, false, c);
    put(&c->pending, bit, false, c);
    put(&c->called, bit, false, c);
    g->members &= ~(1u << k);
}

void gang_forget(struct gang *g)
{
    for (uint32_t k = 0; k < g->count; k++)
        leave(g, k);
    g->state = GANG_GATHER;
}

/* ---- who takes part ---- */

static bool can_have_turns(const struct gang *g, uint32_t k)
{
    const struct core *c = g->core[k];
    const struct core_entity *e = entity_of(g, k);
    return e->alive && e->quantum && !c->plan.native && !(c->overdue >> g->entity[k] & 1);
}

static bool uses(const struct gang *g, uint32_t k)
{
    const struct core_entity *e = entity_of(g, k);
    return e->demand || (e->phase == CORE_OPEN && e->holds) || e->phase == CORE_CLOSING || e->phase == CORE_TAIL;
}

static void look(struct gang *g, uint64_t now)
{
    for (uint32_t k = 0; k < g->count; k++)
        if (uses(g, k))
            g->used_ns[k] = now;
}

/* Between turns. */
static void regroup(struct gang *g, uint64_t now)
{
    uint32_t members = 0;
    for (uint32_t k = 0; k < g->count; k++)
        if (can_have_turns(g, k) && g->used_ns[k] && now - g->used_ns[k] < GANG_MEMORY_NS)
            members |= 1u << k;
    if (!(members & (members - 1)))
        members = 0;
    for (uint32_t k = 0; k < g->count; k++) {
        if (members >> k & 1)
            put(&g->core[k]->gang, bit_of(g, k), true, g->core[k]);
        else if (g->core[k]->gang & bit_of(g, k))
            leave(g, k);
    }
    g->members = members;
}

/* ---- the states ---- */

static void begin_drain(struct gang *g, uint64_t now)
{
    FOR_MEMBERS(g, k) {
        struct core *c = g->core[k];
        g->drained_ns[k] = 0;
        c->go = c->straggle = false;
        c->stirred = true;
    }
    g->state = GANG_DRAIN;
    g->drain_ns = now;
}

/* It came to use a second GPU while it has a turn on one, or it ends one that began before: all of that has to drain first. */
static bool take_over(struct gang *const *gangs, uint32_t count, struct gang *g, uint64_t now)
{
    FOR_MEMBERS(g, k) {
        int32_t other = g->core[k]->reserved;
        for (uint32_t n = 0; n < count && other >= 0; n++)
            for (uint32_t m = 0; m < gangs[n]->count; m++)
                if (gangs[n]->core[m] == g->core[k] && gangs[n]->entity[m] == (uint32_t)other &&
                    gangs[n]->state != GANG_CLEAR)
                    return false;
    }
    FOR_MEMBERS(g, k) {
        int32_t other = g->core[k]->reserved;
        for (uint32_t n = 0; n < count && other >= 0; n++) {
            struct gang *o = gangs[n];
            for (uint32_t m = 0; m < o->count; m++)
                if (o->core[m] == g->core[k] && o->entity[m] == (uint32_t)other && o->state == GANG_CLEAR) {
                    FOR_MEMBERS(o, all)
                        release(o, all);
                    o->state = GANG_GATHER; /* which nobody began yet: they stay due */
                }
        }
        reserve(g, k);
    }
    begin_drain(g, now);
    return true;
}

static bool high_in_the_way(const struct gang *g)
{
    FOR_MEMBERS(g, k)
        if (!entity_of(g, k)->high && core_high_busy(g->core[k]))
            return true;
    return false;
}

static bool share_a_gpu(const struct gang *a, const struct gang *b)
{
    FOR_MEMBERS(a, k)
        FOR_MEMBERS(b, m)
            if (a->core[k] == b->core[m])
                return true;
    return false;
}

static bool is_high(const struct gang *g)
{
    FOR_MEMBERS(g, k)
        if (entity_of(g, k)->high)
            return true;
    return false;
}

/* When the windows of its GPUs have room for one of high priority. */
static uint64_t room_when(const struct gang *g, uint64_t now)
{
    uint64_t when = now;
    FOR_MEMBERS(g, k) {
        const struct core_entity *e = entity_of(g, k);
        uint64_t begins = e->high && g->core[k]->lower_active ? high_begins(g->core[k], e) : now;
        when = begins > when ? begins : when;
    }
    return when;
}

/* One of high priority that could begin, but for somebody else's turn on several GPUs: those GPUs look again, and end it. */
static void interrupt(struct gang *g)
{
    FOR_MEMBERS(g, k) {
        struct core *c = g->core[k];
        if (c->reserved >= 0 && c->holder == c->reserved && !c->entity[c->reserved].high)
            c->stirred = true;
    }
}

/* Of the same class, whoever is due longest begins first. */
static bool another_goes_first(struct gang *const *gangs, uint32_t count, uint32_t self)
{
    const struct gang *g = gangs[self];
    for (uint32_t n = 0; n < count; n++) {
        const struct gang *o = gangs[n];
        bool before = o->due_ns < g->due_ns || (o->due_ns == g->due_ns && n < self);
        if (n != self && o->state == GANG_GATHER && o->due_ns && before && is_high(o) == is_high(g) && share_a_gpu(g, o))
            return true;
    }
    return false;
}

/* Gives when to look again. */
static uint64_t gather(struct gang *const *gangs, uint32_t count, uint32_t self, uint64_t now)
{
    struct gang *g = gangs[self];
    bool called = false, due = true, undrained = false, reserved = false;
    regroup(g, now);
    if (!g->members) {
        g->due_ns = 0;
        return CORE_NEVER;
    }
    FOR_MEMBERS(g, k) {
        const struct core_entity *e = entity_of(g, k);
        called |= e->demand || now < e->presume_ns;
        due &= (g->core[k]->due & bit_of(g, k)) != 0;
        undrained |= e->phase != CORE_SHUT;
        reserved |= g->core[k]->reserved >= 0;
    }
    if (undrained && take_over(gangs, count, g, now))
        return CORE_NEVER;
    due &= called;
    FOR_MEMBERS(g, k) {
        struct core *c = g->core[k];
        put(&c->called, bit_of(g, k), called, c);
        put(&c->pending, bit_of(g, k), due, c);
        if (!called)
            put(&c->due, bit_of(g, k), false, c);
    }
    if (!due) {
        g->due_ns = 0;
        return CORE_NEVER;
    }
    if (!g->due_ns)
        g->due_ns = now;
    uint64_t when = room_when(g, now);
    if (when > now)
        return when;
    if (reserved && is_high(g))
        interrupt(g);
    if (reserved || undrained || high_in_the_way(g) || another_goes_first(gangs, count, self))
        return CORE_NEVER;
    FOR_MEMBERS(g, k)
        reserve(g, k);
    g->state = GANG_CLEAR;
    return CORE_NEVER;
}

static bool still_whole(const struct gang *g)
{
    FOR_MEMBERS(g, k)
        if (!can_have_turns(g, k) || !holds_reservation(g, k))
            return false;
    return true;
}

static void back_to_gather(struct gang *g, bool forget_due)
{
    FOR_MEMBERS(g, k) {
        struct core *c = g->core[k];
        release(g, k);
        if (forget_due) {
            put(&c->due, bit_of(g, k), false, c);
            put(&c->pending, bit_of(g, k), false, c);
        }
    }
    if (forget_due)
        g->due_ns = 0;
    g->state = GANG_GATHER;
}

static void clear(struct gang *g)
{
    if (!still_whole(g) || high_in_the_way(g)) {
        back_to_gather(g, false);
        return;
    }
    FOR_MEMBERS(g, k)
        if (g->core[k]->holder >= 0 || g->core[k]->closing)
            return;
    FOR_MEMBERS(g, k) {
        g->core[k]->go = true;
        g->core[k]->stirred = true;
    }
    g->state = GANG_START;
    g->turns++;
}

static void run(struct gang *g, uint64_t now)
{
    uint64_t end = CORE_NEVER;
    bool rests = true, all = true, stepped = true;
    FOR_MEMBERS(g, k) {
        const struct core_entity *e = entity_of(g, k);
        all &= e->phase == CORE_OPEN && g->core[k]->holder == (int32_t)g->entity[k];
        stepped &= !g->core[k]->stirred;
    }
    if (g->state == GANG_START && !all && !stepped)
        return;
    if (!all || !still_whole(g)) {
        begin_drain(g, now);
        return;
    }
    g->state = GANG_RUN;
    FOR_MEMBERS(g, k) {
        const struct core_entity *e = entity_of(g, k);
        end = earlier(end, core_turn_ends(g->core[k], g->entity[k]));
        rests &= resting(e) || (!e->opened && now >= e->open_by_ns);
    }
    FOR_MEMBERS(g, k) {
        struct core *c = g->core[k];
        bool moved = (end < c->gang_end ? c->gang_end - end : end - c->gang_end) > 1000; /* a rounding is no news */
        if (moved || rests != c->gang_rests)
            c->stirred = true;
        if (moved)
            c->gang_end = end;
        c->gang_rests = rests;
    }
}

/* Lets through what the work in flight waits for, one submission at a time. Gives when to look again. */
static uint64_t help_stragglers(struct gang *g, uint64_t now)
{
    uint64_t next = CORE_NEVER, stuck_ns = GANG_STUCK_NS;
    FOR_MEMBERS(g, k) {
        const struct core_entity *e = entity_of(g, k);
        uint64_t rest = 2 * e->kernel_ns > e->inflight_ns ? 2 * e->kernel_ns : e->inflight_ns;
        stuck_ns = GANG_STUCK_NS + rest > stuck_ns ? GANG_STUCK_NS + rest : stuck_ns;
    }
    stuck_ns = earlier(stuck_ns, g->core[0]->tuning.overdue_cap_ns);
    bool stuck = now - g->drain_ns >= stuck_ns;
    FOR_MEMBERS(g, k) {
        struct core *c = g->core[k];
        const struct core_entity *e = entity_of(g, k);
        if (e->phase == CORE_OPEN)
            return CORE_NEVER; /* one at a time */
        if (!e->demand || e->phase == CORE_CLOSING || c->straggle)
            continue;
        uint64_t when = (g->drained_ns[k] ? g->drained_ns[k] : now) + GANG_SLACK_NS;
        if (!g->drained_ns[k] && !stuck) {
            next = earlier(next, g->drain_ns + stuck_ns);
            continue;
        }
        if (!stuck && now < when) {
            next = earlier(next, when);
            continue;
        }
        c->straggle = 1;
        c->stirred = true;
        g->drain_ns = now;
        g->stragglers++;
        return now + GANG_SLACK_NS;
    }
    return next;
}

static uint64_t drain(struct gang *g, uint64_t now)
{
    bool drained = true;
    FOR_MEMBERS(g, k) {
        struct core *c = g->core[k];
        const struct core_entity *e = entity_of(g, k);
        bool gone = e->phase == CORE_SHUT || c->plan.native || !e->alive;
        drained &= gone;
        if (!gone)
            g->drained_ns[k] = 0;
        else if (!g->drained_ns[k])
            g->drained_ns[k] = now;
        if (c->straggle == 2 && gone)
            c->straggle = 0;
    }
    if (!drained)
        return help_stragglers(g, now);
    back_to_gather(g, true);
    return now;
}

uint64_t gang_step(struct gang *const *gangs, uint32_t count, uint64_t now)
{
    uint64_t next = CORE_NEVER;
    for (uint32_t n = 0; n < count; n++) {
        struct gang *g = gangs[n];
        look(g, now);
        switch (g->state) {
        case GANG_CLEAR: clear(g); break;
        case GANG_START:
        case GANG_RUN: run(g, now); break;
        case GANG_DRAIN: next = earlier(next, drain(g, now)); break;
        default: break;
        }
        if (g->state == GANG_GATHER)
            next = earlier(next, gather(gangs, count, n, now));
    }
    return next;
}
