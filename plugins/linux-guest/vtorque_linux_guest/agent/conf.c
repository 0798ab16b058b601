/* The root-owned configuration: key=value lines, parsed strictly. */
#include "agent.h"

#include <errno.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CONF_MAX = 65536 };

struct conf conf;

static bool number(const char *text, unsigned long max, unsigned long *out) {
    if (*text == '\0' || strlen(text) > 10 || strspn(text, "0123456789") != strlen(text))
        return false;
    *out = strtoul(text, NULL, 10);
    return *out <= max;
}

static bool group_list(const char *text, struct conf *c) {
    char item[16];
    c->ngroups = 0;
    while (*text != '\0') {
        size_t n = strcspn(text, ",");
        unsigned long gid;
        if (n >= sizeof item || c->ngroups == GROUPS_MAX)
            return false;
        memcpy(item, text, n);
        item[n] = '\0';
        if (!number(item, 4294967294UL, &gid))
            return false;
        c->groups[c->ngroups++] = (gid_t)gid;
        text += n;
        if (*text == ',' && *++text == '\0')
            return false;
    }
    return true;
}

static bool copy(char *to, size_t size, const char *value, bool path) {
    if (*value == '\0' || strlen(value) >= size || (path && *value != '/'))
        return false;
    strcpy(to, value);
    return true;
}

/* Each key sets its bit, so that a repeated or a missing one is seen. */
static bool assign(struct conf *c, const char *key, const char *value, unsigned *seen) {
    static const char *const keys[] = {"user", "uid", "gid", "groups", "home", "shell",
                                       "status", "run", "spool", "setup", "sync", "container",
                                       "lines", "lines_port", "root"};
    unsigned long n = 0;
    unsigned k = 0;
    bool ok = false;
    while (k < sizeof keys / sizeof *keys && strcmp(keys[k], key) != 0)
        k++;
    if (k == sizeof keys / sizeof *keys || (*seen & (1u << k)))
        return false;
    *seen |= 1u << k;
    switch (k) {
    case 0: return copy(c->user, sizeof c->user, value, false);
    case 1: ok = number(value, 4294967294UL, &n) && n > 0; c->uid = (uid_t)n; return ok;
    case 2: ok = number(value, 4294967294UL, &n) && n > 0; c->gid = (gid_t)n; return ok;
    case 3: return group_list(value, c);
    case 4: return copy(c->home, sizeof c->home, value, true);
    case 5: return copy(c->shell, sizeof c->shell, value, true);
    case 6: return copy(c->status, sizeof c->status, value, false);
    case 7: return copy(c->run, sizeof c->run, value, false);
    case 8: return copy(c->spool, sizeof c->spool, value, true);
    case 9: return copy(c->setup, sizeof c->setup, value, true);
    case 10: ok = number(value, 1, &n); c->sync = n == 1; return ok;
    case 11: return copy(c->container, sizeof c->container, value, true);
    case 12: return copy(c->lines, sizeof c->lines, value, true);
    case 13: return copy(c->lines_port, sizeof c->lines_port, value, false);
    default: ok = number(value, 1, &n); c->root = n == 1; return ok;
    }
}

static ssize_t slurp(const char *path, char *buf, size_t size, char *err, size_t err_size) {
    struct stat st;
    size_t n = 0;
    ssize_t got = 1;
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0 || fstat(fd, &st) < 0) {
        snprintf(err, err_size, "%s: %s", path, strerror(errno));
        if (fd >= 0)
            close(fd);
        return -1;
    }
    if (!S_ISREG(st.st_mode) || (st.st_uid != 0 && st.st_uid != geteuid()) || (st.st_mode & 022)) {
        snprintf(err, err_size, "%s: must be a file that only root can write", path);
        close(fd);
        return -1;
    }
    while (got > 0 && n < size - 1) {
        got = read(fd, buf + n, size - 1 - n);
        n += got > 0 ? (size_t)got : 0;
    }
    close(fd);
    buf[n] = '\0';
    if (got != 0 || strlen(buf) != n) {
        snprintf(err, err_size, "%s: unreadable, longer than %d bytes or not text", path, CONF_MAX);
        return -1;
    }
    return (ssize_t)n;
}

bool conf_read(const char *path, struct conf *c, char *err, size_t err_size) {
    static char text[CONF_MAX + 1];
    const unsigned required = 0x1b7; /* all but groups, status and what comes after spool */
    unsigned seen = 0, line = 0;
    if (slurp(path, text, sizeof text, err, err_size) < 0)
        return false;
    for (char *at = text, *next; *at != '\0'; at = next) {
        char *end = at + strcspn(at, "\n"), *eq;
        next = *end == '\n' ? end + 1 : end;
        *end = '\0';
        line++;
        if (*at == '\0' || *at == '#')
            continue;
        eq = strchr(at, '=');
        if (eq != NULL)
            *eq++ = '\0';
        if (eq == NULL || !assign(c, at, eq, &seen)) {
            snprintf(err, err_size, "%s line %u: bad, unknown or repeated key %.40s", path, line, at);
            return false;
        }
    }
    if ((seen & required) != required) {
        snprintf(err, err_size, "%s: needs user uid gid home shell run spool", path);
        return false;
    }
    if (geteuid() != 0 && (c->uid != geteuid() || c->gid != getegid())) {
        snprintf(err, err_size, "%s: only root can run jobs as another user than itself", path);
        return false;
    }
    return true;
}
