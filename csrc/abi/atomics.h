/* atomics.h: every access to a shared word goes through these, so that each use can say what it pairs with. */
#ifndef CGPU_ATOMICS_H
#define CGPU_ATOMICS_H
#include <stdint.h>
#include <time.h>

#define load_relaxed(p)     __atomic_load_n((p), __ATOMIC_RELAXED)
#define load_acquire(p)     __atomic_load_n((p), __ATOMIC_ACQUIRE)
#define store_relaxed(p, v) __atomic_store_n((p), (v), __ATOMIC_RELAXED)
#define store_release(p, v) __atomic_store_n((p), (v), __ATOMIC_RELEASE)
#define fetch_add(p, v)     __atomic_fetch_add((p), (v), __ATOMIC_ACQ_REL)
#define fetch_sub(p, v)     __atomic_fetch_sub((p), (v), __ATOMIC_ACQ_REL)
#define fence_seq_cst()     __atomic_thread_fence(__ATOMIC_SEQ_CST)
#define compiler_barrier()  __atomic_signal_fence(__ATOMIC_SEQ_CST)

static inline void cpu_pause(void)
{
#if defined(__x86_64__)
    __builtin_ia32_pause();
#else
    compiler_barrier();
#endif
}

static inline uint64_t now_ns(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}
#endif
