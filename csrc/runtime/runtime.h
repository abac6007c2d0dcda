/* runtime.h: cgpu-runtime, the OCI runtime in front of the engine's own. main.c says what it does. */
#ifndef CGPU_RUNTIME_H
#define CGPU_RUNTIME_H
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define TEXT_MAX  65536u       /* of one message's payload */
#define SPEC_MAX  (16u << 20)  /* of a config.json */
#define NEXT_MAX  16

/* ---- conf.c: what the daemon wrote beside this program ---- */
struct conf {
    char socket[108];
    char *next[NEXT_MAX];      /* names or paths, first choice first */
    int next_count;
};
void conf_read(struct conf *conf);

/* ---- complain.c ---- */
/* Where the engine looks for the reason: runc's --log FILE. NULL = nowhere but stderr. */
void complain_to(const char *log);
/* One line to stderr and to that file; exits with 1. */
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- arguments.c ---- */
enum verb { VERB_OTHER, VERB_CREATE, VERB_DELETE, VERB_HOOK, VERB_PRECREATE };
struct arguments {
    enum verb verb;
    const char *bundle;        /* of create and run; "." unless said */
    const char *id;            /* NULL: none */
    const char *log;
};
void arguments_read(struct arguments *out, int argc, char **argv);

/* ---- next.c ---- */
/* Becomes the first runtime of `conf` that there is and that is not this program. Returns never. */
_Noreturn void next_run(const struct conf *conf, char **argv);

/* ---- spec.c: the bundle's config.json ---- */
/* The text (malloc'ed, NUL-terminated) and its length; dies where it cannot be read. */
char *spec_read(int bundle, size_t *length);
/* Something in it is for us, or may be. */
bool spec_concerns_us(const char *text);
/* Puts what `fd` holds in its place, with the owner and mode of the old one. */
void spec_replace(int bundle, int fd);
/* All that is to be read from `from`; dies where that fails. */
void spec_copy(int from, int to);

/* ---- ask.c: one question to the daemon ---- */
enum ask { ASK_CREATE = 1, ASK_HOOK = 2, ASK_DELETE = 3, ASK_PRECREATE = 4 };
struct answer {
    int status;                /* 0 nothing of ours; 1 done; < 0 -errno, and text says why */
    int fd;                    /* the new config.json, or -1 */
    char text[TEXT_MAX + 1];
};
/* false: the daemon cannot be asked, and `text` says why. */
bool ask(const struct conf *conf, enum ask what, const char *payload, size_t length, int fd, int timeout_ms, struct answer *answer);

/* ---- hook.c ---- */
/* The createRuntime hook: tells the daemon which process the container's first one is, and mounts what it answers. */
int hook_run(const struct conf *conf);

/* ---- precreate.c ---- */
/* podman's precreate hook: the configuration on standard input, as it should be, to standard output. */
int precreate_run(const struct conf *conf);
#endif
