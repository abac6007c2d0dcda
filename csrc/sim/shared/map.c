/* map.c: opening a simulated GPU, taking a slot, telling the living from the dead. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>
#include "shared/state.h"

/* ---- opening ---- */

static void initialise(struct sim_state *state, const struct sim_gpu *gpu)
{
    pthread_mutexattr_t attr;
    pthread_mutexattr_init(&attr);
    pthread_mutexattr_setpshared(&attr, PTHREAD_PROCESS_SHARED);
    pthread_mutexattr_setrobust(&attr, PTHREAD_MUTEX_ROBUST);
    pthread_mutex_init(&state->mutex, &attr);
    pthread_mutexattr_destroy(&attr);
    state->now_ns = now_ns();
    state->total = gpu->bytes;
    state->header_size = offsetof(struct sim_state, proc);
    state->slot_size = sizeof(struct sim_proc);
    state->current = -1;
    state->version = SIM_VERSION;
    store_release(&state->magic, SIM_MAGIC);
}

static struct sim_state *map_file(int fd)
{
    void *at = mmap(NULL, sizeof(struct sim_state), PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, fd, 0);
    if (at == MAP_FAILED)
        return NULL;
    madvise(at, sizeof(struct sim_state), MADV_DONTDUMP);
    return at;
}

/* Makes the file aside and links it into place, so that nobody ever sees half of one. */
static int create_state(const char *path, const struct sim_gpu *gpu)
{
    char aside[PATH_MAX + 32];
    int result = 0;
    snprintf(aside, sizeof aside, "%s.%d", path, (int)getpid());
    unlink(aside);
    int fd = open(aside, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
    if (fd < 0)
        return -errno;
    if (fchmod(fd, 0666) < 0 || ftruncate(fd, sizeof(struct sim_state)) < 0) {
        result = -errno;
    } else {
        struct sim_state *state = map_file(fd);
        if (!state) {
            result = -errno;
        } else {
            initialise(state, gpu);
            munmap(state, sizeof *state);
            if (link(aside, path) < 0 && errno != EEXIST)
                result = -errno;
        }
    }
    unlink(aside);
    close(fd);
    return result;
}

/* No O_CREAT on what may exist: fs.protected_regular refuses that on another user's file in a sticky folder. */
static int open_or_create(const char *path, const struct sim_gpu *gpu)
{
    for (int tries = 0; tries < 3; tries++) {
        int fd = open(path, O_RDWR | O_CLOEXEC);
        if (fd >= 0 || errno != ENOENT)
            return fd >= 0 ? fd : -errno;
        if (gpu) {
            int error = create_state(path, gpu);
            if (error)
                return error;
        } else {
            fd = open(path, O_RDWR | O_CREAT | O_EXCL | O_CLOEXEC, 0666);
            if (fd >= 0) {
                if (fchmod(fd, 0666) < 0) { /* the umask */
                    int error = -errno;
                    close(fd);
                    return error;
                }
                return fd;
            }
            if (errno != EEXIST)
                return -errno;
        }
    }
    return -EBUSY;
}

/* NULL: not a file of this version. A shorter one must not be touched at all: SIGBUS. */
static struct sim_state *map_if_ours(int fd)
{
    if (lseek(fd, 0, SEEK_END) != (off_t)sizeof(struct sim_state))
        return NULL;
    struct sim_state *state = map_file(fd);
    if (state && (load_acquire(&state->magic) != SIM_MAGIC || state->version != SIM_VERSION)) {
        munmap(state, sizeof *state);
        state = NULL;
    }
    return state;
}

/* sim.conf gives the GPU another size than the file was made with: fine while nobody uses it. */
static int resize(struct sim_map *map, uint64_t bytes)
{
    int result = 0;
    sim_lock(map);
    sim_reap(map);
    if (sim_live(map->state, 0) >= 0 && map->state->total != bytes)
        result = -EBUSY;
    else
        map->state->total = bytes;
    sim_unlock(map);
    return result;
}

int sim_open(const struct sim_gpu *gpu, struct sim_map *map)
{
    char path[PATH_MAX];
    const char *dir = sim_dir();
    if (strlen(dir) > PATH_MAX - 80)
        return -ENAMETOOLONG;
    if (mkdir(dir, 0777) == 0)
        (void)!chmod(dir, 01777);
    snprintf(path, sizeof path, "%s/gpu-%s.alive", dir, gpu->uuid_text + 4);
    int alive = open_or_create(path, NULL);
    if (alive < 0)
        return alive;
    snprintf(path, sizeof path, "%s/gpu-%s.state", dir, gpu->uuid_text + 4);
    struct sim_state *state = NULL;
    for (int tries = 0; !state && tries < 2; tries++) {
        int fd = open_or_create(path, gpu);
        if (fd < 0)
            return fd; /* `alive` stays open: see sim_map */
        state = map_if_ours(fd);
        close(fd);
        if (!state && unlink(path) < 0) /* another version's */
            return -EINVAL;
    }
    if (!state)
        return -EINVAL;
    map->state = state;
    map->alive = alive;
    map->slot = -1;
    int error = state->total == gpu->bytes ? 0 : resize(map, gpu->bytes);
    if (error) {
        munmap(state, sizeof *state);
        map->state = NULL;
    }
    return error;
}

/* ---- the mutex ---- */

/* The owner died inside. Nothing is lost but what it was doing: see "Dying" in state.h. */
static void repair(struct sim_map *map)
{
    struct sim_state *state = map->state;
    if (state->slots > SIM_PROCS)
        state->slots = SIM_PROCS;
    memset(state->live, 0, sizeof state->live);
    for (uint32_t i = 0; i < state->slots; i++) {
        struct sim_proc *proc = &state->proc[i];
        uint64_t completed = 0;
        if (proc->state != SIM_LIVE)
            continue;
        state->live[i / 64] |= 1ull << i % 64;
        proc->looked_ns = 0;
        for (uint32_t used = load_acquire(&proc->used); used; used &= used - 1)
            completed += state->queues[i].channel[__builtin_ctz(used)].head;
        proc->completed = completed;
    }
    sim_share_repair(state);
    state->current = -1;
    sim_reap(map);
}

void sim_lock(struct sim_map *map)
{
    if (pthread_mutex_lock(&map->state->mutex) == EOWNERDEAD) {
        pthread_mutex_consistent(&map->state->mutex);
        repair(map);
    }
}

void sim_unlock(struct sim_map *map)
{
    pthread_mutex_unlock(&map->state->mutex);
}

/* ---- life ---- */

static struct flock lock_of(int slot, short type)
{
    return (struct flock){.l_type = type, .l_whence = SEEK_SET, .l_start = slot, .l_len = 1};
}

struct identity { uint64_t pid_ns, start_ticks; };

static uint64_t number_at(const char *text)
{
    uint64_t value = 0;
    while (*text >= '0' && *text <= '9')
        value = value * 10 + (uint64_t)(*text++ - '0');
    return value;
}

static struct identity identity_of_self(void)
{
    struct identity self = {0, 0};
    char text[1024];
    ssize_t n = readlink("/proc/self/ns/pid", text, sizeof text - 1);
    if (n > 5) {
        text[n] = 0;
        self.pid_ns = number_at(text + 5); /* pid:[4026531836] */
    }
    int fd = open("/proc/self/stat", O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return self;
    n = read(fd, text, sizeof text - 1);
    close(fd);
    text[n > 0 ? n : 0] = 0;
    char *at = strrchr(text, ')'); /* the name may hold anything */
    for (int field = 2; at && field < 22; field++) {
        at = strchr(at, ' ');
        at = at ? at + 1 : NULL;
    }
    self.start_ticks = at ? number_at(at) : 0;
    return self;
}

int sim_pid(struct sim_map *map, int slot)
{
    struct sim_proc *proc = &map->state->proc[slot];
    if (proc->state != SIM_LIVE)
        return 0;
    if (slot == map->slot)
        return getpid();
    struct flock lock = lock_of(slot, F_WRLCK);
    if (fcntl(map->alive, F_GETLK, &lock) < 0)
        return -1; /* cannot tell: never empty a slot for that */
    if (lock.l_type != F_UNLCK)
        return lock.l_pid > 0 ? lock.l_pid : -1; /* 0: in a PID namespace that we do not see */
    /* A process sees no lock of its own: the other library in this process (NVML beside CUDA) may hold it. */
    if (proc->pid == (uint32_t)getpid()) {
        struct identity self = identity_of_self();
        if (proc->pid_ns == self.pid_ns && proc->start_ticks == self.start_ticks)
            return getpid();
    }
    return 0;
}

/* Whoever stops in the middle leaves a live slot of a dead process: it is emptied again. */
void sim_empty(struct sim_state *state, int slot)
{
    struct sim_proc *proc = &state->proc[slot];
    for (uint32_t used = proc->used; used; used &= used - 1) {
        struct sim_channel *channel = &state->queues[slot].channel[__builtin_ctz(used)];
        store_release(&channel->head, load_acquire(&channel->tail));
    }
    proc->mem_used = proc->mem_own = 0;
    sim_share_leave(state, slot);
    store_release(&proc->state, SIM_DEAD);
    state->live[slot / 64] &= ~(1ull << slot % 64);
    if (state->current == slot)
        state->current = -1;
    state->reaped++;
}

void sim_reap(struct sim_map *map)
{
    for (int i = sim_live(map->state, 0); i >= 0; i = sim_live(map->state, i + 1))
        if (sim_pid(map, i) == 0)
            sim_empty(map->state, i);
}

/* A few of the slots, in turn: what comes in makes room for what comes later, and pays no more for a full GPU. */
static void sweep(struct sim_map *map)
{
    struct sim_state *state = map->state;
    for (int n = 0; n < SIM_SWEEP; n++) {
        int slot = sim_live(state, (int)(state->sweep % SIM_PROCS));
        if (slot < 0) {
            state->sweep = 0;
            break;
        }
        if (sim_pid(map, slot) == 0)
            sim_empty(state, slot);
        state->sweep = (uint32_t)slot + 1;
    }
}

/* The first free slot whose lock can be had: its last process may have let go of it, but not be gone yet. */
static int take_slot(struct sim_map *map)
{
    for (int slot = 0; slot < SIM_PROCS; slot++) {
        struct flock lock = lock_of(slot, F_WRLCK);
        if (map->state->proc[slot].state != SIM_LIVE && fcntl(map->alive, F_SETLK, &lock) == 0)
            return slot;
    }
    return -1;
}

int sim_join(struct sim_map *map)
{
    struct sim_state *state = map->state;
    struct identity self = identity_of_self();
    if (map->slot >= 0)
        return 0;
    sim_lock(map);
    sim_advance(map, now_ns()); /* the dead's last device time is theirs */
    sweep(map);
    int slot = take_slot(map);
    if (slot < 0) {
        sim_reap(map);
        slot = take_slot(map);
    }
    if (slot >= 0) {
        struct sim_proc *proc = &state->proc[slot];
        for (uint32_t used = proc->used; used; used &= used - 1) {
            struct sim_channel *channel = &state->queues[slot].channel[__builtin_ctz(used)];
            channel->head = channel->tail = 0;
        }
        *proc = (struct sim_proc){.pid = (uint32_t)getpid(), .pid_ns = self.pid_ns, .start_ticks = self.start_ticks,
                                  .generation = proc->generation + 1};
        if (state->slots <= (uint32_t)slot)
            state->slots = (uint32_t)slot + 1;
        map->slot = slot;
        store_release(&proc->state, SIM_LIVE);
        state->live[slot / 64] |= 1ull << slot % 64;
    }
    sim_unlock(map);
    return slot < 0 ? -EAGAIN : 0;
}

void sim_forget(struct sim_map *map)
{
    map->slot = -1;
}
