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
        .presume_ns = 400000, .overlap_ns = 200000,
        .overdue_ns = 50000000, .overdue_cap_ns = 2000000000,
        .noshow_ns = 10000000, .backoff_cap_ns = 640000000, .backstop_ns = 1000000,
        .window_ns = 100000000, .resume_ns = 5000000, .margin_ns = 500000, .excess_ns = 1000000, .linger_ns = 5000000,
        .starve_ns = 5000000000, .retry_ns = 5000000000,
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
    c->holder = c->reserved = -1;
    c->turn_over = true;
    c->gang_end = CORE_NEVER;
}

/* ---- who wants the device ---- */

static bool timely(const struct core *c, const struct core_entity *e, bool asks)
{
    return c->now >= e->backoff_ns && (asks || c->now < e->presume_ns);
}

bool core_wants(const struct core *c, uint32_t i)
{
    const struct core_entity *e = &c->entity[i];
    return e->alive && e->quantum && !(c->overdue >> i & 1) && timely(c, e, e->demand || c->called >> i & 1);
}

uint64_t core_wanting(const struct core *c, int class)
{
    uint64_t ours = c->member[class] & ~c->overdue, asking = c->asking | c->called;
    uint64_t set = ours & asking & ~c->timed;
    for (uint64_t some = ours & c->timed; some; some &= some - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(some);
        if (timely(c, &c->entity[i], asking >> i & 1))
            set |= 1ull << i;
    }
    return set;
}

/* Forgets about presumptions and pauses that are over. */
static void look_at_clock(struct core *c)
{
    for (uint64_t some = c->timed; some; some &= some - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(some);
        const struct core_entity *e = &c->entity[i];
        if (e->phase == CORE_SHUT && c->now >= e->presume_ns && c->now >= e->backoff_ns)
            c->timed &= ~(1ull << i);
    }
}

static bool is_lower_active(const struct core *c)
{
    if (c->now < c->lower_until || core_wanting(c, 1))
        return true;
    for (uint32_t k = 0; k < c->line_count; k++) {
        const struct core_entity *e = &c->entity[c->line[k]];
        if (!e->high && e->quantum && ((e->phase == CORE_OPEN && !resting(e)) || (e->phase == CORE_CLOSING && !e->idle)))
            return true;
    }
    return false;
}

/* Entities of a class that could be granted now, `but` excepted (-1 = nobody). Who waits for its other GPUs is none. */
static uint64_t ready_set(const struct core *c, int class, int but, bool lower)
{
    uint64_t set = core_wanting(c, class) & ~(c->gang & c->due & ~c->pending);
    if (but >= 0)
        set &= ~(1ull << but);
    if (class == 0 && lower)
        for (uint64_t some = set; some; some &= some - 1) {
            uint32_t i = (uint32_t)__builtin_ctzll(some);
            if (high_begins(c, &c->entity[i]) > c->now)
                set &= ~(1ull << i);
        }
    return set;
}

bool core_high_busy(const struct core *c)
{
    return (c->holder >= 0 && c->entity[c->holder].high) || ready_set(c, 0, -1, c->lower_active);
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
    e->served = c->turns + 1;
    e->high_at = c->high_ns;
    c->returned &= ~(1ull << i);
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

/* Why a turn ends whoever has it: true, or what the rest of must_close() says. */
static bool turn_is_over(struct core *c, uint32_t i)
{
    const struct core_entity *e = &c->entity[i];
    return !e->quantum || e->released || (e->stale && !c->contended) ||
           (e->high && c->lower_active && high_ends(c) <= c->now) ||
           (c->contended && core_at_front(c, i) && e->credit <= 0);
}

/* The same for an instance that has its turn on several GPUs: it ends on all of them when it ends on one, and nothing to run on
 * one of them is no reason. */
static bool must_close_gang(struct core *c, uint32_t i)
{
    struct core_entity *e = &c->entity[i];
    if (!c->go && c->straggle != 2)
        return true;
    if (c->straggle == 2)
        return !e->quantum || e->released || (e->opened && !e->holds) || (!e->opened && c->now >= e->open_by_ns) ||
               c->now >= e->granted_ns + STRAGGLER_ENDS_NS;
    if (turn_is_over(c, i) || c->now >= c->gang_end || (!e->high && ready_set(c, 0, -1, c->lower_active)))
        return true;
    if (!c->gang_rests || !has_rival(c, i))
        return false;
    if (!e->opened)
        pass_over(c, e);
    return true;
}

static bool must_close(struct core *c, uint32_t i)
{
    struct core_entity *e = &c->entity[i];
    if (c->reserved >= 0) {
        if ((int32_t)i == c->reserved)
            return must_close_gang(c, i);
        c->resume[!e->high] = true; /* it finishes its turn when the one that spans has had its own */
        return true;
    }
    if (!e->quantum || e->released || (e->stale && !c->contended)) {
        c->turn_over |= !e->high;
        return true;
    }
    if (!e->high && ready_set(c, 0, -1, c->lower_active) & ~(c->gang & c->due)) { /* those begin by a reservation */
        c->resume[1] = true; /* it finishes its turn when the high class is done */
        return true;
    }
    if (e->high && c->lower_active && high_ends(c) <= c->now) {
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

/* Whose turn it is, for an instance on one GPU. One on several that is reached waits for the others (gang.h), and somebody
 * else has the device until they are ready. */
static int reach(struct core *c, int i)
{
    if (i < 0 || !(c->gang >> i & 1))
        return i;
    c->due |= 1ull << i;
    c->stirred = true;
    return -1;
}

static int pick(struct core *c)
{
    uint64_t ready;
    for (int class = 0; class < 1 + !!c->plan.skip_idle; class++)
        while ((ready = ready_set(c, class, -1, class == 0 && c->lower_active) & ~(c->gang & c->due))) {
            int i = rotation_pick(c, class, ready);
            if (i < 0)
                break;
            if (reach(c, i) >= 0)
                return i;
        }
    if (c->plan.skip_idle)
        return -1;
    if (c->turn_over || rotation_credit(c) <= 0)
        rotation_next(c);
    for (uint32_t k = 0; k < c->order_count[1]; k++) {
        int i = rotation_owner(c);
        if (i < 0 || !core_wants(c, (uint32_t)i))
            return -1;
        if (!(c->due >> i & 1) && reach(c, i) >= 0)
            return i;
        rotation_next(c);
    }
    return -1;
}

static void publish(struct core *c, uint32_t i, struct out *o)
{
    struct core_entity *e = &c->entity[i];
    uint64_t deadline = times_deadline(c, i);
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

/* The device is for one entity, an instance on several GPUs: may it have it now? */
static int reserved_ready(struct core *c)
{
    const struct core_entity *e = &c->entity[c->reserved];
    if (!e->quantum || c->overdue >> c->reserved & 1)
        return -1;
    if (c->straggle == 1)
        c->straggle = 2;
    else if (c->go == 1)
        c->go = 2;
    else
        return -1;
    return c->reserved;
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
    if (c->holder < 0 && !c->closing && !tails_block(c)) {
        c->holder = c->reserved < 0 ? pick(c) : reserved_ready(c);
        if (c->holder >= 0) {
            grant(c, (uint32_t)c->holder);
            c->contended = is_contended(c, (uint32_t)c->holder);
        }
    }
    if (c->holder >= 0)
        publish(c, (uint32_t)c->holder, o);
}

/* One event, and what follows from it for the sets. */
static void take_in(struct core *c, const struct core_event *event)
{
    uint32_t i = event->entity;
    uint64_t bit = i < CORE_ENTITIES ? 1ull << i : 0;
    if (event->type == CORE_PLAN) {
        c->fallback = c->starving = false; /* what comes from outside ends it at once */
        for (uint64_t some = c->asking; some; some &= some - 1) /* who was paused has not waited */
            c->entity[__builtin_ctzll(some)].wait_ns = c->now;
    }
    if (event->type == CORE_LEAVE) {
        c->asking &= ~bit;
        c->timed &= ~bit;
        c->returned &= ~bit;
        if (c->reserved == (int32_t)i)
            c->reserved = -1;
    }
    core_apply(c, event);
    if (event->type != CORE_REPORT || !bit || !c->entity[i].alive)
        return;
    struct core_entity *e = &c->entity[i];
    if (!e->demand) {
        c->asking &= ~bit;
    } else if (!(c->asking & bit)) {
        c->asking |= bit;
        e->high_at = c->high_ns;
        if (e->phase == CORE_SHUT && c->now >= e->presume_ns)
            c->returned |= bit;
    }
}

uint64_t core_step(struct core *c, uint64_t now, const struct core_event *events, uint32_t count,
                   struct core_action *actions, uint32_t *action_count)
{
    struct out o = {actions, 0};
    if (now > c->now && !c->plan.native && c->line_count && c->entity[c->line[0]].high)
        c->high_ns += now - c->now;
    c->history_ns = high_history(c);
    core_settle(c, now);
    for (uint32_t k = 0; k < c->line_count; k++)
        c->timed |= 1ull << c->line[k];
    for (uint32_t k = 0; k < count; k++)
        take_in(c, &events[k]);
    watch(c);
    decide(c, &o);
    look_at_clock(c);
    *action_count = o.count;
    uint64_t next = times_next(c);
    return next > c->now + 1000 ? next : c->now + 1000; /* a rounding must not make the caller spin */
}

uint64_t core_watched(const struct core *c)
{
    uint64_t set = 0;
    for (uint32_t k = 0; k < c->line_count; k++)
        set |= 1ull << c->line[k];
    return set | c->overdue;
}
