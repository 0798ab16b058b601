/* Processes: pipes and terminals for a child, its signals, and everything that belongs to a session. */
#include "agent.h"

#include <dirent.h>
#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/un.h>
#include <unistd.h>

/* The child's user owns the pipe, or a script's `echo x > /dev/stderr` (a new open) is refused. */
int pipe_for_child(int *parent_end, int *child_end, bool child_writes, uid_t owner) {
    int fds[2];
    if (pipe2(fds, O_CLOEXEC) < 0)
        return -1;
    *parent_end = fds[child_writes ? 0 : 1];
    *child_end = fds[child_writes ? 1 : 0];
    fcntl(*parent_end, F_SETFL, O_NONBLOCK);
    fcntl(*parent_end, F_SETPIPE_SZ, PIPE_SIZE);
    if (fchown(*child_end, owner, (gid_t)-1) < 0 && geteuid() == 0) {
        close(fds[0]);
        close(fds[1]);
        *parent_end = *child_end = -1;
        return -1;
    }
    return 0;
}

void oom_score(const char *value) {
    int fd = open("/proc/self/oom_score_adj", O_WRONLY | O_CLOEXEC);
    ssize_t n = fd < 0 ? 0 : write(fd, value, strlen(value));
    if (fd >= 0)
        close(fd);
    (void)n; /* without root or /proc: as it was */
}

/* Of this process, see sched(7). musl's function of a like name does nothing. */
void schedule(int policy) {
    const struct sched_param none = {0};
    syscall(SYS_sched_setscheduler, 0, policy, &none);
}

/* A child must not inherit the agent's signals and its protection from the OOM killer. */
void child_reset(void) {
    sigset_t none;
    if (geteuid() == 0)
        oom_score("0");
    for (int n = 1; n <= 64; n++)
        signal(n, SIG_DFL);
    sigemptyset(&none);
    sigprocmask(SIG_SETMASK, &none, NULL);
}

void pty_winsize(int fd, const uint16_t *w) {
    struct winsize ws = {.ws_row = w[0], .ws_col = w[1], .ws_xpixel = w[2], .ws_ypixel = w[3]};
    ioctl(fd, TIOCSWINSZ, &ws);
}

/* A pseudo-terminal owned by the user, see pts(4). */
int pty_open(int *master, int *slave, const uint16_t *winsize, uid_t owner) {
    int number, unlock = 0;
    char path[32];
    *master = open("/dev/ptmx", O_RDWR | O_NOCTTY | O_CLOEXEC | O_NONBLOCK);
    if (*master < 0 || ioctl(*master, TIOCSPTLCK, &unlock) < 0 || ioctl(*master, TIOCGPTN, &number) < 0)
        return -1;
    snprintf(path, sizeof path, "/dev/pts/%d", number);
    *slave = open(path, O_RDWR | O_NOCTTY | O_CLOEXEC);
    if (*slave < 0 || (geteuid() == 0 && fchown(*slave, owner, (gid_t)-1) < 0))
        return -1;
    pty_winsize(*slave, winsize);
    return 0;
}

/* Tells systemd that what waits for this service may start (sd_notify(3)). */
void service_ready(void) {
    struct sockaddr_un to = {.sun_family = AF_UNIX};
    const char *path = getenv("NOTIFY_SOCKET");
    size_t n = path == NULL ? 0 : strlen(path);
    if (n < 2 || n >= sizeof to.sun_path || (path[0] != '/' && path[0] != '@'))
        return;
    memcpy(to.sun_path, path, n);
    if (path[0] == '@')
        to.sun_path[0] = '\0';
    int fd = socket(AF_UNIX, SOCK_DGRAM | SOCK_CLOEXEC, 0);
    if (fd < 0)
        return;
    socklen_t length = (socklen_t)(offsetof(struct sockaddr_un, sun_path) + n);
    sendto(fd, "READY=1", 7, MSG_NOSIGNAL, (struct sockaddr *)&to, length);
    close(fd);
}

/* proc(5): pid (comm) state ppid pgrp session; comm may hold anything, also ") ". */
static bool in_session(const char *pid, pid_t session) {
    char path[64], text[512], state = 'Z';
    int found = -1;
    snprintf(path, sizeof path, "/proc/%.20s/stat", pid);
    int fd = open(path, O_RDONLY | O_CLOEXEC);
    if (fd < 0)
        return false;
    ssize_t n = read(fd, text, sizeof text - 1);
    close(fd);
    if (n <= 0)
        return false;
    text[n] = '\0';
    char *end = strrchr(text, ')');
    if (end == NULL || sscanf(end + 1, " %c %*d %*d %d", &state, &found) != 2)
        return false;
    return found == session && state != 'Z' && state != 'X';
}

/* Signals every live process of the session; how many there were. */
int session_kill(pid_t session, int sig) {
    DIR *d = opendir("/proc");
    int count = 0;
    for (struct dirent *e; d != NULL && (e = readdir(d)) != NULL;) {
        if (e->d_name[0] < '1' || e->d_name[0] > '9' || !in_session(e->d_name, session))
            continue;
        if (kill((pid_t)atoi(e->d_name), sig) == 0)
            count++;
    }
    if (d != NULL)
        closedir(d);
    else if (kill(-session, sig) == 0)
        count++;
    return count;
}

/* Repeated because a process may fork while it is being looked for. */
void session_kill_all(pid_t session) {
    for (int turn = 0; turn < 50 && session_kill(session, SIGKILL) > 0; turn++)
        usleep(1000);
}
