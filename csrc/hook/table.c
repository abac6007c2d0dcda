/* table.c: see table.h. */
#include "table.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#define FIRST_BITS 8 /* 256 places: one page */
#define SHARDS (1u << TABLE_SHARD_BITS)
#define HUGE (2ull << 20)

static uint64_t home(const struct table *table, uint64_t key)
{
    return table_hash(key) << TABLE_SHARD_BITS >> (64 - table->bits);
}

/* Where `key` is, or the empty place where it belongs. There is one: a table is never full. */
static struct table_entry *place_of(const struct table *table, uint64_t key)
{
    uint64_t i = home(table, key);
    while (table->entries[i].value && table->entries[i].key != key)
        i = (i + 1) & table->mask;
    return &table->entries[i];
}

struct table_entry *table_find(const struct table *table, uint64_t key)
{
    struct table_entry *place = table->entries ? place_of(table, key) : NULL;
    return place && place->value ? place : NULL;
}

/* ---- memory ---- */

static uint64_t table_size(int bits)
{
    return sizeof(struct table_entry) << bits;
}

static void *map(uint64_t size)
{
    void *memory = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return memory == MAP_FAILED ? NULL : memory;
}

/* Aligned to huge pages where that is worth it. */
static void *map_region(uint64_t size)
{
    if (size < HUGE)
        return map(size);
    char *memory = map(size + HUGE), *end = memory + size + HUGE;
    if (!memory)
        return NULL;
    char *start = (char *)(((uintptr_t)memory + HUGE - 1) / HUGE * HUGE);
    if (start > memory)
        munmap(memory, (size_t)(start - memory));
    munmap(start + size, (size_t)(end - start) - size);
    madvise(start, size, MADV_HUGEPAGE);
    return start;
}

/* The shard's part of the region for tables of `bits`, all zero: nobody else has it, and tables only grow. */
static struct table_entry *arena_part(struct table_arena *arena, int shard, int bits)
{
    uint64_t size = table_size(bits);
    if (bits >= TABLE_SIZES)
        return NULL;
    struct table_entry *region = __atomic_load_n(&arena->regions[bits], __ATOMIC_ACQUIRE);
    if (!region) {
        struct table_entry *made = map_region(size * SHARDS);
        if (!made)
            return NULL;
        if (__atomic_compare_exchange_n(&arena->regions[bits], &region, made, false, __ATOMIC_ACQ_REL, __ATOMIC_ACQUIRE))
            region = made;
        else
            munmap(made, size * SHARDS); /* another shard was first */
    }
    return &region[(uint64_t)shard << bits];
}

static void give_back(const struct table *table)
{
    if (!table->entries)
        return;
    if (table->arena)
        madvise(table->entries, table_size(table->bits), MADV_DONTNEED);
    else
        munmap(table->entries, table_size(table->bits));
}

static bool grow(struct table *table)
{
    int saved = errno;
    struct table old = *table;
    int bits = old.entries ? old.bits + 1 : FIRST_BITS;
    struct table_entry *entries = old.arena ? arena_part(old.arena, old.shard, bits) : map(table_size(bits));
    if (entries) {
        __atomic_store_n(&table->entries, entries, __ATOMIC_RELAXED);
        table->mask = (1ull << bits) - 1;
        __atomic_store_n(&table->bits, bits, __ATOMIC_RELAXED);
        for (uint64_t i = 0; old.entries && i <= old.mask; i++)
            if (old.entries[i].value)
                *place_of(table, old.entries[i].key) = old.entries[i];
        give_back(&old);
    }
    errno = saved;
    return entries != NULL;
}

/* ---- changing ---- */

bool table_put(struct table *table, const struct table_entry *entry, struct table_entry *old)
{
    struct table_entry *place = table->entries ? place_of(table, entry->key) : NULL;
    if (place && place->value) {
        *old = *place;
        *place = *entry;
        return true;
    }
    /* half full: grow; with no memory for that, fill up to the last place but one (a search must end at an empty one) */
    if (__builtin_expect(!place || table->count * 2 > table->mask, 0)) {
        if (!grow(table) && (!place || table->count >= table->mask))
            return false;
        place = place_of(table, entry->key);
    }
    old->value = 0;
    *place = *entry;
    table->count++;
    return true;
}

void table_remove(struct table *table, struct table_entry *entry)
{
    uint64_t hole = (uint64_t)(entry - table->entries);
    for (uint64_t i = hole;;) {
        i = (i + 1) & table->mask;
        if (!table->entries[i].value)
            break;
        /* an entry may fill the hole unless its home lies after the hole on the way to where it is now */
        if (((i - home(table, table->entries[i].key)) & table->mask) >= ((i - hole) & table->mask)) {
            table->entries[hole] = table->entries[i];
            hole = i;
        }
    }
    table->entries[hole].value = 0;
    table->count--;
}

bool table_take(struct table *table, uint64_t key, struct table_entry *entry)
{
    struct table_entry *found = table_find(table, key);
    if (!found)
        return false;
    *entry = *found;
    table_remove(table, found);
    return true;
}

void table_free(struct table *table)
{
    int saved = errno;
    give_back(table);
    *table = (struct table){0};
    errno = saved;
}

void table_arena_free(struct table_arena *arena, struct table *const *tables, int count)
{
    int saved = errno;
    for (int i = 0; i < count; i++) {
        struct table *table = tables[i];
        *table = (struct table){.shard = table->shard, .arena = arena};
    }
    for (int bits = 0; bits < TABLE_SIZES; bits++)
        if (arena->regions[bits])
            munmap(arena->regions[bits], table_size(bits) * SHARDS);
    *arena = (struct table_arena){0};
    errno = saved;
}
