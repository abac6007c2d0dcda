/* ask.c: one question to the daemon, and its answer: one message each way on a SOCK_SEQPACKET socket that only root reaches.
 *
 *   question  u32 magic, u32 version, u32 kind (enum ask), u32 0, then the payload
 *             create: id NUL bundle NUL, with a descriptor of the bundle; hook: the OCI state; delete: id NUL;
 *             precreate: nothing, with a descriptor of the config.json
 *   answer    u32 magic, u32 version, i32 status, u32 0, then a text; perhaps with a descriptor of the new config.json */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>
#include "runtime.h"

#define MAGIC   0x72706763u /* "cgpr" */
#define VERSION 1u

struct head {
    uint32_t magic, version;
    int32_t kind; /* of a question, or the status of an answer */
    uint32_t reserved;
};

union control {
    struct cmsghdr align;
    char room[CMSG_SPACE(sizeof(int))];
};

static bool fail(struct answer *answer, const char *what, const char *why)
{
    snprintf(answer->text, sizeof answer->text, "%s: %s", what, why);
    return false;
}

static int reach(const char *path, struct answer *answer)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_SEQPACKET | SOCK_CLOEXEC, 0);
    snprintf(address.sun_path, sizeof address.sun_path, "%s", path);
    /* A full backlog must not block for ever: the engine waits for us. */
    struct timeval patience = {.tv_sec = 5};
    if (fd >= 0)
        setsockopt(fd, SOL_SOCKET, SO_SNDTIMEO, &patience, sizeof patience);
    if (fd < 0 || connect(fd, (struct sockaddr *)&address, sizeof address) < 0) {
        fail(answer, path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    return fd;
}

static bool say(int socket_fd, const struct head *head, const char *payload, size_t length, int fd)
{
    union control control;
    struct iovec parts[2] = {{(void *)(uintptr_t)head, sizeof *head}, {(void *)(uintptr_t)payload, length}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2};
    if (fd >= 0) {
        message.msg_control = control.room;
        message.msg_controllen = sizeof control.room;
        struct cmsghdr *c = CMSG_FIRSTHDR(&message);
        c->cmsg_level = SOL_SOCKET;
        c->cmsg_type = SCM_RIGHTS;
        c->cmsg_len = CMSG_LEN(sizeof fd);
        memcpy(CMSG_DATA(c), &fd, sizeof fd);
    }
    return sendmsg(socket_fd, &message, MSG_NOSIGNAL) >= 0;
}

static int poll_for(int fd, int timeout_ms)
{
    struct pollfd ready = {.fd = fd, .events = POLLIN};
    struct timespec begin, now;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    for (int left = timeout_ms;;) {
        int n = poll(&ready, 1, left);
        if (n >= 0 || errno != EINTR)
            return n;
        clock_gettime(CLOCK_MONOTONIC, &now);
        long passed = (now.tv_sec - begin.tv_sec) * 1000 + (now.tv_nsec - begin.tv_nsec) / 1000000;
        left = passed < timeout_ms ? timeout_ms - (int)passed : 0;
    }
}

static bool hear(int socket_fd, int timeout_ms, struct answer *answer)
{
    union control control;
    struct head head;
    struct iovec parts[2] = {{&head, sizeof head}, {answer->text, TEXT_MAX}};
    struct msghdr message = {.msg_iov = parts, .msg_iovlen = 2, .msg_control = control.room,
                             .msg_controllen = sizeof control.room};
    int ready = poll_for(socket_fd, timeout_ms);
    if (ready == 0)
        return fail(answer, "cgpud", "no answer in time");
    ssize_t got = ready < 0 ? -1 : recvmsg(socket_fd, &message, MSG_CMSG_CLOEXEC | MSG_DONTWAIT);
    if (got < 0)
        return fail(answer, "cgpud", strerror(errno));
    struct cmsghdr *c = CMSG_FIRSTHDR(&message);
    if (c && c->cmsg_level == SOL_SOCKET && c->cmsg_type == SCM_RIGHTS && c->cmsg_len == CMSG_LEN(sizeof answer->fd))
        memcpy(&answer->fd, CMSG_DATA(c), sizeof answer->fd);
    if (got < (ssize_t)sizeof head || head.magic != MAGIC || head.version != VERSION)
        return fail(answer, "cgpud", got == 0 ? "it closed the connection" : "an answer in another version's form");
    answer->text[(size_t)got - sizeof head] = 0;
    answer->status = head.kind;
    return true;
}

bool ask(const struct conf *conf, enum ask what, const char *payload, size_t length, int fd, int timeout_ms, struct answer *answer)
{
    struct head head = {MAGIC, VERSION, (int32_t)what, 0};
    answer->fd = -1;
    answer->status = 0;
    int socket_fd = reach(conf->socket, answer);
    if (socket_fd < 0)
        return false;
    bool good = say(socket_fd, &head, payload, length, fd) ? hear(socket_fd, timeout_ms, answer)
                                                           : fail(answer, conf->socket, strerror(errno));
    close(socket_fd);
    return good;
}
