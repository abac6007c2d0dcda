/* next.c: becoming the next runtime.
 *
 * NVIDIA's runtime looks for runc on its own and may be configured to find us; so may a list of ours name us by another
 * path. What is this very file is passed over, and a counter in the environment ends a longer loop. */
#define _GNU_SOURCE
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>
#include "runtime.h"

#define DEPTH      "CGPU_RUNTIME_DEPTH"
#define DEPTH_MAX  4
#define SEARCH     "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin" /* where the engine has no PATH */

static bool is_other_program(const char *path)
{
    struct stat self, other;
    return stat(path, &other) == 0 && S_ISREG(other.st_mode) && access(path, X_OK) == 0 &&
           !(stat("/proc/self/exe", &self) == 0 && self.st_dev == other.st_dev && self.st_ino == other.st_ino);
}

static bool find(const char *name, char path[PATH_MAX])
{
    if (strchr(name, '/'))
        return snprintf(path, PATH_MAX, "%s", name) < PATH_MAX && is_other_program(path);
    const char *folders = getenv("PATH");
    for (const char *folder = folders && *folders ? folders : SEARCH; folder; folder = strchr(folder, ':')) {
        folder += *folder == ':';
        int length = (int)strcspn(folder, ":");
        if (length && snprintf(path, PATH_MAX, "%.*s/%s", length, folder, name) < PATH_MAX && is_other_program(path))
            return true;
    }
    return false;
}

static void count_depth(void)
{
    const char *before = getenv(DEPTH);
    int depth = before ? atoi(before) : 0;
    char now[16];
    if (depth < 0 || depth >= DEPTH_MAX)
        die("cgpu: a loop of runtimes: cgpu-runtime was started %d times for one container; look at `runtimes` in its "
            "configuration and in that of nvidia-container-runtime", depth);
    snprintf(now, sizeof now, "%d", depth + 1);
    setenv(DEPTH, now, 1);
}

void next_run(const struct conf *conf, char **argv)
{
    char path[PATH_MAX], tried[1024] = "";
    count_depth();
    for (int k = 0; k < conf->next_count; k++) {
        if (find(conf->next[k], path)) {
            argv[0] = path;
            execv(path, argv);
            die("cgpu: %s does not start: %s", path, strerror(errno));
        }
        size_t length = strlen(tried);
        snprintf(tried + length, sizeof tried - length, "%s%s", k ? ", " : "", conf->next[k]);
    }
    die("cgpu: no runtime to go on with: none of %s is there", tried);
}
