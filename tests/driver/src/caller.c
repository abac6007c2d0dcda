/* A program that calls every function of the foreign driver, in one of several ways, and says how it went. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include "cuda_api.h"
#include "foreign.h"

struct call {
    const char *name;
    int (*call)(void *);
    void *linked;
};
#include "calls.inc"
#define CALLS (int)(sizeof calls / sizeof *calls)

int cuGetProcAddress_v2(const char *, void **, int, uint64_t, int *);
int cuGetProcAddress(const char *, void **, int, uint64_t);
int cuGetExportTable(const void **, const void *);

static void *hook(const char *name) { return dlsym(dlopen("libcgpu-hook.so.1", RTLD_NOW | RTLD_NOLOAD), name); }
static unsigned long counted(void) { return ((unsigned long (*)(void))hook("test_unknown_in_slot"))(); }

static void *by_getprocaddress(const char *name)
{
    for (int i = 0; i < CUDA_API_ROWS; i++)
        if (!strcmp(cuda_api_rows[i].export_name, name)) {
            void *found = NULL;
            int status = -1;
            cuGetProcAddress_v2(cuda_api_rows[i].name, &found, cuda_api_rows[i].version, cuda_api_rows[i].flags, &status);
            if (!found || status)
                printf("%s: not found (%d)\n", name, status);
            return found;
        }
    if (strncmp(name, "cuForeign", 9))
        return NULL; /* in no header: it cannot be asked for */
    void *found = NULL;
    cuGetProcAddress(name, &found, 12040, 0);
    return found;
}

/* How many functions answered rightly, twice each; the names of the others. */
static int all(const char *how, int say)
{
    void *library = dlopen("libcuda.so.1", RTLD_NOW);
    int good = 0, asked = 0;
    char bad[65536] = "";
    for (int i = 0; i < CALLS; i++) {
        void *function = !strcmp(how, "linked") ? calls[i].linked : !strcmp(how, "dlsym") ? dlsym(library, calls[i].name)
                                                                                         : by_getprocaddress(calls[i].name);
        if (!function && strcmp(how, "dlsym"))
            continue;
        asked++;
        if (function && calls[i].call(function) == i + 5000 && calls[i].call(function) == i + 5000)
            good++;
        else if (strlen(bad) < 60000)
            strcat(strcat(bad, " "), calls[i].name);
    }
    if (say)
        printf("%d good twice, bad:%s\n", good, bad);
    return asked;
}

static const char *whose(void *function)
{
    Dl_info info;
    if (!function)
        return "null";
    if (!dladdr(function, &info))
        return "nobody's";
    if (strstr(info.dli_fname, "libcgpu-hook"))
        return "wrapper";
    return strstr(info.dli_fname, "999.9") ? info.dli_sname ? "driver" : "other" : info.dli_fname;
}

static void *ask(const char *name, int version, int flags, const char *end)
{
    void *function = (void *)1;
    int status = -1, result = cuGetProcAddress_v2(name, &function, version, flags, &status);
    printf("%s@%d%s %d %d %s%s", name, version, flags ? "+ptsz" : "", result, status, whose(function), end);
    return function;
}

static void answers(void)
{
    void *v1 = ask("cuMemAlloc", 2000, 0, "\n"), *v2 = ask("cuMemAlloc", 3020, 0, "\n");
    printf("variants %s\n", ask("cuMemAlloc", 12040, 0, "\n") == v2 && v1 != v2 ? "differ" : "are the same");
    ask("cuMemAlloc", 1000, 0, "\n"), ask("cuMemAlloc_v2", 12040, 0, "\n"), ask("cuNoSuchName", 12040, 0, "\n");
    ask("", 0, 0, "\n");
    void *plain = ask("cuStreamQuery", 12040, 0, "\n");
    printf("threads %s\n", ask("cuStreamQuery", 12040, 2, "\n") != plain ? "differ" : "are the same");
    ask("cuInit", 12040, 0, "\n"), ask("cuInit", 12040, 2, "\n");
    int (*itself)(const char *, void **, int, uint64_t, int *) = ask("cuGetProcAddress", 12000, 0, "\n");
    void *function = NULL;
    int status = -1, result = itself("cuMemAlloc", &function, 12040, 0, &status);
    printf("through itself: cuMemAlloc@12040 %d %d %s\n", result, status, whose(function));
    result = cuGetProcAddress("cuMemAlloc", &function, 12040, 0);
    printf("old: cuMemAlloc@12040 %d %s\n", result, whose(function));
    result = cuGetProcAddress("cuNoSuchName", &function, 12040, 0);
    printf("old: cuNoSuchName@12040 %d %s\n", result, whose(function));
    printf("%d\n", ((int (*)(long, long))ask("cuGreenCtxGetId", 12090, 0, " "))(3, 4));
    printf("%d\n", ((int (*)(long))ask("cuMemAlloc", 13020, 0, " "))(5));
    printf("%d\n", ((int (*)(long))ask("cuNobodyKnowsMe", 1, 0, " "))(6));
    printf("null arguments %d %d\n", cuGetProcAddress_v2(NULL, &function, 12040, 0, NULL),
           cuGetProcAddress_v2("cuInit", NULL, 12040, 0, NULL));
    const char id[16] = "\x5a\0\1\2\3\4\5\6\7\x8\x9\xa\xb\xc\xd\xe";
    const void *table = NULL;
    result = cuGetExportTable(&table, id);
    printf("private table %d\n", table ? result : -1);
}

/* For every question of the table: the export that should answer, and where in the hook the answer lies, or "-". */
static void owners(void)
{
    for (int i = 0; i < CUDA_API_ROWS; i++) {
        void *found = NULL;
        Dl_info info;
        cuGetProcAddress_v2(cuda_api_rows[i].name, &found, cuda_api_rows[i].version, cuda_api_rows[i].flags, NULL);
        if (found && strcmp(whose(found), "wrapper"))
            printf("%s -\n", cuda_api_rows[i].export_name);
        else if (found && dladdr(found, &info))
            printf("%s %lx\n", cuda_api_rows[i].export_name, (long)((char *)found - (char *)info.dli_fbase));
    }
}

static pthread_barrier_t barrier;
static void *one(void *unknown)
{
    pthread_barrier_wait(&barrier);
    const struct call *call = unknown;
    return (void *)(long)(call->call(call->linked) == call - calls + 5000);
}

static void threads(void)
{
    pthread_t thread[16];
    long good = 1;
    pthread_barrier_init(&barrier, NULL, 16);
    for (int i = 0; i < 16; i++)
        pthread_create(&thread[i], NULL, one, (void *)&calls[CALLS - 1]);
    for (int i = 0; i < 16; i++) {
        void *result;
        pthread_join(thread[i], &result);
        good &= (long)result;
    }
    printf("%s %lu\n", good ? "good" : "bad", counted());
}

int main(int count, char **arguments)
{
    const char *how = arguments[1];
    mmap((void *)ZEROES, 0x20000, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_FIXED, -1, 0);
    if (!strcmp(how, "count")) {
        unsigned long before = counted();
        all("dlsym", 0);
        unsigned long after = counted();
        all("getprocaddress", 0), all("linked", 0);
        printf("%lu %lu %lu\n", before, after, counted());
    } else if (!strcmp(how, "late")) {
        all("linked", 0);
        unsigned long before = counted();
        setenv("TEST_JOINED", "1", 1);
        ((void (*)(void))hook("test_publish"))();
        printf("%lu %lu\n", before, counted());
    } else if (!strcmp(how, "count-getprocaddress")) {
        printf("%d\n", all("getprocaddress", 0));
    } else if (!strcmp(how, "answers")) {
        answers();
    } else if (!strcmp(how, "owners")) {
        owners();
    } else if (!strcmp(how, "threads")) {
        threads();
    } else if (!strcmp(how, "closed")) {
        void *library = dlopen("libcuda.so.1", RTLD_NOW);
        for (int i = 0; i < 10; i++)
            dlclose(library);
        puts(calls[0].call(calls[0].linked) == 5000 ? "good" : "bad");
    } else {
        all(how, 1);
    }
    return 0;
}
