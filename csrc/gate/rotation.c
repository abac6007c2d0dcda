/* rotation.c: deficit round robin by time, in its two forms: idle owners skipped, or their turns passing unused. */
#include "core_parts.h"
#include <stddef.h>
#include <string.h>

#define ROUNDS_MAX 1000000 /* no debt is that many rounds; keeps the products far from overflow */

static int64_t least(int64_t a, int64_t b)
{
    return a < b ? a : b;
}

/* A smaller rest is not worth a hand-over: it is carried into the next turn. */
static int64_t threshold(int64_t quantum)
{
    return quantum / 4;
}

/* How many visits until `credit` is worth a turn; at least one. */
static int64_t rounds_needed(int64_t credit, int64_t quantum)
{
    if (credit > threshold(quantum))
        return 1;
    return least((threshold(quantum) - credit) / quantum + 1, ROUNDS_MAX);
}

static void credit_owner(struct core_entity *e, int64_t rounds, bool ready)
{
    int64_t q = (int64_t)e->quantum;
    if (ready)
        e->credit = least(e->credit + rounds * q, 2 * q);
    else if (e->credit < 0) /* it pays its debt off while others run */
        e->credit = least(e->credit + rounds * q, 0);
}

void rotation_rebuild(struct core *c)
{
    for (int class = 0; class < 2; class++) {
        uint32_t at = c->position[class];
        int last = at < c->order_count[class] ? c->order[class][at] : -1;
        uint32_t n = 0;
        c->position[class] = 0;
        c->member[class] = 0;
        bool found = false;
        for (uint32_t k = 0; k < c->plan.count; k++) {
            uint32_t i = c->plan.turn[k].entity;
            const struct core_entity *e = &c->entity[i];
            if (!e->alive || !e->quantum || !!e->high != (class == 0))
                continue;
            if ((int)i == last) {
                c->position[class] = n;
                found = true;
            }
            c->order[class][n++] = (uint8_t)i;
            c->member[class] |= 1ull << i;
        }
        c->order_count[class] = n;
        if (!found) {
            c->resume[class] = false;
            if (class == 1)
                c->turn_over = true;
        }
    }
}

/* Puts `i` next in its class's order, behind the one whose turn it is or was. */
static void go_next(struct core *c, int class, uint32_t i)
{
    uint8_t *order = c->order[class];
    uint32_t n = c->order_count[class], from = 0, at = c->position[class];
    while (from < n && order[from] != i)
        from++;
    if (from == n || from == at)
        return;
    memmove(order + from, order + from + 1, n - from - 1);
    if (from < at)
        at--;
    memmove(order + at + 2, order + at + 1, n - at - 2);
    order[at + 1] = (uint8_t)i;
    c->position[class] = at;
}

/* Owners that had nothing to run and come back: if all others that wait had a turn since, it is theirs. The order is of no
 * meaning where idle owners are skipped, so nobody loses more than the length of one turn, once. */
static void welcome_back(struct core *c, int class, uint64_t ready)
{
    uint64_t back = c->returned & ready, others = ready & ~c->returned;
    uint64_t first = CORE_NEVER;
    if (!back)
        return;
    c->returned &= ~back;
    for (; others; others &= others - 1) {
        uint64_t served = c->entity[__builtin_ctzll(others)].served;
        first = served < first ? served : first;
    }
    for (; back; back &= back - 1) {
        uint32_t i = (uint32_t)__builtin_ctzll(back);
        if (c->entity[i].served < first)
            go_next(c, class, i);
    }
}

static int walk(struct core *c, int class, uint64_t ready, bool any)
{
    uint32_t n = c->order_count[class], at = c->position[class];
    for (uint32_t k = 1; k <= n; k++) {
        uint32_t p = at + k < n ? at + k : at + k - n, i = c->order[class][p];
        struct core_entity *e = &c->entity[i];
        credit_owner(e, 1, ready >> i & 1);
        if (ready >> i & 1 && (any || e->credit > threshold((int64_t)e->quantum))) {
            c->position[class] = p;
            return (int)i;
        }
    }
    return -1;
}

int rotation_pick(struct core *c, int class, uint64_t ready)
{
    uint32_t n = c->order_count[class], at = c->position[class];
    bool resume = c->resume[class];
    int64_t rounds = ROUNDS_MAX + 1;
    if (!ready || !n)
        return -1;
    c->resume[class] = false;
    if (resume && at < n) {
        uint32_t i = c->order[class][at];
        const struct core_entity *e = &c->entity[i];
        if (ready >> i & 1 && e->credit > threshold((int64_t)e->quantum))
            return (int)i;
    }
    welcome_back(c, class, ready);
    int i = walk(c, class, ready, false);
    if (i >= 0)
        return i;
    /* Rounds in which everybody ready is in debt change nothing but the credits: take them in one step. */
    for (uint32_t k = 0; k < n; k++) {
        const struct core_entity *e = &c->entity[c->order[class][k]];
        if (ready >> c->order[class][k] & 1)
            rounds = least(rounds, rounds_needed(e->credit, (int64_t)e->quantum));
    }
    if (rounds > ROUNDS_MAX)
        return -1;
    for (uint32_t k = 0; k < n && rounds > 1; k++)
        credit_owner(&c->entity[c->order[class][k]], rounds - 1, ready >> c->order[class][k] & 1);
    return walk(c, class, ready, rounds == ROUNDS_MAX);
}

int rotation_owner(const struct core *c)
{
    return c->in_void || c->position[1] >= c->order_count[1] ? -1 : c->order[1][c->position[1]];
}

int64_t rotation_credit(const struct core *c)
{
    int owner = rotation_owner(c);
    return owner < 0 ? c->void_credit : c->entity[owner].credit;
}

static int64_t void_quantum(const struct core *c)
{
    /* The unowned time is spread: a piece after each owner's turn. */
    return c->order_count[1] ? (int64_t)(c->plan.unowned_ns / c->order_count[1]) : 0;
}

static bool next_position(struct core *c)
{
    int64_t piece = void_quantum(c);
    if (piece && !c->in_void) {
        c->in_void = true;
        c->void_credit = least(c->void_credit + piece, 2 * piece);
        return c->void_credit > threshold(piece);
    }
    c->in_void = false;
    c->position[1] = (c->position[1] + 1) % c->order_count[1];
    struct core_entity *e = &c->entity[c->order[1][c->position[1]]];
    int64_t q = (int64_t)e->quantum;
    e->credit = least(e->credit + q, 2 * q);
    return e->credit > threshold(q);
}

void rotation_next(struct core *c)
{
    uint32_t n = c->order_count[1];
    if (!n) {
        c->in_void = false;
        return;
    }
    c->turn_over = false;
    for (int attempt = 0; attempt < 2; attempt++) {
        for (uint32_t k = 0; k < 2 * n; k++)
            if (next_position(c))
                return;
        int64_t rounds = ROUNDS_MAX;
        for (uint32_t k = 0; k < n; k++) {
            const struct core_entity *e = &c->entity[c->order[1][k]];
            rounds = least(rounds, rounds_needed(e->credit, (int64_t)e->quantum));
        }
        for (uint32_t k = 0; k < n; k++)
            credit_owner(&c->entity[c->order[1][k]], rounds - 1, true);
    }
}

void rotation_pass(struct core *c, uint64_t elapsed)
{
    uint32_t n = c->order_count[1];
    uint64_t round = (uint64_t)void_quantum(c) * n;
    if (!n)
        return;
    for (uint32_t k = 0; k < n; k++)
        round += c->entity[c->order[1][k]].quantum;
    if (elapsed >= round) {
        int64_t whole = least((int64_t)(elapsed / round), ROUNDS_MAX);
        for (uint32_t k = 0; k < n; k++)
            credit_owner(&c->entity[c->order[1][k]], whole, false);
        c->void_credit = c->void_credit > 0 ? c->void_credit : 0;
        elapsed %= round;
    }
    if (c->turn_over)
        rotation_next(c);
    int64_t *late = NULL, left = (int64_t)elapsed;
    for (uint32_t guard = 0; left && guard < 4 * n + 4; guard++) {
        int owner = rotation_owner(c);
        int64_t *credit = owner < 0 ? &c->void_credit : &c->entity[owner].credit;
        if (owner >= 0 && c->due >> owner & 1) { /* its turn waits for other GPUs: it is not lost meanwhile */
            rotation_next(c);
            continue;
        }
        if (late && owner >= 0 && core_wants(c, (uint32_t)owner)) {
            *late -= left; /* the clock was read late: what was unused too long is shorter the next time */
            return;
        }
        if (*credit > left) {
            *credit -= left;
            return;
        }
        if (*credit > 0) {
            left -= *credit;
            *credit = 0;
        }
        late = credit;
        rotation_next(c);
    }
}
