/* engine.c: the discrete-event simulation of one GPU. Everything here runs under the device's mutex. */
#include "shared/state.h"

#define NEVER UINT64_MAX

struct ready { uint32_t channel; bool any; };

static struct sim_op *op_at(struct sim_channel *channel, uint64_t seq)
{
    return &channel->ring[seq % SIM_DEPTH];
}

static void finish(struct sim_proc *proc, struct sim_channel *channel, struct sim_op *op, uint64_t when)
{
    op->done_ns = when;
    store_release(&channel->head, channel->head + 1); /* publishes the stamp; the owner reads it without the mutex */
    proc->completed++;
}

/* Whether the head of the channel is done at `now`. Lowers *next to when it may be, where time alone will tell. */
static bool settle_head(struct sim_state *state, int slot, struct sim_channel *channel, struct sim_op *op, uint64_t now,
                        uint64_t *next)
{
    struct sim_proc *proc = &state->proc[slot];
    if (op->queued_ns > now) { /* somebody advanced while it was on its way */
        if (op->queued_ns < *next)
            *next = op->queued_ns;
        return false;
    }
    switch (op->kind) {
    case SIM_KERNEL:
        if (op->left_ns)
            return false;
        if (!op->start_ns)
            op->start_ns = now;
        finish(proc, channel, op, now);
        return true;
    case SIM_MARK:
        op->start_ns = now;
        finish(proc, channel, op, now);
        return true;
    case SIM_WAIT:
        if (load_acquire(&state->queues[slot].channel[op->dep % SIM_CHANNELS].head) <= op->dep_seq)
            return false;
        op->start_ns = now;
        finish(proc, channel, op, now);
        return true;
    case SIM_DELAY:
        if (!op->start_ns)
            op->start_ns = now;
        if (op->start_ns + op->left_ns <= now) {
            finish(proc, channel, op, op->start_ns + op->left_ns);
            return true;
        }
        if (op->start_ns + op->left_ns < *next)
            *next = op->start_ns + op->left_ns;
        return false;
    default: /* SIM_GATE */
        if (!op->start_ns)
            op->start_ns = now;
        return false;
    }
}

/* Completes what is complete at `now`, and picks the kernel that the process would run. */
static struct ready settle(struct sim_state *state, int slot, uint64_t now, uint64_t *next)
{
    struct sim_proc *proc = &state->proc[slot];
    struct sim_channel *channels = state->queues[slot].channel;
    struct ready ready = {0, false};
    bool again = true;
    if (load_acquire(&proc->queued) == proc->completed)
        return ready;
    while (again) {
        again = false;
        for (uint32_t used = load_acquire(&proc->used); used; used &= used - 1) {
            struct sim_channel *channel = &channels[__builtin_ctz(used)];
            uint64_t tail = load_acquire(&channel->tail);
            while (channel->head < tail && settle_head(state, slot, channel, op_at(channel, channel->head), now, next))
                again = true; /* another channel may have waited for it */
        }
    }
    const struct sim_op *best = NULL;
    for (uint32_t used = load_acquire(&proc->used); used; used &= used - 1) {
        uint32_t c = (uint32_t)__builtin_ctz(used);
        struct sim_channel *channel = &channels[c];
        if (channel->head >= load_acquire(&channel->tail))
            continue;
        const struct sim_op *op = op_at(channel, channel->head);
        if (op->kind != SIM_KERNEL || op->queued_ns > now || !op->left_ns)
            continue;
        bool better = !best || (best->start_ns == 0 && op->start_ns != 0);
        if (best && best->start_ns == 0 && op->start_ns == 0) {
            int32_t mine = load_relaxed(&channel->priority), its = load_relaxed(&channels[ready.channel].priority);
            better = mine < its || (mine == its && op->order < best->order);
        }
        if (better) {
            best = op;
            ready = (struct ready){c, true};
        }
    }
    return ready;
}

/* A dead process gets no turn. Asked at most every SIM_LOOK_NS of real time and process: a system call. */
static bool lives(struct sim_map *map, int slot, uint64_t real_now)
{
    struct sim_proc *proc = &map->state->proc[slot];
    if (slot == map->slot || real_now - proc->looked_ns < SIM_LOOK_NS)
        return true;
    proc->looked_ns = real_now;
    if (sim_pid(map, slot) != 0)
        return true;
    sim_reap(map);
    return false;
}

static void sample(struct sim_state *state, uint64_t now)
{
    uint64_t at = state->sample_seq % SIM_SAMPLES;
    state->sample_ns[at] = now;
    state->sample_busy[at] = state->busy_ns;
    for (int i = sim_live(state, 0); i >= 0; i = sim_live(state, i + 1))
        state->proc[i].samples[at] = state->proc[i].busy_ns;
    state->sample_seq++;
}

static uint64_t next_sample(const struct sim_state *state)
{
    if (state->sample_seq == 0)
        return state->now_ns;
    return state->sample_ns[(state->sample_seq - 1) % SIM_SAMPLES] + SIM_SAMPLE_NS;
}

/* One step from state->now_ns: up to `limit`, or to the first event before it. */
static void step(struct sim_map *map, uint64_t limit, uint64_t real_now)
{
    struct sim_state *state = map->state;
    uint64_t now = state->now_ns, next = limit;
    struct ready mine = {0, false}, other = {0, false};
    int after = -1;
    int current = state->current >= 0 && state->current < (int)state->slots ? state->current : -1;

    for (int pass = 0; pass < 2; pass++) { /* round robin: those after the current one first, itself last */
        for (int slot = sim_live(state, pass ? 0 : current + 1); slot >= 0 && (!pass || slot <= current);
             slot = sim_live(state, slot + 1)) {
            struct ready ready = settle(state, slot, now, &next);
            if (slot == current)
                mine = ready;
            else if (ready.any && after < 0 && lives(map, slot, real_now)) {
                after = slot;
                other = ready;
            }
        }
    }
    if (after >= 0 && (!mine.any || now >= state->turn_end_ns)) {
        current = state->current = after;
        state->turn_end_ns = now + SIM_TURN_NS;
        mine = other;
    } else if (mine.any && now >= state->turn_end_ns) {
        if (!lives(map, current, real_now))
            return;
        state->turn_end_ns = now + SIM_TURN_NS;
    }
    if (!mine.any) {
        state->now_ns = next > now ? next : limit;
        return;
    }
    struct sim_proc *proc = &state->proc[current];
    struct sim_channel *channel = &state->queues[current].channel[mine.channel];
    struct sim_op *op = op_at(channel, channel->head);
    uint64_t run = next - now;
    if (run > op->left_ns)
        run = op->left_ns;
    if (run > state->turn_end_ns - now)
        run = state->turn_end_ns - now;
    if (!op->start_ns)
        op->start_ns = now;
    op->left_ns -= run;
    proc->busy_ns += run;
    state->busy_ns += run;
    state->now_ns = now + run;
    if (!op->left_ns)
        finish(proc, channel, op, state->now_ns);
}

static bool anything_queued(const struct sim_state *state)
{
    for (int i = sim_live(state, 0); i >= 0; i = sim_live(state, i + 1))
        if (load_acquire(&state->proc[i].queued) != state->proc[i].completed)
            return true;
    return false;
}

void sim_advance(struct sim_map *map, uint64_t now)
{
    struct sim_state *state = map->state;
    uint64_t next = 0;
    while (state->now_ns < now) {
        if (next_sample(state) + SIM_SAMPLES * (uint64_t)SIM_SAMPLE_NS < now && !anything_queued(state)) {
            sample(state, state->now_ns); /* samples of an idle device need no steps: jump near the end */
            state->now_ns = now - SIM_SAMPLES * (uint64_t)SIM_SAMPLE_NS;
        }
        uint64_t boundary = next_sample(state);
        if (boundary <= state->now_ns) {
            sample(state, state->now_ns);
            continue;
        }
        step(map, boundary < now ? boundary : now, now);
    }
    if (map->slot >= 0) /* what ends exactly now */
        settle(state, map->slot, state->now_ns, &next);
}

bool sim_done(struct sim_map *map, int slot, uint32_t generation, uint32_t c, uint64_t seq)
{
    struct sim_state *state = map->state;
    struct sim_proc *proc = &state->proc[slot];
    if (proc->state != SIM_LIVE || proc->generation != generation)
        return true;
    return load_acquire(&state->queues[slot].channel[c].head) > seq || !lives(map, slot, now_ns());
}

void sim_open_gate(struct sim_map *map, uint32_t c, uint64_t now)
{
    struct sim_proc *proc = &map->state->proc[map->slot];
    struct sim_channel *channel = &map->state->queues[map->slot].channel[c];
    struct sim_op *op = op_at(channel, channel->head);
    if (channel->head < load_acquire(&channel->tail) && op->kind == SIM_GATE)
        finish(proc, channel, op, now < map->state->now_ns ? map->state->now_ns : now);
}

/* ---- prediction ---- */

/* Engine time that the process could use, no more than `enough`. */
static uint64_t backlog(struct sim_state *state, int slot, uint64_t enough)
{
    struct sim_proc *proc = &state->proc[slot];
    uint64_t sum = 0;
    if (load_acquire(&proc->queued) == proc->completed)
        return 0;
    for (uint32_t used = load_acquire(&proc->used); used; used &= used - 1) {
        struct sim_channel *channel = &state->queues[slot].channel[__builtin_ctz(used)];
        uint64_t tail = load_acquire(&channel->tail);
        for (uint64_t seq = channel->head; seq < tail && sum < enough; seq++) {
            const struct sim_op *op = op_at(channel, seq);
            if (op->kind == SIM_GATE)
                break;
            if (op->kind == SIM_KERNEL)
                sum += op->left_ns;
        }
    }
    return sum < enough ? sum : enough;
}

/* Time until the operation is done if the engine were ours alone; NEVER behind a gate. */
static uint64_t own_time(struct sim_channel *channels, uint32_t c, uint64_t seq, uint64_t now, int depth)
{
    struct sim_channel *channel = &channels[c];
    uint64_t sum = 0, tail = load_acquire(&channel->tail);
    for (uint64_t at = channel->head; at <= seq && at < tail; at++) {
        const struct sim_op *op = op_at(channel, at);
        switch (op->kind) {
        case SIM_KERNEL:
            sum += op->left_ns;
            break;
        case SIM_DELAY: {
            uint64_t end = op->start_ns + op->left_ns;
            sum += !op->start_ns ? op->left_ns : end > now ? end - now : 0;
            break;
        }
        case SIM_WAIT: {
            uint32_t dep = op->dep % SIM_CHANNELS;
            if (depth > 8 || load_acquire(&channels[dep].head) > op->dep_seq)
                break;
            uint64_t until = own_time(channels, dep, op->dep_seq, now, depth + 1);
            if (until == NEVER)
                return NEVER;
            if (until > sum)
                sum = until;
            break;
        }
        case SIM_GATE:
            return NEVER;
        default:
            break;
        }
    }
    return sum;
}

uint64_t sim_predict(struct sim_map *map, uint32_t channel, uint64_t seq)
{
    struct sim_state *state = map->state;
    uint64_t now = state->now_ns, own = own_time(state->queues[map->slot].channel, channel, seq, now, 0);
    if (own == NEVER)
        return NEVER;
    bool contended = false;
    for (int i = sim_live(state, 0); i >= 0 && !contended; i = sim_live(state, i + 1))
        contended = i != map->slot && backlog(state, i, 1);
    if (!contended)
        return now + own;
    if (state->current == map->slot) { /* up to the end of our turn; then we look again */
        uint64_t left = state->turn_end_ns > now ? state->turn_end_ns - now : 0;
        return now + (own <= left ? own : left + 1);
    }
    uint64_t wait = 0;
    if (state->current >= 0 && state->current < (int)state->slots) {
        uint64_t left = state->turn_end_ns > now ? state->turn_end_ns - now : 0;
        wait = backlog(state, state->current, left);
    }
    return now + wait + (own < SIM_TURN_NS ? own : SIM_TURN_NS);
}
