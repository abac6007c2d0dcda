/* litmus.c: is the order of the grant protocol real?  litmus ROUNDS {compiler|membarrier}
 *
 * A launcher marks itself, passes a compiler barrier and looks at `accept`; the revoker closes `accept`, (membarrier()s,) and
 * looks at the mark. Prints how often the launcher saw the gate open while the revoker saw no mark: work that nobody drains. */
#define _GNU_SOURCE
#include <linux/membarrier.h>
#include <pthread.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <stdbool.h>

#include "atomics.h"

static _Alignas(128) uint64_t accept_word;
static _Alignas(128) uint32_t mark;
static _Alignas(128) uint64_t turn_launcher;
static _Alignas(128) uint64_t done_launcher;
static _Alignas(128) int saw_open;
#define LINES 8
static _Alignas(128) uint32_t cold[LINES * 16], colder[LINES * 16];

/* Lines that the other CPU has just written: what is stored next queues up behind them, as behind a driver's own stores. */
static void write_lines(uint32_t *lines, long i)
{
    for (int j = 0; j < LINES; j++)
        store_relaxed(&lines[j * 16], (uint32_t)i);
}

static long rounds;
static int available;
static cpu_set_t all;

static void pin(int cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    for (int i = 0, n = 0; i < CPU_SETSIZE; i++)
        if (CPU_ISSET(i, &all) && n++ == cpu)
            CPU_SET(i, &one);
    sched_setaffinity(0, sizeof one, &one);
}

static void spin_until(uint64_t *word, uint64_t value)
{
    while (load_acquire(word) != value)
        ;
}

static void *launcher(void *unused)
{
    (void)unused;
    pin(1);
    for (long i = 1; i <= rounds; i++) {
        spin_until(&turn_launcher, (uint64_t)i);
        for (volatile int delay = (int)(i * 7 % 61); delay; delay--)
            ;
        write_lines(cold, i);
        store_relaxed(&mark, 1);
        compiler_barrier();
        saw_open = load_relaxed(&accept_word) == 1;
        write_lines(colder, i);
        store_release(&done_launcher, (uint64_t)i);
    }
    return NULL;
}

int main(int argc, char **argv)
{
    if (argc < 3)
        return 2;
    rounds = atol(argv[1]);
    bool fence = !strcmp(argv[2], "membarrier");
    available = sched_getaffinity(0, sizeof all, &all) == 0 ? CPU_COUNT(&all) : 1;
    if (available < 2 || syscall(SYS_membarrier, MEMBARRIER_CMD_REGISTER_PRIVATE_EXPEDITED, 0, 0))
        return 77;
    pin(0);
    pthread_t thread;
    pthread_create(&thread, NULL, launcher, NULL);
    long violations = 0;
    for (long i = 1; i <= rounds; i++) {
        store_relaxed(&mark, 0);
        store_relaxed(&accept_word, 1);
        write_lines(cold, i);
        fence_seq_cst();
        store_release(&turn_launcher, (uint64_t)i);
        for (volatile int delay = (int)(i * 5 % 67); delay; delay--)
            ;
        write_lines(colder, i);
        store_relaxed(&accept_word, 0);
        compiler_barrier();
        if (fence)
            syscall(SYS_membarrier, MEMBARRIER_CMD_PRIVATE_EXPEDITED, 0, 0);
        int marked = load_relaxed(&mark) != 0;
        spin_until(&done_launcher, (uint64_t)i);
        violations += saw_open && !marked;
    }
    pthread_join(thread, NULL);
    printf("%ld\n", violations);
    return 0;
}
