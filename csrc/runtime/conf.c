/* conf.c: cgpu-runtime.conf beside this program, which cgpud writes: lines `KEY VALUE`. Without it the defaults hold. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "runtime.h"

static const char *const usual[] = {"nvidia-container-runtime", "runc", "crun"};

static void take(struct conf *conf, char *line)
{
    char *value = strchr(line, ' ');
    if (!value)
        return;
    *value++ = 0;
    if (!strcmp(line, "socket") && strlen(value) < sizeof conf->socket)
        strcpy(conf->socket, value);
    else if (!strcmp(line, "runtime") && conf->next_count < NEXT_MAX && *value)
        conf->next[conf->next_count++] = strdup(value);
}

void conf_read(struct conf *conf)
{
    char path[4096];
    strcpy(conf->socket, "/run/cgpud/runtime.sock");
    ssize_t length = readlink("/proc/self/exe", path, sizeof path - sizeof ".conf");
    FILE *file = NULL;
    if (length > 0) {
        strcpy(path + length, ".conf");
        file = fopen(path, "re");
    }
    char *line = NULL;
    size_t room = 0;
    while (file && (length = getline(&line, &room, file)) > 0) {
        if (line[length - 1] == '\n')
            line[length - 1] = 0;
        take(conf, line);
    }
    free(line);
    if (file)
        fclose(file);
    if (conf->next_count)
        return;
    for (size_t k = 0; k < sizeof usual / sizeof *usual; k++)
        conf->next[conf->next_count++] = strdup(usual[k]);
}
