/* ledger.h: what this process holds of the instance's quota. charge/refund are exact and O(1).
 *
 * The total of an instance on one GPU lives in its report page under a robust mutex (see cgpu_abi.h, account.c); the map from
 * device pointer to size is this process's own, sharded (ledger.c). gpu: index into the instance's GPUs (hook_gpus()). After
 * fork() the child holds nothing. */
#ifndef CGPU_LEDGER_H
#define CGPU_LEDGER_H
#include <stdbool.h>
#include <stdint.h>

/* What a pointer or handle was charged for. Keys of different kinds never collide. The last two are notes of any
 * value below 2^43: nothing is ever refunded for them. */
enum ledger_kind { LEDGER_POINTER, LEDGER_ARRAY, LEDGER_POOL, LEDGER_GRAPH, LEDGER_KINDS };

/* true: `bytes` are charged. false: they do not fit in what is left of the quota, nothing changed, slot.mem_refused rose. */
bool ledger_charge(int gpu, uint64_t bytes);
/* The same, but a refusal is not counted: the caller has something left to try. */
bool ledger_try(int gpu, uint64_t bytes);
/* Counts a refusal. */
void ledger_refused(int gpu);
/* Charges whether it fits or not: the device has it already. false: the mutex could not be had. */
bool ledger_force(int gpu, uint64_t bytes);
void ledger_refund(int gpu, uint64_t bytes);

/* What is remembered of a key. `bytes`: in LEDGER_UNITs, which is what devices round to. */
#define LEDGER_UNIT 512ull
struct ledger_entry {
    int gpu;
    bool pooled;       /* a pool's block: the pool is charged (pool.c), not the block */
    uint64_t bytes;
    const void *owner; /* the context it dies with, or the pool, or NULL: then only ledger_take forgets it */
};
void ledger_put(enum ledger_kind kind, uint64_t key, const struct ledger_entry *entry);
bool ledger_take(enum ledger_kind kind, uint64_t key, struct ledger_entry *entry); /* forgets; false: unknown */
bool ledger_find(enum ledger_kind kind, uint64_t key, struct ledger_entry *entry);

/* A free, around the driver's call. The entry goes after it: what the driver refuses was never forgotten, and of several
 * threads that free one address the one that the driver let through has it. What is unknown (NULL, foreign, freed twice) is left
 * to the driver:
 *     struct release release = ledger_releasing(LEDGER_POINTER, ptr);
 *     CUresult result = REAL(...)(ptr);
 *     ledger_released(release, LEDGER_POINTER, ptr, result == CUDA_SUCCESS);
 */
struct release {
    struct ledger_flight *flight; /* ledger.c; NULL: `taken` is the entry, 0 none */
    uint64_t taken;
};
struct release ledger_releasing(enum ledger_kind kind, uint64_t key);
void ledger_released(struct release release, enum ledger_kind kind, uint64_t key, bool freed);

/* An owner died: refunds all that was put with it, but for blocks of a pool. */
void ledger_drop_owner(const void *owner);
/* What was put with owner `from` counts as put with `to`, which nothing was put with yet. O(1); the drop is O(live blocks). */
void ledger_retag_owner(const void *from, const void *to);

struct ledger_view { uint64_t limit, used, total; }; /* used: whole instance, with ctl.mem_other; never above limit+overshoot */
struct ledger_view ledger_view(int gpu);

/* In the child of a fork(). */
void ledger_after_fork(void);
#endif
