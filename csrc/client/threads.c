/* threads.c: the blocks of this process's launching threads, their marks, and fork. See client.h. */
#include "client.h"

#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "internal.h"

__thread struct gate_thread *gate_self __attribute__((tls_model("initial-exec")));
static struct gate_thread *threads; /* only grows; blocks are reused, never freed */
static struct hook_lock threads_lock;
static pthread_key_t thread_key;
static bool thread_key_ok, atfork_ok;
static void (*thread_exit)(struct gate_thread *t);

void gate_on_thread_exit(void (*leave)(struct gate_thread *t)) { thread_exit = leave; }

static void thread_ends(void *block)
{
    struct gate_thread *t = block;
    store_release(&t->in, 0);
    if (thread_exit)
        thread_exit(t);
    gate_self = NULL; /* a later key destructor that launches registers again */
    store_release(&t->dead, 1);
}

static void thread_reset(struct gate_thread *t)
{
    t->in = 0;
    t->left = 0;
    t->stream = GATE_NO_STREAM;
    t->gate = gate_of(0); /* never NULL: the open path reads through both */
    t->word = (const uint64_t *)(uintptr_t)&gate_of(0)->ctl->grant;
    t->lane = t->lanes = NULL;
    t->context = NULL;
    t->in_callback = 0;
    t->dead = 0;
}

struct gate_thread *gate_thread_here(void)
{
    if (gate_self)
        return gate_self;
    hook_lock_take(&threads_lock);
    if (!thread_key_ok)
        thread_key_ok = pthread_key_create(&thread_key, thread_ends) == 0;
    struct gate_thread *t = threads;
    while (t && !load_acquire(&t->dead))
        t = t->next;
    if (t) {
        thread_reset(t);
    } else {
        void *memory = NULL;
        if (posix_memalign(&memory, _Alignof(struct gate_thread), sizeof *t) == 0) {
            t = memory;
            memset(t, 0, sizeof *t);
            thread_reset(t);
            t->next = threads;
            store_release(&threads, t); /* gate_any_mark() walks without the lock */
        }
    }
    hook_lock_drop(&threads_lock);
    if (t && thread_key_ok)
        pthread_setspecific(thread_key, t);
    gate_self = t;
    return t;
}

bool gate_any_mark(const struct gate *g)
{
    if (load_acquire(&g->held))
        return true;
    for (struct gate_thread *t = load_acquire(&threads); t; t = t->next)
        if (load_acquire(&t->in) && load_relaxed(&t->gate) == g)
            return true;
    return false;
}

void gate_clear_marks(const struct gate *g)
{
    for (struct gate_thread *t = load_acquire(&threads); t; t = t->next)
        if (load_relaxed(&t->gate) == g)
            store_release(&t->in, 0);
}

static void after_fork(void)
{
    struct gate_thread *t = gate_self;
    joining_after_fork();
    memset(&threads_lock, 0, sizeof threads_lock);
    threads = t; /* the others do not exist here */
    if (t) {
        thread_reset(t);
        t->next = NULL;
    }
    agent_after_fork();
    streams_after_fork();
}

void threads_prepare_fork(void)
{
    if (!atfork_ok)
        atfork_ok = pthread_atfork(NULL, NULL, after_fork) == 0;
}
