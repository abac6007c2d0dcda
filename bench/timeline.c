/* timeline.c: writes down who had the simulated device when, from its own exact stamps.
 *
 *     timeline STATE_FILE POLL_US > records        until SIGTERM or SIGINT
 *
 * Looks at the device's shared state, read-only, every POLL_US, and copies the stamps of the operations that were completed
 * since: they stay in their ring of 1024 until they are overwritten, so a look every POLL_US < 1024 kernels loses nothing.
 * Each record is {u32 pid, u32 lost, u64 start_ns, u64 end_ns}; kernels that follow each other without a gap are one record. `lost`
 * counts operations that were overwritten before they were seen. Preempted kernels (side-by-side work without a gate) span
 * the time of others. */
#define _GNU_SOURCE
#include <fcntl.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>
#include "shared/state.h"

struct record { uint32_t pid, lost; uint64_t start, end; };
static struct seen {
    struct record now;
    uint64_t head[SIM_CHANNELS];
} seen[SIM_PROCS];
static volatile sig_atomic_t ended;

static void on_end(int number)
{
    (void)number;
    ended = 1;
}

static void flush_record(struct seen *s)
{
    if (s->now.end)
        fwrite(&s->now, sizeof s->now, 1, stdout);
    s->now.start = s->now.end = s->now.lost = 0;
}

static void look_at(const struct sim_proc *proc, const struct sim_channel *channels, struct seen *s)
{
    for (uint32_t used = load_acquire(&proc->used); used; used &= used - 1) {
        uint32_t c = (uint32_t)__builtin_ctz(used);
        const struct sim_channel *channel = &channels[c];
        uint64_t head = load_acquire(&channel->head);
        for (; s->head[c] < head; s->head[c]++) {
            struct sim_op op = channel->ring[s->head[c] % SIM_DEPTH];
            if (load_acquire(&channel->tail) >= s->head[c] + SIM_DEPTH) {
                s->now.lost++;
                continue;
            }
            if (op.kind != SIM_KERNEL || op.done_ns == op.start_ns)
                continue;
            if (s->now.end && (op.start_ns > s->now.end || op.start_ns < s->now.start))
                flush_record(s);
            if (!s->now.end)
                s->now.start = op.start_ns;
            s->now.end = op.done_ns > s->now.end ? op.done_ns : s->now.end;
        }
    }
}

int main(int argc, char **argv)
{
    struct stat file;
    int fd = argc == 3 ? open(argv[1], O_RDONLY | O_CLOEXEC) : -1;
    if (fd < 0 || fstat(fd, &file))
        return 2;
    const struct sim_state *state = mmap(NULL, (size_t)file.st_size, PROT_READ, MAP_SHARED, fd, 0);
    if (state == MAP_FAILED || state->magic != SIM_MAGIC || state->version != SIM_VERSION)
        return 2;
    long poll_ns = atol(argv[2]) * 1000;
    signal(SIGTERM, on_end);
    signal(SIGINT, on_end);
    bool first = true;
    while (!ended) {
        uint32_t slots = load_acquire(&state->slots);
        for (uint32_t i = 0; i < slots && i < SIM_PROCS; i++) {
            const struct sim_proc *proc = &state->proc[i];
            const struct sim_channel *channels = state->queues[i].channel;
            if (load_acquire(&proc->state) != SIM_LIVE)
                continue;
            if (proc->pid != seen[i].now.pid) {
                flush_record(&seen[i]);
                seen[i] = (struct seen){.now.pid = proc->pid};
                for (uint32_t c = 0; first && c < SIM_CHANNELS; c++)
                    seen[i].head[c] = load_acquire(&channels[c].head);
            }
            look_at(proc, channels, &seen[i]);
        }
        first = false;
        nanosleep(&(struct timespec){0, poll_ns}, NULL);
    }
    for (uint32_t i = 0; i < SIM_PROCS; i++)
        flush_record(&seen[i]);
    return fflush(stdout) ? 1 : 0;
}
