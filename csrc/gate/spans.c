/* spans.c: which regions are of one instance, for gang.c. */
#include <errno.h>
#include <stdlib.h>
#include "server_parts.h"

static struct gang *find(const struct gate_server *s, uint64_t instance, uint32_t *at)
{
    for (*at = 0; *at < s->gang_count; (*at)++)
        if (s->gang_instance[*at] == instance)
            return s->gangs[*at];
    return NULL;
}

/* What changed there counts at once: the thread is kicked by whoever changes regions. */
static void look_again(struct gate_server *s, const struct gang *gang)
{
    for (uint32_t n = 0; n < GPUS_MAX; n++)
        for (uint32_t k = 0; k < gang->count && s->gpus[n]; k++)
            if (gang->core[k] == &s->gpus[n]->core)
                s->gpus[n]->next = 0;
}

static void count_gangs(struct gate_server *s)
{
    s->spanning_count = 0;
    for (uint32_t k = 0; k < s->gang_count; k++)
        if (s->gangs[k]->count > 1)
            s->spanning[s->spanning_count++] = s->gangs[k];
    for (uint32_t k = 0; k < GPUS_MAX; k++)
        if (s->gpus[k])
            s->gpus[k]->gangs = 0;
    for (uint32_t r = 0; r < s->region_end; r++) {
        uint32_t at;
        struct region *region = s->regions[r];
        struct gang *gang = region && region->instance ? find(s, region->instance, &at) : NULL;
        if (gang && gang->count > 1)
            s->gpus[region->gpu]->gangs++;
    }
}

int server_span(struct gate_server *s, struct region *r)
{
    uint32_t at;
    if (!r->instance)
        return 0;
    struct gang *gang = find(s, r->instance, &at);
    if (!gang) {
        if (s->gang_count == GANGS_MAX || !(gang = calloc(1, sizeof *gang)))
            return -ENOMEM;
        s->gangs[s->gang_count] = gang;
        s->gang_instance[s->gang_count++] = r->instance;
    }
    if (gang->count == GANG_MEMBERS)
        return -E2BIG;
    gang_forget(gang);
    look_again(s, gang);
    gang->core[gang->count] = &s->gpus[r->gpu]->core;
    gang->entity[gang->count] = r->entity;
    gang->used_ns[gang->count++] = 0;
    count_gangs(s);
    return 0;
}

void server_unspan(struct gate_server *s, struct region *r)
{
    uint32_t at;
    struct gang *gang = r->instance ? find(s, r->instance, &at) : NULL;
    if (!gang)
        return;
    gang_forget(gang);
    look_again(s, gang);
    for (uint32_t k = 0; k < gang->count; k++) {
        if (gang->core[k] != &s->gpus[r->gpu]->core || gang->entity[k] != r->entity)
            continue;
        gang->count--;
        gang->core[k] = gang->core[gang->count];
        gang->entity[k] = gang->entity[gang->count];
        gang->used_ns[k] = gang->used_ns[gang->count];
    }
    if (!gang->count) {
        free(gang);
        s->gangs[at] = s->gangs[--s->gang_count];
        s->gang_instance[at] = s->gang_instance[s->gang_count];
    }
    count_gangs(s);
}
