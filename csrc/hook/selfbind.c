/* selfbind.c: the real library's references to itself.
 *
 * libcuda is linked with -Bsymbolic, libnvidia-ml is not: it calls about 30 of its own exports (nvmlDeviceGetHandleByIndex_v2,
 * nvmlDeviceGetMemoryInfo_v2 among them) through its PLT. Where the program linked the proxy, or opened it RTLD_GLOBAL, the
 * loader resolves those to the proxy: the real library would see our numbering of devices and our quota from inside, or
 * call itself in a circle. RTLD_DEEPBIND would avoid it, but takes malloc from libc behind the back of a program that
 * brings its own (strdup() in libc then allocates with the one and the driver frees with the other). So the few words are
 * put right after loading, which is what -Bsymbolic would have done. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <elf.h>
#include <link.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>
#include "bind.h"

struct dynamic {
    const Elf64_Sym *symbols;
    const char *strings;
    const Elf64_Rela *rela, *plt;
    uint64_t rela_size, plt_size, relative;
    bool symbolic, needs_hook;
};

static const struct link_map *map_of(void *handle)
{
    struct link_map *map = NULL;
    return dlinfo(handle, RTLD_DI_LINKMAP, &map) ? NULL : map;
}

/* The loader adds the load address to these in place, unless the dynamic section is read-only. */
static const void *pointer(const struct link_map *map, Elf64_Addr value)
{
    return (const void *)(value < map->l_addr ? value + map->l_addr : value);
}

static struct dynamic read_dynamic(const struct link_map *map)
{
    struct dynamic found = {0};
    for (const Elf64_Dyn *d = map->l_ld; d->d_tag != DT_NULL; d++)
        switch (d->d_tag) {
        case DT_SYMTAB: found.symbols = pointer(map, d->d_un.d_ptr); break;
        case DT_STRTAB: found.strings = pointer(map, d->d_un.d_ptr); break;
        case DT_RELA: found.rela = pointer(map, d->d_un.d_ptr); break;
        case DT_JMPREL: found.plt = pointer(map, d->d_un.d_ptr); break;
        case DT_RELASZ: found.rela_size = d->d_un.d_val; break;
        case DT_PLTRELSZ: found.plt_size = d->d_un.d_val; break;
        case DT_RELACOUNT: found.relative = d->d_un.d_val; break;
        case DT_SYMBOLIC: found.symbolic = true; break;
        case DT_FLAGS: found.symbolic |= (d->d_un.d_val & DF_SYMBOLIC) != 0; break;
        default: break;
        }
    for (const Elf64_Dyn *d = map->l_ld; found.strings && d->d_tag != DT_NULL; d++)
        if (d->d_tag == DT_NEEDED && !strcmp(found.strings + d->d_un.d_val, "libcgpu-hook.so.1"))
            found.needs_hook = true;
    return found;
}

bool selfbind_is_proxy(void *handle)
{
    const struct link_map *map = map_of(handle);
    return map && read_dynamic(map).needs_hook;
}

/* The pages of a library that the loader made read-only after relocation. */
struct relro {
    Elf64_Addr base;
    uintptr_t start, end;
};

static int find_relro(struct dl_phdr_info *info, size_t size, void *data)
{
    (void)size;
    struct relro *found = data;
    if (info->dlpi_addr != found->base)
        return 0;
    uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE) - 1;
    for (int i = 0; i < info->dlpi_phnum; i++)
        if (info->dlpi_phdr[i].p_type == PT_GNU_RELRO) {
            found->start = (info->dlpi_addr + info->dlpi_phdr[i].p_vaddr) & ~page;
            found->end = (info->dlpi_addr + info->dlpi_phdr[i].p_vaddr + info->dlpi_phdr[i].p_memsz) & ~page;
        }
    return 1;
}

/* One pass over relocations. With `write` false: whether a read-only word would have to change. */
static bool pass(const struct link_map *map, const struct dynamic *d, const Elf64_Rela *rela, uint64_t count,
                 const struct relro *relro, bool write)
{
    bool locked = false;
    for (uint64_t i = 0; i < count; i++) {
        uint32_t type = ELF64_R_TYPE(rela[i].r_info);
        if (type != R_X86_64_JUMP_SLOT && type != R_X86_64_GLOB_DAT && type != R_X86_64_64)
            continue;
        const Elf64_Sym *symbol = &d->symbols[ELF64_R_SYM(rela[i].r_info)];
        /* variables stay: the program may own them by a copy relocation */
        if (symbol->st_shndx == SHN_UNDEF || ELF64_ST_TYPE(symbol->st_info) != STT_FUNC)
            continue;
        Elf64_Addr *word = (Elf64_Addr *)(map->l_addr + rela[i].r_offset);
        Elf64_Addr own = map->l_addr + symbol->st_value + (type == R_X86_64_64 ? (Elf64_Addr)rela[i].r_addend : 0);
        if (*word == own)
            continue;
        if ((uintptr_t)word >= relro->start && (uintptr_t)word < relro->end)
            locked = true;
        if (write)
            *word = own;
    }
    return locked;
}

void selfbind(void *handle)
{
#if defined(__x86_64__)
    const struct link_map *map = map_of(handle);
    if (!map)
        return;
    struct dynamic d = read_dynamic(map);
    if (d.symbolic || !d.symbols)
        return;
    uint64_t rest = d.rela_size / sizeof *d.rela;
    const Elf64_Rela *rela = d.rela;
    if (rela && d.relative <= rest)
        rela += d.relative, rest -= d.relative; /* these come first, and name no symbol */
    uint64_t plt = d.plt ? d.plt_size / sizeof *d.plt : 0;
    if (!rela)
        rest = 0;
    struct relro relro = {.base = map->l_addr};
    dl_iterate_phdr(find_relro, &relro);
    bool locked = pass(map, &d, rela, rest, &relro, false) | pass(map, &d, d.plt, plt, &relro, false);
    if (locked && mprotect((void *)relro.start, relro.end - relro.start, PROT_READ | PROT_WRITE)) {
        hook_log("warning", "cannot make the references of %s to itself its own: %m", map->l_name);
        return;
    }
    pass(map, &d, rela, rest, &relro, true);
    pass(map, &d, d.plt, plt, &relro, true);
    if (locked)
        mprotect((void *)relro.start, relro.end - relro.start, PROT_READ);
#else
    (void)handle;
#endif
}
