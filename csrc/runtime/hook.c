/* hook.c: `cgpu-runtime hook`, run by the next runtime when the container's mounts are made and it waits for us.
 *
 * Standard input has the container's state (JSON), which the daemon reads: from now on it follows the container's first
 * process. It answers with lines, their fields separated by tabs:
 *
 *   root PATH                   the container's root, where it lies before pivot_root
 *   bind SOURCE TARGET ro|rw    mount the node's SOURCE, a file or a folder, at TARGET below that root
 *
 * We are in the node's mount namespace, and join the container's, which at this moment still has the node's tree around
 * the root. Paths below the root are the image's: they are resolved with openat2 inside it, and mounted on through
 * descriptors, so that no link leads out. What is missing is made, as runc makes mount points. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <linux/openat2.h>
#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/stat.h>
#include <sys/statvfs.h>
#include <sys/syscall.h>
#include <unistd.h>
#include "runtime.h"

#ifndef SYS_openat2
#define SYS_openat2 437
#endif

#define HOOK_MS 10000

static char *read_all(int fd, size_t *length)
{
    char *text = malloc(TEXT_MAX + 1);
    ssize_t got;
    *length = 0;
    while (text && *length < TEXT_MAX && (got = read(fd, text + *length, TEXT_MAX - *length)) != 0) {
        if (got < 0 && errno != EINTR)
            break;
        *length += got > 0 ? (size_t)got : 0;
    }
    return text;
}

/* The state is a flat object of a few keys, written by the runtime that waits for us: "pid" is looked for as such. */
static int pid_in(const char *state)
{
    const char *at = strstr(state, "\"pid\"");
    if (!at)
        return 0;
    at += strlen("\"pid\"");
    at += strspn(at, " \t\r\n:");
    return atoi(at);
}

static int open_in(int root, const char *path, uint64_t flags, uint64_t mode)
{
    struct open_how how = {.flags = flags | O_CLOEXEC, .mode = mode, .resolve = RESOLVE_IN_ROOT | RESOLVE_NO_MAGICLINKS};
    return (int)syscall(SYS_openat2, root, path, &how, sizeof how);
}

/* The folder `path`, made where it is missing. A descriptor, or -1. */
static int make_folders(int root, const char *path)
{
    char part[4096];
    int fd = open_in(root, path, O_PATH | O_DIRECTORY, 0);
    if (fd >= 0 || errno != ENOENT || snprintf(part, sizeof part, "%s", path) >= (int)sizeof part)
        return fd;
    char *slash = strrchr(part, '/');
    if (!slash || !slash[1])
        return -1;
    *slash = 0;
    int above = make_folders(root, *part ? part : "/");
    if (above < 0)
        return -1;
    int made = mkdirat(above, slash + 1, 0755);
    int error = errno;
    close(above);
    errno = error;
    return made < 0 && error != EEXIST ? -1 : open_in(root, path, O_PATH | O_DIRECTORY, 0);
}

static int make_file(int root, const char *path)
{
    char folder[4096];
    int fd = open_in(root, path, O_PATH, 0);
    if (fd >= 0 || errno != ENOENT || snprintf(folder, sizeof folder, "%s", path) >= (int)sizeof folder)
        return fd;
    char *slash = strrchr(folder, '/');
    if (!slash)
        return -1;
    *slash = 0;
    int above = make_folders(root, *folder ? folder : "/");
    if (above < 0)
        return -1;
    int made = openat(above, slash + 1, O_CREAT | O_EXCL | O_NOFOLLOW | O_WRONLY | O_CLOEXEC, 0644);
    int error = errno;
    close(above);
    errno = error;
    if (made < 0)
        return -1;
    close(made);
    return open_in(root, path, O_PATH, 0);
}

static void link_of(int fd, char text[32]) { snprintf(text, 32, "/proc/self/fd/%d", fd); }

/* The flags that a remount must repeat: in a user namespace's mounts it may take none away. */
static unsigned long flags_of(int fd)
{
    struct statvfs fs;
    if (fstatvfs(fd, &fs) < 0)
        return 0;
    return (fs.f_flag & ST_RDONLY ? MS_RDONLY : 0) | (fs.f_flag & ST_NOEXEC ? MS_NOEXEC : 0) |
           (fs.f_flag & ST_NOATIME ? MS_NOATIME : 0) | (fs.f_flag & ST_NODIRATIME ? MS_NODIRATIME : 0) |
           (fs.f_flag & ST_RELATIME ? MS_RELATIME : 0);
}

static void bind_one(int root, const char *source, const char *target, bool read_only)
{
    char link[32];
    struct stat st;
    if (stat(source, &st) < 0)
        die("cgpu: %s: %s", source, strerror(errno));
    bool folder = S_ISDIR(st.st_mode);
    int fd = folder ? make_folders(root, target) : make_file(root, target);
    if (fd < 0)
        die("cgpu: %s in the container: %s", target, strerror(errno));
    if (fstat(fd, &st) < 0 || S_ISDIR(st.st_mode) != folder) /* Docker takes "is a directory" for the program's */
        die("cgpu: %s in the container is no %s", target, folder ? "folder" : "file");
    link_of(fd, link);
    if (mount(source, link, NULL, MS_BIND, NULL) < 0)
        die("cgpu: %s on %s in the container: %s", source, target, strerror(errno));
    close(fd);
    fd = open_in(root, target, O_PATH, 0); /* what lies on top now: our mount */
    link_of(fd, link);
    unsigned long flags = MS_REMOUNT | MS_BIND | MS_NOSUID | MS_NODEV | (read_only ? MS_RDONLY : 0);
    if (fd < 0 || mount(NULL, link, NULL, flags | flags_of(fd), NULL) < 0)
        die("cgpu: %s in the container, its flags: %s", target, strerror(errno));
    close(fd);
}

static void join(int pid)
{
    char path[48];
    snprintf(path, sizeof path, "/proc/%d/ns/mnt", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0 || setns(fd, CLONE_NEWNS) < 0)
        die("cgpu: the mount namespace of process %d: %s", pid, strerror(errno));
    close(fd);
}

static void obey(char *lines, int pid)
{
    char *line, *rest = lines;
    int root = -1;
    while ((line = strsep(&rest, "\n"))) {
        char *verb = strsep(&line, "\t"), *first = strsep(&line, "\t");
        if (!verb || !*verb)
            continue;
        if (!strcmp(verb, "root") && first && root < 0) {
            join(pid);
            root = open(first, O_PATH | O_DIRECTORY | O_CLOEXEC);
            if (root < 0)
                die("cgpu: the container's root %s: %s", first, strerror(errno));
            continue;
        }
        char *target = strsep(&line, "\t"), *mode = strsep(&line, "\t");
        if (strcmp(verb, "bind") || !first || !target || !mode || root < 0)
            die("cgpu: cgpud answers what this version does not know: %s", verb);
        bind_one(root, first, target, strcmp(mode, "rw"));
    }
    if (root >= 0)
        close(root);
}

int hook_run(const struct conf *conf)
{
    static struct answer answer;
    size_t length;
    char *state = read_all(STDIN_FILENO, &length);
    if (!state || !length)
        die("cgpu: hook: no state on standard input");
    state[length] = 0;
    int pid = pid_in(state);
    if (!ask(conf, ASK_HOOK, state, length, -1, HOOK_MS, &answer))
        die("cgpu: cgpud cannot be asked: %s", answer.text);
    if (answer.status < 0)
        die("cgpu: %s", answer.text);
    if (answer.status > 0)
        obey(answer.text, pid);
    free(state);
    return 0;
}
