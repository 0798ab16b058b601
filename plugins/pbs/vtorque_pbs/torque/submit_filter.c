/* Torque's submit filter (qsub(1B), SUBMITFILTER): submits scripts with #VSUB lines as VM jobs.
 *
 * qsub runs this program as the user, with qsub's arguments, and submits its output instead of the
 * script. The site's own filter changes the script first, and may refuse it by its exit status. Only
 * a script with a #VSUB line before its first command goes through vsub.
 *
 * The setup defines SITE and VSUB, paths of the site's filter (empty if it has none) and of vsub. */
#include <errno.h>
#include <fcntl.h>
#include <signal.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#define REJECT 255 /* qsub reports an administrative rejection */

static _Noreturn void fail(const char *what) {
    dprintf(2, "vtorque: submit filter: %s: %s\n", what, strerror(errno));
    _exit(REJECT);
}

static char *read_all(int fd, size_t *length) {
    size_t size = 16384;
    char *text = NULL;
    for (*length = 0;; size *= 2) {
        text = realloc(text, size);
        if (!text)
            fail("the script does not fit into memory");
        while (*length < size) {
            ssize_t got = read(fd, text + *length, size - *length);
            if (got == 0)
                return text;
            if (got < 0 && errno != EINTR)
                fail("cannot read the script");
            *length += got > 0 ? (size_t)got : 0;
        }
    }
}

static int write_all(int fd, const char *text, size_t length) {
    while (length) {
        ssize_t put = write(fd, text, length);
        if (put < 0 && errno != EINTR)
            return -1;
        text += put > 0 ? put : 0;
        length -= put > 0 ? (size_t)put : 0;
    }
    return 0;
}

/* qsub reads directives up to the first line that is neither empty nor starts with # or a colon. */
static bool has_vsub_line(const char *text, size_t length) {
    const char *end = text + length;
    while (text < end && (*text == '#' || *text == ':' || *text == '\n')) {
        if (end - text > 5 && memcmp(text, "#VSUB", 5) == 0 && (text[5] == ' ' || text[5] == '\t'))
            return true;
        const char *newline = memchr(text, '\n', (size_t)(end - text));
        text = newline ? newline + 1 : end;
    }
    return false;
}

/* Starts a program with a pipe to its standard input (0) or from its output (1). */
static pid_t start(char **argv, int which, int *other) {
    int pipes[2];
    if (pipe2(pipes, O_CLOEXEC) < 0)
        fail("pipe2");
    pid_t child = fork();
    if (child < 0)
        fail("fork");
    if (child == 0) {
        dup2(pipes[which], which);
        execv(argv[0], argv);
        fail(argv[0]);
    }
    close(pipes[which]);
    *other = pipes[!which];
    return child;
}

/* Returns the exit status as a shell does. */
static int await(pid_t child) {
    int status;
    while (waitpid(child, &status, 0) < 0)
        if (errno != EINTR)
            fail("waitpid");
    return WIFEXITED(status) ? WEXITSTATUS(status) : 128 + WTERMSIG(status);
}

int main(int argc, char **argv) {
    size_t length;
    int fd = 0;
    pid_t site = -1;
    if (*SITE && access(SITE, X_OK) == 0) {
        argv[0] = SITE;
        site = start(argv, 1, &fd);
    }
    const char *text = read_all(fd, &length);
    int code = site < 0 ? 0 : await(site);
    if (code)
        return code;
    if (!has_vsub_line(text, length)) {
        if (write_all(1, text, length) < 0)
            fail("cannot write the script");
        return 0;
    }
    char *words[argc + 2];
    words[0] = VSUB, words[1] = "--filter";
    memcpy(words + 2, argv + 1, sizeof *argv * (size_t)argc); /* with the last NULL */
    pid_t vsub = start(words, 0, &fd);
    signal(SIGPIPE, SIG_IGN); /* vsub may end before it reads the script */
    write_all(fd, text, length);
    close(fd);
    return await(vsub) ? REJECT : 0;
}
