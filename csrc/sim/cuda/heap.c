/* heap.c: where device memory lies in the process's address space, and what an address belongs to.
 *
 * Small blocks (up to LARGE) come from size classes carved out of 4 GiB stretches of reserved, untouched memory: a
 * mapping a block would run into the kernel's limit of 65530 mappings. The map from address to block is a treap: O(log
 * n). */
#define _GNU_SOURCE
#include <stdlib.h>
#include <sys/mman.h>
#include "cuda/sim.h"

#define LARGE   (64ull << 20)
#define STRETCH (4ull << 30)
#define LOW     (512ull << 20) /* for the old variants, whose pointers have 32 bits: one stretch, and no more */
#define CLASSES 80
#define GIVE_BACK (64u << 10)

struct free_space { uint64_t *bases; size_t count, room; };
static struct arena { uint64_t at, end; struct free_space free[CLASSES]; } arenas[2];

/* Four classes a doubling, from 512 bytes. */
static uint64_t class_size(unsigned class)
{
    return (512ull << class / 4) / 4 * (4 + class % 4);
}

static unsigned class_of(uint64_t bytes)
{
    unsigned class = 0;
    if (bytes > 512)
        class = 4 * (unsigned)(63 - __builtin_clzll(bytes) - 9);
    while (class_size(class) < bytes || (class_size(class) & 127))
        class++;
    return class;
}

static void *map_at(uint64_t hint, uint64_t bytes)
{
    void *at =
        mmap((void *)(uintptr_t)hint, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1,
             0);
    if (at == MAP_FAILED)
        return NULL;
    madvise(at, bytes, MADV_DONTDUMP);
    return at;
}

/* Hints, not MAP_32BIT: that one looks in one GiB only, where a program may already be. */
static void *map(uint64_t bytes, bool low)
{
    if (!low)
        return map_at(0, bytes);
    for (uint64_t hint = 0x20000000; hint + bytes < UINT32_MAX; hint += 0x10000000) {
        void *at = map_at(hint, bytes);
        if (at && (uintptr_t)at + bytes <= UINT32_MAX)
            return at;
        if (at)
            munmap(at, bytes);
    }
    return NULL;
}

uint64_t space_alloc(uint64_t bytes, bool low, uint64_t *taken)
{
    struct arena *arena = &arenas[low];
    if (bytes > LARGE) {
        *taken = (bytes + 4095) & ~4095ull;
        return (uint64_t)(uintptr_t)map(*taken, low);
    }
    unsigned class = class_of(bytes ? bytes : 1);
    struct free_space *space = &arena->free[class];
    *taken = class_size(class);
    if (space->count)
        return space->bases[--space->count];
    uint64_t start = (arena->at + 511) & ~511ull; /* what cudaMalloc promises is 256 */
    if (!arena->at || arena->end - start < *taken) {
        if (low && arena->at)
            return 0;
        uint64_t stretch = low ? LOW : STRETCH;
        void *at = map(stretch, low);
        if (!at)
            return 0;
        start = (uint64_t)(uintptr_t)at;
        arena->end = start + stretch;
    }
    arena->at = start + *taken;
    return start;
}

/* The memory goes back to the host at once when it is worth a system call. */
void space_free(uint64_t base, uint64_t taken, bool low)
{
    if (taken > LARGE) {
        munmap((void *)(uintptr_t)base, taken);
        return;
    }
    if (taken >= GIVE_BACK) {
        uint64_t first = (base + 4095) & ~4095ull, last = (base + taken) & ~4095ull;
        madvise((void *)(uintptr_t)first, last - first, MADV_DONTNEED);
    }
    struct free_space *space = &arenas[low].free[class_of(taken)];
    if (space->count == space->room) {
        size_t room = space->room ? 2 * space->room : 64;
        uint64_t *bases = realloc(space->bases, room * sizeof *bases);
        if (!bases)
            return; /* that address space is lost, no more */
        space->bases = bases;
        space->room = room;
    }
    space->bases[space->count++] = base;
}

/* ---- the map ---- */

static struct block *blocks, *reservations; /* two treaps: mappings lie inside reservations */
static uint64_t block_ids;
static uint32_t seed = 2463534242u;

static uint32_t random32(void)
{
    seed ^= seed << 13;
    seed ^= seed >> 17;
    return seed ^= seed << 5;
}

static struct block **tree_of(enum block_kind kind)
{
    return kind == BLOCK_RESERVED ? &reservations : &blocks;
}

static void split(struct block *tree, uint64_t base, struct block **left, struct block **right)
{
    if (!tree) {
        *left = *right = NULL;
    } else if (tree->base < base) {
        split(tree->right, base, &tree->right, right);
        *left = tree;
    } else {
        split(tree->left, base, left, &tree->left);
        *right = tree;
    }
}

static struct block *merge(struct block *left, struct block *right)
{
    if (!left || !right)
        return left ? left : right;
    if (left->rank > right->rank) {
        left->right = merge(left->right, right);
        return left;
    }
    right->left = merge(left, right->left);
    return right;
}

struct block *block_insert(uint64_t base, uint64_t size, enum block_kind kind, struct CUctx_st *ctx, struct gpu *gpu)
{
    struct block *block = calloc(1, sizeof *block), *left, *right;
    if (!block)
        return NULL;
    block->base = base;
    block->size = size;
    block->kind = kind;
    block->ctx = ctx;
    block->gpu = gpu;
    block->id = ++block_ids;
    block->rank = random32();
    split(*tree_of(kind), base, &left, &right);
    *tree_of(kind) = merge(merge(left, block), right);
    return block;
}

static struct block *find(struct block *tree, uint64_t address)
{
    struct block *best = NULL;
    while (tree) {
        if (tree->base <= address) {
            best = tree;
            tree = tree->right;
        } else {
            tree = tree->left;
        }
    }
    return best && address - best->base < (best->size ? best->size : 1) ? best : NULL;
}

struct block *block_find(uint64_t address)
{
    return find(blocks, address);
}

struct block *reservation_find(uint64_t address)
{
    return find(reservations, address);
}

void block_remove(struct block *block)
{
    struct block *left, *middle, *right;
    split(*tree_of(block->kind), block->base, &left, &middle);
    split(middle, block->base + 1, &middle, &right);
    *tree_of(block->kind) = merge(left, right);
    free(block);
}

static void each(struct block *tree, void (*see)(struct block *, void *), void *arg)
{
    if (!tree)
        return;
    each(tree->left, see, arg);
    struct block *right = tree->right;
    see(tree, arg);
    each(right, see, arg);
}

/* `see` must not remove. */
void block_each(void (*see)(struct block *block, void *arg), void *arg)
{
    each(blocks, see, arg);
}
