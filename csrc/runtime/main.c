/* main.c: cgpu-runtime.
 *
 * Engines call it as their OCI runtime. It becomes the next one (nvidia-container-runtime, runc, crun) with the same
 * arguments, by exec; before that
 *   create, run   a container whose configuration speaks of us is registered with cgpud, and its config.json is replaced by
 *                 the one that cgpud answers with. One that asks for a share and cannot get it does not start.
 *   delete        cgpud is told, if it knows the container.
 * and all else goes straight on: a plain container costs one more exec and one read of its configuration, and asks nobody.
 *
 * `cgpu-runtime precreate` is a hook of podman's, instead of all that (precreate.c).
 *
 * `cgpu-runtime hook` is what the next runtime runs when the container's mounts are made and its program is not started
 * yet (OCI's createRuntime hook, after the prestart hooks in which NVIDIA's toolkit mounts the driver). */
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "runtime.h"

#define CREATE_MS 10000
#define DELETE_MS 1000

static void create(const struct conf *conf, const struct arguments *arguments)
{
    static struct answer answer;
    char payload[TEXT_MAX];
    int bundle = open(arguments->bundle, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    size_t length;
    if (bundle < 0)
        return; /* the next runtime says what is wrong with its own words */
    char *text = spec_read(bundle, &length);
    bool ours = text && spec_concerns_us(text);
    free(text);
    if (ours) {
        char *path = realpath(arguments->bundle, NULL);
        if (!arguments->id || !path)
            die("cgpu: no container id or no bundle");
        int size = snprintf(payload, sizeof payload, "%s%c%s", arguments->id, 0, path);
        if (size < 0 || (size_t)size >= sizeof payload)
            die("cgpu: the container's id and bundle are too long");
        if (!ask(conf, ASK_CREATE, payload, (size_t)size + 1, bundle, CREATE_MS, &answer))
            die("cgpu: %s asks for a share of a GPU, and cgpud cannot be asked: %s", arguments->id, answer.text);
        if (answer.status < 0)
            die("cgpu: %s", answer.text);
        if (answer.fd >= 0)
            spec_replace(bundle, answer.fd);
        free(path);
    }
    close(bundle);
}

static void forget(const struct conf *conf, const char *id)
{
    static struct answer answer;
    char mark[4096]; /* one empty file a registered container, in ct/ beside the socket */
    const char *slash = strrchr(conf->socket, '/');
    int folder = slash ? (int)(slash - conf->socket) + 1 : 0;
    if (!id || strchr(id, '/') || snprintf(mark, sizeof mark, "%.*sct/%s", folder, conf->socket, id) >= (int)sizeof mark ||
        access(mark, F_OK))
        return;
    if (!ask(conf, ASK_DELETE, id, strlen(id) + 1, -1, DELETE_MS, &answer))
        fprintf(stderr, "cgpu-runtime: not told to cgpud, which will see it by itself: %s\n", answer.text);
}

int main(int argc, char **argv)
{
    struct arguments arguments;
    static struct conf conf;
    arguments_read(&arguments, argc, argv);
    complain_to(arguments.log);
    conf_read(&conf);
    if (arguments.verb == VERB_HOOK)
        return hook_run(&conf);
    if (arguments.verb == VERB_PRECREATE)
        return precreate_run(&conf);
    if (arguments.verb == VERB_CREATE)
        create(&conf, &arguments);
    else if (arguments.verb == VERB_DELETE)
        forget(&conf, arguments.id);
    next_run(&conf, argv);
}
