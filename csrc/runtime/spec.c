/* spec.c: the bundle's config.json: reading it whole, and replacing it by what the daemon made of it. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "runtime.h"

#define SPEC "config.json"

char *spec_read(int bundle, size_t *length)
{
    struct stat st;
    int fd = openat(bundle, SPEC, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) < 0 || !S_ISREG(st.st_mode) || st.st_size > SPEC_MAX)
        die("cgpu: %s in the bundle is no file of at most %u bytes", SPEC, SPEC_MAX);
    char *text = malloc((size_t)st.st_size + 1);
    if (!text)
        die("cgpu: out of memory");
    *length = 0;
    while (*length < (size_t)st.st_size) {
        ssize_t got = read(fd, text + *length, (size_t)st.st_size - *length);
        if (got < 0 && errno == EINTR)
            continue;
        if (got <= 0)
            break;
        *length += (size_t)got;
    }
    text[*length] = 0;
    close(fd);
    return text;
}

/* A variable's name stands at the beginning of a string. Escapes (\u0041) are no worry: engines write ASCII as it is. */
bool spec_concerns_us(const char *text)
{
    return strstr(text, "\"ALIYUN_COM_GPU_") || strstr(text, "\"CGPU_");
}

void spec_copy(int from, int to)
{
    char piece[65536];
    for (;;) {
        ssize_t got = read(from, piece, sizeof piece);
        if (got < 0 && errno == EINTR)
            continue;
        if (got < 0)
            die("cgpu: the new %s cannot be read: %s", SPEC, strerror(errno));
        if (got == 0)
            return;
        for (ssize_t done = 0; done < got;) {
            ssize_t put = write(to, piece + done, (size_t)(got - done));
            if (put < 0 && errno != EINTR)
                die("cgpu: the new %s cannot be written: %s", SPEC, strerror(errno));
            done += put > 0 ? put : 0;
        }
    }
}

void spec_replace(int bundle, int fd)
{
    struct stat old;
    char name[64];
    snprintf(name, sizeof name, "." SPEC ".cgpu-%d", (int)getpid());
    int made = openat(bundle, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    if (made < 0)
        die("cgpu: %s cannot be made in the bundle: %s", name, strerror(errno));
    lseek(fd, 0, SEEK_SET);
    spec_copy(fd, made);
    if (fstatat(bundle, SPEC, &old, 0) < 0 || fchown(made, old.st_uid, old.st_gid) < 0 || fchmod(made, old.st_mode & 07777) < 0 ||
        renameat(bundle, name, bundle, SPEC) < 0) {
        int error = errno;
        unlinkat(bundle, name, 0);
        die("cgpu: %s in the bundle cannot be replaced: %s", SPEC, strerror(error));
    }
    close(made);
    close(fd);
}
