/* table.c: see table.h. */
#include "table.h"

#include <errno.h>
#include <stddef.h>
#include <sys/mman.h>

#define FIRST_BITS 8 /* 256 places: one page */

static uint64_t home(const struct table *table, uint64_t key)
{
    return table_hash(key) << TABLE_SHARD_BITS >> (64 - table->bits);
}

struct table_entry *table_find(const struct table *table, uint64_t key)
{
    if (!table->entries)
        return NULL;
    for (uint64_t i = home(table, key);; i = (i + 1) & table->mask) {
        struct table_entry *entry = &table->entries[i];
        if (!entry->value)
            return NULL;
        if (entry->key == key)
            return entry;
    }
}

static void insert(struct table *table, const struct table_entry *entry)
{
    uint64_t i = home(table, entry->key);
    while (table->entries[i].value)
        i = (i + 1) & table->mask;
    table->entries[i] = *entry;
}

static bool grow(struct table *table)
{
    int saved = errno;
    int bits = table->entries ? table->bits + 1 : FIRST_BITS;
    uint64_t places = 1ull << bits;
    void *memory = mmap(NULL, places * sizeof(struct table_entry), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS,
                        -1, 0);
    errno = saved;
    if (memory == MAP_FAILED)
        return false;
    struct table old = *table;
    table->entries = memory;
    table->mask = places - 1;
    table->bits = bits;
    if (old.entries) {
        for (uint64_t i = 0; i <= old.mask; i++)
            if (old.entries[i].value)
                insert(table, &old.entries[i]);
        table_free(&old);
    }
    return true;
}

bool table_put(struct table *table, const struct table_entry *entry, struct table_entry *old)
{
    struct table_entry *found = table_find(table, entry->key);
    old->value = 0;
    if (found) {
        *old = *found;
        *found = *entry;
        return true;
    }
    /* half full: grow; with no memory for that, fill up to the last place but one (a search must end at an empty one) */
    if ((!table->entries || table->count * 2 > table->mask) && !grow(table) &&
        (!table->entries || table->count >= table->mask))
        return false;
    insert(table, entry);
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
    if (table->entries)
        munmap(table->entries, (table->mask + 1) * sizeof(struct table_entry));
    *table = (struct table){0};
    errno = saved;
}
