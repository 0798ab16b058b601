/* vtorque-agent CONF: reports on the status port, runs the setup script, then serves the run port. */
#include "agent.h"

#include <fcntl.h>
#include <stdio.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

static volatile sig_atomic_t ended;

static void on_signal(int number) {
    if (number == SIGTERM)
        ended = 1;
}

/* The job's zombie is left alone (job.c keeps it until the end); all others are reaped, for the
 * agent may be process 1. */
static void reap(void) {
    for (;;) {
        siginfo_t si = {.si_pid = 0};
        int status = 0;
        if (waitid(P_ALL, 0, &si, WEXITED | WNOHANG | WNOWAIT) < 0 || si.si_pid == 0)
            return;
        if (job_exited(&si))
            return;
        waitpid(si.si_pid, &status, 0);
        if (!setup_exited(si.si_pid, status) && sync_exited(si.si_pid))
            job_synced();
    }
}

static int soonest(int a, int b) { return a < 0 ? b : b < 0 || a < b ? a : b; }

static int timeout_of(uint64_t now) {
    int t = soonest(job_timeout(now), port_timeout(&status_port, now));
    t = soonest(t, soonest(lines_timeout(now), sync_timeout(now)));
    t = soonest(t, session_timeout(now));
    return status_known() ? soonest(t, port_timeout(&run_port, now)) : t;
}

static void wait_and_serve(const sigset_t *open_signals) {
    struct pollfd fds[P_COUNT];
    int timeout = timeout_of(now_ms());
    struct timespec t = {timeout / 1000, timeout % 1000 * 1000000L};
    fds[P_STATUS] = (struct pollfd){.fd = status_port.up ? status_port.fd : -1, .events = POLLIN};
    fds[P_RUN] = (struct pollfd){.fd = run_port.up ? run_port.fd : -1};
    if (port_queued(&status_port) > 0)
        fds[P_STATUS].events |= POLLOUT;
    if (port_queued(&run_port) > 0)
        fds[P_RUN].events |= POLLOUT;
    if (session_wants_input())
        fds[P_RUN].events |= POLLIN;
    setup_fds(fds);
    job_fds(fds);
    lines_fds(fds);
    if (ppoll(fds, P_COUNT, timeout < 0 ? NULL : &t, open_signals) <= 0)
        return;
    if (fds[P_STATUS].revents & (POLLHUP | POLLERR | POLLNVAL))
        port_lost(&status_port);
    else if (fds[P_STATUS].revents & POLLIN)
        status_read();
    if (fds[P_RUN].revents & (POLLHUP | POLLERR | POLLNVAL))
        port_lost(&run_port);
    else if (fds[P_RUN].revents & POLLIN)
        session_read();
    setup_io(fds);
    job_io(fds);
    lines_io(fds);
}

static void turn(const sigset_t *open_signals) {
    static bool was_up, rehearsed;
    uint64_t now = now_ms();
    if (was_up && !run_port.up)
        session_lost();
    if (port_connect(&status_port, now)) {
        status_again();
        log_drop();
    }
    if (status_known())
        port_connect(&run_port, now);
    was_up = run_port.up;
    session_tick(now);
    reap();
    setup_turn();
    session_parse();
    job_tick(now);
    if (sync_tick(now))
        job_synced();
    status_send();
    port_flush(&status_port);
    log_turn();
    port_flush(&run_port);
    lines_turn(now);
    if (status_ready_sent() && !rehearsed) {
        rehearsed = true;
        job_rehearse();
    }
    wait_and_serve(open_signals);
}

static void prepare(sigset_t *open_signals) {
    const int caught[] = {SIGCHLD, SIGIO, SIGTERM};
    struct sigaction action = {.sa_handler = on_signal};
    sigset_t block;
    int fd;
    do /* 0, 1 and 2 must be taken */
        fd = open("/dev/null", O_RDWR | O_CLOEXEC);
    while (fd >= 0 && fd < 3);
    if (fd >= 0)
        close(fd);
    oom_score("-1000"); /* it holds the job's exit code */
    sigemptyset(&block);
    for (size_t i = 0; i < sizeof caught / sizeof *caught; i++) {
        sigaction(caught[i], &action, NULL);
        sigaddset(&block, caught[i]);
    }
    sigprocmask(SIG_SETMASK, &block, NULL);
    sigemptyset(open_signals);
    signal(SIGPIPE, SIG_IGN);
}

int main(int argc, char **argv) {
    char err[512];
    sigset_t open_signals;
    if (argc != 2) {
        fprintf(stderr, "usage: vtorque-agent CONF\n");
        return 2;
    }
    prepare(&open_signals);
    if (conf_read(argv[1], &conf, err, sizeof err)) {
        lines_start();
        setup_start();
    } else if (fprintf(stderr, "vtorque-agent: %s\n", err) < 0 || conf.status[0] == '\0')
        return 2;
    else
        status_set_failed(err);
    while (!ended)
        turn(&open_signals);
    job_abandon(true);
    job_tick(now_ms());
    return 0;
}
