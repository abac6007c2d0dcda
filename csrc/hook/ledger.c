/* ledger.c: the map from a device pointer or handle to its charge: 16 shards a kind, each a table under a lock of its own. */
#include "ledger.h"

#include <stddef.h>

#include "client.h"
#include "hook.h"
#include "lock.h"
#include "pool.h"
#include "table.h"

#define SHARDS (1 << TABLE_SHARD_BITS)

struct shard {
    _Alignas(64) struct hook_lock lock; /* a cache line each: threads on different shards do not meet */
    struct table table;
};

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

void ledger_put(enum ledger_kind kind, uint64_t key, const struct ledger_entry *entry)
{
    struct shard *shard = shard_of(kind, key);
    table_prefetch(&shard->table, key);
    struct table_entry old, new = {key, pack(kind, entry)};
    hook_lock_take(&shard->lock);
    bool done = table_put(&shard->table, &new, &old);
    hook_lock_drop(&shard->lock);
    if (done && __builtin_expect(old.value != 0, 0))
        replaced(kind, old.value);
    if (!done) /* its charge stays until this process ends: too much counted rather than too little */
        hook_log("error", "event=ledger-full bytes=%llu: no memory to remember an allocation",
                 (unsigned long long)entry->bytes);
}

bool ledger_take(enum ledger_kind kind, uint64_t key, struct ledger_entry *entry)
{
    struct shard *shard = shard_of(kind, key);
    struct table_entry found;
    table_prefetch(&shard->table, key);
    hook_lock_take(&shard->lock);
    bool known = table_take(&shard->table, key, &found);
    hook_lock_drop(&shard->lock);
    if (known)
        *entry = unpack(kind, found.value);
    return known;
}

bool ledger_find(enum ledger_kind kind, uint64_t key, struct ledger_entry *entry)
{
    struct shard *shard = shard_of(kind, key);
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

void ledger_after_fork(void)
{
    for (int kind = 0; kind < LEDGER_KINDS; kind++) {
        struct table *tables[SHARDS];
        for (int i = 0; i < SHARDS; i++) {
            tables[i] = &shards[kind][i].table;
            shards[kind][i].lock = (struct hook_lock){0};
        }
        table_arena_free(&arenas[kind], tables, SHARDS);
    }
    for (uint32_t i = 1; i < owner_count; i++)
        owners[i] = NULL;
    owners_lock = (struct hook_lock){0};
}
