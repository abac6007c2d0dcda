/* stub.h: what the tests link the memory part of the hook with, in place of a driver, a daemon and the gate's client.
 *
 * stub_driver.c  a driver of a few lines: it hands out addresses, counts calls, and fails when told to
 * stub_pools.c   a driver with pools and graph memory
 * stub_gate.c    gate_join() and gate_of() over two files that stand for the pages; makes those files, too */
#ifndef STUB_H
#define STUB_H
#include "client.h"
#include "hook.h"
#include "pool.h"

/* Result of the next call of `name`; consumed by it. */
void stub_fail(const char *name, int result);
/* Calls of `name` so far. */
int stub_calls(const char *name);
/* The wrapper of `name`, NULL: there is none. */
void *stub_wrapper(const char *name);
/* Fills the hook's pointers to the driver. `without`: names separated by spaces that this driver lacks. */
void stub_bind(const char *without);
/* The driver is the library of this handle. */
void stub_bind_library(void *handle);
/* The driver's `name` becomes `function`. */
void stub_replace(const char *name, void *function);
/* Cards of the node and their UUIDs; memory that each has in all and free. */
void stub_cards(int count, const uint8_t (*uuids)[16], uint64_t total, uint64_t free);
/* The calling thread's current context: that of a device, its n-th; -1 none. */
void stub_current(int device, int n);
void *stub_context(int device, int n);
/* CUDA_VISIBLE_DEVICES as the last cuInit saw it; "(unset)". */
const char *stub_seen_visible(void);
void stub_capturing(int on);
void stub_stalls(int on);
/* The driver has pools that grow by `granule` on a card with `free` bytes, and graph memory (stub_pools.c). */
void stub_pools(uint64_t granule, uint64_t free);
void stub_processes(int count, const uint32_t *pids);

/* Makes a control page and report pages in two files. */
int stub_make_pages(const char *ctl, const char *report, uint64_t limit, uint64_t total, const uint8_t uuid[16]);
/* The pages of GPU `gpu` as the next gate_join() gives them. slot -1: none of our own. */
int stub_offer(int gpu, const char *ctl, const char *report, int slot);
/* Its number on the node; 0 unless said. */
void stub_index(int gpu, uint32_t index);
/* One more native GPU beside them. */
void stub_native(uint32_t index, const uint8_t uuid[16]);
/* The next joins answer so: gpus, or a negative errno. */
void stub_joins(int gpus_or_error);
int stub_join_count(void);
/* The next ones leave this GPU out. */
void stub_lose(int gpu);
/* When this slot's page is read next: a new daemon's control page comes, which knows none of the slots yet. */
void stub_replace_when_read(int gpu, const char *ctl, int slot);
/* Times that the daemon was told of a context. */
int stub_notes(void);
/* A new daemon: takes what was offered, calls the ledger. */
void stub_rejoin(void);
/* Daemon's side of a control page. */
struct cgpu_ctl *stub_ctl(const char *ctl);
#endif
