/* ipc_event.c: events of several processes. Such an event is a word in a file that its maker shares: which operation of
 * which process was its last record. Anybody can see from the GPU's shared state whether that one is done. */
#define _GNU_SOURCE
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <time.h>
#include <unistd.h>
#include "cuda/vmm.h"

#define PLACES    131072u
#define BYTES     (PLACES * sizeof(uint64_t))
#define LOOK_NS   50000u

API cuIpcGetEventHandle(CUipcEventHandle *handle, CUevent event);
API cuIpcOpenEventHandle(CUevent *event, CUipcEventHandle handle);

/* ---- the word: 0 never recorded, else slot (10 bits), channel (5), generation (13), operation + 1 (36) ---- */

_Static_assert(SIM_PROCS <= 1024 && SIM_CHANNELS <= 32, "fit their bits");

void ipc_event_record(struct CUevent_st *event)
{
    const struct sim_map *map = &event->gpu->map;
    uint64_t generation = map->state->proc[map->slot].generation & 0x1fff;
    uint64_t word = (uint64_t)map->slot << 54 | (uint64_t)event->channel << 49 | generation << 36 |
                    ((load_acquire(&event->seq) + 1) & 0xfffffffffull);
    store_release(event->shared, word);
}

bool ipc_event_done(struct gpu *gpu, uint64_t word)
{
    struct sim_map *map = &gpu->map;
    int slot = (int)(word >> 54);
    if (!word)
        return true;
    sim_lock(map);
    sim_advance(map, now_ns());
    uint32_t generation = map->state->proc[slot].generation;
    bool done = (generation & 0x1fff) != (word >> 36 & 0x1fff) ||
                sim_done(map, slot, generation, (uint32_t)(word >> 49 & 31), (word & 0xfffffffffull) - 1);
    sim_unlock(map);
    return done;
}

void ipc_event_sync(struct CUevent_st *event)
{
    uint64_t word = load_acquire(event->shared);
    struct timespec pause = {.tv_nsec = LOOK_NS};
    while (!ipc_event_done(event->object.ctx->gpu, word))
        nanosleep(&pause, NULL);
}

/* ---- waiting in a stream: a gate that opens when the record is done ---- */

struct wait { struct gpu *gpu; uint64_t word; };

static bool is_done(void *arg)
{
    struct wait *wait = arg;
    return ipc_event_done(wait->gpu, wait->word);
}

static void end_wait(void *arg, uint64_t seq, uint64_t done_ns)
{
    (void)seq;
    (void)done_ns;
    free(arg);
}

CUresult ipc_event_wait(struct CUstream_st *stream, struct CUevent_st *event)
{
    struct wait now = {event->object.ctx->gpu, load_acquire(event->shared)};
    if (ipc_event_done(now.gpu, now.word))
        return CUDA_SUCCESS;
    struct wait *wait = malloc(sizeof *wait);
    struct work gate = {.kind = SIM_GATE, .action = {.run = end_wait, .arg = wait, .gate = true, .ready = is_done,
                                                     .prompt = true}};
    if (!wait)
        return CUDA_ERROR_OUT_OF_MEMORY;
    *wait = now;
    CUresult result = stream_append(stream, &gate);
    if (result != CUDA_SUCCESS)
        free(wait);
    return result;
}

/* ---- places for them; under api_lock ---- */

static int places_file = -1;
static uint64_t *places;
static uint32_t places_used;
static uint32_t *places_free, places_free_count; /* used again when there are no new ones: openers may still look */

static bool make_places(void)
{
    struct label label = {.kind = LABEL_EVENTS};
    if (places)
        return true;
    places_file = shared_file_new(BYTES, &label);
    if (places_file < 0)
        return false;
    void *at = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, places_file, 0);
    places_free = calloc(PLACES, sizeof *places_free);
    if (at == MAP_FAILED || !places_free) {
        if (at != MAP_FAILED)
            munmap(at, BYTES);
        free(places_free);
        close(places_file);
        return false;
    }
    places = at;
    return true;
}

/* Of an event that is over: its memory may be used again, its place too. */
void ipc_event_forget(struct CUevent_st *event)
{
    if (!event->foreign)
        places_free[places_free_count++] = (uint32_t)(event->shared - places);
    event->shared = NULL;
}

static CUresult take_place(struct CUevent_st *event)
{
    if (event->shared)
        return CUDA_SUCCESS;
    if (!make_places() || (places_used == PLACES && !places_free_count))
        return CUDA_ERROR_OUT_OF_MEMORY;
    uint32_t place = places_used < PLACES ? places_used++ : places_free[--places_free_count];
    places[place] = 0;
    event->shared = &places[place];
    if (load_acquire(&event->state) == EVENT_PENDING)
        ipc_event_record(event);
    return CUDA_SUCCESS;
}

API cuIpcGetEventHandle(CUipcEventHandle *out, CUevent event)
{
    CHECK_INIT();
    if (!object_is(event, OBJ_EVENT))
        return CUDA_ERROR_INVALID_HANDLE;
    if (!out || !(event->flags & CU_EVENT_INTERPROCESS) || event->foreign)
        return CUDA_ERROR_INVALID_VALUE;
    pthread_mutex_lock(&api_lock);
    CUresult result = take_place(event);
    if (result == CUDA_SUCCESS) {
        struct ipc_handle handle = ipc_handle_of(event->object.ctx->gpu, IPC_EVENT, places_file);
        handle.offset = (uint64_t)(event->shared - places) * sizeof(uint64_t);
        memcpy(out, &handle, sizeof handle);
    }
    pthread_mutex_unlock(&api_lock);
    return result;
}

/* One mapping for each process whose events are opened; it stays. */
static struct theirs { uint64_t inode; uint64_t *places; struct theirs *next; } *theirs;

static uint64_t *places_of(int file)
{
    struct label label;
    uint64_t inode = shared_file_inode(file);
    for (struct theirs *known = theirs; known; known = known->next)
        if (known->inode == inode)
            return known->places;
    struct theirs *one = malloc(sizeof *one);
    bool good = one && shared_file_label(file, LABEL_EVENTS, &label) && label.size == BYTES;
    void *at = good ? mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0) : MAP_FAILED;
    if (at == MAP_FAILED) {
        free(one);
        return NULL;
    }
    *one = (struct theirs){inode, at, theirs};
    theirs = one;
    return at;
}

API cuIpcOpenEventHandle(CUevent *out, CUipcEventHandle given)
{
    struct ipc_handle handle;
    struct CUctx_st *ctx;
    int file;
    CHECK_INIT();
    if (!out)
        return CUDA_ERROR_INVALID_VALUE;
    memcpy(&handle, &given, sizeof handle);
    if (handle.offset >= BYTES || handle.offset % sizeof(uint64_t))
        return CUDA_ERROR_INVALID_HANDLE;
    TRY(ipc_open(&handle, IPC_EVENT, &ctx, &file));
    pthread_mutex_lock(&api_lock);
    uint64_t *base = places_of(file);
    struct CUevent_st *event = base ? object_new(OBJ_EVENT, sizeof *event, ctx) : NULL;
    if (event) {
        event->flags = CU_EVENT_INTERPROCESS | CU_EVENT_DISABLE_TIMING;
        event->shared = base + handle.offset / sizeof(uint64_t);
        event->foreign = true;
        *out = event;
    }
    pthread_mutex_unlock(&api_lock);
    close(file);
    return event ? CUDA_SUCCESS : base ? CUDA_ERROR_OUT_OF_MEMORY : CUDA_ERROR_INVALID_HANDLE;
}
