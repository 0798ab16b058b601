"""Starts that continue after their hook has returned: exit codes, requeues and proofs."""

import json
import os
import pwd
import signal
import threading
from types import SimpleNamespace

import pytest

from killed import kill_parent
from patience import LONG, eventually
from vtorque_core.api.batch_system import BatchJob, Detach, Outcome
from vtorque_core.api.job_files import File
from vtorque_core.base.errors import HostFault, Refused
from vtorque_core.base.names import JobAttempt, Paths
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.node.end import teardown
from vtorque_core.node.shell import proof
from vtorque_core.node.shell.proof import Proof
from vtorque_core.node.start import cleanup, prologue, start_order
from vtorque_core.records.journal import Journal
from vtorque_core.records.reading import JobHeader

ME = pwd.getpwuid(os.getuid()).pw_name if os.getuid() else "nobody"  # root runs no jobs
EXIT = 75  # the adapter's exit code for a job that it has requeued


class BatchServerDouble:
    """A double of a batch system: records each outcome, and requeues jobs or refuses to."""

    def __init__(self, top, detach, requeues):
        self.log, self.detach, self.requeues = top / "outcomes", detach, requeues

    def job(self, _argv, _environ):
        return BatchJob("7.srv", ME, "n1", ("n1",), b"", detach=self.detach)

    def finish(self, _job, outcome, reason, *, hook_waits):
        with self.log.open("a") as file:
            file.write(json.dumps([outcome.name, reason, hook_waits]) + "\n")
        return EXIT if self.requeues and outcome.may_run_elsewhere else 0

    def outcomes(self):
        lines = self.log.read_text().splitlines() if self.log.exists() else []
        return [tuple(json.loads(line)) for line in lines]


@pytest.fixture
def node(tmp_path, monkeypatch):
    """Return a prologue whose start fails, before or after it has placed the job."""
    paths = Paths(tmp_path / "state", tmp_path / "run")
    for directory in (paths.journal, paths.run / "locks"):
        directory.mkdir(parents=True)
    site = SimpleNamespace(
        paths=paths, batch=Site().batch, node=Site().node, log=Site().log, owner=os.getuid()
    )
    monkeypatch.setattr(cleanup, "abort_start", lambda *args: proof.write(paths, args[-1]))

    def run(error, *, placed, detach=Detach.PLACED, requeues=True, before=lambda: None):
        def start(job, _site, _plugins, _adapter, _reap, let_hook_return):
            before()
            if placed:
                let_hook_return()
            raise error

        monkeypatch.setattr(prologue, "start_job", start)
        server = BatchServerDouble(tmp_path, detach, requeues)
        return server, prologue.run(server, site, None, (), {})

    def found():
        path = paths.proof("7.srv")
        return Proof.decode(path.read_bytes()) if path.exists() else None

    server = BatchServerDouble(tmp_path, Detach.PLACED, requeues=True)
    return SimpleNamespace(run=run, paths=paths, proof=found, server=server)


class LockingJobShell(threading.Thread):
    """A double of the job shell: locks the proof when its state is ``requeued``."""

    def __init__(self, node):
        super().__init__()
        self.node = node

    def run(self):
        eventually(lambda: (told := self.node.proof()) and told.state == "requeued")
        eventually(lambda: proof.lock(self.node.paths, "7.srv"))


FAULT = HostFault("libvirtd does not answer")


def test_start_that_fails_before_placement_sets_the_hooks_exit_code(node):
    server, code = node.run(FAULT, placed=False)
    assert code == EXIT
    assert server.outcomes() == [("HOST_FAULT", f"n1: {FAULT}", True)]
    assert node.proof().state == "host_fault"


def test_start_that_fails_after_placement_is_requeued_by_its_job_shell(node):
    server, code = node.run(FAULT, placed=True)
    assert code == 0
    eventually(lambda: (told := node.proof()) and told.state == "requeued")
    assert server.outcomes() == []
    shell = LockingJobShell(node)
    shell.start()
    eventually(server.outcomes)
    shell.join()
    assert server.outcomes() == [("HOST_FAULT", f"n1: {FAULT}", False)]
    assert node.proof().state == "requeued"


@pytest.mark.parametrize("placed", [False, True])
def test_start_whose_hook_was_killed_is_requeued(node, placed):
    """Torque and OpenPBS run the job then, so the hook's exit code reports nothing."""
    hook = os.fork()
    if not hook:
        node.run(FAULT, placed=placed, before=kill_parent)
        os._exit(0)
    assert os.waitstatus_to_exitcode(os.waitpid(hook, 0)[1]) == -signal.SIGKILL
    LockingJobShell(node).start()
    eventually(node.server.outcomes)
    assert node.server.outcomes() == [("HOST_FAULT", f"n1: {FAULT}", False)]


def test_job_shell_reports_the_fault_when_the_server_refuses_a_requeue(node):
    """A job of ``qsub -r n`` ends with exit status 122, and its output has the reason."""
    LockingJobShell(node).start()
    server, code = node.run(FAULT, placed=True, requeues=False)
    assert code == 0
    eventually(lambda: (told := node.proof()) and told.state == "host_fault")
    assert node.proof().reason == f"n1: {FAULT}"
    assert len(server.outcomes()) == 1


def test_deleted_job_is_not_requeued(node):
    """Torque's qrerun would requeue a job that has ended."""
    server, code = node.run(FAULT, placed=True)
    eventually(lambda: (told := node.proof()) and told.state == "requeued")
    proof.remove(node.paths, "7.srv")  # as its epilogue does
    with prologue.job_lock(node.paths, "7.srv", LONG):
        assert (code, server.outcomes(), node.proof()) == (0, [], None)


@pytest.mark.parametrize("detach", [Detach.PLACED, Detach.AT_ONCE])
def test_refusal_of_a_detached_start_reaches_the_job_shell(node, detach):
    server, code = node.run(Refused("too large"), placed=False, detach=detach)
    assert code == 0
    eventually(server.outcomes)
    assert node.proof().state == "refused"


def test_hook_whose_exit_code_is_ignored_returns_0(node):
    LockingJobShell(node).start()
    server, code = node.run(FAULT, placed=False, detach=Detach.AT_ONCE)
    assert code == 0
    eventually(server.outcomes)
    assert server.outcomes() == [(Outcome.HOST_FAULT.name, f"n1: {FAULT}", False)]


def test_failed_start_leaves_no_moment_without_a_proof(tmp_path, monkeypatch):
    """A job shell that finds no proof ends the job with 120, before root can requeue it."""
    paths = Paths(tmp_path / "state", tmp_path / "run")
    for directory in (paths.journal, paths.run / "proof", paths.run / "locks"):
        directory.mkdir(parents=True)
    site = SimpleNamespace(paths=paths, batch=Site().batch, node=Site().node)
    mine, user = JobAttempt("7.srv", 0, ME, 1234), SimpleNamespace(gid=os.getgid())
    starting = Proof(mine, "starting")
    with Journal.start(paths, JobHeader(mine, "acme")) as journal:
        journal.acquire(start_order.proof_file(starting, user, site), plugin="core", phase="plan")
        journal.acquire(File(str(tmp_path / "of the job")), plugin="core", phase="boot")
    monkeypatch.setattr(File, "release", released := ReleaseSpy(paths, File.release))
    failed = Proof(mine, "requeued", "libvirtd does not answer")
    cleanup.abort_start(BatchJob("7.srv", ME, "n1", ("n1",), b""), site, Plugins(), user, failed)
    assert proof.is_current(paths, failed)
    assert released == [str(tmp_path / "of the job")]
    teardown.release_job(paths, "7.srv", plugins_for=lambda _: Plugins())
    assert not paths.proof("7.srv").exists() and not list(paths.journal.iterdir())


class ReleaseSpy(list):
    """A double of a release: records each path, and checks that the job has a proof."""

    def __init__(self, paths, release):
        super().__init__()
        self.paths, self.releases = paths, release

    def __get__(self, resource, _owner):
        def release():
            assert self.paths.proof("7.srv").exists()
            self.append(resource.path)
            self.releases(resource)

        return release
