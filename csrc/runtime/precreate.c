/* precreate.c: `cgpu-runtime precreate`, podman's hook of that name: a container's configuration comes on standard input
 * before any runtime is called, and the one to use instead is what we print. One that concerns us gets our createRuntime
 * hook, which registers it and mounts all that it needs; others go back as they came, and nobody is asked.
 *
 * podman shows no more of a hook that fails than its name and status. So a container that cannot be served gets the hook
 * all the same, which then says why in podman's own error; only without a daemon it is us who fail. */
#define _GNU_SOURCE
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "runtime.h"

#ifndef MFD_CLOEXEC
#define MFD_CLOEXEC 1u
#endif
#define PRECREATE_MS 10000

static bool concerns_us(int fd)
{
    struct stat st;
    if (fstat(fd, &st) < 0 || st.st_size > SPEC_MAX)
        die("cgpu: the configuration on standard input has more than %u bytes", SPEC_MAX);
    char *text = calloc(1, (size_t)st.st_size + 1);
    if (!text || pread(fd, text, (size_t)st.st_size, 0) != st.st_size)
        die("cgpu: the configuration cannot be read again");
    bool ours = spec_concerns_us(text);
    free(text);
    return ours;
}

int precreate_run(const struct conf *conf)
{
    static struct answer answer;
    int given = (int)syscall(SYS_memfd_create, "config.json", MFD_CLOEXEC);
    if (given < 0)
        die("cgpu: no room for the configuration: %s", strerror(errno));
    spec_copy(STDIN_FILENO, given);
    answer.fd = -1;
    if (concerns_us(given)) {
        if (!ask(conf, ASK_PRECREATE, "", 0, given, PRECREATE_MS, &answer))
            die("cgpu: a container asks for a share of a GPU, and cgpud cannot be asked: %s", answer.text);
        if (answer.status < 0)
            die("cgpu: %s", answer.text);
    }
    int wanted = answer.fd < 0 ? given : answer.fd;
    lseek(wanted, 0, SEEK_SET);
    spec_copy(wanted, STDOUT_FILENO);
    return 0;
}
