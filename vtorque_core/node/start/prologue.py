"""Root prologue: start a job's guests, and write the proof for the job shell.

Runs as root with the job's lock, once per job attempt and node. If the start fails, the prologue
releases its resources, writes the reason into the proof, and reports to the batch system.

:class:`Detach` says when the hook may return. If the start fails later, the job is requeued:

1. Release all resources, write the proof ``requeued``, and release the job's lock.
2. Wait until the job shell locks the proof.
3. Ask the batch system to requeue the job. If it refuses, write the proof ``host_fault``; the job
   shell then ends the job.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pwd
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from vtorque_core.api.batch_system import BatchJob, Detach, NodeAdapter, Outcome
from vtorque_core.api.kept_records import keep_facts
from vtorque_core.api.log_levels import parse
from vtorque_core.api.strategies import deferred
from vtorque_core.api.unprivileged_parser import helper_process
from vtorque_core.base.detach import run_detached
from vtorque_core.base.errors import HostFault, InUse, Refused, VtorqueError, printable
from vtorque_core.base.locks import Busy, job_lock
from vtorque_core.base.names import JobAttempt
from vtorque_core.config.plugins import Plugins
from vtorque_core.config.site_config import Site
from vtorque_core.node.shell import proof
from vtorque_core.node.shell.proof import Proof, State
from vtorque_core.node.start.start_order import start_job
from vtorque_core.plan.job_context import attempt_of, job_user, load_node
from vtorque_core.records import log
from vtorque_core.records.log import Log
from vtorque_core.records.reading import ARRIVES, JournalError, find, journals

# Proof states of failed starts. The job shell treats a job on a wrong node as a host fault.
_WORDS: Mapping[Outcome, State] = {
    Outcome.REFUSED: "refused",
    Outcome.HOST_FAULT: "host_fault",
    Outcome.NOT_HERE: "host_fault",
    Outcome.IN_USE: "host_fault",
}
_REQUEUE = 300.0  # seconds to wait for the job shell, which starts after the user's prologue
# Few starts need these.
_release_attempts = deferred("vtorque_core.node.start.cleanup:release_attempts")
_release_ended_jobs = deferred("vtorque_core.node.start.cleanup:release_ended_jobs")
_abort_start = deferred("vtorque_core.node.start.cleanup:abort_start")
_log = logging.getLogger(__name__)


def run_hook(config: Path, argv: Sequence[str], environ: Mapping[str, str]) -> int:
    return run(*load_node(config), argv, environ)


def run(
    adapter: NodeAdapter,
    site: Site,
    plugins: Plugins,
    argv: Sequence[str],
    environ: Mapping[str, str],
) -> int:
    """Start the guests of the hook's job, and return the hook's exit status.

    Never raises. A bug counts as a host fault; its traceback is in the job's log and syslog.
    """
    with helper_process():
        job = adapter.job(argv, environ)
        if job.blob is None:
            return adapter.finish(job, Outcome.NOT_OURS, "", hook_waits=True)
        if job.detach is Detach.NEVER:
            return _run(job, site, plugins, adapter, StartHook())

    pid = os.getpid()

    def finish_start(let_hook_return: Callable[[], None]) -> int:
        with helper_process():  # the hook's own helper ends with it
            hook = StartHook(let_hook_return, 0 if job.detach is Detach.AT_ONCE else pid)
            return _run(job, site, plugins, adapter, hook)

    code = run_detached(finish_start)
    return 0 if job.detach is Detach.AT_ONCE else code


class StartHook:
    """The batch system's hook that runs this start.

    Args:
        let_return: makes the hook's process return 0 to the batch system. None if the start runs in
            the hook's own process.
        pid: the hook's process; 0 if the batch system ignores its exit status.
    """

    def __init__(self, let_return: Callable[[], None] | None = None, pid: int = 0) -> None:
        self._let_return, self._pid, self._own = let_return, pid, let_return is None

    @property
    def waits(self) -> bool:
        """True if the hook still runs and can report a failure by its exit status."""
        return self._own or self._pid == os.getppid()

    def let_return(self) -> None:
        """Let the hook return 0 now. Does nothing with Detach.NEVER."""
        if self._let_return is not None:
            self._let_return()
            self._let_return, self._pid = None, 0


def _run(job: BatchJob, site: Site, plugins: Plugins, adapter: NodeAdapter, hook: StartHook) -> int:
    failed: Proof | None = None
    try:
        with job_lock(site.paths, job.id), _log_to_job(job, site):
            if _is_arriving(job, site):  # a release would end that guest
                where = "a guest of this job has migrated to this node: its start is skipped"
                _log.warning(where)
                return adapter.finish(job, Outcome.NOT_OURS, where, hook_waits=hook.waits)
            outcome, reason, failed = _attempt(job, site, plugins, adapter, hook)
    except Busy as error:  # the job's epilogue or another prologue runs
        outcome, reason = Outcome.NOT_HERE, str(error)
    if reason:
        sys.stderr.write(f"vtorque: {printable(reason, 2000)}\n")
    if job.detach is Detach.AT_ONCE:
        hook.let_return()
    if failed is None or failed.state != "requeued":
        return adapter.finish(job, outcome, reason, hook_waits=hook.waits)
    return _requeue(job, outcome, failed, site, adapter)


def _requeue(
    job: BatchJob, outcome: Outcome, failed: Proof, site: Site, adapter: NodeAdapter
) -> int:
    """Requeue a job after the start hook has returned, or write the failure into the proof.

    Requeues only a job whose job shell runs: Torque and OpenPBS lose track of a requeued job
    without processes, and Torque's qrerun would requeue a job that has ended.
    """
    runs = proof.await_lock(site.paths, failed, _REQUEUE)
    if runs and adapter.finish(job, outcome, failed.reason, hook_waits=False):
        return 0
    with contextlib.suppress(Busy), job_lock(site.paths, job.id):  # Busy: the epilogue runs
        if proof.is_current(site.paths, failed):
            gid = pwd.getpwuid(failed.job.uid).pw_gid
            proof.write(site.paths, replace(failed, state=_WORDS[outcome]), gid)
    return 0


def _is_arriving(job: BatchJob, site: Site) -> bool:
    with contextlib.suppress(JournalError):
        mine = [s for s in find(site.paths, job.id) if s.header.job.attempt == job.attempt]
        return any(mark.name == ARRIVES for state in mine for mark in state.phases)
    return False


def _log_to_job(job: BatchJob, site: Site) -> contextlib.AbstractContextManager[object]:
    try:
        uid = pwd.getpwnam(job.owner).pw_uid
    except (KeyError, ValueError):  # the start reports it
        return contextlib.nullcontext()
    mine = JobAttempt(job.id, job.attempt, job.owner, uid, job.node)
    return log.open_log(Log(site.paths, mine, parse(site.log.level)))


def _attempt(
    job: BatchJob, site: Site, plugins: Plugins, adapter: NodeAdapter, hook: StartHook
) -> tuple[Outcome, str, Proof | None]:
    def reap_ended() -> None:
        _release_ended_jobs(job, site, plugins, adapter)

    detail: tuple[str, ...] = ()
    begun = time.monotonic()
    _log.info("job %s of %s, attempt %d", job.id, job.owner, job.attempt)
    try:
        if journals(site.paths, job.id):  # a prologue of this job was killed
            _release_attempts(job.id, site, plugins)
        proof.remove(site.paths, job.id)
        start_job(job, site, plugins, adapter, reap_ended, hook.let_return)
    except Refused as error:
        outcome, reason, detail = Outcome.REFUSED, str(error), error.detail
        _log.warning("refused: %s", reason)
    except Exception as error:
        known = isinstance(error, VtorqueError)
        if not known:
            log.log_defect(job.id)
        what = str(error) if known else f"{type(error).__name__}: {error}"
        blamed = getattr(error, "blames_node", True)
        outcome = Outcome.HOST_FAULT if blamed else Outcome.NOT_HERE
        if isinstance(error, InUse):
            outcome = Outcome.IN_USE
        reason = f"{job.node}: {what}"
        detail = error.detail if isinstance(error, HostFault) else ()
        _log.error("%s", reason, extra={"detail": detail})
    else:
        _log.info("the guests are ready after %.1f s", time.monotonic() - begun)
        return Outcome.READY, "", None
    requeue = outcome.may_run_elsewhere and not hook.waits
    state = "requeued" if requeue else _WORDS[outcome]
    try:
        user = job_user(job.owner, site)
        mine = attempt_of(job, user)
        logged = log.facts() | {"name": job.name, "known_as": job.known_as}
        keep_facts(site.paths, mine, outcome=_WORDS[outcome], reason=reason, **logged)
        deadline = time.monotonic() + 2 * _REQUEUE
        failed = Proof(mine, state, reason, deadline=deadline, detail=detail)
        _abort_start(job, site, plugins, user, failed)
    except Exception:  # the job shell then finds no proof, and runs nothing
        log.log_defect(job.id)
        return outcome, reason, None
    return outcome, reason, failed
