/* vmm.h: physical memory behind handles, and the files by which processes share memory. All under api_lock. */
#ifndef CGPU_SIM_VMM_H
#define CGPU_SIM_VMM_H
#include "cuda/sim.h"

#define GRANULARITY (2ull << 20)

struct label;

struct allocation {
    uint64_t magic;
    uint64_t at, size;               /* in `file` */
    int file;                        /* the one of the process, or its own once it is shared */
    bool own;
    uint64_t inode;                  /* of its own file */
    uint64_t share;                  /* entry of the GPU's `share`, or 0 */
    unsigned handles, mappings;
    CUmemAllocationProp prop;
    struct gpu *gpu;                 /* NULL: host memory */
    struct multicast *multicast;     /* an object of multicast.c, without memory of its own */
    struct allocation *next;         /* free lists: a handle is the address of one of these, never returned */
    struct allocation *shared;       /* among those with a file of their own */
};
struct allocation *allocation_of(CUmemGenericAllocationHandle handle); /* NULL: no live handle */
struct allocation *allocation_bare(void);  /* with one handle and no memory; NULL: no host memory */
void allocation_drop_if_last(struct allocation *allocation);
/* Takes over the file, whose bytes are charged already; NULL: no host memory, and it does not. */
struct allocation *allocation_of_file(int file, const struct label *label, struct gpu *gpu);
/* What a descriptor of an exported allocation stands for, with one handle more. */
CUresult allocation_import(int descriptor, struct allocation **allocation);

/* ---- multicast.c ---- */
struct multicast *multicast_open(int file, const struct label *label);
bool multicast_ready(const struct multicast *multicast); /* all of its GPUs are known: it may be mapped */
void multicast_release(struct multicast *multicast);

/* ---- shared_file.c: a memfd that says at its end what is in it; it never shrinks under who maps it ---- */
enum label_kind { LABEL_ALLOCATION = 1, LABEL_POOL, LABEL_EVENTS };
struct label {
    uint64_t magic;
    uint32_t kind;
    uint8_t uuid[16];                /* of the GPU; zeros: host memory */
    uint64_t share, size;
    CUmemAllocationProp prop;
    uint32_t devices;                /* of a multicast object; 0: it is memory */
};
int shared_file_new(uint64_t size, const struct label *label); /* a descriptor, or -1 */
bool shared_file_label(int file, enum label_kind kind, struct label *label);
uint64_t shared_file_inode(int file);
struct gpu *gpu_of_uuid(const uint8_t uuid[16]); /* NULL: this process does not see it */
/* Copies the parts that are not holes. */
bool shared_file_copy(int to, uint64_t to_at, int from, uint64_t from_at, uint64_t bytes);
/* A mapping of part of such a file, or of another process's memfd, as device memory; not page by page: `offset` may be
 * any. It dies with the context. */
CUresult file_map(struct CUctx_st *ctx, struct gpu *gpu, int file, uint64_t offset, uint64_t size,
                  struct block **block);
void file_unmap(struct block *block);

/* ---- ipc.c: the 64 bytes that say which memory or event of which process ---- */
enum ipc_kind { IPC_MEMORY = 1, IPC_EVENT };
struct ipc_handle {
    uint32_t magic, kind;
    uint32_t slot, generation;       /* of the process, on that GPU */
    int32_t file;                    /* its descriptor */
    uint32_t pad;
    uint8_t uuid[16];
    uint64_t offset, size, share;
};
_Static_assert(sizeof(struct ipc_handle) == CU_IPC_HANDLE_SIZE, "as large as CUDA's");
struct ipc_handle ipc_handle_of(struct gpu *gpu, enum ipc_kind kind, int file);
/* Opens the other process's descriptor for the current context, whose GPU it must be. Takes no lock. */
CUresult ipc_open(const struct ipc_handle *handle, enum ipc_kind kind, struct CUctx_st **ctx, int *file);
/* While held, no copy of the process runs: memory may be moved to other pages. */
void copies_stop(void);
void copies_go_on(void);
#endif
