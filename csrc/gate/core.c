/* core.c: the scheduling step's decisions. core.h says what it promises; core_parts.h lists its other parts. */
#include "core_parts.h"
#include <string.h>

#define STRIKES 16 /* turns in a row without trouble, until claims are believed again */
#define NO_DEADLINE CORE_NEVER /* entity.deadline: nothing published yet */

struct out {
    struct core_action *actions;
    uint32_t count;
};

void core_tuning_default(struct core_tuning *t)
{
    *t = (struct core_tuning){
        .presume_ns = 400000, .overlap_ns = 0,
        .overdue_ns = 50000000, .overdue_cap_ns = 2000000000,
        .noshow_ns = 10000000, .backoff_cap_ns = 640000000,
        .window_ns = 100000000, .resume_ns = 5000000, .margin_ns = 300000,
    };
}

void core_init(struct core *c, const struct core_tuning *tuning, uint64_t now)
{
    memset(c, 0, sizeof *c);
    if (tuning)
        c->tuning = *tuning;
    else
        core_tuning_default(&c->tuning);
    c->plan.skip_idle = c->plan.drain = 1;
    c->plan.high_percent = 100;
    c->now = now;
    c->epoch = 1; /* the word of epoch 1, closed, is what a new page says */
    c->holder = -1;
    c->turn_over = true;
}

/* ---- who wants the device ---- */

bool core_wants(const struct core *c, uint32_t i)
{
    const struct core_entity *e = &c->entity[i];
    return e->alive && e->quantum && !(c->overdue >> i & 1) && c->now >= e->backoff_ns && (e->demand || c->now < e->presume_ns);
}

static bool is_lower_active(const struct core *c)
{
    for (uint32_t k = 0; k < c->order_count[1]; k++) {
        uint32_t i = c->order[1][k];
        const struct core_entity *e = &c->entity[i];
        if (core_wants(c, i) || (e->phase == CORE_OPEN && !resting(e)) || (e->phase == CORE_CLOSING && !e->idle))
            return true;
    }
    return false;
}

static uint64_t cap_limit(const struct core *c)
{
    uint64_t limit = c->tuning.window_ns / 100 * c->plan.high_percent;
    return limit > c->tuning.margin_ns ? limit - c->tuning.margin_ns : 0;
}

/* How much room the window must have for this entity to begin: never a turn too short for one of its kernels. A kernel
 * longer than the whole percentage waits for an empty window. */
static uint64_t room_needed(const struct core *c, const struct core_entity *e)
{
    uint64_t need = e->kernel_ns > c->tuning.resume_ns ? e->kernel_ns : c->tuning.resume_ns;
    return earlier(need, cap_limit(c));
}

static bool high_ready(const struct core *c, uint32_t i, bool lower)
{
    const struct core_entity *e = &c->entity[i];
    if (!core_wants(c, i))
        return false;
    return !lower || cap_used(&c->cap, c->now, c->tuning.window_ns) + room_needed(c, e) <= cap_limit(c);
}

/* Entities of a class that could be granted now, `but` excepted (-1 = nobody). */
static uint64_t ready_set(const struct core *c, int class, int but, bool lower)
{
    uint64_t set = 0;
    for (uint32_t k = 0; k < c->order_count[class]; k++) {
        uint32_t i = c->order[class][k];
        if ((int)i != but && (class == 0 ? high_ready(c, i, lower) : core_wants(c, i)))
            set |= 1ull << i;
    }
    return set;
}

/* ---- decisions ---- */

static void act(struct out *o, struct core_action action)
{
    if (o->count < CORE_ACTIONS)
        o->actions[o->count++] = action;
}

static void shut(struct core *c, uint32_t i, struct out *o)
{
    struct core_entity *e = &c->entity[i];
    e->phase = CORE_CLOSING;
    e->inflight_ns = 0;
    e->overdue_ns = c->now + c->tuning.overdue_ns;
    c->closing++;
    if (c->holder == (int32_t)i)
        c->holder = -1;
    act(o, (struct core_action){.type = CORE_CLOSE, .entity = i, .epoch = e->epoch});
}

/* `i` is granted anew while its last work still drains before somebody else's. Its slots will speak of the new grant only, so
 * what is left of the old is settled now, as predicted. */
static void settle_tail(struct core *c, uint32_t i)
{
    struct core_entity *e = &c->entity[i];
    if (e->phase != CORE_TAIL || !core_at_front(c, i) || c->line_count < 2 || e->free)
        return;
    struct core_entity *next = &c->entity[c->line[1]];
    int64_t left = (int64_t)core_tail_left(c, e);
    e->credit -= left;
    if (!next->free)
        next->credit += left;
}

static void grant(struct core *c, uint32_t i)
{
    struct core_entity *e = &c->entity[i];
    uint64_t left = core_tail_left(c, e);
    settle_tail(c, i);
    core_line_remove(c, i);
    e->phase = CORE_OPEN;
    e->epoch = ++c->epoch;
    e->granted_ns = c->now;
    e->opened = e->holds = e->idle = e->released = e->stale = e->free = false;
    e->inflight_ns = 0;
    e->deadline = NO_DEADLINE;
    e->open_by_ns = c->now + (e->demand ? c->tuning.noshow_ns : c->tuning.presume_ns + left);
    /* When the turn ends if the one before still drains: by then plus our credit. Policy 4's tails may be long. */
    uint64_t front = c->line_count && !c->plan.drain ? core_tail_left(c, &c->entity[c->line[0]]) : 0;
    e->provisional_ns = c->now + front + (uint64_t)(e->credit > 0 ? e->credit : 0);
    e->turns++;
    c->turns++;
    c->line[c->line_count++] = (uint8_t)i;
}

static void expire(struct core *c)
{
    for (uint32_t k = 0; k < c->line_count;) {
        uint32_t i = c->line[k];
        struct core_entity *e = &c->entity[i];
        if ((e->phase != CORE_CLOSING && e->phase != CORE_TAIL) || c->now < e->overdue_ns) {
            k++;
            continue;
        }
        if (e->phase == CORE_CLOSING)
            c->closing--;
        core_line_remove(c, i);
        e->phase = CORE_SHUT;
        core_set_overdue(c, i, true);
        e->overdue_count++;
        e->strikes = STRIKES;
        e->free = false;
        e->presume_ns = 0;
    }
}

/* Somebody else can use the device when `i` lets go. */
static bool has_rival(const struct core *c, uint32_t i)
{
    return ready_set(c, c->entity[i].high ? 0 : 1, (int)i, c->lower_active) != 0;
}

/* The turn of `i` has an end: a rival waits, or others have time of their own whether they use it or not. */
static bool is_contended(const struct core *c, uint32_t i)
{
    const struct core_entity *e = &c->entity[i];
    if (!e->high && !c->plan.skip_idle && (c->order_count[1] > 1 || c->plan.unowned_ns))
        return true;
    return has_rival(c, i);
}

static void pass_over(struct core *c, struct core_entity *e)
{
    if (!e->demand) {
        e->presume_ns = 0;
        return;
    }
    /* It asks and does not come: stopped, perhaps, or its CPU is busy (the first time is free). Ask it ever more rarely. */
    uint64_t pause = e->noshows ? c->tuning.noshow_ns << (e->noshows - 1) : 0;
    if (pause < c->tuning.backoff_cap_ns)
        e->noshows++;
    e->backoff_ns = c->now + earlier(pause, c->tuning.backoff_cap_ns);
}

static bool must_close(struct core *c, uint32_t i)
{
    struct core_entity *e = &c->entity[i];
    if (!e->quantum || e->released || (e->stale && !c->contended)) {
        c->turn_over |= !e->high;
        return true;
    }
    if (!e->high && ready_set(c, 0, -1, c->lower_active)) {
        c->resume[1] = true; /* it finishes its turn when the high class is done */
        return true;
    }
    if (e->high && c->lower_active &&
        c->now >= cap_until(&c->cap, c->now, cap_limit(c), c->tuning.window_ns)) {
        c->resume[0] = true;
        return true;
    }
    if (c->contended && core_at_front(c, i) && e->credit <= 0) {
        c->turn_over |= !e->high;
        if (!e->opened && (e->high || c->plan.skip_idle))
            pass_over(c, e);
        return true;
    }
    if (!e->high && !c->plan.skip_idle)
        return false;
    if (!has_rival(c, i) && !(e->high && c->lower_active))
        return false;
    if (resting(e))
        return true;
    if (!e->opened && c->now >= e->open_by_ns) {
        pass_over(c, e);
        return true;
    }
    return false;
}

static int pick(struct core *c)
{
    int i = rotation_pick(c, 0, ready_set(c, 0, -1, c->lower_active));
    if (i >= 0)
        return i;
    if (c->plan.skip_idle)
        return rotation_pick(c, 1, ready_set(c, 1, -1, false));
    if (c->turn_over || rotation_credit(c) <= 0)
        rotation_next(c);
    i = rotation_owner(c);
    return i >= 0 && core_wants(c, (uint32_t)i) ? i : -1;
}

/* When a waiting member of the high class has room again; CORE_NEVER = none waits. */
static uint64_t high_returns(const struct core *c)
{
    uint64_t when = CORE_NEVER;
    for (uint32_t k = 0; k < c->order_count[0]; k++) {
        uint32_t i = c->order[0][k];
        if ((int32_t)i != c->holder && core_wants(c, i))
            when = earlier(when, cap_when(&c->cap, c->now, cap_limit(c) - room_needed(c, &c->entity[i]),
                                          c->tuning.window_ns));
    }
    return when;
}

static uint64_t turn_ends(const struct core *c, uint32_t i)
{
    const struct core_entity *e = &c->entity[i];
    uint64_t end = CORE_NEVER;
    if (c->plan.native)
        return end;
    if (c->contended)
        end = core_at_front(c, i) ? c->now + (uint64_t)(e->credit > 0 ? e->credit : 0) : e->provisional_ns;
    if (e->high && c->lower_active)
        end = earlier(end, cap_until(&c->cap, c->now, cap_limit(c), c->tuning.window_ns));
    if (!e->high)
        end = earlier(end, high_returns(c));
    return end;
}

static void publish(struct core *c, uint32_t i, struct out *o)
{
    struct core_entity *e = &c->entity[i];
    uint64_t end = turn_ends(c, i), deadline = end == CORE_NEVER ? 0 : end;
    bool first = e->deadline == NO_DEADLINE;
    if (!first && deadline + 1000 >= e->deadline && deadline <= e->deadline + 1000 && !deadline == !e->deadline)
        return;
    act(o, (struct core_action){
        .type = first ? CORE_GRANT : CORE_DEADLINE, .entity = i, .epoch = e->epoch, .deadline = deadline,
        .ring = !first && deadline && (!e->deadline || deadline < e->deadline)});
    e->deadline = deadline;
}

static void decide_native(struct core *c, struct out *o)
{
    for (uint32_t k = 0; k < c->plan.count; k++) {
        uint32_t i = c->plan.turn[k].entity;
        struct core_entity *e = i < CORE_ENTITIES ? &c->entity[i] : NULL;
        if (!e || !e->alive)
            continue;
        core_set_overdue(c, i, false);
        if (e->phase == CORE_OPEN && (!e->quantum || e->released || e->stale))
            shut(c, i, o);
        else if (e->quantum && (e->phase == CORE_SHUT || e->phase == CORE_TAIL))
            grant(c, i);
        if (e->phase == CORE_OPEN)
            publish(c, i, o);
    }
}

/* Open gates that have no part in the plan any more: left over from native sharing, or no longer named. */
static void shut_strays(struct core *c, struct out *o)
{
    for (uint32_t k = 0; k < c->line_count; k++) {
        struct core_entity *e = &c->entity[c->line[k]];
        bool stray = c->plan.native ? !e->quantum : (int32_t)c->line[k] != c->holder;
        if (e->phase != CORE_OPEN || !stray)
            continue;
        shut(c, c->line[k], o);
        e->free = true;
    }
}

static void decide(struct core *c, struct out *o)
{
    expire(c);
    shut_strays(c, o);
    if (c->plan.native) {
        c->contended = c->lower_active = false;
        decide_native(c, o);
        return;
    }
    c->lower_active = is_lower_active(c);
    if (c->holder >= 0) {
        c->contended = is_contended(c, (uint32_t)c->holder);
        if (must_close(c, (uint32_t)c->holder))
            shut(c, (uint32_t)c->holder, o);
    }
    if (c->holder < 0 && !c->closing) {
        c->holder = pick(c);
        if (c->holder >= 0) {
            grant(c, (uint32_t)c->holder);
            c->contended = is_contended(c, (uint32_t)c->holder);
        }
    }
    if (c->holder >= 0)
        publish(c, (uint32_t)c->holder, o);
}

static uint64_t next_deadline(const struct core *c)
{
    uint64_t next = CORE_NEVER;
    bool waiting = false;
    for (uint32_t k = 0; k < c->line_count; k++) {
        const struct core_entity *e = &c->entity[c->line[k]];
        if (e->phase == CORE_CLOSING || e->phase == CORE_TAIL)
            next = earlier(next, e->overdue_ns);
    }
    if (c->plan.native)
        return next;
    for (int class = 0; class < 2; class++)
        for (uint32_t k = 0; k < c->order_count[class]; k++) {
            uint32_t i = c->order[class][k];
            const struct core_entity *e = &c->entity[i];
            waiting |= (int32_t)i != c->holder && core_wants(c, i);
            if (e->demand && e->backoff_ns > c->now)
                next = earlier(next, e->backoff_ns);
        }
    if (c->holder >= 0) {
        const struct core_entity *e = &c->entity[c->holder];
        if (!c->contended || core_at_front(c, (uint32_t)c->holder)) /* else its turn begins when the one before has drained */
            next = earlier(next, turn_ends(c, (uint32_t)c->holder));
        else if (!e->high)
            next = earlier(next, high_returns(c));
        if (!e->opened && waiting)
            next = earlier(next, e->open_by_ns > c->now ? e->open_by_ns : CORE_NEVER);
    } else if (waiting && !c->closing) {
        if (c->lower_active)
            next = earlier(next, high_returns(c));
        if (!c->plan.skip_idle && !c->line_count && rotation_credit(c) > 0)
            next = earlier(next, c->now + (uint64_t)rotation_credit(c));
    }
    return next;
}

uint64_t core_step(struct core *c, uint64_t now, const struct core_event *events, uint32_t count,
                   struct core_action *actions, uint32_t *action_count)
{
    struct out o = {actions, 0};
    core_settle(c, now);
    for (uint32_t k = 0; k < count; k++)
        core_apply(c, &events[k]);
    decide(c, &o);
    *action_count = o.count;
    uint64_t next = next_deadline(c);
    return next > c->now + 1000 ? next : c->now + 1000; /* a rounding must not make the caller spin */
}

uint64_t core_watched(const struct core *c)
{
    uint64_t set = 0;
    for (uint32_t k = 0; k < c->line_count; k++)
        set |= 1ull << c->line[k];
    return set | c->overdue;
}

uint64_t core_longest_wait(const struct core *c, uint64_t now)
{
    uint64_t longest = 0;
    for (uint32_t i = 0; i < CORE_ENTITIES; i++) {
        const struct core_entity *e = &c->entity[i];
        bool due = core_wants(c, i) && e->phase != CORE_OPEN && e->credit >= 0 && !e->high;
        uint64_t since = e->wait_ns > e->granted_ns ? e->wait_ns : e->granted_ns;
        if (due && now > since && now - since > longest)
            longest = now - since;
    }
    return longest;
}
