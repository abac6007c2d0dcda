/* table.h: an open-addressing hash table from a 64-bit key to what is known of it. Not thread-safe: its user locks.
 *
 * Linear probing at half load, deletion by backward shift (no tombstones: the cost does not grow with age), doubling growth.
 * Its memory comes from mmap, never from malloc: a program may have malloc hooks of its own, and call us from them.
 *
 * Tables that are shards of one map share an arena: those of one size lie side by side, so that from 2 MiB on they are on huge
 * pages. With many blocks live, what an operation costs is the misses, and half of those were the TLB's. */
#ifndef CGPU_TABLE_H
#define CGPU_TABLE_H
#include <stdbool.h>
#include <stdint.h>

struct table_entry { /* 16 bytes, four a cache line */
    uint64_t key;
    uint64_t value; /* never 0: that is an empty place */
};
_Static_assert(sizeof(struct table_entry) == 16, "entry");

/* Fibonacci hashing: the top bits are the good ones, also for keys in even steps. Users shard by the top TABLE_SHARD_BITS,
 * the table indexes by those below. */
#define TABLE_SHARD_BITS 4
static inline uint64_t table_hash(uint64_t key)
{
    return key * 0x9e3779b97f4a7c15ull;
}

#define TABLE_SIZES 40
struct table_arena {
    struct table_entry *regions[TABLE_SIZES]; /* by log2 of a table's places; each has room for all shards */
};

struct table {
    struct table_entry *entries;
    uint64_t mask;  /* places - 1; 0 with entries == NULL */
    uint64_t count;
    int bits;       /* log2 of the places */
    int shard;      /* which part of the arena's regions is its own */
    struct table_arena *arena; /* NULL: memory of its own */
};

/* The entry of `key`, or NULL. Valid until the next put or take. */
struct table_entry *table_find(const struct table *table, uint64_t key);
/* Brings the place of `key` nearer. May be called without the lock: it reads nothing that it depends on. */
static inline void table_prefetch(const struct table *table, uint64_t key)
{
    int bits = __atomic_load_n(&table->bits, __ATOMIC_RELAXED);
    const struct table_entry *entries = __atomic_load_n(&table->entries, __ATOMIC_RELAXED);
    if (bits)
        __builtin_prefetch(&entries[table_hash(key) << TABLE_SHARD_BITS >> (64 - bits)], 1);
}
/* Adds or replaces; *old is what was replaced, its value 0: nothing. false: no memory and not one place left; then nothing
 * changed. */
bool table_put(struct table *table, const struct table_entry *entry, struct table_entry *old);
/* Removes `key` and gives what was there; false when there was nothing. */
bool table_take(struct table *table, uint64_t key, struct table_entry *entry);
/* Removes `entry`, which must be one of the table's. Another may take its place, later ones may move. */
void table_remove(struct table *table, struct table_entry *entry);
/* Gives back the memory of a table without an arena. Safe in the child of a fork(), whatever state another thread had left
 * the table in. */
void table_free(struct table *table);
/* Gives back the memory of all tables of an arena, which are empty then. Likewise safe. */
void table_arena_free(struct table_arena *arena, struct table *const *tables, int count);
#endif
