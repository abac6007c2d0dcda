/* arguments.c: an OCI runtime's command line, as far as it concerns us.
 *
 * Only what runc, crun and containerd's shim really pass is understood; the rest goes on untouched. An option we don't know
 * is taken for a flag, so that a value after it could be taken for the verb: runc's global options with a value are listed. */
#include <string.h>
#include "runtime.h"

static const char *const with_value[] = {"--root", "--log", "--log-format", "--criu", "--rootless", "--cgroup-manager", NULL};
static const char *const create_with_value[] = {"--bundle", "-b", "--console-socket", "--pid-file", "--preserve-fds", "--config",
                                                "-f", "--signal", NULL};

/* The value of option `name` at argv[*at], which moves on where that is an argument of its own; NULL: another option. */
static const char *value_of(const char *name, int argc, char **argv, int *at)
{
    size_t length = strlen(name);
    const char *word = argv[*at];
    if (strncmp(word, name, length))
        return NULL;
    if (word[length] == '=')
        return word + length + 1;
    if (word[length] || *at + 1 >= argc)
        return NULL;
    return argv[++*at];
}

static bool skip_value(const char *const *names, int argc, char **argv, int *at)
{
    for (; *names; names++)
        if (value_of(*names, argc, argv, at))
            return true;
    return false;
}

static enum verb verb_of(const char *word)
{
    if (!strcmp(word, "create") || !strcmp(word, "run"))
        return VERB_CREATE;
    if (!strcmp(word, "delete"))
        return VERB_DELETE;
    if (!strcmp(word, "precreate"))
        return VERB_PRECREATE;
    return strcmp(word, "hook") ? VERB_OTHER : VERB_HOOK;
}

void arguments_read(struct arguments *out, int argc, char **argv)
{
    const char *value;
    int at = 1;
    *out = (struct arguments){.bundle = "."};
    for (; at < argc && argv[at][0] == '-'; at++) {
        if ((value = value_of("--log", argc, argv, &at)))
            out->log = value;
        else
            skip_value(with_value, argc, argv, &at);
    }
    if (at >= argc)
        return;
    out->verb = verb_of(argv[at]);
    for (at++; at < argc; at++) {
        if (!strcmp(argv[at], "--")) {
            out->id = at + 1 < argc ? argv[argc - 1] : NULL;
            return;
        }
        if (argv[at][0] != '-')
            out->id = argv[at];
        else if ((value = value_of("--bundle", argc, argv, &at)) || (value = value_of("-b", argc, argv, &at)))
            out->bundle = value;
        else
            skip_value(create_with_value, argc, argv, &at);
    }
}
