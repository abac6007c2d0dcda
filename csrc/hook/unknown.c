/* unknown.c: functions that the driver offers and csrc/tables has never heard of. They are forwarded; that they were handed
 * to the program is counted (slot.unknown) and logged once each, since one of them may submit work or take memory past us.
 *
 * An unknown *export* costs nothing but its first call: its slot first holds a short way in that saves every register an
 * argument can be in, notes the name, puts the real function into the slot and jumps there. (The upper halves of ymm and zmm
 * arguments are not kept on that first call; no driver function takes any.) */
#include <string.h>
#include "atomics.h"
#include "bind.h"
#include "client.h"

#define ENTRIES 1024 /* ways in; drivers so far brought a few dozen new names each */
#define NOTED 4096   /* names noted, a power of two */
#define TEXT_(n) #n
#define TEXT(n) TEXT_(n)

#define X(name) name,
static const char *const cuda_known[] = {
#include "cuda_known.inc"
};
#undef X
#define X(name) #name,
static const char *const nvml_known[] = {
#include "nvml_exports.inc"
};
#undef X

struct known {
    const char *const *names; /* in strcmp order */
    uint64_t count;
};
static const struct known known_names[] = {
    [HOOK_CUDA] = {cuda_known, sizeof cuda_known / sizeof *cuda_known},
    [HOOK_NVML] = {nvml_known, sizeof nvml_known / sizeof *nvml_known},
};

bool unknown_is_known(enum hook_lib lib, const char *name)
{
    uint64_t low = 0, high = known_names[lib].count;
    while (low < high) {
        uint64_t middle = (low + high) / 2;
        int order = strcmp(name, known_names[lib].names[middle]);
        if (!order)
            return true;
        if (order < 0)
            high = middle;
        else
            low = middle + 1;
    }
    return false;
}

void unknown_mark(enum hook_lib lib, const char *const *names, uint64_t count, bool *known)
{
    /* two sorted lists side by side: 656 searches by halves took 0.1 ms of every program's start */
    uint64_t at = 0;
    for (uint64_t i = 0; i < count; i++) {
        int order = 1;
        while (at < known_names[lib].count && (order = strcmp(known_names[lib].names[at], names[i])) < 0)
            at++;
        known[i] = at < known_names[lib].count && !order;
    }
}

/* ---- counting ---- */

static uint64_t noted[NOTED]; /* hashes; 0 = free. Lock-free: a word goes from 0 to its hash once */
static uint64_t total;

static bool first_time(const char *name, int version)
{
    uint64_t hash = 14695981039346656037u; /* FNV-1a */
    for (const char *c = name; *c; c++)
        hash = (hash ^ (unsigned char)*c) * 1099511628211u;
    hash = (hash ^ (uint64_t)(unsigned)version) * 1099511628211u;
    hash = hash ? hash : 1;
    for (uint64_t step = 0; step < NOTED; step++) {
        uint64_t *word = &noted[(hash + step) % NOTED], found = 0;
        if (__atomic_compare_exchange_n(word, &found, hash, false, __ATOMIC_RELAXED, __ATOMIC_RELAXED))
            return true;
        if (found == hash)
            return false;
    }
    return false; /* full: thousands of new names are known well enough by now */
}

void hook_count_unknown(void)
{
    uint64_t count;
    do { /* several threads may write; the word must end at the newest count */
        count = load_acquire(&total);
        for (int i = 0; count && i < gate_count(); i++) {
            struct gate *gate = gate_of(i);
            if (gate && gate->slot)
                store_relaxed(&gate->slot->unknown, count - load_relaxed(&gate->unknown_before));
        }
    } while (count != load_acquire(&total));
}

void unknown_note(const char *name, int version)
{
    if (!first_time(name, version))
        return;
    fetch_add(&total, 1);
    if (version)
        hook_log("warning", "unknown driver function forwarded name=%s version=%d", name, version);
    else
        hook_log("warning", "unknown driver function forwarded name=%s", name);
    hook_count_unknown();
}

/* ---- the ways in ---- */

#if defined(__x86_64__)
static struct {
    const char *name;
    void *real, **slot;
} entries[ENTRIES];
static unsigned used;

/* Way number i is 32 bytes in: it pushes i and goes on to the common part. The stack is as the caller left it but for that
 * one word, so arguments on the stack are where the real function looks for them once the word is gone again. */
__asm__(".text\n"
        ".p2align 5\n"
        ".type unknown_ways, @function\n"
        "unknown_ways:\n"
        ".cfi_startproc\n"
        ".set way, 0\n"
        ".rept " TEXT(ENTRIES) "\n"
        "    .byte 0xf3, 0x0f, 0x1e, 0xfa\n" /* endbr64, in words that an old assembler knows */
        "    pushq $way\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    jmp unknown_common\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    .p2align 5\n"
        "    .set way, way + 1\n"
        ".endr\n"
        ".cfi_endproc\n"
        ".size unknown_ways, . - unknown_ways\n"
        ".type unknown_common, @function\n"
        "unknown_common:\n"
        ".cfi_startproc\n"
        ".cfi_def_cfa_offset 16\n"
        "    pushq %rbp\n"
        ".cfi_def_cfa_offset 24\n"
        ".cfi_offset %rbp, -24\n"
        "    movq %rsp, %rbp\n"
        ".cfi_def_cfa_register %rbp\n"
        "    subq $200, %rsp\n" /* 7 integer registers, 8 vector registers; 16-byte aligned: entry 8, index 8, rbp 8, 200 */
        "    movq %rax, (%rsp)\n" /* al: the number of vector arguments of a variadic call */
        "    movq %rdi, 8(%rsp)\n"
        "    movq %rsi, 16(%rsp)\n"
        "    movq %rdx, 24(%rsp)\n"
        "    movq %rcx, 32(%rsp)\n"
        "    movq %r8, 40(%rsp)\n"
        "    movq %r9, 48(%rsp)\n"
        "    movq %r10, 56(%rsp)\n"
        "    movups %xmm0, 64(%rsp)\n"
        "    movups %xmm1, 80(%rsp)\n"
        "    movups %xmm2, 96(%rsp)\n"
        "    movups %xmm3, 112(%rsp)\n"
        "    movups %xmm4, 128(%rsp)\n"
        "    movups %xmm5, 144(%rsp)\n"
        "    movups %xmm6, 160(%rsp)\n"
        "    movups %xmm7, 176(%rsp)\n"
        "    movq 8(%rbp), %rdi\n"
        "    call unknown_first\n"
        "    movq %rax, %r11\n"
        "    movq (%rsp), %rax\n"
        "    movq 8(%rsp), %rdi\n"
        "    movq 16(%rsp), %rsi\n"
        "    movq 24(%rsp), %rdx\n"
        "    movq 32(%rsp), %rcx\n"
        "    movq 40(%rsp), %r8\n"
        "    movq 48(%rsp), %r9\n"
        "    movq 56(%rsp), %r10\n"
        "    movups 64(%rsp), %xmm0\n"
        "    movups 80(%rsp), %xmm1\n"
        "    movups 96(%rsp), %xmm2\n"
        "    movups 112(%rsp), %xmm3\n"
        "    movups 128(%rsp), %xmm4\n"
        "    movups 144(%rsp), %xmm5\n"
        "    movups 160(%rsp), %xmm6\n"
        "    movups 176(%rsp), %xmm7\n"
        "    leave\n"
        ".cfi_def_cfa %rsp, 16\n"
        "    leaq 8(%rsp), %rsp\n" /* not addq: the flags pass too */
        ".cfi_def_cfa_offset 8\n"
        "    jmpq *%r11\n"
        ".cfi_endproc\n"
        ".size unknown_common, . - unknown_common\n");
extern const char unknown_ways[] __attribute__((visibility("hidden")));

__attribute__((visibility("hidden"), used)) void *unknown_first(uint64_t way)
{
    unknown_note(entries[way].name, 0);
    store_release(entries[way].slot, entries[way].real); /* pairs with nothing: either value is right */
    return entries[way].real;
}

void *unknown_entry(const char *name, void *real, void **slot)
{
    unsigned way = used;
    if (way == ENTRIES)
        return real;
    used++; /* under the loader's lock */
    entries[way].name = name;
    entries[way].real = real;
    entries[way].slot = slot;
    return (void *)(unknown_ways + 32 * way);
}
#else
void *unknown_entry(const char *name, void *real, void **slot)
{
    (void)name, (void)slot;
    return real;
}
#endif
