/* pools.c: what each stream-ordered pool of this process has on the card, and charging it.
 *
 * A pool is charged what the driver says it reserves (CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), which covers what is freed and
 * kept for reuse. `charged` is never below that, at no moment:
 *   before an allocation   what the blocks in use will need beyond `charged` is charged in advance
 *   after it               the driver is asked, and the difference charged or given back. Not asked where the block lies in one
 *                          that was freed since the last answer: nothing can have grown then (`kept`, a small cache by address)
 *   after a free           nothing: the pool keeps it
 *   where it may shrink    a synchronisation after a free, trimming, destroying, before a refusal: asked
 * A growth that could not be foreseen, of a fragmented pool, is charged right after the call; if it does not fit, the block is
 * freed again and the call fails.
 *
 * The driver is asked under the pool's lock, so that answers are taken in their order. A handle that may have died (the pool
 * was destroyed with blocks in use, its device was reset) is never asked: a destroyed pool stays charged until its last block is
 * freed and the device has been synchronised. */
#include <errno.h>
#include <string.h>
#include <sys/mman.h>

#include "client.h"
#include "hook.h"
#include "lock.h"
#include "memory.h"
#include "pool.h"
#include "stall.h"
#include "streams.h"
#include "table.h"

CU_NEED(CUresult, cuMemPoolGetAttribute, (CUmemoryPool pool, CUmemPool_attribute attribute, void *value));
CU_NEED(CUresult, cuMemPoolTrimTo, (CUmemoryPool pool, size_t keep));
CU_NEED(CUresult, cuDeviceGetMemPool, (CUmemoryPool *pool, CUdevice device));
CU_NEED(CUresult, cuDeviceGetDefaultMemPool, (CUmemoryPool *pool, CUdevice device));
CU_NEED(CUresult, cuCtxSynchronize, (void));

#define POOLS 1024
#define KEPT 512       /* places of a pool's cache */
#define DEVICES 64
#define FIRST_GRANULE (2ull << 20)
#define MOST_GRANULE (64ull << 20)
#define UNCHARGED 0    /* a note of a handle: this, or the pool's number + 1 */

enum life {
    LIFE_NONE,   /* a free place */
    LIFE_ASKED,  /* its handle is good */
    LIFE_UNSURE, /* its device was reset: good again once it gives a block */
    LIFE_ENDED   /* destroyed, with blocks in use */
};

struct kept {
    uint64_t ptr, bytes;
};

struct pool {
    struct hook_lock lock; /* of all below; held around the driver's answer about this pool */
    enum life life;
    CUmemoryPool handle;
    int gpu;
    CUdevice device;
    uint64_t charged;      /* `flying` is in it */
    uint64_t flying;       /* charged in advance for calls under way */
    uint64_t used;         /* by blocks that have not been freed */
    uint64_t reserved;     /* by the last answer */
    uint64_t granule;      /* it grows by multiples of, as seen so far */
    uint64_t threshold;    /* a synchronisation leaves it so much */
    struct kept *kept;     /* NULL: not needed yet */
};

bool pools_unsettled;

static struct pool pools[POOLS];
static unsigned pool_count; /* places ever used */
static struct pool *current[CGPU_MAX_GPUS];
static struct hook_lock finding; /* of taking and leaving places, and of `current` */

int pool_gpu(const struct pool *pool) { return pool->gpu; }

/* ---- what is known to be reserved, by address ---- */

static struct kept *kept_place(const struct pool *pool, uint64_t ptr)
{
    return &pool->kept[table_hash(ptr) >> 55];
}

static void keep(struct pool *pool, uint64_t ptr, uint64_t bytes)
{
    if (!pool->kept) {
        int saved = errno;
        void *memory = mmap(NULL, KEPT * sizeof *pool->kept, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        errno = saved;
        if (memory == MAP_FAILED)
            return;
        pool->kept = memory;
    }
    *kept_place(pool, ptr) = (struct kept){ptr, bytes};
}

/* Whether the block lies in one that was kept; it is not any more. */
static bool reused(struct pool *pool, uint64_t ptr, uint64_t bytes)
{
    struct kept *kept = pool->kept ? kept_place(pool, ptr) : NULL;
    if (!kept || kept->ptr != ptr)
        return false;
    kept->ptr = 0;
    return bytes <= kept->bytes;
}

static void forget_kept(struct pool *pool)
{
    if (pool->kept)
        memset(pool->kept, 0, KEPT * sizeof *pool->kept);
}

/* ---- the charge ---- */

static uint64_t least(uint64_t a, uint64_t b) { return a < b ? a : b; }

static void give_back(struct pool *pool, uint64_t target)
{
    if (pool->charged > target) {
        ledger_refund(pool->gpu, pool->charged - target);
        pool->charged = target;
    }
}

/* What it holds, to the best of our knowledge. Lock held. */
static uint64_t ask(struct pool *pool)
{
    uint64_t reserved = 0;
    if (pool->life == LIFE_ENDED) /* it keeps what it has until the last block is freed, and that is done */
        return pool->charged - pool->flying;
    if (pool->life != LIFE_ASKED || !have(cuMemPoolGetAttribute) ||
        REAL(cuMemPoolGetAttribute)(pool->handle, CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT, &reserved) != CUDA_SUCCESS)
        return pool->used;
    if (reserved) /* it is a multiple of the granule: the largest power of two of which all answers were */
        pool->granule = least(least(pool->granule, reserved & -reserved), MOST_GRANULE);
    if (reserved < pool->reserved)
        forget_kept(pool);
    pool->reserved = reserved;
    pool->used = least(pool->used, reserved);
    return reserved;
}

/* Brings the charge to between what the pool has and that with all that calls under way may add. false: `force` was not set,
 * and it is charged less than it has. Lock held. */
static bool settle(struct pool *pool, bool force)
{
    uint64_t has = ask(pool);
    if (pool->charged < has) {
        uint64_t more = has - pool->charged;
        if (!(force ? ledger_force(pool->gpu, more) : ledger_try(pool->gpu, more)))
            return false;
        pool->charged = has;
    }
    give_back(pool, has + pool->flying);
    return true;
}

/* Whether a synchronisation could make it smaller. */
static bool may_shrink(const struct pool *pool)
{
    if (pool->life == LIFE_ENDED)
        return pool->used == 0;
    return pool->life == LIFE_ASKED && pool->charged > pool->threshold &&
           pool->charged - pool->flying >= pool->used + pool->granule;
}

/* ---- finding ---- */

static CUdevice device_of(int gpu)
{
    for (CUdevice device = 0; device < DEVICES; device++)
        if (hook_gpu_of_device(device) == gpu)
            return device;
    return -1;
}

static void note(CUmemoryPool handle, uint64_t what)
{
    struct ledger_entry entry = {.bytes = what};
    ledger_put(LEDGER_POOL, (uint64_t)(uintptr_t)handle, &entry);
}

static bool noted(CUmemoryPool handle, struct pool **pool)
{
    struct ledger_entry entry;
    if (!ledger_find(LEDGER_POOL, (uint64_t)(uintptr_t)handle, &entry))
        return false;
    *pool = entry.bytes == UNCHARGED ? NULL : &pools[entry.bytes - 1];
    return true;
}

/* A place for it, or the one it has. NULL: there is none left. `finding` held. */
static struct pool *remember(CUmemoryPool handle, int gpu, CUdevice device)
{
    struct pool *pool = NULL;
    if (noted(handle, &pool))
        return pool;
    for (unsigned i = 0; i < pool_count && !pool; i++)
        if (pools[i].life == LIFE_NONE)
            pool = &pools[i];
    if (!pool && pool_count < POOLS)
        pool = &pools[pool_count];
    if (!pool)
        return NULL;
    struct kept *kept = pool->kept;
    *pool = (struct pool){.life = LIFE_ASKED, .handle = handle, .gpu = gpu, .device = device, .granule = FIRST_GRANULE,
                          .kept = kept};
    if (have(cuMemPoolGetAttribute))
        REAL(cuMemPoolGetAttribute)(handle, CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, &pool->threshold);
    note(handle, (uint64_t)(pool - pools) + 1);
    if (pool == &pools[pool_count])
        store_release(&pool_count, pool_count + 1);
    return pool;
}

struct pool *pool_current(int gpu)
{
    struct pool *pool = load_acquire(&current[gpu]);
    CUmemoryPool handle;
    if (__builtin_expect(pool != NULL, 1) || !have(cuDeviceGetMemPool))
        return pool;
    CUdevice device = device_of(gpu);
    hook_lock_take(&finding);
    if (device >= 0 && REAL(cuDeviceGetMemPool)(&handle, device) == CUDA_SUCCESS) {
        pool = remember(handle, gpu, device);
        store_release(&current[gpu], pool);
    }
    hook_lock_drop(&finding);
    return pool;
}

void pool_current_changed(void)
{
    hook_lock_take(&finding);
    for (int gpu = 0; gpu < CGPU_MAX_GPUS; gpu++)
        store_relaxed(&current[gpu], NULL);
    hook_lock_drop(&finding);
}

/* The GPU whose default or current pool this is, or -1. */
static int gpu_of_pool(CUmemoryPool handle)
{
    for (int gpu = 0; gpu < hook_gpus(); gpu++) {
        CUmemoryPool its;
        CUdevice device = device_of(gpu);
        if (device >= 0 && have(cuDeviceGetDefaultMemPool) && have(cuDeviceGetMemPool) &&
            ((REAL(cuDeviceGetDefaultMemPool)(&its, device) == CUDA_SUCCESS && its == handle) ||
             (REAL(cuDeviceGetMemPool)(&its, device) == CUDA_SUCCESS && its == handle)))
            return gpu;
    }
    return -1;
}

struct pool *pool_of_handle(CUmemoryPool handle, int gpu, bool *charged)
{
    struct pool *pool = NULL;
    if (noted(handle, &pool)) {
        *charged = pool != NULL;
        return pool;
    }
    int owner = gpu_of_pool(handle);
    if (owner >= 0)
        gpu = owner;
    *charged = gpu >= 0;
    if (gpu < 0 || !have(cuMemPoolGetAttribute))
        return NULL;
    hook_lock_take(&finding);
    pool = remember(handle, gpu, device_of(gpu));
    hook_lock_drop(&finding);
    return pool;
}

void pool_made(CUmemoryPool handle, const CUmemLocation *location)
{
    pool_destroyed(handle); /* one of this handle ended with its device, unseen */
    pool_note(handle, location);
}

void pool_note(CUmemoryPool handle, const CUmemLocation *location)
{
    int gpu = location && location->type == CU_MEM_LOCATION_TYPE_DEVICE ? hook_gpu_of_device(location->id) : -1;
    hook_lock_take(&finding);
    if (gpu < 0)
        note(handle, UNCHARGED);
    else if (have(cuMemPoolGetAttribute))
        remember(handle, gpu, location->id);
    hook_lock_drop(&finding);
}

/* ---- one allocation ---- */

bool pool_claim(struct pool_claim *claim, struct pool *pool, uint64_t bytes)
{
    *claim = (struct pool_claim){.pool = pool, .bytes = bytes};
    hook_lock_take(&pool->lock);
    uint64_t will = pool->used + bytes < bytes ? UINT64_MAX : pool->used + bytes;
    bool fits = true;
    if (will > pool->charged) {
        claim->advance = round_up(will - pool->charged, pool->granule);
        fits = ledger_try(pool->gpu, claim->advance);
        if (!fits) { /* the pool may find a part of it between its blocks */
            claim->advance = will - pool->charged;
            fits = ledger_try(pool->gpu, claim->advance);
        }
    }
    if (fits) {
        pool->used = will;
        pool->charged += claim->advance;
        pool->flying += claim->advance;
    }
    hook_lock_drop(&pool->lock);
    return fits;
}

bool pool_claimed(struct pool_claim *claim, CUresult result, CUdeviceptr ptr)
{
    struct pool *pool = claim->pool;
    hook_lock_take(&pool->lock);
    pool->flying -= claim->advance;
    if (result != CUDA_SUCCESS) {
        pool->used -= least(claim->bytes, pool->used);
        settle(pool, true);
        hook_lock_drop(&pool->lock);
        return true;
    }
    if (pool->life == LIFE_UNSURE)
        pool->life = LIFE_ASKED;
    bool known = reused(pool, ptr, claim->bytes) && claim->advance == 0;
    bool stands = known || settle(pool, false);
    hook_lock_drop(&pool->lock);
    if (stands) {
        struct ledger_entry entry = {.gpu = pool->gpu, .pooled = true, .bytes = claim->bytes, .owner = pool};
        ledger_put(LEDGER_POINTER, ptr, &entry);
    }
    return stands;
}

void pool_unclaim(struct pool_claim *claim)
{
    struct pool *pool = claim->pool;
    hook_lock_take(&pool->lock);
    pool->used -= least(claim->bytes, pool->used);
    settle(pool, true); /* the pool has it, now or until it is trimmed */
    if (may_shrink(pool))
        store_relaxed(&pools_unsettled, true);
    hook_lock_drop(&pool->lock);
}

/* ---- frees ---- */

/* An ended pool has no block any more, and frees that were under way are done. Lock held. */
static void end(struct pool *pool)
{
    if (pool->life != LIFE_ENDED || pool->used || pool->flying)
        return;
    give_back(pool, 0);
    forget_kept(pool);
    ledger_drop_owner(pool);
    pool->life = LIFE_NONE;
}

void pool_freed(const struct ledger_entry *entry, uint64_t ptr)
{
    if (!entry->owner) /* no number was left for its pool: the driver's next answer says it */
        return;
    struct pool *pool = &pools[(const struct pool *)entry->owner - pools];
    hook_lock_take(&pool->lock);
    pool->used -= least(entry->bytes, pool->used);
    keep(pool, ptr, entry->bytes);
    if (may_shrink(pool))
        store_relaxed(&pools_unsettled, true);
    hook_lock_drop(&pool->lock);
}

void pool_lost(const void *owner, uint64_t bytes)
{
    if (!owner)
        return;
    struct pool *pool = &pools[(const struct pool *)owner - pools];
    hook_lock_take(&pool->lock);
    pool->used -= least(bytes, pool->used);
    if (may_shrink(pool))
        store_relaxed(&pools_unsettled, true);
    hook_lock_drop(&pool->lock);
}

/* ---- settling ---- */

void pools_settle_unsettled(bool whole)
{
    bool again = false;
    store_relaxed(&pools_unsettled, false);
    for (unsigned i = 0; i < load_acquire(&pool_count); i++) {
        struct pool *pool = &pools[i];
        hook_lock_take(&pool->lock);
        if (pool->life == LIFE_ENDED && whole)
            end(pool);
        else if (may_shrink(pool))
            settle(pool, true);
        again |= may_shrink(pool);
        hook_lock_drop(&pool->lock);
    }
    if (again)
        store_relaxed(&pools_unsettled, true);
}

void pool_settle_handle(CUmemoryPool handle)
{
    struct pool *pool = NULL;
    if (!noted(handle, &pool) || !pool)
        return;
    hook_lock_take(&pool->lock);
    settle(pool, true);
    hook_lock_drop(&pool->lock);
}

void pool_threshold(CUmemoryPool handle, uint64_t bytes)
{
    struct pool *pool = NULL;
    if (gpu_of_pool(handle) >= 0) /* a default pool may be told before it was ever used */
        pool_of_handle(handle, -1, &(bool){false});
    if (!noted(handle, &pool) || !pool)
        return;
    hook_lock_take(&pool->lock);
    pool->threshold = bytes;
    if (may_shrink(pool))
        store_relaxed(&pools_unsettled, true);
    hook_lock_drop(&pool->lock);
}

struct pool *pool_destroying(CUmemoryPool handle)
{
    struct pool *pool = NULL;
    if (!noted(handle, &pool) || !pool)
        return NULL;
    hook_lock_take(&pool->lock);
    CUmemoryPool its;
    bool alive = pool->life == LIFE_ASKED;
    if (alive) {
        if (have(cuMemPoolTrimTo) && have(cuDeviceGetDefaultMemPool) && /* that one will not be destroyed */
            REAL(cuDeviceGetDefaultMemPool)(&its, pool->device) == CUDA_SUCCESS && its != handle)
            REAL(cuMemPoolTrimTo)(handle, 0);
        settle(pool, true);
        pool->life = LIFE_ENDED; /* from now on nobody asks */
    }
    hook_lock_drop(&pool->lock);
    return alive ? pool : NULL;
}

void pool_not_destroyed(struct pool *pool)
{
    hook_lock_take(&pool->lock);
    pool->life = LIFE_ASKED;
    hook_lock_drop(&pool->lock);
}

void pool_destroyed(CUmemoryPool handle)
{
    struct pool *pool = NULL;
    struct ledger_entry entry;
    if (!noted(handle, &pool))
        return;
    ledger_take(LEDGER_POOL, (uint64_t)(uintptr_t)handle, &entry);
    pool_current_changed();
    if (!pool)
        return;
    hook_lock_take(&pool->lock);
    pool->life = LIFE_ENDED;
    if (pool->charged == 0)
        end(pool);
    else if (may_shrink(pool))
        store_relaxed(&pools_unsettled, true);
    hook_lock_drop(&pool->lock);
}

void pools_refresh(int gpu)
{
    for (unsigned i = 0; i < load_acquire(&pool_count); i++) {
        struct pool *pool = &pools[i];
        hook_lock_take(&pool->lock);
        if (pool->gpu == gpu && pool->life == LIFE_ASKED)
            settle(pool, true);
        hook_lock_drop(&pool->lock);
    }
    graph_memory_refresh(gpu);
}

/* ---- before a refusal ---- */

/* true: something was given back. *waits: more would be, once the frees under way are done. */
static bool trim(int gpu, bool *waits)
{
    bool gave = false;
    int mode = capture_relax();
    *waits = false;
    for (unsigned i = 0; i < load_acquire(&pool_count); i++) {
        struct pool *pool = &pools[i];
        hook_lock_take(&pool->lock);
        if (pool->gpu == gpu && pool->life == LIFE_ASKED && pool->charged > 0) {
            uint64_t before = pool->charged;
            if (have(cuMemPoolTrimTo))
                REAL(cuMemPoolTrimTo)(pool->handle, 0);
            settle(pool, true);
            gave |= pool->charged < before;
            *waits |= pool->charged - pool->flying > pool->used;
        }
        *waits |= pool->gpu == gpu && pool->life == LIFE_ENDED && pool->used == 0;
        hook_lock_drop(&pool->lock);
    }
    capture_restore(mode);
    return gave;
}

bool memory_make_room(int gpu)
{
    bool waits, gave = trim(gpu, &waits);
    gave |= graph_memory_trim(gpu);
    /* never a wait that only a thread of this program could end, which may be this one */
    if (waits && !capture_is_active() && !stall_is_possible() && have(cuCtxSynchronize)) {
        REAL(cuCtxSynchronize)();
        pools_synced(true);
        trim(gpu, &waits);
        gave = true; /* or so it seems: worth another try */
    }
    return gave;
}

bool memory_charge_again(int gpu, uint64_t bytes)
{
    if (memory_make_room(gpu))
        return ledger_charge(gpu, bytes);
    ledger_refused(gpu);
    return false;
}

/* ---- ends ---- */

/* Pools belong to a device. Whether those that a program made outlive a reset is not documented: their memory does not, and
 * their handles are not asked until one gives a block again. */
static void reset(struct pool *pool, CUdevice device, CUmemoryPool device_default)
{
    hook_lock_take(&pool->lock);
    if (pool->life != LIFE_NONE && pool->device == device) {
        ledger_drop_owner(pool);
        if (pool->handle != device_default && pool->life == LIFE_ASKED)
            pool->life = LIFE_UNSURE;
        pool->used = 0;
        forget_kept(pool);
        if (pool->life != LIFE_ENDED)
            settle(pool, true);
        end(pool);
    }
    hook_lock_drop(&pool->lock);
}

void pools_context_ended(CUdevice device)
{
    CUmemoryPool handle = NULL;
    if (load_acquire(&pool_count) && device >= 0 && have(cuDeviceGetDefaultMemPool) &&
        REAL(cuDeviceGetDefaultMemPool)(&handle, device) != CUDA_SUCCESS)
        handle = NULL;
    pool_current_changed();
    for (unsigned i = 0; i < load_acquire(&pool_count); i++) {
        struct pool *pool = &pools[i];
        if (device >= 0) {
            reset(pool, device, handle);
        } else {
            hook_lock_take(&pool->lock);
            if (pool->life == LIFE_ASKED)
                settle(pool, true);
            hook_lock_drop(&pool->lock);
        }
    }
    for (int gpu = 0; gpu < hook_gpus(); gpu++)
        graph_memory_refresh(gpu);
}

void pools_after_fork(void)
{
    for (unsigned i = 0; i < pool_count; i++)
        if (pools[i].kept)
            munmap(pools[i].kept, KEPT * sizeof(struct kept));
    memset(pools, 0, sizeof pools);
    memset(current, 0, sizeof current);
    pool_count = 0;
    pools_unsettled = false;
    finding = (struct hook_lock){0};
}
