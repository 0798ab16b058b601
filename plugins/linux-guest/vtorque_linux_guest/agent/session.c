/* Frames from the host: finding the HELLO, checking headers, handing payloads on. */
#include "agent.h"

#include <stdio.h>
#include <string.h>

enum { INPUT = 2 * (HEADER + PAYLOAD_MAX) };

/* Header and magic of a HELLO: what is looked for after a disconnect, garbage or at the start. */
static const uint8_t hello_start[16] = {F_HELLO, 0, 0, 0, HELLO_SIZE, 0, 0, 0,
                                        'v', 'T', 'o', 'r', 'q', 'u', 'e', '\n'};
static uint8_t input[INPUT];
static size_t filled;
static bool scanning = true;

static void fail(const char *why) {
    put_frame(F_ERROR, 0, why, strlen(why));
    scanning = true;
    job_abandon(false);
}

void session_lost(void) {
    scanning = true;
    filled = 0;
    job_abandon(false);
}

/* What is wrong with a header, known before any payload is waited for. */
static const char *bad_header(const uint8_t *h) {
    static const struct { uint8_t streams; uint32_t min, max; } rules[] = {
        [F_HELLO] = {1, HELLO_SIZE, HELLO_SIZE},
        [F_FILE] = {2, 1, PAYLOAD_MAX},
        [F_START] = {2, 0, PAYLOAD_MAX},
        [F_DATA] = {1, 1, PAYLOAD_MAX},
        [F_EOF] = {3, 0, 0},
        [F_CREDIT] = {3, 4, 4},
        [F_SIGNAL] = {1, 4, 4},
        [F_WINSIZE] = {1, 8, 8},
    };
    uint32_t length = get_u32(h + 4);
    if (h[0] < F_HELLO || h[0] > F_WINSIZE)
        return "unknown frame type";
    if (h[1] >= rules[h[0]].streams || get_u16(h + 2) != 0)
        return "bad stream or reserved field in a frame header";
    if (length < rules[h[0]].min || length > rules[h[0]].max)
        return "bad frame length";
    return NULL;
}

/* A new session: everything older is dropped, a job of the old one killed. */
static const char *hello(const uint8_t *p) {
    uint8_t reply[HELLO_SIZE];
    uint32_t window = get_u32(p + 20);
    if (memcmp(p, hello_start + HEADER, 8) != 0)
        return "bad HELLO";
    run_port.head = run_port.tail = 0;
    job_abandon(true);
    memcpy(reply, p, 16);
    put_u16(reply + 16, PROTOCOL);
    put_u16(reply + 18, 0);
    put_u32(reply + 20, STDIN_WINDOW);
    put_frame(F_HELLO, 0, reply, sizeof reply);
    if (status_failure() != NULL)
        return status_failure();
    if (get_u16(p + 16) != PROTOCOL)
        return "the agent speaks protocol 1 only: rebuild the image";
    if (window == 0 || window > 1u << 30)
        return "bad window in HELLO";
    job_window(window);
    return NULL;
}

static const char *take(const uint8_t *h, const uint8_t *p) {
    uint32_t n = get_u32(h + 4);
    switch (h[0]) {
    case F_HELLO: return hello(p);
    case F_FILE: return job_running() ? "FILE while a job runs" : start_files_add(h[1], p, n);
    case F_START: return job_start(p, n, h[1] == 1);
    case F_DATA: return job_stdin(p, n);
    case F_EOF: job_eof(h[1]); return NULL;
    case F_CREDIT: return job_credit(h[1], get_u32(p));
    case F_SIGNAL: return job_signal(get_u32(p));
    default: job_winsize(p); return NULL;
    }
}

/* Moves to the next HELLO; false if there is none yet. Keeps what may be the start of one. */
static bool find_hello(size_t *pos) {
    uint8_t *hit = memmem(input + *pos, filled - *pos, hello_start, sizeof hello_start);
    if (hit == NULL) {
        size_t keep = filled - *pos < sizeof hello_start - 1 ? filled - *pos : sizeof hello_start - 1;
        *pos = filled - keep;
        return false;
    }
    *pos = (size_t)(hit - input);
    scanning = false;
    return true;
}

void session_parse(void) {
    size_t pos = 0;
    while (run_port.up && !start_waits() && port_queued(&run_port) < RUN_QUEUE / 2) {
        const uint8_t *h = input + pos;
        const char *wrong;
        if (scanning && !find_hello(&pos))
            break;
        h = input + pos;
        if (filled - pos < HEADER)
            break;
        wrong = bad_header(h);
        if (wrong == NULL) {
            size_t whole = HEADER + get_u32(h + 4);
            if (filled - pos < whole)
                break;
            wrong = take(h, h + HEADER);
            pos += whole;
        } else {
            pos += 1;
        }
        if (wrong != NULL)
            fail(wrong);
    }
    if (pos > 0 && filled > 0) {
        memmove(input, input + pos, filled - pos);
        filled -= pos;
    }
}

bool session_wants_input(void) {
    return !start_waits() && port_queued(&run_port) < RUN_QUEUE / 2 && filled < INPUT;
}

void session_read(void) {
    ssize_t n = 1;
    for (int turns = 0; n > 0 && turns < 16 && session_wants_input(); turns++) {
        n = port_read(&run_port, input + filled, INPUT - filled);
        filled += (size_t)n;
        session_parse();
    }
}
