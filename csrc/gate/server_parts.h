/* server_parts.h: the server's state, shared by server.c (the thread) and regions.c (what other threads call). All of it is
 * under the server's lock. */
#ifndef CGPU_SERVER_PARTS_H
#define CGPU_SERVER_PARTS_H
#include "gang.h"
#include "server.h"
#include <pthread.h>

#define GPUS_MAX      64
#define REGIONS_MAX   (GPUS_MAX * CORE_ENTITIES)
#define GANGS_MAX     1024
#define BELL_BURST    64

struct region {
    uint64_t handle;          /* 0 = free entry */
    uint32_t gpu, entity;
    uint64_t instance;        /* regions of one instance have the same; 0 = no other */
    bool paused;
    bool shut;                /* by the audit */
    bool muted;
    uint64_t muted_until, bell_tokens, bell_refill_ns;
    struct pages pages;
};

struct gpu {
    bool has_high, plain;     /* plain: the pages say that the driver shares the device */
    uint32_t gangs;           /* instances that have other GPUs too */
    uint8_t uuid[16];
    uint64_t memory;
    uint64_t next;            /* when its core wants to be called */
    uint64_t dirty;           /* entities to look at in the next step, a set */
    uint64_t fallbacks;       /* of removed regions */
    struct region *by_entity[CORE_ENTITIES];
    struct core core;
};

struct gate_server {
    pthread_mutex_t lock;
    struct gang *gangs[GANGS_MAX];            /* one an instance */
    uint64_t gang_instance[GANGS_MAX];
    struct gang *spanning[GANGS_MAX];         /* those of them with several GPUs */
    uint32_t gang_count, spanning_count;
    uint64_t gang_next;       /* when they want to be looked at */
    pthread_t thread;
    bool running, stop;
    int epoll_fd, kick_fd;
    bool no_pwait2; /* the kernel has no epoll_pwait2 */
    uint64_t loops, handles, heartbeat_ns, generation;
    uint32_t muted;           /* regions */
    struct gate_tuning tuning;
    struct gpu *gpus[GPUS_MAX];
    struct region *regions[REGIONS_MAX];
    uint32_t region_end;      /* entries from here on are NULL */
};

/* Looks at whoever matters on this GPU, steps, acts; then the same on the GPUs that this concerns. `first` (may be NULL) goes
 * before what is seen. */
void server_run_gpu(struct gate_server *server, struct gpu *gpu, const struct core_event *first);
/* The instances that span GPUs: after one of theirs was stepped, or when it is time. */
void server_run_gangs(struct gate_server *server);
/* ---- spans.c ---- */
int server_span(struct gate_server *server, struct region *region);
void server_unspan(struct gate_server *server, struct region *region);
void server_set_flags(struct region *region, bool native, bool drain);
void server_set_tuning(const struct gate_server *server, const struct gpu *gpu, struct region *region);
/* epoll_ctl() on a region's bell; `on`: listen. */
void server_watch(struct gate_server *server, struct region *region, uint32_t index, int operation, bool on);
/* Makes the thread look at the clock again. */
void server_kick(struct gate_server *server);
struct region *server_find(const struct gate_server *server, uint64_t handle); /* NULL: none */
#endif
