/* sync(2), in a child because it may take long: before a job's end is told, and when the host asks. */
#include "agent.h"

#include <unistd.h>

static struct {
    pid_t pid;
    bool status_wanted, job_wanted, status_runs, job_runs;
    uint64_t job_deadline;
} syncing;

void sync_for_job(void) {
    syncing.job_wanted = true;
    syncing.job_deadline = now_ms() + SYNC_MAX_MS;
}

void sync_for_status(void) { syncing.status_wanted = true; }

bool sync_tick(uint64_t now) {
    if (syncing.pid == 0 && (syncing.status_wanted || syncing.job_wanted)) {
        pid_t pid = fork();
        if (pid == 0) {
            for (int fd = 3; fd < 256; fd++)
                close(fd);
            sync();
            _exit(0);
        }
        syncing.pid = pid > 0 ? pid : 0;
        syncing.status_runs = syncing.status_wanted;
        syncing.job_runs = syncing.job_wanted;
        syncing.status_wanted = syncing.job_wanted = false;
    }
    if ((syncing.job_runs || syncing.job_wanted) && now >= syncing.job_deadline) {
        syncing.job_runs = syncing.job_wanted = false;
        return true;
    }
    return false;
}

int sync_timeout(uint64_t now) {
    if (!syncing.job_runs && !syncing.job_wanted)
        return -1;
    return syncing.job_deadline > now ? (int)(syncing.job_deadline - now) : 0;
}

bool sync_exited(pid_t pid) {
    bool job = syncing.job_runs;
    if (pid != syncing.pid)
        return false;
    syncing.pid = 0;
    if (syncing.status_runs)
        status_line("SYNCED", "");
    syncing.status_runs = syncing.job_runs = false;
    return job;
}
