"""The watcher with real journals, processes and sockets; libvirt is a double.

With real guests: tests/e2e/test_suspend.py, and on a real Slurm tests/e2e/slurm.
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

import running_journal
from patience import eventually
from vtorque_core.api import HostFault
from vtorque_core.api.batch_system import JobState
from vtorque_core.api.children import Child
from vtorque_core.base import hypervisor
from vtorque_core.live import locked_job
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import read
from vtorque_survive import request, watcher
from vtorque_survive.watcher import BatchView, WatcherLoop

HOLDS = """
import fcntl, sys, time
file = open(sys.argv[1])
fcntl.lockf(file, fcntl.LOCK_SH)
print("locked", flush=True)
time.sleep(600)
"""


@pytest.fixture
def paths(tmp_path):
    return running_journal.paths_below(tmp_path)


@pytest.fixture
def domains(tmp_path, monkeypatch):
    """Replace libvirt; each process's actions on a domain are recorded in a file for all."""
    did = tmp_path / "did"
    did.touch()
    state = SimpleNamespace(fails="", dies="", did=lambda: did.read_text().split())

    def double(what):
        def act(_uri, _uuid, _timeout):
            if state.fails == what:
                raise HostFault(f"{what}: QEMU hangs")
            with did.open("a") as file:
                file.write(f"{what}\n")
            if state.dies == what:
                os.kill(os.getpid(), signal.SIGKILL)

        return act

    monkeypatch.setattr(hypervisor, "suspend_domain", double("suspend"))
    monkeypatch.setattr(hypervisor, "resume_domain", double("resume"))
    monkeypatch.setattr(watcher, "_PAUSE", 0.05)
    return state


@pytest.fixture
def loop(paths, domains):
    """Return the watcher's loop; ``lives``: the batch system's answer, ``reasons``: its queries."""
    lives, reasons = {}, []

    def states(_ids, *, soon):
        reasons.append(soon)
        return lives

    found = WatcherLoop(paths, SimpleNamespace(known_states=states))
    found.lives, found.reasons = lives, reasons
    yield found
    for watched in found.jobs.values():
        watched.close()


def started(paths, nodes=("n1",), guests=2, job_id="42.srv"):
    job = running_journal.JournalledJob(paths, job_id, guests=guests)
    job.kept.add_facts(nodes=list(nodes), guest_type="acme")
    paths.job_state(job.key).mkdir(parents=True)
    paths.job_run(job.key).mkdir(parents=True)
    request.Fifo(str(request.path_of(paths, job.key)), os.getuid()).create()
    return job


def phases(job):
    return [mark.name for mark in read(job.journal.path).phases if mark.guest is None]


def poll_until_idle(loop):
    """Run the watcher until no job is being suspended or resumed."""
    loop.poll()
    eventually(lambda: loop.poll() or all(w.change is None for w in loop.jobs.values()))


def request_answer(loop, job, word):
    """Send a request like the job's owner, while the watcher runs; return its answer."""
    said = []
    path = request.path_of(loop.paths, job.key)
    thread = threading.Thread(target=lambda: said.append(request.ask(path, job.kept, word, 60.0)))
    loop.poll()
    thread.start()
    eventually(lambda: loop.poll() or said)
    thread.join()
    return said[0]


def run_another(loop):
    """Run another watcher, as after a kill; return the watcher."""
    later = WatcherLoop(loop.paths, loop.batch)
    poll_until_idle(later)
    return later


def shut(loop):
    for watched in loop.jobs.values():
        watched.close()
    loop.jobs.clear()


def test_job_is_suspended_and_resumed_by_its_owner(loop, paths, domains):
    job = started(paths)
    assert request_answer(loop, job, "suspend") == ""
    assert phases(job)[-2:] == ["run", "paused"]
    assert request_answer(loop, job, "suspend") == ""  # already the case
    assert domains.did() == ["suspend"] * 2
    assert request_answer(loop, job, "resume") == ""
    assert phases(job)[-2:] == ["paused", "run"]
    assert domains.did() == ["suspend"] * 2 + ["resume"] * 2
    log = job.kept.read("log.jsonl").decode()
    assert "paused: requested by its owner" in log and "resumed: " in log
    assert not any(loop.reasons)  # no reason to query the batch system


@pytest.mark.parametrize("wrong", ["", "n3: n3 did not answer"])
def test_request_is_answered_after_guests_on_other_nodes_have_followed(loop, paths, domains, wrong):
    job = started(paths)
    words, over = [], paths.state / "over"

    def passes():
        eventually(over.exists)
        if wrong:
            raise HostFault(wrong)

    def pass_on(of, word):
        words.append((of.job.key, word))
        return Child(passes, 60.0)

    loop.moves = SimpleNamespace(forward_request=pass_on, poll=lambda *_: None)
    path, said = request.path_of(paths, job.key), []
    loop.poll()
    asks = lambda: said.append(request.ask(path, job.kept, "suspend", 60.0))  # noqa: E731
    thread = threading.Thread(target=asks)
    thread.start()
    eventually(lambda: loop.poll() or phases(job)[-1] == "paused")
    assert not said, "answered before the guests on other nodes were paused"
    over.touch()
    eventually(lambda: loop.poll() or said)
    thread.join()
    assert said == [wrong] and words == [(job.key, "suspend")]
    loop.moves = None
    assert request_answer(loop, job, "resume") == ""


def test_another_watcher_continues_after_a_kill(loop, paths, domains):
    job = started(paths)
    assert request_answer(loop, job, "suspend") == ""
    shut(loop)
    later = run_another(loop)
    assert domains.did() == ["suspend"] * 2  # nothing to do
    assert request_answer(later, job, "resume") == ""
    assert phases(job)[-1] == "run"
    shut(later)


@pytest.mark.parametrize("dies", ["suspend", "resume"])
def test_change_interrupted_by_a_kill_is_repeated(loop, paths, domains, dies):
    """The process is killed after libvirt has acted and before the journal records it."""
    job = started(paths, guests=1)
    if dies == "resume":
        assert request_answer(loop, job, "suspend") == ""
    domains.dies = dies
    assert "without a result" in request_answer(loop, job, dies)
    shut(loop)
    domains.dies = ""
    before = len(domains.did())
    later = run_another(loop)
    eventually(lambda: later.poll() or len(domains.did()) > before)
    poll_until_idle(later)
    assert domains.did()[-1] == dies
    assert phases(job)[-1] == ("paused" if dies == "suspend" else "run")
    shut(later)


def test_failed_resume_is_retried(loop, paths, domains):
    job = started(paths)
    assert request_answer(loop, job, "suspend") == ""
    domains.fails = "resume"
    assert request_answer(loop, job, "resume") == "resume: QEMU hangs"
    domains.fails = ""
    eventually(lambda: loop.poll() or domains.did()[-2:] == ["resume"] * 2)
    poll_until_idle(loop)


def test_guests_are_paused_with_the_job_shell_and_keep_their_cpus(loop, paths, domains):
    """The user controls the lock, so a suspend by the lock releases no CPUs of the job."""
    job = started(paths)
    lock = paths.job_shell(job.key)
    lock.touch(mode=0o400)
    with subprocess.Popen([sys.executable, "-c", HOLDS, lock], stdout=subprocess.PIPE) as shell:
        assert shell.stdout.readline() == b"locked\n"
        poll_until_idle(loop)
        assert domains.did() == [] and not any(loop.reasons)
        shell.send_signal(signal.SIGSTOP)
        eventually(lambda: loop.poll() or phases(job)[-1] == "paused")
        assert not read(job.journal.path).is_suspended and loop.reasons[-1]
        poll_until_idle(loop)
        loop.lives[job.id] = JobState.SUSPENDED  # the batch system's suspend is independent
        poll_until_idle(loop)
        assert read(job.journal.path).is_suspended
        assert "suspended by the batch system" in request_answer(loop, job, "resume")
        shell.send_signal(signal.SIGCONT)
        poll_until_idle(loop)
        assert phases(job)[-1] == "suspended" and loop.reasons[-1]
        loop.lives[job.id] = JobState.ALIVE
        eventually(lambda: loop.poll() or phases(job)[-1] == "run")
        poll_until_idle(loop)
        shell.kill()


def test_hold_applies_to_the_node_that_runs_the_script(loop, paths, domains):
    here, other = started(paths), started(paths, nodes=("n2", "n1"), job_id="43.srv")
    seen = []
    loop.batch.held = {here.id, other.id}
    loop.holds = SimpleNamespace(poll=lambda jobs, held: seen.append((jobs, held)))
    lock = paths.job_shell(here.key)
    lock.touch(mode=0o400)
    with subprocess.Popen([sys.executable, "-c", HOLDS, lock], stdout=subprocess.PIPE) as shell:
        assert shell.stdout.readline() == b"locked\n"
        poll_until_idle(loop)
        shell.kill()
    jobs, held = seen[-1]
    assert [job.job.id for job in jobs] == [here.id] and held == {here.id, other.id}


def test_lock_held_by_another_process_does_not_keep_guests_running(loop, paths, domains):
    """The watcher then cannot see that the job shell is stopped, and queries the batch system."""
    job = started(paths)
    lock = paths.job_shell(job.key)
    lock.touch(mode=0o400)
    with subprocess.Popen([sys.executable, "-c", HOLDS, lock], stdout=subprocess.PIPE) as other:
        assert other.stdout.readline() == b"locked\n"
        loop.lives[job.id] = JobState.SUSPENDED
        poll_until_idle(loop)
        assert phases(job)[-1] == "suspended"
        other.kill()


def test_other_nodes_follow_the_state_of_the_batch_system(loop, paths, domains):
    job = started(paths, nodes=("n1", "n2"))
    poll_until_idle(loop)
    assert loop.reasons[-1] and phases(job)[-1] == "run"
    loop.lives[job.id] = JobState.SUSPENDED
    poll_until_idle(loop)
    assert phases(job)[-1] == "suspended"
    loop.lives[job.id] = JobState.ALIVE
    poll_until_idle(loop)
    assert phases(job)[-1] == "run"


def test_unknown_state_after_a_restart_changes_nothing(loop, paths, domains):
    job = started(paths, nodes=("n1", "n2"))
    loop.lives[job.id] = JobState.SUSPENDED
    poll_until_idle(loop)
    shut(loop)
    loop.lives.clear()
    later = run_another(loop)
    assert phases(job)[-1] == "suspended" and set(domains.did()) == {"suspend"}
    shut(later)


def test_state_of_the_batch_system_overrides_the_owner(loop, paths, domains):
    job = started(paths, nodes=("n1", "n2"))
    assert request_answer(loop, job, "suspend") == ""
    assert not read(job.journal.path).is_suspended
    loop.lives[job.id] = JobState.SUSPENDED
    poll_until_idle(loop)
    assert read(job.journal.path).is_suspended
    loop.lives[job.id] = JobState.ALIVE
    poll_until_idle(loop)
    assert phases(job)[-1] == "paused"
    assert set(domains.did()) == {"suspend"}


def test_failed_suspend_is_reported_and_all_guests_resume(loop, paths, domains):
    job = started(paths)
    domains.fails = "suspend"
    assert request_answer(loop, job, "suspend") == "suspend: QEMU hangs"
    assert phases(job)[-1] == "run" and set(domains.did()) == {"resume"}
    domains.fails = ""
    eventually(lambda: loop.poll() or phases(job)[-1] == "paused")
    poll_until_idle(loop)


def test_hanging_job_does_not_delay_others(loop, paths, domains, monkeypatch):
    hangs, other = started(paths), started(paths, job_id="43.srv")
    never, release = os.pipe()
    before = hypervisor.suspend_domain
    mine = set(hangs.uuids)

    def suspend(uri, uuid, timeout):
        if uuid in mine:
            os.read(never, 1)
        before(uri, uuid, timeout)

    monkeypatch.setattr(hypervisor, "suspend_domain", suspend)
    (paths.job_state(hangs.key) / watcher.ASKED).touch()
    loop.poll()
    assert request_answer(loop, other, "suspend") == ""
    assert (phases(hangs)[-1], phases(other)[-1]) == ("run", "paused")
    os.write(release, b"xx")
    poll_until_idle(loop)
    assert phases(hangs)[-1] == "paused"


def test_failing_job_does_not_affect_others(loop, paths, domains, monkeypatch):
    broken, other = started(paths), started(paths, job_id="43.srv")
    begin = watcher.suspend.begin

    def begun(paths, job, to, why):
        if job.job.id == broken.id:
            raise OSError("no more processes")
        return begin(paths, job, to, why)

    monkeypatch.setattr(watcher.suspend, "begin", begun)
    (paths.job_state(broken.key) / watcher.ASKED).touch()
    assert request_answer(loop, other, "suspend") == ""
    assert phases(other)[-1] == "paused" and "no more" in loop.jobs[broken.key].said


def test_journal_entries_per_user_requests_are_limited(loop, paths, domains, monkeypatch):
    monkeypatch.setattr(watcher, "_MOST_PHASES", 6)
    job = started(paths)  # it has three phases
    for word in ("suspend", "resume"):
        assert request_answer(loop, job, word) == ""
    assert request_answer(loop, job, "suspend") == ""
    assert request_answer(loop, job, "resume") == ""
    assert "further requests are ignored" in request_answer(loop, job, "suspend")
    loop.lives[job.id] = JobState.SUSPENDED  # the limit does not apply to the batch system
    poll_until_idle(loop)
    assert phases(job)[-1] == "suspended"


def test_starting_or_ending_job_is_skipped(loop, paths, domains):
    job = started(paths)
    job.journal.phase("teardown")
    (paths.job_state(job.key) / watcher.ASKED).touch()
    poll_until_idle(loop)
    assert loop.jobs == {} and domains.did() == []


def test_watcher_polls_often_once_a_job_starts(loop, paths):
    """Entries in the journal do not wake the watcher, so it polls often during the boot, too."""
    loop.poll()
    assert loop.pause(0.5) == watcher._IDLE
    job = started(paths)
    job.journal.phase("boot")
    loop.poll()
    assert loop.jobs == {} and loop.pause(0.5) == 0.5
    job.end()
    assert loop.pause(0.5) == watcher._IDLE


def test_job_locked_by_an_epilogue_is_not_touched(loop, paths, domains, monkeypatch):
    monkeypatch.setattr(locked_job, "WAIT", 0.0)
    job = started(paths)
    lock = paths.job_lock(job.id)
    lock.parent.mkdir(parents=True)
    with lock.open("w") as epilogue:
        fcntl.flock(epilogue, fcntl.LOCK_EX)
        assert "is held by another process" in request_answer(loop, job, "suspend")
    assert domains.did() == []


def test_torn_journal_does_not_stop_others(loop, paths, domains):
    job = started(paths)
    (paths.journal / "9.srv.0.jsonl").write_text("{")
    assert request_answer(loop, job, "suspend") == ""
    with Journal.open(paths, job.journal.path) as journal:
        assert journal.header.job.id == job.id


# -- The batch system ------------------------------------------------------------------------------


@pytest.fixture
def batch_states(monkeypatch):
    """Return the states of jobs in a double of the batch system's adapter."""
    lives = {}
    node = SimpleNamespace(job_states=lambda ids: {each: lives[each] for each in ids})
    batch = SimpleNamespace(node=lambda _site: node)
    monkeypatch.setattr(watcher.service, "batch_system", lambda _config: (None, batch))
    return lives


def test_batch_system_is_queried_by_a_separate_process(tmp_path, batch_states):
    batch_states |= {"1": JobState.SUSPENDED, "2": JobState.ALIVE}
    asked = BatchView(tmp_path, 0.0)
    eventually(lambda: asked.known_states(["1", "2"], soon=True) == batch_states)
    before = dict(batch_states)
    batch_states |= {
        "1": JobState.ALIVE,
        "2": JobState.UNKNOWN,  # its last known state is used
    }
    eventually(lambda: asked.known_states(["1", "2"], soon=True)["1"] is JobState.ALIVE)
    assert asked.known_states(["1", "2"], soon=True)["2"] is before["2"]
    assert "2" not in asked.known_states(["1"], soon=True)
    assert "2" not in asked.known_states(
        ["1", "2"], soon=False
    )  # the state of an earlier attempt is dropped


def test_batch_system_is_queried_once_without_a_reason(tmp_path, batch_states, monkeypatch):
    batch_states["1"] = JobState.ALIVE
    asked = BatchView(tmp_path, 0.0)
    eventually(lambda: asked.known_states(["1"], soon=False))
    batch_states["1"] = JobState.SUSPENDED
    for _ in range(5):
        assert asked.known_states(["1"], soon=False) == {"1": JobState.ALIVE}
        assert asked._lines._asking is None
    eventually(lambda: asked.known_states(["1"], soon=True) == batch_states)


def test_failed_fork_leaves_no_open_files(tmp_path, batch_states, monkeypatch):
    def none(*_):
        raise OSError("no more processes")

    monkeypatch.setattr(os, "fork", none)
    before = len(list(Path("/proc/self/fd").iterdir()))
    asked = BatchView(tmp_path, 0.0)
    for _ in range(10):
        with pytest.raises(OSError, match="no more"):
            asked.known_states(["1"], soon=True)
    assert len(list(Path("/proc/self/fd").iterdir())) == before
