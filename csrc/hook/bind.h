/* bind.h: what init.c, selfbind.c, unknown.c and procaddr.c offer each other. Everything here is written while a proxy's
 * constructor runs (under the loader's lock) and only read afterwards, but for what unknown.c counts. */
#ifndef CGPU_BIND_H
#define CGPU_BIND_H
#include "hook.h"

/* ---- init.c ---- */

enum bind_found {
    BIND_EXPORT,    /* one of the driver's exports, or already one of our wrappers */
    BIND_ADOPTED,   /* no export, but we have a wrapper for it: it forwards there now, unless it had a real function already */
    BIND_UNEXPORTED /* no export, no wrapper */
};
/* What to hand to the program for `real`, a function that cuGetProcAddress gave: `*wrapper`, which is `real` itself where
 * nothing of ours stands for it. export_name: what the table says it is, or NULL. */
enum bind_found bind_wrapper(const char *export_name, void *real, void **wrapper);

/* ---- selfbind.c ---- */

/* Makes the references of a freshly opened library to its own functions its own again, where the loader resolved them to a
 * proxy that came first (libnvidia-ml calls about 30 of its own exports through its PLT). handle: of dlopen(). */
void selfbind(void *handle);
/* Whether the library needs libcgpu-hook.so.1, i.e. is a proxy. */
bool selfbind_is_proxy(void *handle);

/* ---- unknown.c ---- */

/* Whether csrc/tables has heard of the name. */
bool unknown_is_known(enum hook_lib lib, const char *name);
/* Marks in `known`, for each of the `count` names in strcmp order, whether it is known; for the whole of a proxy at once. */
void unknown_mark(enum hook_lib lib, const char *const *names, uint64_t count, bool *known);
/* What the slot of an unknown function should hold: a way in that notes the first call and is out of the way after it, or
 * `real` itself where there is none left. */
void *unknown_entry(const char *name, void *real, void **slot);
/* Counts a name and logs it, once a process. version 0: none. */
void unknown_note(const char *name, int version);
#endif
