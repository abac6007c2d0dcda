/* pages.h: one region as the daemon has it: its two memfds, its bell, and who has which slot (cgpu_abi.h is the contract).
 *
 * Whatever is read from the report pages is untrusted: every word is loaded once, checked, and used as a copy. */
#ifndef CGPU_PAGES_H
#define CGPU_PAGES_H
#include "atomics.h"
#include "cgpu_abi.h"
#include "core.h"

struct gate_slot_use {
    uint32_t slot, pad;
    uint64_t mem_used, mem_peak, mem_refused, launches, ungated, unknown, dirty, kernel_ns;
};

struct pages {
    struct cgpu_ctl *ctl;             /* the only writable mapping there will ever be */
    const struct cgpu_report *report; /* read-only for us too */
    int ctl_fd, report_fd, bell_fd;   /* to hand out; ctl_fd is opened read-only */
    uint32_t live_count;
    uint16_t live[CGPU_SLOTS];        /* slots in use */
    int agent_fd[CGPU_SLOTS];         /* by slot */
    uint8_t agent_socket[CGPU_SLOTS]; /* it is one: it cannot be made to block us */
    uint32_t next_slot, next_gen;
    uint64_t retired_ungated;         /* of processes that have ended */
};

/* All return 0 or -errno. */
int pages_create(struct pages *pages, const uint8_t uuid[16], uint32_t gpu, uint64_t generation);
void pages_destroy(struct pages *pages);
/* `agent_fd` is duplicated. -EAGAIN: all slots are taken. */
int pages_attach(struct pages *pages, int agent_fd, uint32_t *slot, uint32_t *gen);
int pages_detach(struct pages *pages, uint32_t slot);

/* What the live slots say about the grant of `epoch`. */
void pages_look(const struct pages *pages, uint64_t epoch, struct core_report *report);
void pages_use(const struct pages *pages, uint32_t slot, struct gate_slot_use *use);
uint64_t pages_ungated(const struct pages *pages);

/* `start`: ctl.start_ns. */
void pages_grant(struct pages *pages, uint64_t epoch, uint64_t deadline, uint64_t start);
void pages_start(struct pages *pages, uint64_t start); /* of the grant that stands */
void pages_close(struct pages *pages, uint64_t epoch);
void pages_deadline(struct pages *pages, uint64_t epoch, uint64_t deadline, bool ring);
#endif
