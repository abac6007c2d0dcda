/* preload.c: libcgpu-preload.so.1, for containers in which a copy of the driver cannot be covered with a proxy.
 *
 * It stands in a merged /etc/ld.so.preload, so every program there that glibc starts loads it. It does one thing: a
 * dlopen() of a driver library, by whatever path, becomes one of our proxy. Only the name is changed: the real dlopen()
 * is jumped to with the caller's own return address on the stack, by which glibc knows the caller's RUNPATH and namespace.
 *
 * It needs no other library, not even libc (what it calls it takes as it finds it), starts nothing and has no
 * constructor: in the many programs that never look for a GPU it is a page. musl and static programs do not read
 * that file; a program that is linked against such a copy by its own RUNPATH is not reached, nor is dlmopen(). */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdbool.h>
#include <stddef.h>

#define FOLDER "/usr/local/cgpu/lib/" /* where a container has the proxies; image.py of cgpusched.driver has it, too */

/* Where libdl is a library of its own (glibc before 2.34), a program may start without it, and a module that libc itself loads
 * (NSS, iconv) bring it in later, with calls of dlopen() that come here. libc's own two ask for it then. */
extern void *dlsym(void *handle, const char *name) __attribute__((weak));
extern void *__libc_dlopen_mode(const char *name, int mode) __attribute__((weak));
extern void *__libc_dlsym(void *handle, const char *name) __attribute__((weak));
#define LIBC_MODE (RTLD_NOW | (int)0x80000000) /* __RTLD_DLOPEN, without which it refuses */

static const struct library {
    const char *name, *proxy;
} libraries[] = {{"libcuda.so", FOLDER "libcuda.so.1"}, {"libnvidia-ml.so", FOLDER "libnvidia-ml.so.1"}};

/* What follows `beginning` in `text`; NULL: it begins otherwise. */
static const char *after(const char *text, const char *beginning)
{
    while (*beginning)
        if (*text++ != *beginning++)
            return NULL;
    return text;
}

static bool is_version(const char *text)
{
    if (!*text)
        return true;
    if (*text != '.')
        return false;
    while (*text == '.' || (*text >= '0' && *text <= '9'))
        text++;
    return !*text;
}

/* By name alone the usual two, which the caller's RUNPATH may lead elsewhere; a full name, libcuda.so.550.163.01, is what the
 * hook asks for where it wants the real one. Ours are left, and the toolkit's stubs, which lead nowhere. */
static const char *redirected(const char *path)
{
    const char *base = path, *above = path;
    for (const char *at = path; *at; at++)
        if (*at == '/') {
            above = base;
            base = at + 1;
        }
    if (after(path, FOLDER) || after(above, "stubs/"))
        return path;
    for (size_t k = 0; k < sizeof libraries / sizeof *libraries; k++) {
        const char *rest = after(base, libraries[k].name), *end;
        if (!rest || !is_version(rest))
            continue;
        if (base == path && *rest && !((end = after(rest, ".1")) && !*end))
            continue;
        return libraries[k].proxy;
    }
    return path;
}

static void *nothing(void) { return NULL; }

static void *next_dlopen(void)
{
    if (dlsym)
        return dlsym(RTLD_NEXT, "dlopen");
    void *libdl = __libc_dlopen_mode && __libc_dlsym ? __libc_dlopen_mode("libdl.so.2", LIBC_MODE) : NULL;
    return libdl ? __libc_dlsym(libdl, "dlopen") : NULL;
}

/* What dlopen() below goes on to; called with the place of its first argument. */
__attribute__((used)) static void *preload_next(const char **path)
{
    static void *next;
    void *real = __atomic_load_n(&next, __ATOMIC_RELAXED);
    if (*path)
        *path = redirected(*path);
    if (!real) {
        real = next_dlopen();
        __atomic_store_n(&next, real, __ATOMIC_RELAXED);
    }
    return real ? real : (void *)nothing;
}

__asm__(".text\n"
        ".globl dlopen\n"
        ".type dlopen,@function\n"
        "dlopen:\n"
        ".cfi_startproc\n"
        "    endbr64\n"
        "    push %rdx\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    push %rsi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    push %rdi\n"
        "    .cfi_adjust_cfa_offset 8\n"
        "    mov %rsp, %rdi\n"
        "    call preload_next\n"
        "    pop %rdi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    pop %rsi\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    pop %rdx\n"
        "    .cfi_adjust_cfa_offset -8\n"
        "    jmp *%rax\n"
        ".cfi_endproc\n"
        ".size dlopen,.-dlopen\n");
