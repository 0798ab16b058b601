/* vtorque-agent CONF: reports on the status port, runs the setup script, then serves the run port. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

enum { TAIL = 2000, STEP = 200 };

struct conf conf;
static uint8_t status_queue[STATUS_QUEUE], run_queue[RUN_QUEUE];
struct port run_port = {.path = conf.run, .fd = -1, .out = run_queue, .cap = sizeof run_queue};
struct port status_port = {.path = conf.status, .fd = -1, .out = status_queue, .cap = sizeof status_queue};

static volatile sig_atomic_t ended;
static char step[STEP + 1] = "agent";
static char result[4096];  /* READY or FAILED, once it is known */
static bool failed, step_sent, result_sent;

static struct {
    pid_t pid;
    int steps, output, status;
    bool exited;
    char line[STEP + 8], tail[2 * TAIL];
    size_t line_size, tail_size;
} setup = {.steps = -1, .output = -1};

static struct {
    pid_t pid;
    bool status_wanted, job_wanted, status_runs, job_runs;
    uint64_t job_deadline;
} syncing;

uint64_t now_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000 + (uint64_t)t.tv_nsec / 1000000;
}

const char *setup_failure(void) { return failed ? result + strlen("FAILED ") : NULL; }

/* ---- status port ---- */

bool status_line(const char *word, const char *text) {
    size_t n = strlen(word) + strlen(text) + 1;
    uint8_t *at = port_room(&status_port, n + 1);
    if (!status_port.up || at == NULL)
        return false;
    snprintf((char *)at, n + 1, "%s%s\n", word, text);
    status_port.tail += n;
    return true;
}

/* The host always gets the latest step and the result, however late or often it connects. */
static void status_send(void) {
    if (!step_sent)
        step_sent = status_line("STEP ", step);
    if (step_sent && !result_sent && result[0] != '\0')
        result_sent = status_line(result, "");
}

static void set_result(const char *word, const char *text) {
    char *to = result + snprintf(result, sizeof result, "%s", word);
    for (; *text != '\0' && to < result + sizeof result - 8; text++) {
        if (*text == '\n') {
            *to++ = ';';
            *to++ = ' ';
        } else {
            *to++ = (unsigned char)*text < ' ' || *text == 127 ? ' ' : *text;
        }
    }
    *to = '\0';
}

static void set_failed(const char *text) {
    failed = true;
    set_result("FAILED ", text);
}

static void status_input(void) {
    static char line[256];
    static size_t size;
    char buf[256];
    ssize_t n = port_read(&status_port, buf, sizeof buf);
    for (ssize_t i = 0; i < n; i++) {
        if (buf[i] != '\n') {
            line[size] = buf[i];
            size += size < sizeof line - 1;
            continue;
        }
        line[size] = '\0';
        size = 0;
        if (strcmp(line, "SYNC") == 0)
            syncing.status_wanted = true;
        else if (strcmp(line, "STATUS") == 0)
            step_sent = result_sent = false;
        else if (strncmp(line, "LOG ", 4) == 0)
            log_ask(line + 4);
    }
}

/* ---- sync(2), in a child because it may take long ---- */

void sync_for_job(void) {
    syncing.job_wanted = true;
    syncing.job_deadline = now_ms() + SYNC_MAX_MS;
}

static void sync_tick(uint64_t now) {
    if (syncing.pid == 0 && (syncing.status_wanted || syncing.job_wanted)) {
        pid_t pid = fork();
        if (pid == 0) {
            for (int fd = 3; fd < 256; fd++)
                close(fd);
            sync();
            _exit(0);
        }
        syncing.pid = pid > 0 ? pid : 0;
        syncing.status_runs = syncing.status_wanted;
        syncing.job_runs = syncing.job_wanted;
        syncing.status_wanted = syncing.job_wanted = false;
    }
    if ((syncing.job_runs || syncing.job_wanted) && now >= syncing.job_deadline) {
        syncing.job_runs = syncing.job_wanted = false;
        job_synced();
    }
}

static void sync_done(void) {
    syncing.pid = 0;
    if (syncing.status_runs)
        status_line("SYNCED", "");
    if (syncing.job_runs)
        job_synced();
    syncing.status_runs = syncing.job_runs = false;
}

/* ---- setup script ---- */

static _Noreturn void setup_child(int steps, int output) {
    static char *const env[] = {"PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin",
                                "HOME=/root", "LC_ALL=C", NULL};
    setsid();
    child_reset();
    if (steps == 3 || output == 3) { /* out of the way of the dup2 below */
        steps = fcntl(steps, F_DUPFD_CLOEXEC, 10);
        output = fcntl(output, F_DUPFD_CLOEXEC, 10);
    }
    dup2(steps, 3);
    dup2(output, 1);
    dup2(output, 2);
    char shell[sizeof conf.container + 16], path[sizeof conf.container + 128];
    char *own[] = {path, "HOME=/root", "LC_ALL=C", NULL}; /* root runs none of a container's tools */
    snprintf(shell, sizeof shell, "%s/bin/sh", conf.container);
    snprintf(path, sizeof path, "PATH=%s/bin", conf.container);
    execle(shell, "sh", conf.setup, (char *)NULL, conf.container[0] != '\0' ? own : env);
    dprintf(2, "%s: %s", shell, strerror(errno));
    _exit(127);
}

static void setup_start(void) {
    int steps, output;
    if (conf.setup[0] == '\0') {
        set_result("READY 1", "");
        service_ready();
        return;
    }
    if (pipe_for_child(&setup.steps, &steps, true, geteuid()) < 0 ||
        pipe_for_child(&setup.output, &output, true, geteuid()) < 0 || (setup.pid = fork()) < 0) {
        setup.pid = 0;
        set_failed("cannot start the setup script");
        return;
    }
    if (setup.pid == 0)
        setup_child(steps, output);
    close(steps);
    close(output);
}

static void setup_steps(void) {
    char buf[1024];
    ssize_t n;
    while ((n = read(setup.steps, buf, sizeof buf)) > 0) {
        for (ssize_t i = 0; i < n; i++) {
            char c = buf[i];
            if (c != '\n') {
                setup.line[setup.line_size] = (unsigned char)c < ' ' || c == 127 ? '?' : c;
                setup.line_size += setup.line_size < sizeof setup.line - 1;
                continue;
            }
            setup.line[setup.line_size] = '\0';
            setup.line_size = 0;
            if (strncmp(setup.line, "STEP ", 5) != 0)
                continue;
            snprintf(step, sizeof step, "%.*s", STEP, setup.line + 5);
            step_sent = status_line("STEP ", step);
        }
    }
    if (n == 0) {
        close(setup.steps);
        setup.steps = -1;
    }
}

static void setup_output(void) {
    ssize_t n;
    while ((n = read(setup.output, setup.tail + setup.tail_size, sizeof setup.tail - setup.tail_size)) > 0) {
        setup.tail_size += (size_t)n;
        if (setup.tail_size > TAIL) {
            memmove(setup.tail, setup.tail + setup.tail_size - TAIL, TAIL);
            setup.tail_size = TAIL;
        }
    }
    if (n == 0) {
        close(setup.output);
        setup.output = -1;
    }
}

/* A daemon that the script started may hold the pipes: they are read while there is something. */
static void setup_ended(void) {
    char text[STEP + TAIL + 64];
    int n = snprintf(text, sizeof text, "%s: ", step);
    while (setup.tail_size > 0 && setup.tail[setup.tail_size - 1] == '\n')
        setup.tail_size--;
    setup.exited = false;
    if (WIFEXITED(setup.status) && WEXITSTATUS(setup.status) == 0) {
        set_result("READY 1", "");
        service_ready();
    } else if (setup.tail_size > 0) {
        snprintf(text + n, sizeof text - (size_t)n, "%.*s", (int)setup.tail_size, setup.tail);
        set_failed(text);
    } else {
        snprintf(text + n, sizeof text - (size_t)n, WIFEXITED(setup.status) ? "exit code %d" : "signal %d",
                 WIFEXITED(setup.status) ? WEXITSTATUS(setup.status) : WTERMSIG(setup.status));
        set_failed(text);
    }
}

/* ---- main loop ---- */

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
        if (si.si_pid == setup.pid) {
            setup.pid = 0;
            setup.status = status;
            setup.exited = true;
        } else if (si.si_pid == syncing.pid) {
            sync_done();
        }
    }
}

static int soonest(int a, int b) { return a < 0 ? b : b < 0 || a < b ? a : b; }

static int timeout_of(uint64_t now) {
    int t = soonest(job_timeout(now), port_timeout(&status_port, now));
    t = soonest(t, lines_timeout(now));
    if (result[0] != '\0')
        t = soonest(t, port_timeout(&run_port, now));
    if (syncing.job_runs || syncing.job_wanted)
        t = soonest(t, syncing.job_deadline > now ? (int)(syncing.job_deadline - now) : 0);
    return t;
}

static void wait_and_serve(const sigset_t *open_signals) {
    struct pollfd fds[P_COUNT];
    int timeout = timeout_of(now_ms());
    struct timespec t = {timeout / 1000, timeout % 1000 * 1000000L};
    fds[P_STATUS] = (struct pollfd){.fd = status_port.up ? status_port.fd : -1, .events = POLLIN};
    fds[P_RUN] = (struct pollfd){.fd = run_port.up ? run_port.fd : -1};
    fds[P_STEPS] = (struct pollfd){.fd = setup.steps, .events = POLLIN};
    fds[P_SETUP] = (struct pollfd){.fd = setup.output, .events = POLLIN};
    if (port_queued(&status_port) > 0)
        fds[P_STATUS].events |= POLLOUT;
    if (port_queued(&run_port) > 0)
        fds[P_RUN].events |= POLLOUT;
    if (session_wants_input())
        fds[P_RUN].events |= POLLIN;
    job_fds(fds);
    lines_fds(fds);
    if (ppoll(fds, P_COUNT, timeout < 0 ? NULL : &t, open_signals) <= 0)
        return;
    if (fds[P_STATUS].revents & (POLLHUP | POLLERR | POLLNVAL))
        port_lost(&status_port);
    else if (fds[P_STATUS].revents & POLLIN)
        status_input();
    if (fds[P_RUN].revents & (POLLHUP | POLLERR | POLLNVAL))
        port_lost(&run_port);
    else if (fds[P_RUN].revents & POLLIN)
        session_read();
    if (fds[P_STEPS].revents)
        setup_steps();
    if (fds[P_SETUP].revents)
        setup_output();
    job_io(fds);
    lines_io(fds);
}

static void turn(const sigset_t *open_signals) {
    static bool was_up, rehearsed;
    uint64_t now = now_ms();
    if (was_up && !run_port.up)
        session_lost();
    if (port_connect(&status_port, now)) {
        step_sent = result_sent = false;
        log_drop();
    }
    if (result[0] != '\0')
        port_connect(&run_port, now);
    reap();
    if (setup.steps >= 0)
        setup_steps();
    if (setup.output >= 0)
        setup_output();
    if (setup.exited)
        setup_ended();
    session_parse();
    job_tick(now);
    sync_tick(now);
    status_send();
    port_flush(&status_port);
    log_turn();
    port_flush(&run_port);
    lines_turn(now);
    if (result_sent && !failed && !rehearsed) {
        rehearsed = true;
        job_rehearse();
    }
    was_up = run_port.up;
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
        set_failed(err);
    while (!ended)
        turn(&open_signals);
    job_abandon(true);
    job_tick(now_ms());
    return 0;
}
