/* worker.c: one process of an instance, for tests of many: worker MODE CTL REPORT SLOT THREADS BYTES
 *
 *   fill    each thread charges blocks of BYTES until one is refused; prints how many were granted; holds them
 *   quiet   each thread charges and refunds BYTES, which always fits; one more asks for the impossible; prints refusals seen
 *   churn   each thread allocates and frees at random up to BYTES a block, watching the total
 *   torn    charges BYTES once, then dies with the mutex held, its slot raised by BYTES and the total not yet
 *   fork    threads churn while the main one forks children that allocate in the slot after ours
 *   move    threads charge and refund BYTES while the main one joins again and again, in our slot and the one after it in turn
 * All but fork and move go on, or hold, until standard input ends; then they give everything back and print "total N". A total past the
 * limit prints "OVER" and exits 3. */
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>

#include "ledger.h"
#include "stub.h"

#define BLOCKS 64
#define FORKS 40
#define MOVES 3000

typedef CUresult (*alloc_fn)(CUdeviceptr *, size_t);
typedef CUresult (*free_fn)(CUdeviceptr);
static alloc_fn alloc;
static free_fn release;
static uint64_t bytes, granted, refused;
static int stop;

static void check(void)
{
    struct ledger_view view = ledger_view(0);
    if (view.used > view.limit) {
        printf("OVER %llu > %llu\n", (unsigned long long)view.used, (unsigned long long)view.limit);
        fflush(stdout);
        _Exit(3);
    }
}

static void *fill(void *arg)
{
    CUdeviceptr ptr;
    stub_current(0, 0);
    while (alloc(&ptr, bytes) == CUDA_SUCCESS)
        fetch_add(&granted, 1);
    check();
    return arg;
}

static void *quiet(void *arg)
{
    CUdeviceptr ptr;
    stub_current(0, 0);
    while (!load_relaxed(&stop)) {
        if (alloc(&ptr, bytes) != CUDA_SUCCESS)
            fetch_add(&refused, 1);
        else
            release(ptr);
        fetch_add(&granted, 1);
    }
    return arg;
}

static void *impossible(void *arg)
{
    CUdeviceptr ptr;
    stub_current(0, 0);
    while (!load_relaxed(&stop))
        if (alloc(&ptr, ledger_view(0).limit + 1) == CUDA_SUCCESS)
            _Exit(4);
    return arg;
}

static void *churn(void *arg)
{
    CUdeviceptr blocks[BLOCKS] = {0};
    unsigned seed = (unsigned)(uintptr_t)arg;
    stub_current(0, 0);
    while (!load_relaxed(&stop)) {
        CUdeviceptr *block = &blocks[rand_r(&seed) % BLOCKS];
        if (*block) {
            release(*block);
            *block = 0;
        } else if (alloc(block, rand_r(&seed) % bytes + 1) != CUDA_SUCCESS) {
            *block = 0;
        }
        if (rand_r(&seed) % 16 == 0)
            check();
    }
    for (int i = 0; i < BLOCKS; i++)
        if (blocks[i])
            release(blocks[i]);
    return arg;
}

static void torn(void)
{
    CUdeviceptr ptr;
    struct cgpu_slot *slot = gate_of(0)->slot;
    stub_current(0, 0);
    alloc(&ptr, bytes);
    pthread_mutex_lock((pthread_mutex_t *)(void *)gate_of(0)->report->ledger_mutex);
    slot->mem_used += bytes;
    raise(SIGKILL);
}

/* A child holds nothing, frees nothing of its parent's, joins anew. */
static int child(const char *ctl, const char *report, int slot, CUdeviceptr parents)
{
    CUdeviceptr ptr;
    if (hook_gpus() != 0 || ledger_view(0).used != 0)
        return 10;
    stub_ctl(ctl)->slot_gen[slot + 1]++;
    if (stub_offer(0, ctl, report, slot + 1) || !hook_join(false))
        return 11;
    struct cgpu_slot *mine = gate_of(0)->slot;
    if (release(parents) != CUDA_SUCCESS || mine->mem_used != 0)
        return 12;
    for (int i = 0; i < 100; i++) {
        if (alloc(&ptr, 4096) != CUDA_SUCCESS || mine->mem_used != 4096)
            return 13;
        if (release(ptr) != CUDA_SUCCESS || mine->mem_used != 0)
            return 14;
    }
    return 0;
}

static int fork_many(const char *ctl, const char *report, int slot)
{
    CUdeviceptr ours;
    stub_current(0, 0);
    if (alloc(&ours, 1 << 20) != CUDA_SUCCESS)
        return 20;
    for (int i = 0; i < FORKS; i++) {
        int status;
        pid_t pid = fork();
        if (pid == 0)
            _Exit(child(ctl, report, slot, ours));
        if (waitpid(pid, &status, 0) != pid || status != 0) {
            printf("child %d: status %#x\n", i, (unsigned)status);
            return 21;
        }
    }
    release(ours);
    return 0;
}

static void *churn_account(void *arg)
{
    while (!load_relaxed(&stop))
        if (ledger_charge(0, bytes))
            ledger_refund(0, bytes);
    return arg;
}

static int move_many(const char *ctl, const char *report, int slot)
{
    struct cgpu_ctl *daemon = stub_ctl(ctl);
    for (int i = 0; i < MOVES; i++) {
        int next = slot + (i & 1 ? 0 : 1);
        daemon->slot_gen[next]++;
        if (stub_offer(0, ctl, report, next))
            return 30;
        stub_rejoin();
    }
    return 0;
}

int main(int argc, char **argv)
{
    static const uint8_t uuids[1][16] = {{0xA0, 0, 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13}};
    pthread_t threads[65];
    if (argc != 7)
        return 2;
    const char *mode = argv[1];
    int slot = atoi(argv[4]), count = atoi(argv[5]), result = 0;
    bytes = strtoull(argv[6], NULL, 10);
    stub_cards(1, uuids, 24ull << 30, 24ull << 30);
    stub_joins(1);
    stub_bind("");
    if (stub_offer(0, argv[2], argv[3], slot) || !hook_join(false))
        return 2;
    alloc = (alloc_fn)stub_wrapper("cuMemAlloc_v2");
    release = (free_fn)stub_wrapper("cuMemFree_v2");
    void *(*body)(void *) = !strcmp(mode, "fill") ? fill : !strcmp(mode, "quiet") ? quiet :
                            !strcmp(mode, "move") ? churn_account : churn;
    if (!strcmp(mode, "torn"))
        torn();
    for (long i = 0; i < count; i++)
        pthread_create(&threads[i], NULL, body, (void *)(i + 1 + 100 * slot));
    if (body == quiet)
        pthread_create(&threads[count++], NULL, impossible, NULL);
    if (body == fill) {
        for (int i = 0; i < count; i++)
            pthread_join(threads[i], NULL);
        printf("granted %llu\n", (unsigned long long)granted);
        fflush(stdout);
    }
    if (!strcmp(mode, "fork"))
        result = fork_many(argv[2], argv[3], slot);
    else if (!strcmp(mode, "move"))
        result = move_many(argv[2], argv[3], slot);
    else
        while (getchar() != EOF)
            ;
    store_relaxed(&stop, 1);
    for (int i = 0; i < count && body != fill; i++)
        pthread_join(threads[i], NULL);
    if (body == fill)
        ledger_drop_owner(stub_context(0, 0));
    if (body == quiet)
        printf("refused %llu of %llu\n", (unsigned long long)refused, (unsigned long long)granted);
    printf("total %llu\n", (unsigned long long)gate_of(0)->slot->mem_used);
    return result;
}
