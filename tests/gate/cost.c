/* cost.c: thread CPU time of the scheduling step, per turn, by how many entities are busy.
 *
 *     cost ENTITIES TURNS
 *
 * All have a launcher waiting all the time; the holder opens, and lets go and drains at its deadline. Writes nanoseconds per turn. */
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>
#include "core.h"

static struct core core;
static struct core_action actions[CORE_ACTIONS];
static uint64_t now = 1000000000;

static uint64_t cpu(void)
{
    struct timespec t;
    clock_gettime(CLOCK_THREAD_CPUTIME_ID, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

int main(int argc, char **argv)
{
    if (argc != 3)
        return 2;
    uint32_t entities = (uint32_t)atoi(argv[1]), count;
    uint64_t turns = strtoull(argv[2], NULL, 10);
    struct core_plan plan = {.count = entities, .skip_idle = 1, .drain = 1, .high_percent = 90};
    core_init(&core, NULL, now);
    for (uint32_t i = 0; i < entities; i++) {
        plan.turn[i] = (struct core_turn){.entity = i, .quantum_ns = 5000000};
        core_step(&core, now, &(struct core_event){.type = CORE_JOIN, .entity = i}, 1, actions, &count);
    }
    core_step(&core, now, &(struct core_event){.type = CORE_PLAN, .plan = &plan}, 1, actions, &count);
    uint64_t next = 0;
    for (uint32_t i = 0; i < entities; i++)
        next = core_step(&core, now, &(struct core_event){.type = CORE_REPORT, .entity = i, .report = {.demand = 1}}, 1,
                         actions, &count);
    uint64_t begun = cpu(), first = core.turns;
    while (core.turns - first < turns) {
        uint32_t i = (uint32_t)core.holder;
        struct core_event event = {.type = CORE_REPORT, .entity = i,
                                   .report = {.epoch = core.entity[i].epoch, .opened = 1, .holds = 1, .undrained = 1}};
        next = core_step(&core, now += 60000, &event, 1, actions, &count); /* it opened: nobody of it waits */
        now = next > now ? next : now;
        core_step(&core, now, NULL, 0, actions, &count);                 /* its time is over: closed */
        event.report.holds = 0;
        event.report.demand = 1;
        core_step(&core, now += 30000, &event, 1, actions, &count);      /* let go: the next is granted */
        event.report.undrained = 0;
        core_step(&core, now += 30000, &event, 1, actions, &count);      /* drained */
    }
    printf("%.1f\n", (double)(cpu() - begun) / (double)turns);
    return 0;
}
