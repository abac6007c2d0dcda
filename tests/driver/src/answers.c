/* Asks cuGetProcAddress, old and new, for each line `name version flags` of argv[2] ("-": the empty name), and prints what it
 * says: `api name version flags result status library+offset`. argv[1]: the driver to ask. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

static void print(const char *api, const char *question, int result, int status, void *found)
{
    Dl_info owner;
    if (!found || !dladdr(found, &owner)) {
        printf("%s %s %d %d -\n", api, question, result, status);
        return;
    }
    const char *slash = strrchr(owner.dli_fname, '/');
    printf("%s %s %d %d %s+%lx\n", api, question, result, status, slash ? slash + 1 : owner.dli_fname,
           (unsigned long)((char *)found - (char *)owner.dli_fbase));
}

int main(int count, char **argv)
{
    void *cuda = dlopen(argv[1], RTLD_NOW);
    FILE *questions = fopen(argv[2], "r");
    if (!cuda || !questions)
        return puts(cuda ? argv[2] : dlerror()), 1;
    int (*init)(unsigned) = dlsym(cuda, "cuInit");
    init(0); /* as cudart does, whatever it answers */
    int (*v1)(const char *, void **, int, uint64_t) = dlsym(cuda, "cuGetProcAddress");
    int (*v2)(const char *, void **, int, uint64_t, int *) = dlsym(cuda, "cuGetProcAddress_v2");
    char line[512], name[256];
    while (fgets(line, sizeof line, questions)) {
        int version, flags, status = -1;
        line[strcspn(line, "\n")] = 0;
        if (sscanf(line, "%255s %d %d", name, &version, &flags) != 3)
            return 2;
        if (!strcmp(name, "-"))
            name[0] = 0;
        void *found = NULL;
        int result = v1(name, &found, version, (uint64_t)flags);
        print("v1", line, result, status, found);
        found = NULL;
        result = v2(name, &found, version, (uint64_t)flags, &status);
        print("v2", line, result, status, found);
        found = NULL;
        result = v2(name, &found, version, (uint64_t)flags, NULL);
        print("v2-without-status", line, result, -1, found);
    }
    return 0;
}
