/* regions.c: GPUs, regions, plans and figures: what the daemon's other threads call. */
#include "server_parts.h"
#include <errno.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>

/* ---- GPUs and regions ---- */

int gate_add_gpu(struct gate_server *s, uint32_t gpu, const uint8_t uuid[16], uint64_t memory)
{
    if (gpu >= GPUS_MAX)
        return -EINVAL;
    struct gpu *g = calloc(1, sizeof *g);
    if (!g)
        return -ENOMEM;
    memcpy(g->uuid, uuid, sizeof g->uuid);
    g->memory = memory;
    g->next = CORE_NEVER;
    core_init(&g->core, &s->tuning.core, now_ns());
    pthread_mutex_lock(&s->lock);
    int error = s->gpus[gpu] ? -EEXIST : 0;
    if (!error)
        s->gpus[gpu] = g;
    pthread_mutex_unlock(&s->lock);
    if (error)
        free(g);
    return error;
}

static int join(struct gate_server *s, struct region *r, uint32_t *index)
{
    struct gpu *g = s->gpus[r->gpu];
    uint32_t at = 0, entity = 0;
    while (entity < CORE_ENTITIES && g->by_entity[entity])
        entity++;
    while (at < REGIONS_MAX && s->regions[at])
        at++;
    if (entity == CORE_ENTITIES || at == REGIONS_MAX)
        return -ENOSPC;
    r->entity = entity;
    int error = server_span(s, r);
    if (error)
        return error;
    r->handle = ++s->handles * REGIONS_MAX + at;
    s->regions[at] = r;
    if (at >= s->region_end)
        s->region_end = at + 1;
    g->by_entity[entity] = r;
    server_set_flags(r, g->core.plan.native, g->core.plan.drain);
    server_set_tuning(s, g, r);
    server_watch(s, r, at, EPOLL_CTL_ADD, true);
    server_run_gpu(s, g, &(struct core_event){.type = CORE_JOIN, .entity = entity});
    *index = at;
    return 0;
}

int gate_add_region(struct gate_server *s, uint32_t gpu, uint64_t instance, uint64_t mem_limit, uint64_t *handle, int fds[3])
{
    uint32_t index;
    if (gpu >= GPUS_MAX || !s->gpus[gpu]) /* GPUs are never removed */
        return -ENODEV;
    struct region *r = calloc(1, sizeof *r);
    if (!r)
        return -ENOMEM;
    r->gpu = gpu;
    r->instance = instance;
    r->bell_tokens = BELL_BURST;
    r->bell_refill_ns = now_ns();
    int error = pages_create(&r->pages, s->gpus[gpu]->uuid, gpu, s->generation);
    if (error) {
        free(r);
        return error;
    }
    r->pages.ctl->mem_limit = mem_limit;
    r->pages.ctl->mem_total = s->gpus[gpu]->memory;
    pthread_mutex_lock(&s->lock);
    error = join(s, r, &index);
    pthread_mutex_unlock(&s->lock);
    if (error) {
        pages_destroy(&r->pages);
        free(r);
        return error;
    }
    server_kick(s);
    *handle = r->handle;
    fds[0] = r->pages.ctl_fd;
    fds[1] = r->pages.report_fd;
    fds[2] = r->pages.bell_fd;
    return 0;
}

int gate_remove_region(struct gate_server *s, uint64_t handle)
{
    pthread_mutex_lock(&s->lock);
    struct region *r = server_find(s, handle);
    if (r) {
        struct gpu *g = s->gpus[r->gpu];
        epoll_ctl(s->epoll_fd, EPOLL_CTL_DEL, r->pages.bell_fd, NULL);
        s->muted -= r->muted;
        server_unspan(s, r);
        g->by_entity[r->entity] = NULL;
        g->fallbacks += pages_ungated(&r->pages);
        s->regions[handle % REGIONS_MAX] = NULL;
        store_release(&r->pages.ctl->grant, r->pages.ctl->grant & ~1ull);
        server_run_gpu(s, g, &(struct core_event){.type = CORE_LEAVE, .entity = r->entity});
    }
    pthread_mutex_unlock(&s->lock);
    if (!r)
        return -ENOENT;
    server_kick(s);
    pages_destroy(&r->pages);
    free(r);
    return 0;
}

int gate_set_plan(struct gate_server *s, uint32_t gpu, const struct core_plan *plan, const struct gate_turn *turns)
{
    struct core_plan p = *plan;
    int error = 0;
    if (gpu >= GPUS_MAX || !s->gpus[gpu])
        return -ENODEV;
    if (p.count > CORE_ENTITIES)
        return -E2BIG;
    pthread_mutex_lock(&s->lock);
    struct gpu *g = s->gpus[gpu];
    bool paused[CORE_ENTITIES] = {false}, shut[CORE_ENTITIES] = {false}, high = false;
    for (uint32_t k = 0; k < p.count && !error; k++) {
        struct region *r = server_find(s, turns[k].region);
        if (!r || r->gpu != gpu) {
            error = -ENOENT;
            break;
        }
        p.turn[k] = (struct core_turn){.entity = r->entity, .high = turns[k].high, .quantum_ns = turns[k].quantum_ns};
        paused[r->entity] = !turns[k].quantum_ns;
        shut[r->entity] = turns[k].shut;
        high |= turns[k].high && turns[k].quantum_ns;
    }
    if (!error) {
        g->has_high = high;
        for (uint32_t i = 0; i < CORE_ENTITIES; i++) {
            struct region *r = g->by_entity[i];
            if (!r)
                continue;
            r->paused = paused[i];
            r->shut = shut[i];
            g->plain = p.native;
            server_set_flags(r, p.native, p.drain); /* before the words: who sees a grant sees its kind */
        }
        server_run_gpu(s, g, &(struct core_event){.type = CORE_PLAN, .plan = &p});
        for (uint32_t i = 0; i < CORE_ENTITIES; i++) /* the core knows now who is of high priority */
            if (g->by_entity[i])
                server_set_tuning(s, g, g->by_entity[i]);
    }
    pthread_mutex_unlock(&s->lock);
    server_kick(s);
    return error;
}

int gate_set_memory(struct gate_server *s, uint64_t handle, uint64_t limit, uint64_t other)
{
    pthread_mutex_lock(&s->lock);
    struct region *r = server_find(s, handle);
    if (r) {
        store_release(&r->pages.ctl->mem_limit, limit);
        store_release(&r->pages.ctl->mem_other, other);
    }
    pthread_mutex_unlock(&s->lock);
    return r ? 0 : -ENOENT;
}

int gate_set_context(struct gate_server *s, uint64_t handle, uint64_t bytes)
{
    pthread_mutex_lock(&s->lock);
    struct region *r = server_find(s, handle);
    if (r) {
        store_release(&r->pages.ctl->mem_context, bytes);
        store_release(&r->pages.ctl->contexts, 1);
    }
    pthread_mutex_unlock(&s->lock);
    return r ? 0 : -ENOENT;
}

int gate_attach(struct gate_server *s, uint64_t handle, int agent_fd, uint32_t *slot, uint32_t *gen)
{
    pthread_mutex_lock(&s->lock);
    struct region *r = server_find(s, handle);
    int error = r ? pages_attach(&r->pages, agent_fd, slot, gen) : -ENOENT;
    pthread_mutex_unlock(&s->lock);
    return error;
}

int gate_detach(struct gate_server *s, uint64_t handle, uint32_t slot)
{
    pthread_mutex_lock(&s->lock);
    struct region *r = server_find(s, handle);
    int error = r ? pages_detach(&r->pages, slot) : -ENOENT;
    if (!error) {
        s->gpus[r->gpu]->dirty |= 1ull << r->entity; /* a dead process holds nothing: the next may be due */
        server_run_gpu(s, s->gpus[r->gpu], NULL);
    }
    pthread_mutex_unlock(&s->lock);
    server_kick(s);
    return error;
}

/* ---- figures ---- */

int gate_slots(struct gate_server *s, uint64_t handle, struct gate_slot_use *uses)
{
    int n = -ENOENT;
    pthread_mutex_lock(&s->lock);
    struct region *r = server_find(s, handle);
    if (r) {
        for (n = 0; n < (int)r->pages.live_count; n++)
            pages_use(&r->pages, r->pages.live[n], &uses[n]);
    }
    pthread_mutex_unlock(&s->lock);
    return n;
}

int gate_region_used(struct gate_server *s, uint64_t handle, struct gate_region_use *use)
{
    pthread_mutex_lock(&s->lock);
    struct region *r = server_find(s, handle);
    if (r) {
        s->gpus[r->gpu]->dirty |= 1ull << r->entity;
        server_run_gpu(s, s->gpus[r->gpu], NULL); /* time charged up to now */
        const struct core_entity *e = &s->gpus[r->gpu]->core.entity[r->entity];
        *use = (struct gate_region_use){
            .busy_ns = e->busy_ns, .turns = e->turns, .overdue = e->overdue_count, .waiting = e->demand,
            .holding = e->phase == CORE_OPEN || e->phase == CORE_CLOSING};
    }
    pthread_mutex_unlock(&s->lock);
    server_kick(s);
    return r ? 0 : -ENOENT;
}

int gate_gpu_used(struct gate_server *s, uint32_t gpu, struct gate_gpu_use *use)
{
    if (gpu >= GPUS_MAX || !s->gpus[gpu])
        return -ENODEV;
    pthread_mutex_lock(&s->lock);
    struct gpu *g = s->gpus[gpu];
    server_run_gpu(s, g, NULL);
    *use = (struct gate_gpu_use){
        .busy_ns = g->core.total_ns - g->core.idle_ns, .turns = g->core.turns, .fallbacks = g->fallbacks,
        .longest_wait_ns = core_longest_wait(&g->core, g->core.now), .starved = g->core.starved,
        .native = g->core.plan.native, .fallback = g->core.fallback};
    for (uint32_t i = 0; i < CORE_ENTITIES; i++) {
        if (!g->by_entity[i])
            continue;
        use->regions++;
        use->overdue += g->core.entity[i].overdue_count;
        use->fallbacks += pages_ungated(&g->by_entity[i]->pages);
    }
    pthread_mutex_unlock(&s->lock);
    server_kick(s);
    return 0;
}
