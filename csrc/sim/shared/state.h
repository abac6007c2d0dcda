/* state.h: the simulated GPU, as every process that uses it and the simulated NVML see it.
 *
 * CGPU_SIM_DIR (default /usr/local/cgpu/sim if that is there, as in a container, else /run/cgpud/sim) holds
 *   sim.conf          one line a GPU, `UUID BYTES [context=BYTES] [module=BYTES] NAME`; none = one 24 GiB GPU
 *   gpu-UUID.state    struct sim_state, sparse, made by whoever comes first
 *   gpu-UUID.alive    a process holds a POSIX record lock on byte `slot` of it for as long as it lives
 *
 * ---- Time ----
 * A discrete-event simulation, advanced lazily: whoever looks, under `mutex`, moves `now_ns` up to the present, and
 * nobody needs to look for the rest to be right. All stamps are exact device time (CLOCK_MONOTONIC nanoseconds),
 * however late they are looked at.
 *   - Each process has SIM_CHANNELS queues of SIM_DEPTH operations, each in order. A full queue blocks the launch.
 *   - One engine. Processes with a kernel ready take turns of SIM_TURN_NS, round robin; a kernel is preempted at the
 *     end of a turn and resumed in the next. The turn of a process that runs dry ends at once; while nobody else is
 *     ready it goes on. Switching costs nothing (the real thing: tens of microseconds).
 *   - Inside a process kernels run one at a time to their end, higher stream priority first, then in order of
 *     submission. (The real thing may overlap them; they share the same engine there, so the sum is what it is here.)
 *   - Copies take their time beside the engine, without contention, and count as no device time. Memset is a kernel.
 *   - A gate (a host function) holds its queue until the owner says so.
 *
 * ---- Memory ----
 * Sizes only: how many bytes each process has is in its slot; the bytes themselves are the owner's host memory.
 * What no allocation call asks for counts like the rest, in NVML's figure of the process and in what cuMemGetInfo says
 * is free: `context` bytes a context, from when it is made (a primary one: made active) until it is destroyed, reset or
 * released by its last user, and `module` bytes a loaded module or library, in the context it was loaded into (a
 * library: or first used in) until it is unloaded or that context ends. Both are 0 unless sim.conf says otherwise, and
 * rounded up to 512. CGPU_SIM_CONTEXT_BYTES and CGPU_SIM_MODULE_BYTES in a process's environment say otherwise for that
 * process.
 *
 * ---- Shared memory ----
 * An allocation that other processes may have too (exported, imported, opened) is an entry of `share`, with a bit for
 * each process that holds a handle to or a mapping of it. Its bytes count once: to the process that made it, also when
 * that one has let go of it, until nobody holds it any more. When its maker dies they pass to the first process that
 * still holds it. A file descriptor on its way holds nothing: where it is imported after everybody let go, the bytes
 * become the importer's. (How the real driver's per-process figures count importers is not documented.)
 *
 * ---- Dying ----
 * `mutex` is robust. Whatever is written under it is written so that a stop after any store leaves a state that
 * repair() makes sound: head and tail are single words, a stamp is written before the head that publishes it, and there
 * are no sums that must agree but those it adds up again (mem_used is mem_own and what the process has in `share`; the
 * memory in use on the GPU is added up when asked for). A slot whose lock is gone is emptied by the next who looks at
 * it: before giving it a turn (at most every SIM_LOOK_NS), before saying out of memory or how much is free, for NVML,
 * and a few by each process that comes in. SIGSTOP inside the critical section (some hundred nanoseconds, when looking
 * and allocating; launching takes no lock) does stall the other processes until SIGCONT.
 * Whoever closes any descriptor of the .alive file drops all locks of his process on it: so POSIX has it. That is why
 * nothing here ever closes one, and why a program that closes all its descriptors looks dead.
 *
 * ---- Reading it from outside (tests, benchmarks) ----
 * Fixed offsets, checked below. Map it read-only. busy_ns is as of now_ns: any NVML call that asks after memory,
 * processes or utilization brings it up to date.
 *   state:  0 magic, 4 version, 8 now_ns, 16 busy_ns (all processes since the file was made), 24 total memory,
 *           32 slots ever used (4 bytes), 36 bytes of header (4), 40 bytes a slot (4)
 *   slot:   0 state (0 free, 1 live, 2 dead), 4 pid (as the process counts itself), 8 busy_ns, 16 memory in use,
 *           24 operations queued so far, 32 operations completed so far
 * The queues are not in the slots but in `queues`, behind all of them.
 */
#ifndef CGPU_SIM_STATE_H
#define CGPU_SIM_STATE_H
#include <pthread.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include "atomics.h"

#define SIM_MAGIC    0x6d697367u /* "gsim" */
#define SIM_VERSION  2u
#define SIM_GPUS     16
#define SIM_PROCS    1024        /* processes on one GPU; the next gets out of memory when it makes a context */
#define SIM_SHARES   16384       /* shared allocations on one GPU; the next to export one gets out of memory */
#define SIM_CHANNELS 32
#define SIM_DEPTH    1024
#define SIM_TURN_NS  2000000u
#define SIM_LOOK_NS  2000000u
#define SIM_SWEEP    16          /* slots that a process coming in checks for the dead */
#define SIM_SAMPLE_NS 100000000u
#define SIM_SAMPLES  16

enum sim_kind {
    SIM_KERNEL, /* takes left_ns of the engine */
    SIM_DELAY,  /* takes left_ns beside it */
    SIM_WAIT,   /* until operation dep_seq of channel `dep` of the same process is done */
    SIM_MARK,   /* nothing: its stamp is what is wanted */
    SIM_GATE    /* until sim_open_gate */
};

struct sim_op {
    uint64_t left_ns;
    uint64_t start_ns;  /* 0: not started */
    uint64_t done_ns;
    uint64_t queued_ns; /* it cannot start earlier */
    uint64_t order;     /* of submission in its process */
    uint32_t kind;      /* enum sim_kind */
    uint32_t dep;
    uint64_t dep_seq;
};

struct sim_channel {
    uint64_t head;      /* operations done; moved by whoever advances */
    uint64_t tail;      /* operations queued; written by the owner, without the mutex, after the operation */
    int32_t  priority;  /* as in CUDA: lower is more urgent; the owner's */
    uint32_t pad0;
    uint64_t pad1[5];
    struct sim_op ring[SIM_DEPTH];
};

enum { SIM_FREE, SIM_LIVE, SIM_DEAD };

struct sim_proc {
    uint32_t state;
    uint32_t pid;
    uint64_t busy_ns;
    uint64_t mem_used;  /* all that counts as this process's */
    uint64_t queued;    /* operations over all channels; the owner's, raised after `tail` */
    uint64_t completed;
    uint32_t used;      /* bit per channel that was ever used; the owner's */
    uint32_t pad0;
    uint64_t pid_ns, start_ticks; /* with pid: which process this is, seen from inside */
    uint64_t looked_ns; /* when its life was last checked */
    uint64_t samples[SIM_SAMPLES]; /* busy_ns at the state's sample times */
    uint64_t mem_own;   /* without what is in `share`; changed by the owner alone while it lives */
    uint32_t generation; /* of the slot's processes: which of them this is */
    uint32_t pad1[7];
};

struct sim_share {
    uint64_t id;        /* 0: no entry */
    uint64_t bytes;
    uint32_t owner;     /* slot whose mem_used they are in */
    uint32_t pad0;
    uint64_t holders[SIM_PROCS / 64];
};

/* The slots lie close together, without their queues: looking at all of them touches few pages. */
struct sim_queues { struct sim_channel channel[SIM_CHANNELS]; };

struct sim_state {
    uint32_t magic, version;
    uint64_t now_ns;
    uint64_t busy_ns;
    uint64_t total;
    uint32_t slots;
    uint32_t header_size;
    uint32_t slot_size;
    int32_t  current;   /* whose turn it is, or -1 */
    uint64_t turn_end_ns;
    uint64_t reaped;    /* slots emptied so far */
    uint64_t sample_seq;
    uint64_t sample_ns[SIM_SAMPLES], sample_busy[SIM_SAMPLES];
    uint64_t live[SIM_PROCS / 64];  /* bit per live slot, so that the dead cost nobody anything */
    uint32_t sweep;     /* where the next process coming in looks for the dead */
    uint32_t shares;    /* entries of `share` ever used */
    uint64_t share_ids; /* given out so far */
    pthread_mutex_t mutex;
    uint8_t  pad[4096 - 88 - 16 * SIM_SAMPLES - SIM_PROCS / 8 - sizeof(pthread_mutex_t)];
    struct sim_proc proc[SIM_PROCS];
    struct sim_queues queues[SIM_PROCS];
    struct sim_share share[SIM_SHARES];
};
_Static_assert(offsetof(struct sim_state, now_ns) == 8 && offsetof(struct sim_state, busy_ns) == 16, "documented");
_Static_assert(offsetof(struct sim_state, slots) == 32 && offsetof(struct sim_state, slot_size) == 40, "documented");
_Static_assert(offsetof(struct sim_state, proc) == 4096, "documented");
_Static_assert(offsetof(struct sim_proc, busy_ns) == 8 && offsetof(struct sim_proc, completed) == 32, "documented");

struct sim_gpu {           /* what sim.conf says */
    uint8_t  uuid[16];
    char     uuid_text[41]; /* GPU-... */
    char     name[96];
    uint64_t bytes;
    uint64_t context_bytes, module_bytes;
};

/* One GPU mapped into this process. Never unmapped: closing `alive` anywhere in the process would drop its lock. */
struct sim_map {
    struct sim_state *state;
    int alive;             /* descriptor of the .alive file */
    int slot;              /* ours, or -1 */
};

/* The first live slot from `slot` on, or -1: for (int i = sim_live(state, 0); i >= 0; i = sim_live(state, i + 1)). */
static inline int sim_live(const struct sim_state *state, int slot)
{
    for (int word = slot / 64; word < SIM_PROCS / 64; word++) {
        uint64_t bits = state->live[word] & (word == slot / 64 ? ~0ull << slot % 64 : ~0ull);
        if (bits)
            return word * 64 + __builtin_ctzll(bits);
    }
    return -1;
}

/* conf.c */
const char *sim_dir(void);
int sim_conf(struct sim_gpu gpus[SIM_GPUS]); /* how many, or -errno */
bool sim_parse_uuid(const char *text, size_t length, uint8_t uuid[16]); /* all 32 digits, GPU- in front or not */
uint64_t sim_env_u64(const char *name, uint64_t otherwise);

/* map.c: all return 0 or -errno */
int sim_open(const struct sim_gpu *gpu, struct sim_map *map);
int sim_join(struct sim_map *map);  /* takes a slot; -EAGAIN when there is none */
void sim_forget(struct sim_map *map); /* in a forked child: the slot is not ours */
void sim_lock(struct sim_map *map);
void sim_unlock(struct sim_map *map);
/* Under the lock. */
int sim_pid(struct sim_map *map, int slot); /* as this process counts it; 0 dead, -1 alive but not visible here */
void sim_reap(struct sim_map *map);         /* empties the slots of all that died */
void sim_empty(struct sim_state *state, int slot); /* its process is gone */

/* memory.c; what takes a map takes the lock itself */
uint64_t sim_used(const struct sim_state *state);    /* under the lock */
int sim_charge(struct sim_map *map, uint64_t bytes); /* -ENOMEM when the GPU is full */
void sim_refund(struct sim_map *map, uint64_t bytes);
/* Bytes charged to this process become an entry of `share`; -ENOSPC when there is no room for one. */
int sim_share(struct sim_map *map, uint64_t bytes, uint64_t *id);
/* This process holds it too. When nobody did any more it is charged to this one: -ENOMEM, -ENOSPC. 0 bytes: only if
 * somebody still does, else -ENOENT. */
int sim_share_hold(struct sim_map *map, uint64_t id, uint64_t bytes);
void sim_share_drop(struct sim_map *map, uint64_t id); /* what sim_refund is for bytes of its own */
bool sim_share_held(struct sim_map *map, uint64_t id); /* by anybody */
void sim_share_leave(struct sim_state *state, int slot); /* under the lock: all that a dead process held */
void sim_share_repair(struct sim_state *state);

/* engine.c, under the lock */
void sim_advance(struct sim_map *map, uint64_t now);
/* When it is worth looking again for operation `seq` of our channel: never later than a turn after its end, unless a
 * gate is in the way. UINT64_MAX: only a gate can bring it on. */
uint64_t sim_predict(struct sim_map *map, uint32_t channel, uint64_t seq);
/* Whether that operation of a process, dead or alive, is no longer to come. */
bool sim_done(struct sim_map *map, int slot, uint32_t generation, uint32_t channel, uint64_t seq);
void sim_open_gate(struct sim_map *map, uint32_t channel, uint64_t now);
#endif
