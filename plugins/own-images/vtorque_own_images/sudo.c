/* sudo(8) for images that lack it: the job's user becomes root of the guest, without a password.
 * With root=true this user may do everything in the guest. Other users of the guest, such as those
 * of services, may not become root, so the caller is compared with the job's user. */
#include "agent.h"

#include <errno.h>
#include <getopt.h>
#include <grp.h>
#include <pwd.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

static _Noreturn void fail(const char *what, const char *why) {
    fprintf(stderr, "sudo: %s%s\n", what, why);
    exit(1);
}

static void set_number(const char *name, unsigned long value) {
    char text[32];
    snprintf(text, sizeof text, "%lu", value);
    setenv(name, text, 1);
}

/* Many images lack the line of root in passwd(5). */
static struct passwd *find_target(const char *name) {
    static struct passwd root = {.pw_name = "root", .pw_dir = "/root", .pw_shell = "/bin/sh"};
    struct passwd *found = name[0] == '#' ? getpwuid((uid_t)strtoul(name + 1, NULL, 10)) : getpwnam(name);
    if (found == NULL && (strcmp(name, "root") == 0 || strcmp(name, "#0") == 0))
        return &root;
    if (found == NULL)
        fail("unknown user: ", name);
    return found;
}

static void become(const struct passwd *target) {
    if ((target->pw_uid == 0 ? setgroups(0, NULL) : initgroups(target->pw_name, target->pw_gid)) < 0 ||
        setresgid(target->pw_gid, target->pw_gid, target->pw_gid) < 0 ||
        setresuid(target->pw_uid, target->pw_uid, target->pw_uid) < 0)
        fail("cannot become ", target->pw_name);
}

static void set_environment(const struct passwd *target, bool keep_home, uid_t caller, gid_t group) {
    static const char sbin[] = ":/usr/local/sbin:/usr/sbin:/sbin";
    const char *path = getenv("PATH");
    char all[8192];
    if (path != NULL && strlen(path) < sizeof all - sizeof sbin) {
        snprintf(all, sizeof all, "%s%s", path, sbin);
        setenv("PATH", all, 1);
    }
    if (!keep_home)
        setenv("HOME", target->pw_dir, 1);
    setenv("USER", target->pw_name, 1);
    setenv("LOGNAME", target->pw_name, 1);
    setenv("SHELL", target->pw_shell, 1);
    setenv("SUDO_USER", conf.user, 1);
    set_number("SUDO_UID", caller);
    set_number("SUDO_GID", group);
}

int main(int argc, char **argv) {
    static const struct option names[] = {
        {"login", no_argument, NULL, 'i'}, {"non-interactive", no_argument, NULL, 'n'},
        {"preserve-env", optional_argument, NULL, 'E'}, {"set-home", no_argument, NULL, 'H'},
        {"shell", no_argument, NULL, 's'}, {"user", required_argument, NULL, 'u'},
        {"validate", no_argument, NULL, 'v'}, {NULL, 0, NULL, 0}};
    const char *user = "root";
    bool login = false, shell = false, keep_home = false, only_check = false;
    uid_t caller = getuid();
    gid_t group = getgid();
    char error[512];
    if (geteuid() != 0)
        fail("this guest has no root inside: ", "submit the job with -vm root=true");
    if (!conf_read("/run/vtorque/agent.conf", &conf, error, sizeof error))
        fail(error, "");
    if (caller != 0 && caller != conf.uid)
        fail("only the job's user can become root: ", conf.user);
    for (int option; (option = getopt_long(argc, argv, "+EHKPSiknsvu:", names, NULL)) != -1;) {
        switch (option) {
        case 'E': keep_home = true; break;
        case 'H': keep_home = false; break;
        case 'i': login = true; break;
        case 's': shell = true; break;
        case 'u': user = optarg; break;
        case 'v': only_check = true; break;
        case '?': fail("this sudo has few options: ", "install the package sudo for others");
        default: break; /* K P S k n concern passwords and groups */
        }
    }
    for (; optind < argc && strchr(argv[optind], '=') != NULL; optind++)
        putenv(argv[optind]);
    if (optind == argc && !login && !shell && !only_check)
        fail("usage: sudo [-EHis] [-u USER] [NAME=VALUE...] COMMAND...", "");
    struct passwd *target = find_target(user);
    become(target);
    if (only_check)
        return 0;
    set_environment(target, keep_home && !login, caller, group);
    if (login && chdir(target->pw_dir) < 0)
        fprintf(stderr, "sudo: %s: %s\n", target->pw_dir, strerror(errno));
    if (login || shell) {
        char **words = calloc((size_t)argc + 5, sizeof *words);
        size_t n = 0;
        if (words == NULL)
            fail("no memory", "");
        words[n++] = target->pw_shell;
        if (login)
            words[n++] = "-l";
        if (optind < argc) {
            words[n++] = "-c";
            words[n++] = "exec \"$0\" \"$@\"";
        }
        memcpy(words + n, argv + optind, (size_t)(argc - optind) * sizeof *words);
        execv(target->pw_shell, words);
        fail(target->pw_shell, ": cannot be run");
    }
    execvp(argv[optind], argv + optind);
    fail(argv[optind], errno == ENOENT ? ": command not found" : ": cannot be run");
}
