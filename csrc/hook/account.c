/* account.c: charging the instance's total, in one step with the check, under the robust mutex in the report page.
 *
 * Charging takes a mutex: 18 ns, as dear as a lock-free charge, and what a process killed inside it leaves behind is repaired
 * by the next one exactly. Giving back does not: it lowers the process's own slot, in one atomic step. So the total that the
 * report page keeps is at least the sum of the slots, which is what counts; who would be refused for the total adds up first.
 * A death at any instruction leaves no more than a total that is too high. The daemon never takes the mutex. Every wait for it
 * is bounded: when a stopped sibling sits on it for MUTEX_WAIT_S, a charge is refused.
 *
 * The pages can change under us (a new daemon): account.report says which ones count, and changes only with the old
 * page's mutex held, so who holds the mutex and still finds its report there is right. Old report pages stay mapped. */
#define _GNU_SOURCE /* RTLD_DEFAULT */
#include "account.h"

#include <dlfcn.h>
#include <errno.h>
#include <pthread.h>
#include <time.h>

#include "client.h"
#include "hook.h"
#include "ledger.h"
#include "lock.h"

#define MUTEX_WAIT_S 5

struct account {
    struct cgpu_report *report; /* NULL: the fallback below */
    struct cgpu_slot *slot;
    uint32_t slot_gen;          /* the slot's while it is ours; 0 in the slot itself: a sibling took us for dead */
    const volatile struct cgpu_ctl *ctl;
    uint64_t generation;        /* of the daemon that made these pages: another's slot_gen says nothing about them */
    struct hook_lock lock;      /* of the three below, and held while the five above change */
    uint64_t limit, total, used;
};

static struct account accounts[CGPU_MAX_GPUS];
static struct hook_lock entering;

static bool slot_is_dead(const volatile struct cgpu_ctl *ctl, const struct cgpu_slot *slot, int i)
{
    uint32_t gen = load_relaxed(&slot->gen);
    return gen != 0 && gen != load_relaxed(&ctl->slot_gen[i]);
}

/* Drops the dead processes' slots and makes the total what the live ones hold; what is given back meanwhile may still be in it.
 * What a slot says stays in it: its owner may have lost no more than its connection, and takes that along when it comes again
 * (move()). The daemon gives the slot away last of all, and who gets it empties it. Mutex held. */
static void repair(struct account *account, struct cgpu_report *report)
{
    const volatile struct cgpu_ctl *ctl = account->ctl;
    /* before the slots are read; pairs with the daemon's release, after it cleared a slot_gen */
    uint64_t seq = load_acquire(&ctl->dead_seq);
    bool dead[CGPU_SLOTS];
    for (int i = 0; i < CGPU_SLOTS; i++)
        dead[i] = slot_is_dead(ctl, &report->slot[i], i);
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    bool ours = load_relaxed(&ctl->generation) == account->generation; /* else a new daemon's page came in between */
    uint64_t total = 0;
    for (int i = 0; i < CGPU_SLOTS; i++) {
        struct cgpu_slot *slot = &report->slot[i];
        if (ours && dead[i] && slot != account->slot)
            store_relaxed(&slot->gen, 0);
        if (load_relaxed(&slot->gen) != 0 || slot == account->slot)
            total += load_relaxed(&slot->mem_used);
    }
    store_relaxed(&report->mem_total_used, total);
    if (ours)
        store_relaxed(&report->reaped_seq, seq);
}

/* The same where no death has gone unseen, and cheaper: a process at its limit needs it for every allocation. */
static void add_up(struct account *account, struct cgpu_report *report)
{
    const volatile struct cgpu_ctl *ctl = account->ctl;
    uint64_t total = 0;
    if (load_relaxed(&ctl->generation) != account->generation) {
        repair(account, report);
        return;
    }
    for (int i = 0; i < CGPU_SLOTS; i++) {
        const struct cgpu_slot *slot = &report->slot[i];
        if ((load_relaxed(&ctl->slot_gen[i]) && load_relaxed(&slot->gen)) || slot == account->slot)
            total += load_relaxed(&slot->mem_used);
    }
    __atomic_thread_fence(__ATOMIC_ACQUIRE);
    if (load_relaxed(&ctl->generation) != account->generation) { /* a new daemon's page came in between */
        repair(account, report);
        return;
    }
    store_relaxed(&report->mem_total_used, total);
}

static pthread_mutex_t *mutex_of(struct cgpu_report *report)
{
    _Static_assert(sizeof(pthread_mutex_t) <= sizeof report->ledger_mutex, "room for the mutex");
    return (pthread_mutex_t *)(void *)report->ledger_mutex;
}

/* From glibc 2.30 by the monotonic clock: a wall clock that is set back meanwhile would make the wait as much longer. */
static int (*clocklock)(pthread_mutex_t *, clockid_t, const struct timespec *);

__attribute__((constructor)) static void find_clocklock(void)
{
    *(void **)&clocklock = dlsym(RTLD_DEFAULT, "pthread_mutex_clocklock");
    dlerror(); /* that there is none is not the program's business */
}

static int lock_in_time(pthread_mutex_t *mutex)
{
    clockid_t clock = clocklock ? CLOCK_MONOTONIC : CLOCK_REALTIME;
    struct timespec until;
    clock_gettime(clock, &until);
    until.tv_sec += MUTEX_WAIT_S;
    return clocklock ? clocklock(mutex, clock, &until) : pthread_mutex_timedlock(mutex, &until);
}

/* 0 and the mutex held, or an errno. */
static int lock_report(struct account *account, struct cgpu_report *report)
{
    int error = pthread_mutex_trylock(mutex_of(report)); /* no clock to read unless it is contended */
    if (error == EBUSY)
        error = lock_in_time(mutex_of(report));
    if (error == EOWNERDEAD) {
        repair(account, report);
        error = pthread_mutex_consistent(mutex_of(report));
    }
    return error;
}

static void unlock_report(struct cgpu_report *report)
{
    pthread_mutex_unlock(mutex_of(report));
}

/* The pages that count now, their mutex held; NULL: there are none (*error 0: take the fallback) or it cannot be had. */
static struct cgpu_report *open_account(struct account *account, int *error)
{
    *error = 0;
    for (;;) {
        struct cgpu_report *report = load_acquire(&account->report);
        if (!report)
            return NULL;
        *error = lock_report(account, report);
        if (*error) {
            hook_log("error", "event=ledger-mutex error=%d: charges are refused until it can be had", *error);
            return NULL;
        }
        if (__builtin_expect(load_relaxed(&account->report) == report, 1)) {
            if (__builtin_expect(load_relaxed(&account->ctl->dead_seq) != load_relaxed(&report->reaped_seq), 0))
                repair(account, report);
            return report;
        }
        unlock_report(report);
    }
}

/* A process that came by NVML alone has no slot; what it may yet allocate before it has one counts in account->used. */
static void add(struct account *account, struct cgpu_report *report, uint64_t bytes)
{
    struct cgpu_slot *slot = account->slot;
    if (!slot) {
        fetch_add(&account->used, bytes);
        return;
    }
    store_relaxed(&report->mem_total_used, load_relaxed(&report->mem_total_used) + bytes);
    uint64_t used = fetch_add(&slot->mem_used, bytes) + bytes;
    if (used > load_relaxed(&slot->mem_peak))
        store_relaxed(&slot->mem_peak, used);
}

/* Takes up to `bytes` off *used; gives how many it took: a sibling may have scribbled on the page. */
static uint64_t take_off(uint64_t *used, uint64_t bytes)
{
    uint64_t was = load_relaxed(used), taken;
    do
        taken = bytes < was ? bytes : was;
    while (!__atomic_compare_exchange_n(used, &was, was - taken, true, __ATOMIC_RELEASE, __ATOMIC_RELAXED));
    return taken;
}

/* Of the whole instance, or more: its total may be too high. */
static uint64_t used_at_most(const struct account *account, const struct cgpu_report *report)
{
    return load_relaxed(&report->mem_total_used) + load_relaxed(&account->ctl->mem_other) +
           (account->slot ? 0 : load_relaxed(&account->used));
}

/* A sibling may have added up the total without us (repair()). */
static bool is_counted(const struct account *account)
{
    return !account->slot || load_relaxed(&account->slot->gen) != 0;
}

static bool fits(uint64_t limit, uint64_t used, uint64_t bytes)
{
    return used <= limit && bytes <= limit - used;
}

enum charging { CHARGE, TRY, FORCE };

static void count_refusal(const struct account *account)
{
    if (account->slot)
        store_relaxed(&account->slot->mem_refused, load_relaxed(&account->slot->mem_refused) + 1);
}

static bool charge(int gpu, uint64_t bytes, enum charging how)
{
    struct account *account = &accounts[gpu];
    int error;
    struct cgpu_report *report = open_account(account, &error);
    bool granted;
    if (report) {
        uint64_t limit = load_relaxed(&account->ctl->mem_limit);
        granted = how == FORCE || (is_counted(account) && fits(limit, used_at_most(account, report), bytes));
        if (__builtin_expect(!granted, 0)) {
            add_up(account, report);
            granted = fits(limit, used_at_most(account, report), bytes);
        }
        if (granted)
            add(account, report, bytes);
        else if (how == CHARGE)
            count_refusal(account);
        unlock_report(report);
        return granted;
    }
    if (error)
        return false;
    hook_lock_take(&account->lock);
    /* the pages may have come meanwhile, with `used` entered there */
    bool moved = load_relaxed(&account->report) != NULL;
    granted = !moved && (how == FORCE || fits(account->limit, account->used, bytes));
    if (granted)
        account->used += bytes;
    hook_lock_drop(&account->lock);
    return moved ? charge(gpu, bytes, how) : granted;
}

bool ledger_charge(int gpu, uint64_t bytes)
{
    return charge(gpu, bytes, CHARGE);
}

void ledger_refused(int gpu)
{
    struct account *account = &accounts[gpu];
    int error;
    struct cgpu_report *report = open_account(account, &error);
    if (report) {
        count_refusal(account);
        unlock_report(report);
    }
}

bool ledger_try(int gpu, uint64_t bytes)
{
    return charge(gpu, bytes, TRY);
}

bool ledger_force(int gpu, uint64_t bytes)
{
    return charge(gpu, bytes, FORCE);
}

void ledger_refund(int gpu, uint64_t bytes)
{
    struct account *account = &accounts[gpu];
    struct cgpu_slot *slot = load_acquire(&account->slot);
    if (__builtin_expect(slot != NULL, 1))
        bytes -= take_off(&slot->mem_used, bytes);
    if (__builtin_expect(bytes == 0, 1))
        return;
    hook_lock_take(&account->lock); /* there is no slot, or it was left for another one meanwhile */
    take_off(account->slot ? &account->slot->mem_used : &account->used, bytes);
    hook_lock_drop(&account->lock);
}

struct ledger_view ledger_view(int gpu)
{
    struct account *account = &accounts[gpu];
    struct ledger_view view = {0};
    int error;
    struct cgpu_report *held = open_account(account, &error);
    struct cgpu_report *report = held ? held : load_acquire(&account->report);
    if (held)
        add_up(account, held);
    if (report) { /* without the mutex: as last added up */
        view.limit = load_relaxed(&account->ctl->mem_limit);
        view.used = used_at_most(account, report);
        view.total = load_relaxed(&account->ctl->mem_total);
        if (held)
            unlock_report(held);
        return view;
    }
    hook_lock_take(&account->lock);
    view = (struct ledger_view){.limit = account->limit, .used = account->used, .total = account->total};
    hook_lock_drop(&account->lock);
    return view;
}

/* Moves what this process holds from `account`, whose mutex and lock are held, to `next`, whose mutex is held. What is given back
 * meanwhile comes off the old slot before it is emptied, or finds it empty and waits for the lock. */
static void move(struct account *account, const struct account *next, bool subtract_old)
{
    struct cgpu_slot *old = account->slot, *slot = next->slot;
    uint32_t old_gen = old ? load_relaxed(&old->gen) : 0;
    uint64_t used = 0, peak = 0;
    if (old_gen == 0 || old_gen == account->slot_gen) {
        used = __atomic_exchange_n(old ? &old->mem_used : &account->used, 0, __ATOMIC_ACQ_REL);
        peak = old ? load_relaxed(&old->mem_peak) : used;
    } else { /* every other slot was given away meanwhile */
        hook_log("warning", "event=ledger-enter: the slot is another's by now: what it held is the audit's to find");
    }
    if (old_gen && old_gen == account->slot_gen && subtract_old) { /* those pages may still count for siblings that have not moved */
        take_off(&account->report->mem_total_used, used);
        store_relaxed(&old->gen, 0);
    }
    account->ctl = next->ctl;
    account->generation = next->generation;
    if (slot) {
        store_relaxed(&slot->mem_used, used);
        store_relaxed(&slot->mem_peak, peak);
        store_relaxed(&slot->pid, (uint32_t)getpid());
        account->slot_gen = load_relaxed(&next->ctl->slot_gen[slot - next->report->slot]);
        store_release(&slot->gen, account->slot_gen);
    } else {
        store_relaxed(&account->used, used);
    }
    store_release(&account->slot, slot);
    repair(account, next->report);
    store_release(&account->report, next->report);
}

/* Whether the two are one page mapped twice, as when a program has closed our socket and we joined the same daemon again, or
 * used NVML alone before: then there is but one mutex to lock. Told by writing to a slot of ours. Old mutex held. */
static bool same_pages(const struct account *account, const struct account *next)
{
    const struct cgpu_slot *old = account->report->slot, *new = next->report->slot;
    uint64_t *probe;
    const uint64_t *seen;
    if (account->slot) {
        probe = &account->slot->pad0[0];
        seen = &new[account->slot - old].pad0[0];
    } else if (next->slot) {
        probe = &next->slot->pad0[0];
        seen = &old[next->slot - new].pad0[0];
    } else {
        return false;
    }
    store_relaxed(probe, (uint64_t)(uintptr_t)next->report ^ now_ns());
    fence_seq_cst(); /* the other mapping is other addresses to the compiler */
    bool same = load_relaxed(seen) == load_relaxed(probe);
    store_relaxed(probe, 0);
    return same;
}

void account_enter(int gpu)
{
    struct gate *gate = gpu >= 0 && gpu < CGPU_MAX_GPUS ? gate_of(gpu) : NULL;
    if (!gate || !gate->report || !gate->ctl)
        return;
    struct account *account = &accounts[gpu];
    struct account next = {.report = gate->report, .slot = gate->slot, .ctl = gate->ctl,
                           .generation = load_relaxed(&gate->ctl->generation)};
    hook_lock_take(&entering);
    struct cgpu_report *old = account->report;
    if (old != next.report || account->slot != next.slot) {
        bool old_held = old && old != next.report && lock_report(account, old) == 0;
        hook_lock_take(&account->lock);
        bool same = old_held && same_pages(account, &next);
        int error = same ? 0 : lock_report(&next, next.report);
        if (error) /* a sibling sits on it: enter all the same, the next repair makes the total right */
            hook_log("error", "event=ledger-enter gpu=%d error=%d", gpu, error);
        move(account, &next, old_held || old == next.report);
        if (!error && !same)
            unlock_report(next.report);
        hook_lock_drop(&account->lock);
        if (old_held)
            unlock_report(old);
    }
    hook_lock_drop(&entering);
}

void account_fallback(int gpu, uint64_t limit, uint64_t total)
{
    struct account *account = &accounts[gpu];
    hook_lock_take(&account->lock);
    account->limit = limit;
    account->total = total;
    hook_lock_drop(&account->lock);
}

void account_after_fork(void)
{
    for (int gpu = 0; gpu < CGPU_MAX_GPUS; gpu++)
        accounts[gpu] = (struct account){0};
    entering = (struct hook_lock){0};
}
