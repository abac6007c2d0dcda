/* day.c: a GPU, its clients and the daemon in virtual time around the real scheduling step, fast enough for a day of 25
 * containers: a turn costs a few events however many kernels it holds. tests/gate/gate_virtual.py is the same world kernel
 * by kernel; here what a client launches in one go is worked out by arithmetic.
 *
 * Reads a scenario on stdin, one line an act, in order of time (all ns):
 *   T join I KERNEL CHUNK PERIOD    a container with kernels of KERNEL; synchronises after CHUNK of device time (0 = never);
 *                                   begins a chunk every PERIOD (0 = at once)
 *   T leave I | T kill I            it ends in peace or by SIGKILL; its region stays until `gone`
 *   T gone I
 *   T stop I NS                     SIGSTOP, and SIGCONT after NS
 *   T plan SKIP DRAIN PERCENT UNOWNED N (I QUANTUM HIGH)*N
 *   T mark                          prints "T device idle overlaps turns steps" and, for each container, " I used gap late":
 *                                   device time so far, its longest gap since the last mark, chunks begun late
 *   T end
 * A wake-up costs 10 to 60 us. Grants that overlap, but for early acknowledgements and policies that do not drain, are counted. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include "core.h"

#define US 1000ull
#define SPAN (625 * US)
#define WINDOW 2
#define GRACE (150 * US)
#define NEVER UINT64_MAX

enum { WANT, TRY, RELEASE, DONE, IDLE, CLOSED, ACK, DRAINED, DAEMON };
struct event { uint64_t at, serial; uint32_t kind, client; uint64_t token; };
static struct event *heap;
static size_t heap_count, heap_size;
static uint64_t serial, now, free_at, overlap, overlaps, steps, timer = NEVER, dirty, scheduled = NEVER, tails_until;
static bool nodrain;

static struct client {
    bool present, dead, open, demand, granted;
    uint64_t kernel, chunk, period;
    uint64_t word, deadline, refused;             /* the control page, and a word it gave back */
    uint64_t opened, acked, drained, idled, inflight;
    uint64_t base, limit, left;                   /* what runs now: from when, how many kernels at most; kernels left of the chunk */
    uint64_t token, run;                          /* void: events of a former life, or of a former plan for this run */
    uint64_t begun, last_end, stopped_until;
    uint64_t used, gap, late;
    bool running, fresh;
} client[CORE_ENTITIES];
static struct core core;

static uint64_t between(uint64_t low, uint64_t high)
{
    static uint64_t x = 88172645463325252u;
    x ^= x << 13, x ^= x >> 7, x ^= x << 17;
    return low + x % (high - low);
}

/* ---- events ---- */

static bool before(const struct event *a, const struct event *b)
{
    return a->at != b->at ? a->at < b->at : a->serial < b->serial;
}

static void at(uint64_t when, uint32_t kind, uint32_t i, uint64_t token)
{
    if (heap_count == heap_size && !(heap = realloc(heap, (heap_size = heap_size * 2 + 64) * sizeof *heap)))
        abort();
    struct event e = {when > now ? when : now, serial++, kind, i, token};
    size_t k = heap_count++;
    for (; k && before(&e, &heap[(k - 1) / 2]); k = (k - 1) / 2)
        heap[k] = heap[(k - 1) / 2];
    heap[k] = e;
}

static struct event pop(void)
{
    struct event top = heap[0], e = heap[--heap_count];
    size_t k = 0;
    for (size_t child; (child = 2 * k + 1) < heap_count; k = child) {
        child += child + 1 < heap_count && before(&heap[child + 1], &heap[child]);
        if (before(&e, &heap[child]))
            break;
        heap[k] = heap[child];
    }
    heap[k] = e;
    return top;
}

static void soon(uint32_t kind, uint32_t i, uint64_t token)
{
    at(now + between(10 * US, 60 * US), kind, i, token);
}

static void bell(uint32_t i)
{
    dirty |= 1ull << i;
    at(now + between(5 * US, 40 * US), DAEMON, i, NEVER);
}

/* ---- what a client runs ---- */

static uint64_t ahead(const struct client *c)
{
    return WINDOW * (c->kernel > SPAN ? c->kernel : SPAN);
}

/* Accounts for what it has launched by now; it stays open, and the rest is planned anew. */
static void settle(struct client *c)
{
    if (!c->running)
        return;
    uint64_t n = now + ahead(c) >= c->base ? (now + ahead(c) - c->base) / c->kernel : 0;
    n = n < 1 ? 1 : n; /* the first went out at once */
    n = n < c->limit ? n : c->limit;
    if (n && c->base > c->last_end && c->base - c->last_end > c->gap)
        c->gap = c->base - c->last_end;
    c->used += n * c->kernel;
    c->base += n * c->kernel;
    c->left -= c->chunk ? n : 0;
    if (n)
        c->last_end = c->base;
    free_at = c->last_end > free_at ? c->last_end : free_at;
    c->running = false;
    c->run++;
}

static void let_go(uint32_t i, bool idle)
{
    struct client *c = &client[i];
    uint64_t word = c->opened;
    settle(c);
    c->open = false;
    c->inflight = c->last_end > now ? c->last_end - now : 0;
    if (idle) {
        c->idled = c->acked = c->drained = word;
        bell(i);
        return;
    }
    c->refused = word;
    if (nodrain || c->last_end <= now + overlap) {
        c->acked = word;
        bell(i);
    } else {
        at(c->last_end - overlap, ACK, i, word);
    }
    at(c->last_end > now ? c->last_end + between(5 * US, 20 * US) : now, DRAINED, i, word);
}

static void go_on(uint32_t i);

/* It is open and has work: how far it will get before it must let go, or has no more. */
static void run(uint32_t i)
{
    struct client *c = &client[i];
    uint64_t bound = NEVER;
    c->base = now > free_at ? now : free_at;
    if (c->deadline) { /* a turn has one kernel at least; the next is launched if half of it fits */
        uint64_t half = (c->kernel > SPAN ? c->kernel : SPAN) / 2, last = c->deadline > half ? c->deadline - half : 0;
        bound = c->base <= last ? (last - c->base) / c->kernel + 1 : c->fresh;
    }
    c->limit = c->chunk && c->left < bound ? c->left : bound;
    c->fresh = false;
    if (!c->limit) {
        let_go(i, false);
        go_on(i);
        return;
    }
    c->running = true;
    c->run++;
    if (c->limit == NEVER)
        return;
    uint64_t end = c->base + c->limit * c->kernel;
    if (c->chunk && c->limit == c->left)
        at(end + between(5 * US, 40 * US), DONE, i, c->run);
    else
        at(end > ahead(c) ? end - ahead(c) : 0, RELEASE, i, c->run);
}

static void ask(uint32_t i)
{
    struct client *c = &client[i];
    if (!c->open && c->granted && c->word != c->refused && (c->opened != c->word || c->idled == c->word)) {
        c->acked = c->drained = c->idled = 0;
        c->opened = c->word;
        c->open = c->fresh = true;
        for (uint32_t k = 0; k < CORE_ENTITIES; k++)
            overlaps += k != i && client[k].present && client[k].open && client[k].stopped_until <= now && client[k].granted;
        overlaps += now > tails_until && free_at > now + overlap + 20 * US && !core.overdue;
    }
    if (c->open) {
        c->demand = false;
        run(i);
    } else if (!c->demand) {
        c->demand = true;
        bell(i);
    }
}

/* After an interruption: the rest of the chunk, or waiting for its end if all of it is on the device already. */
static void go_on(uint32_t i)
{
    struct client *c = &client[i];
    if (c->chunk && !c->left)
        at((c->last_end > now ? c->last_end : now) + between(5 * US, 40 * US), DONE, i, c->run);
    else
        ask(i);
}

/* The chunk is done and synchronised. */
static void done(uint32_t i)
{
    struct client *c = &client[i];
    settle(c);
    uint64_t next = now + 5 * US, idle_at = c->last_end + GRACE;
    if (c->period) {
        c->begun += c->period;
        next = c->begun;
        if (next <= now) { /* late: that period is lost */
            c->late++;
            c->begun = next = now;
        }
    }
    c->left = (c->chunk + c->kernel - 1) / c->kernel;
    c->run++;
    at(next, WANT, i, c->run);
    if (c->open && idle_at < next)
        at(idle_at, IDLE, i, c->run);
}

static void client_event(const struct event *e)
{
    uint32_t i = e->client;
    struct client *c = &client[i];
    if (!c->present || c->dead)
        return;
    if (now < c->stopped_until) {
        at(c->stopped_until, e->kind, i, e->token);
        return;
    }
    switch (e->kind) {
    case WANT:
        if (e->token == c->run)
            ask(i);
        break;
    case TRY:
        if (c->demand && c->word == e->token)
            ask(i);
        break;
    case RELEASE:
        if (e->token == c->run && c->open) {
            let_go(i, false);
            go_on(i);
        }
        break;
    case DONE:
        if (e->token == c->run)
            done(i);
        break;
    case IDLE:
        if (e->token == c->run && c->open)
            let_go(i, true);
        break;
    case CLOSED:
        if (c->open && c->opened == e->token && !c->granted) {
            bool more = c->running;
            let_go(i, false);
            if (more)
                go_on(i);
        }
        break;
    case ACK:
    case DRAINED:
        if (c->opened == e->token) {
            c->acked = e->token;
            if (e->kind == DRAINED)
                c->drained = e->token;
            bell(i);
        }
        break;
    }
}

/* ---- the daemon, as run_gpu() in csrc/gate/server.c ---- */

static struct core_report report(uint32_t i)
{
    const struct client *c = &client[i];
    uint64_t epoch = core.entity[i].epoch;
    if (!c->present || c->dead)
        return (struct core_report){.epoch = epoch};
    bool mine = c->opened == epoch, holds = mine && c->acked != epoch;
    return (struct core_report){
        .epoch = epoch, .inflight_ns = c->inflight, .kernel_ns = c->kernel, .demand = c->demand, .opened = mine, .holds = holds,
        .undrained = mine && c->drained != epoch, .idle = mine && !holds && c->idled == epoch,
        .stale = mine && !holds && c->idled != epoch && c->demand};
}

static bool carry_out(const struct core_action *a)
{
    struct client *c = &client[a->entity];
    switch (a->type) {
    case CORE_GRANT:
        c->word = a->epoch;
        c->granted = true;
        c->deadline = a->deadline;
        if (c->demand)
            soon(TRY, a->entity, a->epoch);
        return false;
    case CORE_CLOSE:
        c->granted = false;
        dirty |= 1ull << a->entity;
        if (c->open)
            soon(CLOSED, a->entity, c->opened);
        return true;
    default:
        c->deadline = a->deadline;
        if (c->running && now >= c->stopped_until) {
            settle(c);
            go_on(a->entity);
        }
        return false;
    }
}

static void daemon_step(const struct core_event *first)
{
    struct core_event events[CORE_ENTITIES + 1];
    struct core_action actions[CORE_ACTIONS];
    bool again = true;
    for (int round = 0; round < 8 && again; round++) {
        uint32_t n = 0, count;
        if (first && !round)
            events[n++] = *first;
        uint64_t look = core_watched(&core) | dirty;
        for (dirty = 0; look; look &= look - 1) {
            uint32_t i = (uint32_t)__builtin_ctzll(look);
            events[n++] = (struct core_event){.type = CORE_REPORT, .entity = i, .report = report(i)};
        }
        timer = core_step(&core, now, events, n, actions, &count);
        steps++;
        again = false;
        for (uint32_t k = 0; k < count; k++)
            again |= carry_out(&actions[k]);
    }
    if (timer != NEVER && (timer != scheduled || scheduled < now)) {
        scheduled = timer;
        at(timer, DAEMON, 0, timer);
    }
}

static void advance(uint64_t until)
{
    while (heap_count && heap[0].at <= until) {
        struct event e = pop();
        now = e.at;
        if (e.kind != DAEMON)
            client_event(&e);
        else if (e.token == NEVER ? dirty != 0 : e.token == timer)
            daemon_step(NULL);
    }
    now = until;
}

/* ---- the scenario ---- */

static uint64_t number(void)
{
    uint64_t value;
    if (scanf("%" SCNu64, &value) != 1)
        exit(2);
    return value;
}

static uint32_t entity(void)
{
    uint64_t i = number();
    if (i >= CORE_ENTITIES)
        exit(2);
    return (uint32_t)i;
}

static void read_plan(struct core_plan *plan)
{
    memset(plan, 0, sizeof *plan);
    plan->skip_idle = (uint32_t)number();
    plan->drain = (uint32_t)number();
    plan->high_percent = (uint32_t)number();
    plan->unowned_ns = number();
    uint64_t count = number();
    for (plan->count = 0; plan->count < count; plan->count++) {
        struct core_turn *turn = &plan->turn[plan->count];
        turn->entity = entity();
        turn->quantum_ns = number();
        turn->high = (uint32_t)number();
    }
    if (nodrain && plan->drain)
        tails_until = free_at; /* from before */
    nodrain = !plan->drain;
    if (nodrain)
        tails_until = NEVER;
}

static void join(uint32_t i)
{
    struct client *c = &client[i];
    uint64_t life = c->run + 1000;
    memset(c, 0, sizeof *c);
    *c = (struct client){.present = true, .kernel = number(), .run = life, .begun = now, .last_end = now};
    c->chunk = number();
    c->period = number();
    c->left = c->chunk ? (c->chunk + c->kernel - 1) / c->kernel : 0;
    daemon_step(&(struct core_event){.type = CORE_JOIN, .entity = i});
    at(now, WANT, i, c->run);
}

static void ends(uint32_t i)
{
    struct client *c = &client[i];
    settle(c);
    if (c->last_end > now && c->last_end == free_at) { /* what it had queued dies with it */
        c->used -= c->last_end - now;
        free_at = c->last_end = now;
    }
    c->dead = true;
    c->open = c->demand = false;
    dirty |= 1ull << i;
    daemon_step(NULL);
}

static void stop(uint32_t i)
{
    struct client *c = &client[i];
    uint64_t until = now + number();
    bool more = c->running;
    settle(c);
    c->stopped_until = until;
    if (more && c->chunk && !c->left)
        at(c->last_end + between(5 * US, 40 * US), DONE, i, c->run);
    else if (more)
        at(until, WANT, i, c->run);
}

static void mark(void)
{
    printf("%" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64 " %" PRIu64, now, core.total_ns - core.idle_ns, overlaps, core.turns, steps);
    for (uint32_t i = 0; i < CORE_ENTITIES; i++) {
        struct client *c = &client[i];
        if (!c->present)
            continue;
        if (c->running && now >= c->stopped_until) {
            settle(c);
            go_on(i);
        }
        uint64_t waits = now > c->last_end ? now - c->last_end : 0;
        printf(" %u %" PRIu64 " %" PRIu64 " %" PRIu64, i, c->used, c->gap > waits ? c->gap : waits, c->late);
        c->gap = 0;
    }
    putchar('\n');
}

int main(void)
{
    struct core_tuning tuning;
    struct core_plan plan;
    char act[8];
    core_tuning_default(&tuning);
    overlap = tuning.overlap_ns;
    core_init(&core, &tuning, 0);
    for (;;) {
        advance(number());
        if (scanf("%7s", act) != 1)
            return 2;
        if (!strcmp(act, "end"))
            return 0;
        else if (!strcmp(act, "join"))
            join(entity());
        else if (!strcmp(act, "leave") || !strcmp(act, "kill"))
            ends(entity());
        else if (!strcmp(act, "stop"))
            stop(entity());
        else if (!strcmp(act, "mark"))
            mark();
        else if (!strcmp(act, "plan")) {
            read_plan(&plan);
            daemon_step(&(struct core_event){.type = CORE_PLAN, .plan = &plan});
        } else if (!strcmp(act, "gone")) {
            uint32_t i = entity();
            client[i].present = false;
            daemon_step(&(struct core_event){.type = CORE_LEAVE, .entity = i});
        } else {
            return 2;
        }
    }
}
