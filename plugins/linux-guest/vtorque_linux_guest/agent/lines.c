/* What the job appends to a file leaves by a port of its own, as it is. The file is the user's, the
 * agent has it open: nothing here follows a name that the user could change. A host that does not
 * read keeps nobody waiting; what it has not read yet stays in the file. */
#include "agent.h"

#include <fcntl.h>
#include <sys/inotify.h>
#include <sys/stat.h>
#include <unistd.h>

static uint8_t queue[LINES_QUEUE];
static struct port port = {.path = conf.lines_port, .fd = -1, .out = queue, .cap = sizeof queue};
static int file = -1, watch = -1;
static off_t sent;
static bool changed;

/* No job fails for its lines: without file or inotify there are none. */
void lines_start(void) {
    if (conf.lines[0] == '\0' || conf.lines_port[0] == '\0')
        return;
    unlink(conf.lines);
    file = open(conf.lines, O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600);
    watch = inotify_init1(IN_NONBLOCK | IN_CLOEXEC);
    if (file < 0 || watch < 0 || (geteuid() == 0 && fchown(file, conf.uid, conf.gid) < 0) ||
        inotify_add_watch(watch, conf.lines, IN_MODIFY) < 0) {
        if (file >= 0)
            close(file);
        if (watch >= 0)
            close(watch);
        file = watch = -1;
    }
}

void lines_turn(uint64_t now) {
    struct stat st;
    if (file < 0)
        return;
    if (port_connect(&port, now))
        changed = true;
    for (;;) { /* until the file has no more (then the watch wakes us) or the port takes no more */
        port_flush(&port);
        if (!port.up || !changed || port_queued(&port) > 0)
            return;
        if (fstat(file, &st) == 0 && st.st_size < sent)
            sent = 0; /* begun anew */
        ssize_t n = pread(file, port_room(&port, CHUNK), CHUNK, sent);
        changed = n == CHUNK;
        port.tail += n > 0 ? (size_t)n : 0;
        sent += n > 0 ? n : 0;
    }
}

void lines_fds(struct pollfd *fds) {
    fds[P_LINES] = (struct pollfd){.fd = file >= 0 && port.up && !changed ? watch : -1, .events = POLLIN};
    fds[P_LINES_PORT] = (struct pollfd){.fd = file >= 0 && port.up ? port.fd : -1, .events = POLLIN};
    if (port_queued(&port) > 0)
        fds[P_LINES_PORT].events |= POLLOUT;
}

void lines_io(const struct pollfd *fds) {
    char drop[4096] __attribute__((aligned(8)));
    if (fds[P_LINES_PORT].revents & (POLLHUP | POLLERR | POLLNVAL))
        port_lost(&port);
    else if (fds[P_LINES_PORT].revents & POLLIN)
        port_read(&port, drop, sizeof drop); /* the host has nothing to say */
    if (fds[P_LINES].revents) {
        while (read(watch, drop, sizeof drop) > 0)
            ;
        changed = true;
    }
}

int lines_timeout(uint64_t now) { return file < 0 ? -1 : port_timeout(&port, now); }
