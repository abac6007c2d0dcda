/* memory.c: the bytes each process has on a GPU, and those that several have together ("Shared memory" in state.h). */
#include <errno.h>
#include <string.h>
#include "shared/state.h"

uint64_t sim_used(const struct sim_state *state)
{
    uint64_t used = 0;
    for (int i = sim_live(state, 0); i >= 0; i = sim_live(state, i + 1))
        used += state->proc[i].mem_used;
    return used;
}

/* Under the lock: whether so many bytes fit, if need be after the dead are gone. */
static bool fits(struct sim_map *map, uint64_t bytes)
{
    struct sim_state *state = map->state;
    uint64_t used = sim_used(state);
    if (bytes <= state->total && used <= state->total - bytes)
        return true;
    sim_reap(map);
    used = sim_used(state);
    return bytes <= state->total && used <= state->total - bytes;
}

int sim_charge(struct sim_map *map, uint64_t bytes)
{
    sim_lock(map);
    bool room = fits(map, bytes);
    if (room) {
        struct sim_proc *proc = &map->state->proc[map->slot];
        proc->mem_own += bytes;
        proc->mem_used += bytes;
    }
    sim_unlock(map);
    return room ? 0 : -ENOMEM;
}

void sim_refund(struct sim_map *map, uint64_t bytes)
{
    sim_lock(map);
    struct sim_proc *proc = &map->state->proc[map->slot];
    proc->mem_own -= bytes;
    proc->mem_used -= bytes;
    sim_unlock(map);
}

/* ---- shared allocations; a process changes another's sum only by adding it up anew, so that repair can, too ---- */

static void add_up(struct sim_state *state, uint32_t slot)
{
    uint64_t sum = state->proc[slot].mem_own;
    for (uint32_t i = 0; i < state->shares; i++)
        if (state->share[i].id && state->share[i].owner == slot)
            sum += state->share[i].bytes;
    state->proc[slot].mem_used = sum;
}

void sim_share_repair(struct sim_state *state)
{
    if (state->shares > SIM_SHARES)
        state->shares = SIM_SHARES;
    for (int i = sim_live(state, 0); i >= 0; i = sim_live(state, i + 1))
        add_up(state, (uint32_t)i);
}

static struct sim_share *find(struct sim_state *state, uint64_t id)
{
    for (uint32_t i = 0; i < state->shares; i++)
        if (state->share[i].id == id)
            return &state->share[i];
    return NULL;
}

static int first_holder(const struct sim_share *share)
{
    for (int word = 0; word < SIM_PROCS / 64; word++)
        if (share->holders[word])
            return word * 64 + __builtin_ctzll(share->holders[word]);
    return -1;
}

/* An entry of this process's, its bytes not in mem_own. NULL: no room. */
static struct sim_share *enter(struct sim_map *map, uint64_t id, uint64_t bytes)
{
    struct sim_state *state = map->state;
    struct sim_share *share = find(state, 0);
    if (!share && state->shares == SIM_SHARES)
        return NULL;
    if (!share)
        share = &state->share[state->shares];
    *share = (struct sim_share){.bytes = bytes, .owner = (uint32_t)map->slot};
    share->holders[map->slot / 64] = 1ull << map->slot % 64;
    store_release(&share->id, id); /* last: without it there is no entry */
    if (share == &state->share[state->shares])
        state->shares++;
    add_up(state, (uint32_t)map->slot);
    return share;
}

int sim_share(struct sim_map *map, uint64_t bytes, uint64_t *id)
{
    sim_lock(map);
    struct sim_proc *proc = &map->state->proc[map->slot];
    uint64_t next = ++map->state->share_ids;
    proc->mem_own -= bytes;
    bool made = enter(map, next, bytes) != NULL;
    if (made)
        *id = next;
    else
        proc->mem_own += bytes;
    sim_unlock(map);
    return made ? 0 : -ENOSPC;
}

int sim_share_hold(struct sim_map *map, uint64_t id, uint64_t bytes)
{
    int result = 0;
    sim_lock(map);
    struct sim_share *share = find(map->state, id);
    if (share)
        share->holders[map->slot / 64] |= 1ull << map->slot % 64;
    else if (!bytes)
        result = -ENOENT;
    else if (!fits(map, bytes))
        result = -ENOMEM;
    else if (!enter(map, id, bytes))
        result = -ENOSPC;
    sim_unlock(map);
    return result;
}

static void let_go(struct sim_state *state, struct sim_share *share, int slot)
{
    share->holders[slot / 64] &= ~(1ull << slot % 64);
    if (first_holder(share) >= 0)
        return;
    store_release(&share->id, 0);
    add_up(state, share->owner);
}

void sim_share_drop(struct sim_map *map, uint64_t id)
{
    sim_lock(map);
    struct sim_share *share = find(map->state, id);
    if (share)
        let_go(map->state, share, map->slot);
    sim_unlock(map);
}

bool sim_share_held(struct sim_map *map, uint64_t id)
{
    sim_lock(map);
    bool held = find(map->state, id) != NULL;
    sim_unlock(map);
    return held;
}

void sim_share_leave(struct sim_state *state, int slot)
{
    for (uint32_t i = 0; i < state->shares; i++) {
        struct sim_share *share = &state->share[i];
        if (!share->id)
            continue;
        let_go(state, share, slot);
        if (share->id && share->owner == (uint32_t)slot) {
            share->owner = (uint32_t)first_holder(share);
            add_up(state, share->owner);
        }
    }
}
