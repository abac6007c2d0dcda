/* complain.c: telling the engine what is wrong, where it looks for that. Docker and containerd show the last line of runc's
 * log file if it is JSON, and of stderr nothing but "exit status 1". */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>
#include "runtime.h"

static const char *log_path;

void complain_to(const char *log)
{
    log_path = log;
}

static void quote(FILE *file, const char *text)
{
    fputc('"', file);
    for (; *text; text++) {
        unsigned char c = (unsigned char)*text;
        if (c == '"' || c == '\\')
            fprintf(file, "\\%c", c);
        else if (c < 0x20)
            fprintf(file, "\\u%04x", c);
        else
            fputc(c, file);
    }
    fputc('"', file);
}

static void log_line(const char *text)
{
    int fd = open(log_path, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    FILE *file = fd < 0 ? NULL : fdopen(fd, "a");
    if (!file)
        return;
    time_t now = time(NULL);
    struct tm utc;
    char stamp[sizeof "2000-01-01T00:00:00Z"];
    strftime(stamp, sizeof stamp, "%Y-%m-%dT%H:%M:%SZ", gmtime_r(&now, &utc));
    fputs("{\"level\":\"error\",\"msg\":", file);
    quote(file, text);
    fprintf(file, ",\"time\":\"%s\"}\n", stamp);
    fclose(file);
}

void die(const char *format, ...)
{
    char text[8192];
    va_list values;
    va_start(values, format);
    vsnprintf(text, sizeof text, format, values);
    va_end(values);
    fprintf(stderr, "%s\n", text);
    if (log_path)
        log_line(text);
    exit(1);
}
