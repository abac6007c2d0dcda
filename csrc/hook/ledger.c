/* ledger.c: the map from a device pointer or handle to its charge: 16 shards a kind, each a table under a lock of its own. */
#include "ledger.h"

#include <stddef.h>

#include "client.h"
#include "hook.h"
#include "lock.h"
#include "table.h"

#define SHARDS (1 << TABLE_SHARD_BITS)

struct shard {
    _Alignas(64) struct hook_lock lock; /* a cache line each: threads on different shards do not meet */
    struct table table;
};

static struct shard shards[LEDGER_KINDS][SHARDS];

static struct shard *shard_of(enum ledger_kind kind, uint64_t key)
{
    return &shards[kind][table_hash(key) >> (64 - TABLE_SHARD_BITS)];
}

/* ---- contexts by number ----
 *
 * An entry has 16 bits for its context. Numbers are few and found by looking at all of them; 0 is no context. A context that
 * ends is renamed, in one place, and its number used again once nothing has it. */
#define CONTEXTS 1024
static const void *contexts[CONTEXTS]; /* [0] unused; NULL: free */
static uint32_t context_count = 1;     /* those after it were never used */
static struct hook_lock contexts_lock; /* of writing */

static uint32_t number_of(const void *context)
{
    for (uint32_t i = 1; i < load_acquire(&context_count); i++)
        if (load_relaxed(&contexts[i]) == context)
            return i;
    return 0;
}

static uint32_t new_number_of(const void *context)
{
    hook_lock_take(&contexts_lock);
    uint32_t number = number_of(context);
    if (!number)
        number = number_of(NULL);
    if (!number && context_count < CONTEXTS)
        number = context_count;
    if (number) {
        store_relaxed(&contexts[number], context);
        if (number == context_count)
            store_release(&context_count, number + 1);
    } else {
        hook_log("warning", "event=ledger-contexts: more than %d contexts: memory counts until it is freed", CONTEXTS - 1);
    }
    hook_lock_drop(&contexts_lock);
    return number;
}

void ledger_retag_context(const void *from, const void *to)
{
    hook_lock_take(&contexts_lock);
    uint32_t number = from ? number_of(from) : 0;
    if (number)
        store_relaxed(&contexts[number], to);
    hook_lock_drop(&contexts_lock);
}

/* ---- entries ---- */

/* value: units << 21 | context << 5 | gpu << 1 | 1 */
#define UNIT LEDGER_UNIT
#define UNITS_SHIFT 21
#define MOST_UNITS (UINT64_MAX >> UNITS_SHIFT)
_Static_assert(CGPU_MAX_GPUS <= 16 && CONTEXTS <= 1 << 16, "room in an entry");

static uint64_t pack(enum ledger_kind kind, int gpu, uint64_t bytes, const void *context)
{
    uint32_t number = context ? number_of(context) : 0;
    if (context && !number)
        number = new_number_of(context);
    uint64_t units = kind == LEDGER_OTHER ? bytes : bytes / UNIT;
    return (units < MOST_UNITS ? units : MOST_UNITS) << UNITS_SHIFT | (uint64_t)number << 5 | (uint64_t)gpu << 1 | 1;
}

static uint32_t packed_context(uint64_t value) { return value >> 5 & 0xffff; }
static int packed_gpu(uint64_t value) { return (int)(value >> 1 & 15); }
static uint64_t packed_bytes(enum ledger_kind kind, uint64_t value)
{
    return (value >> UNITS_SHIFT) * (kind == LEDGER_OTHER ? 1 : UNIT);
}

static void unpack(enum ledger_kind kind, uint64_t value, int *gpu, uint64_t *bytes, const void **context)
{
    uint32_t number = packed_context(value);
    *gpu = packed_gpu(value);
    *bytes = packed_bytes(kind, value);
    *context = number ? load_relaxed(&contexts[number]) : NULL;
}

void ledger_put(enum ledger_kind kind, uint64_t key, int gpu, uint64_t bytes, const void *context)
{
    struct shard *shard = shard_of(kind, key);
    struct table_entry old, entry = {key, pack(kind, gpu, bytes, context)};
    hook_lock_take(&shard->lock);
    bool done = table_put(&shard->table, &entry, &old);
    hook_lock_drop(&shard->lock);
    if (done && old.value && kind != LEDGER_OTHER) /* the driver hands this key out anew: its former owner went unseen */
        ledger_refund(packed_gpu(old.value), packed_bytes(kind, old.value));
    if (!done) /* its charge stays until this process ends: too much counted rather than too little */
        hook_log("error", "event=ledger-full bytes=%llu: no memory to remember an allocation", (unsigned long long)bytes);
}

bool ledger_take_from(enum ledger_kind kind, uint64_t key, int *gpu, uint64_t *bytes, const void **context)
{
    struct shard *shard = shard_of(kind, key);
    struct table_entry entry;
    hook_lock_take(&shard->lock);
    bool found = table_take(&shard->table, key, &entry);
    hook_lock_drop(&shard->lock);
    if (found)
        unpack(kind, entry.value, gpu, bytes, context);
    return found;
}

bool ledger_find(enum ledger_kind kind, uint64_t key, int *gpu, uint64_t *bytes, const void **context)
{
    struct shard *shard = shard_of(kind, key);
    hook_lock_take(&shard->lock);
    const struct table_entry *entry = table_find(&shard->table, key);
    uint64_t value = entry ? entry->value : 0;
    hook_lock_drop(&shard->lock);
    if (value)
        unpack(kind, value, gpu, bytes, context);
    return value != 0;
}

bool ledger_take(enum ledger_kind kind, uint64_t key, int *gpu, uint64_t *bytes)
{
    const void *context;
    return ledger_take_from(kind, key, gpu, bytes, &context);
}

/* Removes what has this context from one table and adds up its bytes a GPU. A removal moves later entries forward, also
 * around the end, so places are looked at again until a whole pass finds nothing. */
static void drop_from(enum ledger_kind kind, struct table *table, uint32_t number, uint64_t bytes[CGPU_MAX_GPUS])
{
    for (bool again = table->entries != NULL; again;) {
        again = false;
        for (uint64_t i = 0; i <= table->mask; i++)
            while (table->entries[i].value && packed_context(table->entries[i].value) == number) {
                bytes[packed_gpu(table->entries[i].value)] += packed_bytes(kind, table->entries[i].value);
                table_remove(table, &table->entries[i]);
                again = true;
            }
    }
}

void ledger_drop_context(const void *context)
{
    uint64_t bytes[CGPU_MAX_GPUS] = {0};
    uint32_t number = context ? number_of(context) : 0;
    if (!number)
        return;
    for (enum ledger_kind kind = 0; kind < LEDGER_OTHER; kind++)
        for (int i = 0; i < SHARDS; i++) {
            struct shard *shard = &shards[kind][i];
            hook_lock_take(&shard->lock);
            drop_from(kind, &shard->table, number, bytes);
            hook_lock_drop(&shard->lock);
        }
    hook_lock_take(&contexts_lock);
    store_relaxed(&contexts[number], NULL);
    hook_lock_drop(&contexts_lock);
    for (int gpu = 0; gpu < CGPU_MAX_GPUS; gpu++)
        ledger_refund(gpu, bytes[gpu]);
}

void ledger_after_fork(void)
{
    for (int kind = 0; kind < LEDGER_KINDS; kind++)
        for (int i = 0; i < SHARDS; i++) {
            table_free(&shards[kind][i].table);
            shards[kind][i].lock = (struct hook_lock){0};
        }
    contexts_lock = (struct hook_lock){0};
}
