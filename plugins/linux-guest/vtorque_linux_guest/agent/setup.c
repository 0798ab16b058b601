/* The setup script: root's, run once before READY; its steps come on descriptor 3. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

enum { TAIL = 2000 };

static struct {
    pid_t pid;
    int steps, output, status;
    bool exited;
    char line[STEP_MAX + 8], tail[2 * TAIL];
    size_t line_size, tail_size;
} setup = {.steps = -1, .output = -1};

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

void setup_start(void) {
    int steps, output;
    if (conf.setup[0] == '\0') {
        status_set_ready();
        service_ready();
        return;
    }
    if (pipe_for_child(&setup.steps, &steps, true, geteuid()) < 0 ||
        pipe_for_child(&setup.output, &output, true, geteuid()) < 0 || (setup.pid = fork()) < 0) {
        setup.pid = 0;
        status_set_failed("cannot start the setup script");
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
            status_set_step(setup.line + 5);
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
    char text[STEP_MAX + TAIL + 64];
    int n = snprintf(text, sizeof text, "%s: ", status_step());
    while (setup.tail_size > 0 && setup.tail[setup.tail_size - 1] == '\n')
        setup.tail_size--;
    setup.exited = false;
    if (WIFEXITED(setup.status) && WEXITSTATUS(setup.status) == 0) {
        status_set_ready();
        service_ready();
    } else if (setup.tail_size > 0) {
        snprintf(text + n, sizeof text - (size_t)n, "%.*s", (int)setup.tail_size, setup.tail);
        status_set_failed(text);
    } else {
        snprintf(text + n, sizeof text - (size_t)n, WIFEXITED(setup.status) ? "exit code %d" : "signal %d",
                 WIFEXITED(setup.status) ? WEXITSTATUS(setup.status) : WTERMSIG(setup.status));
        status_set_failed(text);
    }
}

void setup_turn(void) {
    if (setup.steps >= 0)
        setup_steps();
    if (setup.output >= 0)
        setup_output();
    if (setup.exited)
        setup_ended();
}

void setup_fds(struct pollfd *fds) {
    fds[P_STEPS] = (struct pollfd){.fd = setup.steps, .events = POLLIN};
    fds[P_SETUP] = (struct pollfd){.fd = setup.output, .events = POLLIN};
}

void setup_io(const struct pollfd *fds) {
    if (fds[P_STEPS].revents)
        setup_steps();
    if (fds[P_SETUP].revents)
        setup_output();
}

bool setup_exited(pid_t pid, int status) {
    if (pid != setup.pid)
        return false;
    setup.pid = 0;
    setup.status = status;
    setup.exited = true;
    return true;
}
