/* SPANK plugin for Slurm (spank(8)): --vm=KEY=VALUE[,...] for sbatch, srun and salloc.
 *
 * In the submit command it lets vsub encode the request, and passes it to Prolog in the job control
 * environment. In slurmstepd it replaces the program of each task of a VM job by the job shell, which
 * runs the program in the guest. It decides nothing else: root on the node reads the request.
 *
 * Arguments in plugstack.conf: jobshell=PATH proofs=DIRECTORY vsub=PATH
 *
 * An optional plugin cannot fail a command or a task by its return value. Therefore it ends the process
 * whenever a VM job would otherwise become a plain job. */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <signal.h>
#include <slurm/slurm.h>
#include <slurm/spank.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

SPANK_PLUGIN(vtorque, 1)

#define TEXT_(x) #x
#define TEXT(x) TEXT_(x)
__attribute__((used)) static const char built_for[] = /* for vtorque doctor */
    "vtorque-spank for Slurm " TEXT(SLURM_VERSION_NUMBER);

#define MAX_VALUES 64
#define MAX_TOKEN (100 * 1024) /* of the request: below MAX_ARG_STRLEN (execve(2)) with its name */
#define EXIT_NO_PROOF 120
#define REQUEST "VTORQUE_REQUEST"
#define IN_JOB "SLURM_SPANK_" REQUEST /* sbatch and salloc set it for the job, this plugin for srun */
#define TASK "VTORQUE_TASK"
#define PROGRAM "VTORQUE_TASK_PROGRAM"
#define TASKS "VTORQUE_TASKS"

static const char *jobshell = "", *proofs = "", *vsub = "";
static char *values[MAX_VALUES]; /* of --vm, in order */
static int count;
static uint32_t local_tasks = 1;
static int first_task[2] = {-1, -1}; /* a pipe that ends when this node's first task ends */

static int add_value(int val, const char *given, int remote) {
    (void)val, (void)remote;
    if (count == MAX_VALUES || !given || !*given) {
        slurm_error("vtorque: --vm needs a value, and occurs at most %d times", MAX_VALUES);
        return -1;
    }
    values[count] = strdup(given);
    return values[count++] ? 0 : -1;
}

static struct spank_option option = {
    "vm", "KEY=VALUE[,...]",
    "[vtorque] run in a virtual machine with these properties, or --vm=none; vsub -h lists the keys",
    1, 0, add_value};

int slurm_spank_init(spank_t sp, int ac, char **av) {
    for (int i = 0; i < ac; i++) {
        char *value = strchr(av[i], '=');
        if (value && strncmp(av[i], "jobshell=", 9) == 0)
            jobshell = value + 1;
        else if (value && strncmp(av[i], "proofs=", 7) == 0)
            proofs = value + 1;
        else if (value && strncmp(av[i], "vsub=", 5) == 0)
            vsub = value + 1;
        else
            slurm_error("vtorque: unknown argument %s in plugstack.conf", av[i]);
    }
    spank_context_t context = spank_context();
    if (context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR || context == S_CTX_REMOTE)
        return spank_option_register(sp, &option);
    return 0;
}

/* -- in sbatch, salloc and srun ------------------------------------------------------------------- */

static void give_up(const char *what, const char *why) {
    slurm_error("vtorque: %s%s%s", what, *why ? ": " : "", why);
    exit(1);
}

/* Runs vsub, which prints errors itself. Returns the first word: the request, or "" for --vm=none. */
static char *encode(void) {
    static char line[MAX_TOKEN + 2];
    const char *argv[2 * MAX_VALUES + 3] = {vsub, "--request"};
    int pipes[2], status = 0;
    size_t have = 0;
    ssize_t got;
    for (int i = 0; i < count; i++)
        argv[2 + 2 * i] = "-vm", argv[3 + 2 * i] = values[i];
    if (access(vsub, X_OK) < 0 || pipe2(pipes, O_CLOEXEC) < 0)
        give_up(vsub, strerror(errno));
    pid_t child = fork();
    if (child == 0) {
        int null = open("/dev/null", O_RDONLY);
        dup2(null, 0); /* the script may still be there */
        dup2(pipes[1], 1);
        execv(vsub, (char **)argv);
        _exit(127);
    }
    close(pipes[1]);
    while (have < sizeof line - 1) {
        got = read(pipes[0], line + have, sizeof line - 1 - have);
        if (got == 0 || (got < 0 && errno != EINTR))
            break;
        have += got > 0 ? (size_t)got : 0;
    }
    close(pipes[0]);
    while (child > 0 && waitpid(child, &status, 0) < 0 && errno == EINTR)
        ;
    if (child < 0 || status != 0)
        exit(WIFEXITED(status) && WEXITSTATUS(status) ? WEXITSTATUS(status) : 1);
    if (have > MAX_TOKEN)
        give_up("--vm", "the request and its files are too long: let the files be short");
    line[strcspn(line, " \n")] = '\0';
    return line;
}

/* The variable is the default: its value comes first, so that each key of an option replaces it. */
static void add_variable(void) {
    const char *name = spank_context() == S_CTX_LOCAL                            ? "SLURM_VM"
                       : strcmp(program_invocation_short_name, "salloc") == 0 ? "SALLOC_VM"
                                                                               : "SBATCH_VM";
    const char *value = getenv(name);
    if (!value || !*value)
        return;
    if (add_value(0, value, 0) < 0)
        exit(1);
    char *last = values[count - 1];
    memmove(values + 1, values, sizeof *values * (size_t)(count - 1));
    values[0] = last;
}

/* Slurm passes only the last value to slurmstepd, and none if a variable requested guests. */
static bool is_bare(void) { return count && strcmp(values[count - 1], "none") == 0; }

/* Called once per component of a heterogeneous job. All components get the request of the first. */
static int submit(spank_t sp) {
    static bool done;
    static int components;
    if (spank_context() == S_CTX_LOCAL && getenv("SLURM_JOB_ID")) { /* a step; its job's value, if any */
        const char *jobs = getenv("SLURM_SPANK__SLURM_SPANK_OPTION_vtorque_vm");
        if (count && !is_bare() && (!jobs || strcmp(values[count - 1], jobs) != 0))
            give_up("--vm", "a step runs in the guests of its job: only --vm=none is possible here");
        return 0;
    }
    if (components++ && count && (!done || spank_context() == S_CTX_LOCAL))
        give_up("--vm", "in a heterogeneous job, only the first component of sbatch and salloc can have it");
    if (done)
        return 0;
    unsetenv(IN_JOB); /* of a job around this command */
    add_variable();
    if (!count)
        return 0;
    done = true;
    const char *token = encode();
    if (*token && (setenv(IN_JOB, token, 1) < 0 ||
                   spank_job_control_setenv(sp, REQUEST, token, 1) != ESPANK_SUCCESS))
        give_up("--vm", "Slurm does not accept the request");
    return 0;
}

/* -- in slurmstepd -------------------------------------------------------------------------------- */

int slurm_spank_init_post_opt(spank_t sp, int ac, char **av) {
    (void)ac, (void)av;
    spank_context_t context = spank_context();
    return context == S_CTX_LOCAL || context == S_CTX_ALLOCATOR ? submit(sp) : 0;
}

/* Ends a task that must not run on the host. */
static void refuse(const char *why) {
    dprintf(2, "vtorque: %s; nothing was run\n", why);
    _exit(EXIT_NO_PROOF);
}

static bool is_requested(spank_t sp) {
    char byte[2];
    return count || spank_getenv(sp, IN_JOB, byte, sizeof byte) != ESPANK_ENV_NOEXIST;
}

/* The first component of a heterogeneous job has the guests. srun passes salloc's request to all. */
static bool is_later_component(spank_t sp) {
    uint32_t job = 0;
    char name[40], id[16];
    if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS)
        return false;
    for (int i = 1;; i++) {
        snprintf(name, sizeof name, "SLURM_JOB_ID_HET_GROUP_%d", i);
        if (spank_getenv(sp, name, id, sizeof id) != ESPANK_SUCCESS)
            return false;
        if (strtoul(id, NULL, 10) == job)
            return true;
    }
}

static bool has_proof(spank_t sp) {
    uint32_t job = 0;
    char path[PATH_MAX];
    if (spank_get_item(sp, S_JOB_ID, &job) != ESPANK_SUCCESS)
        return false;
    return snprintf(path, sizeof path, "%s/%u.json", proofs, job) < (int)sizeof path &&
           access(path, F_OK) == 0;
}

static bool needs_guest(spank_t sp) {
    return !is_bare() && (has_proof(sp) || (is_requested(sp) && !is_later_component(sp)));
}

/* Returns whether a file starts with a text. */
static bool starts_with(const char *path, const char *text, size_t length) {
    char found[PATH_MAX + 4];
    int fd = open(path, O_RDONLY | O_CLOEXEC | O_NONBLOCK);
    ssize_t got = fd < 0 ? -1 : pread(fd, found, length < sizeof found ? length : 0, 0);
    if (fd >= 0)
        close(fd);
    return length && got == (ssize_t)length && memcmp(found, text, length) == 0;
}

/* vsub's script names the job shell itself. */
static bool is_vsubs(const char *script) {
    char line[PATH_MAX + 4];
    int length = snprintf(line, sizeof line, "#!%s\n", jobshell);
    return length < (int)sizeof line && starts_with(script, line, (size_t)length);
}

/* With --multi-prog, slurmstepd takes each task's program from the second word, which is the content of
 * the file in the first one, after this plugin is called. */
static bool is_multi_prog(int argc, char **argv) {
    size_t length = argc == 2 ? strlen(argv[1]) : 0;
    return length && starts_with(argv[0], argv[1], length < PATH_MAX ? length : PATH_MAX);
}

/* Before the tasks are forked. */
int slurm_spank_user_init(spank_t sp, int ac, char **av) {
    (void)ac, (void)av;
    if (spank_get_item(sp, S_JOB_LOCAL_TASK_COUNT, &local_tasks) != ESPANK_SUCCESS)
        local_tasks = 1;
    if (local_tasks > 1 && needs_guest(sp) && pipe2(first_task, O_CLOEXEC) < 0)
        slurm_error("vtorque: pipe: %s", strerror(errno));
    return 0;
}

/* In slurmstepd, after each fork. */
int slurm_spank_task_post_fork(spank_t sp, int ac, char **av) {
    (void)ac, (void)av;
    int task = 0;
    spank_get_item(sp, S_TASK_ID, &task);
    if (first_task[1] >= 0 && (uint32_t)task == local_tasks - 1)
        close(first_task[1]);
    return 0;
}

/* The first task of this node runs all of them in the guest, which has one port for programs. The
 * others wait for its end, and leave signals to it. Its exit status is the largest. They execute a
 * program, because this process has slurmstepd's end of the first task's standard input. */
static void await_first(void) {
    const int signals[] = {SIGHUP, SIGINT, SIGTERM, SIGUSR1, SIGUSR2, SIGALRM};
    for (size_t i = 0; i < sizeof signals / sizeof *signals; i++)
        signal(signals[i], SIG_IGN);
    if (first_task[0] >= 0 && dup2(first_task[0], 0) == 0)
        execl("/bin/sh", "sh", "-c", "read -r end; exit 0", (char *)NULL);
    refuse("this task cannot wait for the first one");
}

/* Sets the global ids of this node's tasks, such as "2,3". */
static int set_tasks(spank_t sp) {
    size_t size = 12 * (size_t)local_tasks + 1, used = 0;
    char *ids = calloc(1, size);
    for (uint32_t i = 0, id; ids && i < local_tasks; i++) {
        if (spank_get_item(sp, S_JOB_LOCAL_TO_GLOBAL_ID, i, &id) != ESPANK_SUCCESS)
            return -1;
        used += (size_t)snprintf(ids + used, size - used, i ? ",%u" : "%u", id);
    }
    return ids ? (int)spank_setenv(sp, TASKS, ids, 1) : -1;
}

int slurm_spank_task_init(spank_t sp, int ac, char **av) {
    (void)ac, (void)av;
    uint32_t step = 0;
    int argc = 0, task = 0;
    char **argv = NULL, how[16] = "";
    if (spank_get_item(sp, S_JOB_STEPID, &step) != ESPANK_SUCCESS || step == SLURM_EXTERN_CONT)
        return 0;
    if (!needs_guest(sp))
        return 0;
    if (spank_get_item(sp, S_JOB_ARGV, &argc, &argv) != ESPANK_SUCCESS || argc < 1)
        refuse("Slurm's task has no program");
    if (strcmp(argv[0], jobshell) == 0)
        return 0;
    if (spank_getenv(sp, TASK, how, sizeof how) == ESPANK_SUCCESS && strcmp(how, "host") == 0)
        return 0;
    if (step == SLURM_BATCH_SCRIPT && is_vsubs(argv[0]))
        return 0;
    if (access(jobshell, X_OK) < 0)
        refuse("the job shell is missing on this node");
    if (is_multi_prog(argc, argv))
        refuse("--multi-prog does not work with virtual machines");
    spank_get_item(sp, S_TASK_ID, &task);
    if (task > 0)
        await_first();
    if (first_task[1] >= 0)
        fcntl(first_task[1], F_SETFD, 0); /* the job shell holds it until it ends */
    if (spank_setenv(sp, TASK, step == SLURM_BATCH_SCRIPT ? "batch" : "step", 1) ||
        spank_setenv(sp, PROGRAM, argv[0], 1) || (step != SLURM_BATCH_SCRIPT && set_tasks(sp)))
        refuse("Slurm does not let the plugin set a variable");
    argv[0] = strdup(jobshell); /* the array that slurmstepd executes: it has no room for more words */
    return 0;
}
