/* The running job: its process, its three streams, its end. One at a time. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

struct output {
    int fd;
    uint32_t credit; /* bytes the host still takes */
    uint32_t rest;   /* after the last process was killed: at most this much is still read */
};

static uint32_t window;
static uint8_t ring[STDIN_WINDOW]; /* stdin not yet taken by the job */

static struct {
    bool active;     /* from START to EXIT (or, if abandoned, to the end of the process) */
    bool abandoned;  /* its session is over: output is dropped, no EXIT is sent */
    bool exited, killed_rest, syncing, shown;
    pid_t pid;       /* 0: could not be started; a zombie is kept until the end, so the id stays ours */
    enum exit_kind kind;
    uint16_t value;
    char why[512];
    size_t why_size;
    int exec_fd, in_fd;
    bool pty, in_eof;
    struct output out[2];
    uint64_t kill_at, drain_at, seen;
    size_t in_head, in_size;
    uint32_t in_owed; /* bytes passed on, not yet granted again */
} job = {.exec_fd = -1, .in_fd = -1, .out = {{.fd = -1}, {.fd = -1}}};

void job_window(uint32_t size) { window = size; }
bool job_running(void) { return job.active && !job.abandoned; }
bool job_exited(const siginfo_t *si) {
    if (!job.active || job.pid == 0 || si->si_pid != job.pid)
        return false;
    if (job.exited)
        return true; /* the zombie is still there */
    job.exited = true;
    job.kind = si->si_code == CLD_EXITED ? X_CODE : X_SIGNAL;
    job.value = (uint16_t)si->si_status;
    job.drain_at = now_ms() + DRAIN_GRACE_MS;
    return true;
}

static void shut(int *fd) {
    if (*fd >= 0)
        close(*fd);
    *fd = -1;
}

static void end_output(int i) {
    if (job.out[i].fd < 0)
        return;
    shut(&job.out[i].fd);
    if (!job.abandoned)
        put_frame(F_EOF, i + 1, NULL, 0);
}

static void end_input(void) {
    shut(&job.in_fd);
    job.in_size = 0;
}

const char *job_start(const uint8_t *p, size_t n, bool last) {
    return job_running() ? "START while a job runs" : start_add(p, n, last);
}

const char *job_stdin(const uint8_t *p, size_t n) {
    if (!job_running() || job.in_fd < 0)
        return NULL; /* sent before the host knew */
    if (job.in_eof || n > STDIN_WINDOW - job.in_size - job.in_owed)
        return "more stdin than was granted";
    for (size_t at = (job.in_head + job.in_size) % STDIN_WINDOW, part; n > 0; p += part, n -= part) {
        part = n < STDIN_WINDOW - at ? n : STDIN_WINDOW - at;
        memcpy(ring + at, p, part);
        job.in_size += part;
        at = 0;
    }
    return NULL;
}

/* Stream 0: no more stdin. Streams 1 and 2: the host cannot write it, so neither may the job. */
void job_eof(int stream) {
    static const uint8_t ctrl_d = 4; /* VEOF; ends the input of a terminal in canonical mode */
    if (!job_running())
        return;
    if (stream > 0) {
        end_output(stream - 1);
        if (job.pty)
            end_input();
        return;
    }
    if (job.pty && !job.in_eof)
        job_stdin(&ctrl_d, 1);
    job.in_eof = true;
}

const char *job_credit(int stream, uint32_t n) {
    if (!job_running())
        return NULL;
    if (stream == 0 || n == 0 || n > window - job.out[stream - 1].credit)
        return "bad CREDIT";
    job.out[stream - 1].credit += n;
    return NULL;
}

const char *job_signal(uint32_t number) {
    if (number < 1 || number > 64)
        return "bad signal number";
    if (job_running() && job.pid > 0 && session_kill(job.pid, (int)number) == 0 && !job.exited)
        kill(job.pid, (int)number);
    return NULL;
}

void job_winsize(const uint8_t *p) {
    const uint16_t w[4] = {get_u16(p), get_u16(p + 2), get_u16(p + 4), get_u16(p + 6)};
    if (job_running() && job.pty && job.in_fd >= 0)
        pty_winsize(job.in_fd, w);
}

/* The session is over: TERM and later KILL, or KILL at once for the next one that waits. */
void job_abandon(bool at_once) {
    start_drop();
    start_files_drop();
    if (!job.active)
        return;
    if (!job.abandoned && !at_once)
        job_signal(SIGTERM);
    if (at_once || !job.abandoned)
        job.kill_at = now_ms() + (at_once ? 0 : TERM_GRACE_MS);
    end_input();
    job.abandoned = true;
}

/* The child's 0, 1, 2 in fds; -1 with errno set. */
static int open_streams(int fds[3]) {
    if (start.pty) {
        if (pty_open(&job.in_fd, &fds[0], start.winsize, conf.uid) < 0)
            return -1;
        fds[1] = fds[2] = fds[0];
        job.out[0].fd = fcntl(job.in_fd, F_DUPFD_CLOEXEC, 3);
        return job.out[0].fd < 0 ? -1 : 0;
    }
    if (pipe_for_child(&job.in_fd, &fds[0], false, conf.uid) < 0 ||
        pipe_for_child(&job.out[0].fd, &fds[1], true, conf.uid) < 0)
        return -1;
    fds[2] = fds[1];
    return start.merge ? 0 : pipe_for_child(&job.out[1].fd, &fds[2], true, conf.uid);
}

static void launch(void) {
    int fds[3] = {-1, -1, -1}, error_fd = -1;
    const char *file_error = start_files_error();
    sigset_t all, old;
    job.active = true;
    job.abandoned = job.exited = job.killed_rest = job.syncing = job.in_eof = job.shown = false;
    schedule(SCHED_OTHER); /* the child inherits it */
    job.pid = 0;
    job.why_size = job.in_head = job.in_size = 0;
    job.in_owed = 0;
    job.kill_at = 0;
    job.pty = start.pty;
    job.out[0] = job.out[1] = (struct output){.fd = -1, .credit = window};
    start_files_close();
    if (file_error != NULL)
        job.why_size = (size_t)snprintf(job.why, sizeof job.why, "%s", file_error);
    else if (open_streams(fds) == 0 && pipe_for_child(&job.exec_fd, &error_fd, true, conf.uid) == 0) {
        sigfillset(&all);
        sigprocmask(SIG_SETMASK, &all, &old);
        pid_t pid = fork();
        if (pid == 0)
            start_exec(&start, fds, error_fd);
        sigprocmask(SIG_SETMASK, &old, NULL);
        job.pid = pid > 0 ? pid : 0;
    }
    if (job.pid == 0) {
        if (file_error == NULL)
            job.why_size = (size_t)snprintf(job.why, sizeof job.why, "cannot start a process: %s", strerror(errno));
        job.exited = true;
        shut(&job.exec_fd);
        end_input();
        shut(&job.out[0].fd);
        shut(&job.out[1].fd);
    }
    shut(&error_fd);
    for (int i = 2; i >= 0; i--) /* a merged stream is the same descriptor */
        if (i == 0 || fds[i] != fds[i - 1])
            shut(&fds[i]);
    start_drop();
}

/* Runs `sh -c echo` as the user, as a job of a session that is over: nobody hears of it, and HELLO or
 * START end it or wait for its end. An emulated guest translates code when it first runs, and the
 * host needs 0.2 s from READY to its first START: the time to do that. */
void job_rehearse(void) {
    static const uint8_t echo[] = {T_ARG, 8, 0, 0, 0, '/', 'b', 'i', 'n', '/', 's', 'h', 0,
                                   T_ARG, 3, 0, 0, 0, '-', 'c', 0, T_ARG, 5, 0, 0, 0, 'e', 'c', 'h', 'o', 0};
    if (job.active || start_begun() || job_start(echo, sizeof echo, true) != NULL)
        return;
    launch();
    job.abandoned = true;
    job.kill_at = now_ms() + TERM_GRACE_MS;
}

/* Why the program could not be run, or the end of file that says that it was. */
static void read_exec(void) {
    ssize_t n = read(job.exec_fd, job.why + job.why_size, sizeof job.why - job.why_size);
    if (n > 0)
        job.why_size += (size_t)n;
    else if (n == 0 || errno != EAGAIN)
        shut(&job.exec_fd);
}

static void write_input(void) {
    while (job.in_fd >= 0 && job.in_size > 0) {
        size_t part = STDIN_WINDOW - job.in_head < job.in_size ? STDIN_WINDOW - job.in_head : job.in_size;
        ssize_t n = write(job.in_fd, ring + job.in_head, part);
        if (n < 0 && (errno == EAGAIN || errno == EINTR))
            break;
        if (n <= 0) { /* nobody reads it any more: the host need not send it */
            end_input();
            if (job_running())
                put_frame(F_EOF, 0, NULL, 0);
            return;
        }
        job.in_head = (job.in_head + (size_t)n) % STDIN_WINDOW;
        job.in_size -= (size_t)n;
        job.in_owed += (uint32_t)n;
    }
    if (job.in_eof && job.in_size == 0 && !job.pty)
        end_input();
    if (job_running() && job.in_owed >= STDIN_WINDOW / 4) {
        uint8_t grant[4];
        put_u32(grant, job.in_owed);
        put_frame(F_CREDIT, 0, grant, sizeof grant);
        job.in_owed = 0;
    }
}

static bool may_read(int i) {
    if (job.out[i].fd < 0)
        return false;
    return job.abandoned || (job.out[i].credit > 0 && port_queued(&run_port) < QUEUE_BUSY &&
                             port_kept(&run_port) < RUN_KEPT);
}

/* Moves one chunk from the job straight into the port's queue. True if there was something.
 * A write to a pipe wakes its reader, which interrupts the writer: for each line of a script a turn
 * here, a frame and a turn on the host cost more than the line. So only the first output is taken at
 * once; with SCHED_BATCH the agent then has its turn when the writer waits or has had its own. */
static bool read_output(int i) {
    static uint8_t dropped[CHUNK];
    struct output *o = &job.out[i];
    size_t want = job.abandoned || o->credit > CHUNK ? CHUNK : o->credit;
    uint8_t *at = job.abandoned ? NULL : port_room(&run_port, HEADER + want);
    if (at == NULL && !job.abandoned)
        return false;
    ssize_t n = read(o->fd, at != NULL ? at + HEADER : dropped, want);
    if (n < 0 && (errno == EINTR || (errno == EAGAIN && !job.killed_rest)))
        return false;
    if (n <= 0) { /* EOF; EIO: the terminal was closed; EAGAIN: what is left belongs to a daemon */
        end_output(i);
        return false;
    }
    if (!job.shown)
        schedule(SCHED_BATCH);
    job.shown = true;
    if (at != NULL) {
        put_header(at, F_DATA, i + 1, (size_t)n);
        run_port.tail += HEADER + (size_t)n;
        o->credit -= (uint32_t)n;
    }
    if (job.killed_rest) {
        o->rest -= o->rest < (uint32_t)n ? o->rest : (uint32_t)n;
        if (o->rest == 0)
            end_output(i);
    }
    return true;
}

void job_synced(void) {
    if (!job.active || !job.syncing)
        return;
    uint8_t text[4 + sizeof job.why] = {(uint8_t)job.kind};
    put_u16(text + 2, job.value);
    memcpy(text + 4, job.why, job.why_size);
    put_frame(F_EXIT, 0, text, 4 + job.why_size);
    job.active = job.syncing = false;
}

static void finish(void) {
    if (job.pid > 0) {
        session_kill_all(job.pid);
        waitpid(job.pid, NULL, 0);
    }
    if (job.why_size > 0) {
        job.kind = X_NOT_STARTED;
        job.value = 0;
    }
    job.pid = 0;
    end_input();
    end_output(0);
    end_output(1);
    if (job.abandoned) {
        job.active = false;
        return;
    }
    start_files_drop();
    job.syncing = true;
    if (conf.sync && job.kind != X_NOT_STARTED)
        sync_for_job();
    else
        job_synced();
}

/* After the main process: what is still written within the grace is taken, then the session is
 * killed. The clock stands still while the host is what output waits for. */
static void drain(uint64_t now) {
    bool blocked = false;
    for (int i = 0; i < 2; i++)
        blocked |= job.out[i].fd >= 0 && !may_read(i);
    if (blocked && job.seen > 0)
        job.drain_at += now - job.seen;
    job.seen = now;
    if (!job.killed_rest && (job.abandoned || (!blocked && now >= job.drain_at))) {
        session_kill_all(job.pid);
        job.killed_rest = true;
        job.out[0].rest = job.out[1].rest = 1024 * 1024; /* the largest pipe of a user */
    }
    for (int i = 0; i < 2 && job.killed_rest; i++)
        while (may_read(i) && read_output(i))
            ;
}

void job_tick(uint64_t now) {
    if (start_waits() && !job.active)
        launch();
    if (!job.active || job.syncing) {
        if (job.abandoned)
            job.active = job.syncing = false;
        return;
    }
    if (!job.exited) {
        write_input(); /* an end of input that came with START is seen between two polls */
        job.seen = 0;
        if (job.kill_at > 0 && now >= job.kill_at) {
            job.kill_at = 0;
            if (session_kill(job.pid, SIGKILL) == 0)
                kill(job.pid, SIGKILL);
        }
        return;
    }
    if (job.exec_fd >= 0)
        read_exec();
    if (job.pid > 0)
        drain(now);
    if (job.out[0].fd < 0 && job.out[1].fd < 0 && job.exec_fd < 0)
        finish();
}

int job_timeout(uint64_t now) {
    uint64_t at = 0;
    if (start_waits() && !job.active)
        return 0;
    if (job.active && !job.exited)
        at = job.kill_at;
    else if (job.active && !job.killed_rest && !job.syncing)
        at = job.drain_at;
    if (at == 0)
        return -1;
    return at > now ? (int)(at - now) : 1;
}

/* Only what can be dealt with now: a hang-up would otherwise wake poll for ever. */
void job_fds(struct pollfd *fds) {
    fds[P_EXEC] = (struct pollfd){.fd = job.exec_fd, .events = POLLIN};
    fds[P_IN] = (struct pollfd){.fd = job.in_size > 0 ? job.in_fd : -1, .events = POLLOUT};
    fds[P_OUT] = (struct pollfd){.fd = may_read(0) ? job.out[0].fd : -1, .events = POLLIN};
    fds[P_ERR] = (struct pollfd){.fd = may_read(1) ? job.out[1].fd : -1, .events = POLLIN};
}

void job_io(const struct pollfd *fds) {
    if (!job.active || job.syncing)
        return;
    if (fds[P_EXEC].revents && job.exec_fd >= 0)
        read_exec();
    write_input();
    for (int i = 0; i < 2; i++)
        if (fds[P_OUT + i].revents && may_read(i))
            read_output(i);
}
