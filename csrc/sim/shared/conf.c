/* conf.c: which GPUs are simulated. No sscanf or strtoul: newer C libraries bind those to versions that old images
 * lack. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>
#include "shared/state.h"

#define DEFAULT_DIR  "/run/cgpud/sim"
#define INSIDE_DIR   "/usr/local/cgpu/sim" /* where a container has it */
#define DEFAULT_UUID "GPU-5c6b0000-5117-4000-8000-000000000000"
#define DEFAULT_NAME "Simulated GPU"

const char *sim_dir(void)
{
    const char *dir = getenv("CGPU_SIM_DIR");
    if (dir && *dir)
        return dir;
    return access(INSIDE_DIR, F_OK) == 0 ? INSIDE_DIR : DEFAULT_DIR;
}

static bool digits(const char **text, uint64_t *value)
{
    const char *at = *text;
    uint64_t sum = 0;
    for (; *at >= '0' && *at <= '9'; at++) {
        if (sum > (UINT64_MAX - 9) / 10)
            return false;
        sum = sum * 10 + (uint64_t)(*at - '0');
    }
    if (at == *text)
        return false;
    *text = at;
    *value = sum;
    return true;
}

uint64_t sim_env_u64(const char *name, uint64_t otherwise)
{
    const char *text = getenv(name);
    uint64_t value;
    return text && digits(&text, &value) && !*text ? value : otherwise;
}

static int hex(char c)
{
    if (c >= '0' && c <= '9')
        return c - '0';
    if (c >= 'a' && c <= 'f')
        return c - 'a' + 10;
    if (c >= 'A' && c <= 'F')
        return c - 'A' + 10;
    return -1;
}

bool sim_parse_uuid(const char *text, size_t length, uint8_t uuid[16])
{
    size_t nibbles = 0;
    if (length >= 4 && memcmp(text, "GPU-", 4) == 0) {
        text += 4;
        length -= 4;
    }
    for (size_t i = 0; i < length; i++) {
        if (text[i] == '-')
            continue;
        int digit = hex(text[i]);
        if (digit < 0 || nibbles == 32)
            return false;
        if (nibbles & 1)
            uuid[nibbles / 2] = (uint8_t)(uuid[nibbles / 2] | digit);
        else
            uuid[nibbles / 2] = (uint8_t)(digit << 4);
        nibbles++;
    }
    return nibbles == 32;
}

static void uuid_text(const uint8_t uuid[16], char text[41])
{
    static const char digit[] = "0123456789abcdef";
    char *at = text;
    memcpy(at, "GPU-", 4);
    at += 4;
    for (int i = 0; i < 16; i++) {
        if (i == 4 || i == 6 || i == 8 || i == 10)
            *at++ = '-';
        *at++ = digit[uuid[i] >> 4];
        *at++ = digit[uuid[i] & 15];
    }
    *at = 0;
}

/* `NAME=NUMBER ` before the GPU's name; leaves *at where it was when there is none. */
static bool option(const char **at, const char *end, const char *name, uint64_t *value)
{
    size_t length = strlen(name);
    const char *number = *at + length;
    if ((size_t)(end - *at) <= length || memcmp(*at, name, length) != 0)
        return true;
    if (!digits(&number, value) || number > end || (number < end && *number != ' '))
        return false;
    while (number < end && *number == ' ')
        number++;
    *at = number;
    return true;
}

static bool parse_line(const char *line, const char *end, struct sim_gpu *gpu)
{
    const char *at = line;
    while (at < end && *at != ' ')
        at++;
    if (!sim_parse_uuid(line, (size_t)(at - line), gpu->uuid) || at++ >= end)
        return false;
    if (!digits(&at, &gpu->bytes) || at > end || gpu->bytes == 0 || (at < end && *at != ' '))
        return false;
    while (at < end && *at == ' ')
        at++;
    gpu->context_bytes = gpu->module_bytes = 0;
    if (!option(&at, end, "context=", &gpu->context_bytes) || !option(&at, end, "module=", &gpu->module_bytes))
        return false;
    size_t length = (size_t)(end - at);
    if (length == 0) {
        at = DEFAULT_NAME;
        length = strlen(at);
    }
    if (length >= sizeof gpu->name)
        length = sizeof gpu->name - 1;
    memcpy(gpu->name, at, length);
    gpu->name[length] = 0;
    uuid_text(gpu->uuid, gpu->uuid_text);
    return true;
}

int sim_conf(struct sim_gpu gpus[SIM_GPUS])
{
    char path[512], text[8192];
    size_t length = strlen(sim_dir());
    if (length + sizeof "/sim.conf" > sizeof path)
        return -ENAMETOOLONG;
    memcpy(path, sim_dir(), length);
    memcpy(path + length, "/sim.conf", sizeof "/sim.conf");
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0) {
        static const char line[] = DEFAULT_UUID " 25769803776 " DEFAULT_NAME;
        if (errno != ENOENT)
            return -errno;
        return parse_line(line, line + sizeof line - 1, &gpus[0]) ? 1 : -EINVAL;
    }
    ssize_t got = 0, n;
    while ((n = read(fd, text + got, sizeof text - 1 - (size_t)got)) > 0)
        got += n;
    close(fd);
    text[got] = 0;
    int count = 0;
    for (char *line = text, *end; *line; line = *end ? end + 1 : end) {
        end = strchrnul(line, '\n');
        if (*line == '#' || line == end)
            continue;
        if (count == SIM_GPUS || !parse_line(line, end, &gpus[count]))
            return -EINVAL; /* half a configuration would be a different machine */
        count++;
    }
    return count;
}
