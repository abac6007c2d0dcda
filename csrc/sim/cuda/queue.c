/* queue.c: putting operations into this process's queues, waiting for them, and doing what is due when they are done.
 * */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <linux/futex.h>
#include <signal.h>
#include <stdlib.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "cuda/sim.h"

#define SPIN_NS  8000u      /* below this a sleep costs more than it saves */
#define LOOK_NS  10000000u  /* no sleep is longer than this without a look */
#define ASK_NS   20000u     /* a shut gate is asked again after this, then ever more seldom */
#define ASK_MAX_NS 1000000u
/* a full queue is looked at this seldom (but before it is a quarter empty), not once a kernel */
#define SPACE_NS 1000000u

static struct sim_proc *proc_of(const struct queue *queue)
{
    return &queue->gpu->map.state->proc[queue->gpu->map.slot];
}

struct sim_channel *queue_channel(const struct queue *queue, uint32_t channel)
{
    const struct sim_map *map = &queue->gpu->map;
    return &map->state->queues[map->slot].channel[channel];
}

uint64_t queue_tail(const struct queue *queue, uint32_t channel)
{
    return load_acquire(&queue_channel(queue, channel)->tail);
}

bool queue_behind(const struct queue *queue, uint32_t channel, uint64_t tail)
{
    return load_acquire(&queue_channel(queue, channel)->head) < tail;
}

/* ---- sleeping ---- */

static void ring(struct queue *queue)
{
    fetch_add(&queue->bell, 1);
    syscall(SYS_futex, &queue->bell, FUTEX_WAKE_PRIVATE, INT_MAX, NULL, NULL, 0);
}

void queues_ring(void)
{
    for (int i = 0; i < gpu_count; i++)
        if (load_acquire(&gpus[i]->queue.driver))
            ring(&gpus[i]->queue);
}

/* Until `when` or the bell moves on from `seen`. Errno is the program's. */
static void sleep_until(struct queue *queue, int seen, uint64_t when)
{
    uint64_t now = now_ns();
    if (when <= now)
        return;
    if (when - now < SPIN_NS) {
        while (now_ns() < when && load_relaxed(&queue->bell) == seen)
            __builtin_ia32_pause();
        return;
    }
    int saved = errno;
    int slack = prctl(PR_GET_TIMERSLACK, 0, 0, 0, 0); /* 50 us by default, half a kernel */
    prctl(PR_SET_TIMERSLACK, 1, 0, 0, 0);
    struct timespec until = {.tv_sec = (time_t)(when / 1000000000u), .tv_nsec = (long)(when % 1000000000u)};
    syscall(SYS_futex, &queue->bell, FUTEX_WAIT_BITSET_PRIVATE, seen, &until, NULL, FUTEX_BITSET_MATCH_ANY);
    if (slack > 0)
        prctl(PR_SET_TIMERSLACK, (unsigned long)slack, 0, 0, 0);
    errno = saved;
}

/* ---- actions ---- */

/* Runs the actions of all operations that are done, in the order of their device time over all queues. */
static void retire(struct queue *queue)
{
    pthread_mutex_lock(&queue->retire);
    for (;;) {
        uint64_t least = UINT64_MAX;
        uint32_t best = 0;
        for (uint32_t used = load_acquire(&proc_of(queue)->used); used; used &= used - 1) {
            uint32_t c = (uint32_t)__builtin_ctz(used);
            struct sim_channel *channel = queue_channel(queue, c);
            uint64_t head = load_acquire(&channel->head), at = load_relaxed(&queue->retired[c]);
            if (at >= head)
                continue;
            if (load_acquire(&queue->pending[c]) == 0)
                at = head;
            while (at < head && !queue->actions[c][at % SIM_DEPTH].run)
                at++;
            store_release(&queue->retired[c], at);
            if (at < head && channel->ring[at % SIM_DEPTH].done_ns < least) {
                least = channel->ring[at % SIM_DEPTH].done_ns;
                best = c;
            }
        }
        if (least == UINT64_MAX)
            break;
        uint64_t seq = queue->retired[best];
        struct action action = queue->actions[best][seq % SIM_DEPTH];
        if (!action.gate)
            action.run(action.arg, seq, least);
        if (action.prompt)
            fetch_sub(&queue->prompt, 1);
        fetch_sub(&queue->pending[best], 1);
        store_release(&queue->retired[best], seq + 1);
    }
    pthread_mutex_unlock(&queue->retire);
}

static void look(struct queue *queue)
{
    sim_lock(&queue->gpu->map);
    sim_advance(&queue->gpu->map, now_ns());
    sim_unlock(&queue->gpu->map);
    retire(queue);
}

struct gates { int count; uint32_t channel[SIM_CHANNELS]; uint64_t seq[SIM_CHANNELS]; };

/* Under the device's mutex: the gates that have begun, and when to look for the next prompt action. */
static void find_gates(struct queue *queue, struct gates *gates, uint64_t *next)
{
    struct sim_proc *proc = proc_of(queue);
    for (uint32_t used = load_acquire(&proc->used); used; used &= used - 1) {
        uint32_t c = (uint32_t)__builtin_ctz(used);
        struct sim_channel *channel = queue_channel(queue, c);
        uint64_t tail = load_acquire(&channel->tail);
        if (load_acquire(&queue->pending[c]) == 0)
            continue;
        for (uint64_t at = channel->head; at < tail; at++) { /* what is before it, retire() will find */
            const struct action *action = &queue->actions[c][at % SIM_DEPTH];
            if (!action->prompt)
                continue;
            if (action->gate && at == channel->head) {
                if (channel->ring[at % SIM_DEPTH].start_ns) {
                    gates->channel[gates->count] = c;
                    gates->seq[gates->count++] = at;
                }
                break;
            }
            uint64_t when = sim_predict(&queue->gpu->map, c, action->gate ? at - 1 : at);
            if (when < *next)
                *next = when;
            break;
        }
    }
}

/* The first that may open, or -1. */
static int open_gate(struct queue *queue, const struct gates *gates)
{
    for (int i = 0; i < gates->count; i++) {
        const struct action *action = &queue->actions[gates->channel[i]][gates->seq[i] % SIM_DEPTH];
        if (!action->ready || action->ready(action->arg))
            return i;
    }
    return -1;
}

static void *driver_thread(void *arg)
{
    struct queue *queue = arg;
    prctl(PR_SET_NAME, "cuda-driver", 0, 0, 0);
    for (;;) {
        int seen = load_acquire(&queue->bell);
        uint64_t next = now_ns() + LOOK_NS;
        struct gates gates = {.count = 0};
        sim_lock(&queue->gpu->map);
        sim_advance(&queue->gpu->map, now_ns());
        find_gates(queue, &gates, &next);
        sim_unlock(&queue->gpu->map);
        retire(queue); /* all that was done before the gate began */
        int open = open_gate(queue, &gates);
        if (open >= 0) {
            uint32_t gate = gates.channel[open];
            uint64_t seq = gates.seq[open];
            struct action action = queue->actions[gate][seq % SIM_DEPTH];
            queue->poll_ns = 0;
            sim_thread.in_callback = true;
            action.run(action.arg, seq, 0);
            sim_thread.in_callback = false;
            sim_lock(&queue->gpu->map);
            uint64_t now = now_ns();
            sim_advance(&queue->gpu->map, now);
            sim_open_gate(&queue->gpu->map, gate, now);
            sim_unlock(&queue->gpu->map);
            retire(queue);
            ring(queue);
            continue;
        }
        if (gates.count) {
            queue->poll_ns = queue->poll_ns * 2 < ASK_MAX_NS ? queue->poll_ns * 2 : ASK_MAX_NS;
            queue->poll_ns = queue->poll_ns > ASK_NS ? queue->poll_ns : ASK_NS;
            uint64_t ask = now_ns() + queue->poll_ns;
            next = ask < next ? ask : next;
        }
        sleep_until(queue, seen, load_acquire(&queue->prompt) ? next : now_ns() + 3600ull * 1000000000u);
    }
    return NULL;
}

static CUresult start_driver(struct queue *queue)
{
    sigset_t all, before;
    pthread_t thread;
    pthread_mutex_lock(&queue->retire);
    int error = 0;
    if (!queue->driver) {
        sigfillset(&all);
        pthread_sigmask(SIG_SETMASK, &all, &before); /* the program's signals are not for this thread */
        error = pthread_create(&thread, NULL, driver_thread, queue);
        pthread_sigmask(SIG_SETMASK, &before, NULL);
        if (!error) {
            pthread_detach(thread);
            store_release(&queue->driver, true);
        }
    }
    pthread_mutex_unlock(&queue->retire);
    return error ? CUDA_ERROR_OPERATING_SYSTEM : CUDA_SUCCESS;
}

/* ---- appending ---- */

static bool full(const struct queue *queue, uint32_t c)
{
    return queue_channel(queue, c)->tail - load_acquire(&queue->retired[c]) >= SIM_DEPTH;
}

static void wait_for_space(struct queue *queue, uint32_t c)
{
    for (;;) {
        int seen = load_acquire(&queue->bell);
        sim_lock(&queue->gpu->map);
        uint64_t now = now_ns();
        sim_advance(&queue->gpu->map, now);
        uint64_t when = sim_predict(&queue->gpu->map, c, queue_channel(queue, c)->head);
        uint64_t dry = sim_predict(&queue->gpu->map, c, queue_channel(queue, c)->tail - 1);
        sim_unlock(&queue->gpu->map);
        retire(queue);
        if (!full(queue, c))
            return;
        uint64_t rest = dry > now ? (dry - now) / 4 : 0;
        rest = rest < SPACE_NS ? rest : SPACE_NS;
        if (when < now + rest)
            when = now + rest;
        sleep_until(queue, seen, when < now + LOOK_NS ? when : now + LOOK_NS);
    }
}

CUresult queue_append(struct queue *queue, uint32_t c, const struct work *work)
{
    struct sim_proc *proc = proc_of(queue);
    struct sim_channel *channel = queue_channel(queue, c);
    if (work->action.prompt && !load_acquire(&queue->driver))
        TRY(start_driver(queue));
    pthread_mutex_lock(&queue->append);
    if (!queue->actions[c]) {
        queue->actions[c] = calloc(SIM_DEPTH, sizeof *queue->actions[c]);
        if (!queue->actions[c]) {
            pthread_mutex_unlock(&queue->append);
            return CUDA_ERROR_OUT_OF_MEMORY;
        }
    }
    while (full(queue, c)) {
        pthread_mutex_unlock(&queue->append);
        wait_for_space(queue, c);
        pthread_mutex_lock(&queue->append);
    }
    uint64_t seq = channel->tail;
    struct sim_op *op = &channel->ring[seq % SIM_DEPTH];
    *op = (struct sim_op){.left_ns = work->ns, .queued_ns = now_ns(), .order = queue->order++, .kind = work->kind,
                          .dep = work->dep, .dep_seq = work->dep_seq};
    queue->actions[c][seq % SIM_DEPTH] = work->action;
    if (work->seq)
        *work->seq = seq;
    if (work->action.run) {
        fetch_add(&queue->pending[c], 1);
        if (work->action.prompt)
            fetch_add(&queue->prompt, 1);
    }
    if (!(proc->used >> c & 1))
        store_release(&proc->used, proc->used | 1u << c);
    store_release(&channel->tail, seq + 1);
    store_release(&proc->queued, proc->queued + 1);
    pthread_mutex_unlock(&queue->append);
    if (work->action.prompt)
        ring(queue);
    return CUDA_SUCCESS;
}

/* ---- waiting ---- */

static bool retired(struct queue *queue, uint32_t c, uint64_t seq)
{
    return load_acquire(&queue->retired[c]) > seq;
}

bool queue_done(struct queue *queue, uint32_t c, uint64_t seq)
{
    if (retired(queue, c, seq))
        return true;
    look(queue);
    return retired(queue, c, seq);
}

void queue_wait(struct queue *queue, uint32_t c, uint64_t seq)
{
    while (!retired(queue, c, seq)) {
        int seen = load_acquire(&queue->bell);
        sim_lock(&queue->gpu->map);
        uint64_t now = now_ns();
        sim_advance(&queue->gpu->map, now);
        bool done = queue_channel(queue, c)->head > seq;
        uint64_t when = done ? now : sim_predict(&queue->gpu->map, c, seq);
        sim_unlock(&queue->gpu->map);
        retire(queue);
        if (!done)
            sleep_until(queue, seen, when < now + LOOK_NS ? when : now + LOOK_NS);
    }
}

void queue_wait_all(struct queue *queue)
{
    if (queue->gpu->map.slot < 0)
        return;
    for (uint32_t used = load_acquire(&proc_of(queue)->used); used; used &= used - 1) {
        uint32_t c = (uint32_t)__builtin_ctz(used);
        uint64_t tail = queue_tail(queue, c);
        if (tail)
            queue_wait(queue, c, tail - 1);
    }
}

bool queue_idle(struct queue *queue)
{
    look(queue);
    for (uint32_t used = load_acquire(&proc_of(queue)->used); used; used &= used - 1) {
        uint32_t c = (uint32_t)__builtin_ctz(used);
        if (load_acquire(&queue->retired[c]) < queue_tail(queue, c))
            return false;
    }
    return true;
}
