/* image.c: which functions and variables a module image has: PTX text is scanned for .entry and .global, an ELF cubin's
 * symbol table is read; in anything else (a fat binary, an unknown format) every name is taken for a function. */
#include <elf.h>
#include <stdlib.h>
#include <string.h>
#include "cuda/sim.h"

#define PTX_LIMIT (64u << 20) /* text without an end is not text */

static bool space(char c)
{
    return c == ' ' || c == '\t' || c == '\n' || c == '\r';
}

static bool word_char(char c)
{
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '_' || c == '$' ||
        c == '.';
}

/* ---- PTX ---- */

struct token { const char *at; size_t length; };

/* Words and single characters; comments and strings are skipped. */
static struct token next_token(const char **text)
{
    const char *at = *text;
    for (;;) {
        while (space(*at))
            at++;
        if (at[0] == '/' && at[1] == '/') {
            while (*at && *at != '\n')
                at++;
        } else if (at[0] == '/' && at[1] == '*') {
            for (at += 2; *at && !(at[0] == '*' && at[1] == '/'); at++)
                ;
            at += *at ? 2 : 0;
        } else if (*at == '"') {
            for (at++; *at && *at != '"'; at++)
                ;
            at += *at ? 1 : 0;
        } else {
            break;
        }
    }
    struct token token = {at, 0};
    while (word_char(*at))
        at++;
    if (at == token.at && *at)
        at++;
    token.length = (size_t)(at - token.at);
    *text = at;
    return token;
}

static bool is(struct token token, const char *text)
{
    return token.length == strlen(text) && memcmp(token.at, text, token.length) == 0;
}

static char *copy_of(struct token token)
{
    return strndup(token.at, token.length);
}

static uint64_t number(struct token token)
{
    uint64_t value = 0;
    for (size_t i = 0; i < token.length && token.at[i] >= '0' && token.at[i] <= '9'; i++)
        value = value * 10 + (uint64_t)(token.at[i] - '0');
    return value;
}

static uint64_t type_bytes(struct token token)
{
    for (size_t i = 1; i < token.length; i++)
        if (token.at[i] >= '1' && token.at[i] <= '9')
            return token.at[i] == '8' ? 1 : number((struct token){token.at + i, token.length - i}) / 8;
    return 0;
}

/* .global [.align N] .b8 name[SIZE] [= ...]; */
static bool parse_variable(const char **text, struct CUmod_st *module)
{
    uint64_t element = 0, count = 1;
    for (;;) {
        struct token token = next_token(text);
        if (!token.length || is(token, ";"))
            return true;
        if (is(token, ".align")) {
            next_token(text);
        } else if (token.at[0] == '.') {
            uint64_t bytes = type_bytes(token);
            element = bytes ? bytes : element;
        } else {
            char *name = copy_of(token);
            const char *after = *text;
            if (is(next_token(&after), "[")) {
                uint64_t n = number(next_token(&after));
                count = n ? n : 1;
            }
            bool ok = name && (!element || module_global(module, name, element * count));
            free(name);
            return ok;
        }
    }
}

static bool parse_ptx(const char *text, struct CUmod_st *module)
{
    int depth = 0;
    for (struct token token = next_token(&text); token.length; token = next_token(&text)) {
        if (is(token, "{")) {
            depth++;
        } else if (is(token, "}")) {
            depth--;
        } else if (is(token, ".entry")) {
            char *name = copy_of(next_token(&text));
            bool ok = name && module_function(module, name, true);
            free(name);
            if (!ok)
                return false;
        } else if (depth == 0 && (is(token, ".global") || is(token, ".const"))) {
            if (!parse_variable(&text, module))
                return false;
        }
    }
    return true;
}

static bool looks_like_ptx(const char *text)
{
    for (size_t i = 0; i < 64; i++) /* not further than anything shorter could be read */
        if (text[i] == 0 || ((unsigned char)text[i] < 32 && !space(text[i])) || (unsigned char)text[i] > 126)
            return i >= 8 && text[i] == 0 && strstr(text, ".version");
    return memchr(text, 0, PTX_LIMIT) && strstr(text, ".version");
}

/* ---- cubin ---- */

static bool parse_elf(const uint8_t *image, struct CUmod_st *module)
{
    Elf64_Ehdr header;
    memcpy(&header, image, sizeof header);
    if (header.e_ident[EI_CLASS] != ELFCLASS64 || !header.e_shoff || header.e_shentsize != sizeof(Elf64_Shdr)) {
        module->open = true;
        return true;
    }
    for (unsigned i = 0; i < header.e_shnum; i++) {
        Elf64_Shdr table, names;
        memcpy(&table, image + header.e_shoff + i * sizeof table, sizeof table);
        if (table.sh_type != SHT_SYMTAB || table.sh_link >= header.e_shnum)
            continue;
        memcpy(&names, image + header.e_shoff + table.sh_link * sizeof names, sizeof names);
        for (uint64_t at = 0; at + sizeof(Elf64_Sym) <= table.sh_size; at += sizeof(Elf64_Sym)) {
            Elf64_Sym symbol;
            memcpy(&symbol, image + table.sh_offset + at, sizeof symbol);
            if (symbol.st_name >= names.sh_size || ELF64_ST_BIND(symbol.st_info) == STB_LOCAL || !symbol.st_shndx)
                continue;
            const char *name = (const char *)image + names.sh_offset + symbol.st_name;
            bool ok = true;
            if (ELF64_ST_TYPE(symbol.st_info) == STT_FUNC)
                ok = module_function(module, name, true) != NULL;
            else if (ELF64_ST_TYPE(symbol.st_info) == STT_OBJECT && symbol.st_size)
                ok = module_global(module, name, symbol.st_size);
            if (!ok)
                return false;
        }
    }
    return true;
}

/* false: no memory. */
bool image_parse(const void *image, struct CUmod_st *module)
{
    const uint8_t *bytes = image;
    if (memcmp(bytes, ELFMAG, SELFMAG) == 0)
        return parse_elf(bytes, module);
    if (looks_like_ptx(image))
        return parse_ptx(image, module);
    module->open = true;
    return true;
}
