/* account.h: this process's account with the instance's total on each GPU (account.c), behind ledger_charge/refund/view. */
#ifndef CGPU_ACCOUNT_H
#define CGPU_ACCOUNT_H
#include <stdint.h>

/* GPU `gpu` has pages (first join, rejoin, upgrade of an NVML-only join): from now on charge there. Enters what this process
 * already holds, whatever the limit. Repeating it is harmless. */
void account_enter(int gpu);
/* The instance is known but its daemon has not answered: a limit for this process alone until account_enter(). Keeps pages
 * that were entered before. `total`: the card's bytes, 0 = unknown. */
void account_fallback(int gpu, uint64_t limit, uint64_t total);
/* In the child of a fork(): it holds nothing, device memory belongs to the parent's contexts. */
void account_after_fork(void);
#endif
