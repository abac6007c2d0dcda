/* hammer.c: threads that open, read and close one file without end: `hammer FILE THREADS`. For each line of its input it says
 * how often they have done so; it ends with its input. */
#include <fcntl.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <unistd.h>

static const char *path;
static unsigned long count;

static void *read_on(void *unused)
{
    char text[4096];
    for (;;) {
        int fd = open(path, O_RDONLY | O_CLOEXEC);
        if (fd < 0)
            continue;
        if (read(fd, text, sizeof text) > 0)
            __atomic_add_fetch(&count, 1, __ATOMIC_RELAXED);
        close(fd);
    }
    return unused;
}

int main(int argc, char **argv)
{
    char line[16];
    if (argc != 3)
        return 2;
    path = argv[1];
    for (int i = atoi(argv[2]); i > 0; i--) {
        pthread_t thread;
        if (pthread_create(&thread, NULL, read_on, NULL))
            return 1;
    }
    while (fgets(line, sizeof line, stdin)) {
        printf("%lu\n", __atomic_load_n(&count, __ATOMIC_RELAXED));
        fflush(stdout);
    }
    return 0;
}
