/* sim.h: the parts of the simulated driver ("CUDA 13.0") and what they offer each other. The GPU itself, shared by all
 * processes, is in shared/state.h; this is one process's side of it.
 *
 * ---- Kernels ----
 * They compute nothing but take time, told by the function's name:
 *   ..._ns<N>..., ..._us<N>..., ..._ms<N>...   that long (spin_us100: 100 microseconds)
 *   cgpu_sleep_ns                              its first argument, 64-bit nanoseconds
 *   ...cgpu_null...                            nothing; the launch returns without touching anything shared, not even a
 *                                              queue, so it has no order with other work (captured: a node of 0 ns)
 *   ...cgpu_pair..._us<N>...                   from when it and its partners have begun: the n-th such launch of a process on
 *                                              each of its GPUs is a group, like a collective's kernels. One that waits for
 *                                              its partners keeps its GPU busy. (In a graph: an ordinary kernel.)
 *   any other                                  CGPU_SIM_KERNEL_NS (10000)
 * Copies take CGPU_SIM_COPY_NS (1000) and a nanosecond per CGPU_SIM_COPY_BYTES (25), beside the engine; memset is a
 * kernel of 1000 ns and a nanosecond per 1000 bytes.
 *
 * ---- Memory ----
 * Device memory is host memory, reserved lazily: a device pointer can be read. Sizes are charged rounded up to 512
 * bytes (the real driver: blocks of 2 MiB); managed memory and arrays are charged when allocated, a module's variables
 * when first asked for, contexts and modules as state.h says.
 * What a pool or the graphs of a GPU keep is charged as long as they keep it. What several processes have (an exported
 * handle, an IPC or pool pointer, external memory) is one memory, and charged once, as state.h says.
 * Bytes move when their operation is complete in device time: by a thread that synchronises, or by the driver thread,
 * which starts with the first asynchronous copy or host function.
 *
 * CGPU_SIM_DEBUG: says on stderr why cuInit found no GPU.
 *
 * ---- Locks, in this order ----
 * api_lock (objects, the memory map, graphs) > queue.retire > queue.append > the device's mutex. Launching takes
 * queue.append alone. No lock is held in a callback. */
#ifndef CGPU_SIM_CUDA_H
#define CGPU_SIM_CUDA_H
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "atomics.h"
#include "cuda_min.h"
#include "shared/state.h"

#define API __attribute__((visibility("default"))) CUresult
/* Both forms of an entry point on a stream: the null stream is the legacy one, or the thread's own. `do_name` gets
 * which
 * as its first argument. */
#define API_PAIR(name, suffix, do_name, params, ...) \
    API name params; API name params { return do_name(false, __VA_ARGS__); } \
    API name##suffix params; API name##suffix params { return do_name(true, __VA_ARGS__); }

/* ---- object.c: handles. Memory of a freed object stays readable, so a stale handle is told from a live one ---- */
enum object_type { OBJ_CONTEXT = 1, OBJ_STREAM, OBJ_EVENT, OBJ_MODULE, OBJ_FUNCTION, OBJ_POOL, OBJ_ARRAY, OBJ_GRAPH,
                  OBJ_NODE,
                   OBJ_EXEC, OBJ_LINK, OBJ_MIPMAP, OBJ_EXTERNAL, OBJ_GREEN, OBJ_RESOURCES, OBJ_TYPES };
struct object {
    uint32_t magic;             /* of its type while it lives */
    uint32_t type;
    struct CUctx_st *ctx;       /* that it dies with, or NULL */
    struct object *next, *prev; /* among that context's */
};
void *object_new(enum object_type type, size_t size, struct CUctx_st *ctx); /* zeroed; NULL: no host memory */
void object_move(void *object, struct CUctx_st *ctx); /* it is another context's child */
void object_hide(void *object);    /* no handle any more, nor its context's child; object_recycle gives it back */
void object_recycle(void *object);
void object_free(void *object);    /* both */
bool object_is(const void *object, enum object_type type);

extern pthread_mutex_t api_lock;

/* ---- init.c ---- */
struct gpu;
extern struct gpu *gpus[SIM_GPUS]; /* those this process sees, in its order */
extern int gpu_count;
extern int driver_state;           /* enum below */
enum { DRIVER_NEW, DRIVER_READY, DRIVER_FORKED };

struct thread_state {
    struct CUctx_st *stack[64];
    int depth;
    CUstreamCaptureMode capture_mode;
    bool in_callback;
    bool registered;               /* with the thread-exit key */
    struct CUstream_st *own;       /* this thread's default stream, of context `own_ctx_id` */
    uint64_t own_ctx_id;
};
extern __thread struct thread_state sim_thread;
struct gpu *gpu_of(CUdevice device);
CUresult gpu_join(struct gpu *gpu);  /* takes its slot on the shared device; OUT_OF_MEMORY when there is none */

#define CHECK_INIT() \
    do { \
        if (__builtin_expect(driver_state != DRIVER_READY || sim_thread.in_callback, 0)) \
            return driver_state != DRIVER_READY ? CUDA_ERROR_NOT_INITIALIZED : CUDA_ERROR_NOT_PERMITTED; \
    } while (0)
#define TRY(call) \
    do { \
        CUresult try_ = (call); \
        if (try_ != CUDA_SUCCESS) \
            return try_; \
    } while (0)

/* ---- queue.c: one process's queues on one GPU ---- */
struct action {
    void (*run)(void *arg, uint64_t seq, uint64_t done_ns); /* once it is done in device time; NULL: nothing */
    void *arg;
    bool gate;                     /* run holds the queue; called without locks on the driver thread */
    bool (*ready)(void *arg);      /* a gate that stays shut until this says so: asked there, again and again */
    bool prompt;                   /* the driver thread must not leave it to whoever synchronises */
};
struct queue {
    struct gpu *gpu;
    pthread_mutex_t append, retire;
    struct action *actions[SIM_CHANNELS];
    uint64_t retired[SIM_CHANNELS];
    uint32_t pending[SIM_CHANNELS];  /* operations with an action */
    uint32_t streams[SIM_CHANNELS];  /* that use the channel */
    uint64_t order;
    int bell;                        /* futex: something happened in this process */
    int prompt;                      /* prompt actions and gates not run yet */
    uint64_t poll_ns;                /* the driver thread's: until it asks a shut gate again */
    bool driver;                     /* the driver thread runs */
};
struct work {
    uint32_t kind;                   /* enum sim_kind */
    uint32_t dep;
    uint64_t dep_seq;
    uint64_t ns;
    struct action action;
    uint64_t *seq;                   /* written before anybody can see the operation */
};
CUresult queue_append(struct queue *queue, uint32_t channel, const struct work *work);
bool queue_done(struct queue *queue, uint32_t channel, uint64_t seq); /* looks; runs what became due */
void queue_wait(struct queue *queue, uint32_t channel, uint64_t seq);
void queue_wait_all(struct queue *queue);
bool queue_idle(struct queue *queue);  /* looks */
void queues_ring(void);                /* memory that a gate may ask after has changed */
struct sim_channel *queue_channel(const struct queue *queue, uint32_t channel); /* once the GPU is joined */
uint64_t queue_tail(const struct queue *queue, uint32_t channel);
bool queue_behind(const struct queue *queue, uint32_t channel, uint64_t tail); /* not all before `tail` known done */

struct graph_pool {                  /* graph_memory.c */
    uint64_t reserved, reserved_high, used_high;
    uint64_t unfreed;                /* allocated by launches that need not be done */
    uint64_t hold[SIM_CHANNELS], hold_seq[SIM_CHANNELS]; /* more, until that operation is done */
};

struct gpu {
    struct sim_gpu conf;
    struct sim_map map;
    int ordinal;                     /* in this process */
    int host_index;                  /* in sim.conf */
    struct queue queue;
    struct CUctx_st *primary;
    unsigned primary_flags;
    struct CUmemPoolHandle_st *default_pool, *pool;
    struct graph_pool graphs;
};

/* ---- context.c ---- */
struct CUctx_st {
    struct object object;
    struct gpu *gpu;
    uint64_t id;
    unsigned flags, version, retained;
    bool primary, active;
    size_t limits[CU_LIMIT_MAX];
    int cache_config, shared_config;
    struct object *children;
    struct CUstream_st *legacy;
    uint32_t blocking;               /* bit per channel with blocking streams of this context */
    uint64_t legacy_saw[SIM_CHANNELS];
    int captures;                    /* under way on its streams */
    struct CUgreenCtx_st *green;     /* whose it is, or NULL. What is made in one is its primary context's, but for streams */
};
CUresult current_context(struct CUctx_st **ctx);
void context_drop_objects(struct CUctx_st *ctx);
/* Under api_lock. */
CUresult primary_retain(struct gpu *gpu, struct CUctx_st **ctx);
void primary_release(struct gpu *gpu); /* one that is retained */
CUresult context_new_green(struct CUgreenCtx_st *green, struct gpu *gpu, struct CUctx_st **ctx);
void context_drop_green(struct CUctx_st *ctx); /* its streams: the program's become detached */
void context_end_green(struct CUctx_st *ctx);
void greens_end(struct gpu *gpu);              /* green.c */

/* ---- stream.c ---- */
struct CUstream_st {
    struct object object;
    struct gpu *gpu;
    uint32_t channel;
    unsigned flags;
    int priority;
    bool legacy, per_thread;
    bool hidden;                     /* a green context's own */
    bool detached;                   /* its green context is gone */
    uint64_t id;
    uint64_t saw_legacy;             /* operations of the legacy stream known to be waited for */
    struct capture *capture;
    struct CUgraphNode_st **deps;    /* capturing: what the next node depends on */
    size_t deps_count;
};
/* The stream a handle means; fails also when the handle's context is not current and dead. */
CUresult stream_get(bool ptds, CUstream handle, struct CUstream_st **stream);
CUresult stream_new(struct CUctx_st *ctx, unsigned flags, int priority, struct CUstream_st **stream);
void stream_release(struct CUstream_st *stream);
CUresult stream_append(struct CUstream_st *stream, struct work *work); /* with the default stream's barriers */
CUresult stream_sync(struct CUstream_st *stream);
bool stream_idle(struct CUstream_st *stream);

/* ---- event.c ---- */
enum { EVENT_NEVER, EVENT_PENDING, EVENT_DONE };
struct CUevent_st {
    struct object object;
    struct gpu *gpu;                 /* where it was recorded */
    unsigned flags;
    int state;
    uint32_t channel;
    uint64_t seq, stamp_ns;
    unsigned refs;                   /* marks in flight */
    bool dead;
    uint64_t capture_id;             /* recorded in a capture: its id and place */
    struct CUgraphNode_st **deps;
    size_t deps_count;
    uint64_t *shared;                /* ipc_event.c: its place in memory shared with other processes, or NULL */
    bool foreign;                    /* made by another process */
};
CUresult event_record(struct CUevent_st *event, struct CUstream_st *stream);
CUresult event_wait(struct CUstream_st *stream, struct CUevent_st *event);
void event_release(struct CUevent_st *event);

/* ---- ipc_event.c: events of several processes; the state of one is that of its last record by any of them ---- */
void ipc_event_record(struct CUevent_st *event); /* just queued */
void ipc_event_forget(struct CUevent_st *event);
bool ipc_event_done(struct gpu *gpu, uint64_t word);
CUresult ipc_event_wait(struct CUstream_st *stream, struct CUevent_st *event);
void ipc_event_sync(struct CUevent_st *event);

/* ---- heap.c: addresses, and which block an address lies in ---- */
enum block_kind { BLOCK_DEVICE, BLOCK_MANAGED, BLOCK_POOL, BLOCK_HOST, BLOCK_REGISTERED, BLOCK_MAPPING, BLOCK_GLOBAL,
                  BLOCK_FILE, BLOCK_GRAPH, BLOCK_EXTERNAL, BLOCK_RESERVED };
struct block {
    uint64_t base, size;             /* as asked for */
    uint64_t charged;                /* on the device */
    uint64_t space;                  /* address space taken: what goes back */
    enum block_kind kind;
    unsigned flags;
    bool low;
    uint64_t id;
    struct CUctx_st *ctx;
    struct gpu *gpu;
    struct CUmemPoolHandle_st *pool;
    struct allocation *allocation;   /* BLOCK_MAPPING, BLOCK_EXTERNAL */
    uint64_t share;                  /* entry of the GPU's `share` that it is charged in, or 0 */
    unsigned refs;                   /* BLOCK_FILE: opened so often */
    bool live, orphan;               /* BLOCK_GRAPH: allocated by a launch and not freed; its node is gone */
    uint64_t offset;                 /* of the mapping in it */
    unsigned access;
    uint32_t rank;                   /* treap */
    struct block *left, *right;
};
/* All under api_lock. */
uint64_t space_alloc(uint64_t bytes, bool low, uint64_t *taken); /* 0: none left */
void space_free(uint64_t base, uint64_t taken, bool low);
/* Puts the pages of a space into a memfd, where they stay: the descriptor and the place of `base` in it; -1: cannot. */
int space_file(uint64_t base, uint64_t taken, uint64_t *offset);
struct block *block_insert(uint64_t base, uint64_t size, enum block_kind kind, struct CUctx_st *ctx, struct gpu *gpu);
struct block *block_find(uint64_t address); /* not BLOCK_RESERVED */
struct block *reservation_find(uint64_t address);
void block_remove(struct block *block);
void block_each(void (*see)(struct block *block, void *arg), void *arg);
/* memory.c */
#define ROUND512(n) (((uint64_t)(n) + 511) & ~511ull)
CUresult block_alloc(struct CUctx_st *ctx, struct gpu *gpu, uint64_t bytes, enum block_kind kind, bool low,
                     struct block **block);
void block_destroy(struct block *block);
bool device_range(uint64_t address, uint64_t bytes); /* takes api_lock */
void context_drop_memory(struct CUctx_st *ctx);

/* ---- pool.c ---- */
struct CUmemPoolHandle_st *pool_default(struct gpu *gpu);
void pool_trim_all(struct gpu *gpu);  /* at a synchronisation: down to the release threshold */
void pool_trim_locked(struct gpu *gpu, bool all); /* the same under api_lock, or all that can go */
CUresult pool_alloc(struct CUmemPoolHandle_st *pool, struct CUctx_st *ctx, uint64_t bytes, struct CUstream_st *stream,
                    CUdeviceptr *out);
CUresult pool_free(struct block *block, struct CUstream_st *stream); /* under api_lock; NULL stream: at once */

/* ---- module.c, image.c ---- */
enum duration { DURATION_FIXED, DURATION_ARGUMENT, DURATION_NULL };
struct CUfunc_st { /* also a CUkernel */
    struct object object;
    struct CUmod_st *module;
    char *name;
    enum duration duration;
    uint64_t ns;
    bool pair;
    int attributes[CU_FUNC_ATTRIBUTE_MAX];
    struct CUfunc_st *next;
    uint8_t params[256];             /* the legacy launch's */
};
struct global { char *name; uint64_t size; CUdeviceptr at; struct global *next; };
struct CUmod_st { /* also a CUlibrary */
    struct object object;
    bool library, open;              /* open: any name is a function of it */
    struct CUfunc_st *functions;
    struct global *globals;
    CUdeviceptr image;               /* what it takes up itself, and the id of that block; 0: nothing yet */
    uint64_t image_id;
};
bool image_parse(const void *image, struct CUmod_st *module);
struct CUfunc_st *module_function(struct CUmod_st *module, const char *name, bool add);
bool module_global(struct CUmod_st *module, const char *name, uint64_t size);
void module_release(struct CUmod_st *module);
void function_defaults(struct CUfunc_st *function);
CUresult function_of(CUfunction handle, struct CUfunc_st **function);
uint64_t kernel_ns(const struct CUfunc_st *function, void **params, void **extra);

/* ---- copy.c (memcpy.c and memset.c are its entry points), array.c ---- */
struct CUarray_st {
    struct object object;
    struct gpu *gpu;
    CUDA_ARRAY3D_DESCRIPTOR desc;
    uint64_t element, bytes;
    uint8_t *data;                   /* NULL: to be mapped later */
    bool level;                      /* of a mipmapped array */
};
CUresult array_check(const CUDA_ARRAY3D_DESCRIPTOR *desc);
bool array_bytes(const CUDA_ARRAY3D_DESCRIPTOR *desc, uint64_t *bytes); /* false: too many */
/* Under api_lock. The block is NULL for one to be mapped later. */
CUresult array_memory(struct CUctx_st *ctx, const CUDA_ARRAY3D_DESCRIPTOR *desc, uint64_t bytes, struct block **block);
struct CUarray_st *array_new(struct CUctx_st *ctx, const CUDA_ARRAY3D_DESCRIPTOR *desc, uint64_t bytes, void *data);
struct copy { /* a box of bytes; host and device addresses alike */
    uint8_t *dst;
    const uint8_t *src;
    uint64_t dst_pitch, src_pitch, dst_slice, src_slice; /* bytes a row, bytes a layer */
    uint64_t width, height, depth;
};
struct fill {
    uint8_t *dst;
    uint64_t pitch, width, height;   /* width in elements */
    uint32_t value, element;
};
CUresult copy_of_3d(const CUDA_MEMCPY3D *from, struct copy *copy);
/* What an entry point asks for: into the capture under way if there is one; waits when `sync`. */
CUresult copy_request(bool ptds, CUstream stream, const struct copy *copy, const CUDA_MEMCPY3D *box, bool sync);
CUresult fill_request(bool ptds, CUstream stream, const struct fill *fill, bool sync);
CUresult copy_submit(struct CUstream_st *stream, const struct copy *copy, bool prompt); /* never into a graph */
CUresult fill_submit(struct CUstream_st *stream, const struct fill *fill, bool prompt);
CUresult host_submit(struct CUstream_st *stream, CUhostFn fn, void *data);
CUresult kernel_submit(struct CUstream_st *stream, uint64_t ns);
CUresult pair_submit(struct CUstream_st *stream, uint64_t ns); /* pair.c */

/* ---- capture.c, graph.c ---- */
struct capture {
    uint64_t id;
    struct CUgraph_st *graph;
    bool own_graph;                  /* made here, not begun into an existing one */
    CUstreamCaptureMode mode;
    CUstreamCaptureStatus status;
    struct CUstream_st *origin;
    struct thread_state *thread;
    int streams;
};
struct node_params {
    CUgraphNodeType type;
    uint64_t ns;
    CUDA_KERNEL_NODE_PARAMS kernel;
    struct copy copy;
    CUDA_MEMCPY3D copy3d;
    struct fill fill;
    CUDA_MEMSET_NODE_PARAMS memset;
    CUDA_HOST_NODE_PARAMS host;
    struct CUevent_st *event;
    struct CUgraph_st *child;
    CUdeviceptr dptr;
    uint64_t bytes;
    struct memops *memops;           /* memop.h; each copy of the parameters that is kept has a reference */
};
/* Adds what would have been queued to the capture under way on the stream. Under api_lock. */
CUresult capture_add(struct CUstream_st *stream, const struct node_params *params);
/* A call that a capture forbids: fails, and the captures concerned are over, when one is under way. */
CUresult capture_forbids(void);
CUresult capture_forbids_sync(struct CUstream_st *stream);
void capture_invalidate(struct capture *capture);
CUresult capture_record(struct CUevent_st *event, struct CUstream_st *stream);
CUresult capture_join(struct CUstream_st *stream, struct CUevent_st *event);
void capture_drop(struct CUstream_st *stream);
struct CUgraph_st *graph_new(void);
CUresult graph_add(struct CUgraph_st *graph, const struct node_params *params, struct CUgraphNode_st *const *deps,
                   size_t count,
                   struct CUgraphNode_st **node);
/* graph_memory.c, under api_lock */
CUresult graph_address(struct CUctx_st *ctx, uint64_t bytes, CUdeviceptr *pointer);
struct block *graph_block(CUdeviceptr pointer); /* that an allocation node stands for, or NULL */
void graph_forget(CUdeviceptr pointer);
CUresult graph_free(struct block *block, struct CUstream_st *stream);
void graph_drop(struct block *block);
void graph_trim_locked(struct gpu *gpu);
extern int captures_active;          /* in this process */
bool stream_capturing_blocked(struct CUstream_st *stream); /* legacy stream while a blocking stream captures */
#endif
