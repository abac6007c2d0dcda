/* probe.c: for each library named: `proxy`, `driver` (a test's own), or why it cannot be loaded; by name and by path. */
#include <dlfcn.h>
#include <stdio.h>

int main(int argc, char **argv)
{
    for (int i = 1; i < argc; i++) {
        void *library = dlopen(argv[i], RTLD_NOW | RTLD_LOCAL);
        if (!library)
            printf("%s\n", dlerror());
        else if (dlsym(library, "fake_driver"))
            puts("driver");
        else
            puts(dlsym(library, "cuInit") || dlsym(library, "nvmlInit_v2") ? "proxy" : "another");
    }
    return 0;
}
