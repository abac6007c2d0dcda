/* instance.h: the instance this process belongs to, for visible.c, info.c and nvml*.c (hook.h has what all files may use). */
#ifndef CGPU_INSTANCE_H
#define CGPU_INSTANCE_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

/* A thread-local word that an allocation reads: in the block that every thread has from its start, so that no call is needed to
 * find it and none of it is ever allocated late. There is little room: words, not buffers. */
#ifndef CGPU_TLS
#define CGPU_TLS __thread __attribute__((tls_model("initial-exec")))
#endif

#define UUID_TEXT 41 /* "GPU-" 8-4-4-4-12 NUL */

void uuid_format(const uint8_t uuid[16], char text[UUID_TEXT]);
/* Exactly "GPU-" and 32 hexadecimal digits in their groups, either case, then NUL. */
bool uuid_parse(const char *text, uint8_t uuid[16]);

/* The GPUs that the program sees, in its order: the instance's, and in a container in mixed mode the native ones among them.
 * Those are no hook_gpu_of_...(): nothing of them is counted, gated or narrowed. */
int seen_gpus(void); /* 0 without an instance */
const uint8_t *seen_uuid(int place);
int seen_place(const uint8_t uuid[16]); /* -1: it does not see that one */

/* What CUDA_VISIBLE_DEVICES must be for the real cuInit, given the program's own (NULL: unset). Indices and UUID prefixes in
 * `own` mean the GPUs that it sees; as in CUDA, the list ends at the first entry that names none, and one that names a GPU
 * twice is empty. `out` needs UUID_TEXT * CGPU_MAX_GPUS bytes. Gives the number of GPUs. */
int visible_translate(const char *own, char *out);

/* In the child of a fork(). */
void visible_after_fork(void);
void context_after_fork(void);
void vmm_after_fork(void);
#endif
