/* table.c: see table.h. */
#include "table.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#define FIRST_BITS 6 /* 64 lines: one page */
#define SHARDS (1u << TABLE_SHARD_BITS)
#define HUGE (2ull << 20)

static uint64_t home(const struct table *table, uint64_t key)
{
    return table_home(key, table->bits);
}

/* Where an entry is. */
struct spot {
    struct table_line *line; /* NULL: nowhere */
    int i;
};

/* A bit for the entry of this line that has `key`, or 0. No branches: which of them it is cannot be foretold. */
static uint32_t match(const struct table_line *line, uint64_t key)
{
    uint32_t found = 0;
    for (int i = 0; i < TABLE_LINE; i++)
        found |= (uint32_t)(line->key[i] >> 16 == key) << i;
    return found;
}

static struct spot spot_of(const struct table *table, uint64_t key)
{
    if (__builtin_expect(!table->lines || key == 0, 0)) /* 0 would match where nothing is */
        return (struct spot){0};
    uint64_t at = home(table, key);
    for (uint64_t n = 0; n <= table->mask; n++, at = (at + 1) & table->mask) {
        struct table_line *line = &table->lines[at];
        uint32_t found = match(line, key);
        if (__builtin_expect(found != 0, 1))
            return (struct spot){line, __builtin_ctz(found)};
        if (!line->passed)
            break;
    }
    return (struct spot){0};
}

static uint64_t value_at(const struct table_line *line, int i)
{
    return (line->key[i] & 0xffff) << 32 | line->low[i];
}

static void set(struct table_line *line, int i, uint64_t key, uint64_t value)
{
    line->key[i] = key << 16 | value >> 32;
    line->low[i] = (uint32_t)value;
}

/* There must be room. */
static void add(struct table *table, uint64_t key, uint64_t value)
{
    uint64_t at = home(table, key);
    uint32_t empty;
    while (!(empty = match(&table->lines[at], 0))) {
        table->lines[at].passed++;
        at = (at + 1) & table->mask;
    }
    set(&table->lines[at], __builtin_ctz(empty), key, value);
    table->count++;
}

uint64_t table_find(const struct table *table, uint64_t key)
{
    struct spot spot = spot_of(table, key);
    return spot.line ? value_at(spot.line, spot.i) : 0;
}

bool table_next(const struct table *table, uint64_t *place, uint64_t *key, uint64_t *value)
{
    for (; table->lines && *place / TABLE_LINE <= table->mask; ++*place) {
        const struct table_line *line = &table->lines[*place / TABLE_LINE];
        int i = (int)(*place % TABLE_LINE);
        if (line->key[i]) {
            *key = line->key[i] >> 16;
            *value = value_at(line, i);
            ++*place;
            return true;
        }
    }
    return false;
}

/* ---- memory ---- */

static uint64_t table_size(int bits)
{
    return sizeof(struct table_line) << bits;
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
static struct table_line *arena_part(struct table_arena *arena, int shard, int bits)
{
    uint64_t size = table_size(bits);
    if (bits >= TABLE_SIZES)
        return NULL;
    struct table_line *region = __atomic_load_n(&arena->regions[bits], __ATOMIC_ACQUIRE);
    if (!region) {
        struct table_line *made = map_region(size * SHARDS);
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
    if (!table->lines)
        return;
    if (table->arena)
        madvise(table->lines, table_size(table->bits), MADV_DONTNEED);
    else
        munmap(table->lines, table_size(table->bits));
}

static bool grow(struct table *table)
{
    int saved = errno;
    struct table old = *table;
    uint64_t key, value;
    int bits = old.lines ? old.bits + 1 : FIRST_BITS;
    struct table_line *lines = old.arena ? arena_part(old.arena, old.shard, bits) : map(table_size(bits));
    if (lines) {
        __atomic_store_n(&table->lines, lines, __ATOMIC_RELAXED);
        table->mask = (1ull << bits) - 1;
        table->count = 0;
        __atomic_store_n(&table->bits, bits, __ATOMIC_RELAXED);
        for (uint64_t place = 0; table_next(&old, &place, &key, &value);)
            add(table, key, value);
        give_back(&old);
    }
    errno = saved;
    return lines != NULL;
}

/* ---- changing ---- */

bool table_put(struct table *table, uint64_t key, uint64_t value, uint64_t *old)
{
    *old = 0;
    if (key == 0 || key >> 48 || value == 0 || value >> 48)
        return false;
    struct spot spot = spot_of(table, key);
    *old = spot.line ? value_at(spot.line, spot.i) : 0;
    if (spot.line) {
        set(spot.line, spot.i, key, value);
        return true;
    }
    /* with no memory to grow, it fills up to the last place */
    uint64_t places = table->lines ? (table->mask + 1) * TABLE_LINE : 0;
    if (__builtin_expect(table->count >= places / 5 * 4, 0) && !grow(table) && table->count == places)
        return false;
    add(table, key, value);
    return true;
}

uint64_t table_take(struct table *table, uint64_t key)
{
    struct spot spot = spot_of(table, key);
    if (!spot.line)
        return 0;
    for (uint64_t at = home(table, key); &table->lines[at] != spot.line; at = (at + 1) & table->mask)
        table->lines[at].passed--;
    uint64_t value = value_at(spot.line, spot.i);
    spot.line->key[spot.i] = 0;
    table->count--;
    return value;
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
