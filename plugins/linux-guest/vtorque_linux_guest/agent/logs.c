/* The end of a file that the host wants to see, because the guest is not ready: lines of base64,
 * so that nothing in a log can be taken for another line. */
#include "agent.h"

#include <fcntl.h>
#include <sys/stat.h>
#include <unistd.h>

enum { PIECE = 3000, TEXT = PIECE / 3 * 4 };

static int file = -1;
static size_t left;
static bool asked;

void log_drop(void) {
    if (file >= 0)
        close(file);
    file = -1;
    asked = false;
}

void log_ask(const char *path) {
    struct stat st;
    log_drop();
    asked = true;
    left = LOG_MAX;
    file = open(path, O_RDONLY | O_NONBLOCK | O_NOCTTY | O_CLOEXEC);
    if (file < 0)
        return;
    if (fstat(file, &st) < 0 || !S_ISREG(st.st_mode))
        left = 0; /* a pipe, a device: nothing that ends */
    else if (st.st_size > LOG_MAX)
        lseek(file, st.st_size - LOG_MAX, SEEK_SET);
}

static void base64(const uint8_t *from, size_t n, char *to) {
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    for (size_t i = 0; i < n; i += 3) {
        uint32_t bits = (uint32_t)from[i] << 16;
        bits |= i + 1 < n ? (uint32_t)from[i + 1] << 8 : 0;
        bits |= i + 2 < n ? from[i + 2] : 0;
        *to++ = digits[bits >> 18];
        *to++ = digits[bits >> 12 & 63];
        *to++ = i + 1 < n ? digits[bits >> 6 & 63] : '=';
        *to++ = i + 2 < n ? digits[bits & 63] : '=';
    }
    *to = '\0';
}

/* A piece at a time, and only into an empty queue: what else there is to say always has room. */
void log_turn(void) {
    while (asked && status_port.up && port_queued(&status_port) == 0) {
        uint8_t data[PIECE];
        char text[TEXT + 1];
        ssize_t n = file < 0 || left == 0 ? 0 : read(file, data, left < PIECE ? left : PIECE);
        if (n > 0) {
            base64(data, (size_t)n, text);
            status_line("LOG ", text);
            left -= (size_t)n;
        } else {
            status_line("LOGGED", "");
            log_drop();
        }
        port_flush(&status_port);
    }
}
