/* server.h: the gate's daemon side: one thread that carries core.c's decisions out on the shared pages.
 *
 * Every function takes the server's mutex, which the thread holds for microseconds at a time and never while it waits; all
 * may be called from any thread. They return 0 (or a count) or -errno. A region is named by a handle that is never reused. */
#ifndef CGPU_SERVER_H
#define CGPU_SERVER_H
#include "core.h"
#include "pages.h"

struct gate_server;

struct gate_tuning {
    struct core_tuning core;
    uint32_t span_ns;      /* clients record an event about every span of device time, ... */
    uint32_t high_span_ns; /* ... or this one where a plan has a high-priority instance */
    uint32_t window;       /* at most so many unfinished spans in flight, ... */
    uint32_t high_window;
    uint32_t grace_ns;     /* idle this long after the last synchronise: let go */
    uint32_t bells_per_s;  /* a region that rings more often is looked at every mute_ns instead */
    uint64_t mute_ns;
};

struct gate_region_use {
    uint64_t busy_ns, turns, overdue;
    uint32_t waiting, holding;
};
struct gate_gpu_use {
    uint64_t busy_ns, turns, fallbacks, overdue, longest_wait_ns, starved;
    uint32_t native, fallback, regions, pad;
};

/* As core_plan, entities named by region handles. */
struct gate_turn {
    uint64_t region;
    uint64_t quantum_ns;
    uint32_t high, shut;   /* shut: by the audit; its quantum is 0 */
};

void gate_tuning_default(struct gate_tuning *tuning);
int gate_new(const struct gate_tuning *tuning, struct gate_server **server);
/* Starts the thread. */
int gate_start(struct gate_server *server);
/* Ends the thread, opens every gate that is not paused (nobody is left to close it), and frees everything. */
void gate_free(struct gate_server *server);

int gate_add_gpu(struct gate_server *server, uint32_t gpu, const uint8_t uuid[16], uint64_t memory);
/* fds: control (read-only), report, bell. They stay the server's, until the region is removed. `instance`: the same for the
 * regions of one instance on several GPUs (at most GANG_MEMBERS), so that it has its turns there together; 0 = none of that. */
int gate_add_region(struct gate_server *server, uint32_t gpu, uint64_t instance, uint64_t mem_limit, uint64_t *region,
                    int fds[3]);
int gate_remove_region(struct gate_server *server, uint64_t region);
/* Regions of the GPU that no turn names are never granted; those with quantum 0 are paused. */
int gate_set_plan(struct gate_server *server, uint32_t gpu, const struct core_plan *plan, const struct gate_turn *turns);
int gate_set_memory(struct gate_server *server, uint64_t region, uint64_t limit, uint64_t other);
int gate_set_context(struct gate_server *server, uint64_t region, uint64_t bytes);
int gate_attach(struct gate_server *server, uint64_t region, int agent_fd, uint32_t *slot, uint32_t *gen);
int gate_detach(struct gate_server *server, uint64_t region, uint32_t slot);
/* Fills at most CGPU_SLOTS entries; gives how many. */
int gate_slots(struct gate_server *server, uint64_t region, struct gate_slot_use *uses);
int gate_region_used(struct gate_server *server, uint64_t region, struct gate_region_use *use);
int gate_gpu_used(struct gate_server *server, uint32_t gpu, struct gate_gpu_use *use);
/* Rounds of the thread so far; grows at least ten times a second while it lives. Lock-free. */
uint64_t gate_loops(const struct gate_server *server);
#endif
