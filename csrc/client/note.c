/* note.c: memory that no hook counts, told to the daemon at once (struct cgpu_note).
 *
 * The answer comes on the connection, where the agent listens, too, once there is one: whoever reads it says so in `heard`. */
#define _GNU_SOURCE
#include <errno.h>
#include <poll.h>
#include <sys/socket.h>
#include <time.h>

#include "client.h"
#include "internal.h"

#define LOOK_NS 2000000 /* the agent may have read the answer */

static uint32_t number, heard; /* of the last note; of the last answer */

bool gate_hear(int fd)
{
    struct cgpu_note note;
    if (!gate_owns(fd))
        return false;
    ssize_t n = recv(fd, &note, sizeof note, MSG_DONTWAIT);
    if (n == (ssize_t)sizeof note)
        store_release(&heard, note.number);
    return n > 0 || (n < 0 && (errno == EAGAIN || errno == EINTR));
}

static bool answered(uint32_t mine)
{
    return (int32_t)(load_acquire(&heard) - mine) >= 0;
}

static bool ask(const struct gate *g, uint64_t patience_ns)
{
    int fd = gate_socket() < 0 ? -1 : gate_own_socket(); /* a rejoin under way, which takes its time, is not waited for */
    struct cgpu_note note = {.gpu = load_relaxed(&g->ctl->gpu), .number = __atomic_add_fetch(&number, 1, __ATOMIC_RELAXED)};
    if (fd < 0 || send(fd, &note, sizeof note, MSG_DONTWAIT | MSG_NOSIGNAL) != (ssize_t)sizeof note)
        return false;
    struct timespec look = {.tv_nsec = LOOK_NS};
    for (uint64_t until = now_ns() + patience_ns; now_ns() < until;) {
        struct pollfd p = {.fd = fd, .events = POLLIN};
        int ready = ppoll(&p, 1, &look, NULL);
        if (answered(note.number))
            return true;
        if (gate_socket() != fd || (ready > 0 && !gate_hear(fd)) || gate_daemon_silent(g, now_ns()))
            return false;
        if (answered(note.number))
            return true;
    }
    return false;
}

bool gate_note(const struct gate *g, uint64_t patience_ns)
{
    int saved = errno;
    if (!(load_relaxed(&g->told) & CGPU_GPU_NOTES))
        return false;
    bool counts = ask(g, patience_ns);
    errno = saved;
    return counts;
}
