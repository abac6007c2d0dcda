/* file_reads.c: how long it takes to open, read and close a file, by several processes at once.
 *
 *     file_reads PATH CLIENTS SECONDS
 *
 * Each client does so again and again. Prints "COUNT P50 P99 MAX": how often all of them did, and how long it took, in
 * ns, at most in 50 and in 99 of 100 cases, and ever. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#define MOST 1000000u /* samples of a client */

struct client {
    uint32_t count, ns[MOST];
};

struct shared {
    atomic_int ready;
    struct client clients[];
};

static uint64_t now(void)
{
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

static int read_file(const char *path)
{
    char text[65536];
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return -1;
    ssize_t got = read(fd, text, sizeof text);
    return close(fd) || got <= 0 ? -1 : 0;
}

static int client(const char *path, struct shared *shared, struct client *mine, int clients, double seconds)
{
    prctl(PR_SET_PDEATHSIG, SIGKILL);
    atomic_fetch_add(&shared->ready, 1);
    while (atomic_load(&shared->ready) < clients)
        usleep(100);
    uint64_t end = now() + (uint64_t)(seconds * 1e9);
    for (uint64_t begin = now(), after; begin < end && mine->count < MOST; begin = after) {
        if (read_file(path)) {
            perror(path);
            return 1;
        }
        after = now();
        mine->ns[mine->count++] = (uint32_t)(after - begin);
    }
    return 0;
}

static int compare(const void *a, const void *b)
{
    uint32_t x = *(const uint32_t *)a, y = *(const uint32_t *)b;
    return (x > y) - (x < y);
}

int main(int argc, char **argv)
{
    if (argc != 4)
        return 2;
    int clients = atoi(argv[2]), failed = 0, status;
    if (clients < 1)
        return 2;
    size_t size = sizeof(struct shared) + (size_t)clients * sizeof(struct client), count = 0, total = 0;
    struct shared *shared = mmap(NULL, size, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_ANONYMOUS, -1, 0);
    if (shared == MAP_FAILED)
        return 1;
    for (int i = 0; i < clients; i++) {
        pid_t pid = fork();
        if (pid < 0)
            return 1;
        if (pid == 0)
            _exit(client(argv[1], shared, &shared->clients[i], clients, atof(argv[3])));
    }
    while (wait(&status) > 0)
        failed |= status;
    for (int i = 0; i < clients; i++)
        count += shared->clients[i].count;
    uint32_t *all = malloc((count + 1) * sizeof *all);
    if (failed || !all || !count)
        return 1;
    for (int i = 0; i < clients; i++)
        for (uint32_t j = 0; j < shared->clients[i].count; j++)
            all[total++] = shared->clients[i].ns[j];
    qsort(all, count, sizeof *all, compare);
    printf("%zu %u %u %u\n", count, all[(count - 1) * 50 / 100], all[(count - 1) * 99 / 100], all[count - 1]);
    return 0;
}
