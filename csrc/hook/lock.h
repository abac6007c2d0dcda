/* lock.h: a process-private mutex in one word, on a futex. Zero is free, so static storage needs no initialiser, and the
 * child of a fork() puts a lock right by storing 0: a pthread_mutex_t may do neither after a thread that the child does
 * not have died inside it. Held for a few instructions only, never around a call into the driver. */
#ifndef CGPU_LOCK_H
#define CGPU_LOCK_H
#include <errno.h>
#include <linux/futex.h>
#include <stdbool.h>
#include <stdint.h>
#include <sys/syscall.h>
#include <unistd.h>

struct hook_lock {
    uint32_t word; /* 0 free, 1 held, 2 held and perhaps waited for */
};

static inline void hook_lock_wait_(struct hook_lock *lock)
{
    int saved = errno;
    while (__atomic_exchange_n(&lock->word, 2, __ATOMIC_ACQUIRE) != 0)
        syscall(SYS_futex, &lock->word, FUTEX_WAIT_PRIVATE, 2, NULL, NULL, 0);
    errno = saved;
}

static inline void hook_lock_wake_(struct hook_lock *lock)
{
    int saved = errno;
    syscall(SYS_futex, &lock->word, FUTEX_WAKE_PRIVATE, 1, NULL, NULL, 0);
    errno = saved;
}

static inline void hook_lock_take(struct hook_lock *lock)
{
    uint32_t free = 0;
    if (__builtin_expect(!__atomic_compare_exchange_n(&lock->word, &free, 1, false, __ATOMIC_ACQUIRE, __ATOMIC_RELAXED), 0))
        hook_lock_wait_(lock);
}

static inline void hook_lock_drop(struct hook_lock *lock) /* pairs with the acquire in take and wait_ */
{
    if (__builtin_expect(__atomic_exchange_n(&lock->word, 0, __ATOMIC_RELEASE) == 2, 0))
        hook_lock_wake_(lock);
}
#endif
