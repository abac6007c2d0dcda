/* both.c: the gate's two sides in one process, for ThreadSanitizer.  both MS
 *
 * The daemon's side is csrc/gate, linked in; the program's is the hook, by way of the proxies: LAUNCHERS threads launch
 * kernels on streams of their own, and the hook's agent lets go. A rival obeys the protocol by hand, one thread changes the
 * plan, one reads the figures while a process comes and goes. Ends with 0 if both sides had turns and all threads ended. */
#define _GNU_SOURCE
#include <poll.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/eventfd.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include "atomics.h"
#include "cuda_min.h"
#include "server.h"

#define LAUNCHERS 3
#define MEMORY    (8ull << 30)

CUresult cuInit(unsigned);
CUresult cuCtxCreate_v2(CUcontext *, unsigned, CUdevice);
CUresult cuCtxSetCurrent(CUcontext);
CUresult cuStreamCreate(CUstream *, unsigned);
CUresult cuStreamSynchronize(CUstream);
CUresult cuLaunchKernel(CUfunction, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, CUstream, void **, void **);

static struct gate_server *server;
static uint64_t ours, rivals;
static int our_fds[3], rival_fds[3];
static const uint8_t uuid[16] = {1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1}; /* the driver's first device */
static bool stop;
static CUcontext context;

static void fail(const char *what)
{
    perror(what);
    _exit(2);
}

/* ---- the daemon ---- */

static void plan(uint64_t ours_ns, uint64_t rivals_ns, bool native)
{
    struct core_plan p = {.count = 2, .skip_idle = 1, .drain = 1, .native = native, .high_percent = 90};
    struct gate_turn turns[2] = {{.region = ours, .quantum_ns = ours_ns}, {.region = rivals, .quantum_ns = rivals_ns}};
    if (gate_set_plan(server, 0, &p, turns))
        fail("gate_set_plan");
}

static void welcome(int connection)
{
    struct cgpu_hello hello;
    int agent[2];
    struct cgpu_welcome w = {.magic = CGPU_ABI_MAGIC, .version = CGPU_ABI_VERSION, .ngpus = 1, .id = "both"};
    w.gpu[0] = (struct cgpu_welcome_gpu){.mem_limit = MEMORY, .mem_total = MEMORY};
    memcpy(w.gpu[0].uuid, uuid, sizeof uuid);
    if (recv(connection, &hello, sizeof hello, 0) != sizeof hello || socketpair(AF_UNIX, SOCK_SEQPACKET | SOCK_NONBLOCK, 0, agent) ||
        gate_attach(server, ours, agent[0], &w.gpu[0].slot, &w.gpu[0].slot_gen))
        fail("attach");
    int fds[4] = {agent[1], our_fds[0], our_fds[1], our_fds[2]};
    union {
        char bytes[CMSG_SPACE(sizeof fds)];
        struct cmsghdr align;
    } control = {.bytes = {0}};
    struct iovec iov = {&w, sizeof w};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    struct cmsghdr *rights = CMSG_FIRSTHDR(&message);
    *rights = (struct cmsghdr){.cmsg_len = CMSG_LEN(sizeof fds), .cmsg_level = SOL_SOCKET, .cmsg_type = SCM_RIGHTS};
    memcpy(CMSG_DATA(rights), fds, sizeof fds);
    if (sendmsg(connection, &message, 0) != sizeof w)
        fail("sendmsg");
    close(agent[0]);
    close(agent[1]);
}

static void *serve(void *listener)
{
    int connection = accept4(*(int *)listener, NULL, NULL, SOCK_CLOEXEC); /* stays open: the daemon lives */
    if (connection < 0)
        fail("accept");
    welcome(connection);
    return NULL;
}

static void *change_plans(void *unused)
{
    for (unsigned i = 0; !load_relaxed(&stop); i++) {
        usleep(20000);
        plan((1 + i % 3) * 2000000, i % 7 == 3 ? 0 : 2000000, i % 5 == 4);
    }
    plan(2000000, 2000000, false);
    return unused;
}

static void *look(void *unused)
{
    struct gate_slot_use uses[CGPU_SLOTS];
    struct gate_region_use region;
    struct gate_gpu_use gpu;
    while (!load_relaxed(&stop)) {
        int agent = eventfd(0, EFD_NONBLOCK);
        uint32_t slot, gen;
        if (gate_attach(server, rivals, agent, &slot, &gen) || gate_slots(server, ours, uses) < 1 ||
            gate_region_used(server, rivals, &region) || gate_gpu_used(server, 0, &gpu) ||
            gate_set_memory(server, ours, MEMORY, gpu.turns) || gate_detach(server, rivals, slot))
            fail("look");
        close(agent);
        usleep(1000);
    }
    return unused;
}

/* ---- the rival ---- */

static void *rival(void *unused)
{
    const struct cgpu_ctl *ctl = mmap(NULL, sizeof *ctl, PROT_READ, MAP_SHARED, rival_fds[0], 0);
    struct cgpu_report *report = mmap(NULL, sizeof *report, PROT_READ | PROT_WRITE, MAP_SHARED, rival_fds[1], 0);
    int agent = eventfd(0, EFD_NONBLOCK);
    uint32_t at, gen;
    uint64_t one = 1;
    if (ctl == MAP_FAILED || report == MAP_FAILED || gate_attach(server, rivals, agent, &at, &gen))
        fail("rival");
    struct cgpu_slot *slot = &report->slot[at];
    store_release(&slot->gen, gen);
    while (!load_relaxed(&stop)) {
        store_release(&slot->demand, 1);
        if (write(rival_fds[2], &one, sizeof one) < 0)
            fail("bell");
        uint64_t word;
        while (!((word = load_acquire(&ctl->grant)) & 1) && !load_relaxed(&stop))
            usleep(50);
        if (!(word & 1))
            break;
        store_relaxed(&slot->drained, 0);
        store_relaxed(&slot->acked, 0);
        store_release(&slot->opened, word);
        fence_seq_cst();
        store_release(&slot->demand, 0);
        if (load_relaxed(&ctl->grant) == word)
            usleep(300);
        store_release(&slot->acked, word);
        store_release(&slot->drained, word);
    }
    return unused;
}

/* ---- the program ---- */

static void *launch(void *number)
{
    CUstream stream;
    uint64_t ns = 20000u * (1 + (uintptr_t)number);
    if (cuCtxSetCurrent(context) || cuStreamCreate(&stream, 0))
        fail("launch");
    for (unsigned i = 1; !load_relaxed(&stop); i++) {
        if (cuLaunchKernel((CUfunction)(uintptr_t)ns, 1, 1, 1, 1, 1, 1, 0, stream, NULL, NULL))
            fail("cuLaunchKernel");
        if (i % 50 == 0 && cuStreamSynchronize(stream))
            fail("cuStreamSynchronize");
        if (i % 500 == 0)
            usleep(500); /* long enough to be found idle */
    }
    return NULL;
}

int main(int argc, char **argv)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    pthread_t serving, others[3], launchers[LAUNCHERS];
    struct gate_region_use us = {0}, them = {0};
    const char *path = getenv("CGPU_SOCKET");
    int listener = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    if (argc < 2 || !path || strlen(path) >= sizeof address.sun_path)
        return 2;
    strcpy(address.sun_path, path);
    if (bind(listener, (struct sockaddr *)&address, sizeof address) || listen(listener, 8))
        fail("listen");
    if (gate_new(NULL, &server) || gate_start(server) || gate_add_gpu(server, 0, uuid, MEMORY) ||
        gate_add_region(server, 0, 1, MEMORY, &ours, our_fds) || gate_add_region(server, 0, 2, MEMORY, &rivals, rival_fds))
        fail("gate");
    plan(2000000, 2000000, false);
    pthread_create(&serving, NULL, serve, &listener);
    if (cuInit(0) || cuCtxCreate_v2(&context, 0, 0))
        fail("cuInit");
    void *(*run[3])(void *) = {change_plans, look, rival};
    for (uintptr_t i = 0; i < LAUNCHERS; i++)
        pthread_create(&launchers[i], NULL, launch, (void *)i);
    pthread_join(serving, NULL); /* the first launch has joined */
    for (int i = 0; i < 3; i++)
        pthread_create(&others[i], NULL, run[i], NULL);
    usleep((useconds_t)atoi(argv[1]) * 1000);
    store_relaxed(&stop, true);
    for (int i = 0; i < 3; i++)
        pthread_join(others[i], NULL);
    for (int i = 0; i < LAUNCHERS; i++)
        pthread_join(launchers[i], NULL);
    gate_region_used(server, ours, &us);
    gate_region_used(server, rivals, &them);
    gate_free(server);
    printf("turns %llu %llu\n", (unsigned long long)us.turns, (unsigned long long)them.turns);
    return us.turns && them.turns ? 0 : 1;
}
