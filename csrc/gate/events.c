/* events.c: what the scheduling step takes in: time, reports, plans, comings and goings. */
#include "core_parts.h"
#include <string.h>

#define AWAY_NS 1000000000ull

/* ---- time ---- */

void core_line_remove(struct core *c, uint32_t i)
{
    for (uint32_t k = 0; k < c->line_count; k++)
        if (c->line[k] == i) {
            memmove(c->line + k, c->line + k + 1, c->line_count - k - 1);
            c->line_count--;
            return;
        }
}

bool core_at_front(const struct core *c, uint32_t i)
{
    return c->line_count && c->line[0] == i;
}

/* Native: the device's own scheduler shares it; split evenly among those that hold it, for the record only. */
static void settle_native(struct core *c, uint64_t elapsed)
{
    uint64_t holders = 0;
    for (uint32_t i = 0; i < CORE_ENTITIES; i++)
        holders += c->entity[i].phase == CORE_OPEN && c->entity[i].holds;
    c->idle_ns += holders ? elapsed % holders : elapsed;
    for (uint32_t i = 0; i < CORE_ENTITIES && holders; i++)
        if (c->entity[i].phase == CORE_OPEN && c->entity[i].holds)
            c->entity[i].busy_ns += elapsed / holders;
}

void core_settle(struct core *c, uint64_t now)
{
    uint64_t elapsed = now > c->now ? now - c->now : 0;
    if (!elapsed)
        return;
    c->total_ns += elapsed;
    if (c->plan.native) {
        settle_native(c, elapsed);
    } else if (!c->line_count) {
        c->idle_ns += elapsed;
        if (!c->plan.skip_idle)
            rotation_pass(c, elapsed);
    } else {
        struct core_entity *e = &c->entity[c->line[0]];
        bool unopened = e->phase == CORE_OPEN && !e->opened && !c->contended;
        if (unopened)
            e->unopened_ns += elapsed;
        if (resting(e) || unopened)
            c->idle_ns += elapsed;
        else
            e->busy_ns += elapsed;
        if (!e->free) {
            /* Alone, a turn is used up but makes no debt: nobody was kept waiting. */
            int64_t credit = e->credit - (int64_t)elapsed;
            e->credit = e->phase == CORE_OPEN && !c->contended && credit < 0 ? (e->credit < 0 ? e->credit : 0) : credit;
        }
        if (e->high && c->lower_active)
            cap_add(&c->cap, c->now, now, c->history_ns);
    }
    c->now = now;
}

/* ---- what clients report ---- */

void core_set_overdue(struct core *c, uint32_t i, bool on)
{
    c->overdue = on ? c->overdue | 1ull << i : c->overdue & ~(1ull << i);
}

static uint64_t patience(const struct core *c, const struct core_entity *e)
{
    return c->tuning.overdue_ns + (e->strikes ? 0 : earlier(e->inflight_ns, c->tuning.overdue_cap_ns));
}

/* Its work ended at `end`, as it says, and we hear of it now, a wake-up or two later. Those belong to who came next, or to
 * nobody: how late an agent is differs from program to program, and would show in the shares. Believed as far as the overlap. */
static void charge_until(struct core *c, uint32_t i, uint64_t end)
{
    struct core_entity *e = &c->entity[i], *next = c->line_count > 1 ? &c->entity[c->line[1]] : NULL;
    uint64_t back = end && end < c->now ? earlier(c->now - end, c->tuning.overlap_ns) : 0;
    back = earlier(earlier(back, c->now - e->granted_ns), e->busy_ns);
    if (!back || e->free || c->plan.native || !core_at_front(c, i))
        return;
    e->credit += (int64_t)back;
    e->busy_ns -= back;
    if (next && !next->free)
        next->credit -= (int64_t)back;
    if (next)
        next->busy_ns += back;
    else
        c->idle_ns += back;
}

static void drained(struct core *c, uint32_t i, uint64_t end)
{
    struct core_entity *e = &c->entity[i];
    charge_until(c, i, end);
    core_line_remove(c, i);
    e->phase = CORE_SHUT;
    e->free = false;
    if (e->strikes)
        e->strikes--;
    /* A synchronising program has its next launch only after the drain: until then it has no waiter, and to take that
     * for idleness would hand its turn to somebody in debt. */
    if (e->presume_ns)
        e->presume_ns = c->now + c->tuning.presume_ns;
}

/* How long its work goes on after it acknowledged, as predicted. */
static uint64_t tail_length(const struct core *c, const struct core_entity *e)
{
    if (c->plan.drain)
        return c->tuning.overlap_ns;
    return e->strikes ? 0 : earlier(e->inflight_ns, c->tuning.overdue_cap_ns);
}

uint64_t core_tail_left(const struct core *c, const struct core_entity *e)
{
    uint64_t length = tail_length(c, e), passed = c->now - e->acked_ns;
    return e->phase == CORE_TAIL && length > passed ? length - passed : 0;
}

uint64_t core_start(const struct core *c, uint32_t i)
{
    uint64_t start = 0;
    for (uint32_t k = 0; k < c->line_count && c->line[k] != i && c->plan.drain; k++) {
        const struct core_entity *e = &c->entity[c->line[k]];
        if (e->phase == CORE_TAIL && e->end_ns > start)
            start = e->end_ns;
    }
    return start;
}

static void let_go(struct core *c, uint32_t i, uint64_t end)
{
    struct core_entity *e = &c->entity[i];
    bool cut = e->opened && !e->idle;
    e->phase = CORE_TAIL;
    e->unopened_ns = 0;
    c->closing--;
    e->acked_ns = c->now;
    e->end_ns = earlier(end, c->now + c->tuning.overlap_ns);
    e->overdue_ns = c->now + patience(c, e);
    e->presume_ns = cut ? c->now + tail_length(c, e) + c->tuning.presume_ns : 0;
}

/* What it used while no daemon was there is paid back like what a turn overran, but nobody is kept waiting for longer than
 * AWAY_NS for that. Processes of one instance had it at the same time: the most that one of them says counts. Not before others
 * are back, too: it would be paid with time that nobody uses. */
static void charge_away(struct core *c, uint32_t i, uint64_t away)
{
    struct core_entity *e = &c->entity[i];
    uint64_t others = c->plan.unowned_ns, more = away > e->away_ns ? away - e->away_ns : 0;
    bool wanted = c->asking & ~(1ull << i) || (c->holder >= 0 && c->holder != (int32_t)i);
    if (!more || c->plan.native || !e->quantum || e->high)
        return;
    if (!e->away_at)
        e->away_at = c->now;
    if (!wanted && c->now - e->away_at < AWAY_NS)
        return;
    for (uint32_t k = 0; k < c->order_count[1]; k++)
        others += c->entity[c->order[1][k]].quantum;
    others -= e->quantum;
    e->away_ns = away;
    e->away_at = 0;
    if (!others || !wanted)
        return;
    uint64_t most = AWAY_NS * e->quantum / others;
    int64_t least = e->credit < -(int64_t)most ? e->credit : -(int64_t)most, credit = e->credit - (int64_t)earlier(more, most);
    e->credit = credit > least ? credit : least;
}

/* Is it late with its next launch, because its CPU is somebody else's? To hand the device to the high class for such a moment
 * would cost it what it is promised of the window. Believed for no longer than it had work before, over all its turns since it
 * had none, and not where it is a burst that ended: its last pause tells, unless it was busy for long since. */
static void ran_out(struct core *c, struct core_entity *e)
{
    uint64_t ran = e->busy_ns > e->paused_busy_ns ? e->busy_ns - e->paused_busy_ns : 0; /* some may have been given back */
    e->paused_at = c->now;
    e->paused_busy_ns = e->busy_ns;
    if (ran >= 10 * c->tuning.linger_ns)
        e->pauses = false;
    if (!e->high && !e->pauses && c->member[0] && ran >= c->tuning.linger_ns / 5)
        c->lower_until = c->now + earlier(ran, c->tuning.linger_ns);
}

/* It asks, or opened a grant: by then it had none, also where it was closed before that was seen. */
static void has_work_again(const struct core *c, struct core_entity *e)
{
    if (e->paused_at)
        e->pauses = c->now - e->paused_at >= c->tuning.linger_ns;
    else if (e->phase == CORE_SHUT && c->now >= e->presume_ns)
        e->paused_busy_ns = e->busy_ns;
    e->paused_at = 0;
}

/* It took the grant that it still has again: nobody rings for that, and the look that finds it may be the one after the time. */
static void was_late(const struct core *c, struct core_entity *e)
{
    if (e->paused_at && c->now - e->paused_at < 2 * c->tuning.linger_ns)
        e->pauses = false;
    e->paused_at = 0;
}

static void report(struct core *c, uint32_t i, const struct core_report *r)
{
    struct core_entity *e = &c->entity[i];
    charge_away(c, i, r->away_ns);
    if (r->demand && !e->demand) {
        e->wait_ns = c->now;
        has_work_again(c, e);
    }
    e->demand = !!r->demand;
    e->kernel_ns = earlier(r->kernel_ns, c->tuning.overdue_cap_ns);
    if (r->epoch != e->epoch)
        return;
    if (c->overdue >> i & 1) {
        if (!r->holds && !r->undrained)
            core_set_overdue(c, i, false);
        return;
    }
    if (e->phase == CORE_SHUT)
        return;
    if (r->opened)
        e->noshows = 0;
    if (e->phase != CORE_TAIL) {
        bool died = e->opened && !r->opened; /* whoever had opened it; that is no reason to expect more */
        bool had_none = e->idle;
        if (r->opened && !e->opened) { /* nobody rings for that: it was in use */
            has_work_again(c, e);
            e->busy_ns += e->unopened_ns;
            c->idle_ns -= e->unopened_ns;
            e->unopened_ns = 0;
        }
        e->opened |= r->opened;
        e->holds = !!r->holds;
        e->idle = died || (r->opened && !r->holds && r->idle);
        e->released = r->opened && !r->holds && !r->idle;
        e->stale = !!r->stale;
        if (e->idle && !had_none && !died)
            ran_out(c, e);
        else if (had_none && !e->idle && !died)
            was_late(c, e);
        else if (e->paused_at && c->now - e->paused_at >= c->tuning.linger_ns)
            e->pauses = true;
        if (!e->opened && !e->demand) /* the waiter it was granted for is gone */
            e->open_by_ns = earlier(e->open_by_ns, c->now + c->tuning.presume_ns);
        if (e->phase == CORE_CLOSING && r->inflight_ns > e->inflight_ns) {
            e->overdue_ns -= patience(c, e);
            e->inflight_ns = r->inflight_ns;
            e->overdue_ns += patience(c, e);
        }
        if (e->phase == CORE_CLOSING && !r->holds)
            let_go(c, i, r->end_ns);
    }
    if (e->phase == CORE_TAIL && !r->undrained)
        drained(c, i, r->end_ns);
}

/* ---- plans ---- */

static bool same_regime(const struct core *c, const struct core_plan *p)
{
    if (p->skip_idle != c->plan.skip_idle || p->drain != c->plan.drain || p->native != c->plan.native ||
        p->high_percent != c->plan.high_percent || p->unowned_ns != c->plan.unowned_ns)
        return false;
    for (uint32_t a = 0; a < p->count; a++)
        for (uint32_t b = 0; b < c->plan.count; b++) {
            const struct core_turn *x = &p->turn[a], *y = &c->plan.turn[b];
            if (x->entity == y->entity && (x->high != y->high || x->quantum_ns != y->quantum_ns))
                return false;
        }
    return true;
}

static void forget(struct core *c, uint32_t i)
{
    struct core_entity *e = &c->entity[i];
    int64_t q = (int64_t)e->quantum;
    bool running = e->phase == CORE_OPEN;
    e->credit = running && e->credit > 0 ? (e->credit < q ? e->credit : q) : 0;
    e->free = e->phase == CORE_CLOSING || e->phase == CORE_TAIL;
    e->backoff_ns = 0;
}

static void set_plan(struct core *c, const struct core_plan *p)
{
    bool same = same_regime(c, p), was_native = c->plan.native;
    if (p->count > CORE_ENTITIES)
        return;
    c->plan = *p;
    for (uint32_t i = 0; i < CORE_ENTITIES; i++)
        c->entity[i].quantum = c->entity[i].high = 0;
    for (uint32_t k = 0; k < p->count; k++) {
        const struct core_turn *t = &p->turn[k];
        if (t->entity >= CORE_ENTITIES || !c->entity[t->entity].alive)
            continue;
        c->entity[t->entity].quantum = earlier(t->quantum_ns, 100 * c->tuning.window_ns);
        c->entity[t->entity].high = !!t->high;
    }
    rotation_rebuild(c);
    if (same)
        return;
    c->resume[0] = c->resume[1] = false;
    c->cap.count = 0;
    c->lower_until = 0;
    c->void_credit = 0;
    c->in_void = false;
    c->turn_over = true;
    for (uint32_t i = 0; i < CORE_ENTITIES; i++)
        forget(c, i);
    if (c->holder >= 0)
        for (uint32_t k = 0; k < c->order_count[1]; k++)
            if (c->order[1][k] == c->holder) { /* its turn goes on in the new rotation */
                c->position[1] = k;
                c->turn_over = false;
            }
    if (p->native || was_native)
        c->holder = -1;
}

static void leave(struct core *c, uint32_t i)
{
    struct core_entity *e = &c->entity[i];
    core_line_remove(c, i);
    if (e->phase == CORE_CLOSING)
        c->closing--;
    if (c->holder == (int32_t)i)
        c->holder = -1;
    core_set_overdue(c, i, false);
    memset(e, 0, sizeof *e);
    uint32_t n = 0;
    for (uint32_t k = 0; k < c->plan.count; k++)
        if (c->plan.turn[k].entity != i)
            c->plan.turn[n++] = c->plan.turn[k];
    c->plan.count = n;
    rotation_rebuild(c);
}

void core_apply(struct core *c, const struct core_event *event)
{
    uint32_t i = event->entity;
    switch (event->type) {
    case CORE_JOIN:
        if (i < CORE_ENTITIES && !c->entity[i].alive) {
            memset(&c->entity[i], 0, sizeof c->entity[i]);
            c->entity[i].alive = true;
        }
        break;
    case CORE_LEAVE:
        if (i < CORE_ENTITIES && c->entity[i].alive)
            leave(c, i);
        break;
    case CORE_PLAN:
        if (event->plan)
            set_plan(c, event->plan);
        break;
    case CORE_REPORT:
        if (i < CORE_ENTITIES && c->entity[i].alive)
            report(c, i, &event->report);
        break;
    }
}
