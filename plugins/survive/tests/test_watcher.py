"""What the watcher does: with real journals, processes and sockets; libvirt is a double here.

With real guests: tests/e2e/test_suspend.py, and on a real Slurm tests/e2e/slurm.
"""

import fcntl
import os
import signal
import subprocess
import sys
import threading
from types import SimpleNamespace

import pytest

import running_journal
from patience import eventually
from vtorque_core.api import HostFault
from vtorque_core.api.batch_system import Life
from vtorque_core.base import hypervisor
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import read
from vtorque_survive import request, watcher
from vtorque_survive.watcher import Batch, Loop

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
    """Stand for libvirt: what each process has done to a domain, in a file for all of them."""
    did = tmp_path / "did"
    did.touch()
    state = SimpleNamespace(fails="", did=lambda: did.read_text().split())

    def double(what):
        def act(_uri, _uuid):
            if state.fails == what:
                raise HostFault(f"{what}: QEMU hangs")
            with did.open("a") as file:
                file.write(f"{what}\n")

        return act

    monkeypatch.setattr(hypervisor, "suspend_domain", double("suspend"))
    monkeypatch.setattr(hypervisor, "resume_domain", double("resume"))
    return state


@pytest.fixture
def loop(paths, domains):
    told = set()
    found = Loop(paths, lambda _ids: told)
    found.told = told
    yield found
    for watched in found.jobs.values():
        watched.socket.close()


def started(paths, nodes=("n1",), guests=2):
    job = running_journal.Job(paths, guests=guests)
    job.kept.add_facts(nodes=list(nodes), guest_type="acme")
    paths.job_state(job.key).mkdir(parents=True)
    paths.job_run(job.key).mkdir(parents=True)
    return job


def phases(job):
    return [mark.name for mark in read(job.journal.path).phases if mark.guest is None]


def settle(loop):
    """Look until nothing is being changed."""
    loop.look()
    eventually(lambda: loop.look() or all(w.change is None for w in loop.jobs.values()))


def ask(loop, job, word):
    """Ask as the job's owner does, while the watcher looks; return its answer."""
    said = []
    path = request.path_of(loop.paths, job.key)
    thread = threading.Thread(target=lambda: said.append(request.ask(path, word, 60.0)))
    loop.look()
    thread.start()
    eventually(lambda: loop.look() or said)
    thread.join()
    return said[0]


def test_a_job_stands_still_and_goes_on_by_its_owners_word(loop, paths, domains):
    job = started(paths)
    assert ask(loop, job, "suspend") == ""
    assert phases(job)[-2:] == ["run", "paused"]
    assert ask(loop, job, "suspend") == ""  # it does already
    assert domains.did() == ["suspend"] * 2
    assert ask(loop, job, "resume") == ""
    assert phases(job)[-2:] == ["paused", "run"]
    assert domains.did() == ["suspend"] * 2 + ["resume"] * 2
    log = job.kept.read("log.jsonl").decode()
    assert "paused: its owner asked for it" in log and "goes on: " in log


def test_another_watcher_goes_on_where_a_killed_one_was(loop, paths, domains):
    job = started(paths)
    assert ask(loop, job, "suspend") == ""
    later = Loop(paths, lambda _ids: ())
    settle(later)
    assert domains.did() == ["suspend"] * 2  # nothing to do
    assert ask(later, job, "resume") == ""
    assert phases(job)[-1] == "run"
    for watched in later.jobs.values():
        watched.socket.close()


def test_one_killed_between_domain_and_mark_is_made_good(loop, paths, domains):
    job = started(paths)
    (paths.job_state(job.key) / watcher.ASKED).touch()  # the domains may be paused, or not
    settle(loop)
    assert phases(job)[-1] == "paused" and domains.did() == ["suspend"] * 2


def test_the_batch_systems_word_counts_before_the_owners(loop, paths, domains):
    """Only then are its CPUs others': no user gives away what is not asked back at their word."""
    job = started(paths, nodes=("n1", "n2"))
    assert ask(loop, job, "suspend") == ""
    assert not read(job.journal.path).suspended
    loop.told.add(job.id)
    settle(loop)
    assert phases(job)[-1] == "suspended" and read(job.journal.path).suspended
    loop.told.clear()
    settle(loop)
    assert phases(job)[-1] == "paused"
    assert set(domains.did()) == {"suspend"}


def test_it_does_as_the_process_does_that_has_the_lock(loop, paths, domains):
    job = started(paths)
    lock = paths.job_shell(job.key)
    lock.touch(mode=0o400)
    with subprocess.Popen([sys.executable, "-c", HOLDS, lock], stdout=subprocess.PIPE) as shell:
        assert shell.stdout.readline() == b"locked\n"
        settle(loop)
        assert domains.did() == []
        shell.send_signal(signal.SIGSTOP)
        eventually(lambda: loop.look() or phases(job)[-1] == "suspended")
        settle(loop)
        assert "have the batch system resume it" in ask(loop, job, "resume")
        shell.send_signal(signal.SIGCONT)
        eventually(lambda: loop.look() or phases(job)[-1] == "run")
        settle(loop)
        shell.kill()


def test_where_no_process_of_it_is_the_batch_system_says_it(loop, paths, domains):
    job, alone = started(paths, nodes=("n1", "n2")), running_journal.Job(paths, "43.srv")
    loop.told |= {job.id, alone.id}
    settle(loop)
    assert (phases(job)[-1], phases(alone)[-1]) == ("suspended", "run")
    loop.told.clear()
    settle(loop)
    assert phases(job)[-1] == "run"


def test_what_fails_is_said_and_tried_again_and_leaves_none_alone_still(loop, paths, domains):
    job = started(paths)
    domains.fails = "suspend"
    assert ask(loop, job, "suspend") == "suspend: QEMU hangs"
    assert phases(job)[-1] == "run" and set(domains.did()) == {"resume"}
    domains.fails = ""
    eventually(lambda: loop.look() or phases(job)[-1] == "paused")
    settle(loop)


def test_a_job_that_hangs_holds_up_no_other(loop, paths, domains, monkeypatch, tmp_path):
    hangs, other = started(paths), running_journal.Job(paths, "43.srv")
    for each in (paths.job_state(other.key), paths.job_run(other.key)):
        each.mkdir(parents=True)
    never, told = os.pipe()
    before = hypervisor.suspend_domain
    mine = set(hangs.uuids)

    def suspend(uri, uuid):
        if uuid in mine:
            os.read(never, 1)
        before(uri, uuid)

    monkeypatch.setattr(hypervisor, "suspend_domain", suspend)
    (paths.job_state(hangs.key) / watcher.ASKED).touch()
    loop.look()
    assert ask(loop, other, "suspend") == ""
    assert (phases(hangs)[-1], phases(other)[-1]) == ("run", "paused")
    os.write(told, b"xx")
    settle(loop)
    assert phases(hangs)[-1] == "paused"


def test_a_job_that_starts_or_ends_is_left_alone(loop, paths, domains):
    job = started(paths)
    job.journal.phase("teardown")
    (paths.job_state(job.key) / watcher.ASKED).touch()
    settle(loop)
    assert loop.jobs == {} and domains.did() == []


def test_one_that_an_epilogue_has_is_not_touched(loop, paths, domains):
    job = started(paths)
    lock = paths.job_lock(job.id)
    lock.parent.mkdir(parents=True)
    with lock.open("w") as epilogue:
        fcntl.flock(epilogue, fcntl.LOCK_EX)
        assert "is held by another process" in ask(loop, job, "suspend")
    assert domains.did() == []


def test_the_batch_system_is_asked_by_a_process_of_its_own(tmp_path, monkeypatch):
    lives = {"1": Life.SUSPENDED, "2": Life.ALIVE}
    node = SimpleNamespace(alive=lambda ids: {each: lives[each] for each in ids})
    batch = SimpleNamespace(node=lambda _site: node)
    monkeypatch.setattr(watcher.service, "batch_system", lambda _config: (None, batch))
    asked = Batch(tmp_path, 0.0)
    eventually(lambda: asked.suspended(["1", "2"]) == {"1"})
    lives["2"] = Life.UNKNOWN  # it does not answer: what it said last counts
    for _ in range(3):
        assert asked.suspended(["1", "2"]) == {"1"}
    lives["1"] = lives["2"] = Life.ALIVE
    eventually(lambda: not asked.suspended(["1", "2"]))


def test_a_torn_journal_stops_nobody_else(loop, paths, domains):
    job = started(paths)
    (paths.journal / "9.srv.0.jsonl").write_text("{")
    assert ask(loop, job, "suspend") == ""
    with Journal.open(paths, job.journal.path) as journal:
        assert journal.header.job.id == job.id
