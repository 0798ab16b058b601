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
static uint8_t nonce[8];
static uint32_t taken, told, acked; /* of a session, modulo 2^32: bytes of its frames */

static void fail(const char *why) {
    put_frame(F_ERROR, 0, why, strlen(why));
    scanning = true;
    run_port.keeps = run_port.dropping = false;
    run_port.held_until = 0;
    job_abandon(false);
}

static void over(void) {
    run_port.keeps = run_port.dropping = false;
    run_port.held_until = 0;
    port_drop(&run_port);
    job_abandon(false);
}

/* The host has gone. A session that is held waits for it. */
void session_lost(void) {
    scanning = true;
    filled = 0;
    run_port.dropping = true;
    if (!run_port.keeps || run_port.held_until == 0)
        over();
}

static void tell_taken(int stream) {
    uint8_t position[4];
    put_u32(position, taken);
    put_frame(F_ACK, stream, position, sizeof position);
    told = taken;
}

/* The time is over in which a host may be away. One that has not gone is asked to resume, since what
 * it has sent meanwhile was dropped. */
void session_tick(uint64_t now) {
    if (run_port.tells && run_port.up) {
        tell_taken(0);
        port_flush(&run_port); /* before root hears that it is held, and has it stand still */
    }
    run_port.tells = false;
    if (run_port.held_until == 0 || now < run_port.held_until)
        return;
    run_port.held_until = 0;
    if (!run_port.up)
        over();
    else if (run_port.dropping)
        tell_taken(1);
}

int session_timeout(uint64_t now) {
    if (run_port.held_until == 0)
        return -1;
    return run_port.held_until > now ? (int)(run_port.held_until - now) : 0;
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
        [F_ACK] = {1, 4, 4},
    };
    uint32_t length = get_u32(h + 4);
    if (h[0] < F_HELLO || (h[0] > F_WINSIZE && h[0] != F_ACK))
        return "unknown frame type";
    if (h[1] >= rules[h[0]].streams || get_u16(h + 2) != 0)
        return "bad stream or reserved field in a frame header";
    if (length < rules[h[0]].min || length > rules[h[0]].max)
        return "bad frame length";
    return NULL;
}

/* The host goes on with this session. It says how much of it it has, and is told the same. */
static bool resume(const uint8_t *p, uint8_t *reply) {
    uint32_t has = get_u32(p + 20);
    put_u16(reply + HEADER + 18, get_u16(p + 18));
    put_u32(reply + HEADER + 20, taken);
    if (!run_port.keeps || memcmp(p + 8, nonce, sizeof nonce) != 0 ||
        !port_again(&run_port, (uint32_t)(has - acked), reply, HEADER + HELLO_SIZE))
        return false;
    acked = has;
    told = taken;
    run_port.dropping = false;
    return true;
}

/* A new session: everything older is dropped, a job of the old one killed. */
static const char *hello(const uint8_t *p) {
    uint8_t reply[HEADER + HELLO_SIZE];
    uint32_t window = get_u32(p + 20);
    uint16_t flags = get_u16(p + 18);
    if (memcmp(p, hello_start + HEADER, 8) != 0)
        return "bad HELLO";
    put_header(reply, F_HELLO, 0, HELLO_SIZE);
    memcpy(reply + HEADER, p, 16);
    put_u16(reply + HEADER + 16, PROTOCOL);
    if (flags & H_RESUME && resume(p, reply))
        return NULL;
    put_u16(reply + HEADER + 18, (uint16_t)((flags & ~H_RESUME) | H_KEEPS));
    put_u32(reply + HEADER + 20, STDIN_WINDOW);
    port_drop(&run_port);
    port_again(&run_port, 0, reply, sizeof reply);
    run_port.keeps = flags & H_KEEPS;
    run_port.dropping = false;
    run_port.held_until = 0;
    taken = told = acked = 0;
    if (flags & H_RESUME)
        return "that session is over";
    memcpy(nonce, p + 8, sizeof nonce);
    job_abandon(true);
    if (status_failure() != NULL)
        return status_failure();
    if (get_u16(p + 16) != PROTOCOL)
        return "the agent speaks protocol 1 only: rebuild the image";
    if (window == 0 || window > 1u << 30)
        return "bad window in HELLO";
    job_window(window);
    return NULL;
}

static const char *acknowledged(uint32_t position) {
    if (position - acked > INT32_MAX) /* it was sent again: a resume has said more since */
        return NULL;
    if (!run_port.keeps || !port_ack(&run_port, (uint32_t)(position - acked)))
        return "bad ACK";
    acked = position;
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
    case F_ACK: return acknowledged(get_u32(p));
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
        scanning |= run_port.dropping;
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
            taken += h[0] == F_HELLO ? 0 : (uint32_t)whole;
            if (run_port.keeps && taken - told >= ACK_EVERY)
                tell_taken(0);
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
