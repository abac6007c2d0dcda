/* stalls.c: writes down when a CPU of this machine stood still: taken by a hypervisor, or by the kernel.
 *
 *     stalls NAP_US > stalls        until SIGTERM or SIGINT
 *
 * On each CPU that it may use a thread naps for NAP_US at a time. It goes before all ordinary threads, so whenever it wakes up
 * more than NAP_US late, those stood still, too: a line says from when to when, in ns of CLOCK_MONOTONIC. */
#define _GNU_SOURCE
#include <pthread.h>
#include <sched.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <time.h>

static uint64_t nap_ns;

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static void *watch(void *unused)
{
    (void)unused;
    for (uint64_t due = now() + nap_ns, woke;; due = woke + nap_ns) {
        struct timespec t = {(time_t)(due / 1000000000u), (long)(due % 1000000000u)};
        while (clock_nanosleep(CLOCK_MONOTONIC, TIMER_ABSTIME, &t, NULL))
            ;
        woke = now();
        if (woke > due + nap_ns) {
            printf("%lu %lu\n", (unsigned long)due, (unsigned long)woke);
            fflush(stdout);
        }
    }
    return NULL;
}

static int start(int cpu, int policy, int priority)
{
    pthread_t thread;
    pthread_attr_t how;
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET(cpu, &one);
    pthread_attr_init(&how);
    pthread_attr_setaffinity_np(&how, sizeof one, &one);
    pthread_attr_setinheritsched(&how, PTHREAD_EXPLICIT_SCHED);
    pthread_attr_setschedpolicy(&how, policy);
    pthread_attr_setschedparam(&how, &(struct sched_param){.sched_priority = priority});
    return pthread_create(&thread, &how, watch, NULL);
}

int main(int argc, char **argv)
{
    sigset_t ends;
    cpu_set_t all;
    int number;
    nap_ns = argc == 2 ? (uint64_t)atol(argv[1]) * 1000 : 0;
    if (!nap_ns || sched_getaffinity(0, sizeof all, &all))
        return 2;
    sigemptyset(&ends);
    sigaddset(&ends, SIGTERM);
    sigaddset(&ends, SIGINT);
    pthread_sigmask(SIG_BLOCK, &ends, NULL); /* before there are threads: they inherit it */
    for (int cpu = 0; cpu < CPU_SETSIZE; cpu++) {
        if (!CPU_ISSET(cpu, &all))
            continue;
        if (start(cpu, SCHED_FIFO, 1)) {
            fprintf(stderr, "stalls: no real-time thread on CPU %d; an ordinary one may also find that it had to wait its turn\n", cpu);
            if (start(cpu, SCHED_OTHER, 0))
                return 1;
        }
    }
    sigwait(&ends, &number);
    return 0;
}
