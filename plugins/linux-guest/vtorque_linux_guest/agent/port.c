/* The two ports: opening, noticing the host come and go, the queue of what is to be written. */
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <time.h>
#include <unistd.h>

static uint8_t status_queue[STATUS_QUEUE], run_queue[RUN_QUEUE];
struct port run_port = {.path = conf.run, .fd = -1, .out = run_queue, .cap = sizeof run_queue};
struct port status_port = {.path = conf.status, .fd = -1, .out = status_queue, .cap = sizeof status_queue};

uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

static bool is_unix(const struct port *p) { return strncmp(p->path, "unix:", 5) == 0; }

static int open_unix(const char *path) {
    struct sockaddr_un a = {.sun_family = AF_UNIX};
    int fd = socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return -1;
    snprintf(a.sun_path, sizeof a.sun_path, "%s", path);
    if (connect(fd, (struct sockaddr *)&a, sizeof a) < 0) {
        close(fd);
        return -1;
    }
    return fd;
}

/* Finds the device by the port's name without udev: /sys/class/virtio-ports/vport0p1/name. */
static int open_named(const char *name) {
    DIR *d = opendir("/sys/class/virtio-ports");
    int fd = -1;
    for (struct dirent *e; fd < 0 && d != NULL && (e = readdir(d)) != NULL;) {
        char path[320], found[128] = "";
        snprintf(path, sizeof path, "/sys/class/virtio-ports/%s/name", e->d_name);
        int f = e->d_name[0] == '.' ? -1 : open(path, O_RDONLY | O_CLOEXEC);
        if (f < 0)
            continue;
        if (read(f, found, sizeof found - 1) > 0)
            found[strcspn(found, "\n")] = '\0';
        close(f);
        if (strcmp(found, name) == 0) {
            snprintf(path, sizeof path, "/dev/%s", e->d_name);
            fd = open(path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
        }
    }
    if (d != NULL)
        closedir(d);
    return fd;
}

static int open_port(const struct port *p) {
    int fd, flags = O_NONBLOCK;
    if (is_unix(p))
        fd = open_unix(p->path + 5);
    else if (strncmp(p->path, "port:", 5) == 0)
        fd = open_named(p->path + 5);
    else
        fd = open(p->path, O_RDWR | O_NONBLOCK | O_CLOEXEC | O_NOCTTY);
    if (fd < 0)
        return -1;
    /* A disconnected virtio port polls as POLLIN|POLLHUP for ever, so it is left out of the poll
     * set; the driver raises SIGIO when the host comes (virtio_console.c, send_sigio_to_port). */
    if (!is_unix(p) && fcntl(fd, F_SETOWN, getpid()) == 0)
        flags |= O_ASYNC;
    fcntl(fd, F_SETFL, flags);
    return fd;
}

/* True when a host has just connected. */
bool port_connect(struct port *p, uint64_t now) {
    if (p->up || p->path[0] == '\0')
        return false;
    if (p->fd < 0) {
        if (now < p->retry_at)
            return false;
        p->retry_at = now + RETRY_MS;
        p->fd = open_port(p);
        if (p->fd < 0)
            return false;
    }
    struct pollfd f = {.fd = p->fd, .events = POLLIN};
    if (poll(&f, 1, 0) < 0 || (!is_unix(p) && (f.revents & (POLLHUP | POLLERR | POLLNVAL))))
        return false;
    if (!p->keeps)
        port_drop(p);
    p->up = true;
    return true;
}

int port_timeout(const struct port *p, uint64_t now) {
    if (p->up || p->path[0] == '\0')
        return -1;
    if (p->fd >= 0)
        return RECHECK_MS;
    return p->retry_at > now ? (int)(p->retry_at - now) : 0;
}

void port_lost(struct port *p) {
    p->up = false;
    if (!p->keeps)
        port_drop(p);
    if (is_unix(p)) {
        close(p->fd);
        p->fd = -1;
        p->retry_at = now_ms() + RETRY_MS;
    }
}

static bool passing(int error) { return error == EAGAIN || error == EINTR || error == ENOMEM; }

/* Bytes read, 0 if there are none now; a host that has gone leaves the port down. */
ssize_t port_read(struct port *p, void *buf, size_t n) {
    ssize_t got = read(p->fd, buf, n);
    if (got > 0)
        return got;
    if (got < 0 && passing(errno))
        return 0;
    port_lost(p);
    return 0;
}

void port_flush(struct port *p) {
    while (p->up && p->head < p->tail) {
        ssize_t n = write(p->fd, p->out + p->head, p->tail - p->head);
        if (n < 0 && passing(errno))
            return;
        if (n <= 0) {
            port_lost(p);
            return;
        }
        p->head += (size_t)n;
    }
}

size_t port_queued(const struct port *p) { return p->tail - p->head; }

/* What may have to be written again, and what has not been written. */
size_t port_kept(const struct port *p) { return p->keeps ? p->tail - p->kept : 0; }

void port_drop(struct port *p) { p->kept = p->head = p->tail = 0; }

/* n writable bytes at out + tail, or NULL. */
uint8_t *port_room(struct port *p, size_t n) {
    if (!p->keeps)
        p->kept = p->head;
    if (p->kept == p->tail && p->head == p->tail)
        port_drop(p);
    if (p->cap - p->tail < n && p->kept > 0 && p->head >= p->kept) {
        memmove(p->out, p->out + p->kept, p->tail - p->kept);
        p->head -= p->kept;
        p->tail -= p->kept;
        p->kept = 0;
    }
    return p->cap - p->tail >= n ? p->out + p->tail : NULL;
}

/* The host has n more bytes of what is kept. False if they were never sent. */
bool port_ack(struct port *p, size_t n) {
    if (p->head < p->kept || n > p->head - p->kept)
        return false;
    p->kept += n;
    return true;
}

/* A host has come that has n bytes of what is kept: the rest is written again, after the lead. */
bool port_again(struct port *p, size_t n, const void *lead, size_t size) {
    if (n > port_kept(p) || port_kept(p) - n > p->cap - size)
        return false;
    memmove(p->out + size, p->out + p->kept + n, port_kept(p) - n);
    memcpy(p->out, lead, size);
    p->tail = size + port_kept(p) - n;
    p->head = 0;
    p->kept = size;
    return true;
}

void put_u16(uint8_t *at, uint16_t v) {
    at[0] = (uint8_t)v;
    at[1] = (uint8_t)(v >> 8);
}

void put_u32(uint8_t *at, uint32_t v) {
    put_u16(at, (uint16_t)v);
    put_u16(at + 2, (uint16_t)(v >> 16));
}

uint16_t get_u16(const uint8_t *at) { return (uint16_t)(at[0] | at[1] << 8); }
uint32_t get_u32(const uint8_t *at) { return get_u16(at) | (uint32_t)get_u16(at + 2) << 16; }
uint64_t get_u64(const uint8_t *at) { return get_u32(at) | (uint64_t)get_u32(at + 4) << 32; }

void put_header(uint8_t *at, enum frame type, int stream, size_t length) {
    at[0] = (uint8_t)type;
    at[1] = (uint8_t)stream;
    put_u16(at + 2, 0);
    put_u32(at + 4, (uint32_t)length);
}

/* Queues a control frame. There is always room: output stops at QUEUE_BUSY and no frame is taken
 * from the host while the queue is half full (session_wants_input). What the host has not acknowledged
 * is at most RUN_KEPT of output, and of such frames no more than it has asked for. */
void put_frame(enum frame type, int stream, const void *payload, size_t n) {
    uint8_t *at = run_port.up || run_port.keeps ? port_room(&run_port, HEADER + n) : NULL;
    if (at == NULL)
        return;
    put_header(at, type, stream, n);
    if (n > 0)
        memcpy(at + HEADER, payload, n);
    run_port.tail += HEADER + n;
}

bool status_line(const char *word, const char *text) {
    size_t n = strlen(word) + strlen(text) + 1;
    uint8_t *at = port_room(&status_port, n + 1);
    if (!status_port.up || at == NULL)
        return false;
    snprintf((char *)at, n + 1, "%s%s\n", word, text);
    status_port.tail += n;
    return true;
}
