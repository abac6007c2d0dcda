/* pool.h: memory pools. All under api_lock. */
#ifndef CGPU_SIM_POOL_H
#define CGPU_SIM_POOL_H
#include "cuda/vmm.h"

struct cached {                      /* freed, and still the pool's */
    uint64_t base, charged, space;
    uint64_t offset, share;          /* as in struct block */
    uint32_t channel;
    uint64_t seq;                    /* of the free; UINT64_MAX: done */
    struct cached *next;
};

struct place { uint64_t offset, size; struct place *next; };

struct CUmemPoolHandle_st {
    struct object object;
    struct gpu *gpu;
    uint64_t threshold, reserved, reserved_high, used, used_high, max;
    int flags[3];
    struct cached *cached;
    uint64_t blocks;                 /* in use */
    bool destroyed;
    int file;                        /* of one that can be exported, or was imported, else -1 */
    bool imported;
    uint64_t inode;
    uint64_t file_end;
    struct place *places;            /* given back below that */
    struct CUmemPoolHandle_st *next;
};

struct CUmemPoolHandle_st *pool_new(struct gpu *gpu);
bool pool_known_file(uint64_t inode); /* is a pool of this process */
/* pool_share.c */
CUresult pool_make_file(struct CUmemPoolHandle_st *pool);
CUresult pool_file_block(struct CUmemPoolHandle_st *pool, struct CUctx_st *ctx, uint64_t bytes, struct block **block);
void pool_file_release(struct CUmemPoolHandle_st *pool, const struct cached *cached); /* the pages, not the charge */
#endif
