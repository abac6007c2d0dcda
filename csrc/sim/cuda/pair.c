/* pair.c: kernels on several GPUs that wait for each other, as a collective's do ("cgpu_pair" in sim.h).
 *
 * Each occupies its GPU from when it begins, and does not end until its length after all of its group have begun. A GPU is
 * simulated by whoever looks at it, one GPU at a time, so this waiting is done by a thread of the process that launched
 * them: until it has seen all begin, each has an hour to run. It looks every LOOK_NS, by which they last too long. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <time.h>
#include <unistd.h>
#include "cuda/sim.h"

#define LOOK_NS  20000u
#define LONG_NS  3600000000000ull

struct part {
    uint32_t channel;
    uint64_t seq, ns;
};

struct side { /* one GPU's, in order of launching */
    struct gpu *gpu;
    struct part part[SIM_DEPTH];
    uint64_t head, tail;
};

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static pthread_cond_t some = PTHREAD_COND_INITIALIZER;
static struct side *sides[SIM_GPUS];
static pid_t thread_of;

static struct sim_op *op_of(const struct side *side)
{
    const struct part *part = &side->part[side->head % SIM_DEPTH];
    return &queue_channel(&side->gpu->queue, part->channel)->ring[part->seq % SIM_DEPTH];
}

static bool begun(const struct side *side)
{
    struct sim_map *map = &side->gpu->map;
    sim_lock(map);
    sim_advance(map, now_ns());
    bool yes = op_of(side)->start_ns != 0;
    sim_unlock(map);
    return yes;
}

static void finish_in_time(struct side *side)
{
    struct sim_map *map = &side->gpu->map;
    sim_lock(map);
    sim_advance(map, now_ns());
    op_of(side)->left_ns = side->part[side->head % SIM_DEPTH].ns;
    sim_unlock(map);
    side->head++;
    fetch_add(&side->gpu->queue.bell, 1); /* whoever sleeps until a predicted time predicts again */
    syscall(SYS_futex, &side->gpu->queue.bell, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

/* When to look again, 0 = when something is launched. */
static uint64_t look(void)
{
    unsigned waiting = 0;
    uint64_t length = 0;
    for (int i = 0; i < SIM_GPUS; i++)
        waiting += sides[i] && sides[i]->head < sides[i]->tail;
    if (waiting < 2)
        return 0;
    for (int i = 0; i < SIM_GPUS; i++)
        if (sides[i] && sides[i]->head < sides[i]->tail && !begun(sides[i]))
            return now_ns() + LOOK_NS;
    for (int i = 0; i < SIM_GPUS; i++)
        if (sides[i] && sides[i]->head < sides[i]->tail) {
            length = sides[i]->part[sides[i]->head % SIM_DEPTH].ns;
            finish_in_time(sides[i]);
        }
    return now_ns() + (length > LOOK_NS ? length : LOOK_NS);
}

static void *waiter(void *unused)
{
    (void)unused;
    prctl(PR_SET_NAME, "cuda-pairs", 0, 0, 0);
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    pthread_mutex_lock(&lock);
    for (;;) {
        uint64_t when = look();
        if (!when) {
            pthread_cond_wait(&some, &lock);
            continue;
        }
        pthread_mutex_unlock(&lock);
        struct timespec until = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
        syscall(SYS_clock_nanosleep, CLOCK_MONOTONIC, TIMER_ABSTIME, &until, NULL);
        pthread_mutex_lock(&lock);
    }
    return NULL;
}

static CUresult start(void)
{
    sigset_t all, before;
    pthread_t thread;
    if (thread_of == getpid())
        return CUDA_SUCCESS;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    int error = pthread_create(&thread, NULL, waiter, NULL);
    pthread_sigmask(SIG_SETMASK, &before, NULL);
    if (error)
        return CUDA_ERROR_OPERATING_SYSTEM;
    pthread_detach(thread);
    thread_of = getpid();
    return CUDA_SUCCESS;
}

CUresult pair_submit(struct CUstream_st *stream, uint64_t ns)
{
    struct part part = {.channel = stream->channel, .ns = ns ? ns : 1};
    struct work work = {.kind = SIM_KERNEL, .ns = LONG_NS, .seq = &part.seq};
    int at = stream->gpu->ordinal;
    CUresult result = stream_append(stream, &work);
    if (result != CUDA_SUCCESS)
        return result;
    pthread_mutex_lock(&lock);
    if (!sides[at])
        sides[at] = calloc(1, sizeof *sides[at]);
    result = sides[at] ? start() : CUDA_ERROR_OUT_OF_MEMORY;
    if (result == CUDA_SUCCESS) {
        sides[at]->gpu = stream->gpu;
        sides[at]->part[sides[at]->tail++ % SIM_DEPTH] = part;
        pthread_cond_signal(&some);
    }
    pthread_mutex_unlock(&lock);
    return result;
}
