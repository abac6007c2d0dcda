/* offer.h: what the daemon hands a process that says hello. offer.c asks for it and checks it, joining.c takes it. */
#ifndef CGPU_OFFER_H
#define CGPU_OFFER_H
#include <stdint.h>
#include "cgpu_abi.h"

#define MAX_FDS   (1 + 3 * CGPU_MAX_GPUS)

struct offer { /* what the daemon sent: descriptors and the pages, mapped where they do not matter yet */
    struct cgpu_welcome welcome;
    int sock, nfds, fds[MAX_FDS];
    struct cgpu_report *report[CGPU_MAX_GPUS];
};

/* Says hello at `path`, retrying until `until` (ns; 0 = one attempt) while nobody answers in a folder that is there; then
 * maps and checks all that comes, and takes its slots. 0 or -errno; the welcome is filled in as far as it came. Drop it unless it
 * is taken. */
int offer_get(struct offer *offer, const char *path, uint32_t flags, uint64_t until);
void offer_drop(struct offer *offer);
#endif
