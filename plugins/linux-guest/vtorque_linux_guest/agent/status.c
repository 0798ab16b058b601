/* What the host is told on the status port: the set-up's step, then its result; what it asks there. */
#include "agent.h"

#include <stdio.h>
#include <string.h>
#include <time.h>

static char step[STEP_MAX + 1] = "agent";
static char result[4096];  /* READY or FAILED, once it is known */
static bool failed, step_sent, result_sent;

const char *status_failure(void) { return failed ? result + strlen("FAILED ") : NULL; }

bool status_known(void) { return result[0] != '\0'; }

bool status_ready_sent(void) { return result_sent && !failed; }

const char *status_step(void) { return step; }

void status_set_step(const char *name) {
    snprintf(step, sizeof step, "%s", name);
    step_sent = status_line("STEP ", step);
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

void status_set_ready(void) { set_result("READY 1", ""); }

void status_set_failed(const char *text) {
    failed = true;
    set_result("FAILED ", text);
}

void status_again(void) { step_sent = result_sent = false; }

/* The host always gets the latest step and the result, however late or often it connects. */
void status_send(void) {
    if (!step_sent)
        step_sent = status_line("STEP ", step);
    if (step_sent && !result_sent && status_known())
        result_sent = status_line(result, "");
}

/* The host's end of the run port will be broken, perhaps, and come again: seconds. Answers 0 if there is
 * no session that could go on. That its job shell is told, too, an older agent does not say. */
static void hold(const char *text) {
    unsigned seconds;
    char answer[24] = "0";
    if (sscanf(text, "%9u", &seconds) != 1)
        return;
    if (run_port.keeps) {
        run_port.held_until = now_ms() + seconds * 1000ull;
        run_port.dropping = run_port.tells = true;
        snprintf(answer, sizeof answer, "%u tells", seconds);
    }
    status_line("HELD ", answer);
}

/* "SECONDS.NANOSECONDS", nine digits: the RTC knows no parts of a second, and a paused guest no time. */
static void set_clock(const char *text) {
    long long seconds;
    long nanoseconds;
    if (sscanf(text, "%lld.%9ld", &seconds, &nanoseconds) == 2) {
        struct timespec now = {.tv_sec = (time_t)seconds, .tv_nsec = nanoseconds};
        if (clock_settime(CLOCK_REALTIME, &now) == 0)
            status_line("CLOCK ", text);
    }
}

void status_read(void) {
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
            sync_for_status();
        else if (strcmp(line, "STATUS") == 0)
            status_again();
        else if (strncmp(line, "LOG ", 4) == 0)
            log_ask(line + 4);
        else if (strncmp(line, "TIME ", 5) == 0)
            set_clock(line + 5);
        else if (strncmp(line, "HOLD ", 5) == 0)
            hold(line + 5);
    }
}
