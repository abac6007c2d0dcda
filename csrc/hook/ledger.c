/* ledger.c: the map from a device pointer or handle to its charge: 16 shards a kind, each a table under a lock of its own.
 *
 * With many blocks live, what an operation costs is its wait for memory. So the place in the table is asked for ahead: a free
 * does so before the driver is called and looks after it; an allocation's entry waits in its shard until the next one comes. */
#include "ledger.h"

#include <stddef.h>

#include "client.h"
#include "hook.h"
#include "instance.h"
#include "lock.h"
#include "pool.h"
#include "table.h"

#define SHARDS (1 << TABLE_SHARD_BITS)
#define LATE_BITS 10 /* tables larger than that are not in the near caches */

struct shard { /* a cache line each: threads on different shards do not meet */
    _Alignas(64) struct hook_lock lock;
    struct table table;
    struct table_entry late; /* the last that was put, not yet in the table; value 0: none */
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
 * An entry has 15 bits for its owner. Numbers are few and found by looking at all of them; 0 is no owner. One that ends is
 * renamed, in one place, and its number used again once nothing has it. */
#define OWNERS 4096
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
    uint32_t number = from ? number_of(from) : 0;
    if (number)
        store_relaxed(&owners[number], to);
    hook_lock_drop(&owners_lock);
}

/* ---- entries ---- */

/* value: units << 21 | pooled << 20 | owner << 5 | gpu << 1 | 1 */
#define UNIT LEDGER_UNIT
#define UNITS_SHIFT 21
#define POOLED (1ull << 20)
#define MOST_UNITS (UINT64_MAX >> UNITS_SHIFT)
_Static_assert(CGPU_MAX_GPUS <= 16 && OWNERS <= 1 << 15, "room in an entry");

static bool is_note(enum ledger_kind kind) { return kind >= LEDGER_POOL; }

static uint64_t pack(enum ledger_kind kind, const struct ledger_entry *entry)
{
    uint32_t number = entry->owner ? number_of(entry->owner) : 0;
    if (entry->owner && !number)
        number = new_number_of(entry->owner);
    uint64_t units = is_note(kind) ? entry->bytes : entry->bytes / UNIT;
    return (units < MOST_UNITS ? units : MOST_UNITS) << UNITS_SHIFT | (entry->pooled ? POOLED : 0) | (uint64_t)number << 5 |
           (uint64_t)entry->gpu << 1 | 1;
}

static uint32_t packed_owner(uint64_t value) { return value >> 5 & 0x7fff; }
static int packed_gpu(uint64_t value) { return (int)(value >> 1 & 15); }
static uint64_t packed_bytes(enum ledger_kind kind, uint64_t value)
{
    return (value >> UNITS_SHIFT) * (is_note(kind) ? 1 : UNIT);
}

static struct ledger_entry unpack(enum ledger_kind kind, uint64_t value)
{
    uint32_t number = packed_owner(value);
    return (struct ledger_entry){packed_gpu(value), (value & POOLED) != 0, packed_bytes(kind, value),
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

/* *lost: an entry whose address the driver has handed out anew though its free went unseen; 0: none. false: no memory, nothing
 * changed. The shard's lock is held, also for the next two. */
static bool insert(enum ledger_kind kind, struct shard *shard, const struct table_entry *entry, uint64_t *lost)
{
    struct table_entry old;
    if (!table_put(&shard->table, entry, &old))
        return false;
    *lost = __builtin_expect(old.value != 0, 0) && !hand_over(kind, entry->key, old.value) ? old.value : 0;
    return true;
}

static bool insert_late(enum ledger_kind kind, struct shard *shard, uint64_t *lost)
{
    *lost = 0;
    if (!shard->late.value)
        return true;
    if (!insert(kind, shard, &shard->late, lost))
        return false;
    store_relaxed(&shard->late.key, 0);
    shard->late.value = 0;
    return true;
}

static bool put_late(enum ledger_kind kind, struct shard *shard, const struct table_entry *entry, uint64_t *lost)
{
    if (!insert_late(kind, shard, lost))
        return false;
    store_relaxed(&shard->late.key, entry->key);
    shard->late.value = entry->value;
    return true;
}

static void put(enum ledger_kind kind, uint64_t key, uint64_t value)
{
    struct shard *shard = shard_of(kind, key);
    struct table_entry entry = {key, value};
    uint64_t lost = 0;
    table_prefetch(&shard->table, key);
    hook_lock_take(&shard->lock);
    bool done = shard->table.bits > LATE_BITS ? put_late(kind, shard, &entry, &lost) : insert(kind, shard, &entry, &lost);
    hook_lock_drop(&shard->lock);
    if (__builtin_expect(lost != 0, 0))
        replaced(kind, lost);
    if (!done) /* its charge stays until this process ends: too much counted rather than too little */
        hook_log("error", "event=ledger-full bytes=%llu: no memory to remember an allocation",
                 (unsigned long long)packed_bytes(kind, value));
}

/* From now on its entry is in the table, if there is one (but for a table without memory). */
static void no_longer_late(enum ledger_kind kind, struct shard *shard, uint64_t key)
{
    uint64_t lost = 0;
    if (__builtin_expect(load_relaxed(&shard->late.key) != key, 1))
        return;
    hook_lock_take(&shard->lock);
    if (shard->late.key == key)
        insert_late(kind, shard, &lost);
    hook_lock_drop(&shard->lock);
    if (lost)
        replaced(kind, lost);
}

void ledger_put(enum ledger_kind kind, uint64_t key, const struct ledger_entry *entry)
{
    put(kind, key, pack(kind, entry));
}

static uint64_t take(enum ledger_kind kind, uint64_t key)
{
    struct shard *shard = shard_of(kind, key);
    struct table_entry found;
    no_longer_late(kind, shard, key);
    hook_lock_take(&shard->lock);
    bool known = table_take(&shard->table, key, &found);
    hook_lock_drop(&shard->lock);
    return known ? found.value : 0;
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
    struct release release = {.kind = kind, .key = key};
    if (!key)
        return release;
    struct shard *shard = shard_of(kind, key);
    table_prefetch(&shard->table, key);
    no_longer_late(kind, shard, key);
    release.flight = take_off(kind, key);
    if (__builtin_expect(!release.flight, 0))
        release.taken = take(kind, key);
    return release;
}

/* The call has come back: its entry, if it is to go, or if another was put at its address. */
static uint64_t land(const struct release *release, bool freed)
{
    struct shard *shard = shard_of(release->kind, release->key);
    struct table_entry found;
    hook_lock_take(&shard->lock);
    uint64_t value = release->flight->value;
    release->flight->value = 0;
    if (freed && !value) {
        if (table_take(&shard->table, release->key, &found)) {
            value = found.value;
        } else if (shard->late.key == release->key) { /* two have freed it, and it was handed out in between */
            value = shard->late.value;
            store_relaxed(&shard->late.key, 0);
            shard->late.value = 0;
        }
    }
    store_release(&release->flight->key, 0);
    hook_lock_drop(&shard->lock);
    return value;
}

bool ledger_released(const struct release *release, bool freed, struct ledger_entry *entry)
{
    uint64_t value = release->flight ? land(release, freed) : release->taken;
    if (!value)
        return false;
    if (freed)
        *entry = unpack(release->kind, value);
    else if (release->flight)
        replaced(release->kind, value); /* refused, and yet handed out anew */
    else
        put(release->kind, release->key, value);
    return freed;
}

bool ledger_find(enum ledger_kind kind, uint64_t key, struct ledger_entry *entry)
{
    struct shard *shard = shard_of(kind, key);
    no_longer_late(kind, shard, key);
    hook_lock_take(&shard->lock);
    const struct table_entry *found = table_find(&shard->table, key);
    uint64_t value = found ? found->value : 0;
    hook_lock_drop(&shard->lock);
    if (value)
        *entry = unpack(kind, value);
    return value != 0;
}

/* Removes what has this owner from one table and adds up its bytes a GPU. A removal moves later entries forward, also
 * around the end, so places are looked at again until a whole pass finds nothing. */
static void drop_from(enum ledger_kind kind, struct table *table, uint32_t number, uint64_t bytes[CGPU_MAX_GPUS])
{
    for (bool again = table->entries != NULL; again;) {
        again = false;
        for (uint64_t i = 0; i <= table->mask; i++)
            while (table->entries[i].value && packed_owner(table->entries[i].value) == number) {
                if (!(table->entries[i].value & POOLED))
                    bytes[packed_gpu(table->entries[i].value)] += packed_bytes(kind, table->entries[i].value);
                table_remove(table, &table->entries[i]);
                again = true;
            }
    }
}

void ledger_drop_owner(const void *owner)
{
    uint64_t bytes[CGPU_MAX_GPUS] = {0};
    uint32_t number = owner ? number_of(owner) : 0;
    if (!number)
        return;
    for (enum ledger_kind kind = 0; !is_note(kind); kind++)
        for (int i = 0; i < SHARDS; i++) {
            struct shard *shard = &shards[kind][i];
            uint64_t lost = 0;
            hook_lock_take(&shard->lock);
            insert_late(kind, shard, &lost);
            drop_from(kind, &shard->table, number, bytes);
            hook_lock_drop(&shard->lock);
            if (lost)
                replaced(kind, lost);
        }
    hook_lock_take(&owners_lock);
    store_relaxed(&owners[number], NULL);
    hook_lock_drop(&owners_lock);
    for (int gpu = 0; gpu < CGPU_MAX_GPUS; gpu++)
        ledger_refund(gpu, bytes[gpu]);
}

void ledger_after_fork(void)
{
    for (int kind = 0; kind < LEDGER_KINDS; kind++) {
        struct table *tables[SHARDS];
        for (int i = 0; i < SHARDS; i++) {
            tables[i] = &shards[kind][i].table;
            shards[kind][i].lock = (struct hook_lock){0};
            shards[kind][i].late = (struct table_entry){0};
        }
        table_arena_free(&arenas[kind], tables, SHARDS);
        for (int i = 0; i < FLIGHTS && !is_note(kind); i++)
            flights[kind][i] = (struct ledger_flight){0};
    }
    for (uint32_t i = 1; i < owner_count; i++)
        owners[i] = NULL;
    owners_lock = (struct hook_lock){0};
}
