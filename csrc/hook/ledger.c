/* ledger.c: the map from a device pointer or handle to its charge: 16 shards a kind, each a table under a lock of its own.
 *
 * With many blocks live, what an operation costs is its wait for memory. So a free asks for the place in the table before the
 * driver is called, and looks there after it. */
#include "ledger.h"

#include <stddef.h>

#include "client.h"
#include "hook.h"
#include "instance.h"
#include "lock.h"
#include "pool.h"
#include "table.h"

#define SHARDS (1 << TABLE_SHARD_BITS)

struct shard { /* a cache line each: threads on different shards do not meet */
    _Alignas(64) struct hook_lock lock;
    struct table table;
};
_Static_assert(sizeof(struct shard) == 64, "a cache line");

static struct shard shards[LEDGER_KINDS][SHARDS];
static struct table_arena arenas[LEDGER_KINDS];

__attribute__((constructor)) static void share_arenas(void)
{
    for (int kind = 0; kind < LEDGER_KINDS; kind++)
        for (int i = 0; i < SHARDS; i++) {
            shards[kind][i].table.arena = &arenas[kind];
            shards[kind][i].table.shard = i;
        }
}

static struct shard *shard_of(enum ledger_kind kind, uint64_t key)
{
    return &shards[kind][table_hash(key) >> (64 - TABLE_SHARD_BITS)];
}

/* ---- owners by number ----
 *
 * An entry has 11 bits for its owner. Numbers are few and found by looking at all of them; 0 is no owner. One that ends is
 * renamed, in one place, and its number used again once nothing has it. */
#define OWNERS 2048
static const void *owners[OWNERS]; /* [0] unused; NULL: free */
static uint32_t owner_count = 1;   /* those after it were never used */
static struct hook_lock owners_lock; /* of writing */

static uint32_t number_of(const void *owner)
{
    for (uint32_t i = 1; i < load_acquire(&owner_count); i++)
        if (load_relaxed(&owners[i]) == owner)
            return i;
    return 0;
}

static uint32_t new_number_of(const void *owner)
{
    hook_lock_take(&owners_lock);
    uint32_t number = number_of(owner);
    if (!number)
        number = number_of(NULL);
    if (!number && owner_count < OWNERS)
        number = owner_count;
    if (number) {
        store_relaxed(&owners[number], owner);
        if (number == owner_count)
            store_release(&owner_count, number + 1);
    } else {
        hook_log("warning", "event=ledger-owners: more than %d contexts: memory counts until it is freed", OWNERS - 1);
    }
    hook_lock_drop(&owners_lock);
    return number;
}

void ledger_retag_owner(const void *from, const void *to)
{
    hook_lock_take(&owners_lock);
    /* it may have two: a thread that allocated while it was named otherwise, and then it was named back */
    for (uint32_t number; from && (number = number_of(from)) != 0;)
        store_relaxed(&owners[number], to);
    hook_lock_drop(&owners_lock);
}

/* ---- entries ---- */

/* value: gpu << 44 | 1 << 43 | owner << 32 | pooled << 31 | units; of a note: gpu << 44 | 1 << 43 | bytes. It is never 0. */
#define UNIT LEDGER_UNIT
#define GPU_SHIFT 44
#define OWNER_SHIFT 32
#define THERE (1ull << 43)
#define POOLED (1ull << 31)
#define MOST_UNITS (POOLED - 1) /* a TiB: no card has that */
_Static_assert(CGPU_MAX_GPUS <= 16 && OWNERS <= 1 << 11, "room in an entry");

static bool is_note(enum ledger_kind kind) { return kind >= LEDGER_POOL; }

static uint64_t pack(enum ledger_kind kind, const struct ledger_entry *entry)
{
    uint64_t base = (uint64_t)entry->gpu << GPU_SHIFT | THERE, units = entry->bytes / UNIT;
    if (is_note(kind))
        return base | (entry->bytes & (THERE - 1));
    uint32_t number = entry->owner ? number_of(entry->owner) : 0;
    if (entry->owner && !number)
        number = new_number_of(entry->owner);
    return base | (uint64_t)number << OWNER_SHIFT | (entry->pooled ? POOLED : 0) | (units < MOST_UNITS ? units : MOST_UNITS);
}

static uint32_t packed_owner(uint64_t value) { return value >> OWNER_SHIFT & 0x7ff; }
static int packed_gpu(uint64_t value) { return (int)(value >> GPU_SHIFT & 15); }
static uint64_t packed_bytes(enum ledger_kind kind, uint64_t value)
{
    return is_note(kind) ? value & (THERE - 1) : (value & MOST_UNITS) * UNIT;
}

static struct ledger_entry unpack(enum ledger_kind kind, uint64_t value)
{
    uint32_t number = is_note(kind) ? 0 : packed_owner(value);
    return (struct ledger_entry){packed_gpu(value), !is_note(kind) && (value & POOLED), packed_bytes(kind, value),
                                 number ? load_relaxed(&owners[number]) : NULL};
}

/* The driver hands this key out anew: its former owner went unseen. */
static void replaced(enum ledger_kind kind, uint64_t value)
{
    struct ledger_entry entry = unpack(kind, value);
    if (entry.pooled)
        pool_lost(entry.owner, entry.bytes);
    else if (!is_note(kind))
        ledger_refund(entry.gpu, entry.bytes);
}

/* ---- frees under way ----
 *
 * Between the driver's freeing and the taking of the entry, another thread may be given the same address and put it. It finds
 * the old entry then, and leaves it with the call that is under way for that address. */
#define FLIGHTS 256 /* a kind; beyond them a free takes its entry before the driver is asked */
struct ledger_flight {
    _Alignas(64) uint64_t key; /* 0: none */
    uint64_t value;            /* 0, or the entry, which is no longer in the table. The shard's lock */
};
static struct ledger_flight flights[LEDGER_POOL][FLIGHTS]; /* notes are not freed */
static uint32_t threads;         /* that have freed */
static CGPU_TLS uint32_t thread; /* its number, from 1: where it looks first */

static struct ledger_flight *take_off(enum ledger_kind kind, uint64_t key)
{
    if (__builtin_expect(!thread, 0))
        thread = __atomic_add_fetch(&threads, 1, __ATOMIC_RELAXED);
    for (uint32_t i = 0; i < FLIGHTS; i++) {
        struct ledger_flight *flight = &flights[kind][(thread + i) % FLIGHTS];
        uint64_t unused = 0;
        if (__atomic_compare_exchange_n(&flight->key, &unused, key, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED))
            return flight;
    }
    return NULL;
}

/* false: its free went unseen. The shard's lock is held. */
static bool hand_over(enum ledger_kind kind, uint64_t key, uint64_t value)
{
    for (uint32_t i = 0; i < FLIGHTS && !is_note(kind); i++)
        if (load_acquire(&flights[kind][i].key) == key && !flights[kind][i].value) {
            flights[kind][i].value = value;
            return true;
        }
    return false;
}

/* ---- putting and taking ---- */

static void put(enum ledger_kind kind, uint64_t key, uint64_t value)
{
    struct shard *shard = shard_of(kind, key);
    uint64_t old;
    hook_lock_take(&shard->lock);
    bool done = table_put(&shard->table, key, value, &old);
    bool lost = __builtin_expect(done && old, 0) && !hand_over(kind, key, old);
    hook_lock_drop(&shard->lock);
    if (lost) /* the driver has handed the address out anew, though its free went unseen */
        replaced(kind, old);
    if (!done) /* its charge stays until this process ends: too much counted rather than too little */
        hook_log("error", "event=ledger-full bytes=%llu: no memory to remember an allocation",
                 (unsigned long long)packed_bytes(kind, value));
}

void ledger_put(enum ledger_kind kind, uint64_t key, const struct ledger_entry *entry)
{
    put(kind, key, pack(kind, entry));
}

static uint64_t take(enum ledger_kind kind, uint64_t key)
{
    struct shard *shard = shard_of(kind, key);
    hook_lock_take(&shard->lock);
    uint64_t value = table_take(&shard->table, key);
    hook_lock_drop(&shard->lock);
    return value;
}

bool ledger_take(enum ledger_kind kind, uint64_t key, struct ledger_entry *entry)
{
    uint64_t value = take(kind, key);
    if (value)
        *entry = unpack(kind, value);
    return value != 0;
}

struct release ledger_releasing(enum ledger_kind kind, uint64_t key)
{
    struct release release = {0};
    if (!key)
        return release;
    table_prefetch(&shard_of(kind, key)->table, key);
    release.flight = take_off(kind, key);
    if (__builtin_expect(!release.flight, 0))
        release.taken = take(kind, key);
    return release;
}

/* The call has come back: its entry, if it is to go, or if another was put at its address. */
static uint64_t land(struct ledger_flight *flight, enum ledger_kind kind, uint64_t key, bool freed)
{
    struct shard *shard = shard_of(kind, key);
    hook_lock_take(&shard->lock);
    uint64_t value = flight->value;
    flight->value = 0;
    if (freed && !value)
        value = table_take(&shard->table, key);
    store_release(&flight->key, 0);
    hook_lock_drop(&shard->lock);
    return value;
}

void ledger_released(struct release release, enum ledger_kind kind, uint64_t key, bool freed)
{
    uint64_t value = __builtin_expect(release.flight != NULL, 1) ? land(release.flight, kind, key, freed) : release.taken;
    if (__builtin_expect(!value, 0))
        return;
    if (__builtin_expect(freed && !(value & POOLED), 1)) {
        ledger_refund(packed_gpu(value), packed_bytes(kind, value));
    } else if (!freed && !release.flight) {
        put(kind, key, value);
    } else if (freed && value & POOLED) {
        struct ledger_entry entry = unpack(kind, value);
        pool_freed(&entry, key);
    } else {
        replaced(kind, value); /* or refused, and yet handed out anew */
    }
}

bool ledger_find(enum ledger_kind kind, uint64_t key, struct ledger_entry *entry)
{
    struct shard *shard = shard_of(kind, key);
    hook_lock_take(&shard->lock);
    uint64_t value = table_find(&shard->table, key);
    hook_lock_drop(&shard->lock);
    if (value)
        *entry = unpack(kind, value);
    return value != 0;
}

/* Removes what has this owner from one table and adds up its bytes a GPU. */
static void drop_from(enum ledger_kind kind, struct table *table, uint32_t number, uint64_t bytes[CGPU_MAX_GPUS])
{
    uint64_t key, value;
    for (uint64_t place = 0; table_next(table, &place, &key, &value);) {
        if (packed_owner(value) != number)
            continue;
        if (!(value & POOLED))
            bytes[packed_gpu(value)] += packed_bytes(kind, value);
        table_take(table, key);
    }
}

static void drop_number(uint32_t number)
{
    uint64_t bytes[CGPU_MAX_GPUS] = {0};
    for (enum ledger_kind kind = 0; !is_note(kind); kind++)
        for (int i = 0; i < SHARDS; i++) {
            struct shard *shard = &shards[kind][i];
            hook_lock_take(&shard->lock);
            drop_from(kind, &shard->table, number, bytes);
            hook_lock_drop(&shard->lock);
        }
    hook_lock_take(&owners_lock);
    store_relaxed(&owners[number], NULL);
    hook_lock_drop(&owners_lock);
    for (int gpu = 0; gpu < CGPU_MAX_GPUS; gpu++)
        ledger_refund(gpu, bytes[gpu]);
}

void ledger_drop_owner(const void *owner)
{
    for (uint32_t number; owner && (number = number_of(owner)) != 0;)
        drop_number(number);
}

void ledger_after_fork(void)
{
    for (int kind = 0; kind < LEDGER_KINDS; kind++) {
        struct table *tables[SHARDS];
        for (int i = 0; i < SHARDS; i++) {
            tables[i] = &shards[kind][i].table;
            shards[kind][i].lock = (struct hook_lock){0};
        }
        table_arena_free(&arenas[kind], tables, SHARDS);
        for (int i = 0; i < FLIGHTS && !is_note(kind); i++)
            flights[kind][i] = (struct ledger_flight){0};
    }
    for (uint32_t i = 1; i < owner_count; i++)
        owners[i] = NULL;
    owners_lock = (struct hook_lock){0};
}
