/* An image made from a container: its environment and entry point, from the file "container" in the
 * directory that conf names. Entries end with NUL: NAME=value (what the job has not set itself) or
 * !NAME=value (in any case), an empty one, then words that go before the command of a user's part. */
#include "agent.h"

#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

enum { CONTAINER_MAX = 1024 * 1024 };

static char *slurp(size_t *size) {
    char path[sizeof conf.container + 16];
    struct stat st;
    char *text = NULL;
    snprintf(path, sizeof path, "%s/container", conf.container);
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NOFOLLOW);
    if (fd < 0)
        return NULL;
    if (fstat(fd, &st) == 0 && S_ISREG(st.st_mode) && (st.st_mode & 022) == 0 &&
        (st.st_uid == 0 || st.st_uid == geteuid()) && st.st_size > 0 && st.st_size <= CONTAINER_MAX)
        text = malloc((size_t)st.st_size);
    *size = text == NULL ? 0 : (size_t)st.st_size;
    for (size_t n = 0; text != NULL && n < *size;) {
        ssize_t got = read(fd, text + n, *size - n);
        if (got <= 0) {
            free(text);
            text = NULL;
        } else {
            n += (size_t)got;
        }
    }
    close(fd);
    if (text != NULL && text[*size - 1] != '\0') {
        free(text);
        text = NULL;
    }
    return text;
}

static char **find(char **env, size_t n, const char *entry) {
    size_t name = strcspn(entry, "=") + 1;
    for (size_t i = 0; i < n; i++)
        if (strncmp(env[i], entry, name) == 0)
            return env + i;
    return env + n;
}

/* In the child that becomes the job: makes env and argv what they are in the container. False if
 * the file cannot be used. */
bool container_enter(char ***env, char ***argv, bool wrap) {
    size_t size, entries = 0, nenv = 0, nargv = 0, words = 0, at = 0;
    char *text = slurp(&size);
    if (text == NULL)
        return false;
    for (size_t i = 0; i < size; i++)
        entries += text[i] == '\0';
    while ((*env)[nenv] != NULL)
        nenv++;
    while ((*argv)[nargv] != NULL)
        nargv++;
    char **new_env = calloc(nenv + entries + 1, sizeof *new_env);
    char **new_argv = calloc(nargv + entries + 2, sizeof *new_argv);
    if (new_env == NULL || new_argv == NULL)
        return false;
    new_argv++; /* run() may put a shell in front */
    memcpy(new_env, *env, nenv * sizeof *new_env);
    for (; at < size && text[at] != '\0'; at += strlen(text + at) + 1) {
        bool always = text[at] == '!';
        char *entry = text + at + always, **slot = find(new_env, nenv, entry);
        if (strchr(entry, '=') == NULL || strchr(entry, '=') == entry)
            return false;
        if (slot == new_env + nenv)
            nenv++;
        else if (!always)
            continue;
        *slot = entry;
    }
    for (at++; wrap && at < size; at += strlen(text + at) + 1)
        new_argv[words++] = text + at;
    memcpy(new_argv + words, *argv, nargv * sizeof *new_argv);
    *env = new_env;
    *argv = new_argv;
    return true;
}
