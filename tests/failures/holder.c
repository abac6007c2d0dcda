/* holder.c: a process of an instance that is in the middle of a charge: it joins, takes the ledger's mutex, says "held" and
 * waits for a line; then it lets go of it and ends. `holder SOCKET`; csrc/abi/cgpu_abi.h has the offsets. */
#include <pthread.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#define REPORT_BYTES (4096 + 512 * 256)
#define MUTEX 64

int main(int argc, char **argv)
{
    struct sockaddr_un address = {.sun_family = AF_UNIX};
    uint32_t hello[16] = {0x75706763, 1, 1, 1 /* NVML only: it needs no slot */};
    char welcome[2048], line[16];
    union {
        char room[CMSG_SPACE(49 * sizeof(int))];
        struct cmsghdr align;
    } control;
    struct iovec iov = {welcome, sizeof welcome};
    struct msghdr message = {.msg_iov = &iov, .msg_iovlen = 1, .msg_control = &control, .msg_controllen = sizeof control};
    int sock = socket(AF_UNIX, SOCK_SEQPACKET, 0), fds[4];
    if (argc != 2 || strlen(argv[1]) >= sizeof address.sun_path)
        return 2;
    strcpy(address.sun_path, argv[1]);
    if (connect(sock, (struct sockaddr *)&address, sizeof address) || send(sock, hello, sizeof hello, 0) < 0 ||
        recvmsg(sock, &message, 0) < 0 || !CMSG_FIRSTHDR(&message)) {
        perror("holder");
        return 1;
    }
    memcpy(fds, CMSG_DATA(CMSG_FIRSTHDR(&message)), sizeof fds); /* agent, control page, report pages, bell */
    char *report = mmap(NULL, REPORT_BYTES, PROT_READ | PROT_WRITE, MAP_SHARED, fds[2], 0);
    if (report == MAP_FAILED || pthread_mutex_lock((pthread_mutex_t *)(report + MUTEX)))
        return 1;
    puts("held");
    fflush(stdout);
    char *said = fgets(line, sizeof line, stdin);
    pthread_mutex_unlock((pthread_mutex_t *)(report + MUTEX));
    return said == NULL;
}
