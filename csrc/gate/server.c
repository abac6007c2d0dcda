/* server.c: the scheduler thread. server.h has the interface, regions.c the rest of it.
 *
 * The thread sleeps in epoll on the regions' bells and a kick from other threads, until the next deadline of any GPU or the
 * heartbeat. Bells are edge-triggered and never read: an eventfd's O_NONBLOCK is shared with the tenant, so a read could
 * be made to block. What it does for one bell is bounded, and how often is, too. */
#define _GNU_SOURCE
#include "server_parts.h"
#include <errno.h>
#include <fcntl.h>
#include <poll.h>
#include <pthread.h>
#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/eventfd.h>
#include <sys/prctl.h>
#include <sys/syscall.h>
#include <unistd.h>

#define ROUNDS_MAX    8 /* steps of one GPU without returning to epoll */
#define EVENTS        64
#define TAG_KICK      UINT32_MAX

#ifndef SYS_epoll_pwait2
#define SYS_epoll_pwait2 441 /* the same on every architecture */
#endif

void gate_tuning_default(struct gate_tuning *t)
{
    *t = (struct gate_tuning){
        .span_ns = 625000, .high_span_ns = 300000, .window = 2, .high_window = 1, .grace_ns = 150000,
        .bells_per_s = 4000, .mute_ns = 2000000};
    core_tuning_default(&t->core);
}

/* ---- one GPU's step ---- */

void server_set_flags(struct region *r, bool native, bool drain)
{
    uint32_t flags = 0;
    if (r->shut)
        flags = CTL_SHUT;
    else if (r->paused)
        flags = CTL_PAUSED;
    else if (native)
        flags |= CTL_NATIVE;
    if (!drain)
        flags |= CTL_NODRAIN;
    if (flags != r->pages.ctl->flags)
        store_release(&r->pages.ctl->flags, flags);
}

/* Where a high-priority instance may come at any time, what the others have in flight is what it waits for, and what it has
 * in flight itself may pass the end of its window. A kernel as long as the short span is let in when the one before has
 * ended; shorter ones in two spans, or the device would run dry between them (measured: 5 % of it at 100 us). */
void server_set_tuning(const struct gate_server *s, const struct gpu *g, struct region *r)
{
    const struct gate_tuning *t = &s->tuning;
    const struct core_entity *e = &g->core.entity[r->entity];
    bool brief = g->has_high;
    struct cgpu_ctl *ctl = r->pages.ctl;
    store_relaxed(&ctl->span_ns, brief ? t->high_span_ns : t->span_ns);
    store_relaxed(&ctl->window, brief && e->kernel_ns >= t->high_span_ns ? t->high_window : t->window);
    store_relaxed(&ctl->overlap_ns, (uint32_t)t->core.overlap_ns);
    store_relaxed(&ctl->grace_ns, t->grace_ns);
}

/* Before the words: who sees a grant sees its kind. The watchdog changes it without a new plan. */
static void show_kind(struct gpu *g)
{
    g->plain = g->core.plan.native;
    for (uint32_t i = 0; i < CORE_ENTITIES; i++)
        if (g->by_entity[i])
            server_set_flags(g->by_entity[i], g->plain, g->core.plan.drain);
}

/* true: something was closed, and must be looked at again. */
static bool carry_out(const struct gate_server *s, struct gpu *g, const struct core_action *actions, uint32_t count)
{
    bool again = false;
    for (uint32_t k = 0; k < count; k++) {
        const struct core_action *a = &actions[k];
        struct region *r = g->by_entity[a->entity];
        if (!r)
            continue;
        switch (a->type) {
        case CORE_GRANT:
            if (g->has_high)
                server_set_tuning(s, g, r); /* it knows more of its kernels by now */
            pages_grant(&r->pages, a->epoch, a->deadline, core_start(&g->core, a->entity));
            break;
        case CORE_CLOSE:
            pages_close(&r->pages, a->epoch);
            g->dirty |= 1ull << a->entity;
            again = true;
            break;
        case CORE_DEADLINE:
            pages_deadline(&r->pages, a->epoch, a->deadline, a->ring);
            break;
        }
    }
    return again;
}

/* Looks at whoever matters, steps, acts; again while something was closed, for an entity that holds nothing has let go the
 * moment it is closed. `first` (may be NULL) goes before what is seen. */
static void run_one(const struct gate_server *s, struct gpu *g, const struct core_event *first)
{
    struct core_action actions[CORE_ACTIONS];
    struct core_event events[CORE_ENTITIES + 1];
    for (int round = 0; round < ROUNDS_MAX; round++) {
        uint64_t see = core_watched(&g->core) | g->dirty;
        uint32_t n = 0, acted = 0;
        if (first && round == 0)
            events[n++] = *first;
        g->dirty = 0;
        g->core.stirred = false;
        for (; see; see &= see - 1) {
            uint32_t i = (uint32_t)__builtin_ctzll(see);
            struct region *r = g->by_entity[i];
            if (!r)
                continue;
            events[n] = (struct core_event){.type = CORE_REPORT, .entity = i};
            pages_look(&r->pages, g->core.entity[i].epoch, &events[n].report);
            n++;
        }
        g->next = core_step(&g->core, now_ns(), events, n, actions, &acted);
        if (g->plain != g->core.plan.native)
            show_kind(g);
        if (carry_out(s, g, actions, acted))
            continue;
        struct region *holder = g->core.holder >= 0 ? g->by_entity[g->core.holder] : NULL;
        if (holder) /* the way may be free earlier than predicted */
            pages_start(&holder->pages, core_start(&g->core, (uint32_t)g->core.holder));
        return;
    }
    g->next = 0; /* not finished: the thread comes back at once, after it has looked at the others */
}

void server_run_gangs(struct gate_server *s)
{
    for (int round = 0; round < 2 * ROUNDS_MAX; round++) {
        bool again = false;
        s->gang_next = gang_step(s->spanning, s->spanning_count, now_ns());
        for (uint32_t k = 0; k < GPUS_MAX; k++) {
            struct gpu *g = s->gpus[k];
            if (!g || !g->gangs || !g->core.stirred)
                continue;
            run_one(s, g, NULL);
            again = true;
        }
        if (!again)
            return;
    }
    s->gang_next = 0;
}

void server_run_gpu(struct gate_server *s, struct gpu *g, const struct core_event *first)
{
    run_one(s, g, first);
    if (g->gangs)
        server_run_gangs(s);
}

/* ---- the thread ---- */

void server_watch(struct gate_server *s, struct region *r, uint32_t index, int operation, bool on)
{
    struct epoll_event event = {.events = on ? EPOLLIN | EPOLLET : 0, .data.u32 = index};
    epoll_ctl(s->epoll_fd, operation, r->pages.bell_fd, &event);
}

static void rung(struct gate_server *s, struct region *r, uint32_t index, uint64_t now)
{
    uint64_t per_bell = 1000000000u / (s->tuning.bells_per_s ? s->tuning.bells_per_s : 1);
    uint64_t earned = (now - r->bell_refill_ns) / per_bell;
    if (earned) {
        r->bell_refill_ns = now;
        r->bell_tokens = r->bell_tokens + earned < BELL_BURST ? r->bell_tokens + earned : BELL_BURST;
    }
    s->gpus[r->gpu]->dirty |= 1ull << r->entity;
    if (r->bell_tokens) {
        r->bell_tokens--;
        return;
    }
    r->muted = true; /* a storm: its bell is not heard for a while, only looked after */
    s->muted++;
    r->muted_until = now + s->tuning.mute_ns;
    server_watch(s, r, index, EPOLL_CTL_MOD, false);
}

static void heartbeat(struct gate_server *s, uint64_t now)
{
    for (uint32_t k = 0; k < s->region_end; k++) {
        struct region *r = s->regions[k];
        if (!r)
            continue;
        struct cgpu_ctl *ctl = r->pages.ctl;
        const struct core *core = &s->gpus[r->gpu]->core;
        uint64_t busy = core->entity[r->entity].busy_ns, beats = load_relaxed(&ctl->beats);
        store_relaxed(&ctl->busy_ns, busy);
        store_relaxed(&ctl->beat[beats % CGPU_BEATS].at_ns, core->now); /* settled up to then */
        store_relaxed(&ctl->beat[beats % CGPU_BEATS].busy_ns, busy);
        store_release(&ctl->beats, beats + 1);
        store_release(&ctl->heartbeat_ns, now);
        s->gpus[r->gpu]->dirty |= 1ull << r->entity; /* whatever was missed (a bell's counter filled up by a sibling, say) is seen now */
    }
    s->heartbeat_ns = now + CGPU_HEARTBEAT_NS;
}

static uint64_t unmute(struct gate_server *s, uint64_t now)
{
    uint64_t next = CORE_NEVER;
    for (uint32_t k = 0; k < s->region_end && s->muted; k++) {
        struct region *r = s->regions[k];
        if (!r || !r->muted)
            continue;
        if (now < r->muted_until) {
            next = r->muted_until < next ? r->muted_until : next;
            continue;
        }
        r->muted = false;
        s->muted--;
        s->gpus[r->gpu]->dirty |= 1ull << r->entity;
        server_watch(s, r, k, EPOLL_CTL_MOD, true);
    }
    return next;
}

static uint64_t attend(struct gate_server *s, uint64_t now)
{
    uint64_t next = unmute(s, now);
    if (s->heartbeat_ns < next)
        next = s->heartbeat_ns;
    for (uint32_t k = 0; k < GPUS_MAX; k++) {
        struct gpu *g = s->gpus[k];
        if (!g)
            continue;
        if (g->dirty || now >= g->next)
            server_run_gpu(s, g, NULL);
    }
    if (s->spanning_count && now >= s->gang_next)
        server_run_gangs(s);
    for (uint32_t k = 0; k < GPUS_MAX; k++)
        if (s->gpus[k] && s->gpus[k]->next < next)
            next = s->gpus[k]->next;
    if (s->spanning_count && s->gang_next < next)
        next = s->gang_next;
    return next;
}

/* Sleeps until something rings or `when`. A timeout of the wait itself costs half of what a timerfd does a turn (it is armed
 * and read by system calls of its own). Before Linux 5.11 no wait of epoll has a timeout in nanoseconds, but ppoll has. */
static int sleep_until(struct gate_server *s, uint64_t when, struct epoll_event *events)
{
    uint64_t now = now_ns(), left = when > now ? when - now : 0;
    struct timespec timeout = {(time_t)(left / 1000000000u), (long)(left % 1000000000u)};
    if (!s->no_pwait2) {
        long n = syscall(SYS_epoll_pwait2, s->epoll_fd, events, EVENTS, &timeout, NULL, (size_t)0);
        if (n >= 0 || errno == EINTR)
            return (int)n;
        s->no_pwait2 = true;
    }
    struct pollfd ready = {.fd = s->epoll_fd, .events = POLLIN};
    return ppoll(&ready, 1, &timeout, NULL) > 0 ? epoll_wait(s->epoll_fd, events, EVENTS, 0) : 0;
}

static void *scheduler(void *argument)
{
    struct gate_server *s = argument;
    struct epoll_event events[EVENTS];
    uint64_t when = 0;
    pthread_setname_np(pthread_self(), "cgpu-gate");
    prctl(PR_SET_TIMERSLACK, 1000, 0, 0, 0); /* 1 us instead of 50 */
    for (;;) {
        int n = sleep_until(s, when, events);
        pthread_mutex_lock(&s->lock);
        if (s->stop) {
            pthread_mutex_unlock(&s->lock);
            return NULL;
        }
        uint64_t now = now_ns();
        for (int k = 0; k < n; k++) {
            uint32_t tag = events[k].data.u32;
            uint64_t ignored;
            if (tag == TAG_KICK) {
                ssize_t got = read(s->kick_fd, &ignored, sizeof ignored);
                (void)got;
            } else if (tag < s->region_end && s->regions[tag] && !s->regions[tag]->muted) {
                rung(s, s->regions[tag], tag, now);
            }
        }
        if (now >= s->heartbeat_ns)
            heartbeat(s, now);
        when = attend(s, now);
        store_relaxed(&s->loops, s->loops + 1);
        pthread_mutex_unlock(&s->lock);
    }
}

void server_kick(struct gate_server *s)
{
    uint64_t one = 1;
    ssize_t n = write(s->kick_fd, &one, sizeof one);
    (void)n;
}

/* ---- life ---- */

int gate_new(const struct gate_tuning *tuning, struct gate_server **server)
{
    struct gate_server *s = calloc(1, sizeof *s);
    if (!s)
        return -ENOMEM;
    pthread_mutex_init(&s->lock, NULL);
    if (tuning)
        s->tuning = *tuning;
    else
        gate_tuning_default(&s->tuning);
    s->generation = now_ns();
    s->epoll_fd = epoll_create1(EPOLL_CLOEXEC);
    s->kick_fd = eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK);
    struct epoll_event on_kick = {.events = EPOLLIN, .data.u32 = TAG_KICK};
    if (s->epoll_fd < 0 || s->kick_fd < 0 ||
        epoll_ctl(s->epoll_fd, EPOLL_CTL_ADD, s->kick_fd, &on_kick) < 0) {
        int error = -errno;
        gate_free(s);
        return error;
    }
    *server = s;
    return 0;
}

int gate_start(struct gate_server *s)
{
    sigset_t all, old;
    if (s->running)
        return -EALREADY;
    sigfillset(&all); /* signals are the main thread's business */
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int error = pthread_create(&s->thread, NULL, scheduler, s);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    if (error)
        return -error;
    s->running = true;
    server_kick(s);
    return 0;
}

struct region *server_find(const struct gate_server *s, uint64_t handle)
{
    uint32_t index = (uint32_t)(handle % REGIONS_MAX);
    struct region *r = s->regions[index];
    return r && r->handle == handle ? r : NULL;
}

/* Nobody will close it again: whoever has it may go on, by the driver's own scheduling. */
static void open_for_good(struct region *r)
{
    struct cgpu_ctl *ctl = r->pages.ctl;
    if (r->paused || r->shut)
        return;
    store_release(&ctl->flags, ctl->flags | CTL_NATIVE);
    if (ctl->grant & 1)
        pages_deadline(&r->pages, ctl->grant >> 1, 0, false);
    else
        pages_grant(&r->pages, (ctl->grant >> 1) + 1, 0, 0);
}

void gate_free(struct gate_server *s)
{
    if (!s)
        return;
    if (s->running) {
        pthread_mutex_lock(&s->lock);
        s->stop = true;
        pthread_mutex_unlock(&s->lock);
        server_kick(s);
        pthread_join(s->thread, NULL);
    }
    for (uint32_t k = 0; k < s->region_end; k++) {
        if (!s->regions[k])
            continue;
        open_for_good(s->regions[k]);
        pages_destroy(&s->regions[k]->pages);
        free(s->regions[k]);
    }
    for (uint32_t k = 0; k < GPUS_MAX; k++)
        free(s->gpus[k]);
    for (uint32_t k = 0; k < s->gang_count; k++)
        free(s->gangs[k]);
    int fds[] = {s->epoll_fd, s->kick_fd};
    for (int k = 0; k < 2; k++)
        if (fds[k] >= 0)
            close(fds[k]);
    pthread_mutex_destroy(&s->lock);
    free(s);
}

uint64_t gate_loops(const struct gate_server *s)
{
    return load_relaxed(&s->loops);
}
