/* cgpu_abi.h: everything that cgpud and an intercepted process share.
 *
 * One *region* belongs to one instance on one GPU. It is two memfds:
 *
 *   control page  written by the daemon only; clients get it sealed (F_SEAL_FUTURE_WRITE) and map it read-only.
 *   report pages  written by the instance's processes; the daemon only reads them, and trusts nothing it reads:
 *                 copy, then validate; it never takes a lock, follows a pointer or reads a length here.
 *
 * Fixed widths, little-endian, x86-64 and aarch64. Every word has ONE writer (named beside it), but for the ledger,
 * which the instance's own processes share under a robust mutex. tests/test_abi.py checks these offsets from Python.
 * Times are CLOCK_MONOTONIC nanoseconds. Sizes are bytes.
 *
 * ---- The grant protocol ----
 * A *word* is  epoch << 1 | granted.  An epoch is never reused. Closed words are even.
 *
 * Client, launch (csrc/client/client.h):  mark "submitting" on the thread's own line; compiler barrier;
 *     open iff  ctl.grant == accept  (accept: a process variable; ACCEPT_NONE (1) equals no live word).
 *     The revoking side pays for the ordering: it stores, then membarrier()s, then looks at the marks.
 *
 * Client, accept (slow path):  w = ctl.grant; if w is odd:  slot.acked = slot.drained = slot.idle = 0;
 *     slot.opened = w; seq_cst fence;
 *     if ctl.grant still == w then accept = w, else slot.acked = slot.drained = w (never opened) and wait.
 *     A process that let go of w early (idle) may accept the same w again, the same way, as long as the daemon has not
 *     closed it.
 *
 * Client, release of w (agent thread; the daemon closed the word, the deadline came, or the process went idle):
 *     accept = ACCEPT_NONE; membarrier; wait until no thread is marked; then
 *     slot.acked   = w   when its remaining work is predicted to end within ctl.overlap_ns  (early; ring the bell)
 *     slot.drained = w   when all of it has really ended                                    (ring the bell)
 *     slot.idle    = w   before acked, if it lets go because it has nothing to run.
 *     slot.end_ns goes with both: when the rest is predicted to end, then when it did end. The daemon hands the former on
 *     as ctl.start_ns with the next grant, and the newcomer's first submission waits for that moment.
 *     With CTL_NODRAIN (policy 4) acked comes at once after the marks are clear.
 *
 * Daemon, close:  ctl.grant = w & ~1; seq_cst fence; then look at the slots. A slot *holds* w iff opened == w and
 *     acked != w. The instance has let go when no live slot holds w, and has drained when no live slot has opened == w
 *     and drained != w. A slot of a dead process holds nothing. So also for idleness: when every slot that opened w acked
 *     it, the daemon closes the word first and looks again, then moves on.
 *
 * Fallback: when ctl.heartbeat_ns is older than CGPU_ORPHAN_NS, or the socket is gone that long, a client accepts the word
 *     as it stands, odd or even, and counts slot.ungated, unless CTL_PAUSED or CTL_SHUT is set. Memory limits stay as
 *     they are.
 */
#ifndef CGPU_ABI_H
#define CGPU_ABI_H
#include <stddef.h>
#include <stdint.h>

#define CGPU_ABI_MAGIC   0x75706763u /* "cgpu" */
#define CGPU_ABI_VERSION 1u
#define CGPU_MAX_GPUS    16          /* GPUs of one instance */
#define CGPU_SLOTS       512         /* processes of one instance on one GPU */
#define CGPU_ORPHAN_NS   1000000000ull
#define CGPU_HEARTBEAT_NS 100000000ull
#define CGPU_BEATS       16          /* heartbeats that ctl.beat remembers */
#define CGPU_ACCEPT_NONE 1ull        /* epoch 0, granted: never issued */

/* ctl.flags */
#define CTL_PAUSED  1u /* weight 0: not granted, and not opened by the fallback either */
#define CTL_NODRAIN 2u /* policy 4: acknowledge at once, do not wait for work in flight */
#define CTL_NATIVE  4u /* policy 5 or the watchdog's plain sharing: the word is odd and will not be revoked by time */
#define CTL_SHUT    8u /* the audit shut this gate (enforce = "gate") */

struct cgpu_ctl { /* 1 page; the daemon writes all of it */
    uint32_t magic, version;
    uint64_t generation;          /* of the daemon that made this page */
    uint8_t  uuid[16];            /* the GPU's */
    uint32_t gpu;                 /* host index, for messages */
    uint32_t pad0[7];
    /* line 1 (64): what a launch reads */
    _Alignas(64) uint64_t grant;  /* the word; futex on its low half */
    uint64_t deadline_ns;         /* when this turn should end; 0 = nobody else wants the device. Valid for `grant` if
                                     `grant` is the same before and after reading it */
    uint32_t flags;               /* CTL_* */
    uint32_t pad1;
    uint64_t start_ns;            /* when the turn before is predicted to have drained: the first submission under `grant`
                                     waits for it. 0 = nothing is in the way. Written before `grant` */
    uint64_t pad2[4];
    /* line 2 (128): memory */
    _Alignas(64) uint64_t mem_limit;
    uint64_t mem_other;           /* in use but invisible to hooks (contexts, modules), from NVML; counts against the limit */
    uint64_t dead_seq;            /* raised whenever a slot_gen below was cleared */
    uint64_t mem_total;           /* the card's */
    uint64_t mem_context;         /* the least that a process of this instance was seen to take with its first context */
    uint64_t contexts;            /* not 0: that was measured, and written before */
    uint64_t pad3[2];
    /* line 3 (192): tuning */
    _Alignas(64) uint32_t span_ns; /* an event is recorded about every span of device time */
    uint32_t window;              /* at most so many unfinished spans in flight */
    uint32_t overlap_ns;          /* how early `acked` may come */
    uint32_t grace_ns;            /* idle this long after the last synchronise: let go */
    uint32_t pad4[12];
    /* line 4 (256): life */
    _Alignas(64) uint64_t heartbeat_ns;
    uint64_t busy_ns;             /* device time charged to this instance so far */
    uint64_t pad5[6];
    /* 320: owner generation of each slot; 0 = nobody's. A slot is live iff slot.gen == slot_gen[i] != 0 */
    _Alignas(64) uint32_t slot_gen[CGPU_SLOTS];
    /* 2368: what was charged by the last heartbeats (NVML utilization inside). `beats` counts them, and is raised after entry
     * beats % CGPU_BEATS was written: those after number beats - CGPU_BEATS are whole, by `beats` as it is after reading them */
    _Alignas(64) uint64_t beats;
    struct cgpu_beat {
        uint64_t at_ns, busy_ns;
    } beat[CGPU_BEATS];
    uint8_t  pad6[4096 - 2376 - 16 * CGPU_BEATS];
};

struct cgpu_slot { /* 256 bytes; one process on one GPU; written by that process alone, but for mem_used */
    uint32_t gen;                 /* must equal ctl.slot_gen[i]; written last when the slot is taken, under the ledger mutex */
    uint32_t pid;                 /* as the process counts itself: information only */
    uint64_t pad0[7];
    /* line 1 (64): the gate */
    _Alignas(64) uint64_t opened; /* the word it accepted */
    uint64_t acked;
    uint64_t drained;
    uint64_t idle;
    uint32_t demand;              /* launchers that wait now (count, atomic) */
    uint32_t pad1;
    uint64_t inflight_ns;         /* predicted remaining device time at release, 0 = unknown; only lengthens patience */
    uint64_t first_ns;            /* first launch after opened: information */
    uint64_t end_ns;              /* with `acked`: when the rest is predicted to end; with `drained`: when it did */
    /* line 2 (128): memory, under the ledger mutex; but mem_used is lowered by its process without */
    _Alignas(64) uint64_t mem_used;
    uint64_t mem_peak;
    uint64_t mem_refused;         /* allocations refused for the quota */
    uint64_t pad3[5];
    /* line 3 (192): counters since the slot was taken, relaxed */
    _Alignas(64) uint64_t launches; /* submissions that passed the gate (updated at event boundaries) */
    uint64_t ungated;             /* times the fallback opened the gate */
    uint64_t unknown;             /* names the driver offers that we have never heard of, handed to the program */
    uint64_t kernel_ns;           /* measured mean length of a submission */
    uint64_t dirty;               /* releases that gave up waiting for the device or a mark */
    uint64_t away_ns;             /* device time it used under the last daemon's grant before it joined this one, kept from others */
    uint64_t pad4[2];
};

struct cgpu_report { /* header page, then the slots */
    uint32_t magic, version;
    uint64_t pad0[7];
    /* line 1 (64): the ledger. What counts is the sum of slot.mem_used over slots with gen != 0; total is never less, and is made
     * the same before anything is refused for it */
    _Alignas(64) uint64_t ledger_mutex[8]; /* a pthread_mutex_t: PTHREAD_PROCESS_SHARED, PTHREAD_MUTEX_ROBUST. The daemon
                                              initialises it once, before any client has the page, and never touches it again */
    /* line 2 (128) */
    _Alignas(64) uint64_t mem_total_used;
    uint64_t reaped_seq;          /* the ctl.dead_seq up to which dead slots were repaired */
    uint64_t pad1[6];
    uint8_t  pad2[4096 - 192];
    struct cgpu_slot slot[CGPU_SLOTS];
};

/* ---- The client socket: SOCK_SEQPACKET, one socket an instance; which socket it came by is the client's identity ----
 * client -> daemon: cgpu_hello.  daemon -> client: cgpu_welcome with SCM_RIGHTS
 *   [0] agent eventfd (daemon rings: look at your control pages), then per GPU:  control page (read-only), report pages,
 *   bell eventfd (client rings: look at my report page).
 * The connection stays open: its end is the process's end (or exec) for the daemon, and the daemon's death for the client.
 * A process that connects again (new daemon, or it closed the descriptor) gets new pages and a new slot, and enters the
 * memory it already holds there, whatever the limit. */
struct cgpu_hello {
    uint32_t magic, version;
    uint32_t pid;                 /* getpid(): as the process counts itself */
    uint32_t flags;               /* CGPU_HELLO_* */
    uint64_t pad[6];
};
#define CGPU_HELLO_INFO 1u        /* NVML-only process: wants limits and pages, takes no part in the gate */

struct cgpu_welcome_gpu {
    uint8_t  uuid[16];
    uint32_t gpu;                 /* host index */
    uint32_t slot, slot_gen;
    uint32_t flags;               /* CGPU_GPU_* */
    uint64_t mem_limit;
    uint64_t mem_total;
};
#define CGPU_GPU_NATIVE 1u        /* the whole GPU, none of our business: no slot, no limit, no descriptors */
#define CGPU_GPU_NOTES  2u        /* the daemon takes notes about this GPU (cgpu_note) */
#define CGPU_GPU_PIDS   4u        /* NVML counts processes as this client does */

/* After the welcome, client -> daemon: this process has made a context on the GPU, and ctl.contexts was 0: no hook knows what one
 * takes. The answer is the same message, when the daemon has asked NVML since and what it found counts, or NVML does not answer.
 * One note at a time. */
struct cgpu_note {
    uint32_t gpu;                 /* host index */
    uint32_t number;
    uint64_t pad;
};

struct cgpu_welcome {
    uint32_t magic, version;
    int32_t  error;               /* 0 or an errno; then `text` says why and no descriptors come */
    uint32_t ngpus;               /* that the instance shares, in the order the program shall see them */
    char     id[136];             /* the instance's, NUL-terminated */
    char     text[128];
    /* The shared ones, then the native ones of a container in mixed mode, up to the first entry without CGPU_GPU_NATIVE. The
     * program sees each of those before the first shared one of a higher host index. A client of before there were any looks
     * at `ngpus` entries and sees the shared ones alone, so this needed no new version. */
    struct cgpu_welcome_gpu gpu[CGPU_MAX_GPUS];
};

_Static_assert(sizeof(struct cgpu_ctl) == 4096, "control page");
_Static_assert(offsetof(struct cgpu_ctl, grant) == 64, "grant");
_Static_assert(offsetof(struct cgpu_ctl, start_ns) == 88, "start_ns");
_Static_assert(offsetof(struct cgpu_ctl, mem_limit) == 128, "mem_limit");
_Static_assert(offsetof(struct cgpu_ctl, span_ns) == 192, "span_ns");
_Static_assert(offsetof(struct cgpu_ctl, heartbeat_ns) == 256, "heartbeat_ns");
_Static_assert(offsetof(struct cgpu_ctl, slot_gen) == 320, "slot_gen");
_Static_assert(offsetof(struct cgpu_ctl, beats) == 2368, "beats");
_Static_assert(sizeof(struct cgpu_slot) == 256, "slot");
_Static_assert(offsetof(struct cgpu_slot, opened) == 64, "opened");
_Static_assert(offsetof(struct cgpu_slot, mem_used) == 128, "mem_used");
_Static_assert(offsetof(struct cgpu_slot, launches) == 192, "launches");
_Static_assert(offsetof(struct cgpu_slot, away_ns) == 232, "away_ns");
_Static_assert(offsetof(struct cgpu_report, mem_total_used) == 128, "mem_total_used");
_Static_assert(offsetof(struct cgpu_report, slot) == 4096, "slots");
_Static_assert(sizeof(struct cgpu_hello) == 64, "hello");
_Static_assert(sizeof(struct cgpu_welcome_gpu) == 48, "welcome gpu");
_Static_assert(sizeof(struct cgpu_note) == 16, "note");
_Static_assert(offsetof(struct cgpu_ctl, mem_context) == 160, "mem_context");
_Static_assert(sizeof(struct cgpu_welcome) == 280 + 48 * CGPU_MAX_GPUS, "welcome");
#endif
