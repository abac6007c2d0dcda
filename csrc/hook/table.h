/* table.h: a hash table from 48 bits (an address, a pointer to something) to 48 bits. Not thread-safe: its user locks.
 *
 * With many blocks live, what an operation costs is its wait for memory, and what it pushes out of the caches that the driver
 * has there. So five entries fill a cache line, and a search ends in the line where it begins but for the few entries that did
 * not find room there: a line counts those that went past it. Nothing moves until the table doubles, at four fifths, and
 * nothing is left behind by what is taken: the cost does not grow with age.
 *
 * Its memory comes from mmap, never from malloc: a program may have malloc hooks of its own, and call us from them.
 *
 * Tables that are shards of one map share an arena: those of one size lie side by side, so that from 2 MiB on they are on huge
 * pages. */
#ifndef CGPU_TABLE_H
#define CGPU_TABLE_H
#include <stdbool.h>
#include <stdint.h>

#define TABLE_LINE 5 /* entries */
struct table_line {
    _Alignas(64) uint64_t key[TABLE_LINE]; /* key << 16 | value >> 32; 0: no entry */
    uint32_t low[TABLE_LINE];              /* of the value */
    uint32_t passed; /* entries that would be in this line or one before it, and lie in a later one */
};
_Static_assert(sizeof(struct table_line) == 64, "a cache line");

/* Fibonacci hashing: the top bits are the good ones, also for keys in even steps. Users shard by the top TABLE_SHARD_BITS,
 * the table indexes by those below. */
#define TABLE_SHARD_BITS 4
static inline uint64_t table_hash(uint64_t key)
{
    return key * 0x9e3779b97f4a7c15ull;
}

#define TABLE_SIZES 40
struct table_arena {
    struct table_line *regions[TABLE_SIZES]; /* by log2 of a table's lines; each has room for all shards */
};

struct table {
    struct table_line *lines;
    uint64_t mask;  /* lines - 1; 0 with lines == NULL */
    uint64_t count;
    int bits;       /* log2 of the lines */
    int shard;      /* which part of the arena's regions is its own */
    struct table_arena *arena; /* NULL: memory of its own */
};

static inline uint64_t table_home(uint64_t key, int bits) /* a line's number */
{
    return table_hash(key) << TABLE_SHARD_BITS >> (64 - bits);
}

/* Brings the line of `key` nearer. May be called without the lock: it reads nothing that it depends on. */
static inline void table_prefetch(const struct table *table, uint64_t key)
{
    int bits = __atomic_load_n(&table->bits, __ATOMIC_RELAXED);
    const struct table_line *lines = __atomic_load_n(&table->lines, __ATOMIC_RELAXED);
    if (bits)
        __builtin_prefetch(&lines[table_home(key, bits)], 1);
}
/* Keys and values are below 2^48 and never 0: that is the value of a key that is not there. */
uint64_t table_find(const struct table *table, uint64_t key);
/* Adds or replaces; *old is what was replaced. false: no memory and not one place left, or out of range; nothing changed. */
bool table_put(struct table *table, uint64_t key, uint64_t value, uint64_t *old);
/* Removes `key` and gives its value. */
uint64_t table_take(struct table *table, uint64_t key);
/* The next one, from *place on, which is 0 at first; false: no more. What it gave may be taken before it is asked again. */
bool table_next(const struct table *table, uint64_t *place, uint64_t *key, uint64_t *value);
/* Gives back the memory of a table without an arena. Safe in the child of a fork(), whatever state another thread had left
 * the table in. */
void table_free(struct table *table);
/* Gives back the memory of all tables of an arena, which are empty then. Likewise safe. */
void table_arena_free(struct table_arena *arena, struct table *const *tables, int count);
#endif
