/* vtorque-agent: the one agent of all Linux guests. The protocol is in doc/stream.md.
 * One process, one poll loop. What comes from the host's run port was written by the job's user:
 * it decides what runs, never as whom (that is conf's). */
#ifndef VTORQUE_AGENT_H
#define VTORQUE_AGENT_H

#include <poll.h>
#include <signal.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <sys/types.h>

#ifndef VT_DRAIN_MS
#define VT_DRAIN_MS 1000 /* without end in the test that must not wait for it */
#endif
#ifndef VT_RETRY_MS
#define VT_RETRY_MS 20 /* less in tests that connect often */
#endif

enum {
    PROTOCOL = 1,
    HEADER = 8,
    HELLO_SIZE = 24,
    PAYLOAD_MAX = 65536,
    CHUNK = 32768 - HEADER,    /* Linux's virtio_console.c sends at most 32 KiB per write() */
    QUEUE_BUSY = 65536,        /* above this no more output is read from the job */
    RUN_QUEUE = 1048576,
    RUN_KEPT = RUN_QUEUE / 2,  /* above this of what the host may ask for again, too */
    ACK_EVERY = 65536,         /* bytes taken from the host */
    PIPE_SIZE = 262144,
    STATUS_QUEUE = 16384,
    LINES_QUEUE = 32768,
    STEP_MAX = 200,            /* of the name of a step of the set-up */
    LOG_MAX = 65536,           /* of the end of a log that the host asks for */
    STDIN_WINDOW = 262144,
    START_MAX = 2 * 1024 * 1024,
    FILES_MAX = 16,
    FILE_BYTES_MAX = 16 * 1024 * 1024,
    LIMITS_MAX = 16,
    GROUPS_MAX = 1024,
    TERM_GRACE_MS = 5000,      /* between SIGTERM and SIGKILL when the host has gone */
    DRAIN_GRACE_MS = VT_DRAIN_MS, /* for a background child that holds the output */
    SYNC_MAX_MS = 30000,       /* EXIT is sent after this even if sync(2) still runs */
    RETRY_MS = VT_RETRY_MS,    /* opening a port that is not there yet */
    RECHECK_MS = 500,          /* a disconnected virtio port, should SIGIO be missed */
};

enum frame { F_HELLO = 1, F_FILE, F_START, F_DATA, F_EOF, F_CREDIT, F_SIGNAL, F_WINSIZE, F_EXIT, F_ERROR, F_ACK };
enum hello_flag { H_KEEPS = 1, H_RESUME = 2 };
enum tag { T_ARG = 1, T_FILEARG, T_ENV, T_CWD, T_UMASK, T_RLIMIT, T_PTY, T_MERGE, T_MODE };
enum mode { M_DIRECT = 0, M_SHELL, M_LOGIN };
enum exit_kind { X_CODE = 0, X_SIGNAL, X_NOT_STARTED };
enum slot { P_STATUS, P_RUN, P_STEPS, P_SETUP, P_EXEC, P_IN, P_OUT, P_ERR, P_LINES,
            P_LINES_PORT, P_COUNT };

struct conf {
    char user[64], home[1024], shell[1024], status[256], run[256], spool[1024], setup[1024];
    char container[256];       /* directory of a container's shell and settings; else empty */
    char lines[256], lines_port[256];
    uid_t uid;
    gid_t gid;
    gid_t groups[GROUPS_MAX];
    size_t ngroups;
    bool sync;
    bool root;                 /* the script runs as root: only in a user's own image */
};

/* A virtio-serial port (device path, or port:NAME looked up in sysfs) or, in tests, unix:PATH. */
struct port {
    const char *path;
    int fd;
    bool up;                   /* a host is connected */
    uint64_t retry_at;
    uint8_t *out;
    size_t cap, head, tail;    /* what is still to be written: out[head..tail) */
    bool keeps;                /* its host can resume: what it has not acknowledged, out[kept..), stays */
    size_t kept;               /* before it may be what is no part of the session */
    uint64_t held_until;       /* a host that goes is waited for; 0: not */
    bool dropping;             /* nothing of the host is taken until its RESUME */
    bool tells;                /* the host is to hear that it may be lost: root may want something before */
};

/* A file calls those above it only; agent.c, the loop, all of them. */

/* conf.c: false with a message in err */
extern struct conf conf;
bool conf_read(const char *path, struct conf *c, char *err, size_t err_size);

/* proc.c */
int pipe_for_child(int *parent_end, int *child_end, bool child_writes, uid_t owner);
int pty_open(int *master, int *slave, const uint16_t *winsize, uid_t owner);
void pty_winsize(int fd, const uint16_t *w);
void oom_score(const char *value);
void service_ready(void);
void schedule(int policy);
void child_reset(void);
int session_kill(pid_t session, int sig);
void session_kill_all(pid_t session);

/* port.c */
extern struct port run_port, status_port;
uint64_t now_ms(void);
bool status_line(const char *word, const char *text);
bool port_connect(struct port *p, uint64_t now);
int port_timeout(const struct port *p, uint64_t now);
void port_lost(struct port *p);
ssize_t port_read(struct port *p, void *buf, size_t n);
void port_flush(struct port *p);
size_t port_queued(const struct port *p);
uint8_t *port_room(struct port *p, size_t n);
size_t port_kept(const struct port *p);
bool port_ack(struct port *p, size_t n);
bool port_again(struct port *p, size_t n, const void *lead, size_t size);
void port_drop(struct port *p);
void put_header(uint8_t *at, enum frame type, int stream, size_t length);
void put_frame(enum frame type, int stream, const void *payload, size_t n);
void put_u16(uint8_t *at, uint16_t v);
void put_u32(uint8_t *at, uint32_t v);
uint16_t get_u16(const uint8_t *at);
uint32_t get_u32(const uint8_t *at);
uint64_t get_u64(const uint8_t *at);

/* logs.c */
void log_ask(const char *path);
void log_drop(void);
void log_turn(void);

/* sync.c: true when what the job wanted is done, or has taken too long */
void sync_for_job(void);
void sync_for_status(void);
bool sync_tick(uint64_t now);
bool sync_exited(pid_t pid);
int sync_timeout(uint64_t now);

/* status.c */
void status_set_step(const char *name);
void status_set_ready(void);
void status_set_failed(const char *text);
const char *status_step(void);
const char *status_failure(void); /* NULL unless it failed */
bool status_known(void);
bool status_ready_sent(void);
void status_again(void);          /* a host has come: it is told all */
void status_send(void);
void status_read(void);

/* setup.c */
void setup_start(void);
void setup_turn(void);
void setup_fds(struct pollfd *fds);
void setup_io(const struct pollfd *fds);
bool setup_exited(pid_t pid, int status);

/* lines.c */
void lines_start(void);
void lines_turn(uint64_t now);
void lines_fds(struct pollfd *fds);
void lines_io(const struct pollfd *fds);
int lines_timeout(uint64_t now);

/* container.c */
bool container_enter(char ***env, char ***argv, bool wrap);

/* start.c: what a START asks for, and the child that becomes it */
struct limit { int resource; uint64_t soft, hard; };
struct start {
    char **argv, **env;
    size_t argc, envc;
    const char *cwd;
    mode_t umask;
    struct limit limits[LIMITS_MAX];
    size_t nlimits;
    uint16_t winsize[4];
    bool pty, merge, sent;     /* sent: a file of the user's is run */
    enum mode mode;
};
extern struct start start;     /* the last one that is whole */
const char *start_files_add(int stream, const uint8_t *p, size_t n);
const char *start_files_error(void);
void start_files_close(void);
void start_files_drop(void);
const char *start_add(const uint8_t *p, size_t n, bool last);
bool start_begun(void);
bool start_waits(void);
void start_drop(void);
_Noreturn void start_exec(struct start *s, const int fds[3], int error_fd);

/* job.c: functions that return a string return NULL or what is wrong with the frame */
void job_window(uint32_t bytes);
const char *job_start(const uint8_t *p, size_t n, bool last);
const char *job_stdin(const uint8_t *p, size_t n);
const char *job_credit(int stream, uint32_t bytes);
const char *job_signal(uint32_t number);
void job_rehearse(void);
void job_eof(int stream);
void job_winsize(const uint8_t *p);
void job_abandon(bool at_once);
bool job_running(void);
void job_fds(struct pollfd *fds);
void job_io(const struct pollfd *fds);
void job_tick(uint64_t now);
int job_timeout(uint64_t now);
bool job_exited(const siginfo_t *si);
void job_synced(void);

/* session.c */
void session_read(void);
void session_parse(void);
void session_lost(void);
bool session_wants_input(void);
void session_tick(uint64_t now);
int session_timeout(uint64_t now);

#endif
