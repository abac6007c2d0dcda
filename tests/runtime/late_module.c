/* late_module.c: what libc loads by itself (as NSS does) and brings libdl into a program that started without it. */
#include <dlfcn.h>

int go(void) { return !dlopen("libm.so.6", RTLD_NOW); }
