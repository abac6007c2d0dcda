/* table.h: an open-addressing hash table from a 64-bit key to what is known of it. Not thread-safe: its user locks.
 *
 * Linear probing at half load, deletion by backward shift (no tombstones: the cost does not grow with age), doubling growth.
 * Its memory comes from mmap, never from malloc: a program may have malloc hooks of its own, and call us from them. */
#ifndef CGPU_TABLE_H
#define CGPU_TABLE_H
#include <stdbool.h>
#include <stdint.h>

struct table_entry { /* 16 bytes, four a cache line: with many blocks live, what an operation costs is the misses */
    uint64_t key;
    uint64_t value; /* never 0: that is an empty place */
};
_Static_assert(sizeof(struct table_entry) == 16, "entry");

struct table {
    struct table_entry *entries;
    uint64_t mask;  /* places - 1; 0 with entries == NULL */
    uint64_t count;
    int bits;       /* log2 of the places */
};

/* Fibonacci hashing: the top bits are the good ones, also for keys in even steps. Users shard by the top TABLE_SHARD_BITS,
 * the table indexes by those below. */
#define TABLE_SHARD_BITS 4
static inline uint64_t table_hash(uint64_t key)
{
    return key * 0x9e3779b97f4a7c15ull;
}

/* The entry of `key`, or NULL. Valid until the next put or take. */
struct table_entry *table_find(const struct table *table, uint64_t key);
/* Adds or replaces; *old is what was replaced, its value 0: nothing. false: no memory and not one place left; then nothing
 * changed. */
bool table_put(struct table *table, const struct table_entry *entry, struct table_entry *old);
/* Removes `key` and gives what was there; false when there was nothing. */
bool table_take(struct table *table, uint64_t key, struct table_entry *entry);
/* Removes `entry`, which must be one of the table's. Another may take its place, later ones may move. */
void table_remove(struct table *table, struct table_entry *entry);
/* Gives back the memory. Safe in the child of a fork(), whatever state another thread had left the table in. */
void table_free(struct table *table);
#endif
