/* ledger.h: what this process holds of the instance's quota. charge/refund are exact and O(1).
 *
 * The total of an instance on one GPU lives in its report page under a robust mutex (see cgpu_abi.h, account.c); the map from
 * device pointer to size is this process's own, sharded (ledger.c). gpu: index into the instance's GPUs (hook_gpus()). After
 * fork() the child holds nothing. */
#ifndef CGPU_LEDGER_H
#define CGPU_LEDGER_H
#include <stdbool.h>
#include <stdint.h>

/* What a pointer or handle was charged for. Keys of different kinds never collide. LEDGER_OTHER: a note of any value below
 * 2^43, no charge; nothing is ever refunded for it. */
enum ledger_kind { LEDGER_POINTER, LEDGER_HANDLE, LEDGER_ARRAY, LEDGER_MAPPING, LEDGER_OTHER, LEDGER_KINDS };

/* true: `bytes` are charged. false: they do not fit in what is left of the quota, nothing changed, slot.mem_refused rose. */
bool ledger_charge(int gpu, uint64_t bytes);
void ledger_refund(int gpu, uint64_t bytes);

/* Remember / forget which charge belongs to a key. ledger_take gives the bytes and the GPU, false when unknown. `bytes`: in
 * LEDGER_UNITs, which is what devices round to. `context` may be NULL: then only ledger_take forgets it. */
#define LEDGER_UNIT 512ull
void ledger_put(enum ledger_kind kind, uint64_t key, int gpu, uint64_t bytes, const void *context);
bool ledger_take(enum ledger_kind kind, uint64_t key, int *gpu, uint64_t *bytes);
/* ledger_take that also tells the context, for a caller who may have to put it back. */
bool ledger_take_from(enum ledger_kind kind, uint64_t key, int *gpu, uint64_t *bytes, const void **context);
/* As ledger_take_from, but leaves it there. */
bool ledger_find(enum ledger_kind kind, uint64_t key, int *gpu, uint64_t *bytes, const void **context);
/* A context died: refunds all that was put with it. */
void ledger_drop_context(const void *context);
/* What was put with context `from` counts as put with `to`, which nothing was put with yet. O(1); the drop is O(live blocks). */
void ledger_retag_context(const void *from, const void *to);

struct ledger_view { uint64_t limit, used, total; }; /* used: whole instance, with ctl.mem_other; never above limit+overshoot */
struct ledger_view ledger_view(int gpu);

/* In the child of a fork(). */
void ledger_after_fork(void);
#endif
