/* A START: its files in the spool, its parameters, and the child that becomes the job.
 * The child's identity comes from conf alone. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/ioctl.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

static char names[FILES_MAX][256], paths[FILES_MAX][1300];
static size_t count, bytes;
static int spool = -1, current = -1;
static uint8_t *received; /* START payloads so far */
static size_t received_size;
static bool complete;
struct start start;
static char trouble[512]; /* the first failed write: an answer to START, not a protocol error */

static void file_trouble(const char *name) {
    if (trouble[0] == '\0')
        snprintf(trouble, sizeof trouble, "cannot store %.255s in %.200s: %s", name, conf.spool, strerror(errno));
}

bool start_begun(void) { return received_size > 0; }
bool start_waits(void) { return complete; }

const char *start_files_error(void) { return trouble[0] != '\0' ? trouble : NULL; }

void start_files_close(void) {
    if (current >= 0)
        close(current);
    current = -1;
}

void start_files_drop(void) {
    start_files_close();
    while (count > 0)
        unlinkat(spool, names[--count], 0);
    bytes = 0;
    trouble[0] = '\0';
}

static bool good_name(const uint8_t *p, size_t n) {
    if (n > 255 || (n == 1 && p[0] == '.') || (n == 2 && p[0] == '.' && p[1] == '.'))
        return false;
    for (size_t i = 0; i < n; i++)
        if (p[i] < ' ' || p[i] == 127 || p[i] == '/')
            return false;
    return true;
}

static const char *file_open(const uint8_t *p, size_t n) {
    start_files_close();
    if (count == FILES_MAX || !good_name(p, n))
        return "too many files or a bad file name";
    char *name = names[count++];
    memcpy(name, p, n);
    name[n] = '\0';
    snprintf(paths[count - 1], sizeof paths[0], "%s/%s", conf.spool, name);
    if (spool < 0)
        spool = open(conf.spool, O_RDONLY | O_DIRECTORY | O_CLOEXEC);
    unlinkat(spool, name, 0);
    current = openat(spool, name, O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0700);
    if (current < 0 || fchown(current, conf.uid, conf.gid) < 0 || fchmod(current, 0700) < 0)
        file_trouble(name);
    return NULL;
}

/* FILE, stream 0: the name of a new file; stream 1: more of its content. */
const char *start_files_add(int stream, const uint8_t *p, size_t n) {
    if (stream == 0)
        return file_open(p, n);
    if (count == 0 || n > FILE_BYTES_MAX - bytes)
        return "file content without a name, or more than 16 MiB";
    bytes += n;
    while (n > 0 && current >= 0 && trouble[0] == '\0') {
        ssize_t done = write(current, p, n);
        if (done <= 0) {
            file_trouble(names[count - 1]);
            break;
        }
        p += done;
        n -= (size_t)done;
    }
    return NULL;
}

static char *file_path(const char *name) {
    for (size_t i = 0; i < count; i++)
        if (strcmp(names[i], name) == 0)
            return paths[i];
    return NULL;
}

static void start_free(struct start *s) {
    free(s->argv);
    free(s->env);
    *s = (struct start){.umask = 022};
}

/* One tag-length-value element; texts end with their only NUL. */
static const char *element(struct start *s, int tag, uint8_t *v, size_t n) {
    static const int fixed[] = {[T_UMASK] = 4, [T_RLIMIT] = 17, [T_PTY] = 8, [T_MODE] = 1};
    char *text = (char *)v;
    bool is_text = tag >= T_ARG && tag <= T_CWD;
    if (is_text && (n == 0 || memchr(v, 0, n) != v + n - 1))
        return "a text in START that does not end with its only NUL";
    if (!is_text && (tag < T_ARG || tag > T_MODE || n != (size_t)(tag == T_MERGE ? 0 : fixed[tag])))
        return "unknown element or bad length in START";
    switch (tag) {
    case T_ARG: s->argv[s->argc++] = text; return NULL;
    case T_FILEARG:
        s->argv[s->argc] = file_path(text);
        s->sent = true;
        return s->argv[s->argc++] != NULL ? NULL : "START names a file that was not sent";
    case T_ENV:
        s->env[s->envc++] = text;
        return strchr(text, '=') > text ? NULL : "an environment entry without a name";
    case T_CWD: s->cwd = text; return NULL;
    case T_UMASK: s->umask = get_u32(v) & 0777; return NULL;
    case T_RLIMIT:
        if (s->nlimits == LIMITS_MAX || v[0] >= LIMITS_MAX)
            return "bad resource limit";
        s->limits[s->nlimits++] = (struct limit){v[0], get_u64(v + 1), get_u64(v + 9)};
        return NULL;
    case T_PTY:
        s->pty = true;
        for (int i = 0; i < 4; i++)
            s->winsize[i] = get_u16(v + 2 * i);
        return NULL;
    case T_MERGE: s->merge = true; return NULL;
    default: s->mode = v[0]; return v[0] <= M_LOGIN ? NULL : "unknown mode in START";
    }
}

/* The strings stay in p: it must live as long as s. */
static const char *start_parse(struct start *s, uint8_t *p, size_t n) {
    size_t slots = n / 5 + 3; /* an element has a head of 5 bytes; a shell in front; NULL */
    const char *wrong = NULL;
    start_free(s);
    s->argv = calloc(slots, sizeof *s->argv);
    s->env = calloc(slots, sizeof *s->env);
    if (s->argv == NULL || s->env == NULL)
        return "no memory for START";
    s->argc = 1; /* argv[0] is kept for the shell */
    for (size_t at = 0; at < n && wrong == NULL;) {
        if (n - at < 5 || get_u32(p + at + 1) > n - at - 5)
            return "truncated element in START";
        size_t length = get_u32(p + at + 1);
        wrong = element(s, p[at], p + at + 5, length);
        at += 5 + length;
    }
    if (wrong == NULL && s->argc == 1 && s->mode == M_DIRECT)
        wrong = "START without a command";
    return wrong;
}

void start_drop(void) {
    free(received);
    received = NULL;
    received_size = 0;
    complete = false;
    start_free(&start);
}

const char *start_add(const uint8_t *p, size_t n, bool last) {
    if (n > START_MAX - received_size)
        return "START is longer than 2 MiB";
    uint8_t *grown = realloc(received, received_size + n + 1);
    if (grown == NULL)
        return "no memory for START";
    received = grown;
    memcpy(received + received_size, p, n);
    received_size += n;
    complete = last;
    const char *wrong = last ? start_parse(&start, received, received_size) : NULL;
    if (wrong != NULL)
        start_drop();
    return wrong;
}

static _Noreturn void give_up(int error_fd, const char *what, const char *name, const char *why) {
    char text[512];
    int n = snprintf(text, sizeof text, "%s%.300s: %s", what, name, why);
    if (write(error_fd, text, (size_t)n < sizeof text ? (size_t)n : sizeof text - 1) < 0)
        _exit(126);
    _exit(127);
}

static void drop_privileges(int error_fd) {
    if (conf.root && geteuid() == 0) {
        if (setgroups(0, NULL) < 0)
            give_up(error_fd, "cannot drop the groups of ", "root", strerror(errno));
        return;
    }
    if (geteuid() == 0) {
        if (setgroups(conf.ngroups, conf.groups) < 0 || setresgid(conf.gid, conf.gid, conf.gid) < 0 ||
            setresuid(conf.uid, conf.uid, conf.uid) < 0)
            give_up(error_fd, "cannot become ", conf.user, strerror(errno));
    }
    if (getuid() != conf.uid || geteuid() != conf.uid || getgid() != conf.gid || getegid() != conf.gid)
        give_up(error_fd, "cannot become ", conf.user, "still somebody else");
}

/* Never above what the guest gives its users: only lowering has an effect. */
static void lower_limits(const struct start *s) {
    for (size_t i = 0; i < s->nlimits; i++) {
        struct rlimit now;
        if (getrlimit(s->limits[i].resource, &now) < 0)
            continue;
        if (s->limits[i].hard < now.rlim_max)
            now.rlim_max = s->limits[i].hard;
        now.rlim_cur = s->limits[i].soft < now.rlim_max ? s->limits[i].soft : now.rlim_max;
        setrlimit(s->limits[i].resource, &now);
    }
}

/* Use the login shell in the guest's passwd(5), where setup.sh writes a shell that the image has.
 * Without a line of the user keep conf.shell, the login shell on the node. */
static void use_login_shell(struct start *s) {
    FILE *file = fopen("/etc/passwd", "re");
    struct passwd *found = NULL;
    while (file != NULL && (found = fgetpwent(file)) != NULL && strcmp(found->pw_name, conf.user) != 0)
        continue;
    if (found != NULL && found->pw_shell[0] == '/')
        snprintf(conf.shell, sizeof conf.shell, "%s", found->pw_shell);
    if (file != NULL)
        fclose(file);
    static char entry[sizeof conf.shell + 8];
    snprintf(entry, sizeof entry, "SHELL=%s", conf.shell);
    for (size_t i = 0; i < s->envc; i++)
        if (strncmp(s->env[i], "SHELL=", 6) == 0)
            s->env[i] = entry;
}

static const char *base_name(const char *path) {
    const char *slash = strrchr(path, '/');
    return slash != NULL ? slash + 1 : path;
}

/* Give up if the interpreter that a script's first line names (execve(2)) does not exist. */
static void check_interpreter(const char *script, int error_fd) {
    char line[256], what[300];
    int fd = open(script, O_RDONLY | O_CLOEXEC);
    ssize_t n = fd >= 0 ? read(fd, line, sizeof line - 1) : 0;
    if (fd >= 0)
        close(fd);
    if (n < 3 || line[0] != '#' || line[1] != '!')
        return;
    line[n] = '\0';
    char *rest = NULL, *name = strtok_r(line + 2, " \t\n", &rest);
    if (name == NULL || name[0] != '/' || access(name, F_OK) == 0 || (errno != ENOENT && errno != ENOTDIR))
        return;
    snprintf(what, sizeof what, "its interpreter %s (#! line) does not exist here", name);
    give_up(error_fd, "cannot run ", base_name(script), what);
}

static _Noreturn void run(char **argv, int error_fd) {
    if (strchr(argv[0], '/') == NULL)
        execvp(argv[0], argv);
    else
        execve(argv[0], argv, environ);
    if (errno == ENOEXEC) { /* a script without an interpreter line: as a shell does it */
        argv[-1] = conf.shell;
        execve(conf.shell, argv - 1, environ);
    }
    int code = errno;
    if (code == ENOENT && strchr(argv[0], '/') != NULL && access(argv[0], F_OK) == 0) {
        check_interpreter(argv[0], error_fd);
        give_up(error_fd, "cannot run ", argv[0], "its interpreter or dynamic linker does not exist here");
    }
    errno = code;
    give_up(error_fd, "cannot run ", argv[0], strerror(errno));
}

static bool is_one_of(const char *words, const char *name) {
    char word[64];
    int n = snprintf(word, sizeof word, " %s ", name);
    return n < (int)sizeof word && strstr(words, word) != NULL;
}

/* The shell as a login shell whose command is the rest, as batch systems start scripts; alone if
 * there is no rest. What is no shell that we know runs the rest as its own arguments. */
static _Noreturn void login_exec(const struct start *s, int error_fd) {
    char *shell = s->argc > 1 && s->argv[1][0] != '\0' ? s->argv[1] : conf.shell, name[256];
    char **argv = calloc(s->argc + 4, sizeof *argv), *command = NULL;
    size_t n = 0;
    if (argv == NULL)
        give_up(error_fd, "cannot run the shell ", shell, "no memory");
    if (is_one_of(" sh bash rbash dash ash ksh ksh93 mksh zsh ", base_name(shell)))
        command = "exec \"$0\" \"$@\"";
    else if (is_one_of(" csh tcsh ", base_name(shell)))
        command = "exec $argv:q";
    snprintf(name, sizeof name, "-%.200s", base_name(shell));
    argv[n++] = command != NULL || s->argc < 3 ? name : shell;
    if (command != NULL && s->argc > 2) {
        if (s->sent) /* the shell's own message names neither the interpreter nor its absence */
            check_interpreter(s->argv[2], error_fd);
        argv[n++] = "-c";
        argv[n++] = command;
    }
    for (size_t i = 2; i < s->argc; i++)
        argv[n++] = s->argv[i];
    execve(shell, argv, environ);
    give_up(error_fd, "cannot run the shell ", shell, strerror(errno));
}

/* With the environment of the container, and its entry point before what the user sent. A login
 * shell would read what is there for others than the container, and lose its PATH. */
static _Noreturn void container_exec(const struct start *s, int error_fd) {
    char **argv = s->argv + 1, *login[] = {conf.shell, "-l", NULL};
    if (s->mode == M_LOGIN)
        argv = s->argc < 3 ? login : s->argv + (s->argv[1][0] != '\0' ? 1 : 2);
    else if (s->mode == M_SHELL) {
        s->argv[0] = conf.shell;
        argv = s->argv;
    }
    if (!container_enter(&environ, &argv, s->sent || s->mode == M_LOGIN))
        give_up(error_fd, "the container's settings in ", conf.container, "cannot be used");
    run(argv, error_fd);
}

/* In the child, never returns: becomes the job, or writes why not to error_fd. */
_Noreturn void start_exec(struct start *s, const int fds[3], int error_fd) {
    setsid();
    for (int i = 0; i < 3; i++)
        if (dup2(fds[i], i) < 0)
            give_up(error_fd, "dup2", "", strerror(errno));
    if (s->pty && ioctl(0, TIOCSCTTY, 0) < 0)
        give_up(error_fd, "controlling terminal", "", strerror(errno));
    child_reset();
    drop_privileges(error_fd);
    umask(s->umask);
    lower_limits(s);
    const char *cwd = s->cwd != NULL ? s->cwd : conf.home;
    if (chdir(cwd) < 0)
        give_up(error_fd, "working directory ", cwd, strerror(errno));
    use_login_shell(s);
    environ = s->env;
    if (conf.container[0] != '\0')
        container_exec(s, error_fd);
    if (s->mode == M_LOGIN)
        login_exec(s, error_fd);
    if (s->mode == M_SHELL) {
        s->argv[0] = conf.shell;
        execve(conf.shell, s->argv, s->env);
        give_up(error_fd, "cannot run the shell ", conf.shell, strerror(errno));
    }
    run(s->argv + 1, error_fd);
}
