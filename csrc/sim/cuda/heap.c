/* heap.c: where device memory lies in the process's address space, and what an address belongs to.
 *
 * Small blocks (up to LARGE) come from size classes carved out of 4 GiB stretches of reserved, untouched memory: a
 * mapping a block would run into the kernel's limit of 65530 mappings. Pages that another process is to have too move
 * to a memfd that lies over the stretch. The map from address to block is a treap: O(log n). */
#define _GNU_SOURCE
#include <fcntl.h>
#include <linux/falloc.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "cuda/vmm.h"

#define LARGE   (64ull << 20)
#define STRETCH (4ull << 30)
#define LOW     (512ull << 20) /* for the old variants, whose pointers have 32 bits: one stretch, and no more */
#define CLASSES 80
#define GIVE_BACK (64u << 10)

struct free_space { uint64_t *bases; size_t count, room; };
static struct arena { uint64_t at, end; struct free_space free[CLASSES]; } arenas[2];

struct stretch { /* one that the arenas carve up, or a large block with pages in a file */
    uint64_t start, bytes;
    int file;                        /* -1: none yet */
    uint8_t *moved;                  /* a bit a page: is in it */
    struct stretch *next;
};
static struct stretch *stretches;

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

static struct stretch *stretch_of(uint64_t base)
{
    struct stretch *stretch = stretches;
    while (stretch && base - stretch->start >= stretch->bytes)
        stretch = stretch->next;
    return stretch;
}

static struct stretch *stretch_new(uint64_t start, uint64_t bytes)
{
    struct stretch *stretch = calloc(1, sizeof *stretch);
    if (!stretch)
        return NULL;
    *stretch = (struct stretch){.start = start, .bytes = bytes, .file = -1, .next = stretches};
    return stretches = stretch;
}

static void stretch_drop(struct stretch *stretch)
{
    struct stretch **at = &stretches;
    while (*at != stretch)
        at = &(*at)->next;
    *at = stretch->next;
    if (stretch->file >= 0)
        close(stretch->file);
    free(stretch->moved);
    free(stretch);
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
        if (!at || !stretch_new((uintptr_t)at, stretch)) {
            if (at)
                munmap(at, stretch);
            return 0;
        }
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
        struct stretch *stretch = stretch_of(base);
        munmap((void *)(uintptr_t)base, taken);
        if (stretch)
            stretch_drop(stretch);
        return;
    }
    if (taken >= GIVE_BACK) {
        uint64_t first = (base + 4095) & ~4095ull, last = (base + taken) & ~4095ull;
        madvise((void *)(uintptr_t)first, last - first, MADV_DONTNEED);
        struct stretch *stretch = stretch_of(base);
        if (stretch && stretch->file >= 0)
            fallocate(stretch->file, FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, (off_t)(first - stretch->start),
                      (off_t)(last - first));
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

/* ---- pages that move to a file ---- */

#define PAGE 4096u

static bool file_for(struct stretch *stretch)
{
    if (stretch->file >= 0)
        return true;
    stretch->moved = calloc(stretch->bytes / PAGE / 8 + 1, 1);
    stretch->file = stretch->moved ? (int)syscall(SYS_memfd_create, "cuda-heap", 1u /* MFD_CLOEXEC */) : -1;
    if (stretch->file >= 0 && ftruncate(stretch->file, (off_t)stretch->bytes) == 0)
        return true;
    if (stretch->file >= 0)
        close(stretch->file);
    free(stretch->moved);
    stretch->moved = NULL;
    stretch->file = -1;
    return false;
}

static bool has_moved(const struct stretch *stretch, uint64_t page)
{
    return stretch->moved[page / 8] >> page % 8 & 1;
}

/* Pages of nothing but zeros need no room in the file. */
static bool write_page(const struct stretch *stretch, uint64_t page)
{
    static const char zeros[PAGE];
    const char *at = (const char *)(uintptr_t)(stretch->start + page * PAGE);
    return memcmp(at, zeros, PAGE) == 0 || pwrite(stretch->file, at, PAGE, (off_t)(page * PAGE)) == PAGE;
}

static bool move_pages(struct stretch *stretch, uint64_t first, uint64_t end)
{
    for (uint64_t page = first; page < end; page++)
        if (!write_page(stretch, page))
            return false;
    void *at = (void *)(uintptr_t)(stretch->start + first * PAGE);
    if (mmap(at, (end - first) * PAGE, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_FIXED | MAP_NORESERVE, stretch->file,
             (off_t)(first * PAGE)) == MAP_FAILED)
        return false;
    madvise(at, (end - first) * PAGE, MADV_DONTDUMP);
    for (uint64_t page = first; page < end; page++)
        stretch->moved[page / 8] = (uint8_t)(stretch->moved[page / 8] | 1u << page % 8);
    return true;
}

int space_file(uint64_t base, uint64_t taken, uint64_t *offset)
{
    struct stretch *stretch = stretch_of(base);
    if (!stretch)
        stretch = stretch_new(base, taken);
    if (!stretch || !file_for(stretch))
        return -1;
    uint64_t end = (base - stretch->start + taken + PAGE - 1) / PAGE;
    bool good = true;
    copies_stop();
    for (uint64_t page = (base - stretch->start) / PAGE; good && page < end;) {
        uint64_t last = page;
        while (last < end && has_moved(stretch, last) == has_moved(stretch, page))
            last++;
        good = has_moved(stretch, page) || move_pages(stretch, page, last);
        page = last;
    }
    copies_go_on();
    *offset = base - stretch->start;
    return good ? stretch->file : -1;
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
    block->ctx = ctx && ctx->green ? ctx->gpu->primary : ctx;
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
