/* pingpong.c: how long this machine takes to wake another process by a futex: the yardstick for hand-overs.
 *
 *     pingpong [ROUNDS]
 *
 * Two processes, on two CPUs where there are two, wake each other in turn: as in a hand-over the one that is woken sleeps
 * on a CPU of its own, which is idle. Prints the one-way latencies in ns, wake to running, one a line. */
#define _GNU_SOURCE
#include <limits.h>
#include <linux/futex.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define ROUNDS_MAX 100000

static struct shared {
    uint32_t word;               /* whose turn: even the parent's, odd the child's */
    uint64_t sent;
    uint64_t took[2 * ROUNDS_MAX];
} *shared;

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void pin(int cpu)
{
    cpu_set_t set;
    CPU_ZERO(&set);
    CPU_SET((size_t)cpu, &set);
    sched_setaffinity(0, sizeof set, &set); /* refused or no such CPU: it runs where it may */
}

static void play(uint32_t me, uint32_t rounds)
{
    for (uint32_t turn = me; turn < 2 * rounds; turn += 2) {
        for (uint32_t seen; (seen = __atomic_load_n(&shared->word, __ATOMIC_ACQUIRE)) != turn;)
            syscall(SYS_futex, &shared->word, FUTEX_WAIT, seen, NULL, NULL, 0);
        shared->took[turn] = turn ? now() - shared->sent : 0;
        shared->sent = now();
        __atomic_store_n(&shared->word, turn + 1, __ATOMIC_RELEASE);
        syscall(SYS_futex, &shared->word, FUTEX_WAKE, INT_MAX, NULL, NULL, 0);
    }
}

int main(int argc, char **argv)
{
    uint32_t rounds = argc > 1 ? (uint32_t)atoi(argv[1]) : 5000;
    if (rounds < 1 || rounds > ROUNDS_MAX)
        return 2;
    shared = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    pid_t child = fork();
    if (child < 0)
        return 1;
    if (!child) {
        pin(1);
        play(1, rounds);
        _exit(0);
    }
    pin(0);
    play(0, rounds);
    waitpid(child, NULL, 0);
    for (uint32_t i = 1; i < 2 * rounds; i++)
        printf("%lu\n", (unsigned long)shared->took[i]);
    return 0;
}
